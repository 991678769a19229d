"""Drafts by a model: nothing changes in what is said, and the draft model's cache holds what it should.

Where the draft is the model itself, every token of it must be right, bit for bit: whatever happens to blocks, a draft
that reads a wrong key or value is noticed by what it gets wrong.
"""

import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import SamplingParams, StructuredOutputs
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.errors import ConfigError, ModelError
from headrace.speculative.proposer import DraftRequest
from headrace.worker.model_proposer import Computed
from helpers.differential import Streams, run
from helpers.distribution import exact_distribution, p_value
from helpers.families import save_family
from helpers.t0_engine import numpy_logprobs, random_prompt, t0_llm
from helpers.tiny import EOS, save_t0, t0_config, t0_weights

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
STEM = random_prompt(37)
Make = Callable[..., Engine]


def requests(count: int = 5, **params: Any) -> list[Request]:
    base = {"temperature": 0, "seed": 5, "max_tokens": 20, "ignore_eos": True, "logprobs": 1} | params
    prompts = [[*STEM[: 6 * i], *random_prompt(1 + 5 * (i % 3), i)] for i in range(count)]
    return [Request(f"{i}", prompt, SamplingParams(**base)) for i, prompt in enumerate(prompts)]


def assert_identical(truth: Streams, other: Streams) -> None:
    assert truth.keys() == other.keys()
    for key, stream in truth.items():
        assert other[key].token_ids == stream.token_ids, key
        assert other[key].logprobs == stream.logprobs, key


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("T0") / "T0")


@pytest.fixture(scope="module")
def make(directory: Path) -> Make:
    def engine(config: dict[str, Any] | None = None, **given: Any) -> Engine:
        common = {"block_size": 8, "max_model_len": 120, "speculative_config": config and {"adaptive": False} | config}
        return t0_llm(directory, **(common | given)).engine

    return engine


