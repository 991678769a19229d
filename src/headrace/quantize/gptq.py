"""GPTQ: rounding column by column, each column's error made good by the columns that are still to come.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323: for a matrix W and the inputs X that it meets, rounding a column
changes the output least if the later columns then move by error / U[j, j] * U[j, later], where U is the upper Cholesky
factor of the inverse of H = X Xᵀ. Act-order takes the columns in order of falling H[j, j].
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.formats.checkpoint import IntegerWeight
from headrace.quantize.rounding import encode, finite, fit, integer_weight, round_to_nearest
from headrace.quantize.schemes import Scheme

logger = logging.getLogger(__name__)

MAX_DAMPING = 1.0  # beyond that H is hardly seen any more
BLOCK = 128  # columns whose effects on all later ones are gathered into one product


@dataclass(frozen=True)
class Settings:
    """damping: of the mean of H's diagonal, added to it; multiplied by ten while H cannot be factored.
    act_order: take columns in order of falling importance; their groups then hold columns from everywhere, unless
    static_groups: they keep the groups, and the scales, that they have without it.
    search: choose each group's scale by least squared error.
    """

    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = False
    search: bool = False
    scale_dtype: torch.dtype = torch.float16


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, settings: Settings, name: str) -> IntegerWeight:
    """A matrix `[out, in]` in whole numbers, given H, float32 `[in, in]`: the sum of x xᵀ over the inputs x.

    Each row is rounded to nearest where that happens to have less error, so it is never worse. Inputs that are always
    zero ("dead") are rounded to nearest, and so is all where H cannot be factored; both are logged with `name`.
    Raises ModelError for NaN or infinity in the weight.
    """
    weight = finite(weight.float())
    columns = weight.shape[1]
    size = scheme.columns_per_scale(columns)
    order = hessian.diagonal().argsort(descending=True, stable=True) if settings.act_order else torch.arange(columns)
    regroups = settings.act_order and not settings.static_groups and size < columns
    permuted = weight[:, order] if settings.act_order else weight
    h = hessian[order][:, order] if settings.act_order else hessian
    rounded = round_to_nearest(
        permuted if regroups else weight, scheme, search=settings.search, scale_dtype=settings.scale_dtype
    )
    factor = _inverse_factor(h, settings.damping, name)
    if factor is None:
        return rounded if not regroups else _with_order(rounded, order)
    if regroups or not settings.act_order:
        codes, scales, zeros = _round_columns(permuted, factor, scheme, size, settings)
        groups = torch.arange(columns) // size
    else:  # the scales are those of rounding to nearest; columns keep their groups, wherever they stand
        groups = order // size
        scales, zeros = rounded.scales, _zeros(rounded)
        codes, _, _ = _round_columns(permuted, factor, scheme, size, settings, static=(scales, zeros, groups))
        codes = torch.empty_like(codes).index_copy_(1, order, codes)
        groups, h, permuted = torch.arange(columns) // size, hessian, weight

    def error(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return row_errors(permuted - (codes - zeros[:, groups]) * scales[:, groups], h)

    plain_codes, plain_zeros = rounded.codes.float(), _zeros(rounded)
    better = error(codes, scales, zeros) < error(plain_codes, rounded.scales, plain_zeros)
    codes = torch.where(better[:, None], codes, plain_codes)
    scales = torch.where(better[:, None], scales, rounded.scales)
    zeros = torch.where(better[:, None], zeros, plain_zeros)
    return integer_weight(codes, scales, zeros, scheme, size, order if regroups else None)


def row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """The squared change of each row's output over all inputs: `[out]`. difference: of weights `[out, in]`."""
    return ((difference @ hessian) * difference).sum(1)


def _with_order(coded: IntegerWeight, order: Tensor) -> IntegerWeight:
    return IntegerWeight(coded.codes, coded.bits, coded.group_size, coded.scales, coded.minimums, order)


def _zeros(coded: IntegerWeight) -> Tensor:
    if coded.minimums is None:
        return torch.zeros_like(coded.scales)
    return (-coded.minimums / coded.scales).round()


def _inverse_factor(hessian: Tensor, damping: float, name: str) -> Tensor | None:
    """The upper Cholesky factor of the inverse of H, damped as much as it takes; None if nothing helps."""
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    if dead.all():
        logger.warning("%s: all inputs were zero in the calibration data: rounded to nearest", name)
        return None
    if dead.any():
        logger.warning(
            "%s: %d of %d inputs were always zero in the calibration data; they are rounded to nearest",
            name, int(dead.sum()), len(dead),
        )  # fmt: skip
    mean = diagonal.mean()
    share = damping
    while share <= MAX_DAMPING * 1.001:
        h = hessian.clone()
        # A dead input has zeros in its row and column: with one on the diagonal it stands by itself.
        h.diagonal().copy_(torch.where(dead, mean, diagonal + share * mean))
        lower, failed = torch.linalg.cholesky_ex(h)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and torch.isfinite(upper).all():
                if share > damping:
                    logger.warning(
                        "%s: too little or too uniform calibration data: the damping was raised from %g to %g",
                        name, damping, share,
                    )  # fmt: skip
                return upper
        share = max(share * 10, 1e-4)
    logger.warning("%s: the calibration data gives no usable Hessian: rounded to nearest", name)
    return None


def _round_columns(
    weight: Tensor,
    factor: Tensor,
    scheme: Scheme,
    size: int,
    settings: Settings,
    static: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]` of a matrix whose columns are in the order to go by.

    static: scales and zeros to take, and the group of each column; otherwise those of a group are made when its first
        column's turn has come, and its columns have taken up the errors of all before.
    """
    rows, columns = weight.shape
    # Columns lie in rows here: each step of the loop then works on memory in one piece.
    w = weight.T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty_like(w)
    num_groups = -(-columns // size)
    scales, zeros = (torch.empty(num_groups, rows) for _ in range(2))
    if static is not None:
        scales, zeros = static[0].T.contiguous(), static[1].T.contiguous()
    # A block begins where a group does, so that a group's columns are up to date when its scale is made.
    step = max(1, BLOCK // size) * size if static is None and size < columns else BLOCK
    if static is None and size >= columns:
        scale, zero = fit(weight, scheme, search=settings.search, scale_dtype=settings.scale_dtype)
        scales[0], zeros[0] = scale[:, 0], zero[:, 0]
    for start in range(0, columns, step):
        end = min(start + step, columns)
        block = w[start:end]
        u = factor[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            column = start + i
            group = column // size if static is None else int(static[2][column])
            if static is None and size < columns and column % size == 0:
                values = block[i : i + size].T
                scale, zero = fit(values, scheme, search=settings.search, scale_dtype=settings.scale_dtype)
                scales[group], zeros[group] = scale[:, 0], zero[:, 0]
            codes[column] = encode(block[i], scales[group], zeros[group], scheme)
            value = (codes[column] - zeros[group]) * scales[group]
            errors[i] = (block[i] - value) / u[i, i]
            if i + 1 < end - start:
                block[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
        if end < columns:
            w[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous()
