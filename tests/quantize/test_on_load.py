"""`quantization` while loading: which matrices become what, and what the model answers then."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, HeadraceError
from headrace.formats.open import open_checkpoint
from headrace.quantize.on_load import QuantizedOnLoad
from helpers.model_files import smollm2
from helpers.tiny import save_t0, t0_config, t0_numpy_logits, t0_weights

IDS = list(b"The quick brown fox")


def settings(**more: object) -> dict:
    return {"max_model_len": 256, "kv_cache_memory": 4 << 20, "backend": "reference", "threads": 1} | more


def test_int8_by_the_formula(tmp_path: Path) -> None:
    """Every matrix rounded to max|row| / 127 in NumPy gives the same tokens and logprobs."""
    weights = t0_weights()
    for name, value in weights.items():
        if value.ndim == 2:
            scale = np.abs(value).max(1, keepdims=True) / np.float32(127)
            weights[name] = np.rint(value / scale) * scale
    logits = t0_numpy_logits(weights, t0_config(), IDS)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    llm = LLM(str(save_t0(tmp_path)), quantization="int8", **settings())
    out = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
    found = [entry.logprob for entry in out.prompt_logprobs[1:]]
    np.testing.assert_allclose(found, [expected[i, IDS[i + 1]] for i in range(len(IDS) - 1)], atol=1e-3)


def test_int4_has_groups_and_keeps_embedding_and_head_at_eight_bits(tmp_path: Path) -> None:
    checkpoint = QuantizedOnLoad(open_checkpoint(str(save_t0(tmp_path))), "int4")
    bits = {}
    for name in checkpoint.shapes():
        coded = checkpoint.read(name).integers()
        bits[name] = None if coded is None else (coded.bits, coded.group_size)
    assert bits["model.embed_tokens.weight"] == bits["lm_head.weight"] == (8, 64)
    assert bits["model.norm.weight"] is None
    assert bits["model.layers.1.mlp.down_proj.weight"] == (4, 32)
    assert sum(b == (4, 32) for b in bits.values()) == 14


def test_what_is_in_so_few_bits_already_stays() -> None:
    source = open_checkpoint(str(smollm2()))
    name = "model.layers.0.mlp.up_proj.weight"  # Q4_1
    stored = source.read(name)
    for method in ("int8", "int4"):
        assert torch.equal(QuantizedOnLoad(source, method).read(name).dequantize(), stored.dequantize())


def test_awkward_weights_give_no_nan_and_the_same_tokens(tmp_path: Path) -> None:
    """A channel of 1e4 with 1e-4 behind it, a row of zeros, a row with one large weight."""
    weights = t0_weights()
    weights["model.layers.0.input_layernorm.weight"][7] = 1e4
    for part in "qkv":
        weights[f"model.layers.0.self_attn.{part}_proj.weight"][:, 7] *= 1e-4
    weights["model.layers.0.mlp.gate_proj.weight"][5] = 0
    weights["model.layers.1.self_attn.o_proj.weight"][9] = 0
    weights["model.layers.1.self_attn.o_proj.weight"][9, 3] = 1e3
    path = str(save_t0(tmp_path, weights=weights))
    prompts = [[i, 60 + i, 100 + i] for i in range(1, 11)]
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, logprobs=1)
    plain = LLM(path, **settings()).generate(prompts, params)
    coded = LLM(path, quantization="int8", **settings())
    # Token by token after the same text, so that one difference does not count for all that follow.
    same = total = 0
    for before in plain:
        ids = before.outputs[0].token_ids
        scored = coded.generate(
            [before.prompt_token_ids + ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        )[0]
        for entry in scored.prompt_logprobs[len(before.prompt_token_ids) :]:
            assert np.isfinite(entry.logprob)
            same += entry.top[0][0] == entry.token_id
            total += 1
    assert total == 2000
    assert same >= 0.9 * total


@pytest.mark.parametrize("tensor", ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_nan_in_the_file_is_named(tmp_path: Path, tensor: str) -> None:
    weights = t0_weights()
    weights[tensor].flat[3] = np.nan
    path = str(save_t0(tmp_path, weights=weights))
    with pytest.raises(HeadraceError, match=rf"{tensor.replace('.', '[.]')}.*NaN"):
        LLM(path, quantization="int8", **settings())


def test_unknown_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, not 'int5'"):
        LLM(str(tmp_path), quantization="int5")
