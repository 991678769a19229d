"""The longest end against a search that is plain to see; what is remembered, of whom, and how much."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.params import SampleRequest, SamplingParams
from headrace.speculative import suffix
from headrace.speculative.proposer import DraftRequest
from headrace.speculative.suffix import SuffixProposer

SAMPLE = SampleRequest(SamplingParams(), 0, 0, 0)


def request(token_ids: list[int], most: int = 4, seq_id: int = 0, scope: str = "") -> DraftRequest:
    return DraftRequest(seq_id, token_ids, most, [array("q")], SAMPLE, scope)


def longest_end(tokens: list[int], text: list[int], shortest: int) -> tuple[int, int]:
    """The longest end of `tokens` that stands in `text` with something after it, and where it does so last."""
    found = [
        (length, place)
        for length in range(shortest, len(tokens) + 1)
        for place in range(len(text) - length)
        if text[place : place + length] == tokens[-length:]
    ]
    return max(found, default=(0, 0))


def searched(tokens: list[int], others: list[int], most: int, shortest: int) -> list[int]:
    (own, place), (theirs, there) = (longest_end(tokens, text, shortest) for text in (tokens, others))
    if theirs > own:
        draft = [*others[there + theirs :][: min(most, 2 * theirs)], -1]
        return draft[: draft.index(-1)]
    text = list(tokens)
    for i in range(min(most, 2 * own)):  # token by token, so that it may run into its own output
        text.append(text[place + own + i])
    return text[len(tokens) :]


tokens = st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(tokens, st.lists(tokens, max_size=2), st.integers(1, 9), st.integers(1, 3))
def test_as_searched(text: list[int], ended: list[list[int]], most: int, shortest: int) -> None:
    proposer = SuffixProposer(shortest)
    others: list[int] = []
    for i, other in enumerate(ended, 1):
        proposer.propose([request(other, seq_id=i)])
        proposer.forget(i)
        others += [-1, *other]
    assert proposer.propose([request(text, most)]) == [searched(text, others, most, shortest)]


def test_only_the_same_scope_is_remembered() -> None:
    proposer = SuffixProposer(2)
    proposer.propose([request([5, 6, 7, 8, 9], seq_id=1, scope="a")])
    assert proposer.propose([request([1, 5, 6], seq_id=2, scope="a")]) == [[]]  # it has not ended
    proposer.forget(1)
    proposer.forget(1)  # an end that nobody noticed is none
    assert proposer.propose([request([1, 5, 6], seq_id=2, scope="a")]) == [[7, 8, 9]]
    assert proposer.propose([request([1, 5, 6], seq_id=3, scope="b")]) == [[]]


def test_what_is_remembered_has_its_limits() -> None:
    proposer = SuffixProposer(2)
    for i in range(suffix.MAX_SCOPES + 5):
        proposer.propose([request([i, i + 1, i + 2], seq_id=i, scope=str(i))])
        proposer.forget(i)
    assert len(proposer._ended) == suffix.MAX_SCOPES
    assert "0" not in proposer._ended
    for i in range(3):
        proposer.propose([request([i] * (suffix.MAX_REMEMBERED // 2), seq_id=i, scope="long")])
        proposer.forget(i)
    assert len(proposer._ended["long"]) == suffix.MAX_REMEMBERED * 4
    assert not proposer._texts


def test_a_long_match_is_found_in_few_searches() -> None:
    proposer = SuffixProposer(2)
    text = list(range(5000))
    calls = []
    right = suffix.last_place
    suffix.last_place = lambda *a: calls.append(1) or right(*a)  # type: ignore[func-returns-value]
    try:
        assert proposer.propose([request([*text, *text[:300]], 8)]) == [text[300:308]]
    finally:
        suffix.last_place = right
    assert len(calls) < 16
