"""Which tokens of a draft the model would have said itself, and the one that it says next."""

from dataclasses import dataclass

from torch import Tensor

from headrace.ops.reference import Ops
from headrace.sampling.params import SampledToken, SampleRequest
from headrace.sampling.random import uniform
from headrace.sampling.sampler import described, distribution, draw, drawn_from

# Streams of random numbers (see `uniform`); 0 is that of the draws.
DRAFT_STREAM = 2  # drawing a token of a draft
ACCEPT_STREAM = 3  # whether to accept one; its siblings have the streams after it


@dataclass(slots=True)
class Draft:
    """What one sequence wants verified in a step; without tokens it is an ordinary decode.

    requests: how to draw the sequence's next token, and the one after each token of the draft if that is accepted.
    token_ids: the draft, a tree of tokens in which parents come before their children.
    parents: for each token, the number of the one before it, counted from 1; 0 for the sequence's own last token. None
        for a chain.
    probabilities: float64 [1 + len(token_ids), V], from what the successors of the sequence's last token, and of each
        token, were drawn, independently of each other and of the numbers that the verifier uses. None where the draft
        was made in any other way.
    """

    requests: list[SampleRequest]
    token_ids: list[int]
    parents: list[int] | None = None
    probabilities: Tensor | None = None

    def children(self, node: int) -> list[int]:
        """The tokens of the draft that follow the token `node`, by their numbers."""
        if self.parents is None:
            return [node + 1] if node < len(self.token_ids) else []
        return [child for child, parent in enumerate(self.parents, 1) if parent == node]


@dataclass(slots=True)
class Verdict:
    """What came of a draft.

    path: the accepted tokens, by their numbers in the draft (from 1), in order.
    tokens: those, and the one that the model says after them.
    """

    path: list[int]
    tokens: list[SampledToken]


def verify(ops: Ops, logits: Tensor, drafts: list[Draft]) -> list[Verdict]:
    """The next tokens of each sequence: those of its draft that are accepted, and one more of the model's own.

    **A draft without probabilities.** At each position the model's own token is drawn, with the random number of that
    position, as if there were no draft. The draft is right as far as it says the same. So the output is, token by
    token, what it is without speculation. (A token x is accepted with probability p(x), which is min(1, p/q) for a q
    that is 1 at x, while the token after a rejection comes from p without x, which is max(0, p - q): this is rejection
    sampling too, with the random numbers chosen well.)

    **A draft with probabilities q.** Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a token x is kept
    with probability min(1, p(x) / q(x)). After a rejection p becomes max(0, p - q), normalized, and the next sibling
    gets its chance (Miao et al. 2023, SpecInfer, for trees); in the end the token is drawn from what is left. The
    output has the distribution that it has without speculation.

    In both p is the distribution after all that the request asks for: penalties, bias, filters, grammar.

    logits: [N, V] float32, the rows of each draft after the other, one for each of its requests.
    """
    requests = [request for draft in drafts for request in draft.requests]
    drawn = draw(ops, logits, requests)
    verdicts: list[tuple[list[int], list[int]]] = []
    rows: list[int] = []
    start = 0
    for draft in drafts:
        end = start + len(draft.requests)
        if draft.probabilities is None:
            path, tokens = _equal(draft, drawn[start:end])
        else:
            wanted = distribution(ops, logits[start:end], draft.requests)
            path, tokens = _sampled(draft, wanted, draft.probabilities)
        verdicts.append((path, tokens))
        rows += [start, *(start + node for node in path)]
        start = end
    if len(rows) < len(requests):
        logits = logits[rows]
    said = iter(described(ops, logits, [t for _, ts in verdicts for t in ts], [requests[row] for row in rows]))
    return [Verdict(path, [next(said) for _ in tokens]) for path, tokens in verdicts]


def _equal(draft: Draft, drawn: list[int]) -> tuple[list[int], list[int]]:
    """The path and the tokens of a draft that is right as far as it says what was drawn."""
    path: list[int] = []
    tokens, node = [drawn[0]], 0
    while True:
        node = next((c for c in draft.children(node) if draft.token_ids[c - 1] == tokens[-1]), 0)
        if not node:
            return path, tokens
        path.append(node)
        tokens.append(drawn[node])


def _sampled(draft: Draft, wanted: Tensor, given: Tensor) -> tuple[list[int], list[int]]:
    """The path and the tokens by rejection sampling. wanted, given: p and q for each token's successor."""
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        request, p, q = draft.requests[node], wanted[node], given[node]
        accepted = 0
        for sibling, child in enumerate(draft.children(node)):
            token = draft.token_ids[child - 1]
            number = uniform(request.seed, request.index, request.position, ACCEPT_STREAM + sibling)
            if number * float(q[token]) < float(p[token]):
                accepted = child
                break
            left = (p - q).clamp_(min=0.0)
            total = left.sum()
            if total <= 0:  # p and q are the same but for rounding, and only rounding can have rejected the token
                break
            p = left / total
        if not accepted:
            tokens.append(drawn_from(p, uniform(request.seed, request.index, request.position)))
            return path, tokens
        path.append(accepted)
        tokens.append(draft.token_ids[accepted - 1])
        node = accepted
