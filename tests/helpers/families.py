"""Tiny random checkpoints of every model family, made and saved by transformers, and transformers' logits for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from helpers.tiny import BOS, EOS, PAD, VOCAB, save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def _llama(**settings: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**(SIZES | settings))


def _mistral(**settings: Any) -> PreTrainedConfig:
    return transformers.MistralConfig(**(SIZES | settings))


def _qwen2(**settings: Any) -> PreTrainedConfig:
    return transformers.Qwen2Config(**(SIZES | settings))


def _qwen3(**settings: Any) -> PreTrainedConfig:
    return transformers.Qwen3Config(**(SIZES | {"head_dim": 24} | settings))


def _gemma3(**settings: Any) -> PreTrainedConfig:
    """Five layers with a window of 7; the third and the fifth see everything, and turn slower."""
    local, full = "sliding_attention", "full_attention"
    own = {
        "num_hidden_layers": 5,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "layer_types": [local, local, full, local, full],
        "rope_parameters": {
            local: {"rope_type": "default", "rope_theta": 10000.0},
            full: {"rope_type": "default", "rope_theta": 1000000.0},
        },
    }
    return transformers.Gemma3TextConfig(**(SIZES | own | settings))


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama2": lambda: _llama(num_key_value_heads=4),
    "llama-gqa": lambda: _llama(num_key_value_heads=2),
    "llama-mqa": lambda: _llama(num_key_value_heads=1),
    "llama-head-dim": lambda: _llama(head_dim=24),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama-yarn": lambda: _llama(rope_parameters=YARN_ROPE),
    "llama-yarn-set": lambda: _llama(
        rope_parameters=YARN_ROPE | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    ),
    "llama-yarn-mscale": lambda: _llama(rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "smollm2": lambda: _llama(tie_word_embeddings=True, rms_norm_eps=1e-5),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral-window": lambda: _mistral(sliding_window=7, head_dim=24),
    "qwen2": lambda: _qwen2(),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": lambda: _qwen3(),
    "qwen3-bias": lambda: _qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3-window": lambda: _qwen3(use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "gemma3": lambda: _gemma3(),
    "gemma3-softcap": lambda: _gemma3(final_logit_softcapping=5.0, num_key_value_heads=1),
    "gemma3-linear": lambda: _gemma3(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        }
    ),
    "gemma3-untied": lambda: _gemma3(tie_word_embeddings=False),
}


def save_family(directory: str | Path, family: str, seed: int, *, old_config: bool = False) -> Path:
    """A checkpoint of one of FAMILIES with random weights, norms and biases included; returns the directory.

    old_config: rewrite `config.json` to the keys of most published files, which are older than transformers 5:
        `rope_theta`, `rope_scaling`, `rope_local_base_freq`, `sliding_window_pattern`, `torch_dtype`.
    """
    directory = Path(directory)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # around what leaves the values as they are: 1, or 0 where Gemma adds the one itself
                parameter.normal_(0.0 if "gemma" in family else 1.0, 0.2)
            elif "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.normal_(0.0, 0.25)  # sharp attention, so that a wrong angle or mask shows
            elif "embed" not in name:
                parameter.normal_(0.0, 0.125)
            else:
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    if old_config:
        _use_old_keys(directory / "config.json")
    return directory


def _use_old_keys(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 2
        del config["layer_types"], config["_sliding_window_pattern"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def transformers_model(directory: Path) -> PreTrainedModel:
    """transformers' model of a checkpoint, float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def transformers_logits(model: PreTrainedModel, ids: list[int], **arguments: Any) -> torch.Tensor:
    """Logits `[len(ids), vocab]`, float32."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False, **arguments).logits[0]
        return logits
