"""The blocks of the KV cache: who holds them, and which are free."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Counts the holders of block numbers 0 ... num_blocks - 1. Every operation takes constant time per block.

    A free block may be kept: what it holds is known to the prefix index, and `share` brings it back. Blank blocks are
    taken first, the one freed last before the others: its memory is the likeliest to be in the processor's cache, and
    memory that was never needed is never touched. When there is none, the kept block that was freed first is emptied.

    on_evict: called with a kept block that is about to lose what it holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_evict: Callable[[int], None] | None = None
        self._holders = array("i", bytes(4 * num_blocks))
        self._is_kept = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # kept blocks that nobody holds, freed first first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, blank or kept."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds and that still hold a prefix."""
        return len(self._evictable)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one holder now. The caller has made sure that there are so many."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each of some blocks that are held or kept."""
        for block in blocks:
            if self._holders[block] == 0:
                if not self._is_kept[block]:
                    raise RuntimeError(f"block {block} is blank and cannot be shared")
                del self._evictable[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Takes a holder from each block. The last ones are freed first, so that they are evicted first.

        A block of a prompt without the ones before it is of no use to anyone.
        """
        for block in reversed(blocks):
            left = self._holders[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} is free already")
            self._holders[block] = left
            if left == 0:
                if self._is_kept[block]:
                    self._evictable[block] = None
                else:
                    self._blank.append(block)

    def keep(self, block: int) -> None:
        """From now on the block keeps what it holds when its last holder has gone, until its memory is needed."""
        self._is_kept[block] = True

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these kept blocks have no holder, and so count as free until they are shared."""
        holders = self._holders
        return sum(not holders[block] for block in blocks)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._is_kept[block] = False
        if self.on_evict is not None:
            self.on_evict(block)
        return block
