"""The ops: the narrow waist between the network and the machine, in plain torch.

`Ops` is two things at once: the contract (what each op means, in its docstring) and the truth (what each op computes,
in its body). A faster backend subclasses it and overrides the ops it does better, one at a time; it is right when it
agrees with this class on random and on adversarial inputs. Everything above calls methods of an `Ops` and never asks
which one it has.

Symbols: T tokens of a step, B sequences of a step, H query heads, K key/value heads, D head size, V vocabulary.
Unless said otherwise activations are in the model's dtype, and every op computes in float32 inside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.formats.checkpoint import Weight
from headrace.ops import sample as sampling

# The most attention scores held at once (64 MB in float32): longer prompts are attended in tiles of their queries.
MAX_SCORES = 1 << 24


@dataclass(slots=True)
class Matrix:
    """A weight ready for `linear` and `embedding`; what `data` holds is the backend's own affair."""

    shape: tuple[int, int]
    data: Tensor


@dataclass(slots=True)
class KVCache:
    """Keys and values of one layer in blocks; how they lie inside is the backend's own affair."""

    block_size: int
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class RaggedBatch:
    """How the T tokens of a step belong to its B sequences.

    query_lens: tokens of each sequence in this step, in order; they add up to T.
    context_lens: tokens of each sequence in the cache once this step's are stored, so at least its query_len.
    positions: int64 `[T]`, the position of each token in its sequence.
    slots: int64 `[T]`, where each token's key and value go: block number x block size + place in the block.
    block_tables: int64 `[B, blocks]`, the blocks of each sequence in order, padded with any valid block number.
    """

    query_lens: list[int]
    context_lens: list[int]
    positions: Tensor
    slots: Tensor
    block_tables: Tensor


