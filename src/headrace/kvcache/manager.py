"""The cache blocks of each sequence: reused, reserved, grown, forked, swapped and freed."""

from array import array
from dataclasses import dataclass, field

from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.prefix_index import Node, PrefixIndex

PLACEHOLDER = 0  # stands in a block table for a block that nobody reads any more; any valid number would do


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    blocks: in order of their tokens. (An array, which the worker reads without a copy.)
    num_dropped: so many at the beginning have been given back, as no layer looks back so far.
    nodes: those of the leading blocks that are in the prefix index.
    host_blocks: where the blocks after the dropped ones lie while the sequence is swapped out.
    num_on_host: how many tokens were computed when it was swapped out; 0 when it is not.
    """

    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    num_dropped: int = 0
    nodes: list[Node] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    num_on_host: int = 0


class CacheManager:
    """Deals out the blocks of a pool to sequences.

    index: finds beginnings that are in the cache already; None to compute everything anew.
    host: blocks of the host's memory to swap to; None where there are none.
    window: how many tokens back the layer sees that sees farthest; None where one sees everything. (All layers share
        one block table, so a model with a single such layer keeps all blocks.)
    copies, swap_out, swap_in: what the next step has to copy, as StepPlan has it.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        index: PrefixIndex | None = None,
        host: BlockPool | None = None,
        window: int | None = None,
    ) -> None:
        self.pool, self.index, self.host, self.window = pool, index, host, window
        self.copies: list[tuple[int, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    def admit(
        self, table: BlockTable, token_ids: list[int], salt: str, *, reuse: bool = True, spare: int = 0
    ) -> int | None:
        """Reserves blocks for all tokens of a sequence that has none, and leaves at least `spare` blocks free.

        Blocks that hold its beginning are shared; if it was swapped out, the rest comes back from the host. At least
        the last token is left to be computed, since the logits after it are wanted.
        Returns how many of its tokens are in the cache now; None, with nothing changed, if there is no room.
        """
        pool = self.pool
        dropped = table.num_dropped
        shared: list[int] = []
        nodes: list[Node] = []
        if self.index is not None and reuse and not dropped:
            shared, nodes = self.index.find(salt, token_ids, (len(token_ids) - 1) // pool.block_size)
        fresh = pool.blocks_for(len(token_ids)) - dropped - len(shared)
        if fresh + pool.num_unheld(shared) > pool.num_free - spare:
            return None
        pool.share(shared)  # before others are taken, so that none of these is evicted
        table.blocks = array("q", [PLACEHOLDER] * dropped + shared + pool.take(fresh))
        if not dropped:
            table.nodes = nodes
        computed = len(shared) * pool.block_size
        if table.host_blocks:
            pairs = list(zip(table.blocks[dropped:], table.host_blocks, strict=False))
            self.swap_in += pairs[len(shared) :]
            computed = max(computed, table.num_on_host)
            self._forget_host(table)
        return computed

    def fork(self, table: BlockTable, source: BlockTable, num_tokens: int, *, spare: int = 0) -> int | None:
        """Gives a new sequence the blocks of `source` for the prompt of `num_tokens` tokens that both have.

        Full blocks are shared. The new sequence computes the last token of the prompt again, which writes into its last
        block; so that one is copied, now rather than at the write, which comes in the same step.
        Returns as `admit` does; None also where `source` has dropped blocks that the new one would read.
        """
        pool = self.pool
        full = (num_tokens - 1) // pool.block_size
        dropped = source.num_dropped
        first_seen = 0 if self.window is None else max(0, num_tokens - self.window)
        if dropped * pool.block_size > first_seen or pool.num_free - spare < 1:
            return None
        shared = source.blocks[dropped:full]
        pool.share(shared)
        (last,) = pool.take(1)
        table.blocks = array("q", [PLACEHOLDER] * dropped) + shared + array("q", [last])
        table.num_dropped = dropped
        table.nodes = source.nodes[:full]
        if (num_tokens - 1) % pool.block_size:
            self.copies.append((source.blocks[full], last))
        return num_tokens - 1

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Adds blocks until so many tokens have room. False, with nothing changed, if there are too few."""
        missing = self.pool.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            table.blocks.extend(self.pool.take(missing))
        return True

    def note_computed(self, table: BlockTable, token_ids: list[int], num_computed: int, salt: str) -> None:
        """Enters the blocks that have become full into the index, and drops those that no layer sees any more."""
        size = self.pool.block_size
        if self.index is not None and (len(table.nodes) + 1) * size <= num_computed:
            while (len(table.nodes) + 1) * size <= num_computed:
                at = len(table.nodes)
                parent = table.nodes[-1] if table.nodes else salt
                table.nodes.append(self.index.enter(parent, token_ids[at * size : (at + 1) * size], table.blocks[at]))
        if self.window is not None:
            # One token more is kept than the next one sees: a fork begins one token farther back.
            gone = max(0, num_computed - self.window) // size
            if gone > table.num_dropped:
                self.pool.give_back(table.blocks[table.num_dropped : gone])
                for i in range(table.num_dropped, gone):
                    table.blocks[i] = PLACEHOLDER
                table.num_dropped = gone

    def move_to_host(self, table: BlockTable, num_computed: int) -> bool:
        """Frees a sequence's blocks and has the next step copy what they hold. False if there is no room."""
        if self.host is None:
            return False
        used = table.blocks[table.num_dropped : self.pool.blocks_for(num_computed)]
        if not used or len(used) > self.host.num_free:
            return False
        table.host_blocks = self.host.take(len(used))
        table.num_on_host = num_computed
        self.swap_out += zip(used, table.host_blocks, strict=True)
        self.pool.give_back(table.blocks[table.num_dropped :])
        table.blocks = array("q")
        return True

    def free(self, table: BlockTable) -> None:
        """Gives back all blocks of a sequence, on the device and on the host."""
        self.pool.give_back(table.blocks[table.num_dropped :])
        table.blocks = array("q")
        table.num_dropped = 0
        table.nodes = []
        self._forget_host(table)

    def _forget_host(self, table: BlockTable) -> None:
        if self.host is not None and table.host_blocks:
            self.host.give_back(table.host_blocks)
        table.host_blocks, table.num_on_host = [], 0
