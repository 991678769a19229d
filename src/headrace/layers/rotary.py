"""Rotary position embedding: how fast each pair of a head turns, for every way of stretching the context."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ModelError


def frequencies(theta: float, dim: int, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """The inverse frequencies of a rotary embedding, and the factor on its cosines and sines.

    theta: the base; pair i of dim/2 turns by theta^(-2i/dim) radians per position (Su et al. 2021).
    dim: how many entries of a head are turned.
    scaling: `rope_scaling` as in a Hugging Face config; `rope_type` (or, in older files, `type`) is one of

    - default: as above;
    - linear: positions divided by `factor` (Chen et al. 2023);
    - llama3: long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1's own rule);
    - yarn: the same with a ramp over how often a pair turns in the original context (Peng et al. 2023);
    - freq_factors: divided by a factor for each pair, as GGUF files carry them.

    Returns float32 `[dim/2]` and the factor. Raises ModelError for another type, or a number that is missing.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / _number(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, theta, dim, scaling)
        case "freq_factors":
            factors = torch.tensor(scaling["factors"], dtype=torch.float32)
            if factors.shape != plain.shape or not (factors > 0).all():
                raise ModelError(f"rope frequency factors must be {len(plain)} positive numbers")
            return plain / factors, 1.0
    raise ModelError(
        f"rope scaling type {kind!r} is not supported; known are: default, linear, llama3, yarn, freq_factors"
    )


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"rope scaling {scaling.get('rope_type', scaling.get('type'))!r} needs a positive {key!r}")
    return float(value)


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1 where a pair turns often enough to be left alone
    return torch.where(
        keep == 1, plain, torch.where(keep == 0, plain / factor, (1 - keep) * plain / factor + keep * plain)
    )


def _yarn(plain: Tensor, theta: float, dim: int, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = _number(scaling, "factor")
    original = _number(scaling, "original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        """The (fractional) index of the pair that makes so many turns over the original context."""
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(_number(scaling, "beta_fast", 32)), pair_that_turns(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    inv_freq = plain / factor * slowed + plain * (1 - slowed)
    return inv_freq, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):  # DeepSeek's form
        return mscale(_number(scaling, "mscale")) / mscale(_number(scaling, "mscale_all_dim"))
    return mscale(1.0)
