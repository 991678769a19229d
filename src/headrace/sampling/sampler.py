"""One step's sampling: a row of logits and a request in, a token (and its logprobs, where asked for) out."""

import torch
from torch import Tensor

from headrace.ops.reference import Ops
from headrace.sampling.adjust import adjusted
from headrace.sampling.params import SampledToken, SampleRequest, TokenLogprob
from headrace.sampling.random import uniform

XTC_STREAM = 1  # of random numbers: whether to apply XTC must not depend on what is drawn
XTC_OFF = 2.0  # no probability reaches it


def sample_tokens(ops: Ops, logits: Tensor, requests: list[SampleRequest]) -> list[SampledToken]:
    """Draws a token for each request from its row of `logits`; as `draw`, and with logprobs as `described`."""
    return described(ops, logits, draw(ops, logits, requests), requests)


def draw(ops: Ops, logits: Tensor, requests: list[SampleRequest]) -> list[int]:
    """Draws a token for each request from its row of `logits` [N, V] float32, which stay as they are.

    If all tokens are forbidden, or have no finite logit, token 0 comes out; but never what `allowed_token_ids` or a
    mask bars.
    """
    if not requests:
        return []
    positions = [uniform(r.seed, r.index, r.position) if r.params.temperature else 0.0 for r in requests]
    draws = torch.tensor(positions, dtype=torch.float64, device=logits.device)
    temperature, top_k, top_p, min_p, xtc_threshold = _settings(logits, requests)
    tokens = ops.sample(adjusted(logits, requests), temperature, top_k, top_p, min_p, draws, xtc_threshold)
    drawn: list[int] = tokens.tolist()
    return drawn


def distribution(ops: Ops, logits: Tensor, requests: list[SampleRequest]) -> Tensor:
    """From what `draw` draws for each request: the probability of each token, float64 [N, V]."""
    temperature, top_k, top_p, min_p, xtc_threshold = _settings(logits, requests)
    return ops.distribution(adjusted(logits, requests), temperature, top_k, top_p, min_p, xtc_threshold)


def drawn_from(weights: Tensor, number: float) -> int:
    """The token that a number in [0, 1) stands for, where each is as likely as its weight (float64 [V], not all 0)."""
    cumulative = weights.cumsum(0)
    return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))


def _settings(logits: Tensor, requests: list[SampleRequest]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Temperature, top_k, top_p, min_p and XTC's threshold of each request, as `Ops.sample` has them."""
    vocabulary = logits.shape[1]
    params = [r.params for r in requests]
    excluding = [_xtc_threshold(r) for r in requests]

    def column(values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return (
        column([p.temperature for p in params]),
        column([min(max(p.top_k, 0), vocabulary) for p in params], torch.int64),
        column([p.top_p for p in params]),
        column([p.min_p for p in params]),
        column(excluding) if min(excluding) < XTC_OFF else None,
    )


def described(ops: Ops, logits: Tensor, token_ids: list[int], requests: list[SampleRequest]) -> list[SampledToken]:
    """Drawn tokens, with their logprobs where those were asked for.

    These are the model's own: before penalties, bias, forbidden tokens, temperature and filters.
    """
    sampled = [SampledToken(token) for token in token_ids]
    rows = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
    if rows:
        # Most often every row or none has asked; then the logits need no copy.
        some = slice(None) if len(rows) == len(requests) else rows
        most = max(requests[row].params.logprobs or 0 for row in rows)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        for row, report in zip(rows, _report(ops, logits[some], tokens[some], most), strict=True):
            report.top = report.top[: requests[row].params.logprobs]
            sampled[row].logprob = report
    return sampled


def prompt_logprobs(ops: Ops, logits: Tensor, next_ids: list[int], top: int) -> list[TokenLogprob]:
    """The logprob of each prompt token that follows a row of `logits` [N, V] float32, with the `top` most likely."""
    return _report(ops, logits, torch.tensor(next_ids, dtype=torch.int64, device=logits.device), top)


def _report(ops: Ops, logits: Tensor, token_ids: Tensor, top: int) -> list[TokenLogprob]:
    chosen, top_values, top_ids = ops.logprobs(logits, token_ids, top)
    rows = zip(token_ids.tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    return [TokenLogprob(token, value, list(zip(ids, values, strict=True))) for token, value, ids, values in rows]


def _xtc_threshold(request: SampleRequest) -> float:
    """The threshold where this draw is one of those to which XTC applies."""
    p = request.params
    if not p.xtc_probability or not p.xtc_threshold or p.xtc_threshold > 0.5 or not p.temperature:
        return XTC_OFF
    toss = uniform(request.seed, request.index, request.position, XTC_STREAM)
    return p.xtc_threshold if toss < p.xtc_probability else XTC_OFF
