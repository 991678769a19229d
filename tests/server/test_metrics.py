"""Metrics: read by Prometheus' own parser, and compared with what was asked for."""

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.stats import EngineStats
from headrace.server.run import status_line
from helpers.http_server import RunningServer, running_server

# What the dashboards that vLLM ships ask for (examples/observability in its repository).
VLLM_NAMES = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_time_per_output_token_seconds_sum",
]  # fmt: skip

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: RunningServer) -> Samples:
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "T0"
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


class Changes:
    """What a counter has gained between two scrapes."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self.before, self.after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        key = (f"headrace:{name}", frozenset(labels.items()))
        return self.after[key] - self.before.get(key, 0.0)


def test_counts_are_those_of_the_requests(server: RunningServer) -> None:
    server.wait_until_idle()
    before = scrape(server)
    prompt = [(11 * i) % 256 for i in range(70)]
    for stream in (False, True):
        response = server.post(
            "completions", model="T0", prompt=prompt, max_tokens=5, n=2, ignore_eos=True, stream=stream
        )
        assert response.status_code == 200
    assert server.post("completions", model="T0").status_code == 400
    assert server.post("completions", model="nope", prompt="x").status_code == 404
    assert server.http.get("/v1/nope").status_code == 404
    server.wait_until_idle()
    gained = Changes(before, scrape(server))
    assert gained("prompt_tokens_total") == 140
    assert gained("generation_tokens_total") == 20
    # The second sequence of a request shares its prompt: it is looked up as well.
    assert gained("prefix_cache_hits_total") >= 64
    assert gained("prefix_cache_queries_total") >= 140
    assert gained("request_success_total", finished_reason="length") == 4
    assert gained("sequences_finished_total") == 4
    assert gained("time_to_first_token_seconds_count") == 4
    assert gained("request_queue_time_seconds_count") == 4
    assert gained("inter_token_latency_seconds_count") == 4 * 4
    assert gained("request_time_per_output_token_seconds_count") == 4
    assert gained("e2e_request_latency_seconds_count") == 4
    assert gained("request_prompt_tokens_sum") == 140
    assert gained("request_generation_tokens_sum") == 20
    assert gained("request_errors_total", reason="invalid_request_error") == 1
    assert gained("request_errors_total", reason="model_not_found") == 1
    assert gained("request_errors_total", reason="unknown_url") == 1
    ttft, e2e = gained("time_to_first_token_seconds_sum"), gained("e2e_request_latency_seconds_sum")
    itl = gained("inter_token_latency_seconds_sum")
    assert e2e == pytest.approx(ttft + itl, rel=1e-6), "the last token ends a request"
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_perc"):
        assert gained.after[f"headrace:{name}", frozenset()] == 0


def test_gauges_show_what_runs(long_t0: Path) -> None:
    body = {"model": "T0", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 70}
    with running_server(long_t0) as server:
        gauges_show(server, body)


def gauges_show(server: RunningServer, body: dict[str, Any]) -> None:
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
        samples = scrape(server)
        while samples["headrace:requests_running", frozenset()] != 64:  # the default of max_num_seqs
            samples = scrape(server)
        assert samples["headrace:requests_waiting", frozenset()] == 6
        usage = samples["headrace:kv_cache_usage_perc", frozenset()]
        blocks, free = (samples[f"headrace:kv_cache_{name}", frozenset()] for name in ("blocks", "free_blocks"))
        assert usage == pytest.approx(1 - free / blocks)
        assert 0 < usage <= 1
    server.wait_until_idle()
    samples = scrape(server)
    assert samples["headrace:kv_cache_free_blocks", frozenset()] == samples["headrace:kv_cache_blocks", frozenset()]


def test_clients_cannot_make_labels(server: RunningServer) -> None:
    server.http.get("/v1/nope")  # so that every label that follows is there
    server.post("completions", model="nope", prompt="x")
    server.post("completions", model="T0")
    server.post("completions", model="T0", prompt="x", max_tokens=1, user="someone")
    before = set(scrape(server))
    for index in range(20):
        server.http.get(f"/v1/nope{index}")
        server.post("completions", model=f"nope{index}", prompt="x", user=f"u{index}", **{f"field{index}": 1})
        server.post("completions", model="T0", prompt="x", max_tokens=1, user=f"u{index}")
    new = {name for name, labels in set(scrape(server)) - before if ("finished_reason", "stop") not in labels}
    assert not new


def test_vllm_s_names_and_the_status_line(
    t0_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.run.STATUS_SECONDS", 0.05)
    with (
        caplog.at_level("INFO", "headrace.server.run"),
        running_server(t0_directory, {"metrics_compat": "vllm"}) as vllm_like,
    ):
        vllm_like.post("completions", model="T0", prompt="x", max_tokens=30, ignore_eos=True)
        names = {name for name, _ in scrape(vllm_like)}
        deadline = time.monotonic() + 20
        while "running 0, waiting 0, KV cache 0.0% in use" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert names >= set(VLLM_NAMES)
    assert not [name for name in names if name.startswith("headrace:")]


def test_the_status_line() -> None:
    before = EngineStats(num_blocks=100, free_blocks=100, num_prompt_tokens=10, num_generated_tokens=20)
    after = EngineStats(
        running=3, waiting=4, num_blocks=100, free_blocks=75, num_prompt_tokens=110, num_generated_tokens=520,
        prefix_queried_tokens=200, prefix_hit_tokens=50,
    )  # fmt: skip
    assert status_line(before, after, 10.0) == (
        "prompts 10.0 tokens/s, output 50.0 tokens/s, running 3, waiting 4, KV cache 25.0% in use, prefix hits 25.0%"
    )
