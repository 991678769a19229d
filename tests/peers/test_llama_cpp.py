"""GGUF files that we write, run by llama.cpp, where llama-cpp-python installs (it is no dependency of the tests)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.formats.open import open_checkpoint
from headrace.quantize.gguf import quantize_gguf
from helpers.families import FAMILIES, SIZES, save_family, transformers_logits, transformers_model
from helpers.model_files import smollm2
from helpers.tokenizer_zoo import ZOO, save

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [3, 200, 7, 7, 41, 90, 12, 250, 0, 66, 31, 5]


def llama_cpp_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Logits `[len(ids), vocab]` of llama.cpp."""
    llama = llama_cpp.Llama(str(path), n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=1)
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)], np.float32)
    llama.close()
    return logits


def gemma3() -> transformers.PreTrainedConfig:
    own = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
    return transformers.Gemma3TextConfig(**(SIZES | own))


@pytest.mark.parametrize(
    "family", ["llama-gqa", "llama3", "llama-linear", "llama-yarn", "smollm2", "mistral", "qwen2", "qwen3", "gemma3"]
)
def test_models_of_every_family(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gemma3", gemma3)
    monkeypatch.setitem(SIZES, "vocab_size", 1500)
    model = transformers_model(save_family(tmp_path / "in", family, seed=0))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    save(tmp_path / "in", ZOO["gpt2"]())  # llama.cpp takes no byte-level vocabulary without merges
    path, _ = quantize_gguf(open_checkpoint(str(tmp_path / "in")), tmp_path / "out", "BF16")
    truth = transformers_logits(transformers_model(tmp_path / "in"), IDS).numpy()
    found = llama_cpp_logits(path, IDS)
    # llama.cpp rounds keys, values and activations to 16 bits here and there.
    assert np.abs(found - truth).max() < 0.02 * np.abs(truth).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_block_types_on_smollm2(tmp_path: Path, kind: str) -> None:
    source = open_checkpoint(str(smollm2()))
    ids = source.tokenizer().encode("The mill stands where the river falls, and")
    path, _ = quantize_gguf(source, tmp_path / "out", kind, ignore=("*.mlp.*",) if kind == "Q4_0" else ())
    before, after = (llama_cpp_logits(p, ids) for p in (smollm2(), path))
    agree = (before.argmax(-1) == after.argmax(-1)).mean()
    assert agree > 0.8
    assert np.abs(before - after).mean() < 0.5
