"""The packed matrix product of the CPU backend against float64."""

import pytest
import torch

from headrace.formats.checkpoint import DenseWeight
from headrace.ops.cpu import HAS_PACKED_LINEAR, CpuOps

OPS = CpuOps()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 65])
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (3, 5), (64, 48), (33, 577)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_agrees_with_float64(rows: int, out: int, inner: int, bias: bool) -> None:
    g = torch.Generator().manual_seed(rows + out)
    weights = [torch.randn(out, inner, generator=g), torch.randn(2, inner, generator=g)]
    x = torch.randn(rows, inner, generator=g)
    b = torch.randn(out + 2, generator=g) if bias else None
    matrix = OPS.matrix([DenseWeight(w) for w in weights], torch.float32)
    assert matrix.shape == (out + 2, inner)
    assert matrix.data.is_mkldnn == HAS_PACKED_LINEAR
    expected = x.double() @ torch.cat(weights).double().T + (b.double() if b is not None else 0)
    torch.testing.assert_close(OPS.linear(x, matrix, b).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_reference_s(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16).to(dtype)
    matrix = OPS.matrix([DenseWeight(weight)], dtype)
    torch.testing.assert_close(OPS.linear(x, matrix), x @ weight.to(dtype).T)


def test_a_table_serves_embedding_and_linear() -> None:
    weight, x = torch.randn(9, 4), torch.randn(3, 4)
    table = OPS.table(DenseWeight(weight), torch.float32)
    assert torch.equal(OPS.embedding(torch.tensor([8, 0]), table), weight[[8, 0]])
    torch.testing.assert_close(OPS.linear(x, table), x @ weight.T)


def test_nan_and_infinity_come_through() -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 1.0]])
    matrix = OPS.matrix([DenseWeight(torch.eye(2))], torch.float32)
    y = OPS.linear(x, matrix)
    assert y[0].isnan().any()
    assert not y[1].isfinite().all()
    assert torch.equal(y[2], torch.ones(2))
