"""Groups of layers, and how many blocks a sequence holds in them."""

import random

import pytest

from headrace.worker.cache_layout import MAX_GROUPS, CacheLayout

GEMMA3_270M = [512] * 5 + [None]
GEMMA3_1B = ([512] * 5 + [None]) * 4 + [512] * 2


@pytest.mark.parametrize(
    ("layers", "windows", "places"),
    [
        ([None] * 30, (None,), 30),
        ([4096] * 32, (4096,), 32),
        (GEMMA3_270M * 3, (None, *[512] * 5), 3),
        (GEMMA3_1B, (None, *[512] * 6), 4),
        ([512, None] * 13, (None, 512), 13),  # Gemma 2
        ([None] * 20 + [64] * 8, (None, None, None, 64), 8),
        ([8, None, 16], (None, 8, 16), 1),
    ],
)
def test_layers_with_equal_windows_share_groups(
    layers: list[int | None], windows: tuple[int | None, ...], places: int
) -> None:
    layout = CacheLayout.of(layers, 32, 100)
    assert (layout.windows, layout.layers_per_group) == (windows, places)
    assert [layout.windows[group] for group, _ in layout.places] == layers
    assert len(set(layout.places)) == len(layers), "no two layers write to the same place"
    assert all(0 <= place < places for _, place in layout.places)


def test_a_rare_kind_of_layer_does_not_make_many_groups() -> None:
    layout = CacheLayout.of([128] * 47 + [None], 32, 100)
    assert len(layout.windows) == MAX_GROUPS + 1
    assert layout.layers_per_group == 6


def test_blocks_of_a_sequence_by_counting() -> None:
    """By trying all places where a step may begin: what its tokens see, one more, and the tokens themselves."""
    rng = random.Random(0)
    for _ in range(200):
        size, window, chunk = rng.randint(1, 9), rng.randint(1, 30), rng.randint(1, 30)
        length = rng.randint(1, 120)
        layout = CacheLayout.of([window, None], size, chunk)
        most = 0
        for start in range(length):
            for end in range(start + 1, min(start + chunk, length) + 1):
                first = max(0, start - window)
                most = max(most, len({p // size for p in range(first, end)}))
        full = -(-length // size)
        # As many as can come up in a long sequence, whether or not they do in one of this length.
        assert full + most <= layout.blocks_for(length) <= full + min(full, most + 1)


def test_the_longest_sequence_by_trying_all() -> None:
    rng = random.Random(1)
    for _ in range(200):
        size, chunk, limit = rng.randint(1, 9), rng.randint(1, 20), rng.randint(1, 100)
        windows = [rng.choice([None, 3, 10]) for _ in range(rng.randint(1, 4))]
        layout, blocks = CacheLayout.of(windows, size, chunk), rng.randint(0, 60)
        fitting = [n for n in (*range(0, limit, size), limit) if layout.blocks_for(n) <= blocks]
        assert layout.longest(blocks, limit) == fitting[-1]
