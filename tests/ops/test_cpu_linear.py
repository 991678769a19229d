"""The native matrix products: against float64 and the reference; bit by bit between instruction sets."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from headrace import _native
from headrace.formats.checkpoint import CodedWeight, DenseWeight, IntegerWeight
from headrace.ops.cpu import CpuOps
from headrace.ops.reference import Ops

ISAS = _native.available_isas()
REFERENCE = Ops()


def coded(
    out: int,
    inner: int,
    bits: int,
    group: int,
    *,
    unsigned: bool = False,
    minimums: bool = False,
    ordered: bool = False,
    half: bool = True,
    activation_bits: int | None = None,
    seed: int = 0,
) -> CodedWeight:
    """Random codes, the smallest and the largest among them, with scales that float16 holds or does not."""
    g = torch.Generator().manual_seed(seed)
    low = 0 if unsigned else -(2 ** (bits - 1))
    codes = torch.randint(low, low + 2**bits, (out, inner), generator=g)
    codes[0, 0], codes[-1, -1] = low, low + 2**bits - 1
    groups = -(-inner // group)
    scales, lows = torch.rand(out, groups, generator=g), torch.randn(out, groups, generator=g)
    if half:
        scales, lows = scales.half().float(), lows.half().float()
    return CodedWeight(
        IntegerWeight(
            codes.to(torch.uint8 if unsigned else torch.int8),
            bits,
            group,
            scales,
            lows if minimums else None,
            torch.randperm(inner, generator=g) if ordered else None,
        ),
        activation_bits,
    )


def rounded(x: Tensor, shared: int = 16) -> Tensor:
    """Activations as codes of eight bits with a scale for each 16 (or `shared`), and back, in float64."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % shared)).view(len(x), -1, shared)
    scale = (padded.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((padded / scale).round() * scale).view(len(x), -1)[:, : x.shape[1]].double()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 65])
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (3, 5), (64, 48), (33, 577)])
@pytest.mark.parametrize("bias", [False, True])
def test_floats_agree_with_float64(ops: CpuOps, rows: int, out: int, inner: int, bias: bool) -> None:
    g = torch.Generator().manual_seed(rows + out)
    weights = [torch.randn(out, inner, generator=g), torch.randn(2, inner, generator=g)]
    x = torch.randn(rows, inner, generator=g)
    b = torch.randn(out + 2, generator=g) if bias else None
    matrix = ops.matrix([DenseWeight(w) for w in weights], torch.float32)
    assert matrix.shape == (out + 2, inner)
    expected = x.double() @ torch.cat(weights).double().T + (b.double() if b is not None else 0)
    torch.testing.assert_close(ops.linear(x, matrix, b).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_of_sixteen_bits(ops: CpuOps, dtype: torch.dtype) -> None:
    """As the model's dtype, and as weights of a float32 model, where they take no more memory than in the file."""
    weight, x, bias = torch.randn(21, 50).to(dtype), torch.randn(3, 50), torch.randn(21).to(dtype)
    matrix = ops.matrix([DenseWeight(weight)], dtype)
    expected = (x.to(dtype).double() @ weight.double().T + bias.double()).to(dtype)
    torch.testing.assert_close(ops.linear(x.to(dtype), matrix, bias), expected, rtol=1e-2, atol=2e-2)
    matrix = ops.matrix([DenseWeight(weight)], torch.float32)
    assert matrix.data[0].values.dtype == dtype
    torch.testing.assert_close(ops.linear(x, matrix).double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


SHAPES = [(1, 32), (16, 64), (33, 96), (50, 100), (20, 5)]
CODINGS = [
    {"bits": 4, "group": 32, "unsigned": True, "minimums": True},  # Q4_1
    {"bits": 4, "group": 32},  # Q4_0
    {"bits": 8, "group": 32},  # Q8_0
    {"bits": 6, "group": 16, "half": False},  # Q6_K
    {"bits": 2, "group": 16, "unsigned": True, "minimums": True, "half": False},  # Q2_K
    {"bits": 4, "group": 64, "unsigned": True, "minimums": True, "ordered": True},  # GPTQ
    {"bits": 8, "group": 1000, "unsigned": True, "minimums": True},
    {"bits": 3, "group": 128},
]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_whole_numbers_agree_with_float64(ops: CpuOps, coding: dict[str, int], out: int, inner: int, rows: int) -> None:
    weight = coded(out, inner, **coding)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1))
    matrix = ops.matrix([weight], torch.float32)
    order = weight.coded.order
    columns = x if order is None else x[:, order]
    values = weight.dequantize().double()
    expected = rounded(columns) @ (values if order is None else values[:, order]).T
    torch.testing.assert_close(ops.linear(x, matrix).double(), expected, rtol=1e-4, atol=2e-4 * inner**0.5)


