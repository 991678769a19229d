"""The blocks of the KV cache, free and taken."""


class BlockPool:
    """Hands out block numbers 0 ... num_blocks - 1; each is either free or owned by one taker.

    The block freed last is taken first: its memory is the likeliest to be in the processor's cache, and memory that was
    never needed is never touched.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has made sure that there are so many."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._taken[block] = True
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Frees blocks; one that is free already is a fault of the caller's."""
        for block in reversed(blocks):
            if not self._taken[block]:
                raise RuntimeError(f"block {block} is free already")
            self._taken[block] = False
            self._free.append(block)
