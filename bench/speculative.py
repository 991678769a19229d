"""What speculation brings, by workload and number of streams: tokens per second with it and without, in turn.

    python bench/speculative.py [--method ngram] [--batches 1 4 16] [--tokens 96] [--rounds 3]
    python bench/speculative.py --config '{"method": "draft_model", "model": "DIR"}'

One engine runs each workload with speculation and with `speculative: false`, one after the other, so that a machine
that slows down slows both; nothing is reused between runs. "edit" repeats a piece of code with small changes, "quote"
answers with pieces of its prompt, "json" goes on with records of one shape, "chat" answers questions, "random" goes on
from random tokens at temperature 1. Greedy but for the last.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from headrace import LLM, SamplingParams
from headrace.bench.results import Result, Row, as_text
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.formats.package_models import DEFAULT_MODEL, fetch

CODE = '''def read_lines(path):
    """Returns the lines of a file."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for line in file]


def count_words(path):
    """Returns how often each word of a file occurs."""
    counts = {}
    for line in read_lines(path):
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts
'''
REPORT = (
    "The mill stands at the lower end of the valley. The headrace brings water from the weir to the wheel. The wheel "
    "turns once in six seconds when the river is high. In summer the sluice is closed at night, and the pond fills. "
)
QUESTIONS = [
    "What is a water wheel?",
    "Name three rivers and what they are known for.",
    "How do I keep bread fresh?",
    "Explain rain to a child.",
]


def prompts(engine: Engine, workload: str, count: int, seed: int) -> list[list[int]]:
    """Prompts of so many streams. Each has a number of its own, so that none shares another's cache."""
    rng = random.Random(f"{workload} {seed}")
    texts = []
    for i in range(count):
        number = rng.randrange(10**6)
        if workload == "random":
            texts.append([rng.randrange(1000, engine.vocab_size) for _ in range(64)])
            continue
        if workload == "edit":
            ask = f"# version {number}\n{CODE}\n# the same with the encoding as an argument\n{CODE[:60]}"
        elif workload == "quote":
            ask = f"Report {number}: {REPORT}{REPORT}\nThe report again, word for word: {REPORT[:80]}"
        elif workload == "json":
            records = "".join(f'{{"id": {number + j}, "name": "item", "price": {j}.5, "ok": true}}\n' for j in range(8))
            ask = records + f'{{"id": {number + 8}, '
        else:
            question = f"{QUESTIONS[i % len(QUESTIONS)]} (question {number})"
            texts.append(engine.tokenizer.encode_chat([{"role": "user", "content": question}], tools=None))
            continue
        texts.append(engine.tokenizer.encode(ask))
    return texts


def measure(engine: Engine, each: list[list[int]], tokens: int, temperature: float, speculative: bool) -> float:
    """Output tokens per second while all streams decode."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True, speculative=speculative
    )
    for i, prompt in enumerate(each):
        engine.add_request(Request(f"{time.monotonic_ns()}-{i}", prompt, params))
    begun, count, waiting = 0.0, 0, len(each)
    while engine.has_work:
        for delta in engine.step():
            if not waiting:
                count += len(delta.token_ids)
            elif delta.cached_tokens is not None:  # its first
                waiting -= 1
                begun = time.perf_counter()
    return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--method", default="ngram", help="with its own settings (default: %(default)s)")
    parser.add_argument("--config", help="all of --speculative-config instead")
    parser.add_argument("--workloads", nargs="+", default=["edit", "quote", "json", "chat", "random"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16], help="streams (default: 1 4 16)")
    parser.add_argument("--tokens", type=int, default=96, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: the engine's own)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()

    config = args.config or json.dumps({"method": args.method})
    engine = LLM(
        str(args.model or fetch(DEFAULT_MODEL)),
        speculative_config=config,
        enable_prefix_caching=False,
        max_num_seqs=max(args.batches),
        max_model_len=1024,
        threads=args.threads,
        seed=0,
    ).engine
    for speculative in (False, True):  # so that costs are known
        measure(engine, prompts(engine, "edit", 1, -1), 48, 0.0, speculative)
    rows: list[Row] = []
    rounds: list[dict[str, object]] = []
    for workload in args.workloads:
        for batch in args.batches:
            temperature = 1.0 if workload == "random" else 0.0
            speeds: dict[bool, list[float]] = {False: [], True: []}
            before, begun = engine.stats(), time.perf_counter()
            for number in range(args.rounds):
                each = prompts(engine, workload, batch, number)
                for speculative in ((False, True), (True, False))[number % 2]:
                    speeds[speculative].append(measure(engine, each, args.tokens, temperature, speculative))
            after, seconds = engine.stats(), time.perf_counter() - begun
            drafts, drafted, right = (
                getattr(after, name) - getattr(before, name)
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            )
            rows.append(
                {
                    "workload": workload,
                    "streams": batch,
                    "without_tok_s": statistics.median(speeds[False]),
                    "with_tok_s": statistics.median(speeds[True]),
                    "with_by_without_ratio": statistics.median(
                        b / a for a, b in zip(speeds[False], speeds[True], strict=True)
                    ),
                    "accepted": f"{right / drafted:.0%}" if drafted else "-",
                    "tokens_per_draft": 1 + right / drafts if drafts else 1.0,
                    "drafting_percent": 100 * (after.draft_seconds - before.draft_seconds) / seconds,
                }
            )
            rounds.append({"workload": workload, "streams": batch, "without": speeds[False], "with": speeds[True]})
            print(as_text(rows[-1:]).splitlines()[-1], flush=True)
    result = Result(
        benchmark="speculative",
        title="What speculation brings",
        note=f"Output tokens of all streams together, with `--speculative-config '{config}'` and without, in turn on "
        "one engine. edit, quote and json repeat themselves; chat and random (at temperature 1) do not. "
        f"Medians of {args.rounds} round(s) of {args.tokens} tokens a stream.",
        rows=rows,
        settings={"config": json.loads(config), "tokens": args.tokens, "rounds": args.rounds, "threads": args.threads},
        details={"rounds": rounds},
    )
    print(as_text(rows))
    if args.output_json:
        result.save(args.output_json)


if __name__ == "__main__":
    main()
