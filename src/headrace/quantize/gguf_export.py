"""Models in other formats as GGUF has them: metadata, vocabulary and tensors as llama.cpp's converter makes them.

The keys of the metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import logging
import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.gguf import GGUFFile
from headrace.formats.gguf_checkpoint import CHAT_TEMPLATE, ROPE_FACTORS, GGMLWeight, gguf_name
from headrace.formats.gguf_config import GEMMA3_27B_LAYERS
from headrace.formats.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFVocabulary,
    build_tokenizer,
)
from headrace.formats.gguf_writer import TYPES, Content, Source, Value, encode, entry, header_of
from headrace.formats.tokenizer import Tokenizer
from headrace.layers.rotary import frequencies
from headrace.models.config import DecoderConfig
from headrace.models.loader import DecoderReader, expected_shapes
from headrace.ops.reference import Ops

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
BLOCK_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
ENDS = ("eos", "eot", "eom")  # under which names a file has tokens that end an answer

# A file says little more of a tokenizer than the name of its kind. Whether it means this one is seen by texts over
# which the kinds differ: in how they split, in digits, in composed characters, in spaces.
PROBES = [
    "Hello world",
    " a",
    "  two  spaces, a\ttab\n\n and\r\nlines \n",
    "I'll we've DON'T it's 1234567890 x12y 3.14",
    "nai\u0308ve cafe\u0301 \u00c5 \u1e9b\u0323 \ufb01",
    "日本語テキスト 中文。标点、 한국어 العربية हिन्दी",
    "👩\u200d👩\u200d👧🔥\ufe0f ½ ²³ ٣٤ \u00a0\u2003x",
    "def f(x):\n    return {'a': x**2}  # ok!!! ...\n",
    "\u2581 <0x41> a\u200db",
    "",
]
MAX_ADDED_PROBES = 1000


def content_of(checkpoint: Checkpoint) -> Content:
    """What a GGUF file of a model holds.

    Raises ModelError for a faulty model, and ConfigError for one of which GGUF cannot say all, or llama.cpp would run
    it as another one.
    """
    config = DecoderReader(checkpoint, Ops(), torch.float32).config
    arch = ARCHITECTURES[config.architecture]
    if obstacle := _obstacle(config, arch):
        raise ConfigError(f"{checkpoint.path}: has {obstacle}, which the gguf format does not: choose another format")
    metadata = _metadata(checkpoint, config, arch) | _vocabulary(checkpoint, config.vocab_size)
    return Content(arch, [entry(key, value) for key, value in metadata.items()], _tensors(checkpoint, config, arch))


def _obstacle(c: DecoderConfig, arch: str) -> str | None:
    """What the model has that cannot be told."""
    rope = c.ropes[0]
    if rope.dim != c.head_dim:
        return "heads of which a part is turned"
    if c.activation != ("gelu_tanh" if arch == "gemma3" else "silu"):
        return f"the activation {c.activation}"
    if _kind(rope.scaling) == "yarn" and not rope.scaling.get("truncate", True):
        return "YaRN scaling without truncation"
    if arch != "gemma3":
        return "sliding windows" if any(c.windows) else None
    if [w is None for w in c.windows] != [i % 6 == 5 for i in range(c.num_layers)]:
        return "windows in other layers than five of six"
    heads = c.hidden_size / c.num_heads if c.num_layers == GEMMA3_27B_LAYERS else c.head_dim
    if not math.isclose(c.attention_scale, heads**-0.5, rel_tol=1e-6):
        return f"attention scores scaled by {c.attention_scale:.4g}"
    if c.ropes[1].theta != 10_000 or _kind(c.ropes[1].scaling) != "default":
        return "layers with a window that turn in another way than with the base 10000"
    return "soft caps" if c.attention_softcap or c.final_softcap else None


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _metadata(checkpoint: Checkpoint, c: DecoderConfig, arch: str) -> dict[str, Value]:
    rope = c.ropes[0]
    own: dict[str, Value] = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position,
        "embedding_length": c.hidden_size,
        "block_count": c.num_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.dimension_count": rope.dim,
        "rope.freq_base": rope.theta,
    }
    if window := next(filter(None, c.windows), None):
        own["attention.sliding_window"] = window
    if _kind(rope.scaling) in ("linear", "yarn"):
        factor = float(rope.scaling["factor"])
        own |= {"rope.scaling.type": _kind(rope.scaling), "rope.scaling.factor": factor}
    if _kind(rope.scaling) == "yarn":
        own["rope.scaling.original_context_length"] = int(rope.scaling["original_max_position_embeddings"])
        for name in ("beta_fast", "beta_slow"):
            if rope.scaling.get(name) is not None:
                own[f"rope.scaling.yarn_{name}"] = float(rope.scaling[name])
        # Here the factor on cosines and sines comes on top of YaRN's own.
        _, attention = frequencies(rope.theta, rope.dim, rope.scaling)
        own["rope.scaling.attn_factor"] = attention / (0.1 * math.log(factor) + 1 if factor > 1 else 1)
    general: dict[str, Value] = {"general.architecture": arch, "general.name": checkpoint.path.name}
    return general | {f"{arch}.{key}": value for key, value in own.items()}


def _vocabulary(checkpoint: Checkpoint, size: int) -> dict[str, Value]:
    """The tokens, and the kind of tokenizer under which they give what the model's own gives."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer.vocab_size > size:
        raise ConfigError(f"{checkpoint.path}: has {tokenizer.vocab_size} tokens, but a vocab_size of {size}")
    definition = tokenizer.definition
    model = definition["model"]
    if model["type"] != "BPE":
        raise ConfigError(f"{checkpoint.path}: has a tokenizer of the type {model['type']}; for GGUF it must be BPE")
    byte_level = "ByteLevel" in str(definition["decoder"])
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, i in model["vocab"].items():
        is_byte = not byte_level and i in tokenizer.byte_ids
        tokens[i], types[i] = text, BYTE if is_byte else NORMAL
    for token in definition["added_tokens"]:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    if not byte_level and model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = UNKNOWN

    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    common: dict[str, Value] = {PREFIX + "tokens": tokens, PREFIX + "token_type": types}
    kinds: list[dict[str, Value]]
    if byte_level:
        common[PREFIX + "model"] = "gpt2"
        if merges:
            common[PREFIX + "merges"] = [" ".join(pair) for pair in merges]
        kinds = [{PREFIX + "pre": name} for name in PRE_TOKENIZERS]
    else:
        common[PREFIX + "model"] = "llama"
        ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
        common[PREFIX + "scores"] = [-float(ranks.get(text, len(merges))) for text in tokens]
        kinds = [{PREFIX + "add_space_prefix": added} for added in (True, False)]
    common |= _special_ids(checkpoint, tokenizer)
    added = [text for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    probes = PROBES + [f"a{text} b{text}c {text}" for text in added[:MAX_ADDED_PROBES]]
    expected = [tokenizer.encode(text) for text in probes]
    for kind in kinds:
        if _encoded(common | kind, probes) == expected:
            templates = tokenizer.chat_templates.items()
            named = {CHAT_TEMPLATE + ("" if name == "default" else f".{name}"): text for name, text in templates}
            return common | kind | named
    raise ConfigError(f"{checkpoint.path}: has a tokenizer for whose way to split texts GGUF has no name known here")


def _special_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, name in (("bos", "bos"), ("unknown", "unk"), ("padding", "pad")):
        if (token := tokenizer.special_id(tokenizer.special_tokens.get(f"{name}_token", ""))) is not None:
            found[f"{PREFIX}{key}_token_id"] = token
    named = tokenizer.special_id(tokenizer.special_tokens.get("eos_token", ""))
    ends = dict.fromkeys([*([] if named is None else [named]), *checkpoint.generation_config["eos_token_id"]])
    found |= {f"{PREFIX}{key}_token_id": token for key, token in zip(ENDS, ends, strict=False)}
    if len(ends) > len(ENDS):
        logger.warning("%s: of the tokens that end an answer GGUF takes the first three only", checkpoint.path)
    around = tokenizer.encode("a")
    found[PREFIX + "add_bos_token"] = around[:1] == [found.get(PREFIX + "bos_token_id")]
    found[PREFIX + "add_eos_token"] = around[-1:] == [found.get(PREFIX + "eos_token_id")]
    return found


def _encoded(vocabulary: dict[str, Value], texts: list[str]) -> list[list[int]]:
    """What the tokenizer of a file with this vocabulary makes of texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        path.write_bytes(header_of([entry(key, value) for key, value in vocabulary.items()], 0))
        tokenizer = build_tokenizer(GGUFVocabulary(GGUFFile(path)))
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def _tensors(checkpoint: Checkpoint, c: DecoderConfig, arch: str) -> dict[str, Source]:
    tensors = {}
    for name, shape in expected_shapes(c).items():
        kind = BLOCK_TYPES.get(checkpoint.read(name).dtype, "F32") if len(shape) == 2 else "F32"
        load = partial(_load, checkpoint, name, kind, c, arch)
        tensors[gguf_name(name, arch)] = Source(checkpoint.path, shape, TYPES[kind], load)
    rope = c.ropes[0]
    if _kind(rope.scaling) in ("llama3", "freq_factors"):
        plain, _ = frequencies(rope.theta, rope.dim, {})
        scaled, _ = frequencies(rope.theta, rope.dim, rope.scaling)
        factors = _weight(plain / scaled, "F32")
        tensors[ROPE_FACTORS] = Source(checkpoint.path, factors.shape, factors.block_type, lambda: factors)
    return tensors


def _load(checkpoint: Checkpoint, name: str, kind: str, c: DecoderConfig, arch: str) -> GGMLWeight:
    """A tensor as GGUF has it: with the changes that GGUFCheckpoint undoes."""
    values = checkpoint.read(name).dequantize()
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = c.num_heads if ".q_proj." in name else c.num_kv_heads
        halves = values.view(heads, 2, -1, *values.shape[1:])  # of the pairs of rows that are turned together
        values = halves.transpose(1, 2).reshape(values.shape)
    elif arch == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    return _weight(values, kind)


def _weight(values: torch.Tensor, kind: str) -> GGMLWeight:
    rows = 1 if values.ndim < 2 else len(values)
    blocks = encode(np.ascontiguousarray(values.numpy()).reshape(-1, TYPES[kind].block_size), TYPES[kind])
    return GGMLWeight(blocks.reshape(rows, -1), TYPES[kind], tuple(values.shape))
