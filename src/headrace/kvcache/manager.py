"""The cache blocks of each sequence: reused, reserved, grown, forked, swapped and freed."""

from array import array
from dataclasses import dataclass, field

from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.prefix_index import NO_BLOCK, Node, PrefixIndex, first_seen
from headrace.worker.cache_layout import CacheLayout

PLACEHOLDER = 0  # stands in a block table for a block that nobody reads any more; any valid number would do


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    blocks: by group of layers, in order of their tokens; none while the sequence does not run. Layers that see
        everything have room for all its tokens; those with a window for so many as the next step may compute. (Arrays,
        which the worker reads without a copy.)
    num_dropped: by group, so many at the beginning are not there, as its layers do not look back so far.
    nodes: those of the leading tokens that are in the prefix index, block by block.
    host_blocks: by group, where the blocks after the dropped ones lie while the sequence is swapped out.
    num_on_host: how many tokens were computed when it was swapped out; 0 when it is not.
    """

    blocks: "list[array[int]]" = field(default_factory=list)
    num_dropped: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    host_blocks: list[list[int]] = field(default_factory=list)
    num_on_host: int = 0


class CacheManager:
    """Deals out the blocks of a pool to sequences.

    layout: which groups of layers have block tables of their own, and how far each sees.
    index: finds beginnings that are in the cache already; None to compute everything anew.
    host: blocks of the host's memory to swap to; None where there are none.
    copies, swap_out, swap_in: what the next step has to copy, as StepPlan has it.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: CacheLayout,
        *,
        index: PrefixIndex | None = None,
        host: BlockPool | None = None,
    ) -> None:
        self.pool, self.layout, self.index, self.host = pool, layout, index, host
        self.windows = layout.windows
        self.copies: list[tuple[int, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    def admit(
        self, table: BlockTable, token_ids: list[int], salt: str, *, reuse: bool = True, spare: int = 0
    ) -> int | None:
        """Reserves blocks for a sequence that has none, and leaves at least `spare` blocks free.

        They are for all its tokens, but where there is a window, only for those that the next step sees or computes.
        Blocks that hold its beginning are shared; if it was swapped out, the rest comes back from the host. At least
        the last token is left to be computed, since the logits after it are wanted.
        Returns how many of its tokens are in the cache now; None, with nothing changed, if there is no room.
        """
        pool, size = self.pool, self.pool.block_size
        length, dropped = len(token_ids), table.num_dropped
        nodes: list[Node] = []
        if not any(dropped):
            if self.index is not None and reuse:
                nodes = self.index.find(salt, token_ids, (length - 1) // size)
            dropped = [first_seen(len(nodes) * size, window, size) for window in self.windows]
        computed = max(len(nodes) * size, table.num_on_host)
        ends = [length if w is None else min(length, computed + self.layout.chunk) for w in self.windows]
        shared = [[node.blocks[group] for node in nodes[n:]] for group, n in enumerate(dropped)]
        fresh = [pool.blocks_for(end) - n - len(blocks) for end, n, blocks in zip(ends, dropped, shared, strict=True)]
        if sum(fresh) + sum(map(pool.num_unheld, shared)) > pool.num_free - spare:
            return None
        for blocks in shared:  # before others are taken, so that none of these is evicted
            pool.share(blocks)
        table.blocks = [
            array("q", [PLACEHOLDER] * n + blocks + pool.take(count))
            for n, blocks, count in zip(dropped, shared, fresh, strict=True)
        ]
        if table.host_blocks:
            for group, host_blocks in enumerate(table.host_blocks):
                pairs = list(zip(table.blocks[group][table.num_dropped[group] :], host_blocks, strict=False))
                self.swap_in += pairs[len(nodes) :]  # if any are shared, none had been dropped
            self._forget_host(table)
        if not any(table.num_dropped):
            table.nodes = nodes
        table.num_dropped = dropped
        return computed

    def fork(self, table: BlockTable, source: BlockTable, num_tokens: int, *, spare: int = 0) -> int | None:
        """Gives a new sequence the blocks of `source` for the prompt of `num_tokens` tokens that both have.

        Full blocks are shared. The new sequence computes the last token of the prompt again, which writes into its last
        block; so that one is copied, now rather than at the write, which comes in the same step.
        Returns as `admit` does; None also where `source` has dropped blocks that the new one would read.
        """
        pool, size = self.pool, self.pool.block_size
        full, rest = divmod(num_tokens - 1, size)
        for dropped, window in zip(source.num_dropped, self.windows, strict=True):
            if dropped > first_seen(num_tokens - 1, window, size):
                return None
        if pool.num_free - spare < len(self.windows):
            return None
        table.num_dropped = list(source.num_dropped)
        table.nodes = source.nodes[:full]
        for theirs, dropped, last in zip(source.blocks, source.num_dropped, pool.take(len(self.windows)), strict=True):
            pool.share(theirs[dropped:full])
            table.blocks.append(theirs[:full] + array("q", [last]))
            if rest:
                self.copies.append((theirs[full], last))
        return num_tokens - 1

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Adds blocks until so many tokens have room. False, with nothing changed, if there are too few."""
        wanted = self.pool.blocks_for(num_tokens)
        missing = [max(0, wanted - len(blocks)) for blocks in table.blocks]
        if sum(missing) > self.pool.num_free:
            return False
        for blocks, count in zip(table.blocks, missing, strict=True):
            if count:
                blocks.extend(self.pool.take(count))
        return True

    def room(self, table: BlockTable) -> int:
        """For how many of its tokens a sequence has blocks, or could have if it took all that are free."""
        lengths = [len(blocks) for blocks in table.blocks]
        shortest = min(lengths)  # as long are all groups with a window; the others have blocks for all tokens
        return (shortest + self.pool.num_free // lengths.count(shortest)) * self.pool.block_size

    def note_computed(self, table: BlockTable, token_ids: list[int], num_computed: int, salt: str) -> None:
        """Enters the blocks that have become full into the index, and drops those that no layer sees any more.

        To be called whenever a block has become full.
        """
        size = self.pool.block_size
        if self.index is not None:
            for at in range(len(table.nodes), num_computed // size):
                blocks = [
                    NO_BLOCK if at < dropped else blocks[at]
                    for blocks, dropped in zip(table.blocks, table.num_dropped, strict=True)
                ]
                parent = table.nodes[-1] if table.nodes else salt
                table.nodes.append(self.index.enter(parent, token_ids[at * size : (at + 1) * size], blocks))
        for group, window in enumerate(self.windows):
            if window is not None:
                # One token more is kept than the next one sees: a fork begins one token farther back.
                gone, dropped = first_seen(num_computed - 1, window, size), table.num_dropped[group]
                if gone > dropped:
                    own = table.blocks[group]
                    self.pool.give_back(own[dropped:gone])
                    own[dropped:gone] = array("q", [PLACEHOLDER] * (gone - dropped))
                    table.num_dropped[group] = gone

    def move_to_host(self, table: BlockTable, num_computed: int) -> bool:
        """Frees a sequence's blocks and has the next step copy what they hold. False if there is no room."""
        if self.host is None:
            return False
        end = self.pool.blocks_for(num_computed)
        used = [blocks[dropped:end] for blocks, dropped in zip(table.blocks, table.num_dropped, strict=True)]
        count = sum(map(len, used))
        if not count or count > self.host.num_free:
            return False
        table.host_blocks = [self.host.take(len(blocks)) for blocks in used]
        table.num_on_host = num_computed
        for blocks, host_blocks in zip(used, table.host_blocks, strict=True):
            self.swap_out += zip(blocks, host_blocks, strict=True)
        self._give_back(table)
        return True

    def free(self, table: BlockTable) -> None:
        """Gives back all blocks of a sequence, on the device and on the host."""
        self._give_back(table)
        table.num_dropped, table.nodes = [], []
        self._forget_host(table)

    def _give_back(self, table: BlockTable) -> None:
        for blocks, dropped in zip(table.blocks, table.num_dropped, strict=False):  # while on the host it has none
            self.pool.give_back(blocks[dropped:])
        table.blocks = []

    def _forget_host(self, table: BlockTable) -> None:
        if self.host is not None:
            for host_blocks in table.host_blocks:
                self.host.give_back(host_blocks)
        table.host_blocks, table.num_on_host = [], 0
