"""The block pool: nothing is lost or owned twice, and what is emptied is what was freed first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.block_pool import BlockPool


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 15, 16, 17, 64)] == [0, 1, 1, 1, 2, 4]


def test_taking_more_than_there_is_takes_nothing() -> None:
    pool = BlockPool(3, 16)
    pool.take(2)
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(RuntimeError, match="free already"):
        pool.give_back(blocks)


def test_a_blank_block_cannot_be_shared() -> None:
    pool = BlockPool(3, 16)
    with pytest.raises(RuntimeError, match="blank"):
        pool.share([1])


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(8, 16)
    first, second = pool.take(2), pool.take(3)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(2) == first
    assert pool.take(3) == second


def test_a_shared_block_is_free_when_its_last_holder_has_gone() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.give_back(blocks)
    assert (pool.num_free, pool.holders(blocks[0])) == (1, 1)
    pool.give_back(blocks)
    assert pool.num_free == 2


def test_kept_blocks_are_emptied_last_and_leaf_first() -> None:
    pool = BlockPool(5, 16)
    emptied: list[int] = []
    pool.on_evict = emptied.append
    old, new = pool.take(2), pool.take(2)
    for block in old + new:
        pool.keep(block)
    pool.give_back(old)
    pool.give_back(new)
    assert pool.num_free == 5
    pool.share([old[0]])
    pool.give_back([old[0]])  # used again, so that it is the freshest now
    assert pool.take(1) == [4], "the blank one"
    assert pool.take(4) == [old[1], new[1], new[0], old[0]] == emptied
    pool.give_back(old)
    assert pool.num_kept == 0, "emptied blocks are blank again"


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80), st.integers(1, 20))
def test_no_block_is_lost_or_owned_twice(actions: list[tuple[int, bool]], num_blocks: int) -> None:
    pool = BlockPool(num_blocks, 4)
    kept: list[int] = []  # that are free, in the order in which they became so
    keep: set[int] = set()
    emptied: list[int] = []
    pool.on_evict = emptied.append
    owned: list[list[int]] = []
    for action, flag in actions:
        if action < 5 and action <= pool.num_free:
            emptied.clear()
            owned.append(pool.take(action))
            assert emptied == kept[: len(emptied)], "those freed first are emptied first"
            assert not emptied or set(owned[-1]) >= set(emptied)
            del kept[: len(emptied)]
            keep -= set(emptied)
            if flag:
                for block in owned[-1]:
                    pool.keep(block)
                keep |= set(owned[-1])
        elif action < 7 and owned:
            shared = owned[action % len(owned)][:2]
            pool.share(shared)
            owned.append(shared)
        elif action == 7 and kept:
            pool.share(kept[-1:])
            owned.append([kept.pop()])
        elif owned:
            gone = owned.pop(action % len(owned))
            pool.give_back(gone)
            held = {b for blocks in owned for b in blocks}
            kept += [b for b in reversed(gone) if b in keep and b not in held]
        count = Counter(b for blocks in owned for b in blocks)
        assert set(count) <= set(range(num_blocks))
        assert [pool.holders(b) for b in range(num_blocks)] == [count[b] for b in range(num_blocks)]
        assert pool.num_free == num_blocks - len(count)
        assert pool.num_kept == len(kept)
