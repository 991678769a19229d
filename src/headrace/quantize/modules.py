"""The same schemes for any torch model: `QuantizedLinear`, and `quantize_model`, which puts it in nn.Linear's place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.formats.checkpoint import IntegerWeight
from headrace.ops.reference import integer_linear
from headrace.quantize.rounding import round_to_floats, round_to_nearest
from headrace.quantize.schemes import INT8, Scheme


class QuantizedLinear(nn.Module):
    """nn.Linear with its weight coded: by default in INT8, symmetric, with scale = max|row| / 127 for each row.

    What is stored are buffers: `codes` `[out, in]`, `scales` float32 `[out, groups]`, for an asymmetric scheme
    `minimums` like them (value = scale * code + minimum), and the bias. They are zero until `quantize` fills them.
    """

    bias: Tensor | None
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    def __init__(self, in_features: int, out_features: int, scheme: Scheme = INT8, *, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.quantize(torch.zeros(out_features, in_features))

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: Scheme = INT8, *, search: bool = False) -> "QuantizedLinear":
        module = cls(linear.in_features, linear.out_features, scheme, bias=linear.bias is not None)
        module.quantize(linear.weight, search=search)
        if linear.bias is not None:
            module.bias = linear.bias.detach().clone()
        return module.train(linear.training)

    @torch.no_grad()
    def quantize(self, weight: Tensor, *, search: bool = False) -> None:
        """Takes a weight `[out, in]`. search: choose scales by the least squared error.

        Raises ModelError for one that holds NaN or infinity.
        """
        if weight.shape != (self.out_features, self.in_features):
            raise ConfigError(
                f"the weight must be {[self.out_features, self.in_features]}, is {list(weight.shape)} (out x in)"
            )
        if self.scheme.format == "int":
            coded = round_to_nearest(weight, self.scheme, search=search)
            codes, scales, minimums = coded.codes, coded.scales, coded.minimums
        else:
            floats = round_to_floats(weight, self.scheme, search=search)
            codes, scales, minimums = floats.data, floats.scales, None
        for name, value in (("codes", codes), ("scales", scales), ("minimums", minimums)):
            self.register_buffer(name, None if value is None else value.to(weight.device))

    def coded(self) -> IntegerWeight:
        """The weight in whole numbers, for a scheme of these."""
        size = self.scheme.columns_per_scale(self.in_features)
        return IntegerWeight(self.codes, self.scheme.bits, size, self.scales, self.minimums)

    def weight(self) -> Tensor:
        """The weight's values, float32 `[out, in]`."""
        return self.coded().dequantize() if self.scheme.format == "int" else self.codes.float() * self.scales

    def forward(self, x: Tensor) -> Tensor:
        """x: `[..., in]`. Returns `[..., out]` in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.scheme.activation_bits is None:
            return F.linear(x, self.weight().to(x.dtype), bias)
        y = integer_linear(x.reshape(-1, self.in_features), self.coded()).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


def quantize_model(
    model: nn.Module, scheme: Scheme = INT8, *, search: bool = False, ignore: tuple[str, ...] = ("lm_head",)
) -> list[str]:
    """Replaces every nn.Linear within a torch module by a QuantizedLinear, in place.

    ignore: those with one of these names, whole or after a dot, stay as they are: an output layer is best left alone.
    A layer that stands in several places is replaced by one in all of them, and what only inherits from nn.Linear
    stays, since it may do something else.
    Returns the names of the layers that were replaced. Raises ConfigError if there was none, or if `model` itself is
    an nn.Linear, which has nothing to be replaced in; ModelError for weights with NaN or infinity.
    """
    if type(model) is nn.Linear:
        raise ConfigError("the model is itself a linear layer: use QuantizedLinear.from_linear(model, scheme)")
    replaced: list[str] = []
    made: dict[int, QuantizedLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        ignored = any(name == end or name.endswith("." + end) for end in ignore)
        if type(module) is not nn.Linear or ignored:
            continue
        if id(module) not in made:
            made[id(module)] = QuantizedLinear.from_linear(module, scheme, search=search)
        model.set_submodule(name, made[id(module)])
        replaced.append(name)
    if not replaced:
        raise ConfigError("the model has no nn.Linear to quantize")
    return replaced
