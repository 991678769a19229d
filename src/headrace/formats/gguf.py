"""GGUF files, versions 2 and 3: a header of metadata and tensor descriptions, then the tensors' blocks.

The file is memory-mapped; the header is read into Python, the tensors stay where they are. Every number in the header
is taken for a lie until it has been held against the size of the file: a damaged or hostile file ends in a ModelError.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import reprlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.formats.files import file_size, open_file, quoted, reason, reject_lfs_pointer
from headrace.formats.ggml_blocks import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # ggml has no more
MAX_NAME_LENGTH = 65535

# Far above any real model, and low enough that the header of a hostile file is read in seconds and fits in memory.
# Keys, tensors and arrays within arrays weigh more than the strings of an array, as they take more time and memory.
MAX_HEADER_BYTES = 1 << 28
MAX_HEADER_STRINGS = 1 << 21
ENTRY_WEIGHT = 16
MAX_NESTING = 4

STRING, ARRAY = 8, 9
NUMBERS = {
    number: np.dtype(code)
    for number, code in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    shape: slowest dimension first, as everywhere but in GGUF files; a matrix is `[out_features, in_features]`.
    offset: of its first byte in the file.
    row_bytes, rows: its blocks are stored row by row, the last dimension being a row.
    """

    name: str
    shape: tuple[int, ...]
    block_type: BlockType
    offset: int
    row_bytes: int
    rows: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.row_bytes


