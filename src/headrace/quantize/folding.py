"""Moving a scale from a matrix's inputs into what makes them, which leaves the network as it is before rounding.

x @ Wᵀ = (x / s) @ (W * s)ᵀ for any s > 0 on each input. What gives x, the preceding norm or matrix, takes the division:
the norm for query, key and value and for gate and up; the rows of the value matrix for the output projection, where the
query heads of a group share one value head and so must share its scale; the rows of up for down, since the gate only
multiplies what up gives.
"""

import torch
from torch import Tensor

from headrace.formats.hf_writer import dense_dtype
from headrace.models.config import DecoderConfig
from headrace.quantize.layer_run import STAGES, Overlay


class Folding:
    """The folds of one layer; `weights` takes the changed tensors."""

    def __init__(self, weights: Overlay, config: DecoderConfig, layer: int) -> None:
        self.weights, self.config, self.prefix = weights, config, f"model.layers.{layer}"

    def matrices(self, stage: int) -> list[str]:
        return [f"{self.prefix}.{name}.weight" for name in STAGES[stage]]

    def joined(self, stage: int) -> Tensor:
        """The stage's matrices, one below the other: `[sum of out, in]`."""
        return torch.cat([self.weights.values(name) for name in self.matrices(stage)])

    def shared(self, stage: int, per_input: Tensor) -> Tensor:
        """A figure of each input `[in]`, made equal for inputs that must have the same scale: their mean."""
        return self._by_value_head(per_input).mean(1).flatten() if stage == 1 else per_input

    def spread(self, stage: int, scales: Tensor) -> Tensor:
        """Scales as `shared` has them, for each input of the stage: `[in]`."""
        if stage != 1:
            return scales
        c = self.config
        return scales.view(c.num_kv_heads, 1, c.head_dim).expand(-1, c.num_heads // c.num_kv_heads, -1).flatten()

    def fold(self, stage: int, scales: Tensor) -> Tensor:
        """Multiplies the columns of a stage's matrices by scales, as `shared` has them, and divides what feeds them.

        Returns the scales that were used, for each input: a norm's weights are stored in few bits, so scales are
        changed a little there for the quotient to be exact.
        """
        if stage in (0, 2):
            scales = self._divide_norm(stage, scales)
        else:
            source = f"{self.prefix}.{'self_attn.v_proj' if stage == 1 else 'mlp.up_proj'}"
            has_bias = self.config.qkv_bias if stage == 1 else self.config.mlp_bias
            self.weights.replace(f"{source}.weight", self.weights.values(f"{source}.weight") / scales[:, None])
            if has_bias:
                self.weights.replace(f"{source}.bias", self.weights.values(f"{source}.bias") / scales)
        each = self.spread(stage, scales)
        for name in self.matrices(stage):
            self.weights.replace(name, self.weights.values(name) * each)
        return each

    def _divide_norm(self, stage: int, scales: Tensor) -> Tensor:
        before_mlp = "pre_feedforward" if self.config.sandwich_norms else "post_attention"
        name = f"{self.prefix}.{'input' if stage == 0 else before_mlp}_layernorm.weight"
        stored = self.weights.read(name)
        old = stored.dequantize() + self.config.norm_offset
        dtype = dense_dtype(stored)
        new = (old / scales - self.config.norm_offset).to(dtype).float() + self.config.norm_offset
        # Where a norm's weight is zero, or became it, the input is zero whatever its scale.
        usable = (old != 0) & (new != 0) & torch.isfinite(new)
        new = torch.where(usable, new, old)
        self.weights.replace(name, (new - self.config.norm_offset).to(dtype))
        return torch.where(usable, old / new, torch.ones_like(old))

    def _by_value_head(self, per_input: Tensor) -> Tensor:
        c = self.config
        return per_input.view(c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
