"""`headrace serve` in a process of its own."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

PROGRAM = Path(sys.executable).with_name("headrace")
COMPLETION = {"model": "T0", "prompt": "x", "max_tokens": 1}


class Process:
    """A server in a process of its own, with a place of its own for temporary files."""

    def __init__(self, tmp_path: Path, model: Path, *flags: str, max_files: int | None = None) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="hr-"))  # tmp_path can be too long for a socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        limit = [] if max_files is None else ["prlimit", f"--nofile={max_files}:{max_files}"]
        self.log = (tmp_path / "log").open("w+")  # a pipe would be full at some time
        self.popen = subprocess.Popen(
            [*limit, PROGRAM, "serve", model, "--port", str(self.port), "--max-model-len", "512", *flags],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=os.environ | {"TMPDIR": str(self.tmp)},
        )  # fmt: skip

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=COMPLETION | body, timeout=60)

    def wait_for(self, path: str, status: int = 200) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                if self.get(path).status_code == status:
                    return
            except httpx.TransportError:
                assert self.popen.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def end(self, seconds: float = 30) -> tuple[int, str, str]:
        """Waits until it has ended. Returns its exit status, and what it has written to stdout and stderr."""
        out, _ = self.popen.communicate(timeout=seconds)
        self.log.seek(0)
        return self.popen.returncode, out, self.log.read()


@contextmanager
def process(tmp_path: Path, model: Path, *flags: str, max_files: int | None = None) -> Iterator[Process]:
    started = Process(tmp_path, model, *flags, max_files=max_files)
    try:
        yield started
    finally:
        started.popen.kill()
        started.popen.communicate()
        started.log.close()
        shutil.rmtree(started.tmp, ignore_errors=True)
