"""GPTQ against the paper's update in float64, against exhaustive search, and against rounding to nearest."""

import itertools
import logging

import numpy as np
import pytest
import torch

from headrace.errors import ModelError
from headrace.quantize.gptq import Settings, gptq, row_errors
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import Scheme

EXACT = {"scale_dtype": torch.float32}


def problem(rows: int, columns: int, samples: int = 300, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the H of correlated inputs, one of them with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, columns)) @ rng.normal(size=(columns, columns)) / columns**0.5
    x[:, columns // 3] *= 20
    weight = rng.normal(size=(rows, columns))
    return torch.from_numpy(weight).float(), torch.from_numpy(x.T @ x).float()


def grid(values: np.ndarray, scheme: Scheme) -> tuple[float, float]:
    """Scale and zero of a group of one row, from the definitions."""
    low, high = scheme.code_range
    if scheme.symmetric:
        return np.abs(values).max() / (127 if scheme.bits == 8 else (high - low) / 2), 0.0
    bottom, top = min(values.min(), 0), max(values.max(), 0)
    scale = (top - bottom) / high
    return scale, np.clip(np.rint(-bottom / scale), low, high)


def as_in_the_paper(
    weight: np.ndarray,
    h: np.ndarray,
    scheme: Scheme,
    damping: float,
    order: np.ndarray,
    groups: np.ndarray,
    static: bool,
) -> np.ndarray:
    """The values after quantization, float64, column by column: no blocks, no Cholesky factor.

    After each column its row and column leave the inverse of H by one step of Gaussian elimination (equation 3 of the
    paper), and every remaining weight moves by -error / inverse[q, q] * inverse[q, :] (equation 2).
    groups: of each column, in the order of processing; a group's scale is made when its first column comes.
    """
    h = h + damping * np.mean(np.diag(h)) * np.eye(len(h))
    out = np.zeros_like(weight)
    low, high = scheme.code_range
    for row in range(len(weight)):
        w = weight[row].copy()
        inverse = np.linalg.inv(h)
        made: dict[int, tuple[float, float]] = {}
        if static:
            made = {int(g): grid(w[order][groups == g], scheme) for g in np.unique(groups)}
        for place, q in enumerate(order):
            g = int(groups[place])
            if g not in made:
                made[g] = grid(w[order[groups == g]], scheme)
            scale, zero = made[g]
            out[row, q] = scale * (np.clip(np.rint(w[q] / scale) + zero, low, high) - zero)
            w -= (w[q] - out[row, q]) / inverse[q, q] * inverse[q]
            w[q] = out[row, q]
            inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
            inverse[q], inverse[:, q] = 0, 0
            inverse[q, q] = 1  # is done with; not read again
    return out


@pytest.mark.parametrize(
    ("bits", "symmetric", "size"),
    [(4, True, -1), (4, False, 8), (3, True, 16), (2, False, 16), (8, True, -1), (4, True, 10), (3, False, 64)],
)
@pytest.mark.parametrize("mode", ["plain", "act-order", "static"])
def test_as_in_the_paper(bits: int, symmetric: bool, size: int, mode: str) -> None:
    columns = 48
    weight, h = problem(6, columns)
    scheme = Scheme(bits=bits, symmetric=symmetric, group_size=size)
    settings = Settings(act_order=mode != "plain", static_groups=mode == "static", **EXACT)
    found = gptq(weight, h, scheme, settings, "m").dequantize().numpy().astype(np.float64)
    order = np.arange(columns) if mode == "plain" else np.argsort(-h.numpy().diagonal(), kind="stable")
    width = columns if size == -1 else size
    groups = (order if mode == "static" else np.arange(columns)) // width
    expected = as_in_the_paper(
        weight.numpy().astype(np.float64), h.numpy().astype(np.float64), scheme, 0.01, order, groups, mode == "static"
    )
    errors = [np.einsum("ri,ij,rj->r", d, h.numpy(), d) for d in (found - weight.numpy(), expected - weight.numpy())]
    # A value halfway between codes may go either way in float32, and its row goes another way from there on; and a row
    # that is better rounded to nearest stays so. All other rows are the same.
    rounded = round_to_nearest(weight[:, order] if mode == "act-order" else weight, scheme).dequantize().numpy()
    if mode == "act-order":
        rounded = rounded[:, np.argsort(order)]
    same = np.abs(found - expected).max(1) < 1e-4
    kept = np.abs(found - rounded).max(1) < 1e-6
    assert (same | kept).sum() >= 5
    assert same.sum() >= 3
    assert errors[0].sum() < errors[1].sum() * 1.1


def test_close_to_the_best_there_is() -> None:
    """On four columns of two bits with fixed scales every choice of codes can be tried."""
    scheme = Scheme(bits=2, group_size=-1)
    choices = torch.tensor(list(itertools.product(range(-2, 2), repeat=4))).float()
    gaps = np.zeros(2)  # to the best, of GPTQ and of rounding to nearest
    for seed in range(20):
        weight, h = problem(5, 4, seed=seed)
        coded = gptq(weight, h, scheme, Settings(damping=1e-6, **EXACT), "m")
        plain = round_to_nearest(weight, scheme)
        found, nearest = (row_errors(c.dequantize() - weight, h).numpy() for c in (coded, plain))
        for row in range(5):
            best = float(row_errors(choices * plain.scales[row] - weight[row], h).min())
            assert best <= found[row] * 1.0001
            assert found[row] <= nearest[row] * 1.0001
            gaps += found[row] - best, nearest[row] - best
    assert gaps[0] < 0.5 * gaps[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [-1, 32, 128, 100])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_never_worse_than_nearest(bits: int, size: int, act_order: bool, static: bool) -> None:
    """320 columns, so that there are several blocks, and a short last group."""
    weight, h = problem(16, 320, samples=1000, seed=bits)
    scheme = Scheme(bits=bits, group_size=size)
    coded = gptq(weight, h, scheme, Settings(act_order=act_order, static_groups=static), "m")
    assert (coded.order is not None) == (act_order and not static and size != -1)
    found = row_errors(coded.dequantize() - weight, h)
    if act_order and not static and size != -1:
        assert coded.order is not None
        nearest = round_to_nearest(weight[:, coded.order], scheme, scale_dtype=torch.float16).dequantize()
        nearest = torch.empty_like(nearest).index_copy_(1, coded.order, nearest)
    else:
        nearest = round_to_nearest(weight, scheme, scale_dtype=torch.float16).dequantize()
    before = row_errors(nearest - weight, h)
    assert (found <= before * 1.001).all()
    assert found.sum() < 0.8 * before.sum()


def test_act_order_helps_where_columns_differ() -> None:
    gains = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(800, 256)) @ rng.normal(size=(256, 256)) / 16
        x[:, rng.choice(256, 8, replace=False)] *= 30
        h, weight = torch.from_numpy(x.T @ x).float(), torch.from_numpy(rng.normal(size=(32, 256))).float()
        plain, ordered = (
            row_errors(
                gptq(weight, h, Scheme(bits=3, group_size=64), Settings(act_order=a), "m").dequantize() - weight, h
            ).sum()
            for a in (False, True)
        )
        gains.append(float(ordered / plain))
    assert max(gains) < 1
    assert np.mean(gains) < 0.7


