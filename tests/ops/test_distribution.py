"""From what `sample` draws, as probabilities: NumPy's, with every filter; and where there is nothing to draw."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.reference import Ops
from helpers.distribution import exact_distribution

OPS = Ops()
V = 40


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, V, 99]),
    st.sampled_from([0.2, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.2, 2.0]),
)
def test_as_numpy_has_it(seed: int, temperature: float, top_k: int, top_p: float, min_p: float, xtc: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (3, V)).astype(np.float32)
    columns = [torch.full((3,), x, dtype=torch.float64) for x in (temperature, top_p, min_p, xtc)]
    kept = torch.full((3,), top_k, dtype=torch.int64)
    found = OPS.distribution(torch.from_numpy(logits), columns[0], kept, columns[1], columns[2], columns[3])
    for row, probabilities in zip(logits.astype(np.float64), found.numpy(), strict=True):
        expected = exact_distribution(row, temperature, top_k, top_p, min_p, xtc)
        np.testing.assert_allclose(probabilities, expected, atol=1e-6)
        assert ((probabilities > 0) == (expected > 0)).all()


def test_greedy_rows_and_rows_without_any_logit_are_certain() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-torch.inf] * 3, [torch.nan, 0.0, -1.0], [0.0, 0.0, 0.0]])
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    found = OPS.distribution(logits, temperature, torch.zeros(4, dtype=torch.int64), ones, zeros)
    expected = [[0, 1, 0], [1, 0, 0], [0, 1, 0], [1 / 3] * 3]
    np.testing.assert_allclose(found.numpy(), expected)
