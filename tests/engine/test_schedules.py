"""Tiny models under random schedules: whatever the scheduler does, each stream is what it must be alone.

T0's streams are compared with NumPy; those of a model that mixes layers with a window and layers that see everything
(Gemma 3), with transformers. Planted faults show that a wrong key or value anywhere is noticed.
`HEADRACE_SCHEDULES=1000` runs more schedules.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.kvcache import manager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.ops.reference import RaggedBatch
from headrace.worker import worker
from headrace.worker.cache_layout import CacheLayout
from headrace.worker.step import SequenceStep
from headrace.worker.worker import Worker
from helpers.differential import LOGPROB_TOLERANCE, Stream, assert_t0, run
from helpers.families import save_family, transformers_logits, transformers_model
from helpers.t0_engine import random_prompt, t0_llm

SCHEDULES = int(os.environ.get("HEADRACE_SCHEDULES", "16"))
CONTEXT = 96  # the longest sequence here


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what judges its streams.

    check: takes a prompt, its stream, and how many tokens were asked for. windows: by layer.
    bytes_per_token: in the float32 cache of one layer. schedules: how many of them it is run through.
    """

    path: Path
    check: Callable[[list[int], Stream, int], None]
    windows: tuple[int | None, ...]
    bytes_per_token: int
    schedules: int = SCHEDULES


@pytest.fixture(scope="module")
def t0_model(t0_dir: Path) -> Model:
    return Model(t0_dir, assert_t0, (None, None), 2 * 2 * 16 * 4)


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Three layers with a window of 7 and two without: three groups of two places, one of which stays empty."""
    path = save_family(tmp_path_factory.mktemp("gemma3"), "gemma3", seed=3)
    truth = transformers_model(path)

    def check(prompt: list[int], stream: Stream, longest: int) -> None:
        count = len(stream.token_ids)
        assert count == longest if stream.finish_reason == "length" else stream.finish_reason == "abort"
        if count:
            logprobs = transformers_logits(truth, prompt + stream.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
            assert stream.token_ids == logprobs.argmax(-1).tolist()
            got = [entry.logprob for entry in stream.logprobs]
            np.testing.assert_allclose(got, logprobs.amax(-1), atol=LOGPROB_TOLERANCE)

    return Model(path, check, (7, 7, None, 7, None), 2 * 2 * 24 * 4, SCHEDULES * 3 // 8)


def prompts() -> list[list[int]]:
    """Some that begin alike, with all lengths about a block's end, and for each one that differs in the first token."""
    stem = random_prompt(64)
    some = [stem[:n] for n in (1, 4, 15, 16, 17, 31, 32, 33, 48, 64)] + [
        stem[:n] + random_prompt(7, n) for n in (8, 40)
    ]
    return [*some, *([first ^ 1, *rest] for first, *rest in some)]


PROMPTS = prompts()


def engine_for(model: Model, rng: random.Random) -> Engine:
    """An engine with settings drawn at random; its cache holds one sequence of the greatest length, or a few."""
    block_size = rng.choice([1, 4, 8, 16, 32, CONTEXT])  # the last makes the cache contiguous
    seqs = rng.randint(1, 12)
    tokens = seqs + rng.choice([0, 3, 17, 200])
    layout = CacheLayout.of(model.windows, block_size, tokens)
    least = layout.blocks_for(CONTEXT)
    block = block_size * layout.layers_per_group * model.bytes_per_token
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_model_len": CONTEXT,
        "kv_cache_memory": int(least * rng.choice([1, 1, 1.5, 3, 20])) * block,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "swap_space": rng.choice([0, 64, 1000]) * len(model.windows) * model.bytes_per_token,
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "priority", "fair"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "target_itl_ms": rng.choice([0, None, 0.01]),
    }
    return t0_llm(model.path, **settings).engine


