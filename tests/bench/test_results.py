"""What is saved of a measurement, and how figures are written and summed up."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.results import Result, as_csv, as_markdown, as_text, check_output, command_line, number
from headrace.bench.stats import fastest, in_turns, percentile, summary
from headrace.errors import ConfigError

ROWS = [{"name": "a, b", "ttft_ms": 1234.5, "spread_ms": [0.51, 2.0]}, {"name": "c", "ttft_ms": 7, "spread_ms": None}]


def test_a_result_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    result = Result(benchmark="x", title="X", rows=ROWS, settings={"n": 1}, command="headrace bench x")
    result.save(tmp_path / "new" / "x.json")
    assert Result.load(tmp_path / "new" / "x.json") == result
    assert result.machine["cores"] >= 1
    assert result.versions["numpy"] == np.__version__


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 99, "title": "x"}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        Result.load(tmp_path / "x.json")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json cannot be read"):
        Result.load(tmp_path / "no.json")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        Result(benchmark="x", title="X", rows=[]).save(tmp_path / "file" / "x.json")
    with pytest.raises(ConfigError, match=r"x\.txt: results are written to \.json"):
        check_output("x.txt")


def test_tables() -> None:
    rows = [ROWS[0], ROWS[1] | {"spread_ms": [1, 3]}]
    assert as_csv(rows).splitlines() == [
        "name,ttft_ms,spread_ms_low,spread_ms_high", '"a, b",1234.5,0.51,2.0', "c,7,1,3",
    ]  # fmt: skip
    assert as_markdown(ROWS).splitlines() == [
        "| name | ttft, ms | spread, ms |", "| --- | --- | --- |",
        "| a, b | 1,234 | 0.51 to 2 |", "| c | 7 | - |",
    ]  # fmt: skip
    assert as_text(ROWS).splitlines() == [
        "name  ttft, ms  spread, ms", "a, b     1,234   0.51 to 2", "c            7           -",
    ]  # fmt: skip
    assert as_text([]) == as_markdown([]) == ""


def test_units_are_told_apart() -> None:
    heads = as_markdown([{"x_tok_s": 1, "y_s": 1, "z_gb_s": 1, "ms": 1, "req_s": 1}]).splitlines()[0]
    assert heads == "| x, tokens/s | y, s | z, GB/s | ms | requests/s |"


@pytest.mark.parametrize(
    ("value", "text"), [(0.123456, "0.123"), (99.44, "99.4"), (123.456, "123.5"), (12345, "12,345"), ("x", "x")]
)
def test_figures_have_as_many_digits_as_are_worth_reading(value: object, text: str) -> None:
    assert number(value) == text


def test_the_command_can_be_repeated() -> None:
    words = ["/somewhere/bin/headrace", "bench", "latency", "a model", "--output-json", "x.json", "--threads", "2"]
    assert command_line(words) == "headrace bench latency 'a model' --threads 2"
    assert command_line([*words[:3], "--output-csv=x.csv"]) == "headrace bench latency"
    assert command_line(["bench/x.py", "--n", "1"]) == "python bench/x.py --n 1"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_a_summary_of_nothing_is_no_number() -> None:
    assert all(np.isnan(value) for value in summary("x", [], "ms").values())
    assert summary("x", [1.0, 3.0], "ms", [90]) == {
        "x_mean_ms": 2.0, "x_median_ms": 2.0, "x_p90_ms": pytest.approx(2.8), "x_max_ms": 3.0,
    }  # fmt: skip
    json.dumps(summary("x", [1.0], "ms"))


def test_measures_take_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return len(order)

    found = in_turns(2, {"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert order == list("ababab")
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_the_fastest_is_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(times: int) -> int:
        nonlocal now
        now += 0.001 * times
        return 5 * times

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert fastest(run, seconds=0.02, rounds=3) == pytest.approx([5000] * 3)
