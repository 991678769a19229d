"""What sampling should do, computed without it: exact distributions in NumPy, and a test of draws against them."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Floats = NDArray[np.float64]


def exact_distribution(
    logits: Floats,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    xtc_threshold: float = 1.0,
) -> Floats:
    """The distribution [V] that is to be drawn from, in float64; a filtered token has exactly 0.

    xtc_threshold: of XTC where it applies for certain.
    """
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    if top_k:
        p[logits < np.sort(logits)[::-1][min(top_k, len(logits)) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        falling = np.sort(p)[::-1]
        p[p < falling[min(np.searchsorted(falling.cumsum(), top_p), len(p) - 1)]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    if (p >= xtc_threshold).any():
        p[p > p[p >= xtc_threshold].min()] = 0
    return p / p.sum()


def transformers_distribution(
    logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """The same by the logits warpers of transformers, in the order in which it applies them."""
    scores = TemperatureLogitsWarper(float(temperature))(None, torch.from_numpy(logits)[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)[0].numpy()


def p_value(draws: NDArray[np.int64], distribution: Floats) -> float:
    """How likely draws that fit so badly are under `distribution`, by Pearson's chi-square test.

    A draw of probability 0 gives 0. Rare tokens are counted together, so that every class expects at least 5 draws.
    """
    counts = np.bincount(draws, minlength=len(distribution))
    if counts[distribution == 0].any():
        return 0.0
    expected = distribution * len(draws)
    rare = expected < 5
    classes = [(counts[~rare], expected[~rare]), ([counts[rare].sum()], [expected[rare].sum()])]
    if expected[rare].sum() < 5:  # too rare even together: by themselves they say nothing
        classes = [(counts[~rare], expected[~rare] * counts[~rare].sum() / expected[~rare].sum())]
    observed, expected = (np.concatenate([c[i] for c in classes]) for i in (0, 1))
    return float(stats.chisquare(observed, expected).pvalue)
