"""How the native kernels have their weights: panels of sixteen outputs, described in docs/kernels.md.

Every instruction set reads the same layout. All values are kept exactly as they are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace import _native
from headrace.formats.checkpoint import IntegerWeight, Weight

LANES = 16  # outputs of a panel
BLOCK = 32  # inputs that lie together
QUAD = 4  # inputs of an output that stand side by side

FLOATS, NIBBLES, BYTES = 0, 1, 2  # codings, as csrc/kernels.h numbers them
HALVES, BLOCKS, ROWS = 0, 1, 2  # what shares a scale of the activations


@dataclass(slots=True)
class Packed:
    """Some rows of a matrix `[outputs, inputs]`; value = scale * (code - offset) + minimum for codes.

    values: for FLOATS `[panels, inputs, 16]` in float32, bfloat16 or float16; for codes uint8, see `_pack_codes`.
    scales, minimums: `[panels, groups, 16]`, both float16 where that holds them exactly, or else both float32.
    order: int32 `[inputs]`, the input feature of each column; None for their own order.
    sharing: whether activations get a scale for every 16 of a token, for every 32, or for all.
    """

    coding: int
    outputs: int
    inputs: int
    values: Tensor
    group_size: int = BLOCK
    offset: int = 0
    scales: Tensor | None = None
    minimums: Tensor | None = None
    order: Tensor | None = None
    sharing: int = HALVES

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.values, self.scales, self.minimums, self.order) if t is not None]


def pack(weights: Sequence[Weight], dtype: torch.dtype, *, codes: bool, sharing: int = HALVES) -> list[Packed]:
    """Weights `[out_i, in]` one below the other; as few pieces as their codings allow.

    dtype: of the activations; plain numbers are rounded to it, unless they are stored in less.
    codes: whether weights that are stored as whole numbers stay so; those that ask for rounded activations always do.
    sharing: as Packed has it; those that ask for rounded activations get ROWS.
    """
    pieces: list[Packed] = []
    joined: list[IntegerWeight] = []
    shared = sharing
    for weight in weights:
        rounded = weight.activation_bits is not None
        integers = weight.integers() if codes or rounded else None
        if not is_packable(integers):
            integers = None
        if joined and (integers is None or rounded != (shared == ROWS) or not _alike(joined[-1], integers)):
            pieces.append(_pack_integers(joined, shared))
            joined = []
        if integers is None:
            pieces.append(_pack_floats(weight.dequantize(weight.dtype if dtype == torch.float32 else dtype)))
        else:
            joined.append(integers)
            shared = ROWS if rounded else sharing
    return [*pieces, _pack_integers(joined, shared)] if joined else pieces


def _pack_floats(matrix: Tensor) -> Packed:
    """A dense matrix `[out, in]` in the dtype in which it is to be stored."""
    outputs, inputs = matrix.shape
    padded = F.pad(matrix, (0, 0, 0, -outputs % LANES))
    return Packed(FLOATS, outputs, inputs, padded.view(-1, LANES, inputs).transpose(1, 2).contiguous())


def is_packable(weight: IntegerWeight | None) -> bool:
    """Whether there are whole numbers, and no group ends within a block but for two that share one."""
    if weight is None:
        return False
    whole_row = weight.group_size >= weight.codes.shape[1]
    return whole_row or weight.group_size == LANES or weight.group_size % BLOCK == 0


def _alike(a: IntegerWeight, b: IntegerWeight) -> bool:
    """Whether both may be one piece."""
    return (
        a.order is None
        and b.order is None
        and (a.bits <= 4) == (b.bits <= 4)
        and (a.codes.dtype, a.group_size) == (b.codes.dtype, b.group_size)
        and (a.minimums is None) == (b.minimums is None)
    )


def _pack_integers(weights: list[IntegerWeight], sharing: int) -> Packed:
    minimums = [w.minimums for w in weights if w.minimums is not None]
    first = weights[0]
    numbers = [torch.cat([w.scales for w in weights])]
    if minimums:
        numbers.append(torch.cat(minimums))
    half = all(torch.equal(n.half().float(), n) for n in numbers)
    stored = [_panels(n.half() if half else n) for n in numbers]
    outputs, inputs = sum(len(w.codes) for w in weights), first.codes.shape[1]
    nibbles = first.bits <= 4
    signed = first.codes.dtype == torch.int8
    # Nibbles are stored from 0 to 15, bytes from -128 to 127.
    offset = (8 if signed else 0) if nibbles else (0 if signed else -128)
    coding = NIBBLES if nibbles else BYTES
    whole_row = first.group_size >= inputs
    return Packed(
        coding,
        outputs,
        inputs,
        _pack_codes([w.codes for w in weights], outputs, offset, coding),
        -(-inputs // BLOCK) * BLOCK if whole_row else first.group_size,
        offset,
        stored[0],
        stored[1] if minimums else None,
        None if first.order is None else first.order.to(torch.int32),
        sharing,
    )


def _panels(numbers: Tensor) -> Tensor:
    """`[outputs, groups]` to `[panels, groups, 16]`."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % LANES))
    return padded.view(-1, LANES, numbers.shape[1]).transpose(1, 2).contiguous()


def _pack_codes(pieces: Sequence[Tensor], outputs: int, offset: int, coding: int) -> Tensor:
    """uint8 or int8 `[outputs_i, inputs]`, one below the other, to uint8 `[panels, blocks, lines, 16, 4]`.

    A line has four inputs of each output. Bytes have eight lines to a block. Nibbles have four: the low ones are the
    first sixteen inputs, the high ones the others. What fills up the last panel and the last block meets no output, and
    activations of zero.
    """
    inputs = pieces[0].shape[1]
    lines = BLOCK // QUAD // (2 if coding == NIBBLES else 1)
    values = torch.zeros(-(-outputs // LANES), -(-inputs // BLOCK), lines, LANES, QUAD, dtype=torch.uint8)
    first = 0
    for piece in pieces:
        codes = piece.contiguous()
        _native.pack_codes(codes.data_ptr(), len(codes), inputs, first, offset % 256, coding, values.data_ptr())
        first += len(codes)
    return values
