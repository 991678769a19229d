"""The native attention, cache, rotary embedding and gates: against the reference on every instruction set.

The reference itself is checked against torch and transformers in test_reference.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace import _native
from headrace.ops.cpu import CpuOps
from headrace.ops.reference import KVCache, Ops, RaggedBatch

ISAS = _native.available_isas()
REFERENCE = Ops()


class Step:
    """Sequences with some tokens in this step, keys and values of all of them, and blocks in any order."""

    def __init__(
        self, lens: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, block_size: int, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        counts = [-(-c // block_size) for c in contexts]
        deck = torch.randperm(sum(counts) + 2, generator=g).tolist()
        tables = [[deck.pop() for _ in range(n)] for n in counts]
        widest = max(counts)
        self.num_blocks, self.block_size = sum(counts) + 2, block_size
        self.batch = RaggedBatch(
            lens,
            contexts,
            torch.cat([torch.arange(c - n, c) for n, c in zip(lens, contexts, strict=True)]),
            torch.zeros(0, dtype=torch.int64),  # not read by attention
            torch.tensor([t + [0] * (widest - len(t)) for t in tables]),
        )
        self.slots = [
            torch.tensor([t[p // block_size] * block_size + p % block_size for p in range(c)])
            for t, c in zip(tables, contexts, strict=True)
        ]
        self.keys = [torch.randn(c, kv_heads, dim, generator=g) for c in contexts]
        self.values = [torch.randn(c, kv_heads, dim, generator=g) for c in contexts]
        self.query = torch.randn(sum(lens), heads, dim, generator=g)
        self.sinks = torch.randn(heads, generator=g)

    def cache(self, ops: Ops, dtype: torch.dtype) -> KVCache:
        cache = ops.kv_cache(self.num_blocks, self.block_size, self.keys[0].shape[1], self.keys[0].shape[2], dtype)
        for k, v, slots in zip(self.keys, self.values, self.slots, strict=True):
            ops.store_kv(k, v, cache, slots)
        return cache

    def attend(self, ops: Ops, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
        batch = replace(self.batch, notes={})
        return ops.attention(self.query, self.cache(ops, dtype), batch, scale=0.3, **options)  # type: ignore[arg-type]


SHAPES = [(4, 2, 16), (9, 3, 64), (4, 1, 80), (2, 2, 10), (3, 1, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_agrees_with_the_reference(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    step = Step([1, 5, 40, 1], [200, 5, 131, 33], heads, kv_heads, dim, block_size)
    for options in ({}, {"window": 30}, {"softcap": 5.0, "sinks": step.sinks}, {"window": 1}):
        torch.testing.assert_close(
            step.attend(ops, dtype, **options), step.attend(REFERENCE, dtype, **options), rtol=1e-4, atol=2e-5
        )


@pytest.mark.parametrize("window", [None, 700])
def test_contexts_of_many_parts(ops: CpuOps, window: int | None) -> None:
    """Longer than what one thread takes of a sequence."""
    step = Step([1, 3], [3000, 2600], 4, 2, 16, 32)
    torch.testing.assert_close(
        step.attend(ops, window=window), step.attend(REFERENCE, window=window), rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_sixteen_bits(ops: CpuOps, dtype: torch.dtype) -> None:
    step = Step([1, 5], [60, 9], 4, 2, 16, 16)
    step.query = step.query.to(dtype)
    step.keys, step.values = [k.to(dtype) for k in step.keys], [v.to(dtype) for v in step.values]
    found = step.attend(ops, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, step.attend(REFERENCE, dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_s_bits_depend_on_its_own_sequence_only(dtype: torch.dtype, window: int | None) -> None:
    """Not on chunks, on the other sequences, on the size of blocks, on the threads, or on the instruction set."""
    whole = Step([150], [1200], 4, 2, 16, 32)
    before, results = _native.isa(), []
    for isa in ISAS:
        _native.select_isa(isa)
        for threads in (1, 3):
            ops = CpuOps(threads=threads)
            cache = whole.cache(ops, dtype)
            for chunk in (150, 1, 7):
                parts = []
                for first in range(0, 150, chunk):
                    count = min(chunk, 150 - first)
                    batch = replace(whole.batch, query_lens=[count], context_lens=[1050 + first + count], notes={})
                    query = whole.query[first : first + count]
                    parts.append(ops.attention(query, cache, batch, scale=0.3, window=window))
                results.append(torch.cat(parts))
    _native.select_isa(before)
    other_blocks = Step([150], [1200], 4, 2, 16, 4)
    other_blocks.query, other_blocks.keys, other_blocks.values = whole.query, whole.keys, whole.values
    results.append(other_blocks.attend(CpuOps(threads=2), dtype, window=window))
    with_another = Step([3, 150], [40, 1200], 4, 2, 16, 32)
    with_another.query[3:], with_another.keys[1], with_another.values[1] = whole.query, whole.keys[0], whole.values[0]
    results.append(with_another.attend(CpuOps(threads=2), dtype, window=window)[3:])
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 5])
def test_does_not_see_what_others_left_in_its_blocks(ops: CpuOps, window: int | None, dtype: torch.dtype) -> None:
    step = Step([1, 4], [17, 9], 4, 2, 16, 32)
    expected = step.attend(ops, dtype, window=window)
    cache = ops.kv_cache(step.num_blocks, 32, 2, 16, dtype)
    garbage = torch.full((step.num_blocks * 32, 2, 16), torch.nan)
    ops.store_kv(garbage, garbage, cache, torch.arange(step.num_blocks * 32))
    for k, v, slots in zip(step.keys, step.values, step.slots, strict=True):
        ops.store_kv(k, v, cache, slots)
    batch = replace(step.batch, notes={})
    assert torch.equal(ops.attention(step.query, cache, batch, scale=0.3, window=window), expected)


def test_nan_stays_in_its_sequence(ops: CpuOps) -> None:
    step = Step([1, 2], [20, 30], 4, 2, 16, 16)
    step.keys[0][3] = torch.nan
    found = step.attend(ops)
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("place", [1, 128, 512, 512 + 128])
def test_a_nan_by_itself_is_not_lost(ops: CpuOps, place: int, dtype: torch.dtype) -> None:
    """The only key of a tile or of a part; with sinks, which alone would give a finite answer."""
    step = Step([1], [place + 1], 4, 2, 16, 16)
    step.keys[0][place] = torch.nan
    for options in ({}, {"sinks": step.sinks}, {"window": 1, "sinks": step.sinks}):
        assert step.attend(ops, dtype, **options).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_codes_and_scales_are_the_reference_s(ops: CpuOps, dtype: torch.dtype) -> None:
    """With rows of zeros, of tiny and huge entries, and an infinity: what it reads back as, bit by bit."""
    rows = torch.randn(40, 2, 24) * torch.logspace(-12, 9, 40)[:, None, None]
    rows[3], rows[5, 0, 7], rows[6, 1, 2] = 0, torch.inf, torch.nan
    rows = rows.to(dtype)
    slots = torch.randperm(48)[:40]
    found, expected = (o.kv_cache(3, 16, 2, 24, torch.int8) for o in (ops, REFERENCE))
    ops.store_kv(rows, rows, found, slots)
    REFERENCE.store_kv(rows, rows, expected, slots)
    assert found.key_scales is not None
    assert expected.key_scales is not None
    torch.testing.assert_close(found.key_scales, expected.key_scales, rtol=0, atol=0, equal_nan=True)
    faulty = expected.key_scales.isnan()  # codes do not matter there
    keys = found.keys.view(2, 3, 1, 24, 16).permute(0, 1, 2, 4, 3).reshape(2, 3, 16, 24)  # [block / chunk, D, chunk]
    assert torch.equal(keys[~faulty], expected.keys[~faulty])
    assert torch.equal(found.values[~faulty], expected.values[~faulty])


def test_copied_blocks_are_read_the_same(ops: CpuOps) -> None:
    step = Step([1], [30], 4, 2, 16, 16)
    cache = step.cache(ops, torch.int8)
    other = ops.kv_cache(9, 16, 2, 16, torch.int8)
    table = step.batch.block_tables[0].tolist()
    ops.copy_blocks(cache, other, [(table[0], 7), (table[1], 2)])
    moved = replace(step.batch, block_tables=torch.tensor([[7, 2]]), notes={})
    assert torch.equal(ops.attention(step.query, other, moved, scale=0.3), step.attend(ops, torch.int8))


def test_heads_that_are_too_large() -> None:
    with pytest.raises(ValueError, match="at most 512"):
        CpuOps(threads=1).kv_cache(1, 16, 1, 513, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half", [1, 5, 16, 20])
def test_rotary_is_the_reference_s_bit_by_bit(ops: CpuOps, dtype: torch.dtype, half: int) -> None:
    x = torch.randn(7, 5, 50).to(dtype)
    cos, sin = torch.randn(7, half), torch.randn(7, half)
    for part in (x, x[:, 1:3], x[:, :, 4:46]):
        assert torch.equal(ops.rotary(part, cos, sin), REFERENCE.rotary(part, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_agree_with_float64(ops: CpuOps, dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(9, 2 * 77) * torch.logspace(-3, 2, 9)[:, None]).to(dtype)
    found, expected = ops.gated(x, activation), REFERENCE.gated(x.double(), activation).to(dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 0.01)
    parts = torch.cat([ops.gated(row, activation) for row in x.split(1)])
    assert torch.equal(parts, ops.gated(x, activation))


def test_gates_let_nan_through(ops: CpuOps) -> None:
    assert ops.gated(torch.tensor([[torch.nan, 1.0, 2.0, 3.0]]), "silu")[0].isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="unknown activation"):
        ops.gated(torch.randn(1, 2), "relu")


def test_the_same_on_every_instruction_set() -> None:
    x = torch.randn(9, 2 * 77) * 4
    before, results = _native.isa(), []
    for isa in ISAS:
        _native.select_isa(isa)
        results.append([CpuOps().gated(x, name) for name in ("silu", "gelu_tanh")])
    _native.select_isa(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(results[0], result, strict=True))