class Ops:
    """The reference backend."""

    name = "reference"

    # Weights and memory

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype) -> Matrix:
        """Makes weights `[out_i, in]` into one matrix `[sum of out_i, in]` in the form that this backend computes with.

        Matrices that see the same input (query, key and value; gate and up) are joined so that they take one product.
        dtype: that of the activations it will meet.
        """
        dense = [w.dequantize(dtype) for w in weights]
        data = dense[0] if len(dense) == 1 else torch.cat(dense)
        return Matrix((data.shape[0], data.shape[1]), data)

    def kv_cache(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
        """Room for the keys and values of `num_blocks * block_size` tokens of one layer."""
        # Heads outermost, so that gathering blocks yields each head's keys as one matrix without another copy. The
        # memory starts as zeros because attention multiplies padding by zero weights, and 0 x NaN is NaN; numpy's
        # zeros, unlike torch's, take no real memory before they are written.
        shape = (kv_heads, num_blocks, block_size, head_dim)
        size = math.prod(shape) * dtype.itemsize
        keys, values = (torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape) for _ in range(2))
        return KVCache(block_size, keys, values)

    # The network

    def embedding(self, ids: Tensor, table: Matrix, scale: float = 1.0) -> Tensor:
        """Rows of the table `[V, hidden]` times `scale`. ids: int64 `[T]`. Returns `[T, hidden]`."""
        rows = F.embedding(ids, table.data)
        # The factor is rounded to the model's dtype first, as Gemma was trained.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

        x: `[..., n]`; weight: float32 `[n]`.
        """
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """x @ weightᵀ + bias. x: `[T, in]`; bias: `[out]` in x's dtype. Returns `[T, out]`."""
        return F.linear(x, weight.data, bias)

    def rotary_angles(self, positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Cosines and sines of position x frequency, each times `scale` (YaRN's attention factor).

        positions: int64 `[T]`; inv_freq: float32 `[R/2]`, radians per position. Returns two float32 `[T, R/2]`.
        """
        angles = positions.float()[:, None] * inv_freq
        return angles.cos() * scale, angles.sin() * scale

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turns each pair (x[i], x[i + R/2]) of the first R entries of a head by its angle (Su et al. 2021).

        The pairing of halves is Hugging Face's (GPT-NeoX's). Entries past R stay as they are (partial rotary).
        x: `[T, heads, D]`; cos, sin: float32 `[T, R/2]`. Returns `[T, heads, D]`.
        """
        half = cos.shape[-1]
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., 2 * half :]], -1)

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Writes each token's key and value to its slot of the cache. key, value: `[T, K, D]`; slots: int64 `[T]`."""
        for new, stored in ((key, cache.keys), (value, cache.values)):
            stored.flatten(1, 2)[:, slots] = new.transpose(0, 1).to(stored.dtype)

    def attention(
        self,
        query: Tensor,
        cache: KVCache,
        batch: RaggedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every token to its own sequence's keys in the cache (Kwon et al. 2023 for the paging).

        weights = softmax(scale * q·k), over the keys at positions `p - window + 1 ... p` for a query at position p.
        Query head h reads key/value head h // (H / K) (grouped queries, Ainslie et al. 2023).

        query: `[T, H, D]`; this step's keys and values are stored already.
        window: how many keys a query sees, itself counted; None for all.
        softcap: scores become softcap * tanh(score / softcap) before the softmax (Gemma 2).
        sinks: float32 `[H]`, one more score per head that takes its share of the softmax and has no value (gpt-oss).
        Returns `[T, H, D]`.
        """
        out = torch.empty_like(query)
        starts = [0]
        for n in batch.query_lens:
            starts.append(starts[-1] + n)
        # Sequences with one token share a padded product; each longer piece has its own.
        singles = [i for i, n in enumerate(batch.query_lens) if n == 1]
        groups = [singles] if singles else []
        groups += [[i] for i, n in enumerate(batch.query_lens) if n > 1]
        for group in groups:
            n = batch.query_lens[group[0]]
            context = max(batch.context_lens[i] for i in group)
            blocks = -(-context // cache.block_size)
            tables = batch.block_tables[group, :blocks]
            keys, values = (
                c[:, tables].flatten(2, 3)[:, :, :context].float() for c in (cache.keys, cache.values)
            )  # [K, group, context, D]
            tokens = torch.tensor([t for i in group for t in range(starts[i], starts[i] + n)])
            queries = query[tokens].view(len(group), n, -1, query.shape[-1])
            positions = batch.positions[tokens].view(len(group), n)
            tile = max(1, MAX_SCORES // (query.shape[1] * context * len(group)))
            parts = [
                self._attend(q, keys, values, p, scale, window, softcap, sinks)
                for q, p in zip(queries.split(tile, 1), positions.split(tile, 1), strict=True)
            ]
            out[tokens] = torch.cat(parts, 1).flatten(0, 1).to(out.dtype)
        return out

    @staticmethod
    def _attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """n queries in each of b sequences. query: `[b, n, H, D]`; keys: `[K, b, s, D]`; positions: `[b, n]`."""
        b, n, heads, dim = query.shape
        kv_heads, _, s, _ = keys.shape
        grouped = (query.float() * scale).view(b, n, kv_heads, -1, dim).permute(2, 0, 3, 1, 4)  # [K, b, H/K, n, D]
        scores = (grouped.reshape(kv_heads, b, -1, dim) @ keys.transpose(-1, -2)).view(kv_heads, b, -1, n, s)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = positions[..., None] - torch.arange(s)  # [b, n, s], from a query back to a key
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden[None, :, None], -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(kv_heads, 1, -1, 1, 1).expand(-1, b, -1, n, -1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = weights.reshape(kv_heads, b, -1, s) @ values  # [K, b, H/K * n, D]
        return mixed.view(kv_heads, b, -1, n, dim).permute(1, 3, 0, 2, 4).reshape(b, n, heads, dim)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(first half) * second half of the last dimension (Shazeer 2020).

        x: `[T, 2n]`; activation: "silu" or "gelu_tanh" (the tanh form of GELU). Returns `[T, n]`.
        """
        gate, up = x.chunk(2, -1)
        if activation == "silu":
            return F.silu(gate) * up
        if activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        raise ValueError(f"unknown activation {activation!r}")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, of the same shape."""
        return x + y

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of x. x: `[T, n]`; rows: int64 `[N]`. Returns `[N, n]`."""
        return x.index_select(0, rows)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), which keeps logits within ±cap (Gemma 2)."""
        return cap * torch.tanh(x / cap)

    # The end of a step

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """Draws one token per row; see `headrace.ops.sample.sample`. logits: float32 `[N, V]`. Returns int64 `[N]`."""
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the given tokens and of the `top` best; see `headrace.ops.sample.logprobs`."""
        return sampling.logprobs(logits, token_ids, top)
