"""Writing GGUF files: metadata, and tensors in any of the block types that have an encoder here.

The codes and scales are bit for bit those of ggml's reference code (as the `gguf` package has it), so the order of the
float32 operations matters here.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.errors import ModelError
from headrace.formats.files import quoted, reason
from headrace.formats.ggml_blocks import BLOCK_TYPES, BlockType, Floats
from headrace.formats.gguf_checkpoint import GGMLWeight

ALIGNMENT = 32
CHUNK_VALUES = 1 << 20
# `general.file_type` of what is written (llama.cpp's llama_ftype).
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
TYPES = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}


Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class Source:
    """A tensor to be written.

    path: where it comes from, for messages. block_type: as it is stored there. load: reads it.
    """

    path: Path
    shape: tuple[int, ...]
    block_type: BlockType
    load: Callable[[], GGMLWeight]


@dataclass(frozen=True)
class Content:
    """What a file holds: its architecture by GGUF's name, its metadata as `entry` makes it, and its tensors by name."""

    arch: str
    entries: list[bytes]
    tensors: dict[str, Source]


def encode(values: Floats, block_type: BlockType) -> NDArray[np.uint8]:
    """float32 `[n, block_size]` to raw blocks, uint8 `[n, block_bytes]`."""
    blocks = _ENCODERS[block_type.name](values)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(values), block_type.block_bytes)


def _inverse(scale: Floats) -> Floats:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _nibbles(codes: Floats) -> NDArray[np.uint8]:
    """Codes `[n, 32]` to bytes `[n, 16]`; the two values in a byte are 16 apart."""
    whole: NDArray[Any] = codes.astype(np.uint8).clip(0, 15)
    packed: NDArray[Any] = whole[:, :16] | whole[:, 16:] << 4
    return packed


def _q4_0(values: Floats) -> NDArray[Any]:
    blocks = np.empty(len(values), TYPES["Q4_0"].layout)
    largest = np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)
    scale = largest / np.float32(-8)
    blocks["d"] = scale[:, 0].astype(np.float16)
    blocks["qs"] = _nibbles(np.trunc(values * _inverse(scale) + np.float32(8.5)))
    return blocks


def _q4_1(values: Floats) -> NDArray[Any]:
    blocks = np.empty(len(values), TYPES["Q4_1"].layout)
    least = values.min(-1, keepdims=True)
    scale = (values.max(-1, keepdims=True) - least) / np.float32(15)
    blocks["d"], blocks["m"] = scale[:, 0].astype(np.float16), least[:, 0].astype(np.float16)
    blocks["qs"] = _nibbles(np.trunc((values - least) * _inverse(scale) + np.float32(0.5)))
    return blocks


def _q8_0(values: Floats) -> NDArray[Any]:
    blocks = np.empty(len(values), TYPES["Q8_0"].layout)
    scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    blocks["d"] = scale[:, 0].astype(np.float16)
    blocks["qs"] = (np.sign(scaled) * (whole + np.floor(2 * (size - whole)))).astype(np.int8)  # halves away from zero
    return blocks


def _bf16(values: Floats) -> NDArray[Any]:
    bits = values.view(np.uint32)
    quiet = np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits & np.uint32(0xFFFF0000) | np.uint32(64 << 16), bits)
    return ((quiet.astype(np.uint64) + (0x7FFF + (quiet >> 16 & 1))) >> 16).astype(np.uint16)


_ENCODERS: dict[str, Callable[[Floats], NDArray[Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "F32": lambda values: values,
    "F16": lambda values: values.astype(np.float16),
    "BF16": _bf16,
}


def write_gguf(
    path: Path, content: Content, kind: str, type_of: Callable[[str, tuple[int, ...]], str | None]
) -> dict[str, str]:
    """Writes a file, with metadata that tells of its block types added. It appears when it is complete.

    kind: what is said of the whole, one of FILE_TYPES. type_of: by a tensor's name and shape the block type to store
        it in, or None to leave it as it is; so it also is where its rows are no multiple of the block size.
    Returns the type of each tensor. Raises ModelError where it cannot be written, or for values that have no code.
    """
    tensors = content.tensors
    types = {name: _type_for(tensor, type_of(name, tensor.shape)) for name, tensor in tensors.items()}
    told = [entry("general.file_type", FILE_TYPES[kind]), entry("general.quantization_version", 2)]
    header = header_of(content.entries + told, len(tensors))
    offset = 0
    for name, tensor in tensors.items():
        header += _string(name) + struct.pack("<I", len(tensor.shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        header += struct.pack("<IQ", types[name].number, offset)
        offset += _aligned(_size(tensor.shape, types[name]))
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as out:
            _write_padded(out, iter([header]))
            for name, tensor in tqdm(tensors.items(), desc="Writing", unit="tensor", disable=None):
                _write_padded(out, _blocks(name, tensor, types[name]))
        os.replace(partial, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        partial.unlink(missing_ok=True)
    return {name: block_type.name for name, block_type in types.items()}


def header_of(entries: Sequence[bytes], num_tensors: int) -> bytes:
    """The beginning of a file, up to the descriptions of its tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries)) + b"".join(entries)


def entry(key: str, value: Value) -> bytes:
    """A piece of metadata: a text, a truth value, an integer of 32 bits, a float32, or an array of one of these."""
    if isinstance(value, str | bool | int | float):
        number, data = _value(value, "I")
        return _string(key) + struct.pack("<I", number) + data
    items = [_value(item, "i") for item in value]
    return _string(key) + struct.pack("<IIQ", 9, items[0][0], len(items)) + b"".join(data for _, data in items)


def _value(value: str | bool | int | float, integer: str) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes. integer: whether integers have a sign ("i") or not ("I")."""
    match value:
        case str():
            return 8, _string(value)
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return {"I": 4, "i": 5}[integer], struct.pack(f"<{integer}", value)
        case float():
            return 6, struct.pack("<f", value)


def _type_for(tensor: Source, wanted: str | None) -> BlockType:
    if wanted is None or tensor.shape[-1] % TYPES[wanted].block_size:
        return tensor.block_type
    return TYPES[wanted]


def _blocks(name: str, tensor: Source, block_type: BlockType) -> Iterator[bytes]:
    """The bytes of a tensor in a block type, in pieces."""
    blocks = tensor.load().blocks
    step = max(1, CHUNK_VALUES // tensor.shape[-1]) if tensor.shape else 1
    for start in range(0, len(blocks), step):
        rows = blocks[start : start + step]
        if block_type == tensor.block_type:
            yield rows.tobytes()
            continue
        values = GGMLWeight(rows, tensor.block_type, (len(rows), tensor.shape[-1])).dequantize().numpy()
        if not np.isfinite(values).all():
            raise ModelError(f"{tensor.path}: tensor {quoted(name)} holds NaN or infinity, for which there is no code")
        yield encode(values.reshape(-1, block_type.block_size), block_type).tobytes()


def _write_padded(out: BinaryIO, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        out.write(piece)
    out.write(bytes(-out.tell() % ALIGNMENT))


def _size(shape: tuple[int, ...], block_type: BlockType) -> int:
    return int(np.prod(shape, dtype=np.int64)) // block_type.block_size * block_type.block_bytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
