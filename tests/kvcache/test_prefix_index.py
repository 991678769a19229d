"""The prefix index against a plain list of what was entered."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import BlockTable, CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.worker.cache_layout import CacheLayout


def manager(blocks: int = 64, size: int = 4) -> CacheManager:
    pool = BlockPool(blocks, size)
    return CacheManager(pool, CacheLayout.of([None], size, 100), index=PrefixIndex(pool))


def run(cache: CacheManager, ids: list[int], salt: str = "") -> tuple[int, list[int]]:
    """Admits, computes and frees a sequence. Returns how many tokens were found, and its blocks."""
    table = BlockTable()
    found = cache.admit(table, ids, salt)
    assert found is not None
    cache.note_computed(table, ids, len(ids), salt)
    (blocks,) = map(list, table.blocks)
    cache.free(table)
    return found, blocks


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_all_full_blocks_are_found_but_the_last_token_is_left(length: int, found: int) -> None:
    cache = manager()
    ids = list(range(length))
    assert run(cache, ids)[0] == 0
    assert run(cache, ids)[0] == found
    assert run(cache, [*ids, 99])[0] == length // 4 * 4


def test_a_beginning_is_found_up_to_the_first_difference() -> None:
    cache = manager(2000)
    base = list(range(1000, 1064))
    run(cache, base)
    for k in range(64):
        variant = [*base[:k], base[k] + 1, *base[k + 1 :]]
        found, _ = run(cache, variant)
        assert found == k // 4 * 4
    assert run(cache, base[1:])[0] == 0
    assert run(cache, [*base[8:12], *base[4:8], *base[12:]])[0] == 0
    assert run(cache, base[:4] + base[8:12] + base[4:8])[0] == 4


def test_salts_share_nothing() -> None:
    cache = manager()
    ids = list(range(20))
    run(cache, ids, "one")
    assert run(cache, ids, "two")[0] == 0
    assert run(cache, ids, "0")[0] == 0  # a text is not the number of a node
    assert run(cache, ids, "one")[0] == 16


def test_only_what_was_computed_is_found() -> None:
    cache = manager()
    table, ids = BlockTable(), list(range(16))
    cache.admit(table, ids, "")
    cache.note_computed(table, ids, 7, "")
    assert cache.index is not None
    assert len(cache.index.find("", ids, 4)) == 1


def test_equal_blocks_are_entered_once() -> None:
    cache = manager()
    ids = list(range(9))
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        cache.admit(table, ids, "")  # neither finds anything, as nothing is computed yet
    for table in tables:
        cache.note_computed(table, ids, 9, "")
    assert cache.index is not None
    assert len(cache.index) == 2
    for table in tables:
        cache.free(table)
    assert run(cache, ids)[1][:2] == list(range(2))


def test_the_end_of_a_beginning_is_forgotten_first() -> None:
    cache = manager(blocks=6)
    ids = list(range(16))
    run(cache, ids)
    other = BlockTable()
    assert cache.admit(other, list(range(100, 116)), "") == 0  # two blank blocks, and the last two of the kept ones
    cache.free(other)
    assert run(cache, ids)[0] == 8


def test_shared_blocks_are_not_forgotten() -> None:
    cache = manager(blocks=6)
    ids = list(range(9))
    run(cache, ids)
    table = BlockTable()
    assert cache.admit(table, ids, "") == 8
    assert cache.admit(BlockTable(), list(range(50, 66)), "") is None, "four blocks, where three are free"
    assert cache.admit(BlockTable(), list(range(50, 62)), "") == 0
    assert cache.index is not None
    assert [node.blocks for node in cache.index.find("", ids, 2)] == [[b] for b in table.blocks[0][:2]]


class SameHash(bytes):
    """Tokens that collide with any others."""

    def __hash__(self) -> int:
        return 1


def test_a_collision_of_hashes_brings_nobody_elses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colliding:
        def __init__(self, typecode: str, values: list[int]) -> None:
            self.values = values

        def tobytes(self) -> bytes:
            return SameBytes(b"".join(v.to_bytes(4, "little") for v in self.values))

    class SameBytes(bytes):
        def __getitem__(self, key: slice) -> SameHash:  # type: ignore[override]
            return SameHash(super().__getitem__(key))

        def __hash__(self) -> int:
            return 1

    monkeypatch.setattr("headrace.kvcache.prefix_index.array", Colliding)
    test_a_beginning_is_found_up_to_the_first_difference()
    test_salts_share_nothing()


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(4, 30))
def test_against_a_plain_list(seed: int, size: int, blocks: int) -> None:
    """Two letters, so that beginnings are often equal. What is found must have been entered, and be in memory still."""
    rng = random.Random(seed)
    cache = manager(blocks, size)
    holds: dict[int, tuple[str, tuple[int, ...]]] = {}  # per block, the beginning that was computed into it last
    tables: list[tuple[BlockTable, list[int], str]] = []
    for _ in range(40):
        if rng.random() < 0.6:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))]
            salt = rng.choice(["", "s"])
            table = BlockTable()
            found = cache.admit(table, ids, salt)
            if found is None:
                assert cache.pool.num_free < cache.pool.blocks_for(len(ids))
                continue
            assert found % size == 0
            assert found < len(ids)
            for i in range(found // size):
                assert holds[table.blocks[0][i]] == (salt, tuple(ids[: (i + 1) * size]))
            for i in range(found // size, len(table.blocks[0])):
                holds[table.blocks[0][i]] = (salt, tuple(ids[: (i + 1) * size]))
            cache.note_computed(table, ids, len(ids), salt)
            tables.append((table, ids, salt))
        elif tables:
            cache.free(tables.pop(rng.randrange(len(tables)))[0])
