"""GGUF files made of Hugging Face models: read by us and by transformers, they give the logits of the original."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer

from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from headrace.quantize.gguf import quantize_gguf
from helpers.awkward import CODE, EMOJI, SCRIPTS, WORDS
from helpers.decoding import DecoderRunner, relative_error
from helpers.families import FAMILIES, SIZES, save_family, transformers_logits, transformers_model
from helpers.tiny import save_t0, t0_config, t0_weights
from helpers.tokenizer_zoo import ZOO, save

IDS = [3, 200, 7, 7, 41, 90, 12, 250, 0, 66, 31, 5]


def gemma3() -> transformers.PreTrainedConfig:
    """Seven layers, so that one sees everything. Files do not tell the scale of scores: it is all models'."""
    own: dict[str, Any] = {"num_hidden_layers": 7, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 7}
    return transformers.Gemma3TextConfig(**(SIZES | own))


def qwen3() -> transformers.PreTrainedConfig:
    """With the head size of all models, as transformers looks for no other in a file."""
    return transformers.Qwen3Config(**(SIZES | {"head_dim": 128}))


def exact(directory: Path) -> None:
    """Rounds a checkpoint's weights so that they are what bfloat16 holds."""
    model = transformers_model(directory)
    model.to(torch.bfloat16).save_pretrained(directory)


@pytest.fixture(params=["llama-gqa", "llama-biases", "llama3", "llama-linear", "llama-yarn", "smollm2", "mistral",
                        "qwen2", "qwen2-tied", "qwen3", "gemma3"])  # fmt: skip
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(FAMILIES, "gemma3", gemma3)
    monkeypatch.setitem(FAMILIES, "qwen3", qwen3)
    name: str = request.param
    return name


def test_logits_are_those_of_the_original(tmp_path: Path, family: str) -> None:
    exact(save_family(tmp_path / "in", family, seed=0))
    truth = transformers_logits(transformers_model(tmp_path / "in"), IDS)
    path, counts = quantize_gguf(open_checkpoint(str(tmp_path / "in")), tmp_path / "out", "BF16")
    assert set(counts) == {"F32", "BF16"}
    (ours,) = DecoderRunner.load(path).logits([IDS])
    assert relative_error(ours, truth) < 1e-5
    if family in ("llama-gqa", "smollm2", "qwen2", "qwen2-tied", "qwen3", "gemma3"):  # what transformers reads of GGUF
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        assert relative_error(transformers_logits(theirs.eval(), IDS), truth) < 1e-5


def test_the_rest_of_a_model(tmp_path: Path) -> None:
    """Chat template, special tokens and the way around texts."""
    save_t0(tmp_path / "T0", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    source = open_checkpoint(str(tmp_path / "T0"))
    path, counts = quantize_gguf(source, tmp_path / "out", "Q8_0", ignore=("*.down_proj",))
    assert path.name == "T0-Q8_0.gguf"
    assert counts["F32"] == 5 + 2
    found = open_checkpoint(str(path))
    before, after = source.tokenizer(), found.tokenizer()
    assert after.chat_templates == before.chat_templates
    assert after.special_tokens == before.special_tokens
    assert after.special_ids == before.special_ids
    assert found.generation_config["eos_token_id"] == source.generation_config["eos_token_id"]
    for text in ("x", "</s> é\n", ""):
        assert after.encode(text) == before.encode(text)
    fields = GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.block_count"].contents() == 2


def with_tokenizer(directory: Path, tokenizer: Tokenizer) -> Path:
    config = t0_config(vocab_size=1500)
    save_t0(directory, config=config, weights=t0_weights(config=config))
    return save(directory, tokenizer)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "gemma"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    definition = json.loads(ZOO[name]().to_str())
    # Files do not tell in which form of the text the others are looked for, and with some of these it matters.
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["special"]]
    original = Tokenizer.from_str(json.dumps(definition))
    source = open_checkpoint(str(with_tokenizer(tmp_path / "in", original)))
    path, _ = quantize_gguf(source, tmp_path / "out", "F16")
    ours = open_checkpoint(str(path)).tokenizer()
    for text in [*CODE, *EMOJI, *SCRIPTS, *WORDS, "<|im_start|>user\nHi<|im_end|> x<tool> y", ""]:
        assert ours.encode(text) == original.encode(text).ids, text


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, "has no name") for name in ("byte_level", "llama2", "metaspace_first")] + [("unigram", "must be BPE")],
)
def test_tokenizers_that_a_file_cannot_tell(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quantize_gguf(open_checkpoint(str(with_tokenizer(tmp_path / "in", ZOO[name]()))), tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama-yarn-set", "YaRN scaling without truncation"),
        ("mistral-window", "sliding windows"),
        ("qwen3-window", "sliding windows"),
        ("gemma3", "windows in other layers"),
    ],
)
def test_models_that_a_file_cannot_tell(tmp_path: Path, family: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quantize_gguf(open_checkpoint(str(save_family(tmp_path / "in", family, seed=0))), tmp_path / "out", "F16")
