"""How the layers of a model share the blocks of the KV cache."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8  # of those that a kind of layers which is very rare would make; each costs some work in every step


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layers with the same window need the same tokens, so they share block tables: they form groups.

    All groups have the same number of places for layers, some of which may stay empty. So a block, which holds
    `block_size` tokens of one group's layers, has the same size whichever group it serves, and there is a single pool.
    A model whose layers all have the same window is one group.

    windows: by group, how many tokens its layers see, the token itself counted; None for all. Those come first.
    layers_per_group: its places. places: by layer, its group and its place there.
    chunk: most tokens of a sequence that one step computes. All of them are in the cache at once, window or not.
    """

    block_size: int
    windows: tuple[int | None, ...]
    layers_per_group: int
    places: tuple[tuple[int, int], ...]
    chunk: int

    @classmethod
    def of(cls, layer_windows: Sequence[int | None], block_size: int, chunk: int) -> "CacheLayout":
        """The layout of a model whose layers have these windows."""
        counts = Counter(layer_windows)
        # As many as the rarest kind has leaves few places empty, and makes few groups but for very rare ones.
        size = max(min(counts.values()), -(-len(layer_windows) // MAX_GROUPS))
        windows: list[int | None] = []
        places: dict[int, tuple[int, int]] = {}
        for window in sorted(counts, key=lambda w: w is not None):
            layers = [layer for layer, its in enumerate(layer_windows) if its == window]
            for i, layer in enumerate(layers):
                places[layer] = (len(windows) + i // size, i % size)
            windows += [window] * -(-len(layers) // size)
        return cls(block_size, tuple(windows), size, tuple(places[i] for i in range(len(layer_windows))), chunk)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence ever holds, of all groups together, if it grows to so many tokens."""
        blocks = self._blocks(num_tokens)
        # What is seen and what is being computed may begin at the end of a block.
        return sum(blocks if w is None else min(blocks, self._blocks(w + self.chunk - 1) + 1) for w in self.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that gets by with so many blocks: `limit`, or whole blocks below it."""
        if self.blocks_for(limit) <= num_blocks:
            return limit
        lengths = range(0, limit, self.block_size)
        return lengths[bisect_right(lengths, num_blocks, key=self.blocks_for) - 1]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
