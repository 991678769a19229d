"""What the verifier lets through has exactly the model's distribution: against all continuations, enumerated.

A model here is a table of random logits, by the tokens so far. HEADRACE_FULL_LENGTH=1 draws 200,000 continuations of
three tokens for each case, which takes some minutes each; without it there are fewer, of two.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headrace.ops.reference import Ops
from headrace.sampling.history import History
from headrace.sampling.params import SampleRequest, SamplingParams
from headrace.sampling.random import uniform
from headrace.speculative import verifier
from headrace.speculative.verifier import Draft, verify
from helpers.distribution import exact_distribution, p_value
from helpers.full_length import FULL

OPS = Ops()
V = 8
COUNT, LENGTH = (200_000, 3) if FULL else (250, 2)
pytestmark = pytest.mark.timeout(0 if FULL else 300)
BATCH = 500  # drafts that are verified together
FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 6, "top_p": 0.95, "min_p": 0.02}


@cache
def logits_after(tokens: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, len(tokens), *tokens]).normal(0, 1.5, V).astype(np.float32)


class Toy:
    """A model and a draft, whose logits are `distance` from the model's, with the settings of a request."""

    def __init__(self, distance: float, frequency_penalty: float = 0.0, **filters: Any) -> None:
        self.distance, self.penalty, self.filters = distance, frequency_penalty, filters
        self.params = SamplingParams(frequency_penalty=frequency_penalty, **filters)
        self._known: dict[Any, np.ndarray] = {}

    def model(self, tokens: tuple[int, ...]) -> np.ndarray:
        return logits_after(tokens, 1)

    def draft(self, tokens: tuple[int, ...]) -> np.ndarray:
        return self.model(tokens) + self.distance * logits_after(tokens, 2)

    def probabilities(self, tokens: tuple[int, ...], which: str) -> np.ndarray:
        """From what the next token is to be drawn, by NumPy."""
        if (tokens, which) not in self._known:
            logits = (self.model if which == "model" else self.draft)(tokens).astype(np.float64)
            logits = logits - self.penalty * np.bincount(tokens, minlength=V)
            greedy = self.params.temperature == 0
            self._known[tokens, which] = (
                np.eye(V)[logits.argmax()] if greedy else exact_distribution(logits, **self.filters)
            )
        return self._known[tokens, which]

    def continuations(self) -> np.ndarray:
        """The probability of each continuation, `[V ** LENGTH]`."""
        parts = {(): 1.0}
        for _ in range(LENGTH):
            parts = {
                (*tokens, x): p * q
                for tokens, p in parts.items()
                for x, q in enumerate(self.probabilities(tokens, "model") if p else np.ones(V))
            }
        return np.array(list(parts.values()))

    def request(self, tokens: tuple[int, ...], seed: int) -> SampleRequest:
        history = None
        if self.penalty:
            history = History(0)
            for token in tokens:
                history = history.followed_by(token)
        return SampleRequest(self.params, seed, 0, len(tokens), history=history)

    def tree(
        self, tokens: tuple[int, ...], widths: tuple[int, ...], seed: int, probabilistic: bool
    ) -> tuple[Draft, Any]:
        """A draft after some tokens, with so many children at each depth, and the model's logits for it."""
        rng = np.random.default_rng([seed, len(tokens)])
        nodes, parents, level = [tokens], [], [0]
        for width in widths:
            following = []
            for node in level:
                for _ in range(width):
                    token = int(rng.choice(V, p=self.probabilities(nodes[node], "draft")))
                    nodes.append((*nodes[node], token))
                    parents.append(node)
                    following.append(len(nodes) - 1)
            level = following
        requests = [self.request(node, seed) for node in nodes]
        q = torch.from_numpy(np.stack([self.probabilities(node, "draft") for node in nodes])) if probabilistic else None
        draft = Draft(requests, [node[-1] for node in nodes[1:]], parents, q)
        return draft, np.stack([self.model(node) for node in nodes])

    def drawn(self, widths: tuple[int, ...], *, probabilistic: bool = True) -> np.ndarray:
        """COUNT continuations, as numbers in base V, and None where nothing was ever accepted."""
        said: list[tuple[int, ...]] = [()] * COUNT
        accepted = 0
        for first in range(0, COUNT, BATCH):
            going = list(range(first, min(first + BATCH, COUNT)))
            while going:
                drafts, logits = zip(*(self.tree(said[i], widths, i, probabilistic) for i in going), strict=True)
                for i, verdict in zip(
                    going, verify(OPS, torch.from_numpy(np.concatenate(logits)), list(drafts)), strict=True
                ):
                    said[i] = (*said[i], *(token.token_id for token in verdict.tokens))
                    accepted += len(verdict.path)
                going = [i for i in going if len(said[i]) < LENGTH]
        assert accepted > COUNT / 20
        return np.array([int("".join(map(str, s[:LENGTH])), V) for s in said])


