"""Which tokens of a draft the model would have said itself, and the one that it says next."""

from dataclasses import dataclass

from torch import Tensor

from headrace.ops.reference import Ops
from headrace.sampling.params import SampledToken, SampleRequest
from headrace.sampling.sampler import described, draw


@dataclass(slots=True)
class Draft:
    """What one sequence wants verified in a step; without tokens it is an ordinary decode.

    requests: how to draw the sequence's next token, and the one after each token of the draft if that is accepted.
    token_ids: the draft.
    """

    requests: list[SampleRequest]
    token_ids: list[int]


def verify(ops: Ops, logits: Tensor, drafts: list[Draft]) -> list[list[SampledToken]]:
    """The next tokens of each sequence: those of its draft that are accepted, and one more of the model's own.

    At each position the model's own token is drawn, with the random number of that position, as if there were no draft.
    The draft is right as far as it says the same. So the output is, token by token, what it is without speculation; and
    a draft's token x is accepted with probability p(x), which is min(1, p/q) for a q that is 1 at x, while the token
    after a rejection comes from p without x, which is max(0, p - q): this is rejection sampling (Leviathan et al. 2023;
    Chen et al. 2023) with the random numbers chosen well.

    logits: [N, V] float32, the rows of each draft after the other, one for each of its requests.
    """
    requests = [request for draft in drafts for request in draft.requests]
    drawn = draw(ops, logits, requests)
    rows: list[int] = []
    counts: list[int] = []
    start = 0
    for draft in drafts:
        count = 1
        for guess, token in zip(draft.token_ids, drawn[start:], strict=False):
            if guess != token:
                break
            count += 1
        rows += range(start, start + count)
        counts.append(count)
        start += len(draft.requests)
    if len(rows) < len(requests):
        logits = logits[rows]
    tokens = iter(described(ops, logits, [drawn[row] for row in rows], [requests[row] for row in rows]))
    return [[next(tokens) for _ in range(count)] for count in counts]
