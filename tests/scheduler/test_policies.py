"""Who enters next, by each policy."""

import random

import pytest

from headrace.scheduler.policies import MAX_IDLE_TENANTS, OUTPUT_TOKEN_COST, FairShare, WaitingQueue
from headrace.scheduler.sequence import Sequence, Status
from helpers.scheduling import World


def test_the_queue_against_a_sorted_list() -> None:
    rng = random.Random(0)
    queue, truth = WaitingQueue(), []
    world = World()
    for i in range(3000):
        dice = rng.random()
        if dice < 0.45:
            sequence = Sequence(i, 0, [1], 1, world.submit([1])[0].params, 0, 2)
            sequence.rank = (rng.random(), i)
            queue.push(sequence)
            truth.append(sequence)
            truth.sort(key=lambda s: s.rank)
        elif dice < 0.6 and truth:
            assert queue.peek() is truth[0]
            assert queue.pop() is truth[0]
            truth.pop(0).status = Status.RUNNING
        elif truth:
            queue.remove(truth.pop(rng.randrange(len(truth))))
        assert len(queue) == len(truth)
        assert (queue.peek() is truth[0]) if truth else (queue.peek() is None)
        assert len(queue._heap) <= 2 * len(truth) + 17, "what was removed does not pile up"
    assert list(queue) == truth


def order(world: World) -> list[int]:
    """In which order sequences begin."""
    begun: list[int] = []
    while world.s.has_work:
        world.step()
        begun += [s.seq_id for s in (*world.s.running, *world.finished) if s.seq_id not in begun]
    return begun


def test_lower_classes_first_and_by_arrival_within_one() -> None:
    world = World(seqs=1, policy="priority")
    for priority in (1, 0, 1, -3, 0):
        world.submit([priority + 3], 1, priority=priority)
    assert order(world) == [3, 1, 4, 0, 2]


def test_nobody_starves_behind_higher_classes() -> None:
    world = World(seqs=1, policy="priority", step_seconds=lambda plan: 1.0)  # five steps make up for a class
    world.submit([0], 1, priority=0)
    (low,) = world.submit([1], 1, priority=2)
    for i in range(40):  # as many as can be served come in, and all are of a higher class
        world.submit([i % 3], 1, priority=0)
        world.step()
        if low.status is Status.GONE:
            break
    assert low.status is Status.GONE
    assert 9 <= i <= 12, "two classes are made up for in ten seconds"


def served(world: World, tenant: str) -> float:
    assert isinstance(world.s.waiting, FairShare)
    return world.s.waiting.served(tenant)


@pytest.mark.parametrize("seed", range(4))
def test_tenants_with_work_waiting_get_the_same(seed: int) -> None:
    """However different their requests, and however many they send, within the bound that the docstring states."""
    rng = random.Random(seed)
    seqs, longest, output = 3, 40, 20
    world = World(blocks=200, seqs=seqs, tokens=50, policy="fair", prefix=False)
    kinds = {"short": (2, 20), "long": (40, 1), "mixed": (12, 8)}
    bound = longest + OUTPUT_TOKEN_COST * seqs * output
    for _ in range(1500):
        for tenant, (prompt, most) in kinds.items():
            waiting = sum(s.tenant == tenant for s in world.s.waiting)
            while waiting < (20 if tenant == "short" else 4):
                world.submit(
                    [rng.randrange(3) for _ in range(rng.randint(1, prompt))], rng.randint(1, most), tenant=tenant
                )
                waiting += 1
        world.step()
        counters = [served(world, tenant) for tenant in kinds]
        assert max(counters) - min(counters) <= bound
    assert min(counters) > 10 * bound, "it ran for long enough to tell"


def test_by_arrival_a_tenant_with_many_requests_gets_more() -> None:
    """The same load under fcfs, so that the test above could fail."""
    world = World(seqs=2, policy="fcfs")
    for _ in range(30):
        world.submit([1], 4, tenant="many")
    world.submit([2], 4, tenant="one")
    assert order(world)[-1] == 30
    world = World(seqs=2, policy="fair")
    for _ in range(30):
        world.submit([1], 4, tenant="many")
    world.submit([2], 4, tenant="one")
    assert order(world).index(30) <= 2


def test_who_comes_back_does_not_bring_the_unused_share_along() -> None:
    world = World(seqs=1, policy="fair")
    world.submit([1], 4, tenant="b")
    for _ in range(50):
        world.submit([1], 4, tenant="a")
    while served(world, "a") < 100:
        world.step()
    for _ in range(50):
        world.submit([1], 4, tenant="b")
    before = served(world, "a")
    while served(world, "a") < before + 40:
        world.step()
    assert served(world, "b") <= served(world, "a") + 20


def test_tokens_computed_again_are_not_charged_again() -> None:
    def cost(blocks: int) -> tuple[float, int]:
        world = World(blocks=blocks, block_size=4, policy="fair", prefix=False)
        for i in range(2):
            world.submit([i] * 8, 9, tenant="a")
        world.run()
        return served(world, "a"), world.s.num_preemptions

    ample, scarce = cost(100), cost(5)
    assert ample[1] == 0 < scarce[1]
    assert ample[0] == scarce[0] == 2 * (8 + 9 * OUTPUT_TOKEN_COST)


def test_idle_tenants_are_forgotten_at_some_point() -> None:
    world = World(seqs=1, policy="fair", blocks=4)
    assert isinstance(world.s.waiting, FairShare)
    for i in range(MAX_IDLE_TENANTS + 50):
        (sequence,) = world.submit([1], 1, tenant=f"t{i}")
        world.abort(sequence)
        assert world.s.waiting.peek() is None
    assert len(world.s.waiting._tenants) <= MAX_IDLE_TENANTS + 1
