"""Behaviour of schedulers and caches that other engines got wrong, asked of a running engine on the tiny model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.engine.request import RequestOutput
from headrace.errors import CapacityError
from helpers.t0_engine import numpy_greedy, numpy_logprobs, random_prompt, t0_llm
from helpers.tiny import save_t0, t0_config

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def greedy(count: int, **more: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def logprobs_are_numpys(output: RequestOutput) -> None:
    """Of the output, and of the prompt where they were asked for."""
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    truth = numpy_logprobs(ids)
    first = len(output.prompt_token_ids)
    reported = list(output.outputs[0].logprobs or [])
    if output.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == first
        assert output.prompt_logprobs[0] is None
        reported = [*output.prompt_logprobs[1:], *reported]
        first = 1
    assert len(reported) == len(ids) - first
    for i, entry in enumerate(reported):
        assert entry is not None
        assert entry.token_id == ids[first + i]
        assert entry.logprob == pytest.approx(truth[first + i - 1, ids[first + i]], abs=1e-4)


def test_prompt_logprobs_with_a_warm_cache(t0_dir: Path) -> None:
    llm = t0_llm(t0_dir, block_size=16)
    one, two = random_prompt(40), [*random_prompt(33), 7, 8, 9]
    for _ in range(2):
        for prompt in (one, two):
            logprobs_are_numpys(llm.generate(prompt, greedy(1, prompt_logprobs=2, logprobs=2))[0])
    params = [greedy(1, prompt_logprobs=2, logprobs=2)] * 2 + [greedy(30, logprobs=0)]
    for output in llm.generate([one, two, one], params):
        logprobs_are_numpys(output)


def test_prompts_that_differ_in_one_token_share_no_more_than_is_equal(t0_dir: Path) -> None:
    llm = t0_llm(t0_dir, block_size=16)
    base = random_prompt(64)
    llm.generate(base, greedy(8))
    swapped = base[:16] + base[32:48] + base[16:32] + base[48:]
    variants = [[*base[:k], (base[k] + 1) % 256, *base[k + 1 :]] for k in range(0, 64, 3)]
    others = [base[1:], [5, *base], base[::-1], swapped]
    for variant in [*others, *variants]:
        (output,) = llm.generate(variant, greedy(4, logprobs=1))
        if variant in variants:
            equal = next(i for i in range(64) if variant[i] != base[i])
            assert output.num_cached_tokens == equal // 16 * 16
        assert output.outputs[0].token_ids == numpy_greedy(tuple(variant), 4)
        logprobs_are_numpys(output)


def test_hits_beside_misses(t0_dir: Path) -> None:
    llm = t0_llm(t0_dir, block_size=16)
    warm = random_prompt(64)
    llm.generate(warm, greedy(1))
    for round in range(4):
        prompts = [[*warm, 65], [*warm, 66, 67], *(random_prompt(n, round + 1) for n in (70, 3, 1))]
        outputs = llm.generate(prompts, greedy(12))
        assert [o.num_cached_tokens for o in outputs[:2]] == [64, 64]
        assert [o.outputs[0].token_ids for o in outputs] == [numpy_greedy(tuple(p), 12) for p in prompts]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("scarce", [False, True])
def test_sequences_that_cross_the_edge_of_a_block(t0_dir: Path, block_size: int, scarce: bool) -> None:
    settings = {"max_model_len": 96, "kv_cache_memory": 192 * BYTES_PER_TOKEN} if scarce else {}
    llm = t0_llm(t0_dir, block_size=block_size, **settings)
    prompts = [random_prompt(n) for n in (14, 15, 16, 17, 18, 30, 31, 32, 33, 34)]
    for _ in range(2):  # the second time with hits
        for output, prompt in zip(llm.generate(prompts, greedy(40)), prompts, strict=True):
            assert output.outputs[0].token_ids == numpy_greedy(tuple(prompt), 40)
    assert (llm.engine.stats().num_preemptions > 0) == scarce


@pytest.mark.parametrize("prefix", [False, True])
def test_use_of_the_cache_does_not_creep_up(t0_dir: Path, prefix: bool) -> None:
    llm = t0_llm(t0_dir, block_size=16, enable_prefix_caching=prefix, kv_cache_memory=1024 * BYTES_PER_TOKEN)
    for i in range(60):
        llm.generate([i, *random_prompt(40)], greedy(4))
        stats = llm.engine.stats()
        assert stats.free_blocks == stats.num_blocks
        assert prefix or not stats.kept_blocks
    (output,) = llm.generate(random_prompt(500), greedy(4))
    assert len(output.outputs[0].token_ids) == 4


def test_a_context_that_the_cache_cannot_hold_is_refused_at_the_start(t0_dir: Path) -> None:
    with pytest.raises(CapacityError, match="64"):
        t0_llm(t0_dir, max_model_len=512, kv_cache_memory=64 * BYTES_PER_TOKEN)


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_a_sliding_window(tmp_path: Path, block_size: int) -> None:
    """Every length around the window, against transformers; blocks that fell out of it are given back."""
    config = t0_config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8)
    save_t0(tmp_path, config=config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    llm: LLM = t0_llm(tmp_path, block_size=block_size)
    for length in (5, 7, 8, 9, 15, 16, 17, 20):
        for _ in range(2):  # the second time with a prefix hit
            prompt = random_prompt(length)
            (output,) = llm.generate(prompt, greedy(16, logprobs=0))
            ids = prompt + output.outputs[0].token_ids
            with torch.inference_mode():
                truth = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            assert ids[length:] == truth[length - 1 : -1].argmax(-1).tolist()
            for i, entry in enumerate(output.outputs[0].logprobs or []):
                assert entry.logprob == pytest.approx(float(truth[length + i - 1, ids[length + i]]), abs=1e-3)
    assert llm.engine.scheduler.cache.window == 8
    assert llm.engine.stats().free_blocks == llm.engine.stats().num_blocks
    several = [random_prompt(n, 1) for n in (3, 9, 30)]
    forked = llm.generate(several, SamplingParams(n=3, temperature=0, max_tokens=16, ignore_eos=True))
    alone = [llm.generate(p, greedy(16))[0].outputs[0].token_ids for p in several]
    assert [[c.token_ids for c in o.outputs] for o in forked] == [[ids] * 3 for ids in alone]
