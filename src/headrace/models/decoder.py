"""The network: a decoder-only transformer, read top to bottom."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.layers.attention import Attention
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.models.config import DecoderConfig
from headrace.ops.reference import KVCache, Matrix, Ops, RaggedBatch


@dataclass
class DecoderLayer:
    """Attention, then feed-forward, each added to what came in. The `after` norms are None but for sandwich norms."""

    attention_norm: RMSNorm
    attention: Attention
    after_attention: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    after_mlp: RMSNorm | None
    rope: int  # which of the decoder's rotary embeddings turns this layer's heads


class Decoder:
    """From token ids to logits.

    ropes: the rotary embeddings that the layers choose from, each as float32 `[R/2]` inverse frequencies and a factor.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        embedding: Matrix,
        ropes: list[tuple[Tensor, float]],
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config, self.ops = config, ops
        self.embedding, self.ropes, self.layers, self.norm, self.head = embedding, ropes, layers, norm, head

    def forward(self, ids: Tensor, batches: list[RaggedBatch], caches: list[KVCache], rows: Tensor) -> Tensor:
        """Runs one step.

        ids: int64 `[T]`; batches, caches: one per layer. The batches differ in their blocks only; layers for which the
            blocks are the same share one. The caches take this step's keys and values.
        rows: int64 `[N]`, the tokens whose successors are asked for.
        Returns logits: float32 `[N, vocab_size]`.
        """
        ops = self.ops
        x = ops.embedding(ids, self.embedding, self.config.embedding_scale)
        angles = [ops.rotary_angles(batches[0].positions, inv_freq, scale) for inv_freq, scale in self.ropes]
        for layer, batch, cache in zip(self.layers, batches, caches, strict=True):
            mixed = layer.attention(layer.attention_norm(x), angles[layer.rope], batch, cache)
            x = ops.add(x, _maybe(layer.after_attention, mixed))
            x = ops.add(x, _maybe(layer.after_mlp, layer.mlp(layer.mlp_norm(x))))
        logits = ops.to_float(self.head(self.norm(ops.take(x, rows))))
        cap = self.config.final_softcap
        return logits if cap is None else ops.softcap(logits, cap)


def _maybe(norm: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
