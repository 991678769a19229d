"""Where the time of one decoding step goes: by one native call, op by op from Python, and op for op within the call.

    python bench/step.py [--model FILE.gguf] [--contexts 128,2048] [--batches 1,8] [--threads N]

Times are milliseconds, the least of the rounds, in which all ways take turns. The logits are computed, but no token is
drawn. The shares are those of the ops of the recorded step, each run by a call of its own and added up by kind.
"""

import argparse
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.bench.results import Result, as_text
from headrace.config import EngineConfig
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch
from headrace.ops.reference import RaggedBatch
from headrace.ops.replay import MAX_TOKENS, Replay
from headrace.worker.step import SequenceStep, StepPlan
from headrace.worker.worker import Worker


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--contexts", default="128,2048", help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--batches", default="1,8", help="sequences in the step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: all cores)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()

    model = str(args.model or fetch(DEFAULT_MODEL))
    contexts, batches = ([int(n) for n in text.split(",")] for text in (args.contexts, args.batches))
    config = EngineConfig(
        model=model, threads=args.threads, max_model_len=max(contexts) + 1, max_num_seqs=max(batches), backend="cpu"
    )
    worker = Worker(config, open_checkpoint(model))
    result = Result(
        benchmark="step",
        title="Where the time of a decoding step goes",
        note="Least milliseconds of a step by one native call, and with each op called from Python, in turns; and what "
        "the kinds of ops take of it.",
        rows=[measure(worker, context, batch, args.rounds) for context in contexts for batch in batches],
        settings={"model": Path(model).name, "threads": worker.threads, "rounds": args.rounds},
    )
    print(as_text(result.rows))
    if args.output_json:
        result.save(args.output_json)


def measure(worker: Worker, context: int, sequences: int, rounds: int) -> dict[str, Any]:
    replay, size = worker._forward, worker.config.block_size
    assert isinstance(replay, Replay)
    width = -(-(context + 1) // size)
    tables = [array("q", range(s * width, (s + 1) * width)) for s in range(sequences)]
    for start in range(0, context, MAX_TOKENS):
        for s in range(sequences):
            ids = [1 + (7 * i + s) % 1000 for i in range(start, min(context, start + MAX_TOKENS))]
            worker.execute(StepPlan([SequenceStep(s, ids, start, [tables[s]] * len(worker.layout.windows))]))

    positions = torch.full((sequences,), context)
    slots = torch.tensor([t[context // size] * size + context % size for t in tables])
    blocks = torch.tensor([t.tolist() for t in tables])
    ids, rows = torch.arange(1, sequences + 1), torch.arange(sequences)

    def batch() -> list[RaggedBatch]:
        return [RaggedBatch([1] * sequences, [context + 1] * sequences, positions, slots, blocks)] * len(worker.caches)

    by_call, by_op, alone = [], [], []
    for _ in range(rounds):
        by_call.append(_timed(lambda: replay(ids, batch(), worker.caches, rows)))
        by_op.append(_timed(lambda: worker.decoder.forward(ids, batch(), worker.caches, rows)))
        alone.append(op_for_op(replay, sequences))
    least = min(alone, key=lambda times: times.total())
    shares = [f"{name} {milliseconds / least.total():.1%}" for name, milliseconds in least.most_common(5)]
    return {
        "sequences": sequences,
        "context": context,
        "one call, ms": f"{min(by_call):.2f}",
        "op by op, ms": f"{min(by_op):.2f}",
        "op by op / one call": f"{min(by_op) / min(by_call):.2f}",
        "of the ops": ", ".join(shares),
    }


def op_for_op(replay: Replay, sequences: int) -> "Counter[str]":
    """Milliseconds of all ops of a kind; what was put into the inputs for the last step is there still."""
    times: Counter[str] = Counter()
    for function, arguments in replay.recording.calls:
        given = [replay.recording.address(a) if isinstance(a, Tensor) else a for a in arguments]
        op = function(*given)
        times[function.__name__] += _timed(lambda op=op: op.run(sequences, sequences, sequences))  # type: ignore[misc]
    return times


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
