"""Measurements of the engine and of its ops, over T0: what they count and how they reckon, not how fast it was."""

import json
import math
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import _native
from headrace.bench import kernels, latency, limits, servers, startup, throughput
from headrace.bench.datasets import DatasetSettings
from headrace.bench.limits import Limits
from headrace.bench.roofline import Roofline, _pairs
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.engine.core import Engine
from headrace.errors import ConfigError
from helpers.tiny import t0_weights

MACHINE = Limits(((1 << 10, 4e9), (1 << 20, 2e9), (1 << 30, 1e9)), {"float32": 1e10, "int8": 4e10})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """A machine whose limits are known, so that nothing has to be measured."""
    monkeypatch.setattr(limits, "measure", lambda threads, rounds: (MACHINE, []))
    return MACHINE


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(model), threads=1, kv_cache_memory=32 << 20, seed=0, **settings)


def test_bandwidth_is_that_of_the_next_larger_size() -> None:
    assert [MACHINE.bandwidth(n) for n in (1, 1 << 10, 1025, 1 << 20, 1 << 25, 1 << 40)] == [
        4e9, 4e9, 2e9, 2e9, 1e9, 1e9,
    ]  # fmt: skip


def test_native_counts_are_what_was_done() -> None:
    import numpy as np

    memory = np.ones(1 << 16, np.float32)
    before = _native.threads()
    for threads in (1, 2):
        _native.set_threads(threads)
        assert _native.read_memory(memory.ctypes.data, memory.nbytes, 3) == 3 * memory.nbytes
        for codes in (False, True):
            once = _native.multiply(codes, 1)
            assert once > 0
            assert _native.multiply(codes, 7) == 7 * once
    _native.set_threads(before)
    assert _native.multiply(False, 1) % before == 0


def test_limits_say_rates_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a work that takes a known time: the best of 2, 4 and 6 thousand million a second."""
    monkeypatch.setattr(limits, "fastest", lambda run, rounds, seconds=0.02: [2e9, 6e9, 4e9])
    found, rows = limits.measure(1, max_bytes=1 << 20)
    assert found.reads == ((32 << 10, 6e9), (256 << 10, 6e9), (1 << 20, 6e9))
    assert found.multiply == {"float32": 6e9, "int8": 6e9}
    assert rows[0] == {"limit": "read 32 KiB again and again", "best": 6.0, "median": 4.0, "unit": "GB/s"}
    assert [row["unit"] for row in rows] == ["GB/s"] * 3 + ["Gop/s"] * 2
    assert len(limits.matrix_products(1, size=8)) == 2


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_pairs_are_those_that_attention_sees(window: int | None) -> None:
    for start in (0, 1, 3, 4, 9):
        for length in (1, 2, 7):
            keys = [p + 1 if window is None else min(p + 1, window) for p in range(start, start + length)]
            assert _pairs(start, length, window) == sum(keys)


def test_the_roofline_counts_a_models_weights(t0_directory: Path) -> None:
    engine = Engine(config(t0_directory, backend="reference"))
    roofline = Roofline.of(engine, MACHINE)
    sizes = {name: w.size for name, w in t0_weights().items() if w.ndim == 2}
    embedding, head = sizes.pop("model.embed_tokens.weight"), sizes.pop("lm_head.weight")
    assert embedding == head == roofline.head_weights
    assert roofline.layer_weights == sum(sizes.values())
    assert roofline.weight_bytes == 4 * (sum(sizes.values()) + head)
    assert not roofline.is_integer
    assert roofline.windows == ((None, 2),)
    assert roofline.cache_bytes == 2 * 2 * 16 * 4  # key and value of two heads of 16 in float32
    # One sequence after 10 tokens: reading takes longer. Many tokens: multiplying does.
    num_bytes = roofline.weight_bytes + 10 * 2 * roofline.cache_bytes
    assert roofline.seconds([(10, 1)]) == pytest.approx(num_bytes / 2e9)
    products = 2 * (300 * roofline.layer_weights + head) + 4 * 4 * 16 * 2 * 300 * 301 // 2
    assert roofline.seconds([(0, 300)]) == pytest.approx(products / 1e10)


def test_the_roofline_knows_whole_numbers(t0_directory: Path) -> None:
    engine = Engine(config(t0_directory, backend="cpu", quantization="int8"))
    roofline = Roofline.of(engine, MACHINE)
    assert roofline.is_integer
    weights = roofline.layer_weights + roofline.head_weights
    assert weights < roofline.weight_bytes < 1.5 * weights  # a byte each, their scales, and rows that fill up panels


def test_latency(t0_directory: Path, machine: Limits) -> None:
    settings = latency.LatencySettings(batch_size="1,3", input_len="5,70", output_len=4, num_iters=2)
    result = latency.run(config(t0_directory, max_num_batched_tokens=64), settings)
    assert [(row["batch"], row["input_len"]) for row in result.rows] == [(1, 5), (3, 5), (1, 70), (3, 70)]
    for row, rounds in zip(result.rows, result.details.values(), strict=True):
        assert len(rounds) == 2
        assert all(len(r["steps"]) == 3 for r in rounds)
        first, step = (
            statistics.median(r["first"] for r in rounds),
            statistics.median(statistics.median(r["steps"]) for r in rounds),
        )
        tokens = row["batch"] * row["input_len"]
        assert row["ttft_ms"] == pytest.approx(1000 * first)
        assert row["prefill_tok_s"] == pytest.approx(tokens / first)
        assert row["tpot_ms"] == pytest.approx(1000 * step)
        assert row["decode_tok_s"] == pytest.approx(row["batch"] / step)
        assert row["decode_share"] > 0
    json.dumps(result.rows)


def test_latency_leaves_nothing_behind(t0_directory: Path) -> None:
    engine = Engine(config(t0_directory, max_num_seqs=2, max_model_len=64))
    found = latency.one_round(engine, [[1, 2, 3], [4, 5, 6]], 5)
    assert len(found.steps) == 4
    assert not engine.has_work
    with pytest.raises(ConfigError, match="do not fit in the KV cache"):
        latency.one_round(engine, [[1] * 60, [2] * 60], 20)


def test_throughput(t0_directory: Path) -> None:
    dataset = DatasetSettings(num_prompts=3, input_len=40, output_len=6)
    result = throughput.run(config(t0_directory), dataset, rounds=2)
    for row in result.rows:
        assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (3, 120, 18)
        assert row["cached_tokens"] == row["preemptions"] == 0  # the second round asks for something else
        assert row["total_tok_s"] * row["elapsed_s"] == pytest.approx(138)
        assert row["req_s"] * row["elapsed_s"] == pytest.approx(3)
    with pytest.raises(ConfigError, match="have 600 tokens, and the context holds 512"):
        throughput.run(config(t0_directory), DatasetSettings(input_len=500, output_len=100), 1)


def test_startup(t0_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.server(str(t0_directory), ["--max-model-len", "64", "--kv-cache-memory", "16MiB"]) as started:
        again = contextmanager(lambda model, flags: iter([started]))  # rather than to start it twice more
        monkeypatch.setattr(startup, "server", again)
        result = startup.run(str(t0_directory), [], rounds=1)
    ready, first, memory = (row["median"] for row in result.rows)
    assert 0 < ready < first
    assert ready == started.ready - started.begun
    assert memory > 50  # MB of Python and torch


def test_a_server_that_does_not_start(t0_directory: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"did not start: error: .*max_model_len"),
        servers.server(str(t0_directory), ["--max-model-len", "0"]),
    ):
        pass


def test_kernels(machine: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take a known time: a thousandth of a second."""

    def fastest(run: Callable[[int], int], rounds: int) -> list[float]:
        assert run(2) == 2  # the ops can be called
        return [500.0, 1000.0, 1500.0]

    monkeypatch.setattr(kernels, "fastest", fastest)
    settings = kernels.KernelSettings(
        shapes="48x64", weights="int4,int8,bfloat16,float32", rows="1,5", heads="4/2x16", contexts="33"
    )
    result = kernels.run(settings, threads=1)
    rows = {(row["op"], row["rows"]): row for row in result.rows}
    assert all(row["time_us"] == pytest.approx(1000) for row in result.rows)
    assert len(result.rows) == 4 * 2 + 3 + 2 + 2
    plain = rows["linear float32", 5]
    assert plain["read_gb_s"] == pytest.approx(48 * 64 * 4 / 1e6)
    assert plain["done_gop_s"] == pytest.approx(2 * 5 * 48 * 64 / 1e6)
    assert plain["share"] == pytest.approx(max(48 * 64 * 4 / 2e9, 2 * 5 * 48 * 64 / 1e10) / 1e-3)
    # Four bits each, and a scale and a minimum of two bytes for every 32.
    assert rows["linear int4", 1]["read_gb_s"] == pytest.approx(48 * 64 * (0.5 + 4 / 32) / 1e6)
    prompt = rows["attention, a prompt of 512", 512]
    assert prompt["read_gb_s"] == pytest.approx(2 * 4 * (33 + 512) * 2 * 16 / 1e6)
    assert prompt["done_gop_s"] == pytest.approx(4 * 4 * 16 * _pairs(33, 512, None) / 1e6)
    assert rows["norm", 5]["read_gb_s"] == pytest.approx(4 * 5 * 64 / 1e6)


