"""Limits on connections, heads, bodies and slowness; each is told, and holds up nobody else."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.http_client import connect, read_all, request_bytes, status_and_error
from helpers.http_server import RunningServer, running_server

COMPLETION = {"model": "T0", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict(t0_directory: Path) -> Iterator[RunningServer]:
    settings = {"max_header_size": 2000, "client_timeout": 3, "max_connections": 20, "max_body_size": 100_000}
    with running_server(t0_directory, settings) as running:
        yield running


def open_connections(server: RunningServer) -> int:
    return len(server.server.server_state.connections)


def wait_for_connections(server: RunningServer, count: int) -> None:
    deadline = time.monotonic() + 20
    while open_connections(server) != count:
        assert time.monotonic() < deadline, open_connections(server)
        time.sleep(0.01)


def test_a_head_that_is_too_large(strict: RunningServer) -> None:
    fits = request_bytes("/v1/models", x_filler="x" * 1800)
    for data in (
        request_bytes("/v1/models", x_filler="x" * 2000),
        request_bytes("/v1/models?" + "x" * 2000),
        b"GET /" + b"x" * 10_000,  # and no end to it
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000,
    ):
        with connect(strict.url) as connection:
            connection.sendall(data)
            status, error = status_and_error(read_all(connection))
            assert status == 431
            assert "2000 bytes" in error["message"]
            assert error["code"] == "headers_too_large"
    with connect(strict.url) as connection:
        for _ in range(2):  # the limit is for each request, not for the connection
            connection.sendall(fits)
            answer = b""
            while not answer.endswith(b"}]}"):
                answer += connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"FOO BAR BAZ\r\n\r\n",
     b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http(strict: RunningServer, data: bytes) -> None:
    with connect(strict.url) as connection:
        connection.sendall(data)
        answer = read_all(connection)
    assert status_and_error(answer)[0] == 400
    assert strict.http.get("/health").status_code == 200


def test_a_body_larger_than_allowed_closes_the_connection(strict: RunningServer) -> None:
    with connect(strict.url) as connection:
        connection.sendall(request_bytes("/v1/completions", b"", content_length="100001"))
        status, error = status_and_error(read_all(connection))
    assert status == 413
    assert "100000 bytes" in error["message"]


def test_slow_clients_are_cut_off_and_hold_up_nobody(strict: RunningServer) -> None:
    before = open_connections(strict)
    slow = [connect(strict.url) for _ in range(9)]
    for silent, in_head, in_body in zip(slow[0::3], slow[1::3], slow[2::3], strict=True):
        assert silent
        in_head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        in_body.sendall(request_bytes("/v1/completions", b"", content_length="50000") + b"{")
    assert strict.post("completions", **COMPLETION).status_code == 200
    answers = []
    for _ in range(5):  # a byte now and then does not help
        with suppress(OSError):
            slow[1].sendall(b"x")
        time.sleep(0.1)
    for connection in slow:
        with connection:
            answers.append(read_all(connection))
    assert answers[0::3] == answers[1::3] == [b""] * 3, "nothing was asked"
    for answer in answers[2::3]:
        status, error = status_and_error(answer)
        assert status == 408
        assert "3 s" in error["message"]
    assert open_connections(strict) <= before


def test_a_reader_who_takes_nothing_is_cut_off(strict: RunningServer) -> None:
    """Its answer is larger than what the kernel and the server keep for it."""
    strict.wait_until_idle()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(strict.url.rpartition(":")[2])))
        body = {"model": "T0", "prompt": ["x"] * 64, "n": 8, "max_tokens": 400, "logprobs": 20, "stream": True}
        connection.sendall(request_bytes("/v1/completions", body | {"ignore_eos": True}))
        deadline = time.monotonic() + 30
        while strict.engine.stats().running == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert strict.post("completions", **COMPLETION).status_code == 200
        strict.wait_until_idle(120)
    stats = strict.engine.stats()
    assert stats.num_aborted > 0, "it did not run to its end"


def test_more_connections_than_allowed(strict: RunningServer) -> None:
    strict.http.close()
    strict.http = type(strict.http)(base_url=strict.url, timeout=60)
    wait_for_connections(strict, 0)
    many = [connect(strict.url) for _ in range(20)]
    wait_for_connections(strict, 20)
    with connect(strict.url) as one_more:
        one_more.sendall(request_bytes("/health"))
        answer = read_all(one_more)
    status, error = status_and_error(answer)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert "20" in error["message"]
    assert b"retry-after: 1" in answer
    for connection in many:
        connection.close()
    wait_for_connections(strict, 0)
    assert strict.http.get("/health").status_code == 200


def test_requests_in_a_row_on_one_connection(strict: RunningServer) -> None:
    with connect(strict.url) as connection:
        one = request_bytes("/v1/completions", COMPLETION)
        connection.sendall(one * 3 + request_bytes("/v1/models", connection="close"))
        assert read_all(connection).count(b"HTTP/1.1 200") == 4


def test_a_reader_who_falls_behind_is_given_up(strict: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded; it reads that, and then why there is no more."""
    monkeypatch.setattr("headrace.engine.async_engine.MAX_BUFFERED_DELTAS", 20)
    strict.wait_until_idle()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(strict.url.rpartition(":")[2])))
        body = {"model": "T0", "prompt": ["x"] * 16, "n": 4, "max_tokens": 400, "logprobs": 20, "stream": True}
        connection.sendall(request_bytes("/v1/completions", body | {"ignore_eos": True}, connection="close"))
        while strict.engine.stats().running == 0:
            time.sleep(0.01)
        strict.wait_until_idle(60)
        connection.settimeout(30)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"the client is more than 20 tokens behind and is given up" in answer
    assert answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
