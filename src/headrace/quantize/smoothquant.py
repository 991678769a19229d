"""SmoothQuant: moving the outliers of activations into the weights, so that both can be rounded to eight bits.

Xiao et al. 2022, https://arxiv.org/abs/2211.10438: input j is divided by max|x_j|^alpha / max|w_j|^(1 - alpha).
"""

import torch
from torch import Tensor

from headrace.ops.reference import integer_linear
from headrace.quantize.folding import Folding
from headrace.quantize.layer_run import Statistics
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import Scheme

ALPHAS = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def smoothing(
    folding: Folding, stage: int, stats: Statistics, scheme: Scheme, alpha: float | None
) -> tuple[Tensor, float | None]:
    """The scales of a stage, as `Folding.shared` has them, and their alpha.

    alpha: None to search: the one with the least error of the outputs, or none at all (None is returned then) where
        that is better still.
    """
    weight = folding.joined(stage)
    largest_x = folding.shared(stage, stats.max_abs).clamp(min=1e-5)
    largest_w = folding.shared(stage, weight.abs().amax(0)).clamp(min=1e-5)

    def scales(a: float) -> Tensor:
        return (largest_x**a / largest_w ** (1 - a)).clamp(1e-4, 1e4)

    if alpha is not None:
        return scales(alpha), alpha
    exact = stats.sample @ weight.T

    def error(candidate: Tensor) -> float:
        each = folding.spread(stage, candidate)
        coded = round_to_nearest(weight * each, scheme)
        return float((integer_linear(stats.sample / each, coded) - exact).square().sum())

    best, best_alpha = torch.ones_like(largest_x), None
    least = error(best)
    for a in ALPHAS:
        if (found := error(scales(a))) < least:
            best, best_alpha, least = scales(a), a, found
    return best, best_alpha
