"""What we write, read by GPTQModel's own layers, where that library installs (it is no dependency of the tests)."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.formats.open import open_checkpoint
from headrace.quantize.calibration import samples
from headrace.quantize.quantizer import Quantizer
from headrace.quantize.settings import QuantizeSettings
from helpers.quantized_files import t0q_config
from helpers.tiny import save_t0, t0_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    awq_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq")
    convert = pytest.importorskip("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = Path(__file__).parents[2] / "README.md"


def quantized(tmp_path: Path, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    config = t0q_config()
    source = open_checkpoint(str(save_t0(tmp_path / "in", config=config, weights=t0_weights(config=config))))
    plan = QuantizeSettings(dataset=str(TEXT), samples=8, seq_len=64, **settings).plan()
    data = samples(source.tokenizer(), str(TEXT), count=8, length=64, seed=0, max_length=512)
    Quantizer(source, tmp_path / "out", plan).run(data)
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(file)
    return open_checkpoint(str(tmp_path / "out")), stored


def filled(layer: Any, stored: dict[str, torch.Tensor], name: str, parts: tuple[str, ...]) -> Any:
    for part in parts:
        buffer = getattr(layer, part)
        assert buffer.shape == stored[f"{name}.{part}"].shape, part
        buffer.copy_(stored[f"{name}.{part}"])
    return layer


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("size", "desc_act"), [(32, False), (32, True), (-1, False)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(tmp_path: Path, bits: int, size: int, desc_act: bool, symmetric: bool) -> None:
    checkpoint, stored = quantized(
        tmp_path, method="gptq", bits=bits, group_size=size, desc_act=desc_act, symmetric=symmetric
    )
    version = checkpoint.config["quantization_config"]["checkpoint_format"]
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        rows, columns = checkpoint.shapes()[f"{name}.weight"]
        layer = torch_linear.TorchLinear(
            bits=bits, group_size=size, sym=symmetric, desc_act=desc_act, in_features=columns, out_features=rows
        )
        filled(layer, stored, name, ("qweight", "qzeros", "scales", "g_idx"))
        if version == "gptq":
            convert(layer, bits=bits, pack_dtype=torch.int32)
        values = layer.eval().dequantize_weight().T.float()
        # It computes in float16.
        torch.testing.assert_close(values, checkpoint.read(f"{name}.weight").dequantize(), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("size", [32, -1])
def test_awq(tmp_path: Path, size: int) -> None:
    checkpoint, stored = quantized(tmp_path, method="awq", group_size=size)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        rows, columns = checkpoint.shapes()[f"{name}.weight"]
        layer = awq_linear.AwqTorchLinear(
            bits=4, group_size=size, sym=False, desc_act=False, in_features=columns, out_features=rows,
            bias=False, register_buffers=True,
        )  # fmt: skip
        filled(layer, stored, name, ("qweight", "qzeros", "scales"))
        x = torch.randn(5, columns, dtype=torch.float16)
        expected = x.float() @ checkpoint.read(f"{name}.weight").dequantize().T
        with torch.inference_mode():
            torch.testing.assert_close(layer.eval()(x).float(), expected, rtol=1e-2, atol=1e-2)
