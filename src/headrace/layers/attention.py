"""Multi-head attention over the paged cache."""

from torch import Tensor

from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.ops.reference import KVCache, Ops, RaggedBatch


class Attention:
    """Projects, turns, stores and attends.

    qkv: one matrix with the rows of query, key and value in this order.
    q_norm, k_norm: norms over each head of query and key, for families that have them.
    scale, window, softcap: as `Ops.attention` has them.
    """

    def __init__(
        self,
        ops: Ops,
        qkv: Linear,
        output: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.ops, self.qkv, self.output = ops, qkv, output
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_norm, self.k_norm = q_norm, k_norm
        self.scale, self.window, self.softcap = scale, window, softcap

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: RaggedBatch, cache: KVCache) -> Tensor:
        """x: `[T, hidden]`; angles: cosines and sines `[T, R/2]` of the tokens' positions. Returns `[T, hidden]`."""
        return self.output(self.mix(x, angles, batch, cache))

    def mix(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: RaggedBatch, cache: KVCache) -> Tensor:
        """What the output projection is given: `[T, heads * head_dim]`."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.ops.rotary(query, *angles), self.ops.rotary(key, *angles)
        self.ops.store_kv(key, value, cache, batch.slots)
        mixed = self.ops.attention(query, cache, batch, scale=self.scale, window=self.window, softcap=self.softcap)
        return mixed.flatten(1)
