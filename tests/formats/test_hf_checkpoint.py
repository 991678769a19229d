"""Hugging Face directories: whole ones, and every way in which one can be incomplete or hostile."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.errors import ModelError
from headrace.formats.checkpoint import DenseWeight
from headrace.formats.hf_checkpoint import HFCheckpoint
from helpers.safetensors_files import entry, write
from helpers.tiny import EOS, PAD, save_t0, t0_config, t0_weights

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def assert_same_weights(checkpoint: HFCheckpoint, weights: dict[str, np.ndarray]) -> None:
    assert checkpoint.shapes() == {name: array.shape for name, array in weights.items()}
    for name, array in weights.items():
        assert np.array_equal(checkpoint.read(name).dequantize().numpy(), array), name


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def weight_map(directory: Path) -> dict[str, str]:
    mapping: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return mapping


def set_weight_map(directory: Path, mapping: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_directory(tmp_path: Path, shards: int, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = HFCheckpoint(save_t0(tmp_path, shards=shards))
    assert_same_weights(checkpoint, t0_weights())
    assert checkpoint.path == tmp_path
    assert checkpoint.config == t0_config()
    assert checkpoint.generation_config == {"eos_token_id": [EOS]}
    assert checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("abc")) == "abc"
    assert not caplog.records
    with pytest.raises(ModelError, match=f"{tmp_path}: has no tensor 'model.nothing'"):
        checkpoint.read("model.nothing")


def test_weights_are_mapped_and_what_is_made_of_them_is_not(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(save_t0(tmp_path))
    weight = checkpoint.read("model.norm.weight")
    assert isinstance(weight, DenseWeight)
    assert weight.dequantize().data_ptr() != weight.data.data_ptr()
    weight.dequantize().zero_()
    assert checkpoint.read("model.norm.weight").dequantize().sum() == 64


def test_value_types_are_converted_by_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: torch.from_numpy(array) for name, array in t0_weights().items()}
    for name in weights:
        if "self_attn" in name:
            weights[name] = weights[name].bfloat16()
        elif "mlp" in name:
            weights[name] = weights[name].half()
        elif "norm" in name:
            weights[name] = weights[name].double()
    extra = {"model.rotary.inv_freq": torch.arange(8), "model.mask": torch.tensor([True])}
    with caplog.at_level(logging.WARNING):
        checkpoint = HFCheckpoint(save_t0(tmp_path, weights=weights | extra))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: ignored tensors of integers: 'model.mask', 'model.rotary.inv_freq'"
    ]
    assert checkpoint.shapes() == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            read = checkpoint.read(name).dequantize(dtype)
            assert read.dtype == dtype
            assert torch.equal(read, tensor.to(dtype)), name


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        (EOS, None, [EOS]),
        ([EOS, PAD], None, [EOS, PAD]),
        (None, None, []),
        (EOS, {"eos_token_id": [EOS, PAD]}, [EOS, PAD]),
        (EOS, {"eos_token_id": PAD}, [PAD]),
        (EOS, {"eos_token_id": None}, [EOS]),
        (EOS, {"temperature": 0.5}, [EOS]),
        (None, {"eos_token_id": PAD}, [PAD]),
    ],
)
def test_end_tokens(tmp_path: Path, config: Any, generation_config: Any, expected: list[int]) -> None:
    save_t0(tmp_path, config=t0_config(eos_token_id=config), generation_config=generation_config)
    content = HFCheckpoint(tmp_path).generation_config
    assert content == (generation_config or {}) | {"eos_token_id": expected}


@pytest.mark.parametrize("value", ["</s>", -1, 1.5, True, [1, "x"], [None], {"a": 1}])
def test_end_tokens_that_are_none(tmp_path: Path, value: Any) -> None:
    save_t0(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be a token id or a list of them"):
        HFCheckpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    save_t0(tmp_path, config=t0_config(eos_token_id=value))
    with pytest.raises(ModelError, match=r"/config\.json: eos_token_id must be a token id or a list of them"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"),
        (b"{", "the file is not valid JSON: "),
        (b"[1]", "the file must be a JSON object, not a list"),
        (b"null", "the file must be a JSON object, not a NoneType"),
        (b"\xff\xfe{}", "is not UTF-8 text: invalid start byte at byte 0"),
        (b'{"a":' * 100_000, "the file is JSON that is nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "the file is not valid JSON: Exceeds the limit"),
        (LFS.encode(), "is a Git LFS pointer, not a JSON file: run git lfs pull"),
        (b" " * (16 * 2**20 + 1), "is 16777217 bytes long; more than 16777216 is not plausible for a JSON file"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_files_at_fault(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    save_t0(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"/{name}: {fault}") as error:
        HFCheckpoint(tmp_path)
    assert len(str(error.value)) < 1000


def test_a_config_that_is_a_directory(tmp_path: Path) -> None:
    save_t0(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: is a directory, not a file"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("remove", "add", "fault"),
    [
        (["config.json"], [], "is not a model directory: it has no config.json"),
        (["model.safetensors"], [], "has no weights: neither model.safetensors nor"),
        (["model.safetensors"], ["pytorch_model.bin"], "so they are not loaded: convert them"),
        (["model.safetensors"], ["pytorch_model-00001-of-00002.bin"], "pickle files can run any code"),
        (["model.safetensors", "config.json"], ["adapter_config.json"], "holds an adapter, not a model: merge it"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, remove: list[str], add: list[str], fault: str) -> None:
    save_t0(tmp_path)
    for name in remove:
        (tmp_path / name).unlink()
    for name in add:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=f"^{tmp_path}: .*{fault}"):
        HFCheckpoint(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for name in ("x", "nothing"):
        with pytest.raises(ModelError, match=f"{name}: is not a directory"):
            HFCheckpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [({"quant_method": "aqlm", "bits": 4}, "'aqlm'"), ({"bits": 4}, "'an unknown method'"), ("awq", "'an unknown")],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_other_quantizations_are_refused(tmp_path: Path, key: str, quantization: Any, method: str) -> None:
    save_t0(tmp_path, config=t0_config(**{key: quantization}))
    with pytest.raises(ModelError, match=rf"config\.json: quantization by {method}.* is not supported: known are gptq"):
        HFCheckpoint(tmp_path)


def test_float_types_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    save_t0(tmp_path)
    write(tmp_path / "model.safetensors", {"model.w": entry("F8_E4M3", [8])}, b"\0" * 8)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor 'model\.w' is of dtype F8_E4M3, which is not supp"
    ):
        HFCheckpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_t0(tmp_path, shards=3)
    (tmp_path / SECOND).unlink()
    with pytest.raises(ModelError, match=f"{tmp_path}: '{SECOND}' is missing, and {INDEX} names it"):
        HFCheckpoint(tmp_path)


def test_shards_that_the_index_does_not_name_are_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensors in them are not there then; the loader of the model lists them."""
    save_t0(tmp_path, shards=3)
    mapping = weight_map(tmp_path)
    set_weight_map(tmp_path, {name: shard for name, shard in mapping.items() if shard != SECOND})
    with caplog.at_level(logging.WARNING):
        checkpoint = HFCheckpoint(tmp_path)
    assert set(checkpoint.shapes()) == {name for name, shard in mapping.items() if shard != SECOND}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: not named in {INDEX}, and not read: '{SECOND}'"
    ]


