"""Perplexity and divergence against transformers and scipy, on the tiny model."""

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.special import rel_entr

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.evals.metrics import divergence, perplexity, summarize, wilson
from headrace.evals.scoring import TextModel, windows
from helpers.families import save_family, transformers_model
from helpers.tiny import save_t0, t0_weights

IDS = [i * 7 % 200 for i in range(150)]


def model(path: Path, **settings: object) -> TextModel:
    given = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 24, "backend": "reference", "threads": 1}
    return TextModel(EngineConfig(model=str(path), **(given | settings)))


def transformers_logprobs(path: Path, window: int, stride: int) -> tuple[torch.Tensor, list[int]]:
    """The distribution of each scored token, float64, by the loop in transformers' documentation; and the tokens."""
    reference = transformers_model(path)
    rows, targets, previous_end = [], [], 0
    for begin in range(0, len(IDS), stride):
        end = min(begin + window, len(IDS))
        with torch.inference_mode():
            logits = reference(torch.tensor([IDS[begin:end]])).logits[0].double()
        fresh = range(max(previous_end, begin + 1), end)
        rows += [logits[i - begin - 1].log_softmax(-1) for i in fresh]
        targets += [IDS[i] for i in fresh]
        previous_end = end
        if end == len(IDS):
            break
    return torch.stack(rows), targets


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (64, 32), (64, 1), (50, 7), (2, 1), (64, 63)])
def test_perplexity_as_transformers_documents_it(tmp_path: Path, window: int, stride: int) -> None:
    path = save_family(tmp_path, "llama-gqa", seed=0)
    rows, targets = transformers_logprobs(path, window, stride)
    losses = -rows[torch.arange(len(targets)), targets].numpy()
    found = perplexity(model(path), IDS, window, stride)
    # With a stride as long as the window the first token of each has nothing before it, and is not scored.
    assert found.tokens == len(losses)
    assert found.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-4)
    low, high = scipy.stats.norm.interval(0.95, losses.mean(), scipy.stats.sem(losses))
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)), rel=1e-4)


def test_divergence(tmp_path: Path) -> None:
    path, other = tmp_path / "p", tmp_path / "q"
    save_family(path, "llama-gqa", seed=0)
    save_family(other, "llama-gqa", seed=0)
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights = {k: v * 1.1 if "down" in k else v for k, v in weights.items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    p, targets = transformers_logprobs(path, 64, 32)
    q, _ = transformers_logprobs(other, 64, 32)
    kl = rel_entr(p.exp().numpy(), q.exp().numpy()).sum(-1)
    found = divergence(model(other), model(path), IDS, 64, 32)
    assert found.tokens == len(targets)
    assert found.kl == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_high - found.kl == pytest.approx(1.959964 * scipy.stats.sem(kl), rel=1e-3)
    for percent, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(kl, float(percent)), rel=1e-2, abs=1e-7), percent
    assert found.largest == pytest.approx(kl.max(), rel=1e-3)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert found.same_top == pytest.approx(float(same), abs=0.02)
    assert found.reference.nll == pytest.approx(-float(p[torch.arange(len(targets)), targets].mean()), rel=1e-4)
    assert found.model.nll == pytest.approx(-float(q[torch.arange(len(targets)), targets].mean()), rel=1e-4)


def test_a_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    path = save_t0(tmp_path)
    found = divergence(model(path), model(path), IDS, 64, 32)
    assert (found.kl, found.largest, found.same_top) == (0, 0, 1)
    coded = divergence(model(path, quantization="int8"), model(path), IDS, 64, 32)
    assert 0 < coded.kl < 0.05


@pytest.mark.parametrize("count", [1, 2, 10, 500])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_interval_of_a_share(count: int, share: float) -> None:
    hits = round(share * count)
    expected = scipy.stats.binomtest(hits, count).proportion_ci(0.95, "wilson")
    assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize("length", [2, 3, 10, 64, 65])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (2, 2), (3, 1), (3, 2), (10, 9), (10, 2), (64, 9), (64, 64)])
def test_windows_score_each_token_once(length: int, size: int, stride: int) -> None:
    found = windows(length, size, stride)
    scored = [i for w in found for i in range(w.first, w.end)]
    assert len(set(scored)) == len(scored)
    missing = set(range(1, length)) - set(scored)
    assert not missing or stride == size
    for w in found:
        assert w.start < w.first < w.end <= w.start + size


def test_one_token_and_infinite_loss() -> None:
    assert summarize(torch.tensor([2.0], dtype=torch.float64)).high == np.inf
    assert summarize(torch.tensor([1e4, 1e4], dtype=torch.float64)).perplexity == np.inf


def test_models_that_cannot_be_compared(tmp_path: Path) -> None:
    from helpers.tiny import t0_config

    path = save_t0(tmp_path / "a")
    config = t0_config(vocab_size=300)
    other = save_t0(tmp_path / "b", config=config, weights=t0_weights(config=config))
    with pytest.raises(ConfigError, match="vocabularies of 300 and 259"):
        divergence(model(other), model(path), IDS, 64, 32)
    with pytest.raises(ConfigError, match="has 1 tokens"):
        model(path).encode("x")
