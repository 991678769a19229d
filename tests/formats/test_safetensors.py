"""The safetensors reader against the library, and every kind of damage."""

import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from headrace.errors import ModelError
from headrace.formats.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from helpers.safetensors_files import entry, header_bytes, write

EIGHT = b"\0" * 8
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "f64": normal(3, 5).double(),
        "f32": normal(7),
        "f16": normal(2, 3, 4).half(),
        "bf16": normal(4, 4).bfloat16(),
        "scalar": normal(),
        "empty": normal(0, 3),
        "i64": torch.arange(5),
        "bool": torch.tensor([True, False]),
    }


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert set(file.tensors) == set(tensors())
    for name, expected in tensors().items():
        assert file.tensors[name].shape == tuple(expected.shape)
        read = file.read(name)
        assert read.dtype == expected.dtype
        assert torch.equal(read, expected)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert SafetensorsFile(write(tmp_path / "x.safetensors", {})).tensors == {}
    assert SafetensorsFile(write(tmp_path / "x.safetensors", {"__metadata__": {"a": "b"}})).tensors == {}


FAULTS: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"{nope", b"", "the header is not valid JSON"),
    "empty header": (b"", b"", "the header is not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "the header is not UTF-8 text: invalid start byte at byte 2"),
    "not an object": ([1], b"", "the header must be a JSON object, not a list"),
    "deep": (b"[" * 100_000, b"", "the header is JSON that is nested too deeply"),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "the header is not valid JSON: Exceeds the limit"),
    "bad metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ in the header must map strings to strings"),
    "metadata list": ({"__metadata__": ["a"]}, b"", "__metadata__ in the header must map strings to strings"),
    "entry no object": ({"a": 1}, b"", "tensor 'a': the header must give an object with dtype, shape and data_offsets"),
    "entry incomplete": ({"a": {"dtype": "F32", "shape": []}}, b"", "tensor 'a': the header must give an object"),
    "twice": (
        b'{"a": %b, "a": %b}' % (header_bytes(entry()), header_bytes(entry())),
        EIGHT,
        "the header is not valid JSON: the key 'a' appears twice",
    ),
    "key twice in an entry": (
        b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        EIGHT,
        "the header is not valid JSON: the key 'dtype' appears twice",
    ),
    "unknown dtype": ({"a": entry("F33")}, EIGHT, "tensor 'a': unknown dtype 'F33'; known are"),
    "dtype no string": ({"a": entry(["F32"])}, EIGHT, r"tensor 'a': unknown dtype \['F32'\]"),
    "long dtype": ({"a": entry("x" * 10**6)}, EIGHT, "tensor 'a': unknown dtype 'xxx"),
    "negative shape": ({"a": entry(shape=[-2])}, EIGHT, "tensor 'a': the shape must be a list"),
    "float shape": ({"a": entry(shape=[2.0])}, EIGHT, "tensor 'a': the shape must be a list"),
    "true shape": ({"a": entry(shape=[True, 2])}, EIGHT, "tensor 'a': the shape must be a list"),
    "null shape": ({"a": entry(shape=None)}, EIGHT, "tensor 'a': the shape must be a list"),
    "many dimensions": (
        {"a": entry(shape=[1] * 100_000 + [2])},
        EIGHT,
        "tensor 'a': the shape must be a list of at most",
    ),
    "huge dimension": ({"a": entry(shape=[2**64])}, EIGHT, "tensor 'a': the shape must be a list"),
    "overflow": ({"a": entry(shape=[2**62, 2**62, 4])}, EIGHT, "tensor 'a': the shape is too large"),
    "overflow to eight": ({"a": entry(shape=[2**32, 2**32, 2**32])}, EIGHT, "tensor 'a': the shape is too large"),
    "overflow but empty": (
        {"a": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])},
        b"",
        "tensor 'a': the shape is too large",
    ),
    "product": (
        {"a": entry(shape=[3])},
        EIGHT,
        r"tensor 'a': shape \[3\] of F32 takes 12 bytes, but data_offsets span 8",
    ),
    "half a byte": (
        {"a": entry("F4", [1], [0, 1])},
        b"\0",
        "tensor 'a': shape .* takes 0.5 bytes, but data_offsets span 1",
    ),
    "no offsets": ({"a": entry(offsets=[])}, EIGHT, "tensor 'a': data_offsets must be two integers"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, EIGHT, "tensor 'a': data_offsets must be two integers"),
    "negative offset": ({"a": entry(offsets=[-8, 0])}, EIGHT, "tensor 'a': data_offsets must be two integers"),
    "text offset": ({"a": entry(offsets=["0", "8"])}, EIGHT, "tensor 'a': data_offsets must be two integers"),
    "reversed": ({"a": entry(offsets=[8, 0])}, EIGHT, "tensor 'a': data_offsets are reversed: 8 comes after 0"),
    "out of range": (
        {"a": entry(offsets=[2**40, 2**40 + 8])},
        EIGHT,
        "tensor 'a' at byte 1099511627776 of the data leaves",
    ),
    "past the end": (
        {"a": entry()},
        EIGHT[:7],
        "is truncated: tensor 'a' ends at byte 8 of the data, but the file has 7",
    ),
    "no data": ({"a": entry()}, b"", "is truncated: tensor 'a' ends at byte 8 of the data, but the file has 0"),
    "overlap": (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        EIGHT * 2,
        "tensor 'b' at byte 4 of the data overlaps with tensor 'a'",
    ),
    "same place": ({"a": entry(), "b": entry()}, EIGHT, "tensor 'b' at byte 0 of the data overlaps with tensor 'a'"),
    "gap": (
        {"a": entry(), "b": entry(offsets=[16, 24])},
        EIGHT * 3,
        "tensor 'b' at byte 16 of the data leaves a gap after tensor 'a'",
    ),
    "gap first": (
        {"a": entry(offsets=[8, 16])},
        EIGHT * 2,
        "tensor 'a' at byte 8 of the data leaves a gap after the header",
    ),
    "rest": ({"a": entry()}, EIGHT + b"!", "1 bytes at the end belong to no tensor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_header(tmp_path: Path, fault: str) -> None:
    header, data, message = FAULTS[fault]
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelError, match=rf"^\S*/model\.safetensors: {message}") as error:
        SafetensorsFile(path)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\1\0\0", "is not a safetensors file: 3 bytes are too few to hold the header's length"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "states a header of 18446744073709551615 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "the format allows 100000000"),
        (struct.pack("<Q", MAX_HEADER_BYTES) + b"{}", "is truncated: the header alone takes 100000008 bytes"),
        (struct.pack("<Q", 3) + b"{}", "is truncated: the header alone takes 11 bytes, but the file has 10"),
        (b"PK\3\4" + b"\0" * 100, "the header is not valid JSON|is truncated"),
        (LFS, "is a Git LFS pointer, not a safetensors file: run git lfs pull"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^\S*/model\.safetensors: .*({message})"):
        SafetensorsFile(path)


def test_no_file_a_directory_and_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing: no such file"):
        SafetensorsFile(tmp_path / "nothing")
    with pytest.raises(ModelError, match="is a directory, not a file"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    outcome: list[str] = []

    def open_pipe() -> None:
        try:
            SafetensorsFile(tmp_path / "pipe")
        except ModelError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=open_pipe, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome
    assert "is not a regular file" in outcome[0]


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.safetensors", {})

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, to whom all is permitted
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: Permission denied$"):
        SafetensorsFile(path)


def test_a_file_that_has_changed_since_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry()}, EIGHT)
    file = SafetensorsFile(path)
    path.write_bytes(b"gone")
    with pytest.raises(ModelError, match="tensor 'a' cannot be read"):
        file.read("a")


