"""The tiny model T0, made from scratch in every form that can be loaded, and a NumPy forward pass to judge it by.

T0 is a Llama with seeded random weights: hidden 64, FFN 128, 2 layers, 4 query and 2 KV heads of size 16. Its tokenizer
is byte level without merges: the id is the byte's value, then 256 `<s>`, 257 `</s>` (end of sequence), 258 `<pad>`.
Nothing here imports Headrace: files are written with the libraries of others, and the maths is from the formulas.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD, VOCAB = 256, 257, 258, 259
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]


def t0_config(**overrides: Any) -> dict[str, Any]:
    """T0's `config.json`; a key that is overridden with None is left out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | overrides
    return {key: value for key, value in config.items() if value is not None}


def t0_qwen2_config(**overrides: Any) -> dict[str, Any]:
    """T0 as a Qwen2 model: the same sizes; the family has biases on q, k and v."""
    return t0_config(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": None} | overrides)


def t0_weights(tied: bool = False, config: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Float32 weights by their Hugging Face names, always the same ones for the same sizes.

    Normal with deviation 0.1 (0.5 for lm_head, left out if `tied`), norms 1.0. Biases for q, k and v where `config` is
    of Qwen2; they are drawn last, so that all other weights are the Llama's.
    """
    config = config or t0_config()
    rng = np.random.default_rng(0)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape: int, deviation: float = 0.1) -> np.ndarray:
        return rng.normal(0, deviation, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": normal(q_size, hidden),
            prefix + "self_attn.k_proj.weight": normal(kv_size, hidden),
            prefix + "self_attn.v_proj.weight": normal(kv_size, hidden),
            prefix + "self_attn.o_proj.weight": normal(hidden, q_size),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "mlp.gate_proj.weight": normal(ffn, hidden),
            prefix + "mlp.up_proj.weight": normal(ffn, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, ffn),
        }
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    lm_head = normal(vocab, hidden, deviation=0.5)
    if not tied:
        weights["lm_head.weight"] = lm_head
    if config["model_type"] == "qwen2":
        for layer in range(config["num_hidden_layers"]):
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = normal(size)
    return weights


def byte_symbols() -> list[str]:
    """The visible character that byte-level BPE (GPT-2's) uses for each of the 256 bytes.

    Bytes that are printable in Latin-1 stand for themselves; the others take the characters from U+0100 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def t0_tokenizer() -> Tokenizer:
    """T0's tokenizer as one of the `tokenizers` library."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(directory: Path, chat_template: str | None = None) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    t0_tokenizer().save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def save_t0(
    directory: str | Path,
    *,
    tied: bool = False,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    weights: Mapping[str, np.ndarray | torch.Tensor] | None = None,
    chat_template: str | None = None,
) -> Path:
    """T0 as a Hugging Face directory; returns the directory.

    shards: 1 writes `model.safetensors`, more write that many files and their index.
    dtype: NumPy weights are stored in it; those given as torch tensors are stored as they are.
    config: all of `config.json`, instead of `t0_config(tie_word_embeddings=tied)`.
    weights: instead of `t0_weights(tied)`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(config) if config is not None else t0_config(tie_word_embeddings=tied)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(dict(generation_config)))
    save_tokenizer(directory, chat_template)

    given = weights if weights is not None else t0_weights(tied, config)
    tensors = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(value).to(dtype)
        for name, value in given.items()
    }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


class _Writer(GGUFWriter):
    """GGUFWriter refuses an array without items, but files with no merges exist, and llama.cpp wants the key."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype == GGUFValueType.ARRAY and not val:
            kind = self._pack("I", vtype) if add_vtype else b""
            return kind + self._pack("I", sub_type or GGUFValueType.STRING) + self._pack("Q", 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor with this Hugging Face name."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleave_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows in the order that llama.cpp's converter gives those of Llama models.

    Hugging Face rotates row i of a head together with row i + head_dim / 2; ggml's "normal" rope rotates neighbours, so
    the converter puts the two rows next to each other: 0, d/2, 1, d/2 + 1, ...
    """
    head_dim = len(rows) // heads
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()
    return np.concatenate([rows[head * head_dim + order] for head in range(heads)])


def save_t0_gguf(
    path: str | Path,
    *,
    arch: str = "llama",
    tied: bool = False,
    config: Mapping[str, Any] | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    rope_freqs: list[float] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    extra_metadata: Mapping[str, Any] | None = None,
) -> Path:
    """T0 as a float32 GGUF file, with q and k rows in llama.cpp's order for "llama"; returns the path.

    arch: "llama" or "qwen2" (the same sizes, biases on q, k and v, no reordering).
    rope_freqs: the tensor `rope_freqs.weight`, head_dim / 2 numbers by which rotary frequencies are divided.
    rope_scaling: values for `{arch}.rope.scaling.*`, such as {"type": "linear", "factor": 4.0}.
    extra_metadata: more keys and values; bool, int (written as uint32), float, string, or a list of one of them.
    """
    if config is None:
        config = {"llama": t0_config, "qwen2": t0_qwen2_config}[arch]()
    weights = weights if weights is not None else t0_weights(tied, config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)

    writer = _Writer(path, arch)
    writer.add_name("T0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)

    tokens = byte_symbols() + SPECIAL_TOKENS
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 256))
    writer.add_key_value("tokenizer.ggml.merges", [], GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    for key, value in (rope_scaling or {}).items():
        _add_metadata(writer, f"{arch}.rope.scaling.{key}", value)
    for key, value in (extra_metadata or {}).items():
        _add_metadata(writer, key, value)

    for name, value in weights.items():
        if arch == "llama" and ".q_proj." in name:
            value = interleave_heads(value, heads)
        elif arch == "llama" and ".k_proj." in name:
            value = interleave_heads(value, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def rope_inverse_frequencies(config: Mapping[str, Any], freq_factors: list[float] | None = None) -> np.ndarray:
    """Radians per position for each plane of a head, float64; d / 2 of them.

    Plain: theta ** (-2i / d), where d is the head size, or config["partial_rotary_factor"] of it. By the type of
    config["rope_scaling"]: "linear" divides the positions, which is the same as dividing the frequencies; "llama3"
    divides those of wavelengths longer than original / low_freq_factor, keeps those shorter than original /
    high_freq_factor, and goes smoothly from one to the other between them. `freq_factors` divide frequency by frequency
    (the tensor rope_freqs of GGUF files).
    """
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turned = int(head_dim * config.get("partial_rotary_factor", 1.0))
    frequencies = config["rope_theta"] ** (-np.arange(0, turned, 2, dtype=np.float64) / turned)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    elif kind != "default":
        raise ValueError(f"this reference does not know the RoPE scaling {kind!r}")
    return frequencies / np.array(freq_factors) if freq_factors is not None else frequencies


def t0_numpy_logits(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    ids: list[int],
    *,
    freq_factors: list[float] | None = None,
    rounded: Collection[str] = (),
) -> np.ndarray:
    """Logits `[len(ids), vocab]` in float64 of a Llama (or Qwen2, if there are biases); tied if there is no lm_head.

    rounded: linear layers whose inputs are rounded to int8, each token's by max|x| / 127.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    n = len(ids)
    angles = np.arange(n)[:, None] * rope_inverse_frequencies(config, freq_factors)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    causal = np.tril(np.ones((n, n), bool))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * w[name + ".weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        if name in rounded:
            step = np.abs(x).max(-1, keepdims=True) / 127
            x = step * np.rint(x / step)
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        half = cos.shape[-1]
        first, second, still = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, still], axis=-1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm")
        q = rotate(linear(h, prefix + "self_attn.q_proj").reshape(n, heads, head_dim))
        k = rotate(linear(h, prefix + "self_attn.k_proj").reshape(n, kv_heads, head_dim))
        v = linear(h, prefix + "self_attn.v_proj").reshape(n, kv_heads, head_dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores = np.where(causal, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attention = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + linear(attention.reshape(n, -1), prefix + "self_attn.o_proj")
        h = norm(x, prefix + "post_attention_layernorm")
        gate = linear(h, prefix + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