def test_the_index_wins_over_an_old_single_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_t0(tmp_path, shards=3)
    old = {name: torch.full(array.shape, 7.0) for name, array in t0_weights().items()}
    save_file(old, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_same_weights(HFCheckpoint(tmp_path), t0_weights())
    assert "'model.safetensors'" in caplog.text
    (tmp_path / "model.safetensors").write_text("not even a good one")
    assert_same_weights(HFCheckpoint(tmp_path), t0_weights())


def test_a_shard_that_is_a_pointer(tmp_path: Path) -> None:
    save_t0(tmp_path, shards=3)
    (tmp_path / SECOND).write_text(LFS)
    with pytest.raises(ModelError, match=rf"{SECOND}: is a Git LFS pointer, not a safetensors file: run git lfs pull"):
        HFCheckpoint(tmp_path)


def test_tensors_that_are_in_only_one_of_index_and_shard_are_named(tmp_path: Path) -> None:
    save_t0(tmp_path, shards=3)
    mapping = weight_map(tmp_path)
    set_weight_map(tmp_path, mapping | {"model.ghost": SECOND})
    with pytest.raises(ModelError, match=rf"{SECOND}: lacks tensors that {INDEX} says it has: 'model\.ghost'"):
        HFCheckpoint(tmp_path)
    set_weight_map(tmp_path, {name: shard for name, shard in mapping.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=rf"{INDEX}: does not list tensors that \S+ has: 'model\.norm\.weight'"):
        HFCheckpoint(tmp_path)


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    save_t0(tmp_path, shards=3)
    name = next(name for name, shard in weight_map(tmp_path).items() if shard == SECOND)
    other = tmp_path / "model-00003-of-00003.safetensors"
    shard = {
        key: torch.from_numpy(t0_weights()[key]) for key, place in weight_map(tmp_path).items() if place == other.name
    }
    save_file(shard | {name: torch.full(t0_weights()[name].shape, 7.0)}, other)
    assert_same_weights(HFCheckpoint(tmp_path), t0_weights())


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("../model.safetensors", "names a file outside its directory: '../model.safetensors'"),
        ("a/../../model.safetensors", "names a file outside its directory"),
        ("/etc/model.safetensors", "names a file outside its directory: '/etc/model.safetensors'"),
        ("..", "names a file outside its directory"),
        (INDEX, f"names a file that is not a safetensors file: '{INDEX}'"),
        ("config.json", "names a file that is not a safetensors file"),
        ("", "names a file that is not a safetensors file: ''"),
        (".", "names a file that is not a safetensors file"),
        (5, "the file of tensor 'model.x' must be a string, not 5"),
        (None, "the file of tensor 'model.x' must be a string, not None"),
        (["a.safetensors"], "the file of tensor 'model.x' must be a string"),
        ("a\0.safetensors", "is missing, and"),
        ("a\ud800.safetensors", "is missing, and"),
        ("a" * 5000 + ".safetensors", "is missing, and"),
    ],
)
def test_an_index_that_names_other_files(tmp_path: Path, name: Any, fault: str) -> None:
    save_t0(tmp_path / "model", shards=3)
    save_t0(tmp_path)  # so that ../model.safetensors is there
    set_weight_map(tmp_path / "model", weight_map(tmp_path / "model") | {"model.x": name})
    with pytest.raises(ModelError, match=f"^{tmp_path}/model.*: .*{fault}") as error:
        HFCheckpoint(tmp_path / "model")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{}", "has no weight_map from tensor names to files"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        (
            '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            "the file is not valid JSON: the key 'a' appears twice",
        ),
        ("[]", "the file must be a JSON object, not a list"),
        ("{", "the file is not valid JSON"),
        ("[" * 100_000, "the file is JSON that is nested too deeply"),
        (LFS, "is a Git LFS pointer"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: str, fault: str) -> None:
    save_t0(tmp_path, shards=3)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=f"/{INDEX}: {fault}"):
        HFCheckpoint(tmp_path)


