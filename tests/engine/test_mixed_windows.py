"""A model with layers of two kinds, some with a window and some without: what it says, and how many blocks it holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request, RequestOutput
from headrace.errors import CapacityError
from helpers.differential import run
from helpers.families import save_family, transformers_logits, transformers_model
from helpers.t0_engine import random_prompt, t0_llm

WINDOW, FULL_LAYERS, PLACES = 7, 2, 2  # five layers: one group sees everything, two have the window
LAYER_TOKEN_BYTES = 2 * 2 * 24 * 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("gemma3"), "gemma3", seed=5)


@pytest.fixture(scope="module")
def truth(path: Path) -> Any:
    return transformers_model(path)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **more)


def check(truth: Any, output: RequestOutput) -> None:
    for completion in output.outputs:
        ids = output.prompt_token_ids + completion.token_ids
        logprobs = transformers_logits(truth, ids).log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        assert completion.token_ids == logprobs.argmax(-1).tolist()
        got = [entry.logprob for entry in completion.logprobs or []]
        np.testing.assert_allclose(got, logprobs.amax(-1), atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [5, 2048])
def test_lengths_around_and_far_past_the_window(path: Path, truth: Any, block_size: int, chunk: int) -> None:
    llm = t0_llm(path, block_size=block_size, max_num_batched_tokens=chunk, max_num_seqs=4)
    prompts = [random_prompt(n) for n in (1, 6, 7, 8, 9, 15, 16, 17, 100, 300)]
    for again in range(2):
        for output in llm.generate(prompts, greedy(20)):
            check(truth, output)
            assert output.num_cached_tokens == again * (len(output.prompt_token_ids) - 1) // block_size * block_size
    for output in llm.generate(prompts, greedy(4, n=3)):
        check(truth, output)
    stats = llm.engine.stats()
    assert stats.free_blocks == stats.num_blocks


def held(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_blocks - stats.free_blocks


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_what_fell_out_of_the_window_is_given_back(path: Path, block_size: int) -> None:
    engine = t0_llm(path, block_size=block_size, max_num_batched_tokens=32, max_num_seqs=2).engine
    engine.add_request(Request("r", random_prompt(200), greedy(150)))
    in_window = -(-WINDOW // block_size) + 1
    while engine.has_work:
        deltas = engine.step()
        (sequence,) = engine.scheduler.running or [None]
        if sequence is not None:
            full = -(-len(sequence.token_ids) // block_size)
            if deltas:  # it decodes
                assert held(engine) <= full + 2 * in_window
            else:
                assert held(engine) <= full + 2 * (-(-(WINDOW + 32) // block_size) + 1)


def test_the_same_memory_holds_a_longer_context(path: Path) -> None:
    """Memory for 500 tokens in the two layers that see all, and what the three others need, is enough; it is used."""
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 1, "max_model_len": 500}
    blocks = 125 + 2 * ((WINDOW + 16 - 1 + 3) // 4 + 1)
    memory = blocks * 4 * PLACES * LAYER_TOKEN_BYTES
    assert memory < 0.5 * 500 * 5 * LAYER_TOKEN_BYTES
    engine = t0_llm(path, **settings, kv_cache_memory=memory).engine
    assert engine.stats().num_blocks == blocks
    (stream,) = run(engine, [Request("r", random_prompt(400), greedy(100))]).values()
    assert len(stream.token_ids) == 100
    assert engine.stats().num_preemptions == 0
    with pytest.raises(CapacityError, match=r"max_model_len of at most 496"):
        t0_llm(path, **settings, kv_cache_memory=memory - 1)


def test_a_beginning_is_reused_only_where_its_window_is_still_there(path: Path, truth: Any) -> None:
    llm: LLM = t0_llm(path, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    stem = random_prompt(40)
    check(truth, llm.generate(stem, greedy(40))[0])
    index = llm.engine.scheduler.cache.index
    assert index is not None
    # Those who go on from any place within it find what they need, as nothing has been evicted yet.
    for length in range(2, 41):
        (output,) = llm.generate([*stem[:length], 5], greedy(3))
        check(truth, output)
        assert output.num_cached_tokens == length // 4 * 4
    # Without one windowed block, no hit can end where the next token sees that block; but after it, and before it.
    node = index.find("", stem, 10)[4]  # tokens 16 to 19
    index._owners.pop(node.blocks[1])
    node.blocks[1] = -1
    for length, found in ((17, 16), (20, 16), (24, 16), (26, 16), (28, 28), (40, 40)):
        assert len(index.find("", stem, length // 4)) * 4 == found
    # Without a block of the layers that see everything, none can go beyond it.
    index._owners.pop(node.blocks[0])
    node.blocks[0] = -1
    assert len(index.find("", stem, 10)) == 4
