"""`headrace generate`: continue prompts."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.settings import add_engine_flags, add_flags, engine_and_server_config, given
from headrace.errors import ConfigError
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.engine.request import RequestOutput

MAX_TOKENS = 256
SAMPLING_FLAGS = ["max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos"]
DESCRIPTION = """\
Continues prompts with a model. The prompt is given to the model as it is; for a
conversation in the model's own format use 'headrace chat'.

One prompt is answered word by word as the model goes. Several are run together,
and printed in their order, each below a line '==> prompt <=='. Without a prompt
the whole of standard input is the prompt."""

EXAMPLES = """\
examples:
  headrace generate default "The capital of France is" --temperature 0
  headrace generate ./model "Once upon a time" "In the beginning" --max-tokens 64 --seed 1
  headrace generate ./model --prompts-file prompts.txt --json > answers.jsonl
  cat question.txt | headrace generate ./model --stop $'\\n'

notes:
  A model's generation_config.json, where there is one, may set other defaults for temperature, top-k, top-p and min-p.

exit status:
  0 all went well, 1 an error, 2 a wrong command line, 130 interrupted by Ctrl-C"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        usage="headrace generate MODEL [PROMPT ...] [flags]",
        help="continue one or more prompts",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        rest="prompts",
    )
    parser.add_argument("model", metavar="MODEL", help='a directory, a GGUF file, org/name, or "default"')
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="the text to continue")
    output = parser.add_argument_group("input and output")
    output.add_argument(
        "--prompts-file", metavar="FILE", help="read prompts from a file, one a line; - is standard input"
    )
    output.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print the text while it is made; possible for one prompt, and then the default",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt")
    add_flags(parser, "sampling", SamplingParams, SAMPLING_FLAGS, {"max_tokens": str(MAX_TOKENS)})
    add_engine_flags(parser, seed=False)  # --seed is the request's
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine_config, _ = engine_and_server_config(args)
    prompts = read_prompts(args)
    if args.stream and (len(prompts) > 1 or args.json):
        raise ConfigError("--stream works for one prompt and without --json")

    from headrace.engine.llm import LLM

    llm = LLM(**vars(engine_config))
    params = sampling_params(llm, args, max_tokens=MAX_TOKENS)
    if len(prompts) == 1 and not args.json and args.stream is not False:
        for text in stream_text(llm, prompts[0], params):
            print(text, end="", flush=True)
        print()
        return 0
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        if args.json:
            print(json.dumps(as_json(output), ensure_ascii=False))
        elif len(outputs) > 1:
            print(f"==> {output.prompt} <==\n{output.outputs[0].text}\n")
        else:
            print(output.outputs[0].text)
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts on the command line and in the file, or else standard input as one."""
    prompts: list[str] = list(args.prompts)
    if args.prompts_file:
        prompts += [line for line in read_text(args.prompts_file).splitlines() if line.strip()]
    elif not prompts:
        if sys.stdin.isatty():
            raise ConfigError("no prompt given: write it after the model, use --prompts-file, or pipe it in")
        prompts = [read_text("-").removesuffix("\n")]
    if not prompts:
        raise ConfigError(f"{args.prompts_file} holds no prompt")
    return prompts


def read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{'standard input' if path == '-' else path} is not UTF-8 text") from None


def sampling_params(llm: "LLM", args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Sampling from the flags, or else from the model's generation_config.json, or else from `defaults`."""
    return SamplingParams(**(defaults | llm.engine.default_sampling | given(args, SamplingParams)))


def stream_text(llm: "LLM", prompt: str, params: SamplingParams) -> Iterator[str]:
    for delta in llm.stream(llm.tokenizer.encode(prompt), params):
        yield delta.text


def as_json(output: "RequestOutput") -> dict[str, Any]:
    keys = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    outputs = [{key: value for key, value in dataclasses.asdict(o).items() if key in keys} for o in output.outputs]
    return {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": outputs}
