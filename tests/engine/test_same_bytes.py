"""A request says the same whatever runs beside it, however it is cut, whatever interrupts it: on every backend.

The truth is each request by itself, its prompt in one piece, nothing reused, on one thread. A backend that promises it
(`Ops.batch_invariant`) must give the same bits: tokens, logprobs, and those of the alternatives. On the others torch
orders its sums by the number of rows, so logprobs may differ by 1e-4, and tokens where two are as good as equal.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.ops import create_ops
from helpers.differential import Stream, Streams, assert_all_same, run
from helpers.t0_engine import random_prompt, t0_llm
from helpers.tiny import save_t0, t0_config

# Larger than T0, so that products are cut into pieces: by rows, by columns, and between threads.
CONFIG = t0_config(
    hidden_size=192, intermediate_size=416, num_attention_heads=6, num_key_value_heads=2, head_dim=32, vocab_size=515
)
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
COUNT = 6  # tokens of each request
STEM = random_prompt(96)


def requests(*, n: int = 1, temperature: float = 0.0) -> list[Request]:
    """64 of them, of one token to some hundreds; a half begin alike."""
    lengths = [
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        40,
        63,
        64,
        65,
        90,
        *range(4, 36),
        95,
        127,
        128,
        129,
        130,
        180,
        257,
    ]
    lengths += [5, 10, 20, 30, 50, 60, 70, 80, 9]
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=COUNT, ignore_eos=True, logprobs=2, n=n)
    prompts = [random_prompt(length, i) for i, length in enumerate(lengths)]
    prompts = [STEM[: len(p)] + p[len(STEM) :] if i % 2 else p for i, p in enumerate(prompts)]
    return [Request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]


@dataclass
class Setup:
    """A backend, its weights, and what the truth is."""

    path: Path
    settings: dict[str, Any]
    exact: bool
    truth: Streams

    def engine(self, **settings: Any) -> Engine:
        fixed = {"block_size": 16, "max_model_len": 288, "target_itl_ms": 0, "enable_prefix_caching": False}
        return t0_llm(self.path, **(fixed | self.settings | settings)).engine

    def check(self, streams: Streams) -> None:
        truth = {key: self.truth[key[0], 0] for key in streams}
        if self.exact:
            assert_identical(truth, streams)
        else:
            assert_all_same(truth, streams)


def assert_identical(truth: Streams, other: Streams) -> None:
    for key, stream in truth.items():
        assert other[key].token_ids == stream.token_ids
        assert other[key].logprobs == stream.logprobs
        assert (other[key].text, other[key].finish_reason) == (stream.text, stream.finish_reason)


def alone(engine: Engine, each: list[Request]) -> Streams:
    streams: Streams = {}
    for request in each:
        streams |= run(engine, [request])
    return streams


@pytest.fixture(scope="module", params=["reference", "cpu", "cpu int8"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    backend, _, quantization = request.param.partition(" ")
    path = save_t0(tmp_path_factory.mktemp("model"), config=CONFIG)
    settings = {"backend": backend, "quantization": quantization or None}
    made = Setup(path, settings, create_ops(backend).batch_invariant, {})
    made.truth = alone(made.engine(), requests())
    return made


def test_alone_again(setup: Setup) -> None:
    setup.check(alone(setup.engine(), requests()[::4]))


def test_all_64_at_once(setup: Setup) -> None:
    setup.check(run(setup.engine(), requests()))


def test_arriving_one_after_the_other(setup: Setup) -> None:
    setup.check(run(setup.engine(), requests(), arrivals=[i // 3 for i in range(64)]))


@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_prompts_in_chunks(setup: Setup, tokens: int) -> None:
    some = requests()[:: {1: 16, 7: 4}.get(tokens, 1)]
    setup.check(run(setup.engine(max_num_batched_tokens=tokens, max_num_seqs=min(tokens, 12)), some))


def test_chunks_sized_by_time(setup: Setup) -> None:
    setup.check(run(setup.engine(target_itl_ms=0.5), requests(), arrivals=range(64)))


def test_blocks_of_another_size(setup: Setup) -> None:
    setup.check(run(setup.engine(block_size=1), requests()[::2]))


@pytest.mark.parametrize("settings", [{"kv_cache_layout": "contiguous"}, {"scheduling_policy": "static"}])
def test_one_piece_of_memory_for_each_sequence(setup: Setup, settings: dict[str, Any]) -> None:
    setup.check(run(setup.engine(max_num_seqs=16, **settings), requests()))


def test_prefix_hits(setup: Setup) -> None:
    engine = setup.engine(enable_prefix_caching=True)
    setup.check(run(engine, requests(), arrivals=range(64)))
    again = run(engine, requests())
    setup.check(again)
    assert [s.cached_tokens for s in again.values()] == [(len(r.prompt_token_ids) - 1) // 16 * 16 for r in requests()]


@pytest.mark.parametrize("swap_space", [0, "4MiB"])
def test_preemption(setup: Setup, swap_space: Any) -> None:
    engine = setup.engine(kv_cache_memory=320 * TOKEN_BYTES, swap_space=swap_space, block_size=4)
    setup.check(run(engine, requests()))
    stats = engine.stats()
    assert stats.num_preemptions > 5
    assert (stats.num_swaps > 5) == bool(swap_space)


@pytest.mark.parametrize("prefix", [False, True])
def test_several_continuations(setup: Setup, prefix: bool) -> None:
    engine = setup.engine(enable_prefix_caching=prefix)
    setup.check(run(engine, requests(n=3)[:16]))
    assert engine.stats().num_copied_blocks > 0


def test_two_threads(setup: Setup) -> None:
    threads = torch.get_num_threads()
    try:
        engine = setup.engine(threads=2)
        setup.check(run(engine, requests()[::4]))
        setup.check(alone(engine, requests()[48:51]))
    finally:
        torch.set_num_threads(threads)


def test_drawn_tokens(setup: Setup) -> None:
    """Temperature 1: all that decides is the seed, the sequence and the position."""
    drawn = requests(temperature=1.0)[::4]
    truth = alone(setup.engine(), drawn)
    assert {key: s.token_ids for key, s in truth.items()} != {key: setup.truth[key].token_ids for key in truth}
    engines = [setup.engine(), setup.engine(kv_cache_memory=320 * TOKEN_BYTES, block_size=4, max_num_batched_tokens=64)]
    for engine in engines:
        replace(setup, truth=truth).check(run(engine, drawn))


def test_over_an_int8_cache(setup: Setup) -> None:
    """Its codes would turn a difference in a last bit into one that counts; so only where there is none."""
    if not setup.exact:
        pytest.skip("this backend promises no equal bits")
    int8 = {"kv_cache_dtype": "int8"}
    some = requests()[::4]
    truth = replace(setup, truth=alone(setup.engine(**int8), some))
    truth.check(run(setup.engine(**int8), some))
    truth.check(run(setup.engine(**int8, max_num_batched_tokens=33, max_num_seqs=5), some))
    truth.check(run(setup.engine(**int8, kv_cache_memory=100 * TOKEN_BYTES, block_size=4, swap_space="1MiB"), some))


@pytest.mark.parametrize(
    "fault",
    [
        lambda s: s.token_ids.__setitem__(3, s.token_ids[3] ^ 1),
        lambda s: s.logprobs.__setitem__(3, replace(s.logprobs[3], logprob=math.nextafter(s.logprobs[3].logprob, 0))),
        lambda s: s.logprobs.__setitem__(3, replace(s.logprobs[3], top=s.logprobs[3].top[::-1])),
        lambda s: s.token_ids.pop(),
    ],
)
def test_the_comparison_notices(setup: Setup, fault: Callable[[Stream], None]) -> None:
    other = run(setup.engine(), requests()[9:10])
    truth = {key: replace(s, token_ids=list(s.token_ids), logprobs=list(s.logprobs)) for key, s in other.items()}
    assert_identical(truth, other)
    fault(next(iter(other.values())))
    with pytest.raises(AssertionError):
        assert_identical(truth, other)


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
