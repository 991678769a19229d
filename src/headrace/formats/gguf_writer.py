"""Writing GGUF files: another file's metadata and tensors, with matrices in another block type.

The codes and scales are bit for bit those of ggml's reference code (as the `gguf` package has it), so the order of the
float32 operations matters here.
"""

import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.errors import ModelError
from headrace.formats.files import quoted, reason
from headrace.formats.ggml_blocks import BLOCK_TYPES, BlockType, Floats
from headrace.formats.gguf import GGUFFile
from headrace.formats.gguf_checkpoint import GGMLWeight

ALIGNMENT = 32
CHUNK_VALUES = 1 << 20
# `general.file_type` of what is written (llama.cpp's llama_ftype).
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
TYPES = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}

# Keys that are not copied: of how the other file was split, aligned and quantized.
LEFT_OUT = re.compile(r"split\..*|general\.(alignment|file_type|quantization_version)|quantize\..*")


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
    "F16": lambda values: values.astype(np.float16),
    "BF16": _bf16,
}


def write_gguf(
    path: Path, files: Sequence[GGUFFile], kind: str, type_of: Callable[[str, tuple[int, ...]], str | None]
) -> dict[str, str]:
    """One file with the metadata of the first of `files` and the tensors of all. It appears when it is complete.

    kind: what is said of the whole, one of FILE_TYPES. type_of: by a tensor's name and shape the block type to store
        it in, or None to leave it as it is; so it also is where its rows are no multiple of the block size.
    Returns the type of each tensor. Raises ModelError where it cannot be written, or for values that have no code.
    """
    tensors = [(file, name) for file in files for name in file.tensors]
    types = {name: _type_for(file, name, type_of) for file, name in tensors}
    entries = [bytes(raw) for key, raw in files[0].entries.items() if not LEFT_OUT.fullmatch(key)]
    entries.append(_uint32("general.file_type", FILE_TYPES[kind]))
    entries.append(_uint32("general.quantization_version", 2))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for file, name in tensors:
        shape = file.tensors[name].shape
        header += _string(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        header += struct.pack("<IQ", types[name].number, offset)
        offset += _aligned(_size(shape, types[name]))
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as out:
            _write_padded(out, iter([header]))
            for file, name in tqdm(tensors, desc="Writing", unit="tensor", disable=None):
                _write_padded(out, _blocks(file, name, types[name]))
        os.replace(partial, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        partial.unlink(missing_ok=True)
    return {name: block_type.name for name, block_type in types.items()}


def _type_for(file: GGUFFile, name: str, type_of: Callable[[str, tuple[int, ...]], str | None]) -> BlockType:
    tensor = file.tensors[name]
    wanted = type_of(name, tensor.shape)
    if wanted is None or tensor.shape[-1] % TYPES[wanted].block_size:
        return tensor.block_type
    return TYPES[wanted]


def _blocks(file: GGUFFile, name: str, block_type: BlockType) -> Iterator[bytes]:
    """The bytes of a tensor in a block type, in pieces."""
    stored = file.tensors[name]
    blocks = file.blocks(name)
    step = max(1, CHUNK_VALUES // stored.shape[-1]) if stored.shape else 1
    for start in range(0, len(blocks), step):
        rows = blocks[start : start + step]
        if block_type == stored.block_type:
            yield rows.tobytes()
            continue
        values = GGMLWeight(rows, stored.block_type, (len(rows), stored.shape[-1])).dequantize().numpy()
        if not np.isfinite(values).all():
            file.fault(f"tensor {quoted(name)} holds NaN or infinity, for which there is no code")
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


def _uint32(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", 4, value)
