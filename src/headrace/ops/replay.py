"""A network whose ops are noted down once and then run by one native call for each step.

The network's Python code is run a single time, on tensors of torch's device "meta", which have shapes and strides but
no memory: instead of computing, each op of `CpuOps` notes its arguments. All that changes from step to step is how many
tokens there are, and what the inputs hold. So the inputs get memory of their own, what the ops hand on gets places in a
workspace (the same place for things that are never needed at the same time), and the ops become a native program.
The kernels are those that are otherwise called one by one, so the results have the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace import _native
from headrace.ops.reference import Forward, KVCache, RaggedBatch

# Steps of more tokens are run op by op: the calls cost nothing beside the work there, and the workspace stays small.
MAX_TOKENS = 256

# The sizes that stand for the step's own while ops are noted down: a tensor of CHOSEN rows has those that `take` took.
TOKENS, CHOSEN = 2, 1

ALIGNMENT = 64


@dataclass(slots=True)
class _Buffer:
    """What an op hands on. bytes: for each token. first, last: the ops, by number, that use it first and last."""

    bytes: int
    first: int
    last: int
    address: int = 0


@dataclass(slots=True)
class Recording:
    """The calls of ops so far: a function of `_native` that makes an op, and its arguments."""

    calls: list[tuple[Callable[..., _native.Op], tuple[Any, ...]]] = field(default_factory=list)
    _buffers: dict[int, _Buffer] = field(default_factory=dict)
    _made: list[Tensor] = field(default_factory=list)  # kept, so that no two of them share an identity
    _workspace: Tensor | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for the next op's result; `shape` begins with TOKENS or CHOSEN."""
        tensor = torch.empty(*shape, dtype=dtype, device="meta")
        self._buffers[_identity(tensor)] = _Buffer(tensor.nbytes // shape[0], len(self.calls), len(self.calls))
        self._made.append(tensor)
        return tensor

    def add(self, function: Callable[..., _native.Op], arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.is_meta:
                # A KeyError: something was computed with torch on the way, and nothing would compute it again.
                self._buffers[_identity(argument)].last = len(self.calls)
        self.calls.append((function, arguments))

    def program(self, result: Tensor) -> _native.Program:
        """The calls with everything in its place. `result` stays as it is from one run to the next."""
        self._buffers[_identity(result)].last = len(self.calls)
        self._place()
        program = _native.Program()
        for function, arguments in self.calls:
            program.add(function(*(self.address(a) if isinstance(a, Tensor) else a for a in arguments)))
        return program

    def _place(self) -> None:
        """Gives the buffers their places in a workspace, of which only what is written to takes memory."""
        free: dict[int, list[int]] = {}
        ending: dict[int, list[_Buffer]] = {}
        size = 0
        buffers = iter(self._buffers.values())  # in order of their first use
        following = next(buffers, None)
        for number in range(len(self.calls)):
            while following is not None and following.first == number:
                room = -(-following.bytes * MAX_TOKENS // ALIGNMENT) * ALIGNMENT
                if not free.get(room):
                    free[room] = [size]
                    size += room
                following.address = free[room].pop()
                ending.setdefault(following.last, []).append(following)
                following = next(buffers, None)
            for buffer in ending.pop(number, ()):
                free[-(-buffer.bytes * MAX_TOKENS // ALIGNMENT) * ALIGNMENT].append(buffer.address)
        self._workspace = torch.empty(size, dtype=torch.uint8)
        for buffer in self._buffers.values():
            buffer.address += self._workspace.data_ptr()

    def address(self, tensor: Tensor) -> int:
        if not tensor.is_meta:
            return tensor.data_ptr()
        return self._buffers[_identity(tensor)].address + int(tensor.storage_offset()) * tensor.itemsize

    def view(self, result: Tensor) -> Tensor:
        """The memory of a result `[TOKENS or CHOSEN, n]`, float32 `[MAX_TOKENS, n]`."""
        assert self._workspace is not None
        start = self.address(result) - self._workspace.data_ptr()
        count = result.shape[1]
        return self._workspace[start : start + 4 * MAX_TOKENS * count].view(torch.float32).view(MAX_TOKENS, count)


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Replay:
    """Runs `forward` like itself, by a program where a step is small enough.

    record: runs `forward` on its arguments and notes the ops down; it gives the recording, the result, and the cosines
        and sines that are among the inputs, with the frequencies and the scale that they are of.
    angles: `Ops.rotary_angles`.
    caches, groups, max_blocks: as in `Ops.replayed`.
    """

    def __init__(
        self,
        forward: Forward,
        record: Callable[..., tuple[Recording, Tensor, list[tuple[Tensor, float, Tensor, Tensor]]]],
        angles: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
        caches: list[KVCache],
        groups: Sequence[int],
        max_blocks: int,
    ) -> None:
        self.forward, self.caches, self.angles_of = forward, caches, angles
        self.layer_of = [list(groups).index(group) for group in range(max(groups) + 1)]
        self.ids, self.positions, self.rows = (torch.zeros(MAX_TOKENS, dtype=torch.int64) for _ in range(3))
        self.lens = torch.zeros(2, MAX_TOKENS, dtype=torch.int64)
        self.slots = [torch.zeros(MAX_TOKENS, dtype=torch.int64) for _ in self.layer_of]
        # Pages that nothing is written to take no memory.
        self.tables = [torch.empty(MAX_TOKENS, max_blocks, dtype=torch.int64) for _ in self.layer_of]
        batches = [
            RaggedBatch(
                [1] * TOKENS, [1] * TOKENS, self.positions[:TOKENS], slots[:TOKENS], tables, {"lens": self.lens}
            )
            for slots, tables in zip(self.slots, self.tables, strict=True)
        ]
        recording, result, self.angles = record(
            self.ids[:TOKENS], [batches[group] for group in groups], caches, self.rows[:CHOSEN]
        )
        self.program = recording.program(result)
        self.logits = recording.view(result)
        self.recording = recording  # which holds the memory that the program works on

    def __call__(self, ids: Tensor, batches: list[RaggedBatch], caches: list[KVCache], rows: Tensor) -> Tensor:
        """As `Decoder.forward`; the logits are valid until the next call."""
        tokens, chosen, sequences = len(ids), len(rows), len(batches[0].query_lens)
        by_group = [batches[layer] for layer in self.layer_of]
        widest = max(batch.block_tables.shape[1] for batch in by_group)
        if max(tokens, chosen) > MAX_TOKENS or widest > self.tables[0].shape[1] or caches is not self.caches:
            return self.forward(ids, batches, caches, rows)
        self.ids[:tokens] = ids
        self.rows[:chosen] = rows
        self.lens[:, :sequences] = torch.tensor([batches[0].query_lens, batches[0].context_lens])
        for batch, slots, tables in zip(by_group, self.slots, self.tables, strict=True):
            slots[:tokens] = batch.slots
            tables[:sequences, : batch.block_tables.shape[1]] = batch.block_tables
        for frequencies, scale, cosines, sines in self.angles:
            cosines[:tokens], sines[:tokens] = self.angles_of(batches[0].positions, frequencies, scale)
        self.program.run(tokens, chosen, sequences)
        return self.logits[:chosen]
