"""What the decoder has to know of a model; a family's config is translated into this."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: its base, how many entries of a head it turns, and `rope_scaling` as Hugging Face has it."""

    theta: float
    dim: int
    scaling: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder-only transformer and the switches in which the families differ.

    windows: per layer, how many keys a query sees; None for all.
    ropes: the model's rotary embeddings; layer_ropes: per layer, which of them turns its heads.
    qkv_bias, output_bias, mlp_bias: which projections have one.
    qk_norm: norms over each head of query and key.
    sandwich_norms: norms after attention and feed-forward too, before they are added.
    norm_offset: added to stored norm weights (Gemma stores the difference from one).
    embedding_scale: factor on embeddings.
    attention_scale: factor on attention scores.
    attention_softcap, final_softcap: tanh caps on scores and logits.
    tied: the output matrix is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None

    def kv_bytes_per_token(
        self, bytes_per_value: int, bytes_per_scale: int = 0, *, num_layers: int | None = None
    ) -> int:
        """Memory that one token takes in the KV cache of so many layers; None for all.

        bytes_per_scale: where values are coded, of the scale that each head's key and each head's value has.
        """
        layers = self.num_layers if num_layers is None else num_layers
        return 2 * layers * self.num_kv_heads * (self.head_dim * bytes_per_value + bytes_per_scale)
