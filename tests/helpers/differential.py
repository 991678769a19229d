"""The same requests under different circumstances: collecting what came out, and telling whether it is the same."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.core import Engine
from headrace.engine.request import Request, TokenDelta
from headrace.sampling.params import TokenLogprob
from helpers.t0_engine import numpy_greedy, numpy_logprobs

LOGPROB_TOLERANCE = 1e-4
TIE = 1e-3  # two tokens whose logprobs are closer than this may change places when sums are made in another order


@dataclass(slots=True)
class Stream:
    """All that came out of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None

    def add(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens


Streams = dict[tuple[str, int], Stream]


def run(
    engine: Engine,
    requests: Sequence[Request],
    arrivals: Iterable[int] | None = None,
    aborts: Mapping[str, int] | None = None,
) -> Streams:
    """Runs requests to their ends.

    arrivals: the step before which each one comes; aborts: by id, the step before which it is aborted.
    """
    pending = sorted(
        zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0], reverse=True
    )
    streams = {(r.request_id, index): Stream() for r in requests for index in range(r.params.n)}
    aborts = dict(aborts or {})
    for step in range(100_000):
        while pending and pending[-1][0] <= step:
            engine.add_request(pending.pop()[1])
        deltas = [d for name, at in list(aborts.items()) if at == step for d in engine.abort(name)]
        if engine.has_work:
            deltas += engine.step()
        for delta in deltas:
            streams[delta.request_id, delta.index].add(delta)
        if not pending and not engine.has_work:
            return streams
    raise AssertionError("it does not come to an end")


def assert_same(truth: Stream, other: Stream, *, ties: bool = True) -> bool:
    """Raises AssertionError unless both are the same; logprobs may differ in their last digits.

    With `ties` a different token is forgiven where the truth's two likeliest are as good as equal; what follows is not
    compared then. Returns whether there was such a tie.
    """
    assert other.finish_reason == truth.finish_reason
    assert len(other.token_ids) == len(other.logprobs)
    for i, (a, b) in enumerate(zip(truth.logprobs, other.logprobs, strict=False)):
        if a.token_id != b.token_id:
            best, second = (logprob for _, logprob in a.top[:2])
            assert ties, f"token {i} is {b.token_id} rather than {a.token_id}"
            assert best - second < TIE, f"token {i} is {b.token_id} rather than {a.token_id}, which is no tie"
            return True
        assert abs(a.logprob - b.logprob) <= LOGPROB_TOLERANCE, f"token {i}: logprob {b.logprob}, not {a.logprob}"
    assert other.token_ids == truth.token_ids
    assert other.text == truth.text
    return False


def assert_all_same(truth: Streams, other: Streams) -> None:
    """As `assert_same` for each stream; more than one tie in ten would be no coincidence."""
    assert truth.keys() == other.keys()
    assert sum(assert_same(truth[key], other[key]) for key in truth) <= len(truth) / 10


def assert_t0(prompt: list[int], stream: Stream, longest: int) -> None:
    """Raises AssertionError unless a greedy stream of T0, perhaps aborted, is the beginning of what NumPy computes."""
    count = len(stream.token_ids)
    expected = numpy_greedy(tuple(prompt), longest)
    if stream.finish_reason == "length":
        assert count == longest
    else:
        assert stream.finish_reason == "abort"
    assert stream.token_ids == expected[:count]
    truth = numpy_logprobs([*prompt, *expected[:count]])[len(prompt) - 1 : -1 if count else None]
    got = [entry.logprob for entry in stream.logprobs]
    if count:
        np.testing.assert_allclose(got, truth[np.arange(count), stream.token_ids], atol=LOGPROB_TOLERANCE)
