"""A GGUF file as a checkpoint: config, names, shapes and order of rows as Hugging Face has them.

llama.cpp's converter changes some tensors: it reorders the query and key rows of Llama models, and adds one to Gemma's
norm weights. Both are undone here when a tensor is read.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.formats.checkpoint import Checkpoint, DenseWeight, IntegerWeight, Weight
from headrace.formats.files import quoted
from headrace.formats.ggml_blocks import BlockType, Integers
from headrace.formats.gguf import GGUFFile
from headrace.formats.gguf_config import architecture_of, hf_config
from headrace.formats.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from headrace.formats.tokenizer import Tokenizer

CHUNK_VALUES = 1 << 19  # how many values are decoded at once; it takes some 20 bytes for each

ROPE_FACTORS = "rope_freqs.weight"
CHAT_TEMPLATE = "tokenizer.chat_template"

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGMLWeight(Weight):
    """A tensor in blocks of ggml.

    blocks: uint8 `[rows, row_bytes]`, where a row is the last dimension of `shape`. It is not to be written to, and
        where the rows lie as in the file it is not in memory either until it is read.
    block_type: how the blocks code values.
    """

    def __init__(self, blocks: NDArray[np.uint8], block_type: BlockType, shape: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.block_type = block_type
        self.shape = shape
        self.dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(block_type.name, torch.float32)

    @property
    def coding(self) -> str:
        return self.block_type.name

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=dtype)
        size = self.block_type.block_size
        blocks, rows = self.blocks.reshape(-1, self.block_type.block_bytes), values.view(-1, size)
        step = CHUNK_VALUES // size
        for start in range(0, len(blocks), step):
            chunk = self.block_type.dequantize(blocks[start : start + step])
            rows[start : start + step] = torch.from_numpy(chunk)
        return values

    def integers(self) -> IntegerWeight | None:
        if not self.block_type.bits or len(self.shape) != 2:
            return None
        blocks = self.blocks.reshape(-1, self.block_type.block_bytes)
        step = CHUNK_VALUES // self.block_type.block_size
        parts = [self.block_type.unpack(blocks[start : start + step]) for start in range(0, len(blocks), step)]
        held = [part for part in parts if isinstance(part, Integers)]
        rows = self.shape[0]

        def joined(arrays: list[NDArray[Any]]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays).reshape(rows, -1))

        return IntegerWeight(
            joined([part.codes for part in held]),
            self.block_type.bits,
            held[0].codes.shape[2],
            joined([part.scales for part in held]),
            None if held[0].minimums is None else joined([part.minimums for part in held if part.minimums is not None]),
        )


class GGUFCheckpoint(Checkpoint):
    """A model in a GGUF file, or in several: then `path` is the first of them, NAME-00001-of-0000N.gguf.

    files: all of its files. arch: the architecture, by GGUF's name.
    Tensors of other names than those of the supported architectures keep their own.
    Raises ModelError, naming the file and the fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = files = open_parts(self.path)
        self._file = files[0]
        self.arch = architecture_of(self._file)
        sources = _tensors(files)
        rope_factors = sources.pop(ROPE_FACTORS, None)
        self._sources = {hf_name(name, self.arch): (file, name) for name, file in sources.items()}
        if len(self._sources) < len(sources):
            self._file.fault("has tensors whose names mean the same")

        self._vocabulary = vocabulary = GGUFVocabulary(self._file)
        self.config = hf_config(
            self._file,
            sources,
            vocab_size=len(vocabulary.tokens),
            rope_factors=_weight(rope_factors, ROPE_FACTORS).dequantize().tolist() if rope_factors else None,
        )
        if len(vocabulary.tokens) > self.config["vocab_size"]:
            self._file.fault(f"has {len(vocabulary.tokens)} tokens, but a vocab_size of {self.config['vocab_size']}")
        self.generation_config = {"eos_token_id": vocabulary.end_ids()}
        if "bos" in vocabulary.special_ids:
            self.generation_config["bos_token_id"] = vocabulary.special_ids["bos"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {hf_name: file.tensors[name].shape for hf_name, (file, name) in self._sources.items()}

    def read(self, name: str) -> Weight:
        if name not in self._sources:
            self._file.fault(f"has no tensor {quoted(name)}")
        file, gguf_name = self._sources[name]
        weight = _weight(file, gguf_name)
        if self.arch == "llama" and ".self_attn.q_proj." in name:
            return self._rotate_halves(weight, name, self.config["num_attention_heads"])
        if self.arch == "llama" and ".self_attn.k_proj." in name:
            return self._rotate_halves(weight, name, self.config["num_key_value_heads"])
        if self.arch == "gemma3" and name.endswith("norm.weight"):
            return DenseWeight(weight.dequantize() - 1)
        return weight

    def tokenizer(self) -> Tokenizer:
        templates = {
            key.removeprefix(CHAT_TEMPLATE).removeprefix(".") or "default": self._file.required(key, str)
            for key in self._file.metadata
            if key == CHAT_TEMPLATE or key.startswith(CHAT_TEMPLATE + ".")
        }
        backend, special_tokens = build_tokenizer(self._vocabulary), self._vocabulary.special_tokens()
        try:
            return Tokenizer(backend, chat_templates=templates, special_tokens=special_tokens)
        except ModelError as error:
            self._file.fault(str(error))

    def _rotate_halves(self, weight: GGMLWeight, name: str, heads: int) -> Weight:
        """Query or key rows in Hugging Face's order.

        Of the two rows that rotary embedding turns together, Hugging Face has one in each half of the head, and Llama
        models in GGUF have them side by side.
        """
        rows = weight.shape[0] if weight.shape else 0
        if rows == 0 or rows % (2 * heads):
            self._file.fault(f"tensor {quoted(name)} of shape {list(weight.shape)} does not divide into {heads} heads")
        order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if len(weight.shape) == 1:  # a bias
            return DenseWeight(weight.dequantize()[torch.from_numpy(order)])
        return GGMLWeight(weight.blocks[order], weight.block_type, weight.shape)


def _weight(file: GGUFFile, name: str) -> GGMLWeight:
    tensor = file.tensors[name]
    return GGMLWeight(file.blocks(name), tensor.block_type, tensor.shape)


def hf_name(name: str, arch: str) -> str:
    """The Hugging Face name of a tensor; its own if it has no other."""
    stem, _, kind = name.rpartition(".")
    names = _GEMMA_LAYER_NAMES if arch == "gemma3" else _LAYER_NAMES
    layer = re.fullmatch(r"blk\.([0-9]+)\.(\w+)", stem)
    if layer and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def gguf_name(name: str, arch: str) -> str:
    """The other way round, for the tensors that the supported architectures have."""
    stem, _, kind = name.rpartition(".")
    names = {theirs: ours for ours, theirs in (_GEMMA_LAYER_NAMES if arch == "gemma3" else _LAYER_NAMES).items()}
    if layer := re.fullmatch(r"model\.layers\.([0-9]+)\.([\w.]+)", stem):
        return f"blk.{layer[1]}.{names[layer[2]]}.{kind}"
    return f"{ {theirs: ours for ours, theirs in _NAMES.items()}[stem] }.{kind}"


def open_parts(path: Path) -> list[GGUFFile]:
    """The file, and the others that it is split into, if it is."""
    first = GGUFFile(path)
    count = first.value("split.count", int) or 1
    if count == 1:
        return [first]
    ending = f"-00001-of-{count:05}.gguf"
    if not path.name.endswith(ending):
        first.fault(f"is part of a model that is split into {count} files; give the first one, NAME{ending}")
    stem = str(path).removesuffix(ending)
    return [first, *(GGUFFile(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1))]


def _tensors(files: list[GGUFFile]) -> dict[str, GGUFFile]:
    """The names of all tensors, each with the file that has it."""
    tensors: dict[str, GGUFFile] = {}
    for file in files:
        for name in file.tensors:
            if name in tensors:
                file.fault(f"has the tensor {quoted(name)}, which {tensors[name].path} has too")
            tensors[name] = file
    count = files[0].value("split.tensors.count", int)
    if count is not None and count != len(tensors):
        files[0].fault(f"the {len(files)} files of this model should have {count} tensors, and have {len(tensors)}")
    return tensors
