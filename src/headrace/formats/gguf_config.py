"""The content of `config.json` from the metadata of a GGUF file.

The keys of the metadata and what llama.cpp assumes where one is absent: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import reprlib
from collections.abc import Collection
from typing import Any

import numpy as np

from headrace.formats.files import quoted
from headrace.formats.gguf import GGUFFile

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}

GEMMA3_27B_LAYERS = 62


def architecture_of(file: GGUFFile) -> str:
    """`general.architecture`; ModelError if it is not supported."""
    arch = file.required("general.architecture", str)
    if arch not in ARCHITECTURES:
        file.fault(f"architecture {quoted(arch)} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return arch


def hf_config(
    file: GGUFFile, tensors: Collection[str], vocab_size: int, rope_factors: list[float] | None
) -> dict[str, Any]:
    """The model's config under the keys of Hugging Face.

    tensors: the names of all tensors, as the file has them.
    vocab_size: where the metadata has none.
    rope_factors: the numbers in the tensor `rope_freqs.weight`, if there is one.
    """
    arch = architecture_of(file)
    m = _Metadata(file, arch)
    hidden, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.integer("block_count")
    if layers > len(tensors):
        file.fault(f"{arch}.block_count is {layers}, but there are only {len(tensors)} tensors")
    if m.integer("expert_count", 0):
        file.fault("is a mixture of experts, which is not supported yet")
    head_dim = m.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if m.integer(key, head_dim) != head_dim:
            file.fault(
                f"{arch}.{key} is {m.integer(key)}: values other than the head size {head_dim} are not supported"
            )

    architecture, model_type = ARCHITECTURES[arch]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": m.integer("vocab_size", vocab_size),
        "hidden_size": hidden,
        "intermediate_size": m.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": m.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": m.number("rope.freq_base", 1_000_000.0 if arch == "gemma3" else 10_000.0),
        "rope_scaling": _rope_scaling(m, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if arch == "gemma3":
        return config | _gemma3(m, layers, head_dim)
    return config | {"hidden_act": "silu"}


def _gemma3(m: "_Metadata", layers: int, head_dim: int) -> dict[str, Any]:
    # Files do not say that all sizes but one scale the scores by the size of a head.
    scalar: float = head_dim
    if m.has("attention.scale"):
        scalar = m.number("attention.scale") ** -2
    elif layers == GEMMA3_27B_LAYERS:
        scalar = m.integer("embedding_length") / m.integer("attention.head_count")
    window = m.integer("attention.sliding_window", 0)
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if window and local else "full_attention" for local in m.sliding_pattern(layers, 6)
        ],
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[name] = m.number(name) if m.has(name) else None
    return config


def _rope_scaling(m: "_Metadata", factors: list[float] | None) -> dict[str, Any] | None:
    kind = m.file.value(f"{m.arch}.rope.scaling.type", str) or "linear"
    old_key = "rope.scale_linear"
    factor = m.number("rope.scaling.factor", m.number(old_key) if m.has(old_key) else 1.0)
    scaling: dict[str, Any] | None
    if kind == "none" or (kind == "linear" and factor == 1):
        scaling, factor = None, 1.0
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn(m, factor)
    else:
        m.file.fault(f"{m.arch}.rope.scaling.type {quoted(kind)} is not supported; supported are none, linear and yarn")

    if factors is None:
        return scaling
    if kind == "yarn":
        m.file.fault("has rope_freqs.weight as well as YaRN scaling, which are not supported together")
    return {"rope_type": "freq_factors", "factors": [factor * f for f in factors]}


def _yarn(m: "_Metadata", factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": m.integer(
            "rope.scaling.original_context_length", m.integer("context_length")
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        if m.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = m.number(f"rope.scaling.yarn_{name}")
    # In GGUF the factor on cosines and sines comes on top of YaRN's own, in Hugging Face's config instead of it.
    extra = m.number("rope.scaling.attn_factor", 1.0) * m.number("rope.scaling.yarn_attn_factor", 1.0)
    if extra != 1:
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1 if factor > 1 else 1)
    for name, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = m.file.value(f"{m.arch}.rope.scaling.{name}", float)
        if value is not None and value != neutral:
            m.file.fault(f"{m.arch}.rope.scaling.{name} of {value} is not supported, only {neutral}")
    return scaling


class _Metadata:
    """Checked reads of the keys that begin with the architecture's name."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2**31, or one per layer if they are all the same; 0 will do if it is the default."""
        key, least = f"{self.arch}.{key}", 0 if default == 0 else 1
        value = self.file.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                self.file.fault(f"{key} differs between layers, which is not supported")
            value = value[0].item()
        if value is None:
            value = default if default is not None else self.file.required(key, int)
        if type(value) is not int or not least <= value < 2**31:
            self.file.fault(f"{key} must be an integer of at least {least}, not {reprlib.repr(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        key = f"{self.arch}.{key}"
        value = self.file.value(key, float)
        if value is None:
            value = default if default is not None else self.file.required(key, float)
        if not 0 < value < math.inf:
            self.file.fault(f"{key} must be a positive number, not {value}")
        return value

    def sliding_pattern(self, layers: int, default: int) -> list[bool]:
        """Which layers see a window only: all but every n-th, or as the file lists them."""
        key = "attention.sliding_window_pattern"
        listed = self.file.metadata.get(f"{self.arch}.{key}")
        if not isinstance(listed, np.ndarray):
            every = self.integer(key, default)
            return [(layer + 1) % every != 0 for layer in range(layers)]
        if len(listed) != layers:
            self.file.fault(f"{self.arch}.{key} has {len(listed)} entries for {layers} layers")
        return [bool(local) for local in listed]