class GGUFFile:
    """An open GGUF file.

    metadata: by key; numbers, booleans and strings, and for arrays a NumPy array of numbers, or a list of strings or of
        such arrays.
    tensors: by name, in the order of the file.
    entries: the bytes of each key with its value, to write them again as they are.
    All methods, and the constructor, raise ModelError with one line that names the file and the fault.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        header = _Header(self.path, self._map)
        self.metadata, self.tensors = header.read()
        self.entries = header.entries

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The raw blocks of a tensor, uint8 `[rows, row_bytes]`, read-only and not copied."""
        tensor = self.tensors[name]
        size = tensor.rows * tensor.row_bytes
        return np.frombuffer(self._map, np.uint8, size, tensor.offset).reshape(tensor.rows, tensor.row_bytes)

    def value(self, key: str, kind: type[T]) -> T | None:
        """The metadata value of this key, None if the file has none. An integer will do for a float."""
        value: Any = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            self.fault(f"{key} must be of type {kind.__name__}, not {reprlib.repr(value)}")
        return value

    def required(self, key: str, kind: type[T]) -> T:
        """The metadata value of this key; ModelError if there is none or it is of another kind."""
        value = self.value(key, kind)
        if value is None:
            self.fault(f"the metadata has no {key}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """The array of strings of this key, None if the file has none."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value[:1])):
            return value
        self.fault(f"{key} must be an array of strings, not {reprlib.repr(value)}")

    def numbers(self, key: str) -> NDArray[Any] | None:
        """The array of numbers of this key, None if the file has none."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        self.fault(f"{key} must be an array of numbers, not {reprlib.repr(value)}")

    def fault(self, what: str) -> NoReturn:
        """Raises ModelError for something wrong with this file."""
        raise ModelError(f"{self.path}: {what}")


def _map_file(path: Path) -> mmap.mmap:
    file_size(path)  # raises for what cannot be mapped, such as a directory or an empty file
    with open_file(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be mapped into memory: {reason(error)}") from None


class _Header:
    """Reads the header from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.weight = 0
        self.entries: dict[str, memoryview] = {}

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        reject_lfs_pointer(self.path, self.data[:64], "GGUF file")
        if self._bytes(4, "the magic number") != MAGIC:
            self._fault(f"is not a GGUF file: it begins with {self.data[:4]!r}, not {MAGIC!r}")
        version = self._number(NUMBERS[4], "the version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                self._fault("is a big-endian GGUF file; only little-endian ones are supported")
            self._fault(f"has GGUF version {version}; versions 2 and 3 are supported")
        tensor_count = self._number(NUMBERS[10], "the number of tensors")
        key_count = self._number(NUMBERS[10], "the number of keys")
        self._expect(key_count, 8 + 4 + 1, ENTRY_WEIGHT, "keys of metadata")
        self._expect(tensor_count, 8 + 4 + 4 + 8, ENTRY_WEIGHT, "tensors")

        metadata: dict[str, Any] = {}
        for index in range(key_count):
            start = self.position
            key = self._name(f"the name of key {index}")
            what = quoted(key)
            if key in metadata:
                self._fault(f"has the key {what} twice")
            metadata[key] = self._value(self._number(NUMBERS[4], f"the type of {what}"), what)
            self.entries[key] = memoryview(self.data)[start : self.position]

        descriptions = [self._tensor(index) for index in range(tensor_count)]
        return metadata, self._place(descriptions, self._alignment(metadata))

    # Metadata

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind], what)
        if kind == STRING:
            return self._string(what)
        if kind == ARRAY and depth < MAX_NESTING:
            return self._array(what, depth + 1)
        if kind == ARRAY:
            self._fault(f"{what} nests arrays deeper than {MAX_NESTING} levels")
        self._fault(f"{what} has the unknown value type {kind}")

    def _array(self, what: str, depth: int) -> Any:
        kind = self._number(NUMBERS[4], f"the type of {what}")
        count = self._number(NUMBERS[10], f"the length of {what}")
        if kind in NUMBERS:
            start = self._take(count * NUMBERS[kind].itemsize, what)
            return np.frombuffer(self.data, NUMBERS[kind], count, start)
        self._expect(count, 8, 1 if kind == STRING else ENTRY_WEIGHT, f"items of {what}")
        if kind == STRING:
            return self._strings(count, what)
        return [self._value(kind, what, depth) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """As `_string`, `count` times over: vocabularies have hundreds of thousands, so this loop is bare."""
        data, limit, length_at = self.data, min(len(self.data), MAX_HEADER_BYTES), struct.Struct("<Q").unpack_from
        strings: list[bytes] = []
        position = self.position
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0] if start <= limit else start
            if position > limit:
                break
            strings.append(data[start:position])
        self._take(position - self.position, what)  # raises if the loop broke off
        try:
            return [string.decode() for string in strings]
        except UnicodeDecodeError:
            for index, string in enumerate(strings):
                self._decode(string, f"item {index} of {what}")
            raise

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > MAX_NAME_LENGTH:
            self._fault(f"{what} is {len(name)} characters long; at most {MAX_NAME_LENGTH} are possible")
        return name

    def _string(self, what: str) -> str:
        length = self._number(NUMBERS[10], f"the length of {what}")
        return self._decode(self._bytes(length, what), what)

    def _decode(self, string: bytes, what: str) -> str:
        try:
            return string.decode()
        except UnicodeDecodeError as error:
            self._fault(f"{what} is not UTF-8: {reprlib.repr(string)} ({error.reason})")

    def _number(self, dtype: np.dtype[Any], what: str) -> Any:
        start = self._take(dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, 1, start).item()

    def _bytes(self, count: int, what: str) -> bytes:
        start = self._take(count, what)
        return self.data[start : self.position]

    def _take(self, count: int, what: str) -> int:
        """Moves on by `count` bytes; returns where they start."""
        start, end = self.position, self.position + count
        if end > len(self.data):
            self._cut_short(f"{what} needs a file of at least {end} bytes")
        if end > MAX_HEADER_BYTES:
            self._fault(f"has a header of more than {MAX_HEADER_BYTES} bytes, by its {what}")
        self.position = end
        return start

    def _expect(self, count: int, least_bytes: int, weight: int, what: str) -> None:
        """Checks a number of things to come, of at least so many bytes each, before room is made for them."""
        end = self.position + count * least_bytes
        if end > len(self.data):
            self._cut_short(f"{count} {what} need a file of at least {end} bytes")
        self.weight += count * weight
        if self.weight > MAX_HEADER_STRINGS:
            self._fault(f"has too large a header: {count} {what}")

    # Tensors

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self._fault(f"general.alignment must be a power of two, not {reprlib.repr(alignment)}")
        return alignment

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, dimensions (fastest first), type and offset as the file has them."""
        name = self._name(f"the name of tensor {index}")
        what = f"tensor {quoted(name)}"
        dimensions = self._number(NUMBERS[4], f"the number of dimensions of {what}")
        if dimensions > MAX_DIMENSIONS:
            self._fault(f"{what} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are possible")
        shape = tuple(self._number(NUMBERS[10], f"the shape of {what}") for _ in range(dimensions))
        return name, shape, self._number(NUMBERS[4], f"the type of {what}"), self._number(NUMBERS[10], what)

    def _place(
        self, descriptions: Iterable[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, TensorInfo]:
        """Checks the tensors' descriptions, and that each lies within the file."""
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, dimensions, kind, offset in descriptions:
            what = f"tensor {quoted(name)}"
            if name in tensors:
                self._fault(f"has the {what} twice")
            if kind not in BLOCK_TYPES:
                known = ", ".join(f"{block_type.name} ({number})" for number, block_type in BLOCK_TYPES.items())
                self._fault(f"{what} has the type {kind}, which is unknown or not supported; supported are {known}")
            block_type = BLOCK_TYPES[kind]
            if 0 in dimensions or math.prod(dimensions) >= 1 << 63:
                self._fault(f"{what} has the impossible shape {list(reversed(dimensions))}")
            row, *others = dimensions or (1,)
            if row % block_type.block_size:
                self._fault(
                    f"{what} has rows of {row} values, not a multiple of the {block_type.block_size} of a "
                    f"{block_type.name} block"
                )
            if offset % alignment:
                self._fault(f"{what} lies at offset {offset}, not a multiple of the alignment of {alignment}")
            row_bytes = row // block_type.block_size * block_type.block_bytes
            shape = tuple(reversed(dimensions))
            tensors[name] = TensorInfo(name, shape, block_type, start + offset, row_bytes, math.prod(others))

        last = max(tensors.values(), key=lambda tensor: tensor.end, default=None)
        if last is not None and last.end > len(self.data):
            self._cut_short(f"{last.end} bytes expected, up to the end of tensor {quoted(last.name)}")
        return tensors

    def _cut_short(self, why: str) -> NoReturn:
        self._fault(f"is cut short or damaged: {why}; it has {len(self.data)}")

    def _fault(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")
