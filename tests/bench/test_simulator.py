"""The simulator: exact where the truth can be worked out by hand, and the real scheduler inside."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from headrace.bench import fit, limits, simulate
from headrace.bench.cost import Load, StepCost, non_negative_least_squares
from headrace.bench.datasets import Sample
from headrace.bench.limits import Limits
from headrace.bench.results import Result
from headrace.bench.simulate_settings import EngineSettings, SimulateSettings
from headrace.bench.simulator import Simulator
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.worker.step import PADDING, SequenceStep, StepPlan

# A second for a step with one token, and a tenth for each further one.
PLAIN = StepCost(tokens=((1, 1.0), (11, 2.0)), sequence=0.0, decode_pair=0.0, prompt_pair=0.0)


def request(prompt: int, output: int, **fields: Any) -> Sample:
    return Sample(list(range(1000, 1000 + prompt)), "", output, **fields)


def test_a_step_costs_what_its_parts_cost() -> None:
    cost = StepCost(
        tokens=((1, 1.0), (11, 2.0), (21, 4.0)), sequence=0.5, decode_pair=0.01, prompt_pair=0.001, copy=7.0
    )
    plan = StepPlan(
        [SequenceStep(0, [5], 9, []), SequenceStep(PADDING, [0] * 4, 0, []), SequenceStep(1, [1, 2], 3, [])],
        copies=[(0, 1)], swap_out=[(2, 3)],
    )  # fmt: skip
    load = Load.of(plan)
    assert load == Load(tokens=7, sequences=3, decode_pairs=10, prompt_pairs=(1 + 2 + 3 + 4) + (4 + 5), copies=2)
    assert cost.seconds(load) == pytest.approx(1.6 + 1.5 + 0.1 + 0.019 + 14)
    for tokens, seconds in ((1, 1), (6, 1.5), (11, 2), (16, 3), (21, 4), (31, 6)):
        assert cost.seconds(Load(tokens=tokens)) == pytest.approx(seconds)


def test_one_request_by_hand() -> None:
    """The prompt of eleven tokens takes two seconds and brings the first token, the two others take one each."""
    run = Simulator(EngineSettings(), PLAIN).run([request(11, 3, arrival=5.0)])
    assert run.lives[0].moments == pytest.approx([7, 8, 9])
    assert (run.seconds, run.num_steps, run.most_running) == (9, 3, 1)
    row = run.row()
    assert (row["ttft_median_ms"], row["worst_gap_ms"], row["requests"]) == (2000, 1000, 1)
    assert row["output_tok_s"] == pytest.approx(3 / 9)


def test_continuous_and_static_batches_by_hand() -> None:
    """Two places; answers of 1, 4 and 2 tokens. Static: the third waits for the second, and rows run for nothing."""
    asked = [request(1, n) for n in (1, 4, 2)]
    settings = EngineSettings(max_num_seqs=2, max_model_len=16, enable_prefix_caching=False, cache_tokens=64)
    two = 1.1  # seconds of a step with two tokens
    run = Simulator(settings, PLAIN).run(asked)
    assert [life.moments[-1] for life in run.lives] == pytest.approx([two, 3 * two + 1, 3 * two])
    static = Simulator(dataclasses.replace(settings, scheduling_policy="static"), PLAIN).run(asked, keep_steps=True)
    assert static.lives[0].moments == pytest.approx([two])
    assert static.lives[1].moments == pytest.approx([two * i for i in (1, 2, 3, 4)])
    # It waits for a second one to come, in vain, until the time for that is over.
    begun = static.lives[2].moments[0] - 1
    assert 4 * two <= begun <= 4 * two + 0.2
    kinds = [[span.kind for span in spans] for _, _, spans in static.steps]
    assert kinds == [["prompt", "prompt"], *[["idle", "decode"]] * 3, ["prompt"], ["decode"]]


def test_sessions_wait_for_their_answers() -> None:
    asked = [request(1, 2, session=0), request(1, 2, session=0), request(1, 1, session=1, arrival=50.0)]
    run = Simulator(EngineSettings(), PLAIN).run(asked)
    assert [life.arrival for life in run.lives] == pytest.approx([0, 2, 50])
    assert run.lives[1].moments[0] == pytest.approx(3)


def test_memory_is_wasted_as_counted_by_hand() -> None:
    """In one piece of 64 tokens; four tokens of the prompt, then five and six are there while the answer is made."""
    settings = EngineSettings(max_model_len=64, cache_tokens=64, contiguous=True)
    run = Simulator(settings, StepCost(tokens=((1, 1.0),), sequence=0, decode_pair=0, prompt_pair=0)).run(
        [request(4, 3)]
    )
    # Looked at when each step begins: nothing is computed yet, then 4, then 5.
    assert run.waste == pytest.approx(np.mean([64, 60, 59]) / 64)


def test_ideas_do_what_they_are_for() -> None:
    rows = {(row["experiment"], row["variant"]): row for row in simulate.run(
        SimulateSettings(), EngineSettings(), simulate.DatasetSettings()
    ).rows}  # fmt: skip

    def of(experiment: str, key: str) -> list[float]:
        return [row[key] for (name, _), row in rows.items() if name == experiment]

    static, continuous = of("batching", "output_tok_s")
    assert continuous > 1.5 * static
    assert of("memory", "wasted_percent")[0] > 3 * of("memory", "wasted_percent")[1]
    assert of("memory", "at_once")[1] > 2 * of("memory", "at_once")[0]
    whole, tokens, seconds = of("chunking", "worst_gap_ms")
    assert whole > 3 * tokens > 6 * seconds
    assert of("prefix", "cached_tokens")[0] == 0
    assert of("prefix", "output_tok_s")[1] > 2 * of("prefix", "output_tok_s")[0]
    waits = [rows["fairness", f"{policy}: who asks for few"]["ttft_median_ms"] for policy in ("fcfs", "fair")]
    assert waits[0] > 3 * waits[1]
    anew, swapped, room = of("preemption", "preemptions")
    assert min(anew, swapped) > room == 0
    assert of("preemption", "output_tok_s") == sorted(of("preemption", "output_tok_s"))


def test_every_token_is_there_and_in_order() -> None:
    asked = simulate.lengths(60, (1, 80), (1, 40), seed=1, rate=3.0)
    for policy, swap in itertools.product(("fcfs", "fair", "priority", "static"), (0, 2048)):
        settings = EngineSettings(
            scheduling_policy=policy, max_num_seqs=6, max_model_len=128, cache_tokens=512, swap_tokens=swap
        )
        run = Simulator(settings, simulate.ROUND_COST).run(asked)
        for life in run.lives:
            assert len(life.moments) == life.sample.output_len
            assert life.moments == sorted(life.moments)
            assert life.moments[0] > life.arrival
        assert run.seconds == max(life.moments[-1] for life in run.lives)


def test_a_load_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "simulate", "--experiment", "load", "--num-prompts", "20", "--input-len", "10"]
    words += ["--output-len", "5", "--request-rate", "100", "--scheduling-policy", "fair", "--max-num-seqs", "4"]
    assert main([*words, "--output-json", str(tmp_path / "x.json")]) == 0
    (row,) = Result.load(tmp_path / "x.json").rows
    assert (row["requests"], row["at_once"]) == (20, 4)
    assert main(["bench", "simulate", "--experiment", "batching", "--max-num-seqs", "4"]) == 1
    assert "give --experiment load" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experiment": "x"}, "experiment must be one of all, load, batching"),
        ({"request_rate": 1.0}, "give experiment load"),
        ({"scale": 0}, "scale must be at least 1"),
        ({"experiment": "load", "request_rate": 0.0}, "request_rate must be above 0"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulateSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "asked", "message"),
    [
        ({"scheduling_policy": "x"}, [], "scheduling_policy must be one of"),
        ({"cache_tokens": 0}, [], "cache_tokens must be at least 1"),
        ({"target_itl_ms": -1.0}, [], "target_itl_ms must be at least 0"),
        ({"max_num_batched_tokens": 8}, [], "at least max_num_seqs"),
        ({"cache_tokens": 8}, [], "does not hold a block"),
        ({"max_model_len": 8}, [request(8, 1)], "request 0 has 9 tokens, more than max_model_len"),
    ],
)  # fmt: skip
def test_engines_that_cannot_be(wrong: dict[str, Any], asked: list[Sample], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulator(EngineSettings(**wrong), PLAIN).run(asked)


def test_least_squares_are_scipys() -> None:
    rng = np.random.default_rng(0)
    for rows, columns in ((5, 1), (30, 4), (80, 13), (6, 6)):
        for _ in range(5):
            a, b = rng.normal(size=(rows, columns)), rng.normal(size=rows)
            truth, residual = scipy.optimize.nnls(a, b)
            found = non_negative_least_squares(a, b)
            assert (found >= 0).all()
            assert np.linalg.norm(a @ found - b) == pytest.approx(residual, rel=1e-9)
            if rows > columns:
                assert found == pytest.approx(truth, abs=1e-9)


def test_a_cost_is_found_again(tmp_path: Path) -> None:
    truth = StepCost(
        tokens=((1, 0.01), (8, 0.012), (64, 0.06), (512, 0.5)), sequence=2e-4, decode_pair=3e-7, prompt_pair=1e-7
    )
    rng = np.random.default_rng(0)
    loads = [
        Load(int(n), int(s), int(rng.integers(0, 50_000)), int(rng.integers(0, 100_000)))
        for n, s in zip(rng.integers(1, 512, 200), rng.integers(1, 32, 200), strict=True)
    ]
    noisy = [(load, truth.seconds(load) * rng.normal(1, 0.02)) for load in loads]
    found = StepCost.fit([1, 8, 64, 512], noisy, copy=0.0)
    for load in loads:
        assert found.seconds(load) == pytest.approx(truth.seconds(load), rel=0.02)
    (tmp_path / "cost.json").write_text(json.dumps(found.as_dict()))
    assert StepCost.load(str(tmp_path / "cost.json")) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tokens": []}', '{"tokens": [[2, 1], [1, 1]], "sequence": 0, '
    '"decode_pair": 0, "prompt_pair": 0}', '{"tokens": [[1, 1]], "sequence": -1, "decode_pair": 0, "prompt_pair": 0}',
    '{"tokens": [[1, 1]], "x": 1}'])  # fmt: skip
def test_files_that_are_no_costs(text: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json is no cost of steps"):
        StepCost.load(str(tmp_path / "cost.json"))


def test_fit(t0_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On T0: what is timed is what ran, and loads are run for real and in simulation."""
    machine = Limits(((1 << 30, 1e9),), {"float32": 1e10, "int8": 4e10})
    monkeypatch.setattr(limits, "measure", lambda threads, rounds: (machine, []))
    monkeypatch.setattr(fit, "CHECKS", ((3, (4, 20), (2, 5)),))
    monkeypatch.setattr(fit, "CHECK_ROUNDS", 1)
    config = EngineConfig(model=str(t0_directory), threads=1, max_model_len=64, kv_cache_memory=32 << 20)
    result = fit.run(config, rounds=1)
    assert [row["scheduling"] for row in result.rows] == ["continuous", "static"]
    assert all(row["measured_tok_s"] > 0 and row["predicted_tok_s"] > 0 for row in result.rows)
    for row in result.rows:
        assert row["ratio"] == pytest.approx(row["predicted_tok_s"] / row["measured_tok_s"])
    observed = [Load(*each[:4]) for each in result.details["observed"]]
    assert [load.tokens for load in observed[:6]] == [1, 2, 4, 8, 16, 32]
    assert max(load.sequences for load in observed) == 32
    assert StepCost(**result.details["cost"]).seconds(observed[0]) > 0


def test_pictures(tmp_path: Path) -> None:
    words = ["bench", "simulate", "--experiment", "fairness", "--plot", str(tmp_path / "a.svg")]
    assert main([*words, "--timeline", str(tmp_path / "b.svg")]) == 0
    for name in ("a.svg", "b.svg"):
        assert "<svg" in (tmp_path / name).read_text()
    assert main([*words[:-1], str(tmp_path / "no" / "a.png")]) == 1
    assert main([*words[:-1], str(tmp_path / "a.xyz")]) == 1
