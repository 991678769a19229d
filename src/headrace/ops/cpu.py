"""The CPU backend: the network's ops in the native kernels (csrc/); what is left is the reference's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.formats.checkpoint import Weight
from headrace.ops.packing import LANES, Packed, is_packable, pack
from headrace.ops.reference import KVCache, Matrix, Ops, RaggedBatch

try:
    from headrace import _native
except ImportError as error:
    raise HeadraceError(
        f"the native kernels cannot be loaded ({error}): install Headrace again with `pip install .`, "
        "or run with backend='reference'"
    ) from error

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
        a scale for every 32 inputs; "float32" takes the values of both as they are.
    threads: that share an op's work; None takes as many as torch does.
    """

    name = "cpu"
    batch_invariant = True

    def __init__(self, activation_precision: str = "auto", threads: int | None = None) -> None:
        try:
            self.isa = _native.isa()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.codes = activation_precision == "auto"
        _native.set_threads(threads or torch.get_num_threads())

    # Weights and memory

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype) -> Matrix:
        """As the reference, in panels of sixteen outputs; whole numbers stay what they are.

        It is the reference's own matrix where activations are to be rounded for groups that no kernel takes.
        """
        if any(w.activation_bits is not None and not is_packable(w.integers()) for w in weights):
            return super().matrix(weights, dtype)
        return _native_matrix(pack(weights, dtype, codes=self.codes), dtype)

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
        ids = ids.contiguous()
        if len(ids) and (ids.min() < 0 or ids.max() >= table.shape[0]):
            raise IndexError(f"token ids must be from 0 to {table.shape[0] - 1}")
        rows = torch.empty(len(ids), table.shape[1])
        _native.embedding(table.handle, ids.data_ptr(), rows.data_ptr(), len(ids))
        rows = rows.to(table.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        count, hidden = rows.shape
        row_stride, stride = rows.stride()
        if stride != 1:
            rows = rows.contiguous()
            row_stride = hidden
        weight = weight.contiguous()
        if x.dtype not in ACTIVATIONS or weight.dtype != torch.float32 or weight.numel() != hidden:
            raise ValueError(
                f"rms_norm takes float32, bfloat16 or float16 and a float32 weight of size {hidden}, "
                f"not {x.dtype} and {weight.dtype} of size {weight.numel()}"
            )
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _native.rms_norm(
            rows.data_ptr(), weight.data_ptr(), y.data_ptr(), count, hidden, row_stride, eps, _number(x.dtype)
        )
        return y

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, NativeMatrix):
            return super().linear(x, weight, bias)
        outputs, inputs = weight.shape
        if x.shape[1] != inputs or (bias is not None and (bias.dtype != x.dtype or len(bias) != outputs)):
            raise ValueError(f"linear of {list(x.shape)} {x.dtype} by {[outputs, inputs]} and its bias does not fit")
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), outputs, dtype=x.dtype)
        bias_at = 0 if bias is None else bias.contiguous().data_ptr()
        _native.linear(weight.handle, x.data_ptr(), len(x), x.stride(0), bias_at, y.data_ptr(), _number(x.dtype))
        return y

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, dim = x.shape
        if x.stride(2) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        half = cos.shape[1]
        _native.rotary(
            x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr(), _number(x.dtype),
            tokens, heads, dim, half, x.stride(0), x.stride(1),
        )  # fmt: skip
        return y

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
        key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
        _native.store_kv(
            _cache_handle(cache), key.data_ptr(), value.data_ptr(), _number(key.dtype),
            key.stride(0), value.stride(0), key.stride(1), value.stride(1), slots.contiguous().data_ptr(), len(key),
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
        out = torch.empty(query.shape, dtype=query.dtype)
        tables = batch.block_tables
        if sinks is not None:
            sinks = sinks.float().contiguous()
        _native.attention(
            _cache_handle(cache), query.data_ptr(), out.data_ptr(), _number(query.dtype), heads, query.stride(0),
            tables.data_ptr(), tables.stride(0), scale, softcap or 0.0, window or 0,
            0 if sinks is None else sinks.data_ptr(),
            len(batch.query_lens), lens[0].data_ptr(), lens[1].data_ptr(),
        )  # fmt: skip
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"unknown activation {activation!r}")
        x = x.contiguous()
        tokens, n = len(x), x.shape[1] // 2
        y = torch.empty(tokens, n, dtype=x.dtype)
        _native.gated(x.data_ptr(), y.data_ptr(), _number(x.dtype), tokens, n, activation == "gelu_tanh")
        return y


def _number(dtype: torch.dtype) -> int:
    """Of a dtype of activations."""
    if dtype not in ACTIVATIONS:
        raise ValueError(f"activations must be float32, bfloat16 or float16, not {dtype}")
    return DTYPES[dtype]


def _native_matrix(pieces: list[Packed], dtype: torch.dtype) -> NativeMatrix:
    handle = _native.Matrix()
    for p in pieces:
        numbers = p.values if p.scales is None else p.scales
        handle.add(
            p.coding, DTYPES[numbers.dtype], p.outputs, p.inputs, p.group_size, p.offset, p.whole_rows,
            p.values.data_ptr(),
            *(0 if t is None else t.data_ptr() for t in (p.scales, p.minimums, p.order)),
        )  # fmt: skip
    return NativeMatrix((sum(p.outputs for p in pieces), pieces[0].inputs), pieces, handle=handle, dtype=dtype)


def _cache_handle(cache: KVCache) -> _native.Cache:
    assert isinstance(cache, NativeKVCache)
    assert cache.handle is not None
    return cache.handle
