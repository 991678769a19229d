"""Rounding to nearest, against NumPy written from the formulas and against the best codes there are."""

import itertools

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, ModelError
from headrace.quantize.rounding import SHRINKING, round_to_floats, round_to_nearest
from headrace.quantize.schemes import Scheme

SIZES = [-1, 0, 1, 5, 16, 64, 100]  # of groups, in matrices with 40 columns


def matrix(rows: int = 12, columns: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(4, (rows, columns)).astype(np.float32))


def by_formula(weight: np.ndarray, bits: int, symmetric: bool, size: int) -> np.ndarray:
    """The values after rounding, float64: each group by itself, from the definitions in Scheme and `fit`."""
    out = np.empty(weight.shape)
    columns = weight.shape[1]
    step = columns if size <= 0 else size
    for row in range(len(weight)):
        for start in range(0, columns, step):
            part = weight[row, start : start + step].astype(np.float64)
            seen = weight.astype(np.float64) if size == 0 else part
            if symmetric:
                low, high = (-127, 127) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
                scale = np.abs(seen).max() / (127 if bits == 8 else (2**bits - 1) / 2)
                zero = 0
            else:
                low, high = 0, 2**bits - 1
                bottom, top = min(seen.min(), 0), max(seen.max(), 0)
                scale = (top - bottom) / high
                zero = np.clip(np.rint(-bottom / scale), 0, high)
            out[row, start : start + step] = scale * (np.clip(np.rint(part / scale) + zero, low, high) - zero)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_as_the_formulas_say(bits: int, symmetric: bool, size: int) -> None:
    weight = matrix()
    coded = round_to_nearest(weight, Scheme(bits=bits, symmetric=symmetric, group_size=size))
    expected = by_formula(weight.numpy(), bits, symmetric, size)
    # A value halfway between two codes, as the greatest is in symmetric groups, may go to either one.
    errors = np.abs(coded.dequantize().numpy() - weight.numpy())
    np.testing.assert_allclose(errors, np.abs(expected - weight.numpy()), atol=2e-5)
    assert coded.codes.dtype == (torch.int8 if symmetric else torch.uint8)
    assert coded.scales.shape == (12, -(-40 // (40 if size <= 0 else min(size, 40))))


@pytest.mark.parametrize("scheme", [Scheme(bits=8), Scheme(bits=4, group_size=32), Scheme(bits=3, symmetric=False)])
def test_scales_are_as_stored(scheme: Scheme) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        coded = round_to_nearest(matrix(), scheme, scale_dtype=dtype)
        assert torch.equal(coded.scales.to(dtype).float(), coded.scales)


def test_int8_scale_is_the_maximum_over_127() -> None:
    weight = matrix()
    coded = round_to_nearest(weight, Scheme(bits=8))
    assert torch.equal(coded.scales[:, 0], weight.abs().amax(1) / 127)
    assert coded.codes.abs().amax(1).tolist() == [127] * 12
    assert ((coded.dequantize() - weight).abs() <= coded.scales * 0.5001).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_search_finds_the_best_of_the_scales(bits: int, symmetric: bool) -> None:
    weight = matrix(columns=32)
    scheme = Scheme(bits=bits, symmetric=symmetric, group_size=8)
    found = round_to_nearest(weight, scheme, search=True)
    plain = round_to_nearest(weight, scheme)
    low, high = scheme.code_range

    def error(row: int, group: int, scale: float) -> float:
        part = weight[row, 8 * group : 8 * group + 8].numpy().astype(np.float64)
        zero = 0 if plain.minimums is None else np.rint(-float(plain.minimums[row, group] / plain.scales[row, group]))
        return float(((scale * (np.clip(np.rint(part / scale) + zero, low, high) - zero) - part) ** 2).sum())

    for row, group in itertools.product(range(12), range(4)):
        full = float(plain.scales[row, group])
        best = min(error(row, group, full * factor) for factor in SHRINKING)
        assert error(row, group, float(found.scales[row, group])) == pytest.approx(best, rel=1e-3)
    assert (found.dequantize() - weight).square().sum() < (plain.dequantize() - weight).square().sum()


def test_zero_is_kept_and_awkward_rows_have_good_scales() -> None:
    weight = torch.zeros(5, 40)
    weight[1, 3] = 1e3
    weight[2] = 1e-30
    weight[3, 0], weight[3, 1] = 1e38, -1e38
    weight[4, :20] = 5.0
    for bits, symmetric, size, dtype in itertools.product(
        (2, 4, 8), (True, False), (-1, 16), (torch.float32, torch.float16)
    ):
        scheme = Scheme(bits=bits, symmetric=symmetric, group_size=size)
        coded = round_to_nearest(
            weight if dtype == torch.float32 else weight.clamp(-1e4, 1e4), scheme, scale_dtype=dtype
        )
        assert torch.isfinite(coded.scales).all()
        assert (coded.scales > 0).all()
        values = coded.dequantize()
        assert torch.isfinite(values).all()
        assert (values[weight == 0] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_is_refused(bad: float) -> None:
    weight = matrix()
    weight[3, 4] = bad
    with pytest.raises(ModelError, match="NaN or infinity"):
        round_to_nearest(weight, Scheme(bits=8))
    with pytest.raises(ModelError, match="NaN or infinity"):
        round_to_floats(weight, Scheme(format="e4m3"))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [-1, 0])
@pytest.mark.parametrize("search", [False, True])
def test_floats_of_eight_bits(kind: str, size: int, search: bool) -> None:
    weight = matrix()
    weight[5] = 0
    stored = round_to_floats(weight, Scheme(format=kind, group_size=size), search=search)
    values = stored.dequantize()
    # All numbers of the format by its definition: sign, exponent and fraction.
    exponent_bits, fraction_bits, bias = (4, 3, 7) if kind == "e4m3" else (5, 2, 15)
    numbers = []
    for exponent, fraction in itertools.product(range(2**exponent_bits), range(2**fraction_bits)):
        if kind == "e5m2" and exponent == 31:
            continue  # infinity and NaN
        if kind == "e4m3" and (exponent, fraction) == (15, 7):
            continue  # NaN
        share = fraction / 2**fraction_bits
        numbers.append((share if exponent == 0 else 1 + share) * 2.0 ** (max(exponent, 1) - bias))
    grid = np.array(sorted({*numbers, *(-n for n in numbers)}))
    scaled = weight.numpy().astype(np.float64) / stored.scales.numpy()
    nearest = np.abs(scaled[..., None] - grid).min(-1)
    error = np.abs(values.numpy().astype(np.float64) / stored.scales.numpy() - scaled)
    np.testing.assert_allclose(error, nearest, rtol=1e-3, atol=1e-6 * np.abs(scaled).max())
    assert (stored.scales > 0).all()
    assert len(stored.scales.unique()) == (1 if size == 0 else 12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8"),
        ({"group_size": -2}, "group_size"),
        ({"group_size": 2.5}, "group_size"),
        ({"activation_bits": 4}, "activations"),
        ({"format": "e3m4"}, "format"),
        ({"format": "e4m3", "bits": 4}, "8 bits"),
        ({"format": "e4m3", "group_size": 32}, "groups"),
    ],
)
def test_schemes_that_make_no_sense(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Scheme(**settings)
