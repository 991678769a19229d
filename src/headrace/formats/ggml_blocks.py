"""The block types of ggml: how GGUF files code the values of a tensor, and how to get them back.

A row of a tensor is a sequence of blocks. A block codes `block_size` values in a fixed number of bytes: small integers
and the scales (and minimums) that turn them into numbers. Types named with a K have blocks of 256 values, divided into
sub-blocks with small integer scales of their own. The layouts are those of ggml (`ggml-common.h`); the results are bit
for bit those of its reference code, so the order of the float32 operations matters here.

So every type but the plain numbers is read into one form, `Integers`: small whole numbers, and for each group of them a
scale and perhaps a minimum. Kernels compute with these, and `dequantize` is scale * number + minimum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = NDArray[Any]  # one block per item, with the fields of its layout
Bytes = NDArray[Any]  # uint8; the types of NumPy's own annotations get lost in bit operations
Floats = NDArray[np.float32]

HALF = "<f2"  # float16
TWO_BIT_SHIFTS = np.array([[0], [2], [4], [6]], np.uint8)
ONE_BIT_SHIFTS = np.arange(8, dtype=np.uint8)[:, None]


@dataclass(frozen=True)
class Integers:
    """n blocks of g groups of s values each: value = scale * code + minimum.

    codes: uint8 or int8 `[n, g, s]`; scales: float32 `[n, g]`; minimums: float32 `[n, g]`, or None for none.
    """

    codes: NDArray[Any]
    scales: Floats
    minimums: Floats | None = None

    def values(self) -> Floats:
        values: Floats = self.scales[:, :, None] * self.codes.astype(np.float32)
        return values if self.minimums is None else values + self.minimums[:, :, None]


@dataclass(frozen=True)
class BlockType:
    """One way to code values.

    number: of the type in GGUF files (`ggml_type`).
    block_size: values per block.
    layout: the fields of a block in memory; its size is the size of a block.
    bits: of a code; 0 for plain numbers.
    read: blocks `[n]` of that layout to what they hold: float32 `[n]` of plain numbers, or codes with their scales.
    """

    name: str
    number: int
    block_size: int
    layout: np.dtype[Any]
    bits: int
    read: Callable[[Fields], Integers | Floats]

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize

    def unpack(self, blocks: Bytes) -> Integers | Floats:
        """Raw blocks, uint8 `[n, block_bytes]` and contiguous, to what they hold."""
        with np.errstate(invalid="ignore"):  # a scale may be infinite or not a number
            return self.read(blocks.reshape(-1).view(self.layout))

    def dequantize(self, blocks: Bytes) -> Floats:
        """Raw blocks, uint8 `[n, block_bytes]` and contiguous, to float32 `[n, block_size]`."""
        held = self.unpack(blocks)
        with np.errstate(invalid="ignore"):
            values = held.values() if isinstance(held, Integers) else held
        return values.reshape(-1, self.block_size)


def _scale(block: Fields, name: str = "d") -> Floats:
    """A float16 field of each block as float32 `[n, 1]`."""
    return block[name].astype(np.float32)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., b]` to `[..., 2, b]`: the low four bits of every byte, then the high four."""
    return np.stack((packed & 0x0F, packed >> 4), axis=-2)


def _fifth_bits(block: Fields) -> Bytes:
    """The 32 bits of `qh` as uint8 `[n, 32]`, moved to where a fifth bit belongs."""
    return np.unpackbits(block["qh"], axis=1, bitorder="little") << 4


def _centered(unsigned: Bytes, middle: int) -> NDArray[np.int8]:
    """Unsigned integers minus `middle`."""
    signed: NDArray[np.int8] = unsigned.astype(np.int8) - np.int8(middle)
    return signed


# Plain numbers: a block is one value.


def _bf16(bits: Fields) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Blocks of 32 values. Where two values share a byte, they are 16 apart.


def _q4_0(block: Fields) -> Integers:
    return Integers(_centered(_nibbles(block["qs"]).reshape(-1, 1, 32), 8), _scale(block))


def _q4_1(block: Fields) -> Integers:
    return Integers(_nibbles(block["qs"]).reshape(-1, 1, 32), _scale(block), _scale(block, "m"))


def _five_bits(block: Fields) -> Bytes:
    return (_nibbles(block["qs"]).reshape(-1, 32) | _fifth_bits(block))[:, None]


def _q5_0(block: Fields) -> Integers:
    return Integers(_centered(_five_bits(block), 16), _scale(block))


def _q5_1(block: Fields) -> Integers:
    return Integers(_five_bits(block), _scale(block), _scale(block, "m"))


def _q8_0(block: Fields) -> Integers:
    return Integers(block["qs"][:, None], _scale(block))


# Blocks of 256 values, with a scale (and minimum) for every 16 or 32.


def _two_bits(packed: Bytes) -> Bytes:
    """64 bytes to 16 sub-blocks of 16 values of two bits: 32 bytes hold 128 values, 32 of them at each bit position."""
    return ((packed.reshape(-1, 2, 1, 32) >> TWO_BIT_SHIFTS) & 3).reshape(-1, 16, 16)


