"""AWQ: scales that make the inputs that matter most coarse to be rounded where it hurts least.

Lin et al. 2023, https://arxiv.org/abs/2306.00978: each input is scaled by its mean magnitude to the power of alpha,
alpha from a grid, and then for each group of a row the largest weights are clipped, if that lowers the error. All
errors here are of the matrix's outputs over the whole calibration set, which H, the sum of x xᵀ, is enough to tell.
"""

import torch
from torch import Tensor

from headrace.quantize.folding import Folding
from headrace.quantize.gptq import row_errors
from headrace.quantize.layer_run import Statistics
from headrace.quantize.rounding import in_groups, round_to_nearest
from headrace.quantize.schemes import Scheme

ALPHAS = [i / 20 for i in range(20)]
CLIPS = [1 - i / 20 for i in range(1, 11)]


def search_scales(
    folding: Folding, stage: int, stats: Statistics, scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Tensor, float, float]:
    """The best scales of a stage, as `Folding.shared` has them; their alpha; the error as a share of that without."""
    weight = folding.joined(stage)
    magnitude = folding.shared(stage, stats.mean_abs).clamp(min=1e-8)
    best, best_alpha, least, plain = torch.ones_like(magnitude), 0.0, torch.inf, 1.0
    for alpha in ALPHAS:
        scales = magnitude**alpha
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        each = folding.spread(stage, scales)
        rounded = round_to_nearest(weight * each, scheme, scale_dtype=scale_dtype).dequantize() / each
        error = float(row_errors(weight - rounded, stats.hessian).sum())
        if alpha == 0:
            plain = error
        if error < least:
            best, best_alpha, least = scales, alpha, error
    return best, best_alpha, least / plain if plain else 1.0


def clip(weight: Tensor, hessian: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Tensor:
    """The weight `[out, in]` with each group's extremes cut off where its part of the output comes out better so.

    A row as a whole stays as it is if, with all its groups taken together, that made it worse after all.
    """
    size = scheme.columns_per_scale(weight.shape[1])
    groups = in_groups(weight, size)  # [out, groups, size]
    blocks = _diagonal_blocks(hessian, size)  # [groups, size, size]

    def error(clipped: Tensor) -> Tensor:
        rounded = round_to_nearest(clipped.flatten(1)[:, : weight.shape[1]], scheme, scale_dtype=scale_dtype)
        difference = groups - in_groups(rounded.dequantize(), size)
        return (torch.einsum("rgi,gij->rgj", difference, blocks) * difference).sum(-1)

    least, best = error(groups), groups
    limits = groups.abs().amax(-1, keepdim=True)
    for share in CLIPS:
        candidate = groups.clamp(-limits * share, limits * share)
        found = error(candidate)
        best = torch.where((found < least)[..., None], candidate, best)
        least = torch.minimum(found, least)
    clipped = best.flatten(1)[:, : weight.shape[1]]
    before, after = (
        row_errors(weight - round_to_nearest(w, scheme, scale_dtype=scale_dtype).dequantize(), hessian)
        for w in (weight, clipped)
    )
    return torch.where((after < before)[:, None], clipped, weight)


def _diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    blocks = -(-len(hessian) // size)
    padded = torch.nn.functional.pad(hessian, (0, blocks * size - len(hessian)) * 2)
    return padded.view(blocks, size, blocks, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
