"""The native RMS norm against float64, the reference ops, and itself on every instruction set of this machine."""

import sys
import threading

import pytest
import torch
from torch import Tensor

from headrace import _native
from headrace.ops.cpu import CpuOps
from headrace.ops.reference import Ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = _native.available_isas()
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
EPS = 1e-5


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, where any NaN equals any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num().view(INTEGERS[a.dtype]), b.nan_to_num().view(INTEGERS[b.dtype])
    )


def check(ops: CpuOps, x: Tensor, weight: Tensor, eps: float = EPS) -> None:
    """Within rounding of the formula in float64."""
    got = ops.rms_norm(x, weight, eps)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    wide = x.double()
    want = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(x.dtype)
    # Half a unit in the last place from the last rounding, and the same again where two values straddle a border.
    torch.testing.assert_close(got, want, rtol=max(3e-6, torch.finfo(x.dtype).eps), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (0, 16),
        (1, 1),
        (9, 1),
        (1, 7),
        (3, 15),
        (4, 16),
        (5, 17),
        (2, 31),
        (2, 33),
        (7, 576),
        (2, 4099),
        (2, 3, 64),
        (48,),
    ],
)
def test_agrees_with_float64(ops: CpuOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(ops, torch.randn(shape).to(dtype), torch.randn(shape[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(ops: CpuOps, dtype: torch.dtype) -> None:
    wide = torch.randn(6, 100).to(dtype)
    for x in (wide[:, 3:40], wide[::2, :64], wide.T, wide[0].expand(4, 100), wide.view(6, 4, 25)[:, 1:3]):
        check(ops, x, torch.randn(2 * x.shape[-1])[::2])


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e-12, 1e12, 1e18])
@pytest.mark.parametrize("eps", [1e-6, 1e-12])
def test_magnitudes(ops: CpuOps, scale: float, eps: float) -> None:
    """From denormals to squares just below float32's largest number."""
    check(ops, torch.randn(4, 50) * scale, torch.randn(50), eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, EPS])
def test_non_finite_and_overflow_as_in_the_reference(ops: CpuOps, dtype: torch.dtype, eps: float) -> None:
    nan, inf, big = float("nan"), float("inf"), torch.finfo(dtype).max
    x = torch.randn(9, 20)
    for row, value in enumerate((nan, inf, -inf, big, -big, 0.0, -0.0)):
        x[row, 3] = value
    x[7] = 0.0
    x = x.to(dtype)
    weight = torch.randn(20)
    weight[5], weight[6] = nan, inf
    got, want = ops.rms_norm(x, weight, eps), Ops().rms_norm(x, weight, eps)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[0].isnan().all()
    assert got[1, 3].isnan()
    assert got[8, :5].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_to_nearest_even(ops: CpuOps, dtype: torch.dtype) -> None:
    """With ones as input and eps 0 the output is the weight, rounded: compared with torch's rounding."""
    exact = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    halfway = (exact.view(torch.int32) + (1 << (15 if dtype == torch.bfloat16 else 12))).view(torch.float32)
    bits = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    small = torch.randn(2**16) * 1e-6  # among float16's subnormals
    for weight in (exact, halfway, torch.nextafter(halfway, exact), torch.nextafter(halfway, 2 * halfway), bits, small):
        assert same_bits(ops.rms_norm(torch.ones(1, 2**16, dtype=dtype), weight, 0.0)[0], weight.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_numbers_exactly(ops: CpuOps, dtype: torch.dtype) -> None:
    """With an eps that drowns the squares the scale is a power of two, which the weight takes back: y is x."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[(x == 0) | ((x.abs() > 2.0**-80) & (x.abs() < 2**16))][:, None]
    assert same_bits(ops.rms_norm(x, torch.full((1,), 2.0**30), 2.0**60), x)


def adversarial(dtype: torch.dtype, hidden: int) -> Tensor:
    """Any bit patterns at all, and ordinary rows."""
    integers = INTEGERS[dtype]
    info = torch.iinfo(integers)
    wild = torch.randint(info.min, info.max, (40, hidden)).to(integers).view(dtype)
    tame = torch.randn(40, hidden) * 10.0 ** torch.randint(-20, 18, (40, 1))
    return torch.cat([wild, tame.to(dtype), wild.where(torch.rand(40, hidden) < 0.05, tame.to(dtype))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 15, 16, 17, 100, 576, 1153])
def test_same_bits_on_every_instruction_set(dtype: torch.dtype, hidden: int) -> None:
    x, weight = adversarial(dtype, hidden), torch.randn(hidden)
    before = _native.isa()
    results = []
    for name in ISAS:
        _native.select_isa(name)
        results.append(CpuOps().rms_norm(x, weight, EPS))
    _native.select_isa(before)
    assert all(same_bits(results[0], result) for result in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [15, 64, 577])
def test_a_row_does_not_depend_on_its_company(ops: CpuOps, dtype: torch.dtype, hidden: int) -> None:
    x, weight = adversarial(dtype, hidden), torch.randn(hidden)
    together = ops.rms_norm(x, weight, EPS)
    for row in range(len(x)):
        assert same_bits(ops.rms_norm(x[row : row + 1].clone(), weight, EPS)[0], together[row])
    shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view_as(x).copy_(x)  # another alignment
    assert same_bits(ops.rms_norm(shifted, weight, EPS), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_its_rows_and_nothing_else(ops: CpuOps, dtype: torch.dtype) -> None:
    for hidden in range(1, 40):
        x, weight = torch.randn(3, hidden).to(dtype), torch.randn(hidden)
        room = torch.full((3 * hidden + 32,), 7.0, dtype=dtype)
        y = room[16:-16]
        code = DTYPES.index(dtype)
        _native.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), code, 1, hidden, hidden, 0, EPS).run(3)
        assert (room[:16] == 7).all()
        assert (room[-16:] == 7).all()
        assert same_bits(y.view(3, hidden), ops.rms_norm(x, weight, EPS))


def test_refuses_what_it_cannot_read() -> None:
    ops, x = CpuOps(), torch.randn(2, 8)
    for bad_x, bad_weight in ((x.double(), torch.ones(8)), (x, torch.ones(8).half()), (x, torch.ones(7))):
        with pytest.raises(ValueError, match="rms_norm takes float32, bfloat16 or float16"):
            ops.rms_norm(bad_x, bad_weight, EPS)
    with pytest.raises(ValueError, match="dtype must be 0"):
        _native.rms_norm(0, 0, 0, 4, 1, 1, 1, 0, EPS)


def test_other_threads_run_meanwhile() -> None:
    x, weight = torch.randn(4000, 2048), torch.ones(2048)
    y = torch.empty_like(x)
    op = _native.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), 0, 1, 2048, 2048, 0, EPS)
    running, counted = threading.Event(), 0

    def work() -> None:
        running.set()
        op.run(4000)
        running.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.2)  # far longer than the call: no thread gives way but of its own accord
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            counted += running.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counted > 100
