"""Layers run one at a time, and scales moved about in them, against transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.formats.open import open_checkpoint
from headrace.models.loader import DecoderReader
from headrace.ops.reference import Ops
from headrace.quantize.folding import Folding
from headrace.quantize.layer_run import STAGES, LayerRun, Overlay, statistics
from helpers.families import save_family, transformers_model

FAMILIES = ["llama2", "llama-gqa", "llama-mqa", "llama-head-dim", "llama-biases", "mistral-window", "qwen2", "qwen3",
            "qwen3-bias", "gemma3", "smollm2"]  # fmt: skip
SAMPLES = [list(range(30, 54)), list(range(100, 107)), [5]]


def opened(path: Path) -> tuple[Overlay, DecoderReader]:
    weights = Overlay(open_checkpoint(str(path)))
    return weights, DecoderReader(weights, Ops(), torch.float32)


@torch.inference_mode()
def run_all(reader: DecoderReader) -> list[torch.Tensor]:
    run = LayerRun(reader, SAMPLES)
    for i in range(reader.config.num_layers):
        run.pass_layer(reader.layer(i))
    norm = reader.norm()
    return [norm(x) for x in run.hidden]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = transformers_model(save_family(tmp_path, family, seed=0))
    _, reader = opened(tmp_path)
    with torch.inference_mode():
        for ids, found in zip(SAMPLES, run_all(reader), strict=True):
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_what_the_matrices_are_given(tmp_path: Path, family: str) -> None:
    """The inputs of every linear layer, as transformers' hooks see them; and the figures made of them, by NumPy."""
    model = transformers_model(save_family(tmp_path, family, seed=0))
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, y, name=name: seen.setdefault(name, []).append(x[0][0]))
    _, reader = opened(tmp_path)
    with torch.inference_mode():
        for ids in SAMPLES:
            model(torch.tensor([ids]))
        run = LayerRun(reader, SAMPLES)
        for i in range(reader.config.num_layers):
            layer = reader.layer(i)
            for stage, names in enumerate(STAGES):
                stats = statistics(run.inputs(layer, stage), run.num_tokens)
                run.pass_stage(layer, stage)
                for name in names:
                    x = torch.cat(seen[f"model.layers.{i}.{name}"]).numpy().astype(np.float64)
                    np.testing.assert_allclose(stats.hessian.numpy(), x.T @ x, rtol=1e-3, atol=1e-3)
                    np.testing.assert_allclose(stats.mean_abs.numpy(), np.abs(x).mean(0), rtol=1e-3, atol=1e-5)
                    np.testing.assert_allclose(stats.max_abs.numpy(), np.abs(x).max(0), rtol=1e-3, atol=1e-5)
                    np.testing.assert_allclose(stats.sample.numpy(), x, rtol=1e-3, atol=1e-3)  # so few: all rows


def test_hessian_of_many_columns_and_an_even_sample() -> None:
    pieces = [torch.randn(500, 2500) for _ in range(3)]
    stats = statistics(iter(pieces), 1500)
    x = torch.cat(pieces)
    torch.testing.assert_close(stats.hessian, x.T @ x, rtol=1e-3, atol=1e-2)
    assert torch.equal(stats.sample, x[::2][:512])
    assert stats.count == 1500


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_changes_nothing(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Scales from 0.1 to 10 on all stages of all layers: the logits are those of transformers for the untouched model.

    With norms stored in bfloat16 too: what their rounding changes is made up for in the scales.
    """
    transformers_model(save_family(tmp_path, family, seed=0)).to(dtype).save_pretrained(tmp_path)
    model = transformers_model(tmp_path)
    weights, reader = opened(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for i in range(reader.config.num_layers):
        folding = Folding(weights, reader.config, i)
        for stage in reversed(range(len(STAGES))):
            per_input = folding.shared(stage, torch.ones(folding.joined(stage).shape[1]))
            scales = 10 ** (2 * torch.rand(per_input.shape, generator=generator) - 1)
            before = folding.joined(stage)
            each = folding.fold(stage, scales)
            torch.testing.assert_close(folding.joined(stage), before * each, rtol=1e-6, atol=0)
            torch.testing.assert_close(each, folding.spread(stage, scales), rtol=0.03, atol=0)
    norms = [v for name, v in weights.changed.items() if "norm" in name]
    assert len(norms) == 2 * reader.config.num_layers
    assert all(norm.data.dtype == dtype for norm in norms)
    with torch.inference_mode():
        for ids, found in zip(SAMPLES, run_all(reader), strict=True):
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_norm_weights_of_zero_stay(tmp_path: Path) -> None:
    save_family(tmp_path, "llama2", seed=0)
    weights, reader = opened(tmp_path)
    name = "model.layers.0.input_layernorm.weight"
    norm = weights.values(name)
    norm[3] = 0
    weights.replace(name, norm)
    each = Folding(weights, reader.config, 0).fold(0, torch.full((64,), 2.0))
    assert each[3] == 1
    assert weights.values(name)[3] == 0
    assert (each[4:] == 2).all()
