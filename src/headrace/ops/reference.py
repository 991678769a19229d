"""The ops: the narrow waist between the network and the machine, in plain torch.

`Ops` is two things at once: the contract (what each op means, in its docstring) and the truth (what each op computes,
in its body). A faster backend subclasses it and overrides the ops it does better, one at a time; it is right when it
agrees with this class on random and on adversarial inputs. Everything above calls methods of an `Ops` and never asks
which one it has.

Symbols: T tokens of a step, B sequences of a step, H query heads, K key/value heads, D head size, V vocabulary.
Unless said otherwise activations are in the model's dtype, and every op computes in float32 inside.
"""

import itertools
import math
import mmap
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.formats.checkpoint import IntegerWeight, Weight
from headrace.ops import sample as sampling

# The most attention scores held at once (64 MB in float32): longer prompts are attended in tiles of their queries.
MAX_SCORES = 1 << 24

# Sequences with one query are attended together, padded to the longest: with so much padding in all, in tokens, and no
# more than so many tokens in all. Less padding makes more products, which have a fixed cost; and what was gathered for
# one product had better stay in the processor's cache.
MAX_PADDING, MAX_GROUP = 256, 4096


# Of the scales of an int8 cache, and the largest there is.
KV_SCALE_DTYPE = torch.float16
MAX_KV_SCALE = 65504.0


@dataclass(slots=True)
class Matrix:
    """A weight ready for `linear`, or a table for `embedding`; what `data` holds is the backend's own affair.

    parts: where activations are rounded for some of the weights, all of them one below the other instead of `data`:
        those in whole numbers, the others dense.
    """

    shape: tuple[int, int]
    data: Any
    parts: list[IntegerWeight | Tensor] | None = None


@dataclass(slots=True)
class KVCache:
    """Keys and values of one layer in blocks; how they lie inside is the backend's own affair.

    key_scales, value_scales: those of an int8 cache; None otherwise.
    """

    block_size: int
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(slots=True)
class RaggedBatch:
    """How the T tokens of a step belong to its B sequences.

    query_lens: tokens of each sequence in this step, in order; they add up to T.
    context_lens: tokens of each sequence in the cache once this step's are stored, so at least its query_len.
    positions: int64 `[T]`, the position of each token in its sequence.
    slots: int64 `[T]`, where each token's key and value go: block number x block size + place in the block.
    block_tables: int64 `[B, blocks]`, the blocks of each sequence in order, padded with any valid block number.
    notes: what a backend works out of these once, and uses in every layer; whoever makes a batch leaves it empty.
    """

    query_lens: list[int]
    context_lens: list[int]
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    notes: dict[Hashable, Any] = field(default_factory=dict)


# A network: ids, the batch and the cache of each layer, and the rows to take, to logits; see `Decoder.forward`.
Forward = Callable[[Tensor, list[RaggedBatch], list[KVCache], Tensor], Tensor]


