"""From logits to tokens, in plain torch: greedy choice, filters, one draw per row, and log-probabilities.

The work on a row uses that row alone and always runs in the same order, so that a row gives the same token and the
same logprobs, bit for bit, alone and in any batch. It is also the fastest way on a CPU: one row fits in its caches.
"""

import math

import torch
from torch import Tensor

# Below this a float32 temperature is zero: dividing by it could make 0 / 0.
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token per row.

    A row whose temperature is 0 takes its largest logit, the lowest id where several are equal. Any other row is
    filtered in the order temperature, top_k, top_p, min_p, each filter acting on what the one before has left, and
    then drawn from by inverting the cumulative distribution over the kept tokens in order of their ids: the token is
    the first whose cumulative probability exceeds `uniform`. A filtered token is never drawn.

    NaN counts as -inf, and +inf as the largest finite number. A row without any finite logit gives token 0.

    Args:
        logits: [N, V] float32; not changed.
        temperature: [N] float, >= 0. Logits are divided by it.
        top_k: [N] int64. Keeps the k largest logits and all that are equal to the smallest of them; 0 keeps all.
        top_p: [N] float, above 0. Keeps the fewest most likely tokens whose probabilities add up to at least this,
            lower ids first among equals ("nucleus sampling", Holtzman et al. 2019); 1 keeps all.
        min_p: [N] float, 0 to 1. Keeps tokens at least this many times as likely as the most likely one (Nguyen et
            al. 2024); 0 keeps all.
        uniform: [N] float64, in [0, 1).

    Returns:
        [N] int64 token ids.
    """
    best, tokens = logits.max(dim=-1)  # of several largest, the first; a NaN counts as the largest
    if not best.isfinite().all():
        logits = _without_nan(logits)
        best, tokens = logits.max(dim=-1)
    drawn = ((temperature >= SMALLEST_TEMPERATURE) & best.isfinite()).nonzero().squeeze(-1).tolist()
    if drawn:
        settings = [p.tolist() for p in (temperature, top_k, top_p, min_p, uniform)]
        for row in drawn:
            tokens[row] = _draw(logits[row], best[row], *(column[row] for column in settings))
    return tokens


def _draw(
    logits: Tensor, best: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One draw from `logits` [V], of which `best` is the largest and finite."""
    ids = None  # the tokens still kept, in rising order; None for all
    if 0 < top_k < len(logits):
        ids = _top_k(logits, top_k)
        logits = logits[ids]
    # The logarithm of each probability as a share of the largest: at most 0, so that exp() cannot overflow.
    scores = (logits - best) / temperature
    if top_p < 1:
        kept = _nucleus(scores, top_p)
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    if min_p > 0:
        kept = (scores >= math.log(min_p)).nonzero().squeeze(-1)
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    # In float64 `uniform * total` is below the total for every uniform below 1, so that a token is always found; and
    # the sum exceeds it for the first time at a token of probability above 0.
    cumulative = scores.exp().cumsum(0, dtype=torch.float64)
    place = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return place if ids is None else int(ids[place])


def _top_k(values: Tensor, k: int) -> Tensor:
    """The places in `values` [V] of the k largest and of all that equal the smallest of them, in rising order."""
    return (values >= values.topk(k).values[-1]).nonzero().squeeze(-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """The places in `scores` [V] (log-probabilities but for a constant) of the top_p nucleus, in rising order."""
    shares = scores.exp()
    total = shares.cumsum(0, dtype=torch.float64)[-1]  # not sum(), which adds in an order that depends on the threads
    # Tokens of less than this share hold less than 1 - top_p all together, so that the nucleus needs none of them (half
    # of it, to be safe from rounding). Unless the distribution is flat, few are left to sort.
    least = (1 - top_p) * total / (2 * len(shares))
    candidates = (shares >= least).nonzero().squeeze(-1)
    falling = candidates[scores[candidates].argsort(descending=True, stable=True)]
    cumulative = shares[falling].cumsum(0, dtype=torch.float64)
    count = int(torch.searchsorted(cumulative, top_p * total)) + 1
    return falling[:count].sort().values


def logprobs(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities of given tokens and of the most likely ones.

    NaN counts as -inf, and +inf as the largest finite number. A row without any finite logit gives -inf everywhere.

    Args:
        logits: [N, V] float32; not changed.
        token_ids: [N] int64, one token of each row.
        top: how many of the most likely tokens to report; at most V are.

    Returns:
        chosen [N] float32: the log-softmax of `logits` at `token_ids`;
        top_values [N, top] float32 and top_ids [N, top] int64: the most likely tokens of each row, falling, those of
        equal logits by rising id.
    """
    count, vocabulary = logits.shape
    top = min(top, vocabulary)
    chosen = logits.new_empty(count)
    top_values = logits.new_empty(count, top)
    top_ids = torch.empty(count, top, dtype=torch.int64, device=logits.device)
    for row in range(count):
        values = logits[row]
        if not values.max().isfinite():
            values = _without_nan(values)
        logs = values if values.max() == -math.inf else values.log_softmax(0)
        chosen[row] = logs[token_ids[row]]
        if top:
            largest = _top_k(values, top)
            top_ids[row] = largest[values[largest].argsort(descending=True, stable=True)[:top]]
            top_values[row] = logs[top_ids[row]]
    return chosen, top_values, top_ids


def _without_nan(logits: Tensor) -> Tensor:
    """`logits` with NaN as -inf and +inf as the largest finite number."""
    return logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
