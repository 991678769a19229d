"""Penalties in a running engine: T0 against NumPy, under preemption, chunked prompts, cached prefixes and n > 1."""

from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from helpers.t0_engine import numpy_logprobs, random_prompt, t0_llm
from helpers.tiny import save_t0, t0_config, t0_numpy_logits, t0_weights

WEIGHTS, CONFIG = t0_weights(), t0_config()

BLOCK = 16 * 512  # bytes that 16 tokens take in the cache
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("T0") / "T0")


def numpy_penalized(prompt: list[int], count: int, repetition: float, presence: float, frequency: float) -> list[int]:
    """The greedy continuation with penalties, which act on the raw logits."""
    ids = list(prompt)
    for _ in range(count):
        logits = t0_numpy_logits(WEIGHTS, CONFIG, ids)[-1]
        seen = np.unique(ids)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        counts = np.bincount(ids[len(prompt) :], minlength=len(logits))
        ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
    return ids[len(prompt) :]


def greedy(llm: LLM, prompts: list[list[int]], **params: object) -> list[list[int]]:
    settings = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | params))
    return [o.outputs[0].token_ids for o in llm.generate(prompts, settings, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},  # prompts in chunks
        {"kv_cache_memory": 10 * BLOCK, "block_size": 16, "max_model_len": 150},  # not enough for all: preemption
    ],
    ids=["plain", "chunked", "preempted"],
)
def test_greedy_with_penalties_is_numpys(directory: Path, settings: dict[str, object]) -> None:
    llm = t0_llm(directory, **settings)
    prompts = [random_prompt(length) for length in (1, 20, 33, 64)]
    expected = [numpy_penalized(p, 40, 1.3, 0.5, 0.4) for p in prompts]
    assert greedy(llm, prompts, **PENALTIES) == expected
    assert greedy(llm, prompts, **PENALTIES) == expected  # from the prefix cache
    if "kv_cache_memory" in settings:
        assert llm.engine.stats().num_preemptions > 0


def test_seeded_samples_do_not_depend_on_company_or_on_preemption(directory: Path) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=s, max_tokens=50, ignore_eos=True, n=1 + s % 3, xtc_probability=0.5,
                       dry_multiplier=0.5, bad_words=["a", "th"], **PENALTIES)
        for s in range(6)
    ]  # fmt: skip
    prompts = [random_prompt(10 + 7 * s) for s in range(6)]

    def texts(llm: LLM, which: list[int]) -> list[list[list[int]]]:
        outputs = llm.generate([prompts[i] for i in which], [params[i] for i in which], use_tqdm=False)
        return [[c.token_ids for c in o.outputs] for o in outputs]

    roomy = t0_llm(directory)
    alone = [texts(roomy, [i])[0] for i in range(6)]
    assert texts(roomy, list(range(6))) == alone
    tight = t0_llm(directory, kv_cache_memory=14 * BLOCK, block_size=16, max_model_len=160)
    assert texts(tight, list(range(6))) == alone
    assert tight.engine.stats().num_preemptions > 0
    for outputs in alone:
        assert all(ord("a") not in ids for ids in outputs)
        assert all(b"th" not in bytes(min(t, 255) for t in ids) for ids in outputs)


def test_allowed_tokens(directory: Path) -> None:
    llm = t0_llm(directory)
    (ids,) = greedy(llm, [[1, 2, 3]], allowed_token_ids=[65, 66, 67])
    row = [1, 2, 3]
    for token in ids:
        best = max((65, 66, 67), key=lambda t: numpy_logprobs(row)[-1][t])
        assert token == best
        row.append(token)
