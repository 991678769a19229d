"""A step run by one native call gives the bits that the same step gives op by op."""

from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.formats.open import open_checkpoint
from headrace.ops.cpu import CpuOps, NotRecordableError
from headrace.ops.reference import KVCache, RaggedBatch
from headrace.ops.replay import MAX_TOKENS, Replay
from headrace.sampling.params import SampleRequest, SamplingParams
from headrace.worker.step import SequenceStep, StepPlan
from headrace.worker.worker import Worker
from helpers.families import save_family
from helpers.tiny import save_t0

SIZE, LONGEST = 4, 400
GREEDY = SamplingParams(temperature=0)


def make(directory: Path, **settings: str) -> Worker:
    common = {"block_size": SIZE, "threads": 2, "kv_cache_memory": "8MiB", "max_model_len": LONGEST}
    return Worker(EngineConfig(model=str(directory), **common | settings), open_checkpoint(str(directory)))  # type: ignore[arg-type]


def step(worker: Worker, sequence: int, ids: list[int], start: int, *, scored: bool = False) -> SequenceStep:
    """Tokens of one of four sequences, each with blocks of its own in every group of layers."""
    width = -(-LONGEST // SIZE)
    groups = len(worker.layout.windows)
    tables = [array("q", [(g * 4 + sequence) * width + i for i in range(width)]) for g in range(groups)]
    assert max(map(max, tables)) < worker.num_blocks
    request = SampleRequest(GREEDY, 0, 0, start + len(ids))
    return SequenceStep(sequence, ids, start, tables, [request], prompt_logprobs=0 if scored else None)


def compare(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """From now on every step of the worker runs both ways and must give the same; returns where its logits will be."""
    replay, seen = worker._forward, []
    assert isinstance(replay, Replay)

    def both(ids: Tensor, batches: list[RaggedBatch], caches: list[KVCache], rows: Tensor) -> Tensor:
        stored = [t for c in caches for t in (c.keys, c.values, c.key_scales, c.value_scales) if t is not None]
        before = [t.clone() for t in stored]
        expected = worker.decoder.forward(ids, batches, caches, rows)
        written = [t.clone() for t in stored]
        for tensor, old in zip(stored, before, strict=True):
            tensor.copy_(old)
        logits = replay(ids, batches, caches, rows)
        assert logits.data_ptr() == replay.logits.data_ptr()
        assert torch.equal(logits, expected)
        assert all(torch.equal(a, b) for a, b in zip(stored, written, strict=True))
        seen.append(logits.clone())
        return logits

    monkeypatch.setattr(worker, "_forward", both)
    return seen


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama3", {}),
        ("llama3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("qwen2-window", {"dtype": "float16"}),
        ("qwen3", {}),
        ("gemma3-softcap", {}),
        ("gemma3-softcap", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_mixed_steps(family: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(save_family(tmp_path, family, seed=1), **settings)
    seen = compare(worker, monkeypatch)
    ids = torch.randint(0, 200, (4, 40), generator=torch.Generator().manual_seed(0)).tolist()
    worker.execute(StepPlan([step(worker, 0, ids[0][:21], 0, scored=True), step(worker, 1, ids[1][:1], 0)]))
    worker.execute(StepPlan([step(worker, 2, ids[2][:3], 0), step(worker, 0, ids[0][21:22], 21)]))
    worker.execute(StepPlan([step(worker, 3, ids[3][:30], 0), step(worker, 2, ids[2][3:7], 3)]))
    worker.execute(StepPlan([step(worker, s, ids[s][n : n + 1], n) for s, n in enumerate((22, 1, 7, 30))]))
    assert [len(logits) for logits in seen] == [22, 2, 2, 4]


def test_whole_numbers_and_the_longest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(save_t0(tmp_path), quantization="int4")
    ids = torch.randint(0, 200, (LONGEST,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = worker.execute(StepPlan([step(worker, 0, ids[: MAX_TOKENS + 1], 0, scored=True)]))
    seen = compare(worker, monkeypatch)
    pieces = worker.execute(StepPlan([step(worker, 1, ids[:MAX_TOKENS], 0, scored=True)]))
    assert len(seen[0]) == MAX_TOKENS
    assert pieces.prompt_logprobs[1] == whole.prompt_logprobs[0][: MAX_TOKENS - 1]


def test_what_is_not_there(tmp_path: Path) -> None:
    worker = make(save_t0(tmp_path))
    with pytest.raises(IndexError, match="token ids must be from 0 to 258"):
        worker.execute(StepPlan([step(worker, 0, [1, 259], 0)]))


def test_a_network_with_other_products_runs_op_by_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = CpuOps(threads=1)

    def forward(ids: Tensor, batches: list[RaggedBatch], caches: list[KVCache], rows: Tensor) -> Tensor:
        raise NotRecordableError

    assert ops.replayed(forward, [], [0], 1) is forward
    assert ops.add(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_torch_between_the_ops_is_noticed() -> None:
    """It would be done once, while the ops are noted down, and never again."""
    ops = CpuOps(threads=1)

    def forward(ids: Tensor, batches: list[RaggedBatch], caches: list[KVCache], rows: Tensor) -> Tensor:
        x = ops.to_float(torch.empty(2, 4, dtype=torch.bfloat16, device="meta") * 2)
        return ops.take(x, rows)

    with pytest.raises(KeyError):
        ops.replayed(forward, [], [0], 1)
