"""`headrace chat`: a conversation in the terminal."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.cli.generate import SAMPLING_FLAGS, sampling_params
from headrace.cli.settings import add_engine_flags, add_flags, engine_and_server_config
from headrace.errors import RequestError
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

DESCRIPTION = """\
Holds a conversation with a model, in the format of the model's own chat template.

MODEL is a Hugging Face directory, a GGUF file, org/name on the Hugging Face hub,
or "default" (as without MODEL)."""

COMMANDS = """\
  /help          show this
  /clear         forget the conversation and begin a new one
  /quit, /exit   leave; so does Ctrl-D
  Ctrl-C         stop the answer; once more at the prompt leaves"""

EXAMPLES = f"""\
while it runs:
{COMMANDS}
  When the context is full the oldest messages are left out, and a line says so.

examples:
  headrace chat
  headrace chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
  echo "What is a headrace?" | headrace chat ./model --max-tokens 100

exit status:
  0 left by a command or Ctrl-D, 1 an error, 2 a wrong command line, 130 left by Ctrl-C"""

Message = dict[str, str]


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        usage="headrace chat [MODEL] [flags]",
        help="talk to a model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="whom to talk to")
    parser.add_argument("--system", metavar="TEXT", help="the system message: how the model should answer")
    add_flags(parser, "sampling", SamplingParams, SAMPLING_FLAGS, {"max_tokens": "None"})
    add_engine_flags(parser, seed=False)  # --seed is the request's
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine_config, _ = engine_and_server_config(args)

    from headrace.engine.llm import LLM

    llm = LLM(**vars(engine_config))
    params = sampling_params(llm, args, max_tokens=None)
    conversation = Conversation(llm, params, args.system)
    conversation.prompt_ids("Hello")  # a model without a chat template is told before the first question
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing and history
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{engine_config.model}, {llm.max_model_len} tokens of context. /help lists the commands.")
    return converse(conversation, "> " if is_terminal else "")


def converse(conversation: "Conversation", prompt: str) -> int:
    """Asks and answers until the user leaves; returns the exit status."""
    interrupted = False  # the last thing that happened was a Ctrl-C, so the next one leaves
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            print("\n(Ctrl-C again, Ctrl-D or /quit leaves)")
            continue
        interrupted = False
        if line in ("/quit", "/exit"):
            return 0
        if line == "/help":
            print(COMMANDS)
        elif line == "/clear":
            conversation.clear()
            print("(a new conversation)")
        elif line.startswith("/"):
            print(f"(unknown command {line.split()[0]}: /help lists them)")
        elif line:
            interrupted = answer(conversation, line)


def answer(conversation: "Conversation", text: str) -> bool:
    """Prints the answer to `text` as it is made. True if Ctrl-C stopped it; a second one meanwhile leaves."""
    with interrupt_flag() as interrupted:
        try:
            for piece in conversation.ask(text):
                print(piece, end="", flush=True)
                if interrupted():
                    print(" (stopped)", end="")
                    break
        except RequestError as error:
            print(f"({error})", end="")
        print()
        return interrupted()


@contextlib.contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """While it is open, the first Ctrl-C only sets a flag, as it must not tear the engine out of a step."""
    count = 0

    def on_interrupt(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.history: list[Message] = []

    def clear(self) -> None:
        self.history = []

    def prompt_ids(self, text: str, skip: int = 0) -> list[int]:
        """The prompt for `text`, with the history but for its first `skip` messages."""
        messages = [*self.first, *self.history[skip:], {"role": "user", "content": text}]
        return self.llm.tokenizer.encode_chat(messages)

    def ask(self, text: str) -> Iterator[str]:
        """The answer to `text`, piece by piece. Both are kept, the answer as far as it was made.

        Where they do not fit the context any more, with room for an answer, the oldest question and answer go first.
        Raises RequestError, and changes nothing, for a text that does not fit by itself.
        """
        limit = self.llm.max_model_len
        room = min(self.params.max_tokens or limit, max(limit // 8, 1))
        skip = 0
        while len(ids := self.prompt_ids(text, skip)) + room > limit and skip < len(self.history):
            skip += 2
        if len(ids) >= limit:
            raise RequestError(f"this message takes {len(ids)} tokens, and the context has {limit}: make it shorter")
        if skip:
            self.history = self.history[skip:]
            yield f"(the context is full: the oldest {skip} messages were left out)\n"
        params = replace(self.params, max_tokens=min(self.params.max_tokens or limit, limit - len(ids)))
        said = ""
        finish_reason = None
        with contextlib.closing(self.llm.stream(ids, params)) as deltas:
            try:
                for delta in deltas:
                    said += delta.text
                    finish_reason = delta.finish_reason
                    yield delta.text
            finally:
                self.history += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        if finish_reason == "length":
            yield f" (cut off after {params.max_tokens} tokens)"
