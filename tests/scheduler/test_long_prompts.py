"""Streams beside long prompts, on a clock and a machine that are made up: what is cut, and by what, can be counted."""

from dataclasses import dataclass

import pytest

from headrace.scheduler.cost_model import Work
from headrace.scheduler.sequence import Status
from headrace.worker.step import StepPlan
from helpers.scheduling import World

LONG = 8000


@dataclass(frozen=True)
class Machine:
    """Seconds of a step = a + b * tokens + c * (token, context) pairs + d * sequences."""

    a: float
    b: float
    c: float
    d: float

    def seconds(self, plan: StepPlan) -> float:
        work = Work()
        for step in plan.sequences:
            work.add(step.start, len(step.token_ids))
        return self.a + self.b * work.tokens + self.c * work.pairs + self.d * work.sequences


SMALL = Machine(0.05, 0.004, 2e-7, 0.002)
FAST = Machine(0.004, 0.0003, 1e-8, 0.0002)


def world(machine: Machine, target_itl: float | None) -> World:
    return World(blocks=1200, block_size=32, seqs=4, tokens=8192, target_itl=target_itl, step_seconds=machine.seconds)


def long_prompt(first: int) -> list[int]:
    return [first, *([0, 1, 2] * LONG)[: LONG - 1]]


def beside_a_stream(machine: Machine, target_itl: float | None) -> tuple[list[float], list[int], list[float]]:
    """Four long prompts, one after the other, beside one stream.

    Returns the stream's gaps meanwhile, and for each prompt how many tokens the stream got and how long it took.
    """
    w = world(machine, target_itl)
    (stream,) = w.submit([0], 5000)
    while stream.num_output < 40:
        w.step()
    gaps, tokens, times = [], [], []
    for first in range(3, 7):
        (prompt,) = w.submit(long_prompt(first), 1)
        begun, before = w.now, stream.num_output
        while prompt.status is not Status.GONE:
            at, had = w.now, stream.num_output
            w.step()
            assert stream.num_output == had + 1, "a token in every step"
            gaps.append(w.now - at)
        tokens.append(stream.num_output - before)
        times.append(w.now - begun)
    return gaps, tokens, times


@pytest.mark.parametrize("machine", [SMALL, FAST])
@pytest.mark.parametrize("target_itl", [None, 0.3])
def test_a_stream_goes_on_and_prompts_do_not_starve(machine: Machine, target_itl: float | None) -> None:
    gaps, tokens, times = beside_a_stream(machine, target_itl)
    limit = 0.2 if target_itl is None else target_itl
    assert gaps[0] <= 1.5 * limit, "of the first piece it has to guess how long it takes"
    assert max(gaps[1:]) <= 1.05 * limit
    assert min(tokens) >= 10
    alone = world(machine, target_itl)
    (prompt,) = alone.submit(long_prompt(3), 1)
    while prompt.status is not Status.GONE:
        alone.step()
    assert max(times) <= 2 * alone.now


def test_pieces_are_smaller_where_the_machine_is_slower_or_the_context_longer() -> None:
    """It is time that cuts: with the same budget of tokens, pieces differ by machine, and get smaller as they go."""
    sizes = {}
    for machine in (SMALL, FAST):
        w = world(machine, 0.3)
        w.submit([0], 2000)
        for _ in range(40):
            w.step()
        (prompt,) = w.submit(long_prompt(3), 1)
        sizes[machine] = []
        while prompt.status is not Status.GONE:
            sizes[machine].append(max(len(step.token_ids) for step in w.step().sequences))
    assert max(sizes[SMALL]) < min(sizes[FAST][1:-1]) < max(sizes[FAST]) < 8192
    late = sizes[SMALL][20:-1]
    assert late == sorted(late, reverse=True)
    assert late[-1] < late[0]


def test_without_a_limit_the_stream_stops_for_the_whole_prompt() -> None:
    gaps, tokens, _ = beside_a_stream(SMALL, 0.0)
    assert max(gaps) > 30
    assert min(tokens) < 10
