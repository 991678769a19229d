"""`headrace serve` as a process: it starts, says so, and ends when told."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headrace.server.run import Exit

PROGRAM = Path(sys.executable).with_name("headrace")


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and what it printed up to the command to try."""
    process = subprocess.Popen(
        [PROGRAM, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        greeting = ""
        while "curl" not in greeting:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            greeting += line
        yield process, greeting
    finally:
        process.kill()
        process.communicate()


def url_in(greeting: str) -> str:
    return next(word for word in greeting.split() if word.startswith("http")).removesuffix("/v1.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_from_start_to_end(t0_directory: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"model: {t0_directory}\nserver_config: {{port: 0, served_model_name: [it's me]}}")
    with serving("--config", config, "--shutdown-timeout", "0") as (process, greeting):
        curl = shlex.split(greeting[greeting.index("curl") :])
        assert curl[1] == url_in(greeting) + "/v1/chat/completions"
        body = json.loads(curl[curl.index("-d") + 1])
        assert body["model"] == "it's me"
        answer = httpx.post(curl[1], json=body | {"max_tokens": 3}, timeout=60)
        assert answer.json()["object"] == "chat.completion"
        # A stream that would go on for long does not keep the server from ending.
        with httpx.stream("POST", curl[1], json=body | {"stream": True, "ignore_eos": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            for _ in range(6):
                next(lines)
            begin = time.monotonic()
            process.send_signal(number)
            rest = list(lines)
        assert process.wait(20) == Exit.CUT_OFF
        assert time.monotonic() - begin < 10
        assert "error" in json.loads(rest[-4].removeprefix("data: "))
        assert rest[-2] == "data: [DONE]"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run(
            [PROGRAM, "serve", "/no/such/model", "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert run.returncode == 1
    assert run.stderr == (
        f"error: 127.0.0.1:{port} is in use: end the program that listens there, or choose another --port\n"
    )


def test_a_missing_model(tmp_path: Path) -> None:
    run = subprocess.run(
        [PROGRAM, "serve", tmp_path / "none", "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {tmp_path / 'none'}")
    assert run.stderr.count("\n") == 1
