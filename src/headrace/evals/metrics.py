"""Perplexity of a text, and the divergence of a model from a reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from headrace.errors import ConfigError
from headrace.evals.scoring import TextModel, Window, windows

Z95 = 1.959964  # of a normal distribution's mass, 95 % lie within so many standard deviations
PERCENTILES = (50, 90, 95, 99, 99.9)


@dataclass(frozen=True)
class Perplexity:
    """tokens: that were scored. nll: their mean negative log-likelihood, in nats. low, high: the 95 % confidence
    interval of `perplexity`, from the spread over tokens (as if they were independent of each other)."""

    tokens: int
    nll: float
    perplexity: float
    low: float
    high: float


@dataclass(frozen=True)
class Divergence:
    """How far a model Q is from its reference P, over the same tokens.

    kl: the mean of KL(P || Q) of the next token's distribution, in nats, with its 95 % confidence interval.
    percentiles: of KL over the positions. largest: of all. same_top: the share of positions at which both have the same
    most likely token, with its interval (Wilson's). model, reference: their perplexities.
    """

    tokens: int
    kl: float
    kl_low: float
    kl_high: float
    percentiles: dict[str, float]
    largest: float
    same_top: float
    same_top_low: float
    same_top_high: float
    model: Perplexity
    reference: Perplexity


def perplexity(model: TextModel, ids: Sequence[int], window: int, stride: int) -> Perplexity:
    """exp of the mean negative log-likelihood of a text's tokens, each seen from a sliding window of tokens."""
    ids = list(ids)
    losses = []
    for part in _bar(len(ids), window, stride):
        start = part.first
        for logprobs in model.logprobs(ids, part):
            losses.append(_losses(logprobs, ids[start : start + len(logprobs)]))
            start += len(logprobs)
    return summarize(torch.cat(losses))


def divergence(model: TextModel, reference: TextModel, ids: Sequence[int], window: int, stride: int) -> Divergence:
    """Both models over the same windows of a text. Raises ConfigError where their vocabularies differ."""
    if model.vocab_size != reference.vocab_size:
        raise ConfigError(
            f"the models have vocabularies of {model.vocab_size} and {reference.vocab_size} tokens: "
            f"only models with the same one can be compared"
        )
    ids = list(ids)
    if model.tokenizer.decode(ids[:64], False) != reference.tokenizer.decode(ids[:64], False):
        raise ConfigError("the models have different tokenizers: only models with the same one can be compared")
    kls, own, others, same = [], [], [], []
    for part in _bar(len(ids), window, stride):
        start = part.first
        given = zip(model.logprobs(ids, part), reference.logprobs(ids, part), strict=True)
        for q, p in given:
            t = ids[start : start + len(q)]
            start += len(q)
            kls.append((p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp(min=0))
            own.append(_losses(q, t))
            others.append(_losses(p, t))
            same.append(p.argmax(-1) == q.argmax(-1))
    kl, agree = torch.cat(kls), torch.cat(same)
    mean, error = float(kl.mean()), _standard_error(kl)
    share = float(agree.double().mean())
    low, high = wilson(share, len(agree))
    return Divergence(
        tokens=len(kl),
        kl=mean,
        kl_low=max(0.0, mean - Z95 * error),
        kl_high=mean + Z95 * error,
        percentiles={f"{p:g}": float(kl.quantile(p / 100)) for p in PERCENTILES},
        largest=float(kl.max()),
        same_top=share,
        same_top_low=low,
        same_top_high=high,
        model=summarize(torch.cat(own)),
        reference=summarize(torch.cat(others)),
    )


def summarize(losses: Tensor) -> Perplexity:
    """losses: float64 `[n]`, the negative log-likelihood of each token."""
    mean, error = float(losses.mean()), _standard_error(losses)
    low, high = (_exp(mean + sign * Z95 * error) for sign in (-1, 1))
    return Perplexity(len(losses), mean, _exp(mean), low, high)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share that was seen in `count` trials (Wilson 1927)."""
    z2 = Z95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _losses(logprobs: Tensor, targets: list[int]) -> Tensor:
    return -logprobs.gather(1, torch.tensor(targets)[:, None])[:, 0].double()


def _bar(length: int, window: int, stride: int) -> "tqdm[Window]":
    return tqdm(windows(length, window, stride), desc="Evaluating", unit="window", disable=None)
