"""What a client sees of the queue and of the cache: 429 and 503 with Retry-After, and cached tokens in the usage."""

import threading
from pathlib import Path

import httpx
import pytest

from helpers.http_server import RunningServer, running_server

LONG = 4000  # tokens of an answer, which take many times the tenth of a second that others wait


def test_cached_tokens_are_told(server: RunningServer) -> None:
    prompt = [(7 * i) % 256 for i in range(70)]

    def cached(**more: object) -> int:
        answer = server.post("completions", model="T0", prompt=prompt, max_tokens=2, temperature=0, **more)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() == 64
    assert cached(n=3) == 64
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 64
    assert cached(echo=True, logprobs=1) == 0, "the logprobs of the prompt need its logits"


def test_a_full_queue_is_a_429(t0_directory: Path) -> None:
    with running_server(t0_directory, max_num_seqs=1, max_waiting_requests=1) as small:
        body = {"model": "T0", "prompt": "a", "max_tokens": 400, "ignore_eos": True}
        answers: list[httpx.Response] = []

        def post() -> None:
            answers.append(httpx.post(f"{small.url}/v1/completions", json=body, timeout=100))

        threads = [threading.Thread(target=post) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [a for a in answers if a.status_code != 200]
        assert 0 < len(refused) < 12
        for answer in refused:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("policy", "by"),
    [
        ("fcfs", "the server"),
        ("fair", "the server"),
        ("priority", "the server"),
        ("fcfs", "queue_timeout"),
        ("fcfs", "timeout"),
    ],
)
def test_waiting_in_vain_is_a_503(long_t0: Path, policy: str, by: str) -> None:
    settings, fields = ({"queue_timeout": 0.1}, {}) if by == "the server" else ({}, {by: 0.1})
    with running_server(long_t0, max_num_seqs=1, scheduling_policy=policy, **settings) as small:
        long = {"model": "T0", "prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True, "user": "x"}
        with small.http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            body = {"model": "T0", "prompt": "b", "priority": 3} | fields
            answer = httpx.post(f"{small.url}/v1/completions", json=body, timeout=100)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "queue_timeout"
            assert f"try again in {answer.headers['retry-after']} s" in answer.json()["error"]["message"]
            assert list(lines)[-2:-1] == ["data: [DONE]"], "the one that had begun goes on to its end"


@pytest.mark.parametrize("by", ["the server", "the request"])
def test_a_request_that_takes_too_long_is_ended(long_t0: Path, by: str) -> None:
    settings, fields = ({"request_timeout": 0.3}, {}) if by == "the server" else ({}, {"timeout": 0.3})
    with running_server(long_t0, **settings) as slow:
        body = {"model": "T0", "prompt": "a", "max_tokens": LONG, "ignore_eos": True, "n": 8}
        answer = slow.post("completions", **body, **fields).json()
        assert {(c["finish_reason"], c["stop_reason"]) for c in answer["choices"]} == {("abort", "timeout")}
        assert 0 < answer["usage"]["completion_tokens"] < 8 * LONG
