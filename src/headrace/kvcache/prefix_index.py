"""Which blocks hold the beginning of which sequences, so that an equal beginning need not be computed again."""

from array import array

from headrace.kvcache.block_pool import BlockPool

Node = int | str


class PrefixIndex:
    """A tree of full blocks: the way from the root to a node is the sequence of tokens whose keys and values it holds.

    A node is found by the pair (number of its parent, its own tokens), in a dict. Node numbers are never used twice, so
    equal pairs mean equal beginnings all the way to the root; as a dict compares the keys themselves, no collision of
    hashes can bring the block of another prefix. The root's number is the salt, a text that keeps those apart who must
    not see each other's work: by adapter, and by what a request asks for. (One index belongs to one model.)

    num_queried_tokens, num_hit_tokens: of the prompts that were looked up, and those of them that were found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._pool = pool
        self._nodes: dict[tuple[Node, bytes], tuple[int, int]] = {}  # to the node's number and its block
        self._keys: dict[int, tuple[Node, bytes]] = {}  # by block
        self._next_node = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, salt: str, token_ids: list[int], most: int) -> tuple[list[int], list[Node]]:
        """The blocks with the beginning of `token_ids`, at most so many, and their nodes."""
        size = self._pool.block_size
        raw = array("i", token_ids[: most * size]).tobytes()
        width = size * 4
        blocks: list[int] = []
        nodes: list[Node] = []
        parent: Node = salt
        for start in range(0, len(raw), width):
            found = self._nodes.get((parent, raw[start : start + width]))
            if found is None:
                break
            parent = found[0]
            nodes.append(parent)
            blocks.append(found[1])
        return blocks, nodes

    def enter(self, parent: Node, token_ids: list[int], block: int) -> int:
        """Notes that a block holds these tokens after those of `parent` (a node, or the salt). Returns its node.

        Where another block holds the same already, that one stays the one to be found.
        """
        key = (parent, array("i", token_ids).tobytes())
        known = self._nodes.get(key)
        if known is not None:
            return known[0]
        node = self._next_node
        self._next_node += 1
        self._nodes[key] = (node, block)
        self._keys[block] = key
        self._pool.keep(block)
        return node

    def _forget(self, block: int) -> None:
        """Takes out a block whose memory is needed. What hangs below it is not found any more."""
        del self._nodes[self._keys.pop(block)]
