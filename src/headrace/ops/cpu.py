"""The CPU backend: the network's ops in the native kernels (csrc/); what is left is the reference's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.formats.checkpoint import Weight
from headrace.ops.reference import Forward, KVCache, Matrix, Ops, RaggedBatch

try:
    from headrace import _native
except ImportError as error:
    raise HeadraceError(
        f"the native kernels cannot be loaded ({error}): install Headrace again with `pip install .`, "
        "or run with backend='reference'"
    ) from error
else:
    from headrace.ops.packing import BLOCKS, HALVES, LANES, Packed, is_packable, pack
    from headrace.ops.replay import CHOSEN, MAX_TOKENS, Recording, Replay

# How the kernels number the dtypes (csrc/kernels.h).
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 512  # as csrc/attention.h has it


@dataclass(slots=True, kw_only=True)
class NativeMatrix(Matrix):
    """data: the pieces, which own the memory; handle: what the kernels know of them; dtype: of activations."""

    handle: _native.Matrix
    dtype: torch.dtype


@dataclass(slots=True)
class NativeKVCache(KVCache):
    """Each head's and block's keys are `[block_size / chunk, D, chunk]`, and its values `[block_size, D]`."""

    handle: _native.Cache | None = None


class CpuOps(Ops):
    """Ops on the CPU's own vector instructions. The kernels in csrc/ give the same bits on every instruction set.

    activation_precision: "auto" multiplies weights that are stored as whole numbers by activations of eight bits, with
        a scale for every 16 inputs, and "int8" with one for every 32; "float32" takes the values of both as they are.
    threads: that share an op's work; None takes as many as torch does.
    """

    name = "cpu"
    batch_invariant = True
    own_threads = True

    def __init__(self, activation_precision: str = "auto", threads: int | None = None) -> None:
        try:
            self.isa, self.available_isas = _native.isa(), _native.available_isas()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.codes = activation_precision != "float32"
        self.sharing = BLOCKS if activation_precision == "int8" else HALVES
        _native.set_threads(threads or torch.get_num_threads())
        self._recording: Recording | None = None
        self._angles: list[tuple[Tensor, float, Tensor, Tensor]] = []

    @property
    def description(self) -> str:
        activations = f"of 8 bits, a scale for {16 if self.sharing == HALVES else 32}" if self.codes else "in floats"
        return f"{self.name} ({self.isa}; activations {activations})"

    # Weights and memory

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype) -> Matrix:
        """As the reference, in panels of sixteen outputs; whole numbers stay what they are.

        It is the reference's own matrix where activations are to be rounded for groups that no kernel takes.
        """
        if any(w.activation_bits is not None and not is_packable(w.integers()) for w in weights):
            return super().matrix(weights, dtype)
        return _native_matrix(pack(weights, dtype, codes=self.codes, sharing=self.sharing), dtype)

    def table(self, weight: Weight, dtype: torch.dtype) -> Matrix:
        return self.matrix([weight], dtype)

    def kv_cache(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"the native attention takes heads of at most {MAX_HEAD_DIM} entries, not {head_dim}")
        cache = Ops.kv_cache(self, num_blocks, block_size, kv_heads, head_dim, dtype)
        key_scales, value_scales = cache.key_scales, cache.value_scales
        handle = _native.Cache(
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            0 if key_scales is None else key_scales.data_ptr(),
            0 if value_scales is None else value_scales.data_ptr(),
            DTYPES[dtype],
            0 if key_scales is None else DTYPES[key_scales.dtype],
            kv_heads,
            head_dim,
            block_size,
            math.gcd(block_size, LANES),
            num_blocks,
        )
        return NativeKVCache(block_size, cache.keys, cache.values, key_scales, value_scales, handle)

    # The network

    def embedding(self, ids: Tensor, table: Matrix, scale: float = 1.0) -> Tensor:
        assert isinstance(table, NativeMatrix)
        rows = self._empty((len(ids), table.shape[1]), table.dtype)
        # The factor is rounded to the model's dtype first, as Gemma was trained.
        factor = torch.tensor(scale, dtype=table.dtype).item()
        self._do(_native.embedding, table.handle, ids.contiguous(), rows, DTYPES[table.dtype], factor, size=len(ids))
        return rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden = x.shape[-1]
        weight = weight.contiguous()
        if x.dtype not in ACTIVATIONS or weight.dtype != torch.float32 or weight.numel() != hidden:
            raise ValueError(
                f"rms_norm takes float32, bfloat16 or float16 and a float32 weight of size {hidden}, "
                f"not {x.dtype} and {weight.dtype} of size {weight.numel()}"
            )
        rows = x
        if rows.dim() not in (2, 3):
            rows = rows.reshape(-1, hidden)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        tokens, heads, head_stride = (len(rows), 1, 0) if rows.dim() == 2 else (*rows.shape[:2], rows.stride(1))
        y = self._empty(x.shape, x.dtype)
        self._do(
            _native.rms_norm, rows, weight, y, _number(x.dtype), heads, hidden, rows.stride(0), head_stride, eps,
            self._is_chosen(rows), size=tokens,
        )  # fmt: skip
        return y

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, NativeMatrix):
            if self._recording is not None:
                raise NotRecordableError
            return super().linear(x, weight, bias)
        outputs, inputs = weight.shape
        if x.shape[1] != inputs or (bias is not None and (bias.dtype != x.dtype or len(bias) != outputs)):
            raise ValueError(f"linear of {list(x.shape)} {x.dtype} by {[outputs, inputs]} and its bias does not fit")
        if x.stride(1) != 1:
            x = x.contiguous()
        y = self._empty((len(x), outputs), x.dtype)
        self._do(
            _native.linear, weight.handle, x, x.stride(0), None if bias is None else bias.contiguous(), y,
            _number(x.dtype), self._is_chosen(x), size=len(x),
        )  # fmt: skip
        return y

    def rotary_angles(self, positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """As the reference computes them; a recorded step gets them as one of its inputs."""
        if self._recording is None:
            return super().rotary_angles(positions, inv_freq, scale)
        cosines, sines = (torch.zeros(MAX_TOKENS, len(inv_freq)) for _ in range(2))
        self._angles.append((inv_freq, scale, cosines, sines))
        return cosines[: len(positions)], sines[: len(positions)]

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, dim = x.shape
        if x.stride(2) != 1:
            x = x.contiguous()
        y = self._empty(x.shape, x.dtype)
        self._do(
            _native.rotary, x, y, cos.contiguous(), sin.contiguous(), _number(x.dtype), heads, dim, cos.shape[1],
            x.stride(0), x.stride(1), size=tokens,
        )  # fmt: skip
        return y

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
        key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
        self._do(
            _native.store_kv, _cache_handle(cache), key, value, _number(key.dtype),
            key.stride(0), value.stride(0), key.stride(1), value.stride(1), slots.contiguous(), size=len(key),
        )  # fmt: skip

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
        _, heads, dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != dim:
            query = query.contiguous()
        lens = batch.notes.get("lens")
        if lens is None:
            lens = batch.notes["lens"] = torch.tensor([batch.query_lens, batch.context_lens])
        out = self._empty(query.shape, query.dtype)
        tables = batch.block_tables
        self._do(
            _native.attention, _cache_handle(cache), query, out, _number(query.dtype), heads, query.stride(0),
            tables, tables.stride(0), scale, softcap or 0.0, window or 0,
            None if sinks is None else sinks.float().contiguous(), lens[0], lens[1],
            size=len(query), sequences=len(batch.query_lens),
        )  # fmt: skip
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"unknown activation {activation!r}")
        n = x.shape[1] // 2
        y = self._empty((len(x), n), x.dtype)
        self._do(_native.gated, x.contiguous(), y, _number(x.dtype), n, activation == "gelu_tanh", size=len(x))
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        total = self._empty(x.shape, x.dtype)
        self._do(_native.add, x.contiguous(), y.contiguous(), total, _number(x.dtype), x[:1].numel(), size=len(x))
        return total

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        x = x.contiguous()
        y = self._empty((len(rows), x.shape[1]), x.dtype)
        self._do(_native.take, x, rows.contiguous(), y, x.shape[1] * x.itemsize, size=len(x), chosen=len(rows))
        return y

    def to_float(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x
        y = self._empty(x.shape, torch.float32)
        self._do(_native.to_float, x.contiguous(), _number(x.dtype), y, x[:1].numel(), self._is_chosen(x), size=len(x))
        return y

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype != torch.float32:
            raise ValueError(f"softcap takes float32, not {x.dtype}")
        y = self._empty(x.shape, torch.float32)
        self._do(_native.softcap, x.contiguous(), y, x[:1].numel(), cap, self._is_chosen(x), size=len(x))
        return y

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
        logits = _rows(logits)
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        top_k = top_k.to(torch.int64).contiguous()
        temperature, top_p, min_p, uniform = (t.double().contiguous() for t in (temperature, top_p, min_p, uniform))
        xtc = None if xtc_threshold is None else xtc_threshold.double().contiguous()
        _native.sample(
            logits.data_ptr(), rows, vocabulary, logits.stride(0), temperature.data_ptr(), top_k.data_ptr(),
            top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(), 0 if xtc is None else xtc.data_ptr(),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, token_ids = _rows(logits), token_ids.contiguous()
        rows, vocabulary = logits.shape
        if rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
            raise IndexError(f"token ids must be from 0 to {vocabulary - 1}")
        top = min(top, vocabulary)
        chosen, top_values = torch.empty(rows), torch.empty(rows, top)
        top_ids = torch.empty(rows, top, dtype=torch.int64)
        _native.logprobs(
            logits.data_ptr(), rows, vocabulary, logits.stride(0), token_ids.data_ptr(), top,
            chosen.data_ptr(), top_values.data_ptr(), top_ids.data_ptr(),
        )  # fmt: skip
        return chosen, top_values, top_ids

    # One op, or all of a step

    def replayed(self, forward: Forward, caches: list[KVCache], groups: Sequence[int], max_blocks: int) -> Forward:
        """`forward` by one native call (`headrace.ops.replay`), but for weights whose products are the reference's."""

        def record(*arguments: Any) -> tuple[Recording, Tensor, list[tuple[Tensor, float, Tensor, Tensor]]]:
            self._recording, self._angles = Recording(), []
            try:
                return self._recording, forward(*arguments), self._angles
            finally:
                self._recording = None

        try:
            return Replay(forward, record, super().rotary_angles, caches, groups, max_blocks)
        except NotRecordableError:
            return forward

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For an op's result."""
        return torch.empty(*shape, dtype=dtype) if self._recording is None else self._recording.empty(shape, dtype)

    def _is_chosen(self, x: Tensor) -> bool:
        """Whether x has a row for each token that was chosen, and not for each of the step; only a recording asks."""
        return self._recording is not None and len(x) == CHOSEN

    def _do(
        self, function: Callable[..., _native.Op], *arguments: Any, size: int, chosen: int = 0, sequences: int = 0
    ) -> None:
        """Runs the op that `function` makes of the arguments, or notes it down. Tensors become addresses, None is 0.

        size, chosen, sequences: what `Op.run` takes.
        """
        given = tuple(0 if a is None else a for a in arguments)
        if self._recording is None:
            function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in given)).run(size, chosen, sequences)
        else:
            self._recording.add(function, given)


class NotRecordableError(Exception):
    """The network has an op that is not the native kernels'."""


def _number(dtype: torch.dtype) -> int:
    """Of a dtype of activations."""
    if dtype not in ACTIVATIONS:
        raise ValueError(f"activations must be float32, bfloat16 or float16, not {dtype}")
    return DTYPES[dtype]


def _rows(logits: Tensor) -> Tensor:
    """Logits as they are, or a copy whose rows are contiguous."""
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, not {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _native_matrix(pieces: list[Packed], dtype: torch.dtype) -> NativeMatrix:
    handle = _native.Matrix()
    for p in pieces:
        numbers = p.values if p.scales is None else p.scales
        handle.add(
            p.coding, DTYPES[numbers.dtype], p.outputs, p.inputs, p.group_size, p.offset, p.sharing,
            p.values.data_ptr(),
            *(0 if t is None else t.data_ptr() for t in (p.scales, p.minimums, p.order)),
        )  # fmt: skip
    return NativeMatrix((sum(p.outputs for p in pieces), pieces[0].inputs), pieces, handle=handle, dtype=dtype)


def _cache_handle(cache: KVCache) -> _native.Cache:
    assert isinstance(cache, NativeKVCache)
    assert cache.handle is not None
    return cache.handle
