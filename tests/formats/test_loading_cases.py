"""Models that other engines load wrongly: the tiny model T0 in forms that must load, and in forms that must not.

The truth is NumPy's forward pass over the same weights; the files are written by the gguf and safetensors packages.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import SamplingParams
from headrace.errors import ModelError
from helpers.decoding import DecoderRunner, relative_error
from helpers.t0_engine import t0_llm
from helpers.tiny import (
    VOCAB,
    save_t0,
    save_t0_gguf,
    t0_config,
    t0_numpy_logits,
    t0_qwen2_config,
    t0_weights,
)

CLOSE = 1e-3  # largest difference of a logit or logprob that still counts as the same

# What users would paste into config.json and what converters write, for one and the same rule.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FREQ_FACTORS = [1.0, 1.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0]


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def logits(path: Path, *prompts: list[int]) -> list[np.ndarray]:
    return [rows.double().numpy() for rows in DecoderRunner.load(path).logits(list(prompts))]


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def refusal(path: Path) -> str:
    """The message with which the model is refused, before an engine is there that could serve it."""
    with pytest.raises(ModelError) as error:
        t0_llm(path)
    message = str(error.value)
    assert "\n" not in message
    return message


class TestTiedEmbeddings:
    IDS = random_ids(40)

    def reference(self, tied: bool) -> np.ndarray:
        return t0_numpy_logits(t0_weights(tied), t0_config(), self.IDS)

    def test_gguf_without_an_output_matrix(self, tmp_path: Path) -> None:
        (ours,) = logits(save_t0_gguf(tmp_path / "tied.gguf", tied=True), self.IDS)
        assert np.abs(ours - self.reference(tied=True)).max() < CLOSE

    def test_gguf_with_one_of_its_own(self, tmp_path: Path) -> None:
        (ours,) = logits(save_t0_gguf(tmp_path / "untied.gguf"), self.IDS)
        assert np.abs(ours - self.reference(tied=False)).max() < CLOSE
        assert np.abs(ours - self.reference(tied=True)).max() > 1

    @pytest.mark.parametrize("second_copy", [False, True])
    def test_safetensors(self, tmp_path: Path, second_copy: bool) -> None:
        weights = t0_weights(tied=True)
        if second_copy:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        path = save_t0(tmp_path, config=t0_config(tie_word_embeddings=True), weights=weights)
        (ours,) = logits(path, self.IDS)
        assert np.abs(ours - self.reference(tied=True)).max() < CLOSE

    def test_safetensors_with_the_head_only(self, tmp_path: Path) -> None:
        weights = t0_weights()
        del weights["model.embed_tokens.weight"]
        path = save_t0(tmp_path, config=t0_config(tie_word_embeddings=True), weights=weights)
        assert "model.embed_tokens.weight must be [259, 64], is missing" in refusal(path)


class TestRope:
    """Scaled rotary embeddings, told in three ways; prompts are long enough for the difference to show."""

    IDS = random_ids(200)

    def last_logprobs(self, path: Path) -> np.ndarray:
        (ours,) = logits(path, self.IDS)
        return log_softmax(ours[-1])

    def reference(self, config: dict[str, Any], freq_factors: list[float] | None = None) -> np.ndarray:
        return log_softmax(t0_numpy_logits(t0_weights(), config, self.IDS, freq_factors=freq_factors)[-1])

    def plain(self) -> np.ndarray:
        return self.reference(t0_config())

    def check(self, ours: np.ndarray, truth: np.ndarray) -> None:
        assert np.abs(ours - truth).max() < CLOSE
        assert np.abs(ours - self.plain()).max() > 10 * CLOSE

    def test_plain(self, tmp_path: Path) -> None:
        assert np.abs(self.last_logprobs(save_t0_gguf(tmp_path / "t0.gguf")) - self.plain()).max() < CLOSE

    def test_gguf_with_frequency_factors(self, tmp_path: Path) -> None:
        path = save_t0_gguf(tmp_path / "t0.gguf", rope_freqs=FREQ_FACTORS)
        self.check(self.last_logprobs(path), self.reference(t0_config(), FREQ_FACTORS))

    def test_gguf_with_linear_scaling(self, tmp_path: Path) -> None:
        path = save_t0_gguf(tmp_path / "t0.gguf", rope_scaling={"type": "linear", "factor": 4.0})
        self.check(self.last_logprobs(path), self.reference(t0_config(rope_scaling={"type": "linear", "factor": 4.0})))

    def test_gguf_with_both(self, tmp_path: Path) -> None:
        path = save_t0_gguf(
            tmp_path / "t0.gguf", rope_freqs=FREQ_FACTORS, rope_scaling={"type": "linear", "factor": 4.0}
        )
        linear = t0_config(rope_scaling={"type": "linear", "factor": 4.0})
        self.check(self.last_logprobs(path), self.reference(linear, FREQ_FACTORS))

    @pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 4.0}], ids=["llama3", "linear"])
    def test_hugging_face(self, tmp_path: Path, scaling: dict[str, Any]) -> None:
        config = t0_config(rope_scaling=scaling)
        self.check(self.last_logprobs(save_t0(tmp_path, config=config)), self.reference(config))

    def test_an_unknown_type_is_refused_by_name(self, tmp_path: Path) -> None:
        gguf = save_t0_gguf(tmp_path / "t0.gguf", rope_scaling={"type": "magic", "factor": 4.0})
        hugging_face = save_t0(tmp_path / "t0", config=t0_config(rope_scaling={"rope_type": "magic", "factor": 4.0}))
        for path in (gguf, hugging_face):
            message = refusal(path)
            assert str(path) in message
            assert "'magic'" in message
            assert "linear" in message  # and what is supported

    def test_factors_of_another_length_are_refused(self, tmp_path: Path) -> None:
        assert "8" in refusal(save_t0_gguf(tmp_path / "t0.gguf", rope_freqs=[1.0] * 7))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_and_safetensors_agree(arch: str, tmp_path: Path) -> None:
    # Query and key rows lie in another order in GGUF files of Llama models, and of no others.
    config = t0_config() if arch == "llama" else t0_qwen2_config()
    prompts = [random_ids(length) for length in range(5, 61, 6)]
    assert len(prompts) == 10
    gguf = logits(save_t0_gguf(tmp_path / "t0.gguf", arch=arch), *prompts)
    hugging_face = logits(save_t0(tmp_path / "t0", config=config), *prompts)
    for prompt, a, b in zip(prompts, gguf, hugging_face, strict=True):
        truth = t0_numpy_logits(t0_weights(config=config), config, prompt)
        assert np.abs(a - truth).max() < CLOSE
        assert np.abs(b - truth).max() < CLOSE


class TestShards:
    """Three shards and their index."""

    SECOND = "model-00002-of-00003.safetensors"

    @pytest.fixture
    @staticmethod
    def sharded(tmp_path: Path) -> Path:
        return save_t0(tmp_path / "t0", shards=3)

    def right(self, path: Path) -> None:
        ids = random_ids(30)
        (ours,) = logits(path, ids)
        assert np.abs(ours - t0_numpy_logits(t0_weights(), t0_config(), ids)).max() < CLOSE

    def test_as_they_should_be(self, sharded: Path) -> None:
        self.right(sharded)

    def test_one_is_missing(self, sharded: Path) -> None:
        (sharded / self.SECOND).unlink()
        assert self.SECOND in refusal(sharded)

    def test_its_entries_are_missing(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        lost = [name for name, file in content["weight_map"].items() if file == self.SECOND]
        content["weight_map"] = {name: file for name, file in content["weight_map"].items() if name not in lost}
        index.write_text(json.dumps(content))
        message = refusal(sharded)
        assert "missing" in message
        assert any(name in message for name in lost)

    def test_an_old_single_file_lies_beside_them(
        self, sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        old = {name: -value for name, value in t0_weights().items()}
        shutil.copy(save_t0(tmp_path / "old", weights=old) / "model.safetensors", sharded)
        self.right(sharded)
        assert "model.safetensors" in caplog.text

    def test_one_is_a_pointer_of_git_lfs(self, sharded: Path) -> None:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
        (sharded / self.SECOND).write_text(pointer)
        message = refusal(sharded)
        assert self.SECOND in message
        assert "not a safetensors file" in message


class TestTensorsThatDoNotFit:
    def test_more_layers_in_the_config(self, tmp_path: Path) -> None:
        path = save_t0(tmp_path, config=t0_config(num_hidden_layers=3), weights=t0_weights())
        message = refusal(path)
        assert "model.layers.2.self_attn.q_proj.weight must be [64, 64], is missing" in message
        assert "model.layers.2.mlp.down_proj.weight must be [64, 128], is missing" in message

    def test_no_final_norm(self, tmp_path: Path) -> None:
        weights = t0_weights()
        del weights["model.norm.weight"]
        assert "model.norm.weight must be [64], is missing" in refusal(save_t0(tmp_path, weights=weights))

    def test_another_shape(self, tmp_path: Path) -> None:
        weights = t0_weights()
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name][:, :127])
        assert f"{name} must be [64, 128], is [64, 127]" in refusal(save_t0(tmp_path, weights=weights))

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        path = save_t0(tmp_path, config=t0_config(vocab_size=300), weights=t0_weights())
        message = refusal(path)
        assert "model.embed_tokens.weight must be [300, 64], is [259, 64]" in message
        assert "lm_head.weight must be [300, 64], is [259, 64]" in message

    def test_the_same_in_gguf(self, tmp_path: Path) -> None:
        weights = t0_weights()
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name][:, :64])
        del weights["model.norm.weight"]
        message = refusal(save_t0_gguf(tmp_path / "t0.gguf", weights=weights))
        assert f"{name} must be [64, 128], is [64, 64]" in message
        assert "model.norm.weight must be [64], is missing" in message

    def test_one_too_many_is_ignored_with_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        weights = t0_weights() | {"model.layers.7.foo": np.ones((3, 5), np.float32)}
        ids = random_ids(20)
        with caplog.at_level(logging.WARNING):
            (ours,) = logits(save_t0(tmp_path, weights=weights), ids)
        assert "model.layers.7.foo" in caplog.text
        assert np.abs(ours - t0_numpy_logits(t0_weights(), t0_config(), ids)).max() < CLOSE


class TestMixedTypes:
    """Each tensor is converted by its value, whatever the types of the others are."""

    IDS = random_ids(40)

    @staticmethod
    def mixed(name: str) -> torch.dtype:
        if "self_attn" in name:
            return torch.bfloat16
        return torch.float16 if "mlp" in name else torch.float32

    @pytest.mark.parametrize("kind", ["mixed", "float64", "bfloat16", "float16"])
    def test_logits_are_those_of_the_rounded_weights(
        self, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        stored = {
            name: torch.from_numpy(value).to(self.mixed(name) if kind == "mixed" else getattr(torch, kind))
            for name, value in t0_weights().items()
        }
        unused = torch.arange(8, dtype=torch.int64)
        path = save_t0(tmp_path, weights=stored | {"rotary.inv_freq": unused})  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING):
            (ours,) = DecoderRunner.load(path).logits([self.IDS])
        assert "rotary.inv_freq" in caplog.text
        rounded = {name: value.double().numpy() for name, value in stored.items()}
        truth = torch.from_numpy(t0_numpy_logits(rounded, t0_config(), self.IDS))
        assert relative_error(ours, truth) < 1e-5
        if kind in ("mixed", "bfloat16"):  # the rounding is there to be seen
            unrounded = torch.from_numpy(t0_numpy_logits(t0_weights(), t0_config(), self.IDS))
            assert relative_error(ours, unrounded) > 1e-4

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_computing_in_half_precision(self, dtype: str, tmp_path: Path) -> None:
        llm = t0_llm(save_t0(tmp_path), dtype=dtype)
        (output,) = llm.generate([self.IDS], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        truth = log_softmax(t0_numpy_logits(t0_weights(), t0_config(), self.IDS))
        reported = output.prompt_logprobs
        assert reported is not None
        values = np.array([r.logprob for r in reported[1:] if r is not None])
        wanted = truth[np.arange(len(self.IDS) - 1), self.IDS[1:]]
        assert len(values) == len(wanted)
        assert np.abs(values - wanted).max() < (0.2 if dtype == "bfloat16" else 0.03)
