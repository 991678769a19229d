"""What requests change in the model's logits before a token is drawn: biases, penalties, and what is allowed at all."""

import math

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.params import MAX_REPETITION, SampleRequest

LARGEST = float(torch.finfo(torch.float32).max)


def adjusted(logits: Tensor, requests: list[SampleRequest]) -> Tensor:
    """`logits` [N, V] float32 as the requests want them: a copy, if any wants a change.

    Each row depends on itself alone. Bias and forbidden tokens come first, then penalties, then DRY; a grammar and
    `allowed_token_ids` hold in any case.
    """
    shifts = [(row, token, amount) for row, r in enumerate(requests) for token, amount in _shifts(r)]
    penalized = [row for row, r in enumerate(requests) if r.history is not None]
    choosy = [row for row, r in enumerate(requests) if r.mask is not None or r.params.allowed_token_ids is not None]
    if not (shifts or penalized or choosy):
        return logits
    changed = logits.clone()
    if shifts:
        _shift(changed, shifts)
    if penalized:
        _penalize(changed, requests, penalized)
        _shift(changed, [(row, *shift) for row in penalized for shift in _dry(requests[row])])
    for row in choosy:
        _keep_allowed(changed[row], logits[row], requests[row])
    return changed


def _shifts(request: SampleRequest) -> list[tuple[int, float]]:
    """Tokens and what is added to their logits."""
    bad = request.history.forbidden() if request.history is not None else ()
    return [*(request.params.logit_bias or {}).items(), *((token, -math.inf) for token in (*request.forbidden, *bad))]


def _shift(logits: Tensor, shifts: list[tuple[int, int, float]]) -> None:
    """Adds amounts to single logits, each given as (row, token, amount)."""
    if shifts:
        rows, tokens, amounts = zip(*shifts, strict=True)
        amount = torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
        places = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
        logits.index_put_(places, amount, accumulate=True)


def _penalize(logits: Tensor, requests: list[SampleRequest], rows: list[int]) -> None:
    """Repetition, frequency and presence penalty of all rows together; only tokens that were there before have any."""
    places, tokens, factors, amounts = [], [], [], []
    for row in rows:
        history, p = requests[row].history, requests[row].params
        if history is not None and (p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty):
            ids, counts = history.seen
            tokens.append(ids)
            places.append(np.full(len(ids), row))
            factors.append(np.full(len(ids), p.repetition_penalty))
            amounts.append(p.frequency_penalty * counts + p.presence_penalty * (counts > 0))
    if tokens:
        where = torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(tokens))
        values = logits[where]
        factor = torch.from_numpy(np.concatenate(factors)).to(values)
        amount = torch.from_numpy(np.concatenate(amounts)).to(values)
        logits[where] = torch.where(values > 0, values / factor, values * factor) - amount


def _dry(request: SampleRequest) -> list[tuple[int, float]]:
    """What DRY takes off each token that would lengthen a repetition."""
    history, p = request.history, request.params
    if history is None or not p.dry_multiplier:
        return []
    ids, lengths = history.repetitions(MAX_REPETITION)
    excess = (lengths - p.dry_allowed_length).astype(np.float64)
    with np.errstate(over="ignore"):
        penalty = np.minimum(p.dry_multiplier * p.dry_base**excess, LARGEST)
    return [(token, -amount) for token, amount, x in zip(ids.tolist(), penalty.tolist(), excess, strict=True) if x >= 0]


def _keep_allowed(row: Tensor, model_row: Tensor, request: SampleRequest) -> None:
    """Keeps in `row` [V] what a grammar and `allowed_token_ids` both allow, or the grammar alone, if that were nothing.

    Where the other rules leave nothing of it, they give way; and if it has no finite logit, all of it is alike.
    """
    allowed = np.ones(len(row), np.bool_)
    if request.params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[request.params.allowed_token_ids] = True
    if request.mask is not None:
        bits = np.unpackbits(request.mask.result().view(np.uint8), bitorder="little", count=len(row)).astype(np.bool_)
        allowed = bits & allowed if (bits & allowed).any() else bits
    barred = torch.from_numpy(~allowed).to(row.device)
    row.masked_fill_(barred, -math.inf)
    if not (row > -math.inf).any():
        row.copy_(model_row).masked_fill_(barred, -math.inf)
        if not (row > -math.inf).any():
            row.masked_fill_(~barred, 0.0)
