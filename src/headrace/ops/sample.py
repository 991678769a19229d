"""From logits to tokens, in plain torch: greedy choice, filters, one draw per row, and log-probabilities.

What a row gives depends on that row alone, and every sum runs in a fixed order, so that a row gives the same token and
the same logprobs, bit for bit, alone and in any batch, with any number of threads.
"""

import math

import torch
from torch import Tensor

# Below this a temperature counts as 0: dividing by it in float32 could make 0 / 0.
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny

# Drawing goes through so many logits at once: what is computed of them stays in a core's cache.
TILE = 1 << 16


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    xtc_threshold: Tensor | None = None,
) -> Tensor:
    """Draws one token per row.

    A row whose temperature is 0 takes its largest logit, the lowest id where several are equal. Any other row is
    filtered in the order temperature, top_k, top_p, min_p, XTC, each filter acting on what the one before has left, and
    then drawn from by inverting the cumulative distribution over the kept tokens in order of their ids: the token is
    the first whose cumulative probability exceeds `uniform`. A filtered token is never drawn.

    NaN counts as -inf, and +inf as the largest finite number. A row without any finite logit gives token 0.

    Args:
        logits: [N, V] float32; not changed.
        temperature: [N] float, >= 0. Logits are divided by it.
        top_k: [N] int64. Keeps the k most likely tokens; 0 keeps all.
        top_p: [N] float, above 0. Keeps the fewest most likely tokens whose probabilities add up to at least this
            (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
        min_p: [N] float, 0 to 1. Keeps the tokens that are at least this many times as likely as the most likely one
            (Nguyen et al. 2024); 0 keeps all.
        uniform: [N] float64, in [0, 1).
        xtc_threshold: [N] float, above 0. Of the tokens with at least this probability only the least likely is kept,
            and all as likely as it (https://github.com/oobabooga/text-generation-webui/pull/6335, where a toss decides
            whether to do so; that is the caller's); above 1 keeps all, as None does for all rows.
        Tokens exactly as likely as the last one that top_k or top_p keeps are kept too.

    Returns:
        [N] int64 token ids.
    """
    best, tokens = logits.max(-1)  # of several largest the first; a NaN counts as the largest
    if not best.isfinite().all():
        logits = _without_nan(logits)
        best, tokens = logits.max(-1)
    drawn = ((temperature >= SMALLEST_TEMPERATURE) & best.isfinite()).nonzero().squeeze(-1)
    for rows in torch.split(drawn, max(1, TILE // logits.shape[1])):
        if len(rows):
            settings = [x[rows, None] for x in (best, temperature, top_k, top_p, min_p, uniform)]
            xtc = None if xtc_threshold is None else xtc_threshold[rows, None]
            tokens[rows] = _draw(logits.index_select(0, rows), xtc, *settings)
    return tokens


def distribution(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    xtc_threshold: Tensor | None = None,
) -> Tensor:
    """From what `sample` draws: the probability of each token, float64 [N, V], given the same arguments.

    That is 1 for a single token in a row whose temperature is 0, or that has no finite logit.
    """
    always = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    tokens = sample(logits, torch.zeros_like(temperature), top_k, top_p, min_p, always)
    probabilities = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    probabilities[torch.arange(len(logits)), tokens] = 1.0
    logits = _without_nan(logits)
    best = logits.max(-1).values
    rows = ((temperature >= SMALLEST_TEMPERATURE) & best.isfinite()).nonzero().squeeze(-1)
    if len(rows):
        settings = [x[rows, None] for x in (best, temperature, top_k, top_p, min_p)]
        xtc = None if xtc_threshold is None else xtc_threshold[rows, None]
        shares, columns = _shares(logits.index_select(0, rows), xtc, *settings)
        kept = shares.double() / shares.cumsum(-1, dtype=torch.float64)[:, -1:]
        probabilities[rows] = 0.0
        columns = torch.arange(logits.shape[1], device=logits.device) if columns is None else columns
        probabilities[rows[:, None], columns] = kept
    return probabilities


def _draw(
    logits: Tensor,
    xtc_threshold: Tensor | None,
    best: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """One draw from each row of `logits` [n, V], with settings [n, 1]; `best` is each row's largest logit, finite."""
    shares, columns = _shares(logits, xtc_threshold, best, temperature, top_k, top_p, min_p)
    # In float64 `uniform * total` is below the total for every uniform below 1, so that a token is always found; and
    # the sum exceeds it for the first time at a token whose share is not 0.
    cumulative = shares.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(-1)
    return tokens if columns is None else columns[tokens]


def _shares(
    logits: Tensor,
    xtc_threshold: Tensor | None,
    best: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Each token's probability as a share of the most likely one's, after the filters: of all tokens [n, V], or of
    those columns [V'], in order, that some row may keep."""
    top_k = top_k.where(top_k < logits.shape[1], 0)
    least = columns = None
    if top_k.any():
        largest = logits.topk(int(top_k.max())).values
        least = largest.gather(-1, (top_k - 1).clamp(min=0)).where(top_k > 0, -math.inf)
        # What no row keeps need not go through the rest.
        columns = (logits >= least).any(0).nonzero().squeeze(-1)
        logits = logits.index_select(1, columns)
    # No exponent is above 0, so nothing can overflow.
    shares = ((logits - best) / temperature.float()).exp_()
    if least is not None:
        _keep(shares, logits, least)
    if (top_p < 1).any():
        _keep(shares, shares, _least_of_nucleus(shares, top_p))
    if min_p.any():
        _keep(shares, shares, min_p.float())
    if xtc_threshold is not None and (xtc_threshold <= 1).any():
        _exclude_top_choices(shares, xtc_threshold)
    return shares, columns


def _keep(shares: Tensor, values: Tensor, least: Tensor) -> None:
    """Sets to 0 all of `shares` [n, V] whose `values` [n, V] are below `least` [n, 1]."""
    shares.mul_(torch.ge(values, least, out=torch.empty_like(shares)))  # on a CPU booleans are several times slower


def _exclude_top_choices(shares: Tensor, threshold: Tensor) -> None:
    """Sets to 0 all of `shares` [n, V] whose probability is above the least that reaches `threshold` [n, 1]."""
    total = shares.cumsum(-1, dtype=torch.float64)[:, -1:]  # sum() would add in an order of its own
    reaching = torch.where(shares >= threshold * total, shares, math.inf)
    shares.mul_(shares <= reaching.amin(-1, keepdim=True))


def _least_of_nucleus(shares: Tensor, top_p: Tensor) -> Tensor:
    """The share [n, 1] of the least likely token that top_p [n, 1] keeps of each row of `shares` [n, V]."""
    least = torch.zeros_like(top_p, dtype=shares.dtype)
    for row in (top_p < 1).nonzero()[:, 0].tolist():
        p, all_shares = float(top_p[row]), shares[row]
        total = float(all_shares.cumsum(0, dtype=torch.float64)[-1])  # sum() would add in an order of its own
        # Tokens of less than this share hold less than 1 - p all together, so that the nucleus needs none of them (half
        # of it, to be safe from rounding). Unless the distribution is flat, few are left to sort.
        candidates = all_shares.masked_select(all_shares >= (1 - p) * total / (2 * len(all_shares)))
        falling = candidates.sort(descending=True).values
        place = int(torch.searchsorted(falling.cumsum(0, dtype=torch.float64), p * total))
        least[row] = falling[min(place, len(falling) - 1)]
    return least


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
            # topk() picks at will among equals; the lower ids are wanted.
            largest = (values >= values.topk(top).values[-1]).nonzero().squeeze(-1)
            top_ids[row] = largest[values[largest].argsort(descending=True, stable=True)[:top]]
            top_values[row] = logs[top_ids[row]]
    return chosen, top_values, top_ids


def _without_nan(logits: Tensor) -> Tensor:
    """`logits` with NaN as -inf and +inf as the largest finite number."""
    return logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
