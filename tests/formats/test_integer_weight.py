"""Matrices of whole numbers, against their formula in NumPy."""

import numpy as np
import pytest
import torch

from headrace.formats.checkpoint import IntegerWeight


@pytest.mark.parametrize("group_size", [1, 3, 4, 10, 16])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("minimums", [False, True])
def test_values(group_size: int, ordered: bool, minimums: bool) -> None:
    """With a last group that is short, and with columns in another order than the features."""
    rng = np.random.default_rng(0)
    rows, columns = 5, 10
    groups = -(-columns // group_size)
    codes = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales = rng.normal(size=(rows, groups)).astype(np.float32)
    lows = rng.normal(size=(rows, groups)).astype(np.float32)
    order = rng.permutation(columns)
    expected = np.empty((rows, columns), np.float32)
    for r in range(rows):
        for j in range(columns):
            value = scales[r, j // group_size] * np.float32(codes[r, j])
            feature = order[j] if ordered else j
            expected[r, feature] = value + lows[r, j // group_size] if minimums else value
    weight = IntegerWeight(
        torch.from_numpy(codes),
        4,
        group_size,
        torch.from_numpy(scales),
        torch.from_numpy(lows) if minimums else None,
        torch.from_numpy(order) if ordered else None,
    )
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected)
