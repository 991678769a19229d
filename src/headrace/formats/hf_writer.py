"""Writing a model directory in Hugging Face's form, a shard at a time."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.errors import ModelError
from headrace.formats.checkpoint import Checkpoint, DenseWeight, Weight
from headrace.formats.files import reason
from headrace.formats.hf_checkpoint import CONFIG, INDEX, QUANTIZATION, HFCheckpoint
from headrace.formats.safetensors import SafetensorsFile

# What goes along with the weights: the tokenizer, in any of its forms, and settings for generating.
COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*")
NOT_COPIED = {CONFIG, INDEX, QUANTIZATION}


def dense_dtype(weight: Weight) -> torch.dtype:
    """In which type a weight is written that stays dense: its own, or if it has none, one that others can read."""
    if isinstance(weight, DenseWeight):
        return weight.data.dtype
    return torch.float32 if len(weight.shape) == 1 else torch.float16


def dense_tensor(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    values = weight.dequantize()
    if dtype == torch.float16 and values.abs().max() > torch.finfo(dtype).max:
        dtype = torch.bfloat16
    return values.to(dtype).contiguous()


def shard_name(number: int, total: int) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Appears under its name when it is complete."""
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt"})
        os.replace(partial, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {reason(error)}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Appears under its name when it is complete."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {reason(error)}") from None


def finish(directory: Path, source: Checkpoint, shards: list[Path], changes: Mapping[str, Any]) -> None:
    """What makes shards a model: tokenizer, settings, config (the source's with `changes`), and last the index."""
    if isinstance(source, HFCheckpoint):
        for pattern in COPIED:
            for file in source.path.glob(pattern):
                if file.name not in NOT_COPIED and file.is_file():
                    shutil.copyfile(file, directory / file.name)
    else:
        source.tokenizer().save(directory)
        write_json(directory / "generation_config.json", source.generation_config)
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "compression_config")}
    write_json(directory / CONFIG, {**config, **changes})
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        for name, info in SafetensorsFile(shard).tensors.items():
            weight_map[name] = shard.name
            size += info.end - info.start
    write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
