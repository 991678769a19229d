"""Speculation never changes an answer: the same tokens, logprobs and ends, greedy or drawn, whatever else is on.

The truth is the same engine without it. Drafts come from the real proposers, and from one that knows the truth and gets
every third token wrong, so that runs of any length are accepted and rejected everywhere.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import SamplingParams, StructuredOutputs
from headrace.config import EngineConfig
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.errors import ConfigError
from headrace.speculative.proposer import DraftRequest
from headrace.speculative.speculation import Speculation
from helpers.differential import Streams, run
from helpers.t0_engine import random_prompt, t0_llm
from helpers.tiny import save_t0

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
# Lengths that do not depend on time.
FIXED = {"num_speculative_tokens": 4, "adaptive": False}
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, **FIXED}


def ids(text: str) -> list[int]:
    return list(text.encode())


# With much repetition and without, from one token to several blocks.
PROMPTS = [
    ids("1, 2, 3, 1, 2, 3, 1, 2, 3,"),
    ids("for i in range(3):\n    print(i)\nfor j in range(3):\n    print("),
    ids("a"),
    random_prompt(40),
]


def requests(**params: Any) -> list[Request]:
    """Outputs of different lengths, so that some end within a draft."""
    base = {"temperature": 0, "seed": 11, "max_tokens": 40, "ignore_eos": True, "logprobs": 2} | params
    lengths = [max(1, base["max_tokens"] - 3 * i) for i in range(len(PROMPTS))]
    each = [SamplingParams(**(base | {"max_tokens": length})) for length in lengths]
    return [Request(f"{i}", prompt, p) for i, (prompt, p) in enumerate(zip(PROMPTS, each, strict=True))]


def assert_identical(truth: Streams, other: Streams) -> None:
    assert truth.keys() == other.keys()
    for key, stream in truth.items():
        assert other[key].token_ids == stream.token_ids, key
        assert other[key].logprobs == stream.logprobs, key  # bit by bit
        assert (other[key].text, other[key].finish_reason) == (stream.text, stream.finish_reason), key


class Knowing:
    """Proposes what the truth says, with every third token wrong."""

    def __init__(self, truth: Streams, each: list[Request]) -> None:
        self.texts = [[*r.prompt_token_ids, *truth[r.request_id, i].token_ids] for r in each for i in range(r.params.n)]

    def propose(self, asked: list[DraftRequest]) -> list[list[int]]:
        return [self.guess(request) for request in asked]

    def guess(self, request: DraftRequest) -> list[int]:
        known, length = request.token_ids, len(request.token_ids)
        text = next((t for t in self.texts if t[:length] == known), known)
        noise = zlib.crc32(bytes(t % 256 for t in known))
        guess = text[length : length + request.most]
        return [t if (noise + i) % 3 else (t + 1) % 256 for i, t in enumerate(guess)]

    def forget(self, seq_id: int) -> None:
        pass


def knowing(engine: Engine, truth: Streams, each: list[Request], most: int = 5) -> Engine:
    engine.scheduler.speculation = Speculation(Knowing(truth, each), most)
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("T0") / "T0")


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(directory: Path) -> Make:
    def engine(**settings: Any) -> Engine:
        return t0_llm(directory, **({"block_size": 16, "max_model_len": 120} | settings)).engine

    return engine


@pytest.fixture(scope="module")
def plain(make: Make) -> Engine:
    return make()


@pytest.fixture(scope="module")
def ngram(make: Make) -> Engine:
    return make(speculative_config=NGRAM)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.3, "n": 2, "max_tokens": 20},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "temperature": 0.5},
        {"bad_words": ["a", "1,", " w"], "logit_bias": {28: -100.0}},
        {"min_tokens": 20, "ignore_eos": False, "temperature": 1.0, "stop_token_ids": list(range(64))},
        {"allowed_token_ids": ids("ab1,")},
        {"xtc_probability": 0.5, "temperature": 1.0},
        {"max_tokens": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "stop": ["\x01", "o", "AB", "é"]},
        {"structured_outputs": StructuredOutputs(regex=r"(one|two)( (one|two|three)){3,6}"), "temperature": 0.9},
        {"structured_outputs": StructuredOutputs(json={"enum": ["aaaa bbbb", "aaaa cccc"]}), "ignore_eos": False},
    ],
    ids=str,
)
def test_the_same_bits(plain: Engine, ngram: Engine, params: dict[str, Any]) -> None:
    each = requests(**params)
    truth = run(plain, each)
    assert_identical(truth, run(ngram, each))
    before = ngram.scheduler.speculation
    try:
        assert_identical(truth, run(knowing(ngram, truth, each), each, arrivals=range(len(each))))
        assert ngram.stats().num_accepted_tokens > 0 or params.get("max_tokens") == 2
        assert ngram.stats().free_blocks == ngram.stats().num_blocks
    finally:
        ngram.scheduler.speculation = before


def test_to_the_end_of_the_context(plain: Engine, make: Make) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=0)
    each = [Request("long", random_prompt(90), params), Request("full", random_prompt(119), params)]
    truth = run(plain, each)
    assert [len(s.token_ids) for s in truth.values()] == [30, 1]
    engine = knowing(make(), truth, each, most=32)
    assert_identical(truth, run(engine, each))
    assert engine.stats().num_accepted_tokens > 10


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},  # prompts in chunks, and little room for drafts
        {"kv_cache_memory": 120 * TOKEN_BYTES, "block_size": 4},  # preemption
        {"kv_cache_memory": 120 * TOKEN_BYTES, "block_size": 4, "swap_space": "1MiB", "enable_prefix_caching": False},
        {"kv_cache_layout": "contiguous", "max_num_seqs": 3},
        {"scheduling_policy": "fair", "block_size": 1},
    ],
    ids=str,
)
def test_whatever_interrupts_it(plain: Engine, make: Make, settings: dict[str, Any]) -> None:
    each = requests(temperature=0.9, max_tokens=40)
    truth = run(plain, each)
    engine = knowing(make(**settings), truth, each)
    assert_identical(truth, run(engine, each))
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == ("kv_cache_memory" in settings)
    assert (stats.num_swaps > 0) == ("swap_space" in settings)


def test_what_was_rejected_is_not_in_the_prefix_cache(plain: Engine, make: Make) -> None:
    """Blocks that held rejected tokens are found by others, and hold what they should."""
    each = requests(max_tokens=40)
    truth = run(plain, each)
    engine = knowing(make(block_size=4), truth, each)
    run(engine, each)
    longer = [
        Request(r.request_id, [*r.prompt_token_ids, *truth[r.request_id, 0].token_ids[:17], 7], r.params) for r in each
    ]
    cached = run(engine, longer)
    assert all(stream.cached_tokens for stream in cached.values())
    assert_identical(run(plain, longer), cached)


def test_drafts_make_fewer_steps_and_no_preemption(plain: Engine, make: Make) -> None:
    each = requests(max_tokens=40)
    truth = run(plain, each)
    counts = []
    for most in (0, 5):
        engine = make(kv_cache_memory=360 * TOKEN_BYTES, block_size=4)
        if most:
            knowing(engine, truth, each, most)
        run(engine, each)
        counts.append(engine.stats().num_steps)
        assert engine.stats().num_preemptions == 0
    assert counts[1] < counts[0] * 0.7
    assert engine.stats().num_generated_tokens == sum(len(s.token_ids) for s in truth.values())


def test_counts(plain: Engine, make: Make) -> None:
    each = requests()
    truth = run(plain, each)
    engine = make(speculative_config=NGRAM)
    drafted = accepted = 0
    for request in each:
        engine.add_request(request)
    while engine.has_work:
        for delta in engine.step():
            drafted += delta.num_drafted
            accepted += delta.num_accepted
            assert len(delta.token_ids) <= 1 + delta.num_accepted
    stats = engine.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (drafted, accepted)
    assert sum(stats.accepted_at) == accepted > 0
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert stats.num_drafts >= stats.accepted_at[0]
    assert stats.draft_seconds > 0
    assert stats.num_generated_tokens == sum(len(s.token_ids) for s in truth.values())


@pytest.mark.parametrize("config", [{"method": "ngram", "num_speculative_tokens": 8}, {"method": "suffix"}])
def test_lengths_that_adapt(plain: Engine, make: Make, config: dict[str, Any]) -> None:
    """How long they are depends on time here; what is said does not."""
    each = requests(temperature=0.3)
    engine = make(speculative_config=config, scheduling_policy="fair")
    truth = run(plain, each)
    for _ in range(2):
        assert_identical(truth, run(engine, each))
    assert engine.scheduler.speculation is not None
    assert not engine.scheduler.speculation.lengths._records  # nothing is kept of those that have ended


def test_the_second_time_the_answer_is_known(plain: Engine, make: Make) -> None:
    """The suffix method remembers what the same tenant was told, and nobody else."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    first = Request("first", random_prompt(30, 7), params, tenant="a")
    truth = run(plain, [first])
    steps = {}
    for tenant in ("a", "b"):
        engine = make(speculative_config={"method": "suffix", "num_speculative_tokens": 8, "adaptive": False})
        run(engine, [first])
        before = engine.stats()
        assert_identical(truth, run(engine, [replace(first, tenant=tenant)]))
        steps[tenant] = engine.stats().num_steps - before.num_steps
    assert steps["a"] <= 8
    assert steps["b"] > steps["a"]


def test_a_request_without_it(plain: Engine, ngram: Engine) -> None:
    each = [replace(r, params=replace(r.params, speculative=False)) for r in requests()]
    before = ngram.stats().num_drafts
    assert_identical(run(plain, requests()), run(ngram, each))
    assert ngram.stats().num_drafts == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "speculative_config is no JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "method must be one of ngram, suffix, draft_model, self, not None"),
        ('{"method": "eagle"}', "method must be one of"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be an integer from 1 to"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens must be an integer from 1 to"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "at most prompt_lookup_max"),
        ('{"method": "ngram", "prompt_lookup_mx": 5}', "did you mean 'prompt_lookup_max'"),
        ('{"method": "suffix", "prompt_lookup_max": 5}', "unknown setting of the method suffix"),
        ('{"method": "suffix", "adaptive": 1}', "adaptive must be true or false"),
    ],
)
def test_a_wrong_config(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="M", speculative_config=config)


def test_static_batches_have_none() -> None:
    with pytest.raises(ConfigError, match="not the policy static"):
        EngineConfig(model="M", speculative_config=NGRAM, scheduling_policy="static")
