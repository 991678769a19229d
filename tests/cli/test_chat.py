"""`headrace chat` in a terminal of its own, typed into as a person would."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli.chat import Conversation
from headrace.cli.main import main
from headrace.engine.llm import LLM
from headrace.errors import RequestError
from headrace.sampling.params import SamplingParams
from helpers.http_server import t0_greedy, t0_text
from helpers.tiny import save_t0

PROGRAM = Path(sys.executable).with_name("headrace")


class Terminal:
    """A program in a pseudo-terminal, which is its controlling one: Ctrl-C sends SIGINT."""

    def __init__(self, *command: str | Path) -> None:
        self.master, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def expect(self, text: str, seconds: float = 60) -> str:
        """Reads until `text` comes; returns what came before it, and forgets both."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{text!r} has not come, but {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode("utf-8", "replace").replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_output(self) -> None:
        assert select.select([self.master], [], [], 60)[0]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at the prompt. Python's readline shows it a moment before it listens, and a signal in that moment is
        noticed with the next key only."""
        time.sleep(0.5)
        self.type("\x03")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(t0_directory: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts `headrace chat` on T0, with a seed with which it never ends its answer by itself."""
    started: list[Terminal] = []

    def start(*flags: str) -> Terminal:
        started.append(Terminal(PROGRAM, "chat", t0_directory, "--ignore-eos", "--seed", "1", *flags))
        return started[-1]

    yield start
    for chat in started:
        chat.close()


def test_a_conversation(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--max-model-len", "96", "--system", "S")
    assert "96 tokens of context" in chat.expect("> ")
    chat.type("/help\n")
    assert "/clear" in chat.expect("> ")
    chat.type("/nope\n")
    assert "unknown command /nope" in chat.expect("> ")
    chat.type("\n")
    assert chat.expect("> ").strip() == ""
    chat.type("/clear\n")
    assert "new conversation" in chat.expect("> ")
    chat.type("Hi\n")
    chat.expect(" (cut off after ")  # it went on to the end of the context
    assert chat.expect("> ").endswith(" tokens)\n")
    chat.type("Again\n")
    chat.expect("the oldest 2 messages were left out")
    chat.expect(" (cut off after ")
    chat.expect("> ")
    chat.type("/quit\n")
    assert chat.process.wait(20) == 0


def test_interrupts(terminal: Callable[..., Terminal]) -> None:
    chat = terminal()
    chat.expect("> ")
    chat.interrupt()
    chat.expect("Ctrl-C again")
    chat.expect("> ")
    for _ in range(5):  # on a busy machine the answer may end before the interrupt comes
        chat.type("Hi\n")
        chat.wait_for_output()
        chat.type("\x03")  # stops the answer, not the program
        if "(stopped)" in chat.expect("> "):
            break
        chat.expect("Ctrl-C again")
        chat.expect("> ")
    else:
        pytest.fail("no answer was stopped")
    chat.interrupt()  # the second in a row
    assert chat.process.wait(60) == 130


def test_end_of_input(t0_directory: Path) -> None:
    run = subprocess.run(
        [PROGRAM, "chat", t0_directory, "--max-tokens", "5", "--temperature", "0", "--ignore-eos"],
        input="Hi\n",
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    prompt = [256, *b"user:Hi", 257, 256, *b"assistant:"]
    assert run.stdout == t0_text(t0_greedy(prompt, 5)) + " (cut off after 5 tokens)\n\n"


def test_a_model_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(save_t0(tmp_path / "T0"))]) == 1
    assert "chat template" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llm(t0_directory: Path) -> LLM:
    return LLM(str(t0_directory))


def test_answers_become_history(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    conversation = Conversation(llm, params, system=None)
    pieces = "".join(conversation.ask("Hi"))
    ids = [256, *b"user:Hi", 257, 256, *b"assistant:"]
    first = t0_text(t0_greedy(ids, 4))
    assert pieces == first + " (cut off after 4 tokens)"
    "".join(conversation.ask("So"))
    ids += [*first.encode(), 257, 256, *b"user:So", 257, 256, *b"assistant:"]
    assert conversation.history[3] == {"role": "assistant", "content": t0_text(t0_greedy(ids, 4))}
    conversation.clear()
    assert conversation.prompt_ids("Hi") == [256, *b"user:Hi", 257, 256, *b"assistant:"]


def test_a_message_that_does_not_fit(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(max_tokens=4), system="S")
    "".join(conversation.ask("Hi"))
    kept = list(conversation.history)
    with pytest.raises(RequestError, match="512"):
        "".join(conversation.ask("x" * 600))
    assert conversation.history == kept
    "".join(conversation.ask("x" * 470))  # fits, but only without what was said before
    assert [len(m["content"]) for m in conversation.history[:1]] == [470]
