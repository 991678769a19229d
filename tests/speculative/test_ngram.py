"""Looking up against a search that is plain to see."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.params import SampleRequest, SamplingParams
from headrace.speculative.ngram import NgramProposer
from headrace.speculative.proposer import DraftRequest

SAMPLE = SampleRequest(SamplingParams(), 0, 0, 0)


def request(token_ids: list[int], most: int) -> DraftRequest:
    return DraftRequest(0, token_ids, most, [array("q")], SAMPLE)


def searched(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - length - 1, -1, -1):
            if tokens[place : place + length] == tokens[-length:] and length < len(tokens):
                text = list(tokens)
                for i in range(most):  # token by token, so that it may run into its own output
                    text.append(text[place + length + i])
                return text[len(tokens) :]
    return []


# Ids whose bytes are much alike, so that patterns are also found across the borders of tokens.
tokens = st.lists(st.sampled_from([0, 1, 256, 65536, 257, 2**24]), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(tokens, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 10), max_size=4))
def test_as_searched(text: list[int], most: int, shortest: int, more: int, growth: list[int]) -> None:
    """The sequence grows, and what is known of it is kept."""
    proposer = NgramProposer(shortest + more, shortest)
    lengths = [min(len(text), sum(growth[:i]) + 1) for i in range(len(growth) + 1)]
    for length in lengths:
        [draft] = proposer.propose([request(text[:length], most)])
        assert draft == searched(text[:length], most, shortest + more, shortest)


def test_examples() -> None:
    proposer = NgramProposer(3, 2)
    [draft] = proposer.propose([request([1, 2, 3, 9, 8, 7, 1, 2, 3], 2)])
    assert draft == [9, 8]
    proposer.forget(0)
    assert proposer.propose([request([5], 4)]) == [[]]
    proposer.forget(0)
    assert proposer.propose([request([4, 5, 4, 5, 4], 5)]) == [[5, 4, 5, 4, 5]]
    proposer.forget(0)
    assert not proposer._texts
