"""Models in Hugging Face's form: a directory with config.json, safetensors (one file or shards), and tokenizer.json."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.errors import ModelError
from headrace.formats import awq, compressed_tensors, gptq
from headrace.formats.checkpoint import Checkpoint, DenseWeight, Weight
from headrace.formats.files import name_list, quoted, read_json_object
from headrace.formats.hf_tokenizer import load_tokenizer
from headrace.formats.quantized import StoredMatrix, StoredTensors
from headrace.formats.safetensors import FLOAT_DTYPES, INTEGER_DTYPES, SafetensorsFile
from headrace.formats.tokenizer import Tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION = "quantize_config.json"  # of older GPTQ checkpoints

QUANTIZED = {
    "gptq": gptq.find_matrices,
    "awq": awq.find_matrices,
    "compressed-tensors": compressed_tensors.find_matrices,
}

MAX_CONFIG_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


class HFCheckpoint(Checkpoint):
    """A model directory, checked when opened: every header is read, and no tensor's data but small ones.

    Where matrices are quantized (GPTQ, AWQ, compressed-tensors), each is one weight here.
    Where there is an index, the files that it names are the weights and any other safetensors file is left alone.
    `generation_config["eos_token_id"]` is always there: generation_config.json's ids, else config.json's, else none.
    Raises ModelError, naming the file and the fault.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        _check_is_model(self.path)
        self.config = read_json_object(self.path / CONFIG, MAX_CONFIG_BYTES)
        self.generation_config = _generation_config(self.path, self.config)
        sources = _from_index(self.path) if (self.path / INDEX).exists() else _from_one_file(self.path)
        self._matrices = _quantized_matrices(self.path, self.config, sources)
        parts = {tensor for matrix in self._matrices.values() for tensor in matrix.tensors}
        self._sources = _only_floats(self.path, {n: file for n, file in sources.items() if n not in parts})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        dense = {name: file.tensors[name].shape for name, file in self._sources.items()}
        return dense | {name: matrix.shape for name, matrix in self._matrices.items()}

    def read(self, name: str) -> Weight:
        if name in self._matrices:
            return self._matrices[name].read()
        if name not in self._sources:
            raise ModelError(f"{self.path}: has no tensor {quoted(name)}")
        return DenseWeight(self._sources[name].read(name))

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


def read_tensors(file: Path, quantization: Mapping[str, Any]) -> dict[str, Weight]:
    """All weights in one file of a model, with the model's `quantization_config`."""
    opened = SafetensorsFile(file)
    sources = dict.fromkeys(opened.tensors, opened)
    matrices = QUANTIZED[quantization["quant_method"]](StoredTensors(sources, quantization, file.parent / CONFIG))
    parts = {tensor for matrix in matrices.values() for tensor in matrix.tensors}
    dense: dict[str, Weight] = {name: DenseWeight(opened.read(name)) for name in sources if name not in parts}
    return dense | {name: matrix.read() for name, matrix in matrices.items()}


def has_weights(directory: Path) -> bool:
    return (directory / INDEX).exists() or (directory / WEIGHTS).exists()


def _check_is_model(directory: Path) -> None:
    if not directory.is_dir():
        raise ModelError(f"{directory}: is not a directory")
    has_config = (directory / CONFIG).exists()
    if has_config and has_weights(directory):
        return
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory}: holds an adapter, not a model: merge it into its base model first")
    if not has_config:
        raise ModelError(f"{directory}: is not a model directory: it has no {CONFIG}")
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{directory}: has its weights in pytorch_model.bin only; pickle files can run any code, "
            f"so they are not loaded: convert them to safetensors"
        )
    raise ModelError(f"{directory}: has no weights: neither {WEIGHTS} nor {INDEX} is there")


def _quantized_matrices(
    directory: Path, config: dict[str, Any], sources: dict[str, SafetensorsFile]
) -> dict[str, StoredMatrix]:
    """The matrices that are stored in several tensors, by the name that a dense one would have."""
    path = directory / CONFIG
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings and (directory / QUANTIZATION).exists():
        path = directory / QUANTIZATION
        settings = {"quant_method": "gptq"} | read_json_object(path, MAX_CONFIG_BYTES)
    if not settings:
        return {}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or method not in QUANTIZED:
        advice = (
            "load the unquantized model with quantization='int8' or 'int4'"
            if method == "bitsandbytes"
            else f"known are {', '.join(QUANTIZED)}"
        )
        raise ModelError(f"{path}: quantization by {quoted(method or 'an unknown method')} is not supported: {advice}")
    return QUANTIZED[method](StoredTensors(sources, settings, path))


def _generation_config(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG
    content = read_json_object(path, MAX_CONFIG_BYTES) if path.exists() else {}
    if content.get("eos_token_id") is not None:
        ids = _token_ids(path, content["eos_token_id"])
    else:
        ids = _token_ids(directory / CONFIG, config.get("eos_token_id"))
    return content | {"eos_token_id": ids}


def _token_ids(path: Path, value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, not {quoted(value)}")
    return ids


def _from_one_file(directory: Path) -> dict[str, SafetensorsFile]:
    file = SafetensorsFile(directory / WEIGHTS)
    return dict.fromkeys(file.tensors, file)


def _from_index(directory: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor. Index and shards must agree: a difference means that files are missing or mixed up."""
    path = directory / INDEX
    weight_map = read_json_object(path, MAX_INDEX_BYTES, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: has no weight_map from tensor names to files")
    sources: dict[str, SafetensorsFile] = {}
    shards = _by_shard(path, weight_map)
    for shard, promised in shards.items():
        if not os.path.exists(directory / shard):
            raise ModelError(f"{directory}: {quoted(shard)} is missing, and {INDEX} names it: complete the download")
        file = SafetensorsFile(directory / shard)
        if missing := promised - file.tensors.keys():
            raise ModelError(f"{file.path}: lacks tensors that {INDEX} says it has: {name_list(missing)}")
        if unlisted := file.tensors.keys() - weight_map.keys():
            raise ModelError(f"{path}: does not list tensors that {shard} has: {name_list(unlisted)}")
        sources |= dict.fromkeys(promised, file)
    if strays := {p.name for p in directory.glob("*.safetensors")} - shards.keys():
        logger.warning("%s: not named in %s, and not read: %s", directory, INDEX, name_list(strays))
    return sources


def _by_shard(index: Path, weight_map: dict[str, Any]) -> dict[str, set[str]]:
    """Which tensors each file should have; only names of safetensors files in the index's directory are let through."""
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelError(f"{index}: the file of tensor {quoted(tensor)} must be a string, not {quoted(shard)}")
        shards.setdefault(shard, set()).add(tensor)
    for shard in shards:
        place = PurePosixPath(shard)
        if place.is_absolute() or ".." in place.parts:
            raise ModelError(f"{index}: names a file outside its directory: {quoted(shard)}")
        if place.suffix != ".safetensors":
            raise ModelError(f"{index}: names a file that is not a safetensors file: {quoted(shard)}")
    return shards


def _only_floats(directory: Path, sources: dict[str, SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Without integer tensors, which are buffers that models compute anew; other dtypes are refused."""
    dtypes = {name: file.tensors[name].dtype for name, file in sources.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES | INTEGER_DTYPES:
            raise ModelError(f"{sources[name].path}: tensor {quoted(name)} is of dtype {dtype}, which is not supported")
    if integers := {name for name, dtype in dtypes.items() if dtype in INTEGER_DTYPES}:
        logger.warning("%s: ignored tensors of integers: %s", directory, name_list(integers))
    return {name: file for name, file in sources.items() if name not in integers}
