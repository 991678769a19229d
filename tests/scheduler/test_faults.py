"""A million random steps (in small worlds) break no rule; and each rule is shown to catch a fault that is planted."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.scheduler import scheduler as module
from headrace.scheduler.policies import WaitingQueue
from headrace.scheduler.scheduler import Scheduler
from helpers.scheduling import World, random_action, random_world

LONG = int(os.environ.get("HEADRACE_SCHEDULER_STEPS", "0"))  # steps of the long run: a million take some minutes


STATIC: dict[str, Any] = {
    "policy": "static",
    "blocks": 5,
    "block_size": 20,
    "host_blocks": 0,
    "windows": (None,),
    "prefix": False,
    "draft": 0,
}


def live(seed: int, actions: int = 120, **given_settings: Any) -> World:
    """A random life of a random world, to the end."""
    rng = random.Random(seed)
    world = random_world(rng, **given_settings)
    for _ in range(actions):
        random_action(world, rng)
    world.run()
    return world


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["fcfs", "priority", "fair"]))
def test_no_rule_is_broken(seed: int, policy: str) -> None:
    live(seed, policy=policy)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_no_rule_is_broken_by_static_batches(seed: int) -> None:
    live(seed, **STATIC)


def test_these_worlds_meet_everything() -> None:
    worlds = [live(seed) for seed in range(40)]
    assert sum(w.s.num_preemptions for w in worlds) > 50
    assert sum(w.s.num_swapped_out for w in worlds) > 20
    assert sum(w.s.num_copied_blocks for w in worlds) > 20
    assert sum(w.cache.index.num_hit_tokens for w in worlds if w.cache.index is not None) > 200
    assert sum(len(w.ended) for w in worlds) > 100


@pytest.mark.skipif(not LONG, reason="set HEADRACE_SCHEDULER_STEPS=1000000 to run it")
@pytest.mark.timeout(0)
def test_a_million_steps() -> None:
    steps, seed = 0, 10**6
    while steps < LONG:
        steps += live(seed, 200).num_steps
        steps += live(seed, **STATIC).num_steps
        seed += 1


# Faults, each as a way to damage one method.


def a_block_is_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    def give_back(self: BlockPool, blocks: Any) -> None:
        original(self, blocks[:-1] if len(blocks) > 2 else blocks)

    return give_back


def sharing_is_not_counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def share(self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            if not self._holders[block]:
                original(self, [block])

    return share


def a_taken_block_is_dealt_out_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: BlockPool, count: int) -> Any:
        blocks = original(self, count)
        if count > 1 and len(self._blank) > 1:
            self._blank.append(blocks[0])
        return blocks

    return take


def evicted_blocks_stay_in_the_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def forget(self: PrefixIndex, block: int) -> None:
        node, group = self._owners[block]
        nodes = dict(self._nodes)
        original(self, block)
        node.blocks[group], self._nodes = block, nodes

    return forget


def parents_do_not_count(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: PrefixIndex, parent: Any, token_ids: list[int], block: int) -> Any:
        return original(self, "", token_ids, block)

    return enter


def salts_do_not_count(original: Callable[..., Any]) -> Callable[..., Any]:
    def admit(self: CacheManager, table: Any, token_ids: Any, salt: str, **rest: Any) -> Any:
        return original(self, table, token_ids, "", **rest)

    return admit


def blocks_are_entered_before_they_are_computed(original: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: CacheManager, table: Any, token_ids: Any, num_computed: int, salt: str) -> None:
        original(self, table, token_ids, len(token_ids), salt)

    return note


def the_last_token_is_reused_too(original: Callable[..., Any]) -> Callable[..., Any]:
    def find(self: PrefixIndex, salt: str, token_ids: Any, most: int) -> Any:
        return original(self, salt, token_ids, most + 1)

    return find


def forks_do_not_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def fork(self: CacheManager, *args: Any, **rest: Any) -> Any:
        computed = original(self, *args, **rest)
        self.copies.clear()
        return computed

    return fork


def forks_write_into_the_shared_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def fork(self: CacheManager, table: Any, source: Any, num_tokens: int, **rest: Any) -> Any:
        computed = original(self, table, source, num_tokens, **rest)
        if computed is not None:
            for blocks, theirs in zip(table.blocks, source.blocks, strict=True):
                self.pool.give_back(blocks[-1:])
                self.pool.share([theirs[len(blocks) - 1]])
                blocks[-1] = theirs[len(blocks) - 1]
        return computed

    return fork


def swapped_blocks_come_back_in_another_order(original: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: CacheManager, table: Any, num_computed: int) -> bool:
        moved = original(self, table, num_computed)
        for blocks in table.host_blocks:
            blocks.reverse()
        return bool(moved)

    return move


def the_host_leaks(original: Callable[..., Any]) -> Callable[..., Any]:
    def forget(self: CacheManager, table: Any) -> None:
        table.host_blocks, table.num_on_host = table.host_blocks[:1], 0
        original(self, table)

    return forget


def windows_are_one_short(original: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: CacheManager, table: Any, token_ids: Any, num_computed: int, salt: str) -> None:
        two_more = any(self.windows) and not self.index  # one that is kept for forks, and one that is needed
        original(self, table, token_ids, num_computed + 2 * two_more, salt)

    return note


def hits_do_not_look_at_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    def last_missing(self: PrefixIndex, nodes: Any) -> None:
        return None

    return last_missing


def hits_look_at_one_block_too_few(original: Callable[..., Any]) -> Callable[..., Any]:
    def last_missing(self: PrefixIndex, nodes: Any) -> Any:
        missing = original(self, nodes)
        first = len(nodes) - 1
        return None if missing is not None and missing < first else missing

    return last_missing


def groups_are_mixed_up(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: PrefixIndex, parent: Any, token_ids: Any, blocks: Any) -> Any:
        return original(self, parent, token_ids, blocks[::-1])

    return enter


def the_budget_is_exceeded(original: Callable[..., Any]) -> Callable[..., Any]:
    def room(self: Any, count: int, start: int, has_rows: bool) -> int:
        return count if count > 30 else int(original(self, count, start, has_rows))

    return room


def the_victim_is_the_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def grow(self: Scheduler, sequence: Any, num_tokens: int) -> bool:
        while not self.cache.grow(sequence.table, num_tokens):
            victim = self.running.pop(0)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    return grow


def one_sequence_too_many(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Scheduler, draft: Any) -> None:
        original(self, draft)
        sequence = self.waiting.peek()
        if sequence is not None:
            self._admit(sequence, draft)

    return enter


def the_queue_is_jumped(original: Callable[..., Any]) -> Callable[..., Any]:
    def push(self: WaitingQueue, sequence: Any) -> None:
        rank, sequence.rank = sequence.rank, (-sequence.rank[0], -sequence.rank[1])
        original(self, sequence)
        sequence.rank = rank

    return push


def nobody_looks_at_the_clock(original: Callable[..., Any]) -> Callable[..., Any]:
    def expire(self: Scheduler) -> list[Any]:
        self._queue_deadlines.clear()
        return []

    return expire


def held_siblings_are_forgotten(original: Callable[..., Any]) -> Callable[..., Any]:
    def let_go(self: Scheduler, sequence: Any, forked: bool) -> None:
        if forked:
            original(self, sequence, forked)
        sequence.siblings = []

    return let_go


def a_generated_token_changes(original: Callable[..., Any]) -> Callable[..., Any]:
    def preempt(self: Scheduler, victim: Any) -> None:
        if victim.num_output:
            victim.token_ids[-1] = (victim.token_ids[-1] + 1) % 3
        original(self, victim)

    return preempt


def a_token_too_many_is_accepted(original: Callable[..., Any]) -> Callable[..., Any]:
    def accept(self: Scheduler, sequence: Any, draft: Any, count: int) -> None:
        original(self, sequence, draft, min(len(draft), count + 1))

    return accept


def what_was_rejected_counts_as_computed(original: Callable[..., Any]) -> Callable[..., Any]:
    def advance(self: Scheduler, sequence: Any, count: int) -> None:
        rejected = sequence.num_computed + count == len(sequence.token_ids) and sequence.num_output > 3
        original(self, sequence, count + (rejected and self.speculation is not None))

    return advance


def drafts_go_past_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def drafts(self: Scheduler, decoding: Any, draft: Any) -> Any:
        for sequence in decoding:
            sequence.max_length += 2
        guesses = original(self, decoding, draft)
        for sequence in decoding:
            sequence.max_length -= 2
        return guesses

    return drafts


FAULTS: list[tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
    (BlockPool, "give_back", a_block_is_lost),
    (BlockPool, "share", sharing_is_not_counted),
    (BlockPool, "take", a_taken_block_is_dealt_out_again),
    (PrefixIndex, "_forget", evicted_blocks_stay_in_the_index),
    (PrefixIndex, "enter", parents_do_not_count),
    (CacheManager, "admit", salts_do_not_count),
    (CacheManager, "note_computed", blocks_are_entered_before_they_are_computed),
    (PrefixIndex, "find", the_last_token_is_reused_too),
    (CacheManager, "fork", forks_do_not_copy),
    (CacheManager, "fork", forks_write_into_the_shared_block),
    (CacheManager, "move_to_host", swapped_blocks_come_back_in_another_order),
    (CacheManager, "_forget_host", the_host_leaks),
    (CacheManager, "note_computed", windows_are_one_short),
    (PrefixIndex, "_last_missing", hits_do_not_look_at_windows),
    (PrefixIndex, "_last_missing", hits_look_at_one_block_too_few),
    (PrefixIndex, "enter", groups_are_mixed_up),
    (module._Draft, "room", the_budget_is_exceeded),
    (Scheduler, "_grow", the_victim_is_the_first),
    (Scheduler, "_enter", one_sequence_too_many),
    (WaitingQueue, "push", the_queue_is_jumped),
    (Scheduler, "expire", nobody_looks_at_the_clock),
    (Scheduler, "_let_siblings_go", held_siblings_are_forgotten),
    (Scheduler, "_preempt", a_generated_token_changes),
    (Scheduler, "accept", a_token_too_many_is_accepted),
    (Scheduler, "advance", what_was_rejected_counts_as_computed),
    (Scheduler, "_drafts", drafts_go_past_the_end),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
def test_a_planted_fault_is_caught(
    owner: type, name: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))

    def many_lives() -> None:
        for seed in range(150):
            live(seed)

    # What catches it is a rule of the world's, or a guard of the code's own.
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError, IndexError)):
        many_lives()