def _with_minimums(block: Fields, codes: Bytes, scales: Bytes, minimums: Bytes) -> Integers:
    """Codes `[n, g, s]` with the integer scales and minimums `[n, g]` of their groups; minimums are subtracted."""
    return Integers(
        codes,
        _scale(block) * scales.astype(np.float32),
        -(_scale(block, "dmin") * minimums.astype(np.float32)),
    )


def _q2_k(block: Fields) -> Integers:
    return _with_minimums(block, _two_bits(block["qs"]), block["scales"] & 0x0F, block["scales"] >> 4)


def _q3_k(block: Fields) -> Integers:
    # 16 scales of six bits: four of them as nibbles in the first eight bytes, two in the last four bytes.
    low = _nibbles(block["scales"][:, :8]).reshape(-1, 16)
    high = ((block["scales"][:, None, 8:] >> TWO_BIT_SHIFTS) & 3).reshape(-1, 16)
    scale = _scale(block) * _centered(low | high << 4, 32).astype(np.float32)
    third_bits = ((block["hmask"][:, None, :] >> ONE_BIT_SHIFTS) & 1).reshape(-1, 16, 16)
    return Integers(_centered(_two_bits(block["qs"]) | third_bits << 2, 4), scale)


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to the 8 scales and 8 minimums of a Q4_K or Q5_K block, six bits each.

    The first four of each lie in the low six bits of the first eight bytes. The others have their low four bits in the
    last four bytes (scale low, minimum high) and their high two bits at the top of the first eight bytes.
    """
    scales, minimums, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate((scales & 0x3F, rest & 0x0F | scales >> 6 << 4), axis=1),
        np.concatenate((minimums & 0x3F, rest >> 4 | minimums >> 6 << 4), axis=1),
    )


def _q4_k(block: Fields) -> Integers:
    codes = _nibbles(block["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_minimums(block, codes, *_six_bit_scales(block["scales"]))


def _q5_k(block: Fields) -> Integers:
    low = _nibbles(block["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth_bits = (block["qh"][:, None, :] >> ONE_BIT_SHIFTS) & 1
    return _with_minimums(block, low | fifth_bits << 4, *_six_bit_scales(block["scales"]))


def _q6_k(block: Fields) -> Integers:
    low = _nibbles(block["ql"].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    scale = _scale(block) * block["scales"].astype(np.float32)
    return Integers(_centered(low | _two_bits(block["qh"]) << 4, 32), scale)


# Four bits that choose from 16 values, closer together around zero.

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(block: Fields) -> Integers:
    return Integers(IQ4_VALUES[_nibbles(block["qs"]).reshape(-1, 1, 32)], _scale(block))


def _iq4_xs(block: Fields) -> Integers:
    # 8 scales of six bits: four bits of two of them in each byte of scales_l, two bits of all in scales_h.
    low = np.stack((block["scales_l"] & 0x0F, block["scales_l"] >> 4), axis=-1).reshape(-1, 8)
    high = ((block["scales_h"][:, :, None] >> TWO_BIT_SHIFTS.T) & 3).reshape(-1, 8)
    scale = _scale(block) * _centered(low | high << 4, 32).astype(np.float32)
    return Integers(IQ4_VALUES[_nibbles(block["qs"].reshape(-1, 8, 16)).reshape(-1, 8, 32)], scale)


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


BLOCK_TYPES = {
    block_type.number: block_type
    for block_type in (
        BlockType("F32", 0, 1, np.dtype("<f4"), 0, lambda values: values.astype(np.float32)),
        BlockType("F16", 1, 1, np.dtype(HALF), 0, lambda values: values.astype(np.float32)),
        BlockType("BF16", 30, 1, np.dtype("<u2"), 0, _bf16),
        BlockType("Q4_0", 2, 32, _layout(("d", HALF), ("qs", "u1", 16)), 4, _q4_0),
        BlockType("Q4_1", 3, 32, _layout(("d", HALF), ("m", HALF), ("qs", "u1", 16)), 4, _q4_1),
        BlockType("Q5_0", 6, 32, _layout(("d", HALF), ("qh", "u1", 4), ("qs", "u1", 16)), 5, _q5_0),
        BlockType("Q5_1", 7, 32, _layout(("d", HALF), ("m", HALF), ("qh", "u1", 4), ("qs", "u1", 16)), 5, _q5_1),
        BlockType("Q8_0", 8, 32, _layout(("d", HALF), ("qs", "i1", 32)), 8, _q8_0),
        BlockType(
            "Q2_K", 10, 256, _layout(("scales", "u1", 16), ("qs", "u1", 64), ("d", HALF), ("dmin", HALF)), 2, _q2_k
        ),
        BlockType(
            "Q3_K", 11, 256, _layout(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", HALF)), 3, _q3_k
        ),
        BlockType(
            "Q4_K", 12, 256, _layout(("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qs", "u1", 128)), 4, _q4_k
        ),
        BlockType(
            "Q5_K",
            13,
            256,
            _layout(("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
            5,
            _q5_k,
        ),
        BlockType(
            "Q6_K", 14, 256, _layout(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", HALF)), 6, _q6_k
        ),
        BlockType("IQ4_NL", 20, 32, _layout(("d", HALF), ("qs", "u1", 16)), 8, _iq4_nl),
        BlockType(
            "IQ4_XS",
            23,
            256,
            _layout(("d", HALF), ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)),
            8,
            _iq4_xs,
        ),
    )
}
