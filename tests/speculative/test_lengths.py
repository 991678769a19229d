"""The lengths of drafts: the best there are by trying all, none where they do not pay, and a try from time to time."""

import itertools
import random

import pytest

from headrace.speculative.lengths import FIRST_PATIENCE, LONGEST_PATIENCE, MARGIN, PRIOR_WEIGHT, DraftLengths


def told(rates: dict[int, float], seed: int = 0) -> DraftLengths:
    """After many drafts of sequences whose tokens are right at these rates."""
    rng, lengths = random.Random(seed), DraftLengths()
    for _ in range(200):
        for seq_id, rate in rates.items():
            accepted = next((i for i in range(4) if rng.random() >= rate), 4)
            lengths.record(seq_id, 4, accepted)
    return lengths


def rate_of(lengths: DraftLengths, seq_id: int) -> float:
    own, all_ = lengths._records[seq_id], lengths._all
    prior = all_.right / all_.judged
    return min(0.99, (own.right + PRIOR_WEIGHT * prior) / (own.judged + PRIOR_WEIGHT))


@pytest.mark.parametrize("token_seconds", [0.001, 0.02, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("rates", [[0.9], [0.9, 0.1], [0.5, 0.5, 0.5], [0.99, 0.7, 0.3]])
def test_no_other_lengths_are_faster(rates: list[float], token_seconds: float) -> None:
    lengths = told(dict(enumerate(rates)))
    own = [rate_of(lengths, i) for i in range(len(rates))]

    def speed(counts: tuple[int, ...]) -> float:
        tokens = len(rates) + sum(r**j for r, n in zip(own, counts, strict=True) for j in range(1, n + 1))
        return tokens / (1.0 + token_seconds * sum(counts))

    chosen = lengths.choose(dict.fromkeys(range(len(rates)), 4), len(rates), 1.0, token_seconds, 100)
    best = max(map(speed, itertools.product(range(5), repeat=len(rates))))
    assert best / MARGIN <= speed(tuple(chosen.values())) <= best


def test_limits_are_kept() -> None:
    lengths = told({0: 0.95, 1: 0.9})
    assert lengths.choose({0: 2, 1: 9}, 2, 1.0, 1e-6, 100) == {0: 2, 1: 9}
    assert sum(lengths.choose({0: 9, 1: 9}, 2, 1.0, 1e-6, 5).values()) == 5
    assert lengths.choose({0: 9}, 2, 1.0, 1e-6, 0) == {0: 0}
    assert lengths.choose({}, 0, 1.0, 1e-6, 10) == {}


def test_a_bad_sequence_gets_none_but_a_try_now_and_then() -> None:
    lengths = told({0: 0.0})
    tries = []
    for step in range(4000):
        count = lengths.choose({0: 4}, 1, 1.0, 0.3, 100)[0]
        assert count <= 1
        if count:
            tries.append(step)
            lengths.record(0, count, 0)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert tries[0] == FIRST_PATIENCE
    assert gaps[-1] <= LONGEST_PATIENCE + 1
    assert len(tries) < 15


def test_one_that_becomes_good_is_noticed() -> None:
    lengths = told({0: 0.0})
    drafted = 0
    for _ in range(3000):
        count = lengths.choose({0: 4}, 1, 1.0, 0.3, 100)[0]
        if count:
            lengths.record(0, count, count)
            drafted += count
    assert drafted > 1500


def test_what_making_a_draft_takes_counts() -> None:
    lengths = told({0: 0.8})
    assert lengths.choose({0: 4}, 1, 1.0, 0.05, 100)[0] > 0
    for seconds in (5.0, 5.0, 5.0):
        lengths.note_drafting(1, seconds)
    assert lengths.choose({0: 4}, 1, 1.0, 0.05, 100)[0] == 0
    for _ in range(9):  # one that was slow is soon forgotten
        lengths.note_drafting(1, 0.001)
    assert lengths.choose({0: 4}, 1, 1.0, 0.05, 100)[0] > 0
    lengths.note_drafting(0, 100.0)  # nothing was found
    assert lengths.draft_seconds == pytest.approx(0.001)


def test_a_new_sequence_begins_with_what_others_have_seen() -> None:
    good, bad = told({0: 0.9}), told({0: 0.02})
    assert good.choose({7: 4}, 1, 1.0, 0.3, 100)[7] > 0
    assert bad.choose({7: 4}, 1, 1.0, 0.3, 100)[7] == 0
    bad.forget(7)
    assert 7 not in bad._records
