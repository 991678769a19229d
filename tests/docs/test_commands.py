"""Runs what the documentation tells readers to run.

Every ```bash and ```python block of README.md and docs/*.md is run in order, each in a process of its own, in the root
of the repository. A block that starts a server (`make serve`, `headrace serve ...`) leaves it running, on a free port
instead of the one in the text, for the blocks after it, until another is started or the page ends. A block is left out
only if the line above it says why: `<!-- not run: reason -->`.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Blocks in these languages are shown, not run. Others than these and bash and python are not used.
SHOWN = {"text", "json", "yaml", "toml", "cpp", "mermaid", "http"}
SECONDS = 180
ENV = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


@dataclass
class Block:
    line: int
    language: str
    code: str
    not_run: str | None = None

    @property
    def starts_server(self) -> bool:
        return self.language == "bash" and re.match(r"(make|headrace) serve\b", self.code) is not None


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page; a block in a list may be indented."""
    found: list[Block] = []
    lines = text.splitlines()
    fence = None
    for number, line in enumerate(lines, 1):
        if fence is None and (opening := re.match(r"(\s*)(```+)\s*(\S*)", line)):
            indent, fence, language = opening.groups()
            above = re.fullmatch(r"\s*<!-- not run: (.+) -->\s*", lines[number - 2]) if number > 1 else None
            found.append(Block(number, language, "", above and above[1]))
        elif fence and line.strip() == fence:
            fence = None
        elif fence:
            found[-1].code += line.removeprefix(indent) + "\n"
    assert fence is None, f"the block that begins in line {found[-1].line} does not end"
    return found


class Page:
    """The state of one page while it is run: the port that stands for each port in its text, and the server."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self.server: subprocess.Popen[str] | None = None

    def port(self, written: str) -> int:
        if written not in self.ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.ports[written] = free.getsockname()[1]
        return self.ports[written]

    def with_free_ports(self, code: str) -> str:
        return re.sub(r"(127\.0\.0\.1:|localhost:|--port[ =])(\d+)", lambda m: f"{m[1]}{self.port(m[2])}", code)

    def run(self, block: Block) -> None:
        if block.starts_server:
            self.start_server(block.code.strip())
            return
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, self.with_free_ports(block.code)],
            cwd=ROOT, env=ENV, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
        if "/v1/" in block.code and block.language == "bash":
            assert '"error"' not in done.stdout, done.stdout

    def start_server(self, command: str) -> None:
        self.stop_server()
        written = re.search(r"--port[ =](\d+)", command)
        port = self.port(written[1] if written else "8000")
        command = self.with_free_ports(command)
        if not written:
            command += f" ARGS='--port {port}'" if command.startswith("make") else f" --port {port}"
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=ROOT,
            env=ENV,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        deadline = time.monotonic() + SECONDS
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert self.server.poll() is None, f"{command!r} ended with exit status {self.server.returncode}"
            assert time.monotonic() < deadline, f"{command!r} does not answer"
            time.sleep(0.1)

    def stop_server(self) -> None:
        if self.server and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGTERM)
            try:
                self.server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.server.pid, signal.SIGKILL)
                raise
        self.server = None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def page() -> Iterator[Page]:
    opened = Page()
    try:
        yield opened
    finally:
        opened.stop_server()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_of(path: Path) -> None:
    ran = 0
    with page() as opened:
        for block in blocks(path.read_text(encoding="utf-8")):
            place = f"{path.relative_to(ROOT)}, line {block.line}"
            assert block.language in {"bash", "python"} | SHOWN, f"{place}: which language is {block.language!r}?"
            if block.language in SHOWN or block.not_run:
                continue
            if (
                block.code.startswith("make ")
                and subprocess.run(["make", "-q", ".venv/.installed"], cwd=ROOT).returncode
            ):
                pytest.skip(f"{place}: this checkout was not set up by make")
            try:
                opened.run(block)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"{place}: {shlex.quote(block.code)}\n{error}") from error
            ran += 1
    if path.name == "README.md":
        assert ran >= 5


def test_blocks_are_found() -> None:
    text = """\
# Title
```bash
one
```
<!-- not run: takes an hour -->
```bash
two
```
- item
  ```python
  if x:
      y
  ```
````text
```bash
shown
```
````
"""
    assert blocks(text) == [
        Block(2, "bash", "one\n"),
        Block(6, "bash", "two\n", "takes an hour"),
        Block(10, "python", "if x:\n    y\n"),
        Block(14, "text", "```bash\nshown\n```\n"),
    ]
    with pytest.raises(AssertionError, match="line 1 does not end"):
        blocks("```bash\nls\n")


def test_ports_are_replaced_alike() -> None:
    opened = Page()
    free = opened.port("8000")
    assert opened.with_free_ports("curl http://127.0.0.1:8000/x localhost:8000") == (
        f"curl http://127.0.0.1:{free}/x localhost:{free}"
    )
    assert opened.with_free_ports("--port 9000") == f"--port {opened.port('9000')}"
    assert opened.port("9000") != free


def test_a_command_that_fails_is_noticed() -> None:
    with page() as opened:
        for block in (
            Block(1, "bash", "false | true\n"),
            Block(1, "python", "raise SystemExit(3)\n"),
            Block(1, "bash", "headrace serve /no/such/model\n"),
        ):
            with pytest.raises(AssertionError, match="exit status"):
                opened.run(block)


def test_every_request_parameter_is_described() -> None:
    from headrace.server.protocol import ChatBody, CompletionBody, StructuredOutputsField, TokenizeBody

    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    for body in (ChatBody, CompletionBody, StructuredOutputsField, TokenizeBody):
        for name in body.known_fields():
            assert re.search(rf"[`\"{{ ]{name}\b[`\":.]", text), name
