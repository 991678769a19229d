"""GGUF files as checkpoints: config, tensor names and values as Hugging Face has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from headrace.errors import ModelError
from headrace.formats.gguf_checkpoint import GGMLWeight, GGUFCheckpoint
from helpers import model_files, real_models
from helpers.tiny import (
    BOS,
    EOS,
    PAD,
    gguf_name,
    interleave_heads,
    save_t0_gguf,
    t0_config,
    t0_qwen2_config,
    t0_weights,
)

FACTORS = [1.0, 1.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0]


def write(
    path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray], **settings: Any
) -> GGUFWriter:
    """A file with a vocabulary of 32 tokens, the metadata under the architecture's name, and the tensors."""
    writer = GGUFWriter(path, arch, **settings)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("A") + i) for i in range(32)])
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer


SIZES = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def checkpoint(
    folder: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> GGUFCheckpoint:
    """A file of these sizes and this metadata; a metadata value of None takes a key away."""
    few = {f"blk.{i}.attn_norm.weight": np.ones(64, np.float32) for i in range(8)}
    values = {key: value for key, value in (SIZES | metadata).items() if value is not None}
    write(folder / "model.gguf", arch, values, few | (tensors or {}))
    return GGUFCheckpoint(folder / "model.gguf")


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as error:
        read()
    assert "model.gguf: " in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


# The real models


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_have_the_weights_of_transformers(name: str) -> None:
    file = GGUFCheckpoint(real_models.PATHS[name]())
    expected = real_models.transformers_model(name).state_dict()
    shapes = file.shapes()
    assert set(shapes) == set(expected) - {"lm_head.weight"}  # tied in both
    for tensor, shape in shapes.items():
        values = file.read(tensor).dequantize()
        assert shape == tuple(values.shape)
        assert torch.equal(values, expected[tensor]), tensor


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_have_the_config_of_transformers(name: str) -> None:
    config = GGUFCheckpoint(real_models.PATHS[name]()).config
    expected = real_models.transformers_model(name).config.to_dict()
    # In transformers 5 the rotary settings are under one key, and Gemma's by kind of layer.
    rope = expected["rope_parameters"]
    assert config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    for key, value in config.items():
        if key in expected and key not in ("architectures", "rope_theta", "rope_scaling"):
            assert value == expected[key], key
    keys = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    keys |= {"vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "head_dim", "model_type"}
    assert keys <= config.keys() & expected.keys()


def test_config_of_smollm2() -> None:
    """By what its publishers' config.json says."""
    config = GGUFCheckpoint(model_files.smollm2()).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["head_dim"] == 64
    assert config["rope_scaling"] is None
    assert not config["attention_bias"]
    assert config["hidden_act"] == "silu"


def test_config_of_gemma3_270m() -> None:
    """By what its publishers' config.json says."""
    config = GGUFCheckpoint(model_files.gemma3()).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["query_pre_attn_scalar"] == 256
    assert config["rope_local_base_freq"] == 10_000
    assert config["sliding_window"] == 512
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["final_logit_softcapping"] is None
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


# Weights


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_weights_come_back(tmp_path: Path, arch: str) -> None:
    """With the rows of llama's queries and keys back in order, and qwen2's left alone."""
    config = {"llama": t0_config, "qwen2": t0_qwen2_config}[arch]()
    weights = t0_weights(config=config)
    file = GGUFCheckpoint(save_t0_gguf(tmp_path / "model.gguf", arch=arch, weights=weights))
    assert file.shapes() == {name: values.shape for name, values in weights.items()}
    for name, values in weights.items():
        np.testing.assert_array_equal(file.read(name).dequantize().numpy(), values)
    for key in set(config) - {"torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "head_dim"}:
        assert file.config[key] == (pytest.approx(config[key]) if key == "rms_norm_eps" else config[key])
    assert file.config["attention_bias"] == (arch == "qwen2")
    assert file.generation_config == {"eos_token_id": [EOS], "bos_token_id": BOS}


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16])
def test_quantized_rows_are_put_in_order_as_they_are(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Queries, keys and their biases; the values are those that the rows had before they were reordered, exactly."""
    rng = np.random.default_rng(0)
    tensors, expected = {}, {}
    for name, heads in (("q", 4), ("k", 2)):
        rows = rng.normal(size=(heads * 16, 64)).astype(np.float32)
        expected[f"{name}_proj.weight"] = dequantize(quantize(rows, kind), kind)
        tensors[f"blk.0.attn_{name}.weight"] = quantize(interleave_heads(rows, heads), kind)
        bias = rng.normal(size=heads * 16).astype(np.float32)
        expected[f"{name}_proj.bias"] = bias
        tensors[f"blk.0.attn_{name}.bias"] = interleave_heads(bias, heads)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["a"])
    for key, value in SIZES.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind if name.endswith("weight") else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFCheckpoint(tmp_path / "model.gguf")
    for name, values in expected.items():
        np.testing.assert_array_equal(file.read(f"model.layers.0.self_attn.{name}").dequantize().numpy(), values)
    weight = file.read("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, GGMLWeight)
    assert weight.block_type.name == kind.name


def test_gemma_norms_are_stored_with_one_added(tmp_path: Path) -> None:
    norms = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
    }
    values = np.arange(1, 65, dtype=np.float32) / 64
    tensors = {f"{name}.weight": values + 1 for name in norms}
    file = checkpoint(tmp_path, "gemma3", {}, tensors | {"blk.0.ffn_up.weight": np.ones((96, 64), np.float32)})
    for name in norms.values():
        np.testing.assert_array_equal(file.read(f"{name}.weight").dequantize().numpy(), values)
    assert (file.read("model.layers.0.mlp.up_proj.weight").dequantize() == 1).all()


def test_a_norm_of_qwen3_is_stored_as_it_is(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.float32)
    file = checkpoint(tmp_path, "qwen3", {"attention.key_length": 16}, {"blk.0.attn_q_norm.weight": values})
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_norm.weight").dequantize().numpy(), values)
    assert file.config["head_dim"] == 16
    assert file.config["model_type"] == "qwen3"


def test_other_tensors_keep_their_names(tmp_path: Path) -> None:
    extra = {name: np.ones(2, np.float32) for name in ("blk.0.attn_rot_embd.weight", "blk.x.attn_q.weight", "mm.0")}
    file = checkpoint(tmp_path, "llama", {}, extra)
    assert set(extra) <= set(file.shapes())
    assert file.read("mm.0").shape == (2,)
    assert "has no tensor 'missing'" in refusal(lambda: file.read("missing"))


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    twice = {"model.norm.weight": np.ones(2, np.float32), "output_norm.weight": np.ones(2, np.float32)}
    assert "names mean the same" in refusal(lambda: checkpoint(tmp_path, "llama", {}, twice))


def test_rows_that_do_not_divide_into_heads(tmp_path: Path) -> None:
    file = checkpoint(tmp_path, "llama", {}, {"blk.0.attn_q.weight": np.ones((12, 64), np.float32)})
    message = refusal(lambda: file.read("model.layers.0.self_attn.q_proj.weight"))
    assert "of shape [12, 64] does not divide into 4 heads" in message


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_matrix_unties(tmp_path: Path, tied: bool) -> None:
    file = GGUFCheckpoint(save_t0_gguf(tmp_path / "model.gguf", tied=tied))
    assert file.config["tie_word_embeddings"] == tied
    assert ("lm_head.weight" in file.shapes()) != tied


# Config


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    """As llama.cpp has them."""
    config = checkpoint(tmp_path, "llama", {"attention.head_count_kv": None}).config
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_theta"] == 10_000
    assert config["rope_scaling"] is None
    assert config["vocab_size"] == 32
    assert checkpoint(tmp_path, "gemma3", {}).config["rope_theta"] == 1_000_000


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "linear"}, None),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 2.0,
                "scaling.yarn_beta_fast": 16.0,
                "scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
        (
            # 0.5 on top of YaRN's own 0.1 ln(factor) + 1
            {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.5 * 1.2079441541679836,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    config = checkpoint(tmp_path, "llama", {f"rope.{key}": value for key, value in metadata.items()}).config
    assert config["rope_scaling"] == (expected if expected is None else pytest.approx(expected))


def test_rope_factors_are_config_and_no_tensor(tmp_path: Path) -> None:
    plain = GGUFCheckpoint(save_t0_gguf(tmp_path / "model.gguf", rope_freqs=FACTORS))
    assert plain.config["rope_scaling"] == {"rope_type": "freq_factors", "factors": FACTORS}
    assert not [name for name in plain.shapes() if "rope" in name]
    # Positions divided by 4 on top are the same as all frequencies divided by 4.
    both = save_t0_gguf(tmp_path / "model.gguf", rope_freqs=FACTORS, rope_scaling={"type": "linear", "factor": 4.0})
    assert GGUFCheckpoint(both).config["rope_scaling"]["factors"] == [4 * factor for factor in FACTORS]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"attention.scale": 0.125}, {"query_pre_attn_scalar": 64.0}),
        ({"rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
        ({"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        ({"attention.sliding_window": 7}, {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2}),
        ({}, {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        (
            {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2, "block_count": 4},
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
        (
            {"attention.sliding_window": 7, "attention.sliding_window_pattern": [False, True]},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10_000.0},
        ),
    ],
)
def test_gemma3_settings(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    config = checkpoint(tmp_path, "gemma3", metadata).config
    assert {key: config[key] for key in expected} == expected


def test_gemma3_27b_scales_by_the_width_of_the_model(tmp_path: Path) -> None:
    """Its published config.json has query_pre_attn_scalar 168, with heads of 128."""
    sizes = {"embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128, "block_count": 62}
    many = {f"blk.{i}.ffn_norm.weight": np.ones(2, np.float32) for i in range(62)}
    config = checkpoint(tmp_path, "gemma3", sizes | {"attention.value_length": 128}, many).config
    assert config["query_pre_attn_scalar"] == 168
    assert config["head_dim"] == 128


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"block_count": None}, "has no llama.block_count"),
        ({"block_count": 2**32 - 1}, "llama.block_count must be an integer of at least 1, not 4294967295"),
        ({"block_count": 2**31 - 1}, "llama.block_count is 2147483647, but there are only 8 tensors"),
        ({"embedding_length": 0}, "llama.embedding_length must be an integer of at least 1, not 0"),
        ({"embedding_length": "64"}, "llama.embedding_length must be an integer of at least 1, not '64'"),
        ({"attention.head_count": True}, "llama.attention.head_count must be an integer of at least 1, not True"),
        ({"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv differs between layers"),
        (
            {"attention.layer_norm_rms_epsilon": float("nan")},
            "layer_norm_rms_epsilon must be a positive number, not nan",
        ),
        ({"rope.freq_base": -1.0}, "llama.rope.freq_base must be a positive number, not -1.0"),
        ({"rope.freq_base": "x"}, "llama.rope.freq_base must be of type float, not 'x'"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor of 0.5"),
        ({"vocab_size": 31}, "has 32 tokens, but a vocab_size of 31"),
    ],
)
def test_faults_in_the_metadata(tmp_path: Path, metadata: dict[str, Any], expected: str) -> None:
    assert expected in refusal(lambda: checkpoint(tmp_path, "llama", metadata))


def test_the_same_count_for_each_layer_is_one_count(tmp_path: Path) -> None:
    assert checkpoint(tmp_path, "llama", {"attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2


def test_pattern_of_the_wrong_length(tmp_path: Path) -> None:
    metadata = {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True] * 3}
    assert "has 3 entries for 2 layers" in refusal(lambda: checkpoint(tmp_path, "gemma3", metadata))


def test_factors_and_yarn_are_not_for_one_model(tmp_path: Path) -> None:
    path = save_t0_gguf(tmp_path / "model.gguf", rope_freqs=FACTORS, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "rope_freqs.weight as well as YaRN" in refusal(lambda: GGUFCheckpoint(path))


@pytest.mark.parametrize("arch", ["gemma2", "phi3", "llama4"])
def test_unsupported_architectures(tmp_path: Path, arch: str) -> None:
    message = refusal(lambda: checkpoint(tmp_path, arch, {}))
    assert f"architecture {arch!r} is not supported; supported are llama, qwen2, qwen3, gemma3" in message


def test_a_file_without_an_architecture_or_a_tokenizer(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "has no tokenizer" in refusal(lambda: GGUFCheckpoint(tmp_path / "model.gguf"))
    content = (tmp_path / "model.gguf").read_bytes().replace(b"general.architecture", b"general.architectura")
    (tmp_path / "model.gguf").write_bytes(content)
    assert "has no general.architecture" in refusal(lambda: GGUFCheckpoint(tmp_path / "model.gguf"))


# The tokenizer's surroundings


def test_several_end_tokens(tmp_path: Path) -> None:
    path = save_t0_gguf(tmp_path / "model.gguf", extra_metadata={"tokenizer.ggml.eot_token_id": PAD})
    assert GGUFCheckpoint(path).generation_config["eos_token_id"] == [EOS, PAD]


def test_chat_templates(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}",
    }
    tokenizer = GGUFCheckpoint(save_t0_gguf(tmp_path / "model.gguf", extra_metadata=templates)).tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == "<s>Hi"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "tools: Hi"
    assert tokenizer.encode_chat(messages) == [BOS, *b"Hi"]


def test_a_faulty_chat_template_names_the_file(tmp_path: Path) -> None:
    path = save_t0_gguf(tmp_path / "model.gguf", extra_metadata={"tokenizer.chat_template": "{% if %}"})
    assert "does not compile" in refusal(GGUFCheckpoint(path).tokenizer)


# Models in several files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """T0 in three files, as the gguf package splits them."""
    path = tmp_path / "model.gguf"
    config = t0_config()
    tensors = {
        gguf_name(name): interleave_heads(value, 4 if "q_proj" in name else 2)
        if ".q_p" in name or ".k_p" in name
        else value
        for name, value in t0_weights().items()
    }
    sizes = {
        "context_length": 512,
        "embedding_length": config["hidden_size"],
        "block_count": 2,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
    }
    write(path, "llama", SIZES | sizes, tensors, split_max_tensors=8)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_model_in_several_files(parts: list[Path]) -> None:
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    file = GGUFCheckpoint(parts[0])
    weights = t0_weights()
    assert file.shapes() == {name: values.shape for name, values in weights.items()}
    for name, values in weights.items():
        np.testing.assert_array_equal(file.read(name).dequantize().numpy(), values)


def test_a_model_in_several_files_with_faults(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: .*split into 3 files; give the first one"):
        GGUFCheckpoint(parts[1])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"renamed\.gguf: .*NAME-00001-of-00003\.gguf"):
        GGUFCheckpoint(renamed)
    renamed.rename(parts[0])
    content = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf: no such file"):
        GGUFCheckpoint(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf: has the tensor '.*', which .*00002-of-00003\.gguf"):
        GGUFCheckpoint(parts[0])
    save_t0_gguf(parts[2], weights={"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(ModelError, match=r"3 files of this model should have 21 tensors, and have"):
        GGUFCheckpoint(parts[0])
    parts[2].write_bytes(content)
    assert len(GGUFCheckpoint(parts[0]).shapes()) == 21
