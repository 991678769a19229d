"""`headrace quantize`: a model in fewer bits, as a directory that others read too."""

import argparse
import json
from pathlib import Path
from typing import Any

from headrace.cli.settings import add_flags, given
from headrace.errors import ConfigError
from headrace.quantize.settings import QuantizeSettings

GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_0", "f16": "F16", "bf16": "BF16"}
DESCRIPTION = """\
Makes a model smaller: its matrices in 2, 3, 4 or 8 bits, written as a Hugging Face
directory in the format of GPTQ, AWQ or compressed-tensors. All on the CPU.

  int8, int4    round to nearest; seconds, needs no data
  gptq          rounds column by column, each column's error made good by the rest
  awq           scales inputs so that those that matter are rounded finely
  smoothquant   8 bits for weights and activations

With --format gguf a GGUF file is made of a model in any form: int8 gives Q8_0, int4
Q4_0 (with --no-symmetric Q4_1), and f16 and bf16 are methods as well.

An interrupted run goes on where it was when the same command is given again."""

EXAMPLES = """\
examples:
  headrace quantize ./model --method int4 --output ./model-int4
  headrace quantize ./model --method gptq --dataset wikitext2 --output ./model-gptq
  headrace quantize ./model --method gptq --bits 3 --group-size 64 --desc-act --dataset text.txt --output ./small
  headrace quantize ./model --method awq --dataset chats.jsonl --samples 64 --output ./model-awq
  headrace quantize ./model.F16.gguf --method int4 --format gguf --output ./model-q4
  headrace quantize default --method int8 --ignore '*.down_proj' --output ./mixed

exit status:
  0 all went well, 1 an error, 2 a wrong command line, 130 interrupted by Ctrl-C"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "quantize",
        usage="headrace quantize MODEL --method METHOD --output DIR [flags]",
        help="make a model smaller",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help='a directory, a GGUF file, org/name, or "default"')
    parser.add_argument("--output", metavar="DIR", required=True, help="a new directory for the result")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit, for a model from the hub")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--report", action="store_true", help="write a page with plots beside the model, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_flags(parser, "quantization", QuantizeSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = given(args, QuantizeSettings)
    if settings.get("format") == "gguf":
        return run_gguf(args, settings)
    if "method" not in settings:
        settings["method"] = ""
    plan = QuantizeSettings(**settings).plan()

    import logging

    from headrace.formats.open import open_checkpoint
    from headrace.quantize.calibration import samples
    from headrace.quantize.quantizer import Quantizer

    logging.basicConfig(format="%(levelname)s %(message)s")
    if args.threads is not None:
        import torch

        if args.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {args.threads}")
        torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.model, args.revision)
    quantizer = Quantizer(checkpoint, Path(args.output), plan)
    data = None
    if plan.dataset is not None:
        data = samples(
            checkpoint.tokenizer(),
            plan.dataset,
            count=plan.samples,
            length=plan.seq_len,
            seed=plan.seed,
            max_length=quantizer.config.max_position,
        )
    reports = quantizer.run(data)
    of = "their outputs" if plan.calibrates else "their values"
    if args.report:
        from headrace.quantize.report import write_report

        title = f"{args.model}, {plan.method}, {plan.scheme.bits} bits"
        write_report(Path(args.output) / "quantization_report.html", title, reports, of)
    if args.json:
        print(json.dumps([vars(report) for report in reports]))
        return 0
    worst = max(reports, key=lambda report: report.error)
    mean = sum(report.error for report in reports) / len(reports)
    of = "their outputs" if plan.calibrates else "their values"
    print(
        f"{len(reports)} matrices in {plan.scheme.bits} bits; squared error {mean:.3g} on average, as a share of {of}"
    )
    print(f"largest: {worst.error:.3g} in {worst.name.removesuffix('.weight')}")
    print(f"written to {args.output}; try: headrace generate {args.output} 'Once upon a time'")
    return 0


def run_gguf(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    method, symmetric = settings.get("method", ""), settings.get("symmetric")
    if method not in GGUF_TYPES:
        raise ConfigError(f"the gguf format is for the methods {', '.join(GGUF_TYPES)}, not {method!r}")
    known = {"method", "format", "ignore"} | ({"symmetric"} if method == "int4" else set())
    for name in sorted(settings.keys() - known):
        raise ConfigError(f"{name} means nothing for {method} in the gguf format")
    if args.report or args.threads is not None:
        raise ConfigError(f"{'report' if args.report else 'threads'} means nothing for the gguf format")

    from headrace.formats.open import open_checkpoint
    from headrace.quantize.gguf import quantize_gguf

    checkpoint = open_checkpoint(args.model, args.revision)
    block_type = "Q4_1" if symmetric is False else GGUF_TYPES[method]
    path, counts = quantize_gguf(checkpoint, Path(args.output), block_type, tuple(settings.get("ignore", ())))
    if args.json:
        print(json.dumps({"file": str(path), "tensors": counts}))
    else:
        print(f"written to {path}: " + ", ".join(f"{count} tensors in {name}" for name, count in counts.items()))
    return 0
