"""However requests are scheduled, the tokens are NumPy's: policies, layouts, prefix hits, forks, preemption."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.request import Request
from headrace.errors import ConfigError, OverloadedError
from headrace.ops.reference import Ops
from headrace.sampling.params import StructuredOutputs
from headrace.structured.grammars import Grammars
from helpers.t0_engine import numpy_greedy, random_prompt, t0_llm

PROMPTS = [random_prompt(n) for n in (1, 15, 16, 17, 32, 33, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TRUTH = [numpy_greedy(tuple(p), 20) for p in PROMPTS]
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [c.token_ids for output in llm.generate(prompts, params) for c in output.outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling_policy": "priority"},
        {"scheduling_policy": "fair"},
        {"scheduling_policy": "static", "max_model_len": 100, "max_num_seqs": 3, "static_batch_timeout_ms": 5},
        {"kv_cache_layout": "contiguous", "max_model_len": 100},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 5},
        {"max_model_len": 128, "kv_cache_memory": 128 * BYTES_PER_TOKEN, "block_size": 8},
        {"max_model_len": 128, "kv_cache_memory": 128 * BYTES_PER_TOKEN, "block_size": 8, "swap_space": 10**6},
    ],
)
def test_the_tokens_are_the_same(t0_dir: Path, settings: dict[str, Any]) -> None:
    llm = t0_llm(t0_dir, **settings)
    assert tokens(llm) == TRUTH
    assert tokens(llm) == TRUTH, "and again, now from the cache"
    stats = llm.engine.stats()
    assert stats.free_blocks == stats.num_blocks
    if "kv_cache_memory" in settings:
        assert stats.num_preemptions > 0
        assert (stats.num_swaps > 0) == ("swap_space" in settings)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_a_whole_prompt_in_the_cache(t0_dir: Path, block_size: int) -> None:
    llm = t0_llm(t0_dir, block_size=block_size)
    for prompt, truth in zip(PROMPTS, TRUTH, strict=True):
        for again in range(3):
            (output,) = llm.generate(prompt, GREEDY)
            assert output.outputs[0].token_ids == truth
            assert output.num_cached_tokens <= len(prompt) - 1
            if again:
                assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size


@pytest.mark.parametrize("prefix", [True, False])
def test_the_continuations_of_a_prompt_share_it(t0_dir: Path, prefix: bool) -> None:
    llm = t0_llm(t0_dir, enable_prefix_caching=prefix, block_size=16)
    params = SamplingParams(n=4, temperature=0, max_tokens=20, ignore_eos=True)
    assert tokens(llm, params=params) == [t for t in TRUTH for _ in range(4)]
    assert llm.engine.stats().num_copied_blocks > 0
    drawn = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=20, ignore_eos=True)
    single = [llm.generate(p, SamplingParams(temperature=1.5, seed=3, max_tokens=20, ignore_eos=True)) for p in PROMPTS]
    assert tokens(llm, params=drawn)[::4] == [o.outputs[0].token_ids for (o,) in single]


def test_steps_are_limited_in_time_by_default_on_a_cpu_only(t0_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(**settings: Any) -> float | None:
        return t0_llm(t0_dir, backend="reference", **settings).engine.scheduler.limits.target_itl

    assert target() is None, "the scheduler chooses"
    assert target(target_itl_ms=50) == 0.05
    assert target(target_itl_ms=0) == 0
    monkeypatch.setattr(Ops, "device", "cuda")
    assert target() == 0
    assert target(target_itl_ms=50) == 0.05


def test_time_that_is_over(t0_dir: Path) -> None:
    engine = t0_llm(t0_dir, max_num_seqs=1).engine
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    engine.add_request(Request("runs", [1], GREEDY, timeout=5))
    engine.step()
    engine.add_request(Request("waits", [2], SamplingParams(n=3), queue_timeout=1))
    now[0] = 2.0
    deltas = [d for d in engine.step() if d.request_id == "waits"]
    assert [(d.finish_reason, d.stop_reason) for d in deltas] == [("abort", "timeout")] * 3
    assert all(d.error is not None and "waited 2.0 s" in str(d.error) for d in deltas)
    now[0] = 6.0
    (last,) = engine.step()
    assert (last.request_id, last.finish_reason, last.error) == ("runs", "abort", None)
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.num_expired_waiting, stats.num_expired_running, stats.num_finished) == (3, 1, 0)


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_time_that_is_over_when_there_is_room_at_last(t0_dir: Path, policy: str) -> None:
    """In the very step in which it could begin; none of its sequences does."""
    settings = {"scheduling_policy": policy, "max_model_len": 100, "static_batch_timeout_ms": 0}
    engine = t0_llm(t0_dir, max_num_seqs=1, **settings).engine
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    engine.add_request(Request("runs", [1], SamplingParams(max_tokens=1)))
    engine.add_request(Request("waits", [2], SamplingParams(n=3), queue_timeout=1))
    engine.step()
    now[0] = 2.0
    deltas = engine.step()
    assert [(d.request_id, d.stop_reason, d.token_ids) for d in deltas] == [("waits", "timeout", [])] * 3
    assert not engine.has_work


def test_while_a_grammar_is_compiled_the_request_is_in_the_queue(t0_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = t0_llm(t0_dir, max_waiting_requests=3).engine
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    monkeypatch.setattr(Grammars, "compile", lambda self, outputs: Future())  # never done
    params = SamplingParams(n=3, structured_outputs=StructuredOutputs(regex="a+"))
    engine.add_request(Request("compiles", [1], params, timeout=5))
    assert engine.stats().waiting == 3
    with pytest.raises(OverloadedError, match="3 requests wait"):
        engine.add_request(Request("more", [1], params))
    assert not engine.step()
    now[0] = 6.0
    deltas = engine.step()
    assert len(deltas) == 3
    assert all(d.error is not None for d in deltas)
    assert not engine.has_work
    engine.add_request(Request("aborted", [1], params))
    engine.abort("aborted")
    assert not engine.step()
    assert engine.stats().waiting == 0


def test_the_configs_times_hold_for_requests_with_longer_ones(t0_dir: Path) -> None:
    engine = t0_llm(t0_dir, queue_timeout=10, request_timeout=20).engine
    now = [100.0]
    engine.scheduler.clock = lambda: now[0]
    times: dict[str, tuple[float | None, float | None]] = {"none": (None, None), "less": (1, 2), "more": (50, 60)}
    for name, (queue, whole) in times.items():
        engine.add_request(Request(name, [1], GREEDY, queue_timeout=queue, timeout=whole))
    deadlines = [(s.queue_deadline, s.deadline) for s in engine.scheduler.waiting]
    assert deadlines == [(110, 120), (101, 102), (110, 120)]


def test_what_became_of_requests_is_counted(t0_dir: Path) -> None:
    engine = t0_llm(t0_dir, max_num_seqs=1, max_waiting_requests=3, max_waiting_tokens=50).engine
    engine.add_request(Request("finishes", [1], SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    engine.add_request(Request("aborted", list(range(40)), SamplingParams(n=2)))
    assert engine.stats().waiting_tokens == 40
    for prompt, n in (([1] * 11, 1), ([1], 2), ([1], 5)):
        request = Request("refused", prompt, SamplingParams(n=n))
        assert not engine.has_room(request), "asking is not counted"
        with pytest.raises(OverloadedError, match="try again in"):
            engine.add_request(request)
    engine.abort("aborted")
    engine.abort("aborted")
    engine.step()
    stats = engine.stats()
    assert (stats.num_refused_requests, stats.num_refused_tokens) == (2, 1)
    assert (stats.num_aborted, stats.num_finished, stats.waiting, stats.running) == (2, 1, 0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs"),
        ({"scheduling_policy": "static", "kv_cache_layout": "paged"}, "needs the contiguous"),
        ({"preemption_mode": "swap"}, "set swap_space"),
        ({"queue_timeout": -1}, "queue_timeout must be a number from 0 on"),
        ({"priority_ageing": None}, "priority_ageing must be a number"),
        ({"max_waiting_requests": 0}, "max_waiting_requests must be an integer of at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)
