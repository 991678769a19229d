"""The cost model against a machine whose law is known."""

import random

import pytest

from headrace.scheduler.cost_model import CostModel, Work
from headrace.worker.step import StepPlan
from helpers.scheduling import World

Law = tuple[float, float, float, float]
SMALL: Law = (0.004, 0.0008, 2e-8, 0.0002)
FAST: Law = (0.0005, 0.00001, 1e-10, 0.00001)
LARGE: Law = (0.3, 0.012, 1e-7, 0.002)


def seconds(law: Law, work: Work) -> float:
    return law[0] + law[1] * work.tokens + law[2] * work.pairs + law[3] * work.sequences


def some_work(rng: random.Random) -> Work:
    work = Work()
    for _ in range(rng.randint(1, 16)):
        work.add(rng.randint(0, 4000), 1)
    if rng.random() < 0.5:
        work.add(rng.randint(0, 4000), rng.randint(2, 500))
    return work


@pytest.mark.parametrize("law", [SMALL, FAST, LARGE])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_it_learns_a_machine(law: Law, outliers: float) -> None:
    rng = random.Random(1)
    model = CostModel()
    for _ in range(300):
        work = some_work(rng)
        factor = rng.uniform(5, 30) if rng.random() < outliers else rng.uniform(0.95, 1.05)
        model.observe(work, seconds(law, work) * factor)
    for _ in range(50):
        work = some_work(rng)
        assert model.predict(work) == pytest.approx(seconds(law, work), rel=0.15)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(2)
    model = CostModel()
    for i in range(600):
        work = some_work(rng)
        model.observe(work, seconds(SMALL, work) * (1 if i < 200 else 3))
    for _ in range(20):
        work = some_work(rng)
        assert model.predict(work) == pytest.approx(3 * seconds(SMALL, work), rel=0.2)


def test_a_long_time_of_equal_steps_spoils_nothing() -> None:
    rng = random.Random(3)
    model = CostModel()
    for _ in range(200):
        work = some_work(rng)
        model.observe(work, seconds(SMALL, work))
    same = Work()
    for i in range(8):
        same.add(100 + i, 1)
    for _ in range(20_000):
        model.observe(same, seconds(SMALL, same) * rng.uniform(0.9, 1.1))
    for _ in range(20):
        work = some_work(rng)
        assert model.predict(work) == pytest.approx(seconds(SMALL, work), rel=0.3)


@pytest.mark.parametrize("law", [SMALL, FAST, LARGE])
@pytest.mark.parametrize("start", [0, 100, 5000])
def test_tokens_within_a_time(law: Law, start: int) -> None:
    rng = random.Random(4)
    model = CostModel()
    for _ in range(300):
        work = some_work(rng)
        model.observe(work, seconds(law, work))
    for extra in (0.05, 0.2, 2.0):
        count = model.tokens_within(extra, start)
        work = Work()
        work.add(start, count)
        more = Work()
        more.add(start, count + 1)
        base = model.predict(Work())
        assert model.predict(work) - base <= extra * (1 + 1e-6) or count == 0
        assert model.predict(more) - base > extra * (1 - 1e-6)
    assert model.tokens_within(0, start) == model.tokens_within(-1, start) == 0


@pytest.mark.parametrize("law", [SMALL, LARGE])
def test_chunks_are_sized_so_that_streams_go_on(law: Law) -> None:
    """Eight streams, and then a long prompt: what a step takes while it is computed, and when nobody streams."""

    def cost(plan: StepPlan) -> float:
        work = Work()
        for step in plan.sequences:
            work.add(step.start, len(step.token_ids))
        return seconds(law, work)

    target = max(0.1, 2.5 * (law[0] + 8 * (law[1] + law[3])))
    world = World(blocks=800, block_size=16, seqs=9, tokens=2048, target_itl=target, step_seconds=cost)
    for i in range(8):
        world.submit([i % 3] * 40, 150)
    for _ in range(20):
        world.step()
    (long,) = world.submit([0, 1, 2] * 2000, 1)
    durations = []
    while long.num_computed < 6000 and len(world.known) == 9:
        durations.append(cost(world.step()))
    assert long.num_computed >= 16 * len(durations)
    assert max(durations[3:]) <= 1.1 * target
    assert sum(durations[3:]) / len(durations[3:]) >= 0.7 * target, "the time is used"
    world.run()
    world.submit([2, 1, 0] * 2000, 1)
    assert world.step().num_tokens == 2048, "when nobody streams, a chunk is as large as the budget"