@pytest.fixture(scope="module")
def plain(make: Make) -> Engine:
    return make()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are a little off."""
    rng = np.random.default_rng(1)
    weights = {k: v + rng.normal(0, 0.03, v.shape).astype(np.float32) for k, v in t0_weights().items()}
    return save_t0(tmp_path_factory.mktemp("other") / "other", weights=weights)


SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"kv_cache_memory": 2 * 128 * TOKEN_BYTES, "block_size": 4},
    "swap": {"kv_cache_memory": 2 * 128 * TOKEN_BYTES, "block_size": 4, "swap_space": "1MiB"},
    "contiguous": {"kv_cache_layout": "contiguous", "max_num_seqs": 3},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize(
    ("method", "situation"),
    [*(("draft_model", situation) for situation in SITUATIONS), ("self", "plain"), ("self", "swap")],
)
def test_a_model_as_its_own_draft_is_always_right(
    directory: Path, make: Make, plain: Engine, method: str, situation: str
) -> None:
    own = {"draft_model": {"model": str(directory)}, "self": {"num_layers": 2}}[method]
    given = dict(SITUATIONS[situation])
    if method == "self" and "kv_cache_memory" in given:
        given["kv_cache_memory"] //= 2  # there is no second cache
    engine = make({"method": method, **own}, **given)
    reference = make(kv_cache_dtype="int8") if "int8" in situation else plain
    for each in (requests(4, n=2), requests(temperature=0.9, frequency_penalty=0.5)):
        truth = run(reference, each)
        assert_identical(truth, run(engine, each, arrivals=range(len(each))))
        longer = [replace(r, prompt_token_ids=[*r.prompt_token_ids, 7, 8]) for r in each]
        assert_identical(run(reference, longer), run(engine, longer))  # with hits in the prefix cache
    stats = engine.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 100
    assert (stats.num_preemptions > 0) == ("kv_cache_memory" in given)
    assert (stats.num_swaps > 0) == ("swap_space" in given)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["draft_model", "self"])
def test_another_draft_changes_nothing(make: Make, plain: Engine, other: Path, method: str, temperature: float) -> None:
    own = {"draft_model": {"model": str(other), "quantization": "int8"}, "self": {"num_layers": 1}}[method]
    engine = make({"method": method, "num_speculative_tokens": 6, **own})
    each = requests(temperature=temperature, top_p=0.95)
    assert_identical(run(plain, each), run(engine, each))
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens


def test_a_draft_that_has_missed_some_tokens_catches_up(directory: Path, make: Make, plain: Engine) -> None:
    """Now and then a sequence has no draft, or one of another length, or its prompt is longer than a catching up."""
    engine = make({"method": "draft_model", "model": str(directory)}, max_model_len=400, enable_prefix_caching=True)
    proposer = engine.worker.proposer
    assert proposer is not None
    propose, calls = proposer.propose, 0

    def sometimes(asked: list[DraftRequest]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            return [[] for _ in asked]
        return [
            draft[: calls % 5] for draft in propose([replace(r, most=1 + (calls + i) % 4) for i, r in enumerate(asked)])
        ]

    engine.scheduler.speculation._proposer.propose = sometimes  # type: ignore[union-attr,method-assign]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    each = [Request(f"{n}", random_prompt(n), params) for n in (300, 310, 3)]
    truth = run(make(max_model_len=400), each)
    assert_identical(truth, run(engine, each))
    assert_identical(truth, run(engine, each, arrivals=[0, 3, 9]))
    assert engine.stats().num_draft_tokens == engine.stats().num_accepted_tokens > 50


class TestProbabilistic:
    """Drafts with random numbers of their own: another sample of the same distribution."""

    def engine(self, make: Make, draft: Path, **settings: Any) -> Engine:
        config = {"method": "draft_model", "model": str(draft), "draft_sample_method": "probabilistic"}
        return make(config, **settings)

    def test_where_both_think_the_same_all_is_accepted(self, directory: Path, make: Make) -> None:
        engine = self.engine(make, directory)
        each = requests(temperature=0.9, top_p=0.9, presence_penalty=0.5)
        first = run(engine, each)
        stats = engine.stats()
        assert stats.num_draft_tokens == stats.num_accepted_tokens > 50
        assert_identical(first, run(engine, each))  # a seed makes it repeatable

    def test_greedy_and_grammars_are_as_without(self, make: Make, plain: Engine, other: Path) -> None:
        engine = self.engine(make, other)
        for params in ({}, {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[ab ]{3,9}c+")}):
            each = requests(4, **params)
            assert_identical(run(plain, each), run(engine, each))

    def test_pairs_of_tokens_have_the_models_distribution(self, make: Make, other: Path) -> None:
        """Of six tokens, one of which may end the output: the second and the third, which come from drafts."""
        allowed, prompt, count = [7, 70, 90, 120, 200, EOS], STEM[:9], 512
        engine = self.engine(make, other, max_num_seqs=128)
        params = SamplingParams(n=128, max_tokens=3, allowed_token_ids=allowed, temperature=1.5)
        drawn = run(engine, [Request(f"{i}", prompt, replace(params, seed=i)) for i in range(count // 128)])
        assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens

        def probabilities(ids: list[int]) -> np.ndarray:
            return exact_distribution(numpy_logprobs(ids)[-1][allowed], temperature=1.5)

        expected, names = [], {}
        for first, p in zip(allowed, probabilities(prompt), strict=True):
            for second, q in zip(allowed, probabilities([*prompt, first]), strict=True):
                key = (first, second) if first != EOS else (EOS,)
                if key not in names:
                    names[key] = len(expected)
                    expected.append(0.0)
                expected[names[key]] += p * q
        numbers = np.array([names[tuple(stream.token_ids[:2])] for stream in drawn.values()])
        assert p_value(numbers, np.array(expected)) > 1e-3


def test_windows(tmp_path: Path) -> None:
    """Layers that drop what they no longer see, beside some that keep all (Gemma 3), as model and as draft."""
    path = save_family(tmp_path, "gemma3", 0)
    each = [
        Request(f"{i}", random_prompt(n, i), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1))
        for i, n in enumerate((3, 40, 70))
    ]
    truth = run(t0_llm(path, block_size=4, max_model_len=120).engine, each)
    for own in (
        {"method": "draft_model", "model": str(path), "adaptive": False},
        {"method": "self", "adaptive": False},
    ):
        engine = t0_llm(path, block_size=4, max_model_len=120, speculative_config=own).engine
        assert_identical(truth, run(engine, each))
        stats = engine.stats()
        assert stats.num_draft_tokens > 0
        assert own["method"] == "self" or stats.num_accepted_tokens == stats.num_draft_tokens


class TestVocabularies:
    def test_of_another_size(self, directory: Path, tmp_path: Path) -> None:
        draft = save_t0(tmp_path)
        tokenizer = json.loads((draft / "tokenizer.json").read_text())
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 259, "content": "<more>"})
        (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigError, match="has 260 tokens and the model 259"):
            t0_llm(directory, speculative_config={"method": "draft_model", "model": str(draft)})

    def test_of_another_order(self, directory: Path, tmp_path: Path) -> None:
        draft = save_t0(tmp_path)
        text = (draft / "tokenizer.json").read_text()
        a, b = '"a": 97', '"b": 98'
        assert text.count(a) == text.count(b) == 1
        (draft / "tokenizer.json").write_text(text.replace(a, '"a": 98').replace(b, '"b": 97'))
        with pytest.raises(ConfigError, match=r"token 97 is b'b' in the draft model .* and b'a' in the model"):
            t0_llm(directory, speculative_config={"method": "draft_model", "model": str(draft)})

    def test_rows_that_stand_for_no_token_are_never_proposed(self, make: Make, plain: Engine, tmp_path: Path) -> None:
        config = t0_config(vocab_size=320)
        weights = t0_weights(config=config)
        own = t0_weights()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name][:259] = own[name]
        weights = own | {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        weights["lm_head.weight"][259:] *= 20  # the draft would like them best
        draft = save_t0(tmp_path, config=config, weights=weights)
        engine = make({"method": "draft_model", "model": str(draft)})
        each = requests()
        assert_identical(run(plain, each), run(engine, each))
        assert engine.stats().num_accepted_tokens == engine.stats().num_draft_tokens > 0

    def test_a_draft_with_fewer_rows(self, directory: Path, tmp_path: Path) -> None:
        config = t0_config(vocab_size=320)
        wide = save_t0(tmp_path, config=config, weights=t0_weights(config=config))
        each = requests(frequency_penalty=1.0, temperature=1.0)
        truth = run(t0_llm(wide, max_model_len=120).engine, each)
        own = {"method": "draft_model", "model": str(directory)}
        assert_identical(truth, run(t0_llm(wide, max_model_len=120, speculative_config=own).engine, each))

    def test_a_shorter_context(self, make: Make, plain: Engine, tmp_path: Path) -> None:
        draft = save_t0(tmp_path, config=t0_config(max_position_embeddings=64))
        engine = make({"method": "draft_model", "model": str(draft)})
        each = [Request("short", STEM[:10], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=1))]
        assert_identical(run(plain, each), run(engine, each))
        # From the eleventh token to the 64th, and no further.
        assert 0 < engine.stats().num_draft_tokens == engine.stats().num_accepted_tokens <= 64 - 11


def test_a_draft_model_takes_its_share_of_the_memory(directory: Path, make: Make) -> None:
    plain, drafting = (
        make(config, kv_cache_memory=64 * 8 * TOKEN_BYTES)
        for config in (None, {"method": "draft_model", "model": str(directory)})
    )
    assert (plain.worker.num_blocks, drafting.worker.num_blocks) == (64, 32)
    assert drafting.worker.cache_bytes == plain.worker.cache_bytes


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"method": "draft_model"}, ConfigError, "model must be the draft model's path"),
        ({"method": "draft_model", "model": "/nowhere/at/all"}, ModelError, "/nowhere/at/all"),
        ({"method": "draft_model", "model": "x", "num_layers": 1}, ConfigError, "unknown setting of the method draft"),
        ({"method": "draft_model", "model": "x", "quantization": "int3"}, ConfigError, "quantization must be one of"),
        ({"method": "self", "num_layers": 3}, ConfigError, "num_layers is 3, and the model has 2"),
        ({"method": "self", "num_layers": 0}, ConfigError, "num_layers must be an integer from 1"),
        ({"method": "self", "draft_sample_method": "x"}, ConfigError, "one of coupled, probabilistic"),
    ],
)
def test_a_wrong_config(make: Make, config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(config)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.data())
def test_what_is_computed_is_known_block_by_block(size: int, data: st.DataObject) -> None:
    """Against a memory that holds, for each slot, which token of which sequence was written there last."""
    blocks, longest = 12, 3 * size
    model: dict[int, Any] = {}
    draft: dict[int, Any] = {}
    computed = Computed(blocks, size)
    tables = [array("q", [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(4)]
    lengths = [0] * 4  # of what the model has computed
    fresh = 0
    for _ in range(data.draw(st.integers(1, 25))):
        which = data.draw(st.integers(0, 3))
        table = tables[which]

        def slot(position: int, table: Any = table) -> int:
            return int(table[position // size]) * size + position % size

        known = computed.length(table, lengths[which])
        assert all(draft.get(slot(p)) == model[slot(p)] for p in range(known)), "the draft would read what is not so"
        action = data.draw(st.sampled_from(["model", "draft", "restart"]))
        if action == "restart":  # another sequence gets the blocks
            lengths[which] = 0
        elif action == "model" and lengths[which] < longest:
            count = data.draw(st.integers(1, longest - lengths[which]))
            for p in range(lengths[which], lengths[which] + count):
                fresh += 1
                model[slot(p)] = fresh
            computed.cut(table, lengths[which])
            lengths[which] += count
        elif action == "draft":
            for p in range(known, lengths[which]):
                draft[slot(p)] = model[slot(p)]
            computed.extend(table, known, lengths[which])
            assert computed.length(table, lengths[which]) == lengths[which]
