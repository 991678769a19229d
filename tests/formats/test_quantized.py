"""GPTQ, AWQ and compressed-tensors checkpoints: every matrix and the whole model against NumPy, and the way back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
    pack_to_int32,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.errors import ModelError
from headrace.formats import awq, compressed_tensors, gptq
from headrace.formats.hf_checkpoint import HFCheckpoint
from headrace.formats.packing import pack, unpack, words_for
from helpers.quantized_files import awq_tensors, gptq_tensors, pack_rows, random_matrix, save_t0q
from helpers.tiny import save_t0, t0_config, t0_numpy_logits, t0_weights

IDS = list(b"What is a headrace?")
BITS = (2, 3, 4, 8)


def logprobs(path: Path, backend: str = "reference") -> list[float]:
    llm = LLM(str(path), max_model_len=64, kv_cache_memory=1 << 20, backend=backend, threads=1)
    out = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False)[0]
    return [entry.logprob for entry in out.prompt_logprobs[1:]]


def check_model(path: Path, values: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Each matrix has its values, and the model says what NumPy computes from them."""
    checkpoint = HFCheckpoint(path)
    for name, value in values.items():
        assert checkpoint.shapes()[name] == value.shape
        found = checkpoint.read(name).dequantize().numpy()
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-7, err_msg=name)
    logits = t0_numpy_logits(values, config, IDS)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs(path), [expected[i, IDS[i + 1]] for i in range(len(IDS) - 1)], atol=1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 5, 8, 31, 32, 33, 96, 129])
def test_packing_is_that_of_compressed_tensors(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.shape == (3, words_for(count, bits))
    assert torch.equal(words, pack_to_int32((codes.int() - 2 ** (bits - 1)).to(torch.int8), bits))
    np.testing.assert_array_equal(words.numpy(), pack_rows(codes.numpy(), bits))
    assert torch.equal(unpack(words, bits, count), codes)


# GPTQ


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False} | more


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", BITS)
def test_gptq_versions_and_bits(tmp_path: Path, version: str, bits: int) -> None:
    """Zeros of 0 and of the greatest code among them: stored as zero - 1 in the first version, wrapped around."""
    check_model(
        *save_t0q(
            tmp_path,
            gptq_config(bits, 32, checkpoint_format=version),
            lambda name, m: gptq_tensors(name, m, bits, version=version, g_idx=version == "gptq_v2"),
            bits=bits,
            group_size=32,
        )
    )


@pytest.mark.parametrize(
    ("order", "size", "bits"),
    [("permuted", 32, 4), ("permuted", 64, 3), ("monotone", 32, 4), ("monotone", -1, 4), ("monotone", -1, 8),
     ("monotone", 512, 4)],
)  # fmt: skip
def test_gptq_group_index(tmp_path: Path, order: str, size: int, bits: int) -> None:
    path, values, config = save_t0q(
        tmp_path,
        gptq_config(bits, size, desc_act=order == "permuted"),
        lambda name, m: gptq_tensors(name, m, bits, version="gptq", g_idx=True),
        bits=bits,
        group_size=size,
        order=order,
    )
    check_model(path, values, config)
    coded = HFCheckpoint(path).read("model.layers.0.mlp.down_proj.weight").integers()
    assert coded is not None
    assert (coded.order is not None) == (order == "permuted")


