"""T0 under random schedules: whatever the scheduler does, each stream is what NumPy computes for it alone.

Planted faults show that a wrong key or value anywhere is noticed. `HEADRACE_SCHEDULES=1000` runs more of them.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.ops.reference import RaggedBatch
from headrace.worker.step import SequenceStep
from headrace.worker.worker import Worker
from helpers.differential import assert_t0, run
from helpers.t0_engine import random_prompt, t0_llm

SCHEDULES = int(os.environ.get("HEADRACE_SCHEDULES", "16"))
CONTEXT = 96  # the longest sequence here
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # of T0's float32 cache


def prompts() -> list[list[int]]:
    """Some that begin alike, with all lengths about a block's end, and for each one that differs in the first token."""
    stem = random_prompt(64)
    some = [stem[:n] for n in (1, 4, 15, 16, 17, 31, 32, 33, 48, 64)] + [
        stem[:n] + random_prompt(7, n) for n in (8, 40)
    ]
    return [*some, *([first ^ 1, *rest] for first, *rest in some)]


PROMPTS = prompts()


def engine_for(path: Path, rng: random.Random) -> Engine:
    """An engine with settings drawn at random; its cache holds one sequence of the greatest length, or a few."""
    block_size = rng.choice([1, 4, 8, 16, 32, CONTEXT])  # the last makes the cache contiguous
    least = -(-CONTEXT // block_size) * block_size
    seqs = rng.randint(1, 12)
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_model_len": CONTEXT,
        "kv_cache_memory": int(least * rng.choice([1, 1, 1.5, 3, 20])) * TOKEN_BYTES,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + rng.choice([0, 3, 17, 200]),
        "swap_space": rng.choice([0, 64, 1000]) * TOKEN_BYTES,
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "priority", "fair"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "target_itl_ms": rng.choice([0, None, 0.01]),
    }
    return t0_llm(path, **settings).engine


def run_schedule(path: Path, seed: int) -> Engine:
    """One random schedule, checked stream by stream. Returns the engine, which has nothing left to do."""
    rng = random.Random(seed)
    engine = engine_for(path, rng)
    requests, aborts = [], {}
    arrivals = [rng.randrange(rng.choice([1, 60])) for _ in range(24)]
    for i, arrival in enumerate(arrivals):
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, 24), ignore_eos=True, logprobs=2, n=rng.choice([1, 1, 1, 3])
        )
        requests.append(
            Request(str(i), rng.choice(PROMPTS), params, priority=rng.randrange(3), tenant=rng.choice("ab"))
        )
        if rng.random() < 0.15:
            aborts[str(i)] = arrival + rng.randrange(30)
    streams = run(engine, requests, arrivals, aborts)
    for request in requests:
        for index in range(request.params.n):
            stream = streams[request.request_id, index]
            assert request.request_id in aborts or stream.finish_reason == "length"
            if stream.finish_reason is not None or stream.token_ids:
                assert_t0(request.prompt_token_ids, stream, request.params.max_tokens or 0)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.free_blocks == stats.num_blocks
    return engine


def run_schedules(path: Path, seeds: range) -> Counter[str]:
    """Random schedules, and what happened in them."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        stats = run_schedule(path, seed).stats()
        for name in ("num_preemptions", "num_swaps", "num_copied_blocks", "prefix_hit_tokens"):
            totals[name] += getattr(stats, name)
    return totals


def test_random_schedules(t0_dir: Path) -> None:
    totals = run_schedules(t0_dir, range(SCHEDULES))
    # They would prove little if nobody was ever preempted, swapped, forked, or served from the prefix cache.
    assert min(totals.values()) >= 10, totals
    assert totals["num_swaps"] < totals["num_preemptions"], "nobody was computed anew"


class TestPlantedFaults:
    """Each is a mistake that scheduler, cache or worker could make; the schedules above must notice it."""

    @staticmethod
    def assert_noticed(path: Path) -> None:
        with pytest.raises(AssertionError):
            run_schedules(path, range(SCHEDULES))

    def test_a_wrong_slot(self, t0_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last token of each block goes to the place before it."""
        right: Callable[[Worker, list[SequenceStep]], RaggedBatch] = Worker._batch

        def wrong(worker: Worker, steps: list[SequenceStep]) -> RaggedBatch:
            batch = right(worker, steps)
            size = worker.config.block_size
            if size > 1:
                batch.slots[batch.slots % size == size - 1] -= 1
            return batch

        monkeypatch.setattr(Worker, "_batch", wrong)
        self.assert_noticed(t0_dir)

    def test_a_block_of_another_prefix(self, t0_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The index takes two prompts for equal that differ in the lowest bit of their first token."""
        for name in ("find", "enter"):
            right = getattr(PrefixIndex, name)

            def wrong(index: PrefixIndex, at: Any, ids: list[int], last: int, right: Any = right) -> Any:
                return right(index, at, [ids[0] & ~1, *ids[1:]] if ids else ids, last)

            monkeypatch.setattr(PrefixIndex, name, wrong)
        self.assert_noticed(t0_dir)

    @pytest.mark.parametrize("which", ["swap_out", "swap_in", "copies"])
    def test_a_step_that_forgets_to(self, t0_dir: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
        """Blocks are not copied that should be."""
        right = Worker.execute

        def wrong(worker: Worker, plan: Any) -> Any:
            setattr(plan, which, [])
            return right(worker, plan)

        monkeypatch.setattr(Worker, "execute", wrong)
        self.assert_noticed(t0_dir)

    def test_a_block_freed_too_early(self, t0_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sequence reads its first block from where another one's lies."""
        right: Callable[[Worker, list[SequenceStep]], RaggedBatch] = Worker._batch

        def wrong(worker: Worker, steps: list[SequenceStep]) -> RaggedBatch:
            batch = right(worker, steps)
            batch.block_tables[:, 0] = batch.block_tables[0, 0].clone()
            return batch

        monkeypatch.setattr(Worker, "_batch", wrong)
        self.assert_noticed(t0_dir)
