"""What other engines were found to get wrong with speculation: the same text with and without, on a real model.

HEADRACE_FULL_LENGTH=1 runs all prompts at full length; without it there are a few, and short ones.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.errors import ConfigError
from helpers.differential import Streams, run
from helpers.full_length import FULL
from helpers.model_files import smollm2
from helpers.t0_engine import t0_llm
from helpers.tiny import save_t0

LENGTH = 128 if FULL else 12
pytestmark = pytest.mark.timeout(0 if FULL else 300)

REPETITIVE = [
    *(", ".join(str(i * k) for i in range(1, 12)) + "," for k in range(1, 11)),
    *(f"- {word} one\n- {word} two\n- {word} three\n-" for word in ("apple", "river", "stone", "cloud", "mill")),
    *(f"def f{i}(x):\n    return x + {i}\n\ndef f{i + 1}(x):\n    return x + {i + 1}\n\ndef" for i in range(8)),
    *(f'{{"id": {i}, "ok": true}}\n{{"id": {i + 1}, "ok": true}}\n{{"id":' for i in range(6)),
    " word" * 100,
]
ORDINARY = [
    f"{start} {topic}"
    for start, topic in itertools.product(
        ("Once upon a time there was", "The history of", "My favourite thing about", "Here is how to repair"),
        ("a mill", "the sea", "old clocks", "bread", "a small town"),
    )
]
PROMPTS = REPETITIVE + ORDINARY if FULL else REPETITIVE[::7] + ORDINARY[:1]


@pytest.fixture(scope="module")
def reference() -> Engine:
    return make()


def make(config: dict[str, Any] | None = None) -> Engine:
    settings = {"max_model_len": 512, "kv_cache_memory": "256MiB", "seed": 0, "threads": 1}
    return LLM(str(smollm2()), speculative_config=config and {"adaptive": False} | config, **settings).engine


def requests(engine: Engine, **params: Any) -> list[Request]:
    settings = SamplingParams(**({"temperature": 0, "max_tokens": LENGTH, "logprobs": 2} | params))
    return [Request(f"{i}", engine.tokenizer.encode(text), settings) for i, text in enumerate(PROMPTS)]


def assert_identical(truth: Streams, other: Streams) -> None:
    for key, stream in truth.items():
        assert (other[key].token_ids, other[key].logprobs) == (stream.token_ids, stream.logprobs), key


METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "ngram", "num_speculative_tokens": 1},
    {"method": "suffix", "num_speculative_tokens": 8},
    {"method": "draft_model", "model": "itself"},
    {"method": "self", "num_layers": 20},
]


@pytest.mark.parametrize("config", METHODS if FULL else METHODS[:1], ids=lambda c: f"{c['method']}")
def test_greedy_text_does_not_change(reference: Engine, config: dict[str, Any]) -> None:
    """Penalties, biases and least lengths count the tokens of a draft too; alone and eight at a time."""
    if config.get("model"):
        config = config | {"model": str(smollm2())}
    engine = make(config)
    for params in (
        {"min_tokens": LENGTH // 2, "frequency_penalty": 1.0},
        *(({}, {"logit_bias": {28: -100.0}}) if FULL else ()),
    ):
        each = requests(reference, **params)
        truth = run(reference, each)
        assert_identical(truth, run(engine, each, arrivals=[2 * i for i in range(len(each))]))
        alone: Streams = {}
        for request in each if FULL else each[:1]:
            alone |= run(engine, [request])
            assert_identical({key: truth[key] for key in alone}, alone)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    if config["method"] == "draft_model":
        assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 259 tokens and the model 49152"):
        make({"method": "draft_model", "model": str(save_t0(tmp_path))})


def test_hits_in_the_prefix_cache_and_drafts_together(tmp_path: Path) -> None:
    """Nothing is written to the wrong slots: tails after a warm beginning, again, and many at once."""
    path = save_t0(tmp_path)

    def prompts() -> list[str]:
        words = " word" * 16
        tails = [f"{words} one two three one two three one", f"{words} one two"]
        return [words, *(tail for tail in tails for _ in range(2))]

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    plain = t0_llm(path, enable_prefix_caching=False).engine
    config = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    engine = t0_llm(path, block_size=16, speculative_config=config).engine
    for i, text in enumerate(prompts()):
        request = Request(f"{i}", list(text.encode()), params)
        truth, got = run(plain, [request]), run(engine, [request])
        assert_identical(truth, got)
        assert i == 0 or got[f"{i}", 0].cached_tokens
    together = [Request(f"{i}", list(f"{prompts()[1]} {i * 37}".encode()), params) for i in range(8)]
    assert_identical(run(plain, together), run(engine, together))
    assert engine.stats().num_accepted_tokens > 0
