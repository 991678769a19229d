"""What each way of quantizing costs in quality: a table of methods, bits and group sizes.

    python bench/quantization.py [--model default] [--text FILE] [--tokens 2048] [--samples 32] [--only gptq,awq]

The reference is the model as its file has it. All run on the `reference` backend in float32, which computes with
exactly the values that are stored. Calibration and evaluation use different parts of the same text. A group size that
does not divide a matrix's columns is refused, and the table says so.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.evals.metrics import divergence
from headrace.evals.scoring import TextModel
from headrace.formats.open import open_checkpoint
from headrace.quantize import calibration
from headrace.quantize.quantizer import Quantizer
from headrace.quantize.schemes import Scheme
from headrace.quantize.settings import Plan, QuantizeSettings


def plans(bits_of: list[int], groups: list[int], shared: dict[str, Any]) -> Iterator[tuple[str, Plan]]:
    """All that is compared, by name."""
    nearest = QuantizeSettings(method="int4", group_size=32, search_scales=False).plan()
    if 8 in bits_of:
        yield "W8A8 to nearest", replace(nearest, scheme=Scheme(bits=8, activation_bits=8))
        yield "SmoothQuant W8A8", QuantizeSettings(method="smoothquant", **shared).plan()
    for bits in bits_of:
        for group in groups if bits < 8 else [-1]:
            scheme = Scheme(bits=bits, group_size=group)
            yield "to nearest", replace(nearest, scheme=scheme)
            if bits < 8:
                yield "to nearest, searched", replace(nearest, scheme=scheme, search_scales=True)
                zeros = replace(scheme, symmetric=False)
                yield "to nearest, asymmetric", replace(nearest, scheme=zeros)
            gptq = QuantizeSettings(method="gptq", bits=bits, group_size=group, **shared)
            yield "GPTQ", gptq.plan()
            yield "GPTQ, act-order", replace(gptq, desc_act=True).plan()
            if bits < 8:
                awq = QuantizeSettings(method="awq", bits=bits, group_size=group, format="compressed-tensors", **shared)
                yield "AWQ (asymmetric)", awq.plan()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, help="plain text in UTF-8 (default: the manual that Python brings along)")
    parser.add_argument("--tokens", type=int, default=2048, help="to evaluate, from the text's start")
    parser.add_argument("--window", type=int, default=1024, help="tokens that see each other")
    parser.add_argument("--samples", type=int, default=32, help="of calibration, with 512 tokens each")
    parser.add_argument("--bits", default="8,4,3", help="(default: %(default)s)")
    parser.add_argument("--groups", default="32,64,128", help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="parts of names, such as awq,nearest (default: all)")
    parser.add_argument("--threads", type=int, help="(default: torch's own)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    logging.getLogger("headrace").setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)

    text = args.text.read_text(encoding="utf-8") if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    checkpoint = open_checkpoint(args.model)
    ids = checkpoint.tokenizer().encode(text)
    only = [word.lower() for word in args.only.split(",") if word]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rest = Path(folder) / "calibration.txt"
        rest.write_text(checkpoint.tokenizer().decode(ids[2 * args.tokens :]), encoding="utf-8")
        settings = {"dataset": str(rest), "samples": args.samples, "seq_len": 512}
        data = calibration.samples(
            checkpoint.tokenizer(), str(rest), count=args.samples, length=512, seed=0, max_length=1 << 20
        )
        config = EngineConfig(
            model=args.model, max_model_len=args.window, max_num_seqs=1, max_num_batched_tokens=512, backend="reference"
        )
        reference = TextModel(config)
        heads = zip(("bits", "group", "ppl", "KL", "99 %", "same top", "time"), (4, 5, 8, 8, 7, 8, 6), strict=True)
        print(f"{'method':24s} " + " ".join(f"{head:>{width}s}" for head, width in heads))
        bits, groups = ([int(n) for n in part.split(",")] for part in (args.bits, args.groups))
        for number, (name, plan) in enumerate(plans(bits, groups, settings)):
            if only and not any(word in name.lower() for word in only):
                continue
            label = f"{name:24s} {plan.scheme.bits:4d} {plan.scheme.group_size:5d}"
            output = Path(folder) / str(number)
            start = time.monotonic()
            try:
                Quantizer(checkpoint, output, plan).run(data if plan.calibrates else None)
            except ConfigError as error:
                print(f"{label} refused: {error}")
                continue
            seconds = time.monotonic() - start
            model = TextModel(replace(config, model=str(output)))
            found = divergence(model, reference, ids[: args.tokens], args.window, args.window // 2)
            print(
                f"{label} {found.model.perplexity:8.4g} {found.kl:8.4f} {found.percentiles['99']:7.3f} "
                f"{found.same_top:8.2%} {seconds:5.0f}s",
                flush=True,
            )
            rows.append({"name": name, **asdict(plan.scheme), **asdict(found), "seconds": seconds})
        if rows:
            print(f"{'(the reference)':35s} {rows[0]['reference']['perplexity']:8.4g}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
