"""Clients that leave, engines that fail."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server.run import Exit
from helpers.http_server import RunningServer, running_server

ENDLESS = {"model": "T0", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(long_t0: Path) -> Iterator[RunningServer]:
    with running_server(long_t0) as running:
        yield running


def send(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection over which a completion was asked for, and nothing read yet."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
    connection.sendall(head.encode() + data)
    return connection


def wait_until_running(server: RunningServer) -> None:
    deadline = time.monotonic() + 10
    while server.engine.stats().running == 0:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("change", [{}, {"stream": True}, {"n": 4}, {"prompt": ["x", "y"], "n": 2, "stream": True}])
def test_a_client_that_leaves_stops_the_work(server: RunningServer, change: dict[str, Any]) -> None:
    server.wait_until_idle()
    before = server.engine.stats().num_steps
    with send(server, ENDLESS | change) as connection:
        wait_until_running(server)
        if change.get("stream"):
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.wait_until_idle(seconds=2)
    assert server.engine.stats().num_steps - before < 400  # it did not just run to its end
    assert server.post("completions", model="T0", prompt="x", max_tokens=1).status_code == 200


def test_a_client_that_leaves_within_its_body(server: RunningServer) -> None:
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert server.http.get("/health").status_code == 200


def test_streams_share_the_engine(server: RunningServer) -> None:
    """A short request gets through while a long one runs."""
    with send(server, ENDLESS | {"stream": True}):
        wait_until_running(server)
        answer = server.post("completions", model="T0", prompt="y", max_tokens=2)
        assert answer.status_code == 200
        assert server.engine.stats().running > 0
    server.wait_until_idle(seconds=2)


def test_long_prompts_do_not_block_others(server: RunningServer) -> None:
    """Tokenizing 1 MB takes a while; /health must not wait for it."""
    responses: list[httpx.Response] = []

    def post() -> None:
        responses.append(
            httpx.post(f"{server.url}/v1/completions", json={"model": "T0", "prompt": "word " * 200_000}, timeout=60)
        )

    thread = threading.Thread(target=post)
    thread.start()
    answered = 0
    while thread.is_alive():
        assert server.http.get("/health").status_code == 200
        answered += 1
    thread.join()
    assert responses[0].status_code == 400
    assert responses[0].json()["error"]["code"] == "context_length_exceeded"
    assert answered > 2, "one that had to wait would be the last"


def test_a_dead_engine_is_told(long_t0: Path) -> None:
    with running_server(long_t0) as failing:
        whole: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: whole.append(failing.post("completions", **ENDLESS)))
        with failing.http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            next(lines)
            thread.start()
            while failing.engine.stats().running < 2:
                time.sleep(0.001)
            os.kill(failing.engine.pid or 0, signal.SIGKILL)
            *_, error, _, done, _ = lines
        assert done == "data: [DONE]"
        error = json.loads(error.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "SIGKILL" in error["message"]
        thread.join()
        assert whole[0].status_code == 503
        assert "SIGKILL" in whole[0].json()["error"]["message"]
        failing.thread.join(10)
        assert failing.exit_status == [Exit.ENGINE_DIED]


def test_an_unforeseen_fault_is_a_500_with_an_id(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(text: str, *_: Any) -> Any:
        raise ZeroDivisionError(text)

    monkeypatch.setattr(server.engine.tokenizer, "encode", fail)
    response = server.post("completions", model="T0", prompt="hush")
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "hush" not in error["message"]
    [record] = [r for r in caplog.records if getattr(r, "request_id", None) == response.headers["x-request-id"]]
    assert "ZeroDivisionError" in record.getMessage()
    assert "in completion_job" in record.getMessage(), "where it happened"
    assert "hush" not in record.getMessage(), "the text of an error may quote the request"


def test_ids_that_are_none(server: RunningServer) -> None:
    for odd in (b"\xff\xfe", b"two words", b"x" * 129, b""):
        response = server.http.get("/version", headers={b"x-request-id": odd})
        assert response.status_code == 200
        assert response.headers["x-request-id"].startswith("req_")
    assert server.http.get("/version", headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128