def test_gptq_symmetric_codes_are_signed_and_uneven_groups_are_dense(tmp_path: Path) -> None:
    def uneven(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.g_idx"][:3] = 3

    path, values, _ = save_t0q(
        tmp_path,
        gptq_config(4, 32, sym=True),
        lambda name, m: gptq_tensors(name, m, 4, version="gptq", g_idx=True),
        bits=4,
        group_size=32,
        symmetric=True,
        change=uneven,
    )
    checkpoint = HFCheckpoint(path)
    coded = checkpoint.read("model.layers.0.mlp.down_proj.weight").integers()
    assert coded is not None
    assert (coded.codes.dtype, coded.minimums) == (torch.int8, None)
    weight = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert weight.integers() is None
    assert weight.shape == values["model.layers.0.mlp.up_proj.weight"].shape


def test_quantize_config_of_older_files(tmp_path: Path) -> None:
    path, values, config = save_t0q(
        tmp_path,
        gptq_config(4, 32),
        lambda name, m: gptq_tensors(name, m, 4, version="gptq", g_idx=True),
        bits=4,
        group_size=32,
    )
    settings = json.loads((path / "config.json").read_text())
    old = settings.pop("quantization_config")
    del old["quant_method"]
    (path / "config.json").write_text(json.dumps(settings))
    (path / "quantize_config.json").write_text(json.dumps(old))
    check_model(path, values, config)


NAME = "model.layers.1.self_attn.k_proj"


def without_index(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.endswith("g_idx")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda t: t[f"{NAME}.g_idx"].__setitem__(5, 99), {}, rf"{NAME}\.g_idx.*outside of 0 to 3"),
        (lambda t: t[f"{NAME}.g_idx"].__setitem__(5, -1), {}, rf"{NAME}\.g_idx.*outside of 0 to 3"),
        (lambda t: t.pop(f"{NAME}.scales"), {}, rf"{NAME}\.scales.*missing"),
        (lambda t: t[f"{NAME}.scales"].__setitem__((0, 0), torch.nan), {}, rf"{NAME}\.scales.*NaN"),
        (lambda t: t.update({f"{NAME}.qzeros": t[f"{NAME}.qzeros"][:, 1:].clone()}), {}, rf"{NAME}\.qzeros.*must be"),
        (lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"][1:].clone()}), {}, rf"{NAME}\.qweight.*bits"),
        (without_index, {"desc_act": True}, "desc_act is true.*no g_idx"),
        (without_index, {"group_size": 64}, "has 8 groups.*make 4"),
        (None, {"checkpoint_format": "marlin"}, "marlin"),
        (None, {"bits": 5}, "5 bits"),
        (None, {"bits": "4"}, "'bits' must be an integer"),
        (None, {"group_size": 0}, "group_size"),
        (None, {"quant_method": "bitsandbytes"}, "bitsandbytes.*quantization='int8'"),
        (None, {"quant_method": "hqq"}, "'hqq' is not supported: known are gptq, awq, compressed-tensors"),
        (None, {"quant_method": None}, "unknown method"),
    ],
)  # fmt: skip
def test_faulty_gptq_files(tmp_path: Path, change: Any, settings: dict[str, Any], words: str) -> None:
    path, _, _ = save_t0q(
        tmp_path,
        gptq_config(4, 32) | settings,
        lambda name, m: gptq_tensors(name, m, 4, version="gptq", g_idx=True),
        bits=4,
        group_size=32,
        change=change,
    )
    with pytest.raises(ModelError, match=words):
        LLM(str(path), max_model_len=64, kv_cache_memory=1 << 20, backend="reference")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("order", "size"), [("monotone", 32), ("permuted", 32), ("monotone", -1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_goes_round(tmp_path: Path, bits: int, version: str, order: str, size: int, symmetric: bool) -> None:
    matrix = random_matrix(64, 96, bits, size, seed=0, symmetric=symmetric, order=order)
    stored = gptq_tensors("m", matrix, bits, version=version, g_idx=True)
    path = save_t0(
        tmp_path, weights=stored, config={"quantization_config": gptq_config(bits, size, checkpoint_format=version)}
    )
    coded = HFCheckpoint(path).read("m.weight").integers()
    assert coded is not None
    again = gptq.to_tensors(coded, torch.float16, version)
    assert {f"m.{key}" for key in again} == set(stored)
    for key, value in again.items():
        assert torch.equal(value, stored[f"m.{key}"]), key


# AWQ


@pytest.mark.parametrize(("size", "keys"), [(32, ("bits", "group_size")), (-1, ("w_bit", "q_group_size"))])
def test_awq(tmp_path: Path, size: int, keys: tuple[str, str]) -> None:
    settings = {"quant_method": "awq", keys[0]: 4, keys[1]: size, "version": "GEMM", "zero_point": True}
    path, values, config = save_t0q(tmp_path, settings, awq_tensors, bits=4, group_size=size)
    check_model(path, values, config)
    stored, checkpoint = load_file(path / "model.safetensors"), HFCheckpoint(path)
    for name in (n.removesuffix(".weight") for n in values if "_proj" in n):
        coded = checkpoint.read(f"{name}.weight").integers()
        assert coded is not None
        for key, value in awq.to_tensors(coded, torch.float16).items():
            assert torch.equal(value, stored[f"{name}.{key}"]), key


@pytest.mark.parametrize(
    ("settings", "words"), [({"version": "gemv"}, "version 'gemv'"), ({"bits": 8}, "8 bits are not supported here; 4")]
)
def test_awq_versions_that_are_not_read(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"} | settings
    path, _, _ = save_t0q(tmp_path, config, awq_tensors, bits=4, group_size=32)
    with pytest.raises(ModelError, match=words):
        HFCheckpoint(path)


# compressed-tensors: stored and read back by the library itself


def ct_config(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def library_args(weights: dict[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, -1])
def test_pack_quantized(tmp_path: Path, bits: int, symmetric: bool, size: int) -> None:
    m = random_matrix(64, 96, bits, size, seed=0, symmetric=symmetric)
    half = 2 ** (bits - 1)
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel" if size == -1 else "group"}
    weights["group_size"] = None if size == -1 else size
    state = {
        "weight": torch.from_numpy(m.values).float(),
        "weight_scale": torch.from_numpy(m.scales).float(),
        "weight_zero_point": torch.from_numpy(m.zeros - half).to(torch.int8),
    }
    stored = PackedQuantizationCompressor.compress(state, library_args(weights))
    stored = {key: value.contiguous() for key, value in stored.items()}
    path = save_t0(
        tmp_path,
        weights={f"m.{key}": value for key, value in stored.items()},
        config={"quantization_config": ct_config("pack-quantized", weights)},
    )
    weight = HFCheckpoint(path).read("m.weight")
    np.testing.assert_allclose(weight.dequantize().numpy(), m.values, rtol=1e-6, atol=1e-7)
    library = PackedQuantizationCompressor.decompress(dict(stored), library_args(weights))["weight"]
    assert torch.equal(weight.dequantize(), library.float())
    coded = weight.integers()
    assert coded is not None
    again = compressed_tensors.to_tensors(coded, torch.float32, packed=True)
    assert set(again) == set(stored)
    for key, value in again.items():
        assert torch.equal(value, stored[key]), key


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_one_byte_for_each_value(tmp_path: Path, strategy: str, kind: str) -> None:
    compressor = IntQuantizationCompressor if kind == "int" else FloatQuantizationCompressor
    weight = torch.randn(64, 96)
    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    state = {"weight": weight, "weight_scale": largest / (127 if kind == "int" else 448)}
    stored = compressor.compress(state, library_args(weights))
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    path = save_t0(
        tmp_path,
        weights={f"m.{key}": value for key, value in stored.items()},
        config={"quantization_config": ct_config(f"{kind}-quantized", weights, activations)},
    )
    read = HFCheckpoint(path).read("m.weight")
    assert torch.equal(read.dequantize(), compressor.decompress(dict(stored), library_args(weights))["weight"].float())
    assert read.activation_bits == (8 if kind == "int" else None)
    if kind == "int":
        coded = read.integers()
        assert coded is not None
        again = compressed_tensors.to_tensors(coded, torch.float32, packed=False)
        assert torch.equal(again["weight"], stored["weight"])


def test_a_group_may_name_its_modules(tmp_path: Path) -> None:
    """Bits by module: a name, a pattern, and the class for the rest."""
    matrices = {name: random_matrix(64, 96, bits, 32, seed=bits) for name, bits in (("a", 4), ("x.b", 8), ("c", 3))}
    tensors = {}
    for (name, m), bits in zip(matrices.items(), (4, 8, 3), strict=True):
        tensors |= {
            f"{name}.weight_packed": torch.from_numpy(pack_rows(m.codes, bits)),
            f"{name}.weight_zero_point": torch.from_numpy(np.ascontiguousarray(pack_rows(m.zeros.T, bits).T)),
            f"{name}.weight_scale": torch.from_numpy(m.scales),
            f"{name}.weight_shape": torch.tensor([64, 96]),
        }

    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": 32}
        return {"targets": [target], "weights": weights}

    config = ct_config("pack-quantized", {})
    config["config_groups"] = {"0": group("Linear", 4), "1": group("re:.*b$", 8), "2": group("c", 3)}
    path = save_t0(tmp_path, weights=tensors, config={"quantization_config": config})
    for name, m in matrices.items():
        values = HFCheckpoint(path).read(f"{name}.weight").dequantize().numpy()
        np.testing.assert_allclose(values, m.values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("change", [None, "ignore v"])
def test_w8a8_model(tmp_path: Path, change: str | None) -> None:
    """Activations rounded per token in NumPy, exactly as in the engine; q and k may be quantized while v is not."""
    weights, config = t0_weights(), t0_config()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if "_proj" not in name or (change and "v_proj" in name):
            tensors[name] = torch.from_numpy(value)
            continue
        scale = np.abs(value).max(1, keepdims=True) / np.float32(127)
        codes = np.rint(value / scale).astype(np.int8)
        tensors |= {name: torch.from_numpy(codes), name + "_scale": torch.from_numpy(scale)}
        weights[name] = codes.astype(np.float64) * scale
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"] = ct_config(
        "int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}, activations
    )
    path = save_t0(tmp_path, weights=tensors, config=config)

    quantized = {name.removesuffix(".weight") for name in tensors if f"{name}_scale" in tensors}
    plain, rounded = (forward(weights, config, IDS, names) for names in (set(), quantized))
    found = np.array(logprobs(path))
    np.testing.assert_allclose(found, rounded, atol=0.03)
    assert np.abs(found - rounded).mean() < 0.2 * np.abs(found - plain).mean()
    np.testing.assert_allclose(logprobs(path, "cpu"), found, atol=0.03)


def forward(weights: dict[str, np.ndarray], config: dict[str, Any], ids: list[int], rounded: set[str]) -> np.ndarray:
    """The logprobs of the prompt by the NumPy reference, with the inputs of some layers rounded to int8."""

    logits = t0_numpy_logits(weights, config, ids, rounded=rounded)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([expected[i, ids[i + 1]] for i in range(len(ids) - 1)])