@pytest.mark.parametrize("samples", [1, 4])
def test_few_samples_raise_the_damping(samples: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(samples, 64)) * 1e3).float()
    weight = torch.from_numpy(rng.normal(size=(8, 64))).float()
    with caplog.at_level(logging.WARNING):
        coded = gptq(weight, x.T @ x, Scheme(bits=4, group_size=32), Settings(damping=1e-9), "layer 3")
    assert "layer 3" in caplog.text
    assert "the damping was raised from 1e-09 to" in caplog.text
    assert torch.isfinite(coded.dequantize()).all()


def test_dead_inputs_and_no_inputs(caplog: pytest.LogCaptureFixture) -> None:
    weight, h = problem(8, 64)
    dead = torch.tensor([0, 5, 63])
    h[dead] = 0
    h[:, dead] = 0
    scheme = Scheme(bits=4, group_size=-1)
    for act_order in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            coded = gptq(weight, h, scheme, Settings(act_order=act_order, **EXACT), "m")
        assert "3 of 64 inputs were always zero" in caplog.text
        values = coded.dequantize()
        nearest = round_to_nearest(weight, scheme).dequantize()
        assert torch.equal(values[:, dead], nearest[:, dead])
    with caplog.at_level(logging.WARNING):
        coded = gptq(weight, torch.zeros(64, 64), scheme, Settings(**EXACT), "m")
    assert "all inputs were zero" in caplog.text
    assert torch.equal(coded.dequantize(), nearest)


def test_bad_hessians_and_weights(caplog: pytest.LogCaptureFixture) -> None:
    weight, h = problem(8, 64)
    h[3, 4] = h[4, 3] = torch.nan
    with caplog.at_level(logging.WARNING):
        coded = gptq(weight, h, Scheme(bits=4), Settings(), "m")
    assert "no usable Hessian" in caplog.text
    assert torch.isfinite(coded.dequantize()).all()
    weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match="NaN or infinity"):
        gptq(weight, torch.eye(64), Scheme(bits=4), Settings(), "m")


def test_the_weight_is_not_changed() -> None:
    for shape in ((8, 64), (1, 64)):
        weight, h = problem(*shape)
        before = weight.clone()
        gptq(weight, h, Scheme(bits=4, group_size=32), Settings(), "m")
        assert torch.equal(weight, before)