def test_an_index_of_very_many_files_is_refused_at_once(tmp_path: Path) -> None:
    save_t0(tmp_path, shards=3)
    set_weight_map(tmp_path, {f"t{i}": f"{i}.safetensors" for i in range(50_000)})
    with pytest.raises(ModelError, match=r"'0\.safetensors' is missing"):
        HFCheckpoint(tmp_path)


NAMES = st.sampled_from(["model.norm.weight", "lm_head.weight", "model.x", ""]) | st.text(max_size=3)
FILES = st.sampled_from([SECOND, "model-00003-of-00003.safetensors", "x.safetensors", "../x.safetensors", INDEX])
VALUES = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(NAMES, FILES | VALUES, max_size=3),
    removed=st.sets(st.integers(0, 20), max_size=2),
    whole=st.none() | VALUES | st.dictionaries(NAMES, VALUES, max_size=3),
    use_whole=st.booleans(),
    cut=st.none() | st.integers(0, 2000),
)
def test_fuzz_index(
    tmp_path: Path, changes: dict[str, Any], removed: set[int], whole: Any, use_whole: bool, cut: int | None
) -> None:
    if not (tmp_path / "config.json").exists():
        save_t0(tmp_path, shards=3)
    kept = {name: shard for i, (name, shard) in enumerate(_shards_of_t0().items()) if i not in removed}
    mapping = whole if use_whole else kept | changes
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": mapping})[:cut])
    try:
        checkpoint = HFCheckpoint(tmp_path)
    except ModelError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  a refusal is one of two good outcomes
    else:
        assert_same_weights(checkpoint, {name: t0_weights()[name] for name in mapping})


def _shards_of_t0() -> dict[str, str]:
    """Where `save_t0` puts the tensors when it writes three shards."""
    names = list(t0_weights())
    return {name: f"model-{3 * i // len(names) + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}


def test_where_the_tensors_are(tmp_path: Path) -> None:
    assert weight_map(save_t0(tmp_path, shards=3)) == _shards_of_t0()
