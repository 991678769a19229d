"""What scheduling and the preparation of a batch cost, without any model: per step, and how it grows.

    python bench/scheduler.py

Each line is the median, in milliseconds of processor time, of steps in which all sequences decode, with prompts of the
given length behind them: `schedule` and `advance` of the scheduler, and what the worker does to lay the step out as
tensors. Then the pool alone.
"""

import argparse
import time
from statistics import median

from headrace.bench.results import Result, as_text
from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.sampling.params import SamplingParams
from headrace.scheduler.scheduler import Limits, Scheduler
from headrace.scheduler.sequence import Sequence
from headrace.worker.batch import ragged_batches
from headrace.worker.cache_layout import CacheLayout

BLOCK = 32


def milliseconds_per_step(sequences: int, context: int, steps: int) -> tuple[float, float]:
    """Medians of the scheduler's part and of the worker's, of a step in which so many sequences decode."""
    pool = BlockPool(sequences * (context // BLOCK + 2 + steps // BLOCK), BLOCK)
    layout = CacheLayout.of([None], BLOCK, sequences * context)
    cache = CacheManager(pool, layout, index=PrefixIndex(pool))
    s = Scheduler(cache, Limits(max_num_seqs=sequences, max_num_batched_tokens=sequences * context, target_itl=None))
    params, known = SamplingParams(max_tokens=None), {}
    for i in range(sequences):
        known[i] = Sequence(i, 0, [i, *range(context - 1)], context, params, 0, context + steps + 2)
        s.add(known[i])

    def run() -> tuple[float, float]:
        begin = time.thread_time()
        plan = s.schedule()
        planned = time.thread_time()
        ragged_batches(plan.sequences, BLOCK, len(layout.windows))
        prepared = time.thread_time()
        for step in plan.sequences:
            s.advance(known[step.seq_id], len(step.token_ids))
            if step.samples:
                known[step.seq_id].token_ids.append(1)
        s.record(0.01)
        return 1e3 * (planned - begin + time.thread_time() - prepared), 1e3 * (prepared - planned)

    while len(s.running) < sequences or any(x.num_to_compute > 1 for x in s.running):
        run()
    times = [run() for _ in range(steps)]
    return median(a for a, _ in times), median(b for _, b in times)


def nanoseconds_per_block(blocks: int) -> float:
    """Taking and giving back blocks of a pool that is full of kept ones."""
    pool = BlockPool(blocks, BLOCK)
    held = pool.take(blocks)
    for block in held:
        pool.keep(block)
    pool.give_back(held)
    count = min(blocks, 100_000)
    begin = time.thread_time()
    for _ in range(0, count, 100):
        pool.give_back(pool.take(100))
    return 1e9 * (time.thread_time() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--max-sequences", type=int, default=4096)
    parser.add_argument("--output-json", help="save the table of steps")
    args = parser.parse_args()
    rows = []
    for sequences, context in ((1, 4096), (16, 4096), (64, 4096), (256, 4096), (1024, 1024), (4096, 256)):
        if sequences <= args.max_sequences:
            a, b = milliseconds_per_step(sequences, context, args.steps)
            rows.append({"sequences": sequences, "context": context, "scheduler_ms": a, "batch_ms": b, "sum_ms": a + b})
    blocks = {count: nanoseconds_per_block(count) for count in (1_000, 10_000, 100_000, 1_000_000)}
    result = Result(
        benchmark="scheduling",
        title="What scheduling costs",
        note="Milliseconds of processor time for a step of pure bookkeeping, every sequence decoding: the scheduler, "
        "and the preparation of the step's tensors. One thread; the model does not run. To take and give back a "
        "block takes "
        + ", ".join(f"{nanoseconds:.0f} ns in a pool of {count:,}" for count, nanoseconds in blocks.items())
        + ".",
        rows=rows,
        settings={"steps": args.steps},
    )
    print(as_text(rows))
    print(result.note)
    if args.output_json:
        result.save(args.output_json)


if __name__ == "__main__":
    main()
