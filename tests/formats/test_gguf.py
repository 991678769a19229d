"""The GGUF parser: files by the `gguf` package's writer, the two real models, and files that are damaged or hostile."""

import os
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.formats.gguf import MAX_HEADER_BYTES, GGUFFile
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from helpers import model_files
from helpers.tiny import save_t0_gguf, t0_config, t0_weights

SCALARS = {
    GGUFValueType.UINT8: 255,
    GGUFValueType.INT8: -128,
    GGUFValueType.UINT16: 65535,
    GGUFValueType.INT16: -32768,
    GGUFValueType.UINT32: 2**32 - 1,
    GGUFValueType.INT32: -(2**31),
    GGUFValueType.FLOAT32: 0.5,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "zwölf 🙂",
    GGUFValueType.UINT64: 2**64 - 1,
    GGUFValueType.INT64: -(2**63),
    GGUFValueType.FLOAT64: 1e-300,
}


def write(path: Path, fill: Callable[[GGUFWriter], Any], **settings: Any) -> Path:
    writer = GGUFWriter(path, "llama", **settings)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(value: Any) -> Any:
    """NumPy arrays as lists, at any depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


# What is valid


@pytest.mark.parametrize("version", [2, 3])
def test_all_types_of_metadata(tmp_path: Path, version: int) -> None:
    expected: dict[str, Any] = {f"one.{kind.name}": value for kind, value in SCALARS.items()}
    expected |= {f"many.{kind.name}": [value, value, value] for kind, value in SCALARS.items()}
    expected |= {"false": False, "empty string": ""}
    nested = {"nested": [[1, 2], [3]], "deep": [[["a"], ["b", "c"]], [["d"]]]}

    def fill(writer: GGUFWriter) -> None:
        for kind, value in SCALARS.items():
            writer.add_key_value(f"one.{kind.name}", value, kind)
            writer.add_key_value(f"many.{kind.name}", [value] * 3, GGUFValueType.ARRAY, sub_type=kind)
        writer.add_bool("false", False)
        writer.add_key_value("empty string", "", GGUFValueType.STRING)
        for key, value in nested.items():
            writer.add_array(key, value)

    path = write(tmp_path / "model.gguf", fill)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", version)
    path.write_bytes(content)

    file = GGUFFile(path)
    assert {key: plain(value) for key, value in file.metadata.items()} == (
        {"general.architecture": "llama"} | expected | nested
    )
    for key in expected:  # the gguf package reads nested arrays as flat ones, so these are left out
        found = file.metadata[key]
        assert plain(found) == GGUFReader(path).fields[key].contents()
        assert not isinstance(found, list) or key == "many.STRING"


def test_tensors_of_all_kinds_of_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "scalar.like": rng.normal(size=1).astype(np.float32),
        "vector": rng.normal(size=7).astype(np.float16),
        "matrix": rng.normal(size=(3, 64)).astype(np.float32),
        "cube": rng.normal(size=(2, 3, 5)).astype(np.float32),
        "four": rng.normal(size=(2, 3, 5, 32)).astype(np.float32),
    }
    quantized = quantize(tensors["matrix"], GGMLQuantizationType.Q8_0)

    def fill(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(64)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.add_tensor("quantized", quantized, raw_dtype=GGMLQuantizationType.Q8_0)

    file = GGUFFile(write(tmp_path / "model.gguf", fill))
    assert list(file.tensors) == [*tensors, "quantized"]
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        assert file.tensors[name].offset % 64 == 0
        assert file.blocks(name).tobytes() == values.tobytes()
    assert file.tensors["quantized"].shape == (3, 64)
    assert file.tensors["quantized"].block_type.name == "Q8_0"
    np.testing.assert_array_equal(file.blocks("quantized"), quantized)
    assert not file.blocks("quantized").flags.writeable
    assert not file.blocks("quantized").flags.owndata


@pytest.mark.parametrize("model", [model_files.smollm2, model_files.gemma3])
def test_real_models(model: Callable[[], Path]) -> None:
    file, reference = GGUFFile(model()), model_files.gguf_reader(model())
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert {key: plain(value) for key, value in file.metadata.items()} == expected
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.block_type.number == tensor.tensor_type
        assert info.offset == tensor.data_offset
        np.testing.assert_array_equal(file.blocks(tensor.name).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_tensors_are_not_read_on_opening(tmp_path: Path) -> None:
    """A file of a gigabyte with holes opens without taking memory for it."""
    path = smol_with_holes(tmp_path)
    tracemalloc.start()
    file = GGUFFile(path)
    blocks = [file.blocks(name) for name in file.tensors]
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sum(block.nbytes for block in blocks) > 90e6
    assert size < 15e6  # most of it the tokens and merges


def test_values_of_a_kind(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_uint32("int", 3)
        writer.add_bool("bool", True)
        writer.add_array("strings", ["a"])
        writer.add_array("numbers", [1, 2])

    file = GGUFFile(write(tmp_path / "model.gguf", fill))
    assert file.value("int", int) == 3
    assert file.value("int", float) == 3.0
    assert file.value("missing", int) is None
    assert file.strings("strings") == ["a"]
    assert plain(file.numbers("numbers")) == [1, 2]
    for read in (
        lambda: file.value("bool", int),
        lambda: file.value("int", bool),
        lambda: file.value("strings", str),
        lambda: file.required("missing", str),
        lambda: file.strings("numbers"),
        lambda: file.numbers("strings"),
    ):
        with pytest.raises(ModelError, match=r"model\.gguf: "):
            read()


# What is not


def refused(path: Path) -> str:
    """The one line with which opening fails, without the path; it fails the same for a checkpoint."""
    with pytest.raises(ModelError) as error:
        GGUFFile(path)
    with pytest.raises(ModelError, match=r"\A") as again:
        GGUFCheckpoint(path)
    assert str(again.value) == str(error.value)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 1000
    return message.removeprefix(f"{path}: ")


def smol_with_holes(folder: Path) -> Path:
    """A copy of the SmolLM2 file with holes in place of the tensors, which take neither time nor disk."""
    first = min(tensor.data_offset for tensor in model_files.gguf_reader(model_files.smollm2()).tensors)
    path = folder / "smol.gguf"
    with model_files.smollm2().open("rb") as source:
        path.write_bytes(source.read(first))
    os.truncate(path, model_files.smollm2().stat().st_size)
    return path


def patch(path: Path, offset: int, form: str, *values: Any) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack(form, *values))


def tensor_field(name: str, field: str) -> int:
    """Where the description of a SmolLM2 tensor has its type or its offset."""
    tensor = next(tensor for tensor in model_files.gguf_reader(model_files.smollm2()).tensors if tensor.name == name)
    after_dims = tensor.field.offset + 8 + len(name) + 4 + 8 * len(tensor.shape)
    return after_dims + {"type": 0, "offset": 4}[field]


def test_smol_with_holes_is_valid(tmp_path: Path) -> None:
    path = smol_with_holes(tmp_path)
    assert len(GGUFFile(path).tensors) == 272
    assert GGUFCheckpoint(path).config["num_hidden_layers"] == 30


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (98_362_431, r"98362432 bytes expected, .*'output_norm\.weight'; it has 98362431"),
        (88_362_432, r"98362432 bytes expected, .*; it has 88362432"),
        (1_000_000, r"48900 items of 'tokenizer\.ggml\.merges' need a file of at least 1\d{6} bytes; it has 1000000"),
        (100, r"33 keys of metadata need a file of at least \d+ bytes; it has 100"),
        (20, r"the number of keys needs a file of at least 24 bytes; it has 20"),
        (3, r"the magic number needs a file of at least 4 bytes; it has 3"),
    ],
)
def test_cut_files(tmp_path: Path, size: int, expected: str) -> None:
    path = smol_with_holes(tmp_path)
    os.truncate(path, size)
    message = refused(path)
    assert message.startswith("is cut short or damaged: ")
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("offset", "form", "value", "expected"),
    [
        (0, "4s", b"GGML", "is not a GGUF file: it begins with b'GGML'"),
        (4, "<I", 99, "has GGUF version 99; versions 2 and 3 are supported"),
        (4, "<I", 1, "has GGUF version 1; versions 2 and 3 are supported"),
        (8, "<Q", 2**63, "9223372036854775808 tensors need a file of at least"),
        (8, "<Q", 10**6, "has too large a header: 1000000 tensors"),
        (8, "<Q", 273, "98362464 bytes expected"),
        (16, "<Q", 2**64 - 1, "18446744073709551615 keys of metadata need a file"),
        (16, "<Q", 10**6, "has too large a header: 1000000 keys"),
        (24, "<Q", 2**64 - 1, "the name of key 0 needs a file of at least"),
    ],
)
def test_damaged_beginnings(tmp_path: Path, offset: int, form: str, value: Any, expected: str) -> None:
    path = smol_with_holes(tmp_path)
    patch(path, offset, form, value)
    assert expected in refused(path)


def test_unknown_tensor_type(tmp_path: Path) -> None:
    path = smol_with_holes(tmp_path)
    patch(path, tensor_field("blk.3.attn_q.weight", "type"), "<I", 99)
    message = refused(path)
    assert message.startswith("tensor 'blk.3.attn_q.weight' has the type 99, ")
    assert "Q4_1 (3)" in message


def test_offset_that_is_not_aligned(tmp_path: Path) -> None:
    path = smol_with_holes(tmp_path)
    where = tensor_field("blk.3.attn_q.weight", "offset")
    offset = struct.unpack("<Q", path.read_bytes()[where : where + 8])[0]
    patch(path, where, "<Q", offset + 7)
    expected = f"tensor 'blk.3.attn_q.weight' lies at offset {offset + 7}, not a multiple of the alignment of 32"
    assert refused(path) == expected


@pytest.mark.parametrize("offset", [98_362_432, 2**63, 2**64 - 32])
def test_offset_past_the_end(tmp_path: Path, offset: int) -> None:
    path = smol_with_holes(tmp_path)
    patch(path, tensor_field("blk.3.attn_q.weight", "offset"), "<Q", offset)
    message = refused(path)
    assert "'blk.3.attn_q.weight'" in message
    assert message.endswith("it has 98362432")


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "directory" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "missing.gguf")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "empty" in refused(empty)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe)
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS pointer" in refused(pointer)
    big_endian = write(tmp_path / "big.gguf", lambda writer: None, endianess=GGUFEndian.BIG)
    assert refused(big_endian) == "is a big-endian GGUF file; only little-endian ones are supported"


def test_file_without_permission(tmp_path: Path) -> None:
    path = save_t0_gguf(tmp_path / "model.gguf")
    path.chmod(0)
    program = "import os, sys; from headrace.formats.gguf import GGUFFile, ModelError\n"
    if os.geteuid() == 0:  # root may read anything
        program += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    program += "try: GGUFFile(sys.argv[1])\nexcept ModelError as error: print(error)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, env=environment)
    assert run.stdout == f"{path}: cannot be read: Permission denied\n", run.stderr


# Files made byte by byte


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def build(path: Path, keys: list[bytes], tensors: list[bytes], data: int = 4096) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(header + bytes(data))
    return path


STRING, ARRAY, UINT32 = 8, 9, 4
ARCHITECTURE = key("general.architecture", STRING, string("llama"))


@pytest.mark.parametrize(
    ("keys", "tensors", "expected"),
    [
        ([ARCHITECTURE] * 2, [], "has the key 'general.architecture' twice"),
        ([], [tensor("a", [4]), tensor("a", [4])], "has the tensor 'a' twice"),
        ([key("k", 13, b"")], [], "'k' has the unknown value type 13"),
        ([key("k", ARRAY, array(77, 1))], [], "'k' has the unknown value type 77"),
        ([key("k", ARRAY, array(77, 2**60))], [], "need a file of at least"),
        ([key("k", STRING, struct.pack("<Q", 2**64 - 1))], [], "'k' needs a file of at least"),
        ([key("k", ARRAY, array(STRING, 2**61))], [], "2305843009213693952 items of 'k' need a file of at least"),
        ([key("k", ARRAY, array(10, 2**61))], [], "'k' needs a file of at least"),
        (
            [key("k", ARRAY, array(STRING, 3, string("a") + struct.pack("<Q", 5000)))],
            [],
            "'k' needs a file of at least",
        ),
        ([key("k", ARRAY, array(STRING, 600, string(bytes(4000))))], [], "'k' needs a file of at least"),
        ([key("k", ARRAY, array(ARRAY, 1) * 9)], [], "'k' nests arrays deeper than 4 levels"),
        ([key(b"\xff", UINT32, bytes(4))], [], "the name of key 0 is not UTF-8"),
        ([key("k", STRING, string(b"a\xc3"))], [], "'k' is not UTF-8"),
        ([key("k", ARRAY, array(STRING, 2, string("a") + string(b"\xed\xa0\x80")))], [], "item 1 of 'k' is not UTF-8"),
        ([], [tensor(b"\xfe", [4])], "the name of tensor 0 is not UTF-8"),
        ([key("k" * 70_000, UINT32, bytes(4))], [], "the name of key 0 is 70000 characters long"),
        (
            [key("general.alignment", UINT32, struct.pack("<I", 0))],
            [],
            "general.alignment must be a power of two, not 0",
        ),
        ([key("general.alignment", UINT32, struct.pack("<I", 24))], [], "must be a power of two, not 24"),
        ([key("general.alignment", STRING, string("x"))], [], "must be a power of two, not 'x'"),
        ([key("general.alignment", UINT32, struct.pack("<I", 2**31))], [tensor("a", [1])], "2147483652 bytes expected"),
        ([], [tensor("a", [1] * 5)], "tensor 'a' has 5 dimensions; at most 4 are possible"),
        ([], [tensor("a", [1, 0])], "tensor 'a' has the impossible shape [0, 1]"),
        ([], [tensor("a", [2**32, 2**32])], "tensor 'a' has the impossible shape [4294967296, 4294967296]"),
        ([], [tensor("a", [2**63 - 1])], "is cut short or damaged: 36893488147419103"),
        ([], [tensor("a", [33, 4], 2)], "tensor 'a' has rows of 33 values, not a multiple of the 32 of a Q4_0 block"),
        ([], [tensor("a", [128, 4], 12)], "not a multiple of the 256 of a Q4_K block"),
        ([], [tensor("a", [32], 4)], "tensor 'a' has the type 4, which is unknown"),
        ([], [tensor("a", [4], 0, 1)], "tensor 'a' lies at offset 1, not a multiple of the alignment of 32"),
        ([], [tensor("a\nb", [4], 99)], r"tensor 'a\nb' has the type 99"),
    ],
)
def test_hostile_headers(tmp_path: Path, keys: list[bytes], tensors: list[bytes], expected: str) -> None:
    tracemalloc.start()
    message = refused(build(tmp_path / "model.gguf", keys, tensors))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in message, message
    assert peak < 4 * 2**20


def test_a_large_file_of_empty_things_is_refused_at_once(tmp_path: Path) -> None:
    """Counts that the size of the file would allow, but that no model has."""
    for kind, item in ((STRING, 8), (ARRAY, 12)):
        path = build(tmp_path / "model.gguf", [key("k", ARRAY, array(kind, 10**7))], [])
        os.truncate(path, 10**7 * item + 4096)
        assert "too large a header" in refused(path)
    path = build(tmp_path / "long.gguf", [key("k", STRING, struct.pack("<Q", MAX_HEADER_BYTES))], [])
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    assert "header of more than 268435456 bytes" in refused(path)
    path = build(
        tmp_path / "strings.gguf", [key("k", ARRAY, array(STRING, 2, struct.pack("<Q", MAX_HEADER_BYTES)))], []
    )
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    assert "header of more than 268435456 bytes" in refused(path)


def test_dimensions_of_a_scalar(tmp_path: Path) -> None:
    """ggml takes a tensor without dimensions for one value."""
    file = GGUFFile(build(tmp_path / "model.gguf", [], [tensor("a", [])]))
    assert file.tensors["a"].shape == ()
    assert file.blocks("a").shape == (1, 4)


# Fuzzing


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = t0_config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    config |= {"num_key_value_heads": 1}
    path = save_t0_gguf(
        tmp_path_factory.mktemp("small") / "model.gguf",
        config=config,
        weights=t0_weights(config=config),
        rope_freqs=[1.0, 1.0, 2.0, 4.0],
        extra_metadata={"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.scores": [0.0] * 259},
    )
    return path.read_bytes()


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, 12, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=400, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small_file)
    header = small_file.index(b"blk.0.ffn_down.weight") + 500  # damage is most interesting there
    for _ in range(data.draw(st.integers(0, 4), "how many changes")):
        at = data.draw(st.one_of(st.integers(0, 400), st.integers(0, header)), "where")
        size = data.draw(st.sampled_from([1, 4, 8]), "bytes")
        content[at : at + size] = (data.draw(NUMBERS, "value") % 256**size).to_bytes(size, "little")
    if data.draw(st.booleans(), "delete a piece"):
        at = data.draw(st.integers(0, header), "from")
        del content[at : at + data.draw(st.integers(1, 100), "this many")]
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content)), "at") :]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    message = None
    tracemalloc.start()
    try:
        checkpoint = GGUFCheckpoint(path)
        assert checkpoint.config["architectures"]
        for name, shape in checkpoint.shapes().items():
            assert checkpoint.read(name).dequantize().shape == shape
        checkpoint.tokenizer().encode("Hello <s>")
    except ModelError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert message is None or (message.startswith(str(path)) and "\n" not in message)
    assert peak < 16 * 2**20
