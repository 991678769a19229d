"""Starts `headrace serve` in a process of its own, and says when it was ready and what memory it takes."""

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.errors import ConfigError

READY_SECONDS = 600.0


@dataclass(slots=True)
class Started:
    """A server that answers. url: with /v1. model: its name there. begun, ready: on time.perf_counter's clock."""

    process: "subprocess.Popen[str]"
    url: str
    model: str
    begun: float
    ready: float

    def memory(self) -> int:
        """Bytes that its processes have in memory; what several of them share is counted once (Linux's PSS)."""
        parent = psutil.Process(self.process.pid)
        return sum(p.memory_full_info().pss for p in (parent, *parent.children(recursive=True)))


@contextmanager
def server(model: str, flags: list[str]) -> Iterator[Started]:
    """`headrace serve` on a port of its own, until the block ends. Raises ConfigError if it does not start."""
    program = Path(sys.executable).with_name("headrace")
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [program, "serve", model, "--port", "0", *flags], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            name, url = _greeting(process)
            if not url:
                log.seek(0)
                fault = [line for line in log.read().splitlines() if line.startswith("error:")]
                raise ConfigError(f"the server did not start: {fault[-1] if fault else 'it said nothing'}")
            yield Started(process, url, name, begun, time.perf_counter())
        finally:
            process.terminate()
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _greeting(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """The model's name and the address, which the server prints when it is ready; empty if it ends before."""
    assert process.stdout is not None
    watch = threading.Timer(READY_SECONDS, process.kill)
    watch.start()
    try:
        for line in process.stdout:
            if found := re.search(r"Serving (\S+) on (http\S+/v1)", line):
                return found[1], found[2]
    finally:
        watch.cancel()
    return "", ""
