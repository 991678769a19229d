"""Rounding to nearest: which scale a group of values gets, and which code each value."""

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.formats.checkpoint import IntegerWeight
from headrace.formats.floats import FloatWeight
from headrace.quantize.schemes import PER_TENSOR, Scheme

# A search tries the scale times each of these. Below a half nothing was ever best.
SHRINKING = [1 - 0.02 * i for i in range(26)]
CHUNK_VALUES = 1 << 20  # so many are worked on at once: the search makes copies


def round_to_nearest(
    weight: Tensor, scheme: Scheme, *, search: bool = False, scale_dtype: torch.dtype = torch.float32
) -> IntegerWeight:
    """A matrix `[out, in]` in whole numbers.

    search: take for each group the scale with the least squared error; otherwise the one that reaches its extremes.
    scale_dtype: in which scales will be stored: they are rounded to it before the codes are made.
    Raises ModelError for a NaN or an infinity.
    """
    weight = finite(weight.float())
    size = scheme.columns_per_scale(weight.shape[1])
    groups = in_groups(weight, size)
    if scheme.group_size == PER_TENSOR:
        scale, zero = fit(groups.reshape(1, -1), scheme, search=search, scale_dtype=scale_dtype)
        scale, zero = (t.expand(*groups.shape[:2], 1).contiguous() for t in (scale, zero))
        codes = encode(groups, scale, zero, scheme)
    else:
        codes = torch.empty_like(groups)
        scale, zero = (torch.empty(*groups.shape[:2], 1) for _ in range(2))
        step = max(1, CHUNK_VALUES // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            scale[rows], zero[rows] = fit(groups[rows], scheme, search=search, scale_dtype=scale_dtype)
            codes[rows] = encode(groups[rows], scale[rows], zero[rows], scheme)
    return integer_weight(codes.flatten(1)[:, : weight.shape[1]], scale[..., 0], zero[..., 0], scheme, size)


def round_to_floats(
    weight: Tensor, scheme: Scheme, *, search: bool = False, scale_dtype: torch.dtype = torch.float32
) -> FloatWeight:
    """A matrix `[out, in]` in floating-point numbers of eight bits, with a scale for each row or for all.

    Without a search the largest value gets the largest code. Otherwise as `round_to_nearest`.
    """
    weight = finite(weight.float())
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[scheme.format]
    rows = weight.reshape(1, -1) if scheme.group_size == PER_TENSOR else weight
    full = stored_scale(rows.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max, scale_dtype)
    largest = torch.finfo(dtype).max

    def codes(scale: Tensor) -> Tensor:
        return (rows / scale).clamp(-largest, largest).to(dtype)

    scale = full
    if search:
        least = torch.full_like(full, torch.inf)
        for factor in SHRINKING:
            candidate = stored_scale(full * factor, scale_dtype)
            error = (codes(candidate).float() * candidate - rows).square().sum(-1, keepdim=True)
            scale = torch.where(error < least, candidate, scale)
            least = torch.minimum(least, error)
    data = codes(scale).view(weight.shape)
    return FloatWeight(data, scale.expand(len(weight), 1).contiguous())


def fit(
    values: Tensor, scheme: Scheme, *, search: bool = False, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The scale and the zero of values `[..., n]` that share them: float32 `[..., 1]` each; the zero is whole.

    Symmetric codes of eight bits have scale = max|value| / 127. With fewer bits the steps are so few that half a step
    beyond the greatest code counts: (2^bits - 1) / 2 of them, which has less error on average, reach the maximum.
    """
    low, high = scheme.code_range
    if scheme.symmetric:
        reach = 127.0 if scheme.bits == 8 else (high - low) / 2
        scale = stored_scale(values.abs().amax(-1, keepdim=True) / reach, scale_dtype)
        zero = torch.zeros_like(scale)
    else:
        least = values.amin(-1, keepdim=True).clamp(max=0)
        # Divided before it is subtracted, lest the difference be infinite.
        span = values.amax(-1, keepdim=True).clamp(min=0) / high - least / high
        scale = stored_scale(span, scale_dtype)
        zero = (-least / scale).round().clamp(low, high)
    if search:
        full, least_error = scale, torch.full_like(scale, torch.inf)
        for factor in SHRINKING:
            candidate = stored_scale(full * factor, scale_dtype)
            codes = encode(values, candidate, zero, scheme)
            error = ((codes - zero).mul_(candidate) - values).square_().sum(-1, keepdim=True)
            scale = torch.where(error < least_error, candidate, scale)
            least_error = torch.minimum(least_error, error)
    return scale, zero


def encode(values: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """The codes of values, as float32 of the same shape; value is about scale * (code - zero)."""
    low, high = scheme.code_range
    return (values / scale).round_().add_(zero).clamp_(low, high)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as it will be stored, in float32: rounded to the dtype, within its range, and never zero.

    Values of zero have a scale of one: anything would do that can be divided by.
    """
    limits = torch.finfo(dtype)
    # Numbers below the normal ones will do for float16, which has few of those, but not in float32: there processors
    # may take them for zero.
    smallest = max(limits.smallest_normal * limits.eps, torch.finfo(torch.float32).smallest_normal)
    rounded: Tensor = scale.clamp(max=limits.max).to(dtype).float().clamp(min=smallest)
    return rounded.masked_fill(scale == 0, 1.0)


def in_groups(weight: Tensor, size: int) -> Tensor:
    """Rows `[out, in]` cut into groups `[out, groups, size]`; the last is filled up with zeros."""
    missing = -weight.shape[1] % size
    return torch.nn.functional.pad(weight, (0, missing)).view(len(weight), -1, size)


def integer_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme, size: int, order: Tensor | None = None
) -> IntegerWeight:
    """What was found, in the form in which formats and kernels take it. codes: `[out, in]`; others `[out, groups]`."""
    if scheme.symmetric:
        return IntegerWeight(codes.to(torch.int8), scheme.bits, size, scales, None, order)
    return IntegerWeight(codes.to(torch.uint8), scheme.bits, size, scales, -scales * zeros, order)


def finite(weight: Tensor) -> Tensor:
    if not torch.isfinite(weight).all():
        raise ModelError("holds NaN or infinity, for which there is no code")
    return weight