CASES: dict[str, tuple[Toy, tuple[int, ...], bool]] = {
    "a chain, close": (Toy(0.3), (1, 1), True),
    "a chain, far": (Toy(2.0), (1, 1, 1), True),
    "a chain, filtered": (Toy(0.7, frequency_penalty=0.7, **FILTERS), (1, 1), True),
    "a tree, close": (Toy(0.3), (2, 2), True),
    "a tree, far": (Toy(2.0, frequency_penalty=0.5, temperature=1.3), (3, 1), True),
    "a tree whose tokens are compared": (Toy(0.7, **FILTERS), (2, 2), False),
}


@pytest.mark.parametrize("name", CASES)
def test_continuations_have_the_models_distribution(name: str) -> None:
    toy, widths, probabilistic = CASES[name]
    assert p_value(toy.drawn(widths, probabilistic=probabilistic), toy.continuations()) > 1e-3


@pytest.mark.parametrize("fault", ["accepts all", "tosses no coin", "keeps p after a rejection"])
def test_a_biased_verifier_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verifier._sampled

    def biased(draft: Draft, wanted: Any, given: Any) -> Any:
        if fault == "accepts all":
            return right(draft, wanted, torch.full_like(given, 1e-9))
        if fault == "tosses no coin":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(verifier, "uniform", lambda *place: 0.5 if len(place) > 3 else uniform(*place))
                return right(draft, wanted, given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "clamp_", lambda left, min: wanted[0].clone())
            return right(draft, wanted, given)

    monkeypatch.setattr(verifier, "_sampled", biased)
    toy = Toy(2.0)
    assert p_value(toy.drawn((2,)), toy.continuations()) < 1e-6


def test_greedy_is_the_limit() -> None:
    """At temperature 0 both kinds of draft bring the model's own choice, and accept nothing else."""
    for probabilistic in (True, False):
        toy = Toy(1.0, temperature=0.0)
        best: tuple[int, ...] = ()
        for _ in range(6):
            best = (*best, int(toy.model(best).argmax()))
        said: tuple[int, ...] = ()
        while len(said) < 6:
            draft, logits = toy.tree(said, (1, 1, 1), 0, probabilistic)
            [verdict] = verify(OPS, torch.from_numpy(logits), [draft])
            said += tuple(t.token_id for t in verdict.tokens)
        assert said[:6] == best


def test_batches_do_not_matter() -> None:
    """Drafts of all kinds and lengths together, and each alone: the same tokens and logprobs."""
    toys = [Toy(0.5), Toy(0.5, **FILTERS), Toy(0.5, frequency_penalty=1.0)]
    toys[0].params = SamplingParams(logprobs=3)
    each = [
        toy.tree((i % V,), widths, i, probabilistic)
        for i, (toy, widths, probabilistic) in enumerate(
            (toy, widths, p) for toy in toys for widths in ((), (1,), (1, 1, 1), (2, 1)) for p in (True, False)
        )
    ]
    together = verify(OPS, torch.from_numpy(np.concatenate([rows for _, rows in each])), [draft for draft, _ in each])
    alone = [verify(OPS, torch.from_numpy(rows), [draft])[0] for draft, rows in each]
    assert together == alone
    for (draft, _), verdict in zip(each, together, strict=True):
        assert [draft.token_ids[node - 1] for node in verdict.path] == [t.token_id for t in verdict.tokens[:-1]]
        assert all((t.logprob is not None) == (draft.requests[0].params.logprobs is not None) for t in verdict.tokens)
