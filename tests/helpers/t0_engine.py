"""T0 in the engine, and what it must say according to NumPy."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from helpers.tiny import VOCAB, t0_config, t0_numpy_logits, t0_weights

# One token; one less than a block of 32, a whole one, one more; two whole ones; more than three.
LENGTHS = (1, 31, 32, 33, 64, 100)


def t0_llm(path: Path, **settings: Any) -> LLM:
    """T0 (or a model like it) on one thread: its matrices are done before a second thread has woken up."""
    return LLM(str(path), **({"threads": 1, "seed": 0, "kv_cache_memory": 32 << 20} | settings))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that are all ordinary ones."""
    return np.random.default_rng([length, seed]).integers(0, 256, length).tolist()


def numpy_logprobs(ids: list[int]) -> np.ndarray:
    """Log-probabilities `[len(ids), vocab]` of what follows each token, float64."""
    logits = _logits(tuple(ids))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@cache
def numpy_greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    """The `count` most likely tokens, one after the other; end-of-sequence tokens are like any other."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(_logits(tuple(ids))[-1].argmax()))
    return ids[len(prompt) :]


@cache
def _logits(ids: tuple[int, ...]) -> np.ndarray:
    assert max(ids) < VOCAB
    return t0_numpy_logits(_WEIGHTS, _CONFIG, list(ids))


_CONFIG = t0_config()
_WEIGHTS = t0_weights()
