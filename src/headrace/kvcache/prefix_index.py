"""Which blocks hold the beginning of which sequences, so that an equal beginning need not be computed again."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.kvcache.block_pool import BlockPool

NO_BLOCK = -1


@dataclass(slots=True, eq=False)
class Node:
    """The tokens of a block, after certain others.

    number: its own, never used twice. parent: the node of the tokens before it, or the root.
    blocks: by group of layers, the block that holds keys and values of these tokens; NO_BLOCK where there is none.
    num_children: nodes that follow it.
    """

    number: int
    parent: "Node | str"
    tokens: bytes
    blocks: list[int] = field(default_factory=list)
    num_children: int = 0


class PrefixIndex:
    """A tree of full blocks: the way from the root to a node is the sequence of tokens whose keys and values it holds.

    A node is found by the pair (number of its parent, its own tokens), in a dict. Node numbers are never used twice, so
    equal pairs mean equal beginnings all the way to the root; as a dict compares the keys themselves, no collision of
    hashes can bring the block of another prefix. The root's number is the salt, a text that keeps those apart who must
    not see each other's work: by adapter, and by what a request asks for. (One index belongs to one model.)

    windows: by group of layers, how many tokens they see; None for all.
    num_queried_tokens, num_hit_tokens: of the prompts that were looked up, and those of them that were found.
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int | None] = (None,)) -> None:
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.windows = windows
        self._unlimited = tuple(group for group, window in enumerate(windows) if window is None)
        self._pool = pool
        self._nodes: dict[tuple[int | str, bytes], Node] = {}
        self._owners: dict[int, tuple[Node, int]] = {}  # by block: the node that it is of, and the group
        self._next_number = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """How many blocks it knows."""
        return len(self._owners)

    def find(self, salt: str, token_ids: list[int], most: int) -> list[Node]:
        """The nodes of the longest beginning of `token_ids`, at most so many, after which a sequence can go on.

        That is where each group still has all blocks that the next token sees: those of the whole beginning, or of the
        last ones of it (see `first_seen`) where there is a window.
        """
        size = self._pool.block_size
        raw = array("i", token_ids[: most * size]).tobytes()
        width = size * 4
        nodes: list[Node] = []
        parent: int | str = salt
        for start in range(0, len(raw), width):
            node = self._nodes.get((parent, raw[start : start + width]))
            if node is None or any(node.blocks[group] == NO_BLOCK for group in self._unlimited):
                break
            parent = node.number
            nodes.append(node)
        missing: int | None = len(nodes)
        while missing is not None:  # one that is seen; so a sequence can go on before it at best
            del nodes[missing:]
            missing = self._last_missing(nodes)
        return nodes

    def _last_missing(self, nodes: list[Node]) -> int | None:
        """Of the nodes that the next token sees through some window, the last one that lacks the block for it."""
        size, count = self._pool.block_size, len(nodes)
        for group, window in enumerate(self.windows):
            if window is not None:
                for i in range(count - 1, first_seen(count * size, window, size) - 1, -1):
                    if nodes[i].blocks[group] == NO_BLOCK:
                        return i
        return None

    def enter(self, parent: Node | str, token_ids: list[int], blocks: Sequence[int]) -> Node:
        """Notes which blocks, by group, hold these tokens after those of `parent` (a node, or the salt).

        Where another block holds the same already, that one stays the one to be found.
        """
        tokens = array("i", token_ids).tobytes()
        key = (parent if isinstance(parent, str) else parent.number, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(self._next_number, parent, tokens, [NO_BLOCK] * len(blocks))
            self._next_number += 1
            if isinstance(parent, Node):
                parent.num_children += 1
        for group, block in enumerate(blocks):
            if block != NO_BLOCK and node.blocks[group] == NO_BLOCK:
                node.blocks[group] = block
                self._owners[block] = (node, group)
                self._pool.keep(block)
        return node

    def _forget(self, block: int) -> None:
        """Takes out a block whose memory is needed, and nodes that neither have a block nor lead to one any more."""
        node, group = self._owners.pop(block)
        node.blocks[group] = NO_BLOCK
        while not node.num_children and all(block == NO_BLOCK for block in node.blocks):
            parent = node.parent
            key = (parent.number if isinstance(parent, Node) else parent, node.tokens)
            if self._nodes.get(key) is not node:
                break
            del self._nodes[key]
            if isinstance(parent, str):
                break
            parent.num_children -= 1
            node = parent


def first_seen(num_tokens: int, window: int | None, block_size: int) -> int:
    """The first block that the token after so many others sees."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size
