"""Safetensors files. The header is checked in full before the library maps the data, so that every fault is named.

The format: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes. The header gives dtype,
shape and byte range of each tensor; together the ranges cover the data exactly, without overlaps or gaps.
Source: the format section of https://github.com/huggingface/safetensors
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import ModelError
from headrace.formats.files import file_size, open_file, parse_json_object, quoted, reject_lfs_pointer

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**63 - 1

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
INTEGER_DTYPES = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
DTYPE_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its dtype under the format's name, its shape, its bytes counted from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A checked file, its data memory-mapped when first read.

    tensors: what is in it, by name.
    Raises ModelError, naming file and fault, for anything that is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _read_header(path)
        self._file: Any = None

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its stored dtype; its memory is the mapped file."""
        try:
            if self._file is None:
                self._file = safe_open(self.path, framework="pt")
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path}: tensor {quoted(name)} cannot be read: {error}") from None
        return tensor


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = file_size(path)
    with open_file(path) as file:
        start = file.read(64)
        reject_lfs_pointer(path, start, "safetensors file")
        if size < 8:
            raise ModelError(f"{path}: is not a safetensors file: {size} bytes are too few to hold the header's length")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path}: is not a safetensors file: it states a header of {length} bytes, "
                f"and the format allows {MAX_HEADER_BYTES}"
            )
        if 8 + length > size:
            raise ModelError(
                f"{path}: is truncated: the header alone takes {8 + length} bytes, but the file has {size}"
            )
        file.seek(8)
        raw = file.read(length)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the header is not UTF-8 text: {error.reason} at byte {error.start}") from None
    header = parse_json_object(path, text, "header", unique_keys=True)
    _check_metadata(path, header.pop("__metadata__", None))
    tensors = {name: _tensor_info(path, name, entry) for name, entry in header.items()}
    _check_layout(path, tensors, data_bytes=size - 8 - length)
    return tensors


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path}: __metadata__ in the header must map strings to strings")


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    def fault(message: str) -> ModelError:
        return ModelError(f"{path}: tensor {quoted(name)}: {message}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise fault("the header must give an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise fault(f"unknown dtype {quoted(dtype)}; known are {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_natural(d) for d in shape):
        raise fault(f"the shape must be a list of at most {MAX_DIMENSIONS} integers of at least 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_natural(offset) for offset in offsets):
        raise fault("data_offsets must be two integers of at least 0")
    start, end = offsets
    if start > end:
        raise fault(f"data_offsets are reversed: {start} comes after {end}")
    if math.prod(max(d, 1) for d in shape) > MAX_ELEMENTS:  # even where a dimension of 0 makes it empty
        raise fault("the shape is too large for any machine")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - start):
        raise fault(f"shape {shape} of {dtype} takes {bits / 8:g} bytes, but data_offsets span {end - start}")
    return TensorInfo(dtype, tuple(shape), start, end)


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    position, before = 0, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            kind = "overlaps with" if info.start < position else "leaves a gap after"
            raise ModelError(f"{path}: tensor {quoted(name)} at byte {info.start} of the data {kind} {before}")
        if info.end > data_bytes:
            raise ModelError(
                f"{path}: is truncated: tensor {quoted(name)} ends at byte {info.end} of the data, "
                f"but the file has {data_bytes}"
            )
        position, before = info.end, f"tensor {quoted(name)}"
    if position < data_bytes:
        raise ModelError(f"{path}: {data_bytes - position} bytes at the end belong to no tensor")
