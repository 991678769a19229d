"""The `headrace` program: finds the command, runs it, and turns errors into one line and an exit status."""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace import __version__
from headrace.cli import bench, chat, evaluate, generate, info, quantize, serve
from headrace.errors import HeadraceError

DESCRIPTION = """\
Headrace runs large language models: it answers on the command line, holds a
conversation, or serves an OpenAI-compatible API.

A MODEL is a Hugging Face directory, a GGUF file, the name of a model on the
Hugging Face hub (org/name), or the word "default": SmolLM2-135M-Instruct, a
small model that is downloaded the first time."""

EXAMPLES = """\
examples:
  headrace serve                                    serve the default model on http://127.0.0.1:8000
  headrace serve ./Qwen3-0.6B --port 9000           serve a Hugging Face directory
  headrace chat ./gemma-3-270m-it.gguf              talk to a model
  headrace generate default "The capital of France is" --max-tokens 8 --temperature 0
  headrace quantize ./model --method int4 --output ./model-int4   make a model smaller
  headrace eval ppl ./model-int4 --dataset text.txt               and see what that cost
  headrace bench latency default                                  measure how fast a model is here
  headrace info                                                   what this machine has

environment:
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE   as everywhere: where hub models are kept, the access token, no network
  HEADRACE_CACHE                      instead of ~/.cache/headrace (or $XDG_CACHE_HOME/headrace)
  OMP_NUM_THREADS                     CPU threads, where --threads does not say
  HEADRACE_ISA                        instruction set of the kernels, instead of the best ('headrace info')

exit status:
  0    all went well
  1    the model, the settings or the machine do not allow it; stderr says what and why
  2    the command line is wrong
  130  interrupted by Ctrl-C ('headrace serve' has others, see there)

files:
  ~/.cache/headrace/models   the default model
  ~/.cache/huggingface       models from the hub

'headrace COMMAND --help' tells everything about a command."""


class Parser(argparse.ArgumentParser):
    """argparse's parser with a layout for manual pages, which suggests the flag that was perhaps meant.

    rest: the name of the argument that takes all words but flags and their values, and everything after `--`. (argparse
        itself takes the words up to the first flag only.)
    """

    def __init__(self, rest: str | None = None, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        self.rest = rest

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        plain: list[str] = []
        if self.rest is not None and "--" in args:
            end = args.index("--")
            args, plain = args[:end], args[end + 1 :]
        parsed, extra = super().parse_known_args(args, namespace)
        unknown = [word for word in extra if word.startswith("-") or self.rest is None]
        if unknown:
            flag = unknown[0].split("=")[0]
            near = difflib.get_close_matches(flag, re.findall(r"--[\w-]+", self.format_help()), n=1)
            self.error(f"unknown argument {flag}" + (f": did you mean {near[0]}?" if near else ""))
        if self.rest is not None:
            setattr(parsed, self.rest, [*getattr(parsed, self.rest), *extra, *plain])
        return parsed, []

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\n{self.format_usage()}Try '{self.prog} --help'.", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> Parser:
    parser = Parser(prog="headrace", usage="headrace COMMAND [arguments]", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="headrace")
    for command in (serve, chat, generate, quantize, evaluate, bench, info):
        command.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, of this process by default, and returns the exit status."""
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help()
        return 2
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has had enough, as `head` does. Nothing may be written any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