class Ops:
    """The reference backend."""

    name = "reference"
    device = "cpu"  # torch's name for where weights and cache lie

    @property
    def description(self) -> str:
        """How this backend computes, for people to read."""
        return self.name

    # Whether a token's results depend on its own sequence only, bit by bit: not on what else is in the step, on how
    # its prompt was cut into chunks, or on the number of threads. Here torch's products change with the number of rows.
    batch_invariant = False

    # Whether the ops share their work among threads of their own, and torch is better left with one.
    own_threads = False

    # Weights and memory

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype) -> Matrix:
        """Makes weights `[out_i, in]` into one matrix `[sum of out_i, in]` in the form that this backend computes with.

        Matrices that see the same input (query, key and value; gate and up) are joined so that they take one product.
        dtype: that of the activations it will meet.
        """
        if any(w.activation_bits for w in weights):
            rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
            parts = [w.integers() if w.activation_bits else w.dequantize(dtype) for w in weights]
            return Matrix((rows, columns), torch.empty(0, columns), [part for part in parts if part is not None])
        dense = [w.dequantize(dtype) for w in weights]
        data = dense[0] if len(dense) == 1 else torch.cat(dense)
        return Matrix((data.shape[0], data.shape[1]), data)

    def table(self, weight: Weight, dtype: torch.dtype) -> Matrix:
        """A matrix `[V, hidden]` whose rows `embedding` reads. `linear` takes it too: embeddings may be tied."""
        return Ops.matrix(self, [weight], dtype)

    def kv_cache(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
        """Room for the keys and values of `num_blocks * block_size` tokens of one layer.

        dtype: in which they are stored. int8 is a coding of the activations' own dtype, whichever that is: a whole
        number between -127 and 127 for each entry, and a float16 scale for each token and head; see `store_kv`.
        """
        # Heads outermost, so that gathering blocks yields each head's keys as one matrix without another copy.
        shape = (kv_heads, num_blocks, block_size, head_dim)
        cache = KVCache(block_size, _zeros(shape, dtype), _zeros(shape, dtype))
        if dtype == torch.int8:
            cache.key_scales, cache.value_scales = (_zeros(shape[:3], KV_SCALE_DTYPE) for _ in range(2))
        return cache

    def copy_blocks(self, source: KVCache, destination: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, with keys, values and all that belongs to them, from one cache to another or within one.

        pairs: (block of `source`, block of `destination`); no block is written twice. All are read before any is
        written, so that within one cache a block may be both read and written. The caches are of the same layer of a
        model, made with the same settings but for the number of blocks.
        """
        if not pairs:
            return
        read, written = torch.tensor(pairs).unbind(1)
        for old, new in (
            (source.keys, destination.keys),
            (source.values, destination.values),
            (source.key_scales, destination.key_scales),
            (source.value_scales, destination.value_scales),
        ):
            if old is not None and new is not None:
                new[:, written] = old[:, read]

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
        """x @ weightᵀ + bias. x: `[T, in]`; bias: `[out]` in x's dtype. Returns `[T, out]`.

        For a weight with `activation_bits` each token's activations are rounded first; see `integer_linear`.
        """
        if weight.parts is None:
            return F.linear(x, weight.data, bias)
        y = torch.cat(
            [integer_linear(x, p) if isinstance(p, IntegerWeight) else F.linear(x, p) for p in weight.parts], 1
        )
        return y if bias is None else y + bias

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
        """Writes each token's key and value to its slot of the cache. key, value: `[T, K, D]`; slots: int64 `[T]`.

        An int8 cache takes each head's D entries x as round(x / scale), halves to even, where the scale is the smallest
        float16 that is not below max|x| / 127, subnormal ones among them; it reads back as code * scale, which is at
        most scale / 2 away. Beyond the largest scale, 65504, entries are cut to ±127 * 65504. A head of zeros reads
        back as zeros. One with an infinity or a NaN reads back as NaN throughout: a fault upstream is not hidden.
        """
        for new, stored, scales in (
            (key, cache.keys, cache.key_scales),
            (value, cache.values, cache.value_scales),
        ):
            rows = new.transpose(0, 1)  # [K, T, D]
            if scales is not None:
                row_scales = _kv_scales(rows)
                scales.flatten(1, 2)[:, slots] = row_scales
                rows = _codes(rows, row_scales)
            stored.flatten(1, 2)[:, slots] = rows.to(stored.dtype)

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
        groups = batch.notes.get(window)
        if groups is None:
            groups = batch.notes[window] = _groups(batch, window, cache.block_size)
        parts = [self._attend(query, cache, group, scale, window, softcap, sinks) for group in groups]
        if len(groups) == 1:
            return parts[0]
        out = torch.empty_like(query)
        for group, part in zip(groups, parts, strict=True):
            out[group.tokens] = part
        return out

    @staticmethod
    def _attend(
        query: Tensor,
        cache: KVCache,
        group: "_Group",
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The attention of one group's tokens; as `attention`, for those alone."""
        (b, n), s = group.positions.shape, group.key_positions.shape[1]
        heads, dim = query.shape[1:]
        keys, values = group.gather(cache)  # [K, b, s, D]
        kv_heads = len(keys)
        queries = (query[group.tokens].float() * scale).view(b, n, kv_heads, -1, dim).permute(2, 0, 3, 1, 4)
        out = query.new_empty(b, n, heads, dim)
        tile = max(1, MAX_SCORES // (heads * s * b))
        for start in range(0, n, tile):
            q = queries[..., start : start + tile, :]  # [K, b, H/K, n, D]
            scores = (q.reshape(kv_heads, b, -1, dim) @ keys.transpose(-1, -2)).view(*q.shape[:-1], s)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            hidden = group.hidden(start, start + tile, window)
            if hidden is not None:
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            if sinks is not None:
                extra = sinks.float().view(kv_heads, 1, -1, 1, 1).expand(*scores.shape[:-1], 1)
                weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            mixed = weights.reshape(kv_heads, b, -1, s) @ values  # [K, b, H/K * n, D]
            out[:, start : start + tile] = mixed.view(q.shape).permute(1, 3, 0, 2, 4).flatten(2, 3)
        return out.flatten(0, 1)

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

    def to_float(self, x: Tensor) -> Tensor:
        """x in float32."""
        return x.float()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), which keeps logits within ±cap (Gemma 2). x: float32."""
        return cap * torch.tanh(x / cap)

    def replayed(self, forward: Forward, caches: list[KVCache], groups: Sequence[int], max_blocks: int) -> Forward:
        """The quickest way to run `forward` again and again with the same caches. Logits are valid until the next run.

        groups: by layer, which of the block tables it uses: layers of the same group get the same batch.
        max_blocks: the most blocks of a sequence.
        """
        return forward

    # The end of a step

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        xtc_threshold: Tensor | None = None,
    ) -> Tensor:
        """Draws one token per row; see `headrace.ops.sample.sample`. logits: float32 `[N, V]`. Returns int64 `[N]`."""
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform, xtc_threshold)

    def distribution(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        xtc_threshold: Tensor | None = None,
    ) -> Tensor:
        """From what `sample` draws; see `headrace.ops.sample.distribution`. Returns float64 `[N, V]`."""
        return sampling.distribution(logits, temperature, top_k, top_p, min_p, xtc_threshold)

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the given tokens and of the `top` best; see `headrace.ops.sample.logprobs`."""
        return sampling.logprobs(logits, token_ids, top)


# Whole numbers below 2^24 add up exactly in float32: so many products of an int8 and a uint8 do.
EXACT_COLUMNS = 512


def integer_linear(x: Tensor, weight: IntegerWeight) -> Tensor:
    """x @ weightᵀ in whole numbers, without a bias, both sides coded (W8A8, W4A8).

    Each row of x becomes int8 codes round(x / scale), halves to even, with a float32 scale of its own, max|x| / 127; a
    row with NaN or infinity gives NaN. For each group of columns the sum of code * code is exact, becomes a float32 and
    is multiplied by the weight's scale; where there are minimums, sum of x's codes * minimum is added. The groups are
    added in order, and the row's scale comes last.
    x: `[T, in]`. Returns `[T, out]` in x's dtype.
    """
    rows = x if weight.order is None else x[:, weight.order]
    row_scales = _exact_scales(rows)
    codes = _codes(rows, row_scales)
    y = torch.zeros(len(x), len(weight.codes))
    columns = weight.codes.shape[1]
    for group, start in enumerate(range(0, columns, weight.group_size)):
        end = min(start + weight.group_size, columns)
        exact = torch.zeros(y.shape, dtype=torch.float64)
        for first in range(start, end, EXACT_COLUMNS):
            part = slice(first, min(first + EXACT_COLUMNS, end))
            exact += codes[:, part].float() @ weight.codes[:, part].float().T
        y += exact.float() * weight.scales[:, group]
        if weight.minimums is not None:
            y += codes[:, start:end].sum(1, keepdim=True).float() * weight.minimums[:, group]
    return (y * row_scales[:, None]).to(x.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that, unlike torch's, take no real memory before they are written, and then in small pages.

    Large pages, as NumPy would ask for, are 2 MB each, and the first token writes to two for each head of each layer.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _exact_scales(x: Tensor) -> Tensor:
    """max|row| / 127 of rows x `[..., n]`, float32 `[...]`; NaN of a row with an infinity or a NaN."""
    scale = x.float().abs().amax(-1) / 127
    return torch.where(scale.isfinite(), scale, torch.nan)


def _kv_scales(x: Tensor) -> Tensor:
    """The scales of rows x in the cache, float16 `[...]`, as `Ops.store_kv` says."""
    exact = _exact_scales(x)
    nearest = exact.to(KV_SCALE_DTYPE)
    # The bits of positive floats are in order, so the next larger one is the next number.
    next_larger = (nearest.view(torch.int16) + 1).view(KV_SCALE_DTYPE)
    return torch.where(nearest.float() < exact, next_larger, nearest).clamp(max=MAX_KV_SCALE)


def _codes(x: Tensor, scales: Tensor) -> Tensor:
    """Rows x `[..., n]` over their scales `[...]` as the nearest int8; 0 where that is 0 / 0 or the scale is NaN."""
    return (x.float() / scales.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-127, 127).to(torch.int8)


@dataclass(slots=True)
class _Member:
    """A sequence in a group: its place in the batch, the first block that any of its queries sees, and the number of
    keys from there on."""

    index: int
    first_block: int
    num_keys: int


class _Group:
    """b sequences of a step with n tokens each, which share a product over s keys, padded to the longest of them.

    tokens: which of the step's tokens they are, sequence by sequence.
    positions: int64 `[b, n]`, of the tokens; key_positions: int64 `[b, s]`, of the keys.
    """

    def __init__(self, batch: RaggedBatch, members: list[_Member], starts: list[int], block_size: int) -> None:
        n, length = batch.query_lens[members[0].index], max(m.num_keys for m in members)
        tokens = [t for m in members for t in range(starts[m.index], starts[m.index] + n)]
        in_place = tokens == list(range(tokens[0], tokens[-1] + 1))
        self.tokens = slice(tokens[0], tokens[-1] + 1) if in_place else torch.tensor(tokens)
        self.positions = batch.positions[self.tokens].view(len(members), n)
        first = torch.tensor([m.first_block for m in members])[:, None]
        self.key_positions = first * block_size + torch.arange(length)
        tables = batch.block_tables[[m.index for m in members]]
        blocks = first + torch.arange(-(-length // block_size))
        self.tables = tables.gather(1, blocks.clamp(max=tables.shape[1] - 1))
        self.padded = [(i, m.num_keys) for i, m in enumerate(members) if m.num_keys < length]
        self._hidden: dict[tuple[int, int], Tensor | None] = {}

    def gather(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The keys and values that the sequences see: float32 `[K, b, s, D]` each.

        Padding holds anything; in the values anything but an infinity or NaN, which a weight of zero does not stop.
        """
        length = self.key_positions.shape[1]
        keys = _read(cache.keys, cache.key_scales, self.tables)[:, :, :length]
        values = _read(cache.values, cache.value_scales, self.tables)[:, :, :length]
        for i, num_keys in self.padded:
            values[:, i, num_keys:] = 0
        return keys, values

    def hidden(self, start: int, end: int, window: int | None) -> Tensor | None:
        """Which keys the tokens from `start` to `end` of each sequence do not see: bool `[b, n, s]`; None for none."""
        if (start, end) not in self._hidden:
            distance = self.positions[:, start:end, None] - self.key_positions[:, None]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._hidden[start, end] = hidden if hidden.any() else None
        return self._hidden[start, end]


def _groups(batch: RaggedBatch, window: int | None, block_size: int) -> list[_Group]:
    """The sequences of a step in groups.

    Those with one token share a group with others of nearly the same number of keys; each longer piece has its own.
    """
    starts = [0, *itertools.accumulate(batch.query_lens)]
    singles: list[_Member] = []
    groups: list[list[_Member]] = []
    for index, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        first_block = 0 if window is None else max(0, context - n - window + 1) // block_size
        member = _Member(index, first_block, context - first_block * block_size)
        if n == 1:
            singles.append(member)
        else:
            groups.append([member])
    singles.sort(key=lambda m: -m.num_keys)
    longest = padding = 0
    for m in singles:
        padding += longest - m.num_keys
        if longest == 0 or padding > MAX_PADDING or (len(groups[-1]) + 1) * longest > MAX_GROUP:
            groups.append([])
            longest, padding = m.num_keys, 0
        groups[-1].append(m)
    return [_Group(batch, sorted(members, key=lambda m: m.index), starts, block_size) for members in groups]


def _read(stored: Tensor, scales: Tensor | None, tables: Tensor) -> Tensor:
    """What stands in blocks, as float32 `[K, b, tokens, D]`, a copy. tables: int64 `[b, blocks]`."""
    rows = stored[:, tables].flatten(2, 3).float()
    return rows if scales is None else rows.mul_(scales[:, tables].flatten(2, 3)[..., None].float())
