"""`headrace eval`: perplexity, and the divergence from a reference model."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from headrace.cli.generate import read_text
from headrace.cli.settings import add_flags, given
from headrace.config import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.evals.metrics import Perplexity

ENGINE_FLAGS = ["revision", "dtype", "quantization", "kv_cache_dtype", "backend", "activation_precision", "threads"]
CHUNK = 512  # tokens of a step
DESCRIPTION = """\
Measures a model on a text, as it would be served: with its quantization, its
cache and the backend's kernels.

  ppl   perplexity: how surprised it is by the text, token by token (less is better)
  kld   how far its distributions are from those of --reference: Kullback-Leibler
        divergence, and how often both have the same most likely token

Each token is seen from a window of tokens before it; windows begin --stride tokens
after one another. Intervals are of 95 % confidence."""

EXAMPLES = """\
examples:
  headrace eval ppl ./model --dataset text.txt
  headrace eval ppl ./model --dataset text.txt --quantization int4 --window 1024 --stride 512
  headrace eval kld ./model-gptq --reference ./model --dataset text.txt --tokens 4096
  headrace eval kld ./model --quantization int8 --reference ./model --dataset text.txt --json

exit status:
  0 all went well, 1 an error, 2 a wrong command line, 130 interrupted by Ctrl-C"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        usage="headrace eval ppl|kld MODEL --dataset FILE [flags]",
        help="measure a model's quality on a text",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("measure", metavar="MEASURE", choices=["ppl", "kld"], help="ppl or kld")
    parser.add_argument("model", metavar="MODEL", help='a directory, a GGUF file, org/name, or "default"')
    parser.add_argument("--dataset", metavar="FILE", required=True, help="plain text in UTF-8; - is standard input")
    parser.add_argument("--reference", metavar="MODEL", help="the model to compare with, for kld; loaded as it is")
    parser.add_argument("--tokens", metavar="N", type=int, help="of the text, from its start (default: all)")
    parser.add_argument("--window", metavar="N", type=int, default=2048, help="tokens seen at once (default: 2048)")
    parser.add_argument("--stride", metavar="N", type=int, help="tokens between windows (default: half a window)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_flags(parser, "engine settings", EngineConfig, ENGINE_FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("tokens", "window", "stride"):
        value = getattr(args, name)
        if value is not None and value < (1 if name == "stride" else 2):
            raise ConfigError(f"{name} must be at least {1 if name == 'stride' else 2}, not {value}")
    stride = args.stride or max(1, args.window // 2)
    if stride > args.window:
        raise ConfigError(f"stride {stride} is more than the window of {args.window}: tokens would be left out")
    if args.measure == "kld" and args.reference is None:
        raise ConfigError("kld needs a --reference to compare with")
    if args.measure == "ppl" and args.reference is not None:
        raise ConfigError("ppl has no --reference: kld compares with one")
    text = read_text(args.dataset)

    from headrace.evals.metrics import divergence, perplexity
    from headrace.evals.scoring import TextModel

    sizes = {"max_model_len": args.window, "max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
    settings = given(args, EngineConfig) | sizes
    model = TextModel(EngineConfig(**settings | {"model": args.model}))
    ids = model.encode(text)[: args.tokens]
    if args.measure == "ppl":
        found = perplexity(model, ids, args.window, stride)
        print(json.dumps(dataclasses.asdict(found)) if args.json else _line("perplexity", found))
        return 0
    plain = {k: v for k, v in settings.items() if k in ("backend", "threads", *sizes)} | {"model": args.reference}
    compared = divergence(model, TextModel(EngineConfig(**plain)), ids, args.window, stride)
    if args.json:
        print(json.dumps(dataclasses.asdict(compared)))
        return 0
    c = compared
    print(f"KL divergence     {c.kl:.5f} nats  ({c.kl_low:.5f} to {c.kl_high:.5f}), over {c.tokens} tokens")
    print("  percentiles     " + ", ".join(f"{p} %: {value:.4g}" for p, value in c.percentiles.items()))
    print(f"  largest         {c.largest:.4g}")
    print(f"same top token    {c.same_top:.2%}  ({c.same_top_low:.2%} to {c.same_top_high:.2%})")
    print(_line("perplexity", c.model))
    print(_line("of the reference", c.reference))
    return 0


def _line(name: str, found: "Perplexity") -> str:
    interval = f"({found.low:.4g} to {found.high:.4g})"
    return f"{name:17s} {found.perplexity:.5g}  {interval}, over {found.tokens} tokens"
