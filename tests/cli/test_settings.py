"""Settings from flags and from a YAML file."""

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import build_parser
from headrace.cli.settings import engine_and_server_config, load_config_file
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.server.config import ServerConfig


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def configs(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    return engine_and_server_config(build_parser().parse_args(["serve", *arguments]))


def test_defaults() -> None:
    assert configs() == (EngineConfig(model="default"), ServerConfig())


def test_flags_become_settings_of_their_types() -> None:
    engine, server = configs(
        "M", "--max-model-len", "512", "--gpu-memory-utilization", "0.25", "--dtype=float32", "--seed", "-3",
        "--access-log", "--served-model-name", "a", "--served-model-name", "b",
    )  # fmt: skip
    assert engine == EngineConfig(model="M", max_model_len=512, gpu_memory_utilization=0.25, dtype="float32", seed=-3)
    assert server == ServerConfig(access_log=True, served_model_name=["a", "b"])


def test_sizes_and_words_where_a_number_would_do(config_file: Path) -> None:
    config_file.write_text("{swap_space: 2GB, kv_cache_memory: 4096}")
    engine, _ = configs("--max-model-len", "auto", "--kv-cache-memory", "1.5GiB", "--config", str(config_file))
    assert (engine.max_model_len, engine.kv_cache_memory, engine.swap_space) == ("auto", 3 * 2**29, 2 * 10**9)
    engine, _ = configs("--kv-cache-memory", "123456", "--max-model-len=64")
    assert (engine.max_model_len, engine.kv_cache_memory, engine.swap_space) == (64, 123456, 0)


def test_a_setting_that_is_json(config_file: Path) -> None:
    wanted = {"method": "ngram", "num_speculative_tokens": 2}
    engine, _ = configs("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert engine.speculative_config == wanted
    config_file.write_text("speculative_config: {method: ngram, num_speculative_tokens: 2}")
    assert configs("--config", str(config_file))[0] == engine
    config_file.write_text("speculative-config: [ngram]")
    with pytest.raises(ConfigError, match="speculative_config must be a string or a mapping"):
        configs("--config", str(config_file))


@pytest.mark.parametrize(
    "text",
    [
        "{model: M, max_model_len: 4096, gpu_memory_utilization: 0.9, port: 9000, served_model_name: a}",
        "model: M\nmax-model-len: 4096\ngpu-memory-utilization: 0.9\nport: 9000\nserved-model-name: [a]",
        "model: M\nengine_config: {max_model_len: 4096, tensor_parallel_size: 1, gpu_memory_utilization: 0.9, "
        "pipeline_parallel_size: 1}\nserver_config: {port: 9000, served_model_name: a}",
        "engine_config:\n  model: M\n  max-model-len: 4096\ngpu_memory_utilization: 0.9\n"
        "server_config:\n  served-model-name: a\nport: 9000",
    ],
)
def test_forms_of_a_file(config_file: Path, text: str) -> None:
    config_file.write_text(text)
    engine, server = configs("--config", str(config_file))
    assert engine == EngineConfig(model="M", max_model_len=4096, gpu_memory_utilization=0.9)
    assert server == ServerConfig(port=9000, served_model_name=["a"])


def test_flags_win_over_the_file(config_file: Path) -> None:
    config_file.write_text("{model: M, max_model_len: 4096, block_size: 64, port: 9000, access_log: true}")
    engine, server = configs("N", "--config", str(config_file), "--max-model-len", "8", "--no-access-log")
    assert engine == EngineConfig(model="N", max_model_len=8, block_size=64)
    assert server == ServerConfig(port=9000, access_log=False)


def test_a_flag_may_be_the_default_and_still_wins(config_file: Path) -> None:
    config_file.write_text("port: 9000")
    assert configs("--config", str(config_file), "--port", "8000")[1].port == 8000


def test_an_empty_file_says_nothing(config_file: Path) -> None:
    config_file.write_text("# nothing yet\n")
    assert load_config_file(config_file) == {}
    config_file.write_text("engine_config:\n")
    assert load_config_file(config_file) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_model_length: 5", "unknown setting 'max_model_length': did you mean 'max_model_len'?"),
        ("engine_config: {max_model_length: 5}", "did you mean 'max_model_len'?"),
        ("engine_config: {port: 5}", "unknown setting in engine_config 'port'"),
        ("server_config: {max_model_len: 5}", "unknown setting in server_config 'max_model_len'"),
        ("engine-config: {}", "unknown setting 'engine_config'"),
        ("5: 6", "unknown setting '5'"),
        ("port: 1\nport: 2", "port is given twice"),
        ("engine_config: {seed: 1, seed: 2}", "seed is given twice"),
        ("max_model_len: 1\nmax-model-len: 1", "max_model_len is given twice"),
        ("max_model_len: 1\nengine_config: {max_model_len: 1}", "max_model_len is given twice"),
        ("block_size: many", "block_size must be an integer, not 'many'"),
        ("block_size: 1.5", "block_size must be an integer, not 1.5"),
        ("block_size: true", "block_size must be an integer, not True"),
        ("max_model_len: many", "max_model_len must be an integer of at least 1 or 'auto', not 'many'"),
        ("max_model_len: 1.5", "max_model_len must be an integer or a string, not 1.5"),
        ("max_model_len: true", "max_model_len must be an integer or a string, not True"),
        (
            "kv_cache_memory: 4 Gib of it",
            "kv_cache_memory must be an integer of at least 1 or a size like 4GiB or 500MB",
        ),
        ("kv_cache_memory: 0.5", "kv_cache_memory must be an integer or a string, not 0.5"),
        ("swap_space: null", "swap_space must be an integer or a string, not None"),
        ("swap_space: -1GiB", "swap_space must be an integer of at least 0 or a size like 4GiB or 500MB"),
        ("kv_cache_dtype: fp8", "kv_cache_dtype must be one of auto, int8, not 'fp8'"),
        ("max_num_seqs: null", "max_num_seqs must be an integer, not None"),
        ("dtype: 16", "dtype must be a string, not 16"),
        ("access_log: 1", "access_log must be true or false, not 1"),
        ("served_model_name: [1]", "served_model_name must be a string, not 1"),
        ("gpu_memory_utilization: high", "gpu_memory_utilization must be a number, not 'high'"),
        ("max_model_len: 0", "max_model_len must be an integer of at least 1 or 'auto', not 0"),
        ("engine_config: {tensor_parallel_size: 2}", "tensor_parallel_size=2 is not supported yet"),
        ("port: 70000", "port must be an integer from 0 to 65535"),
        ("engine_config: [1]", "engine_config must hold settings"),
        ("[1, 2]", "must hold settings as 'name: value' lines, not a list"),
        ("just words", "not a string"),
        ("{", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("? [1]\n: 2", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("model: &a [*a]", "model must be a string"),
    ],
)
def test_faults_of_a_file_name_it(config_file: Path, text: str, words: str) -> None:
    config_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        configs("--config", str(config_file))
    assert str(error.value).startswith(str(config_file))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_faults_of_flags_do_not_blame_the_file(config_file: Path) -> None:
    config_file.write_text("port: 9000")
    with pytest.raises(ConfigError) as error:
        configs("--config", str(config_file), "--max-model-len", "0")
    assert str(config_file) not in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_files_that_cannot_be_read(config_file: Path, content: bytes | None) -> None:
    if content is None:
        config_file.mkdir()
    else:
        config_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config file .*server\.yaml cannot be read"):
        load_config_file(config_file)


@pytest.mark.parametrize(
    "bad", [{"port": -1}, {"port": True}, {"host": ""}, {"served_model_name": []}, {"access_log": 1}]
)
def test_server_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServerConfig(**bad)
