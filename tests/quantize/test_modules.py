"""QuantizedLinear alone and in other people's models."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from headrace.errors import ConfigError
from headrace.quantize import QuantizedLinear, Scheme, quantize_model


def test_int8_as_asked_for() -> None:
    weight, x = torch.randn(24, 40), torch.randn(2, 3, 40)
    layer = QuantizedLinear(40, 24)
    layer.quantize(weight)
    layer.bias.copy_(torch.randn(24))
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    assert torch.equal(layer.codes, codes.to(torch.int8))
    expected = x.double() @ (codes * scale).double().T + layer.bias
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(bits=8, activation_bits=8),
        Scheme(bits=4, group_size=16, activation_bits=8),
        Scheme(bits=4, group_size=16, symmetric=False, activation_bits=8),
    ],
)
def test_activations_rounded_to_int8(scheme: Scheme) -> None:
    weight, x = torch.randn(24, 40), torch.randn(7, 40)
    x[3] = 0
    layer = QuantizedLinear(40, 24, scheme, bias=False)
    layer.quantize(weight)
    rows = x.numpy().astype(np.float64)
    scale = np.maximum(np.abs(rows).max(1, keepdims=True), 1e-30) / 127
    expected = scale * np.rint(rows / scale) @ layer.weight().numpy().astype(np.float64).T
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_state_dict_goes_round() -> None:
    scheme = Scheme(bits=4, group_size=32, symmetric=False)
    one, two = (QuantizedLinear(40, 24, scheme) for _ in range(2))
    one.quantize(torch.randn(24, 40))
    two.load_state_dict(one.state_dict())
    x = torch.randn(5, 40)
    assert torch.equal(one(x), two(x))


def test_a_transformers_model_in_place() -> None:
    config = transformers.Qwen2Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(ids).logits
        names = quantize_model(model, Scheme(bits=8))
        after = model(ids).logits
    assert len(names) == 2 * 7
    assert "model.layers.1.mlp.down_proj" in names
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model.get_submodule(names[0]), QuantizedLinear)
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    assert (after - before).abs().max() < 0.05 * before.abs().max()
    assert not torch.equal(after, before)


def test_shared_layers_stay_shared_and_subclasses_stay() -> None:
    class Other(nn.Linear):
        pass

    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, Other(8, 8))
    assert quantize_model(model) == ["0", "2"]
    assert model[0] is model[2]
    assert type(model[3]) is Other


def test_errors() -> None:
    with pytest.raises(ConfigError, match="itself a linear layer"):
        quantize_model(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        quantize_model(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match=r"\[4, 8\].*\[8, 4\]"):
        QuantizedLinear(8, 4).quantize(torch.zeros(8, 4))