@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_rounded_activations_are_the_reference_s(ops: CpuOps, coding: dict[str, int], out: int, inner: int) -> None:
    weight = coded(out, inner, **coding, activation_bits=8)
    x = torch.randn(5, inner)
    expected = REFERENCE.linear(x, REFERENCE.matrix([weight], torch.float32))
    found = ops.linear(x, ops.matrix([weight], torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [3, 24, 40])
def test_rounded_activations_are_rounded_for_any_group(ops: CpuOps, group: int) -> None:
    weights, x = (
        [coded(8, 80, 4, group, activation_bits=8), coded(8, 80, 8, 1000, activation_bits=8)],
        torch.randn(3, 80),
    )
    expected = REFERENCE.linear(x, REFERENCE.matrix(weights, torch.float32))
    torch.testing.assert_close(ops.linear(x, ops.matrix(weights, torch.float32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [3, 24, 40])
def test_groups_that_no_kernel_takes_become_floats(ops: CpuOps, group: int) -> None:
    weight, x = coded(8, 80, 4, group), torch.randn(3, 80)
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(
        ops.linear(x, ops.matrix([weight], torch.float32)).double(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_scale_for_32_activations_where_asked_for(coding: dict[str, int], isa: str) -> None:
    before = _native.isa()
    _native.select_isa(isa)
    ops, weight, x = CpuOps("int8", 1), coded(33, 100, **coding), torch.randn(5, 100)
    found = ops.linear(x, ops.matrix([weight], torch.float32))
    _native.select_isa(before)
    order = weight.coded.order
    values = weight.dequantize().double()
    columns, values = (x, values) if order is None else (x[:, order], values[:, order])
    torch.testing.assert_close(found.double(), rounded(columns, 32) @ values.T, rtol=1e-4, atol=2e-3)


def test_float32_activations_where_asked_for() -> None:
    weight, x = coded(8, 80, 4, 32), torch.randn(3, 80)
    exact = CpuOps("float32", 1)
    expected = x.double() @ weight.dequantize().double().T
    found = exact.linear(x, exact.matrix([weight], torch.float32)).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_matrices_of_different_codings_one_below_the_other(ops: CpuOps) -> None:
    weights = [
        coded(24, 64, 4, 32, seed=1),
        coded(8, 64, 4, 32, seed=2),
        DenseWeight(torch.randn(5, 64)),
        coded(17, 64, 8, 32, seed=3),
        coded(3, 64, 4, 32, ordered=True, seed=4),
    ]
    x, bias = torch.randn(6, 64), torch.randn(57)
    matrix = ops.matrix(weights, torch.float32)
    assert matrix.shape == (57, 64)
    assert len(matrix.data) == 4  # the first two are one piece
    each = [ops.linear(x, ops.matrix([w], torch.float32)) for w in weights]
    assert torch.equal(ops.linear(x, matrix, bias), torch.cat(each, 1) + bias)


WEIGHTS = [
    DenseWeight(torch.randn(50, 100, generator=torch.Generator().manual_seed(0))),
    *(coded(50, 100, **coding) for coding in CODINGS),
    coded(50, 100, 8, 1000, activation_bits=8),
]


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: w.coding)
def test_a_row_s_bits_depend_on_nothing_but_the_row(weight: DenseWeight | CodedWeight) -> None:
    """Not on the other rows, on how many they are, on the threads, or on the instruction set."""
    x = torch.randn(67, 100, generator=torch.Generator().manual_seed(2))
    before, results = _native.isa(), []
    for isa in ISAS:
        _native.select_isa(isa)
        for threads in (1, 3):
            ops = CpuOps(threads=threads)
            matrix = ops.matrix([weight], torch.float32)
            results.append(ops.linear(x, matrix))
            results.append(torch.cat([ops.linear(x[i : i + 1], matrix) for i in range(len(x))]))
            results.append(torch.cat([ops.linear(part, matrix) for part in x.split(5)]))
    _native.select_isa(before)
    assert all(torch.equal(results[0], result) for result in results)


def test_rows_that_are_apart_in_memory(ops: CpuOps) -> None:
    weight, x = coded(16, 32, 4, 32), torch.randn(4, 64)
    matrix = ops.matrix([weight], torch.float32)
    assert torch.equal(ops.linear(x[:, :32], matrix), ops.linear(x[:, :32].contiguous(), matrix))
    transposed = x[:, :32].T.contiguous().T
    assert torch.equal(ops.linear(transposed, matrix), ops.linear(x[:, :32].contiguous(), matrix))


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: w.coding)
def test_a_table_serves_embedding_and_linear(ops: CpuOps, weight: DenseWeight | CodedWeight) -> None:
    table = ops.table(weight, torch.float32)
    assert torch.equal(ops.embedding(torch.tensor([8, 0, 49]), table), weight.dequantize()[[8, 0, 49]])
    assert torch.equal(ops.embedding(torch.tensor([8]), table, 2.0), weight.dequantize()[[8]] * 2)
    assert ops.linear(torch.randn(3, 100), table).shape == (3, 50)


def test_token_ids_out_of_the_table(ops: CpuOps) -> None:
    table = ops.table(DenseWeight(torch.randn(9, 4)), torch.float32)
    for ids in ([9], [0, -1]):
        with pytest.raises(IndexError, match="from 0 to 8"):
            ops.embedding(torch.tensor(ids), table)
    assert ops.embedding(torch.tensor([], dtype=torch.int64), table).shape == (0, 4)


def test_shapes_that_do_not_fit(ops: CpuOps) -> None:
    matrix = ops.matrix([DenseWeight(torch.randn(9, 4))], torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear(torch.randn(2, 5), matrix)
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear(torch.randn(2, 4), matrix, torch.randn(8))


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: w.coding)
def test_nan_and_infinity_come_through(ops: CpuOps, weight: DenseWeight | CodedWeight) -> None:
    x = torch.randn(4, 100)
    x[0, 7], x[1, 99], x[2] = torch.nan, torch.inf, 0
    y = ops.linear(x, ops.matrix([weight], torch.float32))
    assert y[0].isnan().any()
    assert not y[1].isfinite().all()
    assert torch.equal(y[2], torch.zeros(50))
    assert y[3].isfinite().all()


def test_a_forked_process_and_several_threads_get_the_same_bits() -> None:
    """A child has none of its parent's helpers; two engines in one process share them."""
    program = """
import os, threading, torch
from headrace.formats.checkpoint import DenseWeight
from headrace.ops.cpu import CpuOps
ops = CpuOps(threads=3)
matrix = ops.matrix([DenseWeight(torch.randn(512, 64))], torch.float32)
x = torch.randn(40, 64)
expected = ops.linear(x, matrix)
same = []
def run():
    same.append(all(torch.equal(ops.linear(x, matrix), expected) for _ in range(200)))
threads = [threading.Thread(target=run) for _ in range(3)]
for t in threads: t.start()
for t in threads: t.join()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, matrix), expected) else 1)
print(same, os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[True, True, True] 0\n", done.stderr


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_activations(ops: CpuOps, scale: float) -> None:
    weight = coded(16, 64, 4, 32)
    matrix = ops.matrix([weight], torch.float32)
    x = torch.randn(2, 64)
    torch.testing.assert_close(ops.linear(x * scale, matrix) / scale, ops.linear(x, matrix), rtol=1e-4, atol=1e-2)
