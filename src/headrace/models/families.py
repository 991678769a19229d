"""The model families: how each one's `config.json` describes the decoder.

A family is a function from the config to a DecoderConfig, listed in FAMILIES under the architecture name that
`config.json` gives. Defaults for absent keys are those of the family's config class in transformers, since files leave
out what equals them. To add a family: write its function, list it, and let the tests compare it with transformers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ModelError
from headrace.models.config import DecoderConfig, Rope

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
MAX_LAYERS = 1024


class _Config:
    """`config.json` with checked reads: a value of the wrong kind is a ModelError that names the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelError(f"config: {key!r} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(f"config: {key!r} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config: {key!r} must be true or false, not {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelError(f"config: {key!r} must be an object, not {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config: {key!r} is missing")
        return value


def _rope(c: _Config, head_dim: int, scaling: Mapping[str, Any], theta: float) -> Rope:
    """One rotary embedding; `scaling` is `rope_scaling`, or `rope_parameters`, which holds base and share as well."""
    own = _Config(scaling)
    share = own.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * share)
    if share > 1 or dim < 2 or dim % 2:
        raise ModelError(
            f"config: rotary embedding over {dim} of {head_dim} entries of a head: must be even and above 0"
        )
    return Rope(theta=own.number("rope_theta", c.number("rope_theta", theta)), dim=dim, scaling=scaling)


def _windows(
    c: _Config, layers: int, window: int | None, default_types: Callable[[int], str]
) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`, or by the family's own rule where the config has none."""
    types = c.values.get("layer_types")
    if types is None:
        types = [default_types(i) for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ModelError(
            f"config: 'layer_types' must have {layers} entries, each 'full_attention' or 'sliding_attention'"
        )
    if window is None and "sliding_attention" in types:
        raise ModelError("config: 'sliding_window' is missing though there are layers with 'sliding_attention'")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _base(
    c: _Config,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    tied: bool = False,
    max_position: int = 2048,
    theta: float = 10_000.0,
    activation_key: str = "hidden_act",
    **switches: Any,
) -> DecoderConfig:
    """What all families share; keyword arguments are the family's defaults for absent keys, and its switches."""
    layers, heads, hidden = (c.integer(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if layers > MAX_LAYERS:
        raise ModelError(f"config: {layers} layers are more than the {MAX_LAYERS} that are supported")
    head_dim = c.integer("head_dim", head_dim or max(1, hidden // heads))
    if c.values.get("num_key_value_heads", kv_heads) is None:  # null, or absent in a family that has no default
        kv_heads = heads
    kv_heads = c.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise ModelError(f"config: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    activation = c.values.get(activation_key) or ("silu" if activation_key == "hidden_act" else "gelu_pytorch_tanh")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"config: {activation_key} {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    if "ropes" not in switches:
        scaling = c.mapping("rope_parameters") or c.mapping("rope_scaling")
        switches["ropes"] = (_rope(c, head_dim, scaling, theta),)
    switches.setdefault("layer_ropes", (0,) * layers)
    switches.setdefault("windows", (None,) * layers)
    switches.setdefault("attention_scale", head_dim**-0.5)
    return DecoderConfig(
        architecture=c.values["architectures"][0],
        vocab_size=c.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=c.integer("max_position_embeddings", max_position),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        tied=c.flag("tie_word_embeddings", tied),
        **switches,
    )


def _llama(c: _Config) -> DecoderConfig:
    """Llama 2, 3, 3.x, SmolLM2 and many others under the same name."""
    bias = c.flag("attention_bias")
    return _base(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.flag("mlp_bias"))


def _mistral(c: _Config) -> DecoderConfig:
    absent = "sliding_window" not in c.values
    window = 4096 if absent else c.values["sliding_window"] and c.integer("sliding_window")
    layers = c.integer("num_hidden_layers")
    kind = "full_attention" if window is None else "sliding_attention"
    windows = _windows(c, layers, window, lambda _: kind)
    return _base(c, kv_heads=8, max_position=131_072, windows=windows)


def _qwen_windows(c: _Config) -> tuple[int | None, ...]:
    window = c.integer("sliding_window", 4096) if c.flag("use_sliding_window") else None
    first = c.values.get("max_window_layers", 28)
    full = "full_attention"
    return _windows(
        c,
        c.integer("num_hidden_layers"),
        window,
        lambda i: full if window is None or i < first else "sliding_attention",
    )


def _qwen2(c: _Config) -> DecoderConfig:
    """Qwen2 and Qwen2.5."""
    return _base(c, kv_heads=32, max_position=32_768, qkv_bias=True, windows=_qwen_windows(c))


def _qwen3(c: _Config) -> DecoderConfig:
    bias = c.flag("attention_bias")
    return _base(
        c,
        head_dim=128,
        kv_heads=32,
        max_position=32_768,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(c),
    )


def _gemma3(c: _Config) -> DecoderConfig:
    """Gemma 3, the text model: windows in most layers, which turn at another base than the rest."""
    if c.flag("use_bidirectional_attention"):
        raise ModelError("config: bidirectional attention is not supported")
    layers, head_dim = c.integer("num_hidden_layers"), c.integer("head_dim", 256)
    pattern = c.integer("sliding_window_pattern", 6)
    window = c.integer("sliding_window", 4096)
    windows = _windows(c, layers, window, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention")
    both = c.mapping("rope_parameters")
    everywhere = _Config(both).mapping("full_attention") or c.mapping("rope_scaling")
    near = _Config(both).mapping("sliding_attention")
    far_rope = _rope(c, head_dim, everywhere, 1_000_000.0)
    near_rope = _rope(_Config({"rope_theta": c.number("rope_local_base_freq", 10_000.0)}), head_dim, near, 10_000.0)
    bias = c.flag("attention_bias")
    return _base(
        c,
        head_dim=256,
        kv_heads=4,
        tied=True,
        max_position=131_072,
        activation_key="hidden_activation",
        windows=windows,
        ropes=(far_rope, near_rope),
        layer_ropes=tuple(0 if w is None else 1 for w in windows),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=c.integer("hidden_size") ** 0.5,
        attention_scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=c.optional_number("attn_logit_softcapping"),
        final_softcap=c.optional_number("final_logit_softcapping"),
    )


FAMILIES: dict[str, Callable[[_Config], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a `config.json` describes. Raises ModelError for an unknown architecture or a faulty value."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError("config: 'architectures' is missing: is this a causal language model?")
    if names[0] not in FAMILIES:
        raise ModelError(f"architecture {names[0]!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[names[0]](_Config(config))