def test_kernels_in_rotation(machine: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 12 kB until they are 1 MB: each is read from where a megabyte fits, as fast as that allows."""
    monkeypatch.setattr(kernels, "fastest", lambda run, rounds: [1 / run(1) * 1000.0])
    settings = kernels.KernelSettings(ops="linear", shapes="48x64", weights="float32", rows="1", rotate_mb=2)
    (row,) = kernels.run(settings, threads=1).rows
    assert row["share"] == pytest.approx(48 * 64 * 4 / 1e9 / 1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--batch-size", "1,0"], "batch_size must be whole numbers"),
        (["latency", "--input-len", "x"], "input_len must be whole numbers"),
        (["latency", "--output-len", "1"], "output_len must be at least 2"),
        (["latency", "--num-iters", "0"], "num_iters must be at least 1"),
        (["kernels", "--ops", "conv"], "ops must be some of linear, attention"),
        (["kernels", "--weights", "int3"], "weights must be some of"),
        (["kernels", "--shapes", "5"], "shapes must be like 1536x576"),
        (["kernels", "--heads", "3/2x8"], "cannot share"),
        (["throughput", "--rounds", "0"], "rounds must be at least 1"),
        (["limits", "--output-json", "x.yaml"], "results are written to"),
    ],
)
def test_wrong_settings_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_program_prints_and_saves(
    t0_directory: Path, tmp_path: Path, machine: Limits, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "latency", str(t0_directory), "--input-len", "4", "--output-len", "2", "--num-iters", "1"]
    saved = tmp_path / "x.json"
    assert main([*words, "--threads", "1", "--output-json", str(saved), "--output-csv", str(tmp_path / "x.csv")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["batch", "input", "len"]
    found = json.loads(saved.read_text())
    assert found["benchmark"] == "latency"
    assert found["settings"]["threads"] == 1
    assert math.isfinite(found["rows"][0]["tpot_ms"])
    assert (tmp_path / "x.csv").read_text().startswith("batch,input_len,ttft_ms")
