"""Speculation over HTTP: the same answers, whole and streamed, and what usage and metrics tell of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.http_server import RunningServer, running_server

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8,"
CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def speculating(t0_directory: Path) -> Iterator[RunningServer]:
    with running_server(t0_directory, speculative_config=CONFIG) as running:
        yield running


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A completion's choice from its streamed pieces."""
    choice: dict[str, Any] = {"text": "", "logprobs": {}}
    for piece in (c for chunk in chunks for c in chunk["choices"]):
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return choice


def completion(server: RunningServer, stream: bool, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice, and the usage."""
    body = {"model": "T0", "prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True, **body}
    if not stream:
        answer = server.post("completions", **body).json()
        [choice] = answer["choices"]
        return {name: choice[name] for name in ("text", "logprobs", "finish_reason")}, answer["usage"]
    response = server.post("completions", stream=True, stream_options={"include_usage": True}, **body)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    *chunks, last = [json.loads(line) for line in lines]
    return joined(chunks), last["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_offsets_of_accepted_tokens(
    server: RunningServer, speculating: RunningServer, stream: bool
) -> None:
    truth, usage = completion(server, False, logprobs=5)
    choice, counted = completion(speculating, stream, logprobs=5)
    assert choice == truth
    assert len(choice["logprobs"]["text_offset"]) == 60
    assert "completion_tokens_details" not in usage
    details = counted["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details.keys() == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert counted["completion_tokens"] == 60


def test_a_chat_with_its_likeliest_tokens(server: RunningServer, speculating: RunningServer) -> None:
    body = {
        "model": "T0", "messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 5,
        "temperature": 0.2, "seed": 4, "max_tokens": 40, "ignore_eos": True,
    }  # fmt: skip
    truth, answer = (s.post("chat/completions", **body).json() for s in (server, speculating))
    assert answer["choices"] == truth["choices"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == 40


def test_a_request_without_it(server: RunningServer, speculating: RunningServer) -> None:
    choice, usage = completion(speculating, False, speculative=False)
    assert choice == completion(server, False)[0]
    assert "completion_tokens_details" not in usage
    assert server.post("completions", model="T0", prompt="x", speculative="no").status_code == 400


def test_metrics_agree_with_the_usage(speculating: RunningServer) -> None:
    def scrape() -> dict[str, float]:
        families = text_string_to_metric_families(speculating.http.get("/metrics").text)
        return {
            sample.name.removeprefix("headrace:") + sample.labels.get("position", ""): sample.value
            for family in families
            for sample in family.samples
            if "spec_decode" in sample.name
        }

    before = scrape()
    _, usage = completion(speculating, False)
    speculating.wait_until_idle()
    gained = {name: value - before[name] for name, value in scrape().items()}
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    assert gained["spec_decode_num_accepted_tokens_total"] == accepted
    drafted = accepted + details["rejected_prediction_tokens"]
    assert gained["spec_decode_num_draft_tokens_total"] == drafted
    assert sum(gained[f"spec_decode_num_accepted_tokens_per_pos_total{i}"] for i in range(4)) == accepted
    assert drafted / 4 <= gained["spec_decode_num_drafts_total"] <= drafted
    assert gained["spec_decode_draft_seconds_total"] > 0
