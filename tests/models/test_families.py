"""Every model family against transformers on the same random weights, in float32."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from headrace.errors import ModelError
from headrace.models.families import FAMILIES as ARCHITECTURES
from headrace.models.families import decoder_config
from helpers.decoding import DecoderRunner, relative_error
from helpers.families import FAMILIES, save_family, transformers_logits, transformers_model
from helpers.tiny import VOCAB, save_t0, t0_config, t0_numpy_logits, t0_weights

# One token, two, around the windows of 7, around a block of 16, and past the "original context" of scaled RoPE (128).
LENGTHS = (1, 2, 6, 7, 8, 16, 33, 150)
TOLERANCE = 1e-4

# Those whose config.json had other keys before transformers 5.
WITH_OLD_KEYS = [
    "llama2",
    "llama3",
    "llama-linear",
    "llama-yarn-set",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "gemma3",
]
WITH_OLD_KEYS += ["gemma3-linear", "gemma3-softcap"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a matrix is done before a second thread has woken up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("family", "old_config"),
    [*((family, False) for family in FAMILIES), *((family, True) for family in WITH_OLD_KEYS)],
)
def test_logits_are_those_of_transformers(
    family: str, old_config: bool, prompts: list[list[int]], tmp_path: Path
) -> None:
    directory = save_family(tmp_path, family, seed=1, old_config=old_config)
    model, runner = transformers_model(directory), DecoderRunner.load(directory)
    together, chunked = runner.logits(prompts), runner.logits(prompts, chunk=5)
    for prompt, whole, pieces in zip(prompts, together, chunked, strict=True):
        truth = transformers_logits(model, prompt)
        assert relative_error(whole, truth) < TOLERANCE, len(prompt)
        assert relative_error(pieces, truth) < TOLERANCE, len(prompt)


def test_every_supported_architecture_is_among_the_checkpoints() -> None:
    assert {FAMILIES[family]().model_type for family in FAMILIES} == {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3_text",
    }
    assert len(ARCHITECTURES) == 5


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}])
def test_partial_rotary_leaves_the_rest_of_each_head(scaling: dict[str, object] | None, tmp_path: Path) -> None:
    # transformers' Llama ignores the key; the reference is the NumPy forward pass.
    config = t0_config(partial_rotary_factor=0.5, rope_scaling=scaling)
    ids = np.random.default_rng(0).integers(0, VOCAB, 60).tolist()
    (ours,) = DecoderRunner.load(save_t0(tmp_path, config=config)).logits([ids])
    assert relative_error(ours, torch.from_numpy(t0_numpy_logits(t0_weights(), config, ids))) < TOLERANCE


def test_attention_softcap(tmp_path: Path) -> None:
    # transformers' Gemma 3 reads the key but does not hand it on; its plain attention takes it as an argument.
    save_family(tmp_path, "gemma3", seed=1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": 0.5}))
    ids = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    model = transformers_model(tmp_path)
    uncapped = transformers_logits(model, ids)
    model.set_attn_implementation("eager")
    truth = transformers_logits(model, ids, softcap=0.5)
    (ours,) = DecoderRunner.load(tmp_path).logits([ids])
    assert relative_error(ours, truth) < TOLERANCE
    assert relative_error(uncapped, truth) > 0.01  # the cap makes a difference here


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["BertModel"]}, ["BertModel", "LlamaForCausalLM", "Gemma3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, ["magic", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"hidden_act": "swish2"}, ["hidden_act", "swish2"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"num_hidden_layers": 10**9}, ["layers"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"partial_rotary_factor": 0.01}, ["rotary"]),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_name(
    changes: dict[str, object], names: list[str], tmp_path: Path
) -> None:
    save_t0(tmp_path, config=t0_config(**changes), weights=t0_weights())
    with pytest.raises(ModelError) as error:
        DecoderRunner.load(tmp_path)
    message = str(error.value)
    assert all(name in message for name in [str(tmp_path), *names]), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"num_key_value_heads": None}),
        (LlamaConfig, {"num_key_value_heads": 4}),
        (MistralConfig, {}),
        (MistralConfig, {"num_key_value_heads": 4}),
        (Qwen2Config, {}),
        (Qwen2Config, {"num_key_value_heads": None}),
    ],
)
def test_absent_and_null_key_value_heads_are_those_of_transformers(
    kind: type[PreTrainedConfig], settings: dict[str, int | None]
) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 64, "intermediate_size": 8}
    shape["vocab_size"] = 9
    name = f"{kind.__name__.removesuffix('Config')}ForCausalLM"
    ours = decoder_config({"architectures": [name], **shape, **settings})
    assert ours.num_kv_heads == kind(**shape, **settings).num_key_value_heads