def run_schedule(model: Model, seed: int) -> Engine:
    """One random schedule, checked stream by stream. Returns the engine, which has nothing left to do."""
    rng = random.Random(seed)
    engine = engine_for(model, rng)
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
                model.check(request.prompt_token_ids, stream, request.params.max_tokens or 0)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.free_blocks == stats.num_blocks
    return engine


def run_schedules(model: Model) -> Counter[str]:
    """Random schedules, and what happened in them."""
    totals: Counter[str] = Counter()
    for seed in range(model.schedules):
        stats = run_schedule(model, seed).stats()
        for name in ("num_preemptions", "num_swaps", "num_copied_blocks", "prefix_hit_tokens"):
            totals[name] += getattr(stats, name)
    return totals


@pytest.mark.parametrize("which", ["t0_model", "mixed_model"])
def test_random_schedules(which: str, request: pytest.FixtureRequest) -> None:
    totals = run_schedules(request.getfixturevalue(which))
    # They would prove little if nobody was ever preempted, swapped, forked, or served from the prefix cache.
    assert min(totals.values()) >= 10, totals
    assert totals["num_swaps"] < totals["num_preemptions"], "nobody was computed anew"


class TestPlantedFaults:
    """Each is a mistake that scheduler, cache or worker could make; the schedules above must notice it."""

    @staticmethod
    def assert_noticed(model: Model) -> None:
        with pytest.raises(AssertionError):
            run_schedules(model)

    def test_a_wrong_slot(self, t0_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last token of each block goes to the place before it."""
        right = worker.ragged_batches

        def wrong(steps: list[SequenceStep], size: int, num_groups: int) -> list[RaggedBatch]:
            batches = right(steps, size, num_groups)
            for batch in batches:
                if size > 1:
                    batch.slots[batch.slots % size == size - 1] -= 1
            return batches

        monkeypatch.setattr(worker, "ragged_batches", wrong)
        self.assert_noticed(t0_model)

    def test_a_block_of_another_prefix(self, t0_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """The index takes two prompts for equal that differ in the lowest bit of their first token."""
        for name in ("find", "enter"):
            right = getattr(PrefixIndex, name)

            def wrong(index: PrefixIndex, at: Any, ids: list[int], last: int, right: Any = right) -> Any:
                return right(index, at, [ids[0] & ~1, *ids[1:]] if ids else ids, last)

            monkeypatch.setattr(PrefixIndex, name, wrong)
        self.assert_noticed(t0_model)

    @pytest.mark.parametrize("which", ["swap_out", "swap_in", "copies"])
    def test_a_step_that_forgets_to(self, t0_model: Model, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
        """Blocks are not copied that should be."""
        right = Worker.execute

        def wrong(worker: Worker, plan: Any) -> Any:
            setattr(plan, which, [])
            return right(worker, plan)

        monkeypatch.setattr(Worker, "execute", wrong)
        self.assert_noticed(t0_model)

    def test_a_block_freed_too_early(self, t0_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sequence reads its first block from where another one's lies."""
        right = worker.ragged_batches

        def wrong(steps: list[SequenceStep], size: int, num_groups: int) -> list[RaggedBatch]:
            batches = right(steps, size, num_groups)
            for batch in batches:
                batch.block_tables[:, 0] = batch.block_tables[0, 0].clone()
            return batches

        monkeypatch.setattr(worker, "ragged_batches", wrong)
        self.assert_noticed(t0_model)

    def test_a_group_of_layers_with_the_blocks_of_another(
        self, mixed_model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = worker.ragged_batches

        def wrong(steps: list[SequenceStep], size: int, num_groups: int) -> list[RaggedBatch]:
            first, *others = right(steps, size, num_groups)
            return [first] * (1 + len(others))

        monkeypatch.setattr(worker, "ragged_batches", wrong)
        self.assert_noticed(mixed_model)

    def test_a_window_one_token_too_narrow(self, mixed_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks are given back as soon as the token after the next one does not see them."""
        right = manager.first_seen
        monkeypatch.setattr(manager, "first_seen", lambda tokens, window, size: right(tokens + 2, window, size))
        self.assert_noticed(mixed_model)
