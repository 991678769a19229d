"""The block pool: nothing is lost, nothing is owned twice."""

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


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(8, 16)
    first, second = pool.take(2), pool.take(3)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(2) == first
    assert pool.take(3) == second


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 20))
def test_no_block_is_lost_or_owned_twice(actions: list[int], num_blocks: int) -> None:
    pool = BlockPool(num_blocks, 4)
    owned: list[list[int]] = []
    for action in actions:
        if action < 6 and action <= pool.num_free:
            owned.append(pool.take(action))
        elif owned:
            pool.give_back(owned.pop(action % len(owned)))
        flat = [b for blocks in owned for b in blocks]
        assert len(flat) == len(set(flat))
        assert set(flat) <= set(range(num_blocks))
        assert pool.num_free == num_blocks - len(flat)
