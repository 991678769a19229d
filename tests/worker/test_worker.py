"""The worker carries blocks about as the plan says, in its order, before the step runs."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.formats.open import open_checkpoint
from headrace.sampling.params import SampleRequest, SamplingParams
from headrace.worker.step import SequenceStep, StepPlan
from headrace.worker.worker import Worker
from helpers.t0_engine import numpy_logprobs, random_prompt
from helpers.tiny import save_t0

SIZE = 4
GREEDY = SamplingParams(temperature=0, logprobs=0)


def make(directory: Path, **settings: Any) -> Worker:
    common = {"block_size": SIZE, "threads": 1, "kv_cache_memory": "1MiB", "max_model_len": 64, "swap_space": "64KiB"}
    return Worker(EngineConfig(model=str(directory), **common | settings), open_checkpoint(str(directory)))


@pytest.fixture(scope="module", params=["auto", "int8"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return make(save_t0(tmp_path_factory.mktemp("t0")), kv_cache_dtype=request.param)


def stored(worker: Worker) -> list[np.ndarray]:
    """Everything in the device's cache, block by block."""
    parts = [t for c in worker.caches for t in (c.keys, c.values, c.key_scales, c.value_scales) if t is not None]
    return [t.transpose(0, 1).numpy().copy() for t in parts]


def prefill(worker: Worker, ids: list[int], table: list[int]) -> None:
    worker.execute(StepPlan([SequenceStep(0, ids, 0, worker_table(table))]))


def decode(worker: Worker, ids: list[int], table: list[int], **plan: Any) -> tuple[int, float]:
    """The token after `ids`, and its logprob, where all but the last of them are in the cache."""
    sample = SampleRequest(GREEDY, 0, 0, len(ids), ())
    step = SequenceStep(0, ids[-1:], len(ids) - 1, worker_table(table), samples=[sample])
    [drawn] = worker.execute(StepPlan([step], **plan)).sampled[0]
    assert drawn.logprob is not None
    return drawn.token_id, drawn.logprob.logprob


def check(worker: Worker, ids: list[int], got: tuple[int, float]) -> None:
    truth = numpy_logprobs(ids)[-1]
    assert got[0] == truth.argmax()
    assert abs(got[1] - truth.max()) < (0.05 if worker.config.kv_cache_dtype == "int8" else 1e-4)


def test_a_step_without_sequences_moves_blocks(worker: Worker) -> None:
    prefill(worker, random_prompt(8), [0, 1])
    before = stored(worker)
    result = worker.execute(StepPlan([], copies=[(0, 5), (1, 6)]))
    assert not result.sampled
    for old, new in zip(before, stored(worker), strict=True):
        assert np.array_equal(new[5:7], old[:2])
        assert np.array_equal(new[:5], old[:5])


def test_copy_on_write(worker: Worker) -> None:
    ids = random_prompt(7)
    prefill(worker, ids[:6], [3, 4])
    before = stored(worker)
    check(worker, ids, decode(worker, ids, [3, 9], copies=[(4, 9)]))
    for old, new in zip(before, stored(worker), strict=True):
        assert np.array_equal(new[3:5], old[3:5])  # what others share stays as it was


def test_out_to_the_host_and_in_again(worker: Worker) -> None:
    ids, other = random_prompt(11, 1), random_prompt(11, 2)
    prefill(worker, ids[:10], [2, 0, 7])
    # In one step its blocks go to the host and are another's already.
    sequence = SequenceStep(1, other[:10], 0, worker_table([7, 2, 0]))
    worker.execute(StepPlan([sequence], swap_out=[(2, 1), (0, 0), (7, 3)]))
    check(worker, other, decode(worker, other, [7, 2, 0]))
    check(worker, ids, decode(worker, ids, [5, 1, 6], swap_in=[(5, 1), (1, 0), (6, 3)]))


def test_all_at_once_in_order(worker: Worker) -> None:
    """Out, in, copies: a block that goes out, is filled from the host, and is copied from, in a single step."""
    first, second = random_prompt(4, 3), random_prompt(4, 4)
    prefill(worker, first, [0])
    worker.execute(StepPlan([], swap_out=[(0, 0)]))
    prefill(worker, second, [0])
    worker.execute(StepPlan([], swap_out=[(0, 1)], swap_in=[(0, 0)], copies=[(0, 8)]))
    check(worker, [*first, 9], decode(worker, [*first, 9], [8, 10]))
    check(worker, [*second, 9], decode(worker, [*second, 9], [11, 12], swap_in=[(11, 1)]))


def test_no_host_blocks_by_default(tmp_path: Path) -> None:
    worker = make(save_t0(tmp_path), swap_space=0)
    assert worker.num_host_blocks == 0
    assert worker._host_pages == []


def test_int8_holds_more_in_the_same_memory(tmp_path: Path) -> None:
    path = save_t0(tmp_path)
    blocks = {kv: make(path, kv_cache_dtype=kv, max_model_len=512).num_blocks for kv in ("auto", "int8")}
    assert blocks["int8"] / blocks["auto"] == pytest.approx(16 * 4 / (16 + 2), rel=0.01)
    assert make(path, kv_cache_dtype="int8", dtype="bfloat16").caches[0].keys.dtype == torch.int8


def worker_table(blocks: list[int]) -> Any:
    return [array("q", blocks)]
