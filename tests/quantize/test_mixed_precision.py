"""Bits by layer: sensitivities against transformers, the choice against trying everything, and whole models."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.special import rel_entr

from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from headrace.models.loader import DecoderReader
from headrace.ops.reference import Ops
from headrace.quantize import sensitivity
from headrace.quantize.layer_run import STAGES, LayerRun, Overlay
from headrace.quantize.quantizer import REPORT, Quantizer
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import Scheme
from headrace.quantize.sensitivity import choose, levels, sensitivities
from headrace.quantize.settings import QuantizeSettings
from helpers.families import save_family, transformers_model

SAMPLES = [list(range(20, 60)), list(range(100, 130))]


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3-softcap"])
def test_sensitivities(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL divergence of transformers' distributions when a layer's weights are replaced by rounded ones."""
    monkeypatch.setattr(sensitivity, "TOKENS", 50)  # all of the first sample, ten of the second
    model = transformers_model(save_family(tmp_path, family, seed=0))
    weights = Overlay(open_checkpoint(str(tmp_path)))
    reader = DecoderReader(weights, Ops(), torch.float32)

    def matrices(i: int) -> list[str]:
        return [f"model.layers.{i}.{m}.weight" for stage in STAGES for m in stage if "v_proj" not in m]

    scheme = Scheme(bits=4, group_size=-1)
    found = sensitivities(LayerRun(reader, SAMPLES), weights, matrices, scheme, [3, 8])
    assert not weights.changed

    def logprobs() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [
                model(torch.tensor([ids])).logits[0].double().log_softmax(-1) for ids in (SAMPLES[0], SAMPLES[1][:10])
            ]

    exact, state = logprobs(), {name: value.clone() for name, value in model.state_dict().items()}
    assert set(found) == set(range(reader.config.num_layers))
    for i, bits in itertools.product(found, (3, 8)):
        changed = dict(state)
        for name in matrices(i):
            changed[name] = round_to_nearest(state[name], Scheme(bits=bits), scale_dtype=torch.float16).dequantize()
        model.load_state_dict(changed)
        kl = [rel_entr(p.exp().numpy(), q.exp().numpy()).sum() for p, q in zip(exact, logprobs(), strict=True)]
        assert found[i][bits] == pytest.approx(sum(kl) / 50, rel=0.02, abs=1e-6)


def test_choice_is_near_the_best_there_is() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        found = {i: {3: (a := rng.lognormal(0, 1.5)), 4: a * 0.2, 8: a * 0.001} for i in range(5)}
        sizes = {i: int(rng.choice([100, 300])) for i in range(5)}
        for target in (3, 3.5, 4.5, 6.0, 8):
            chosen = choose(found, sizes, target)
            spent = sum(sizes[i] * b for i, b in chosen.items())
            assert spent <= target * sum(sizes.values())
            got = sum(found[i][b] for i, b in chosen.items())
            best = min(
                sum(found[i][b] for i, b in enumerate(each))
                for each in itertools.product((3, 4, 8), repeat=5)
                if sum(sizes[i] * b for i, b in enumerate(each)) <= target * sum(sizes.values())
            )
            worst = sum(by_bits[3] for by_bits in found.values())
            assert got - best <= 0.25 * (worst - best) + 1e-9


def test_levels() -> None:
    assert [levels(t) for t in (2, 2.9, 3.5, 4.5, 8)] == [[2, 3, 4, 8], [2, 3, 4, 8], [3, 4, 8], [4, 8], [8]]


@pytest.mark.parametrize(("method", "form"), [("gptq", "gptq"), ("awq", "compressed-tensors")])
def test_whole_models(tmp_path: Path, method: str, form: str) -> None:
    save_family(tmp_path / "in", "llama-gqa", seed=0)
    plan = QuantizeSettings(method=method, target_bits=5.5, group_size=32, symmetric=True, dataset="given").plan()
    assert plan.format == form
    source = open_checkpoint(str(tmp_path / "in"))
    reports = Quantizer(source, tmp_path / "out", plan).run(SAMPLES * 4)
    assert {r.bits for r in reports} == {4, 8}
    shapes = source.shapes()
    sizes = {r.name: shapes[r.name][0] * shapes[r.name][1] for r in reports}
    assert sum(r.bits * sizes[r.name] for r in reports) <= 5.5 * sum(sizes.values())
    by_layer = {r.name.split(".")[2]: r.bits for r in reports}
    assert len(by_layer) == 3
    measured = json.loads((tmp_path / "out" / REPORT).read_text())["sensitivity"]
    assert min(by_layer, key=lambda i: -measured[i]["4"]) in [i for i, bits in by_layer.items() if bits == 8]
    out = open_checkpoint(str(tmp_path / "out"))
    for r in reports:
        coded = out.read(r.name).integers()
        assert coded is not None
        assert coded.bits == r.bits
    if form == "compressed-tensors":  # transformers reads the same from it
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        model(torch.tensor(SAMPLES[:1]))  # it decodes weights when they are first used
        name = "model.layers.2.mlp.down_proj.weight"
        torch.testing.assert_close(model.state_dict()[name], out.read(name).dequantize(), rtol=1e-6, atol=1e-8)


def test_settings() -> None:
    for settings, words in (
        ({"target_bits": 4.5, "bits": 4}, "exclude each other"),
        ({"target_bits": 1.5}, "from 2 to 8"),
        ({"target_bits": 4.5, "method": "awq", "format": "awq"}, "awq format"),
        ({"target_bits": 4.5, "method": "int4", "dataset": None}, "means nothing for int4"),
    ):
        with pytest.raises(ConfigError, match=words):
            QuantizeSettings(**({"method": "gptq", "dataset": "x"} | settings)).plan()