GOOD = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.tensor([1, 2])})


def _check_against_library(path: Path) -> None:
    """Whatever is in the file: it is refused cleanly, or every tensor is what the library reads."""
    try:
        file = SafetensorsFile(path)
        ours = {name: file.read(name) for name, info in file.tensors.items() if info.dtype in ("F32", "BF16", "I64")}
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017  a refusal is one of two good outcomes
        return
    with safe_open(path, framework="pt") as theirs:
        assert set(theirs.keys()) == set(file.tensors)
        for name, tensor in ours.items():
            assert tensor.dtype == theirs.get_tensor(name).dtype
            assert torch.equal(tensor.nan_to_num(), theirs.get_tensor(name).nan_to_num())


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(cut=st.integers(0, len(GOOD)))
def test_fuzz_truncation(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD[:cut])
    if cut < len(GOOD):
        with pytest.raises(ModelError, match=r"model\.safetensors: "):
            SafetensorsFile(path)


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_bytes(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for place, value in edits:
        content[place] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    _check_against_library(path)


NUMBERS = (
    st.sampled_from([-1, 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 2**31, 2**32, 2**62, 2**63, 2**64]) | st.integers()
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "f32"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    },
    optional={"extra": JSON},
)


@FUZZ
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__", "ü"]), ENTRY | JSON, max_size=4) | JSON,
    data=st.binary(max_size=64),
    lie=st.integers(-3, 3) | st.integers(0, 2**64 - 1),
    lies=st.booleans(),
)
def test_fuzz_header(tmp_path: Path, header: Any, data: bytes, lie: int, lies: bool) -> None:
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    length = min(max(len(raw) + lie, 0), 2**64 - 1) if lies else len(raw)
    _check_against_library(write(tmp_path / "model.safetensors", raw, data, length))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Entries that nearly fit together."""
    header, position = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = 4 * int(torch.Size(shape).numel())
        shift = draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1, 4]))
        header[name] = entry("F32", shape, [position + shift, position + shift + size])
        position += size
    return header, position + draw(st.sampled_from([0, 0, 0, 1, -1]))


@FUZZ
@given(layout=layouts())
def test_fuzz_layout_agrees_with_the_library(tmp_path: Path, layout: tuple[dict[str, Any], int]) -> None:
    header, size = layout
    path = write(tmp_path / "model.safetensors", header, b"\0" * max(size, 0))
    try:
        with safe_open(path, framework="pt") as theirs:
            expected = set(theirs.keys())
    except SafetensorError:
        with pytest.raises(ModelError):
            SafetensorsFile(path)
    else:
        assert set(SafetensorsFile(path).tensors) == expected
