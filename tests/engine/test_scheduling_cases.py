"""Behaviour of schedulers and caches that other engines got wrong, asked of a running engine.

Most is asked of the tiny model, which NumPy or transformers check; some of SmolLM2 as well, with its cache of prefixes
off for comparison. `HEADRACE_FULL_LENGTH=1` asks SmolLM2 at full length too, for some ten minutes: the tiny model runs
through the same scheduler, cache and worker, so that this finds faults of the real model's sizes only.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.engine.request import Request, RequestOutput
from headrace.errors import CapacityError
from headrace.models.decoder import Decoder
from headrace.models.loader import load_decoder
from headrace.worker import worker
from helpers.differential import Stream, assert_same, run
from helpers.full_length import FULL, full_length
from helpers.model_files import smollm2
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


def tokens_are_numpys(output: RequestOutput) -> None:
    """The likeliest after each position, all of which one pass over the whole gives."""
    first = len(output.prompt_token_ids)
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    assert output.outputs[0].token_ids == numpy_logprobs(ids)[first - 1 : -1].argmax(-1).tolist()


def test_prompts_of_whole_blocks_up_to_a_very_long_one(tmp_path: Path) -> None:
    """With the cache and without, the first time and from the cache: what transformers says, and the same each time."""
    save_t0(tmp_path, config=t0_config(max_position_embeddings=8192))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    llms = [t0_llm(tmp_path, block_size=16, enable_prefix_caching=on) for on in (False, True)]
    for length in (15, 16, 17, 32, 48, 64, 4096):
        prompt = list(b" word" * 820)[:length]
        outputs = [llm.generate(prompt, greedy(20, logprobs=1))[0] for llm in (llms[0], *[llms[1]] * 3)]
        (truth,) = outputs[0].outputs
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + truth.token_ids])).logits[0, length - 1 : -1].log_softmax(-1)
        assert truth.token_ids == expected.argmax(-1).tolist()
        for output in outputs:
            (got,) = output.outputs
            assert (got.token_ids, got.text) == (truth.token_ids, truth.text)
            assert [entry.logprob for entry in got.logprobs or []] == pytest.approx(
                expected.max(-1).values.tolist(), abs=1e-3
            )
        for output in outputs[2:]:
            assert output.num_cached_tokens == (length - 1) // 16 * 16


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
    variants = [[*base[:k], (base[k] + 1) % 256, *base[k + 1 :]] for k in range(64)]
    others = [base[1:], [5, *base], base[::-1], swapped]
    for variant in [*others, *variants]:
        (output,) = llm.generate(variant, greedy(8, logprobs=1))
        if variant in variants:
            equal = next(i for i in range(64) if variant[i] != base[i])
            assert output.num_cached_tokens == equal // 16 * 16
        tokens_are_numpys(output)
        logprobs_are_numpys(output)


def test_hits_beside_misses(t0_dir: Path) -> None:
    llm = t0_llm(t0_dir, block_size=16)
    warm = random_prompt(64)
    llm.generate(warm, greedy(1))
    fixed = [random_prompt(n, 1) for n in (70, 3, 1)]
    for round in range(10):
        others = fixed if round < 7 else [random_prompt(n, round) for n in (70, 3, 1)]
        outputs = llm.generate([[*warm, 65], [*warm, 66, 67], *others], greedy(30))
        assert [o.num_cached_tokens for o in outputs[:2]] == [64, 64]
        for output in outputs:
            tokens_are_numpys(output)


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


@pytest.mark.parametrize("block_size", [8, 16, 32, 256])
def test_lengths_around_the_edge_of_a_block_after_a_hit_on_the_first(t0_dir: Path, block_size: int) -> None:
    """A hit on just the first block, and none: the same, whatever the size of the blocks."""
    cold, warm = (t0_llm(t0_dir, block_size=block_size, enable_prefix_caching=on) for on in (False, True))
    prompts = [random_prompt(n) for n in (*range(14, 19), *range(30, 35), *range(254, 259))]
    for prompt in prompts:
        if len(prompt) > block_size:
            begins_alike = [*prompt[:block_size], (prompt[block_size] + 1) % 256]
            warm.generate(begins_alike, greedy(1))
    params = greedy(40, logprobs=1)
    for first, second, prompt in zip(
        cold.generate(prompts, params), warm.generate(prompts, params), prompts, strict=True
    ):
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, block_size * (len(prompt) > block_size))
        for output in (first, second):
            tokens_are_numpys(output)
            logprobs_are_numpys(output)


@pytest.mark.parametrize("prefix", [False, True])
def test_use_of_the_cache_does_not_creep_up(t0_dir: Path, prefix: bool) -> None:
    """After 500 requests all is free (without a cache of prefixes even blank), and each took as many steps as any."""
    settings = {"max_model_len": 512, "kv_cache_memory": 512 * BYTES_PER_TOKEN}
    engine = t0_llm(t0_dir, block_size=16, enable_prefix_caching=prefix, **settings).engine
    size, count = engine.stats().num_blocks, 20 if FULL else 3
    index = engine.scheduler.cache.index
    for i in range(500):
        before = engine.num_steps
        run(engine, [Request("r", [i % 256, i // 256, *random_prompt(199)], greedy(count))])
        stats = engine.stats()
        assert engine.num_steps - before == count
        assert stats.free_blocks == stats.num_blocks == size
        if index is None:
            assert not stats.kept_blocks
        else:
            assert stats.kept_blocks == len(index) == len(index._nodes) <= size
    assert (stats.kept_blocks > 0) == prefix
    engine.add_request(Request("large", random_prompt(480), greedy(32)))
    assert [d.request_id for d in engine.step()] == ["large"], "it got the blocks of all the others at once"
    assert sum(len(d.token_ids) for _ in range(31) for d in engine.step()) == 31
    assert not engine.has_work


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
    assert llm.engine.scheduler.cache.windows == (8,)
    assert llm.engine.stats().free_blocks == llm.engine.stats().num_blocks
    several = [random_prompt(n, 1) for n in (3, 9, 30)]
    forked = llm.generate(several, SamplingParams(n=3, temperature=0, max_tokens=16, ignore_eos=True))
    alone = [llm.generate(p, greedy(16))[0].outputs[0].token_ids for p in several]
    assert [[c.token_ids for c in o.outputs] for o in forked] == [[ids] * 3 for ids in alone]


class TestSmolLM2:
    """The truth is each prompt by itself with the cache of prefixes off; what differs is cache or company."""

    @pytest.fixture(scope="class")
    @classmethod
    def llms(cls) -> Iterator[tuple[LLM, LLM]]:
        """Without the cache of prefixes, and with it; they share the weights, which take longest to load."""
        loaded: list[Decoder] = []

        def load(*args: object) -> Decoder:
            if not loaded:
                loaded.append(load_decoder(*args))
            return loaded[0]

        tokens = 4608 if FULL else 128
        memory = 4 * (2048 + tokens) * 2 * 30 * 3 * 64
        settings = {"block_size": 16, "seed": 0, "max_model_len": tokens, "kv_cache_memory": memory}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "load_decoder", load)
            yield (
                LLM(str(smollm2()), enable_prefix_caching=False, **settings),
                LLM(str(smollm2()), enable_prefix_caching=True, **settings),
            )

    def streams(self, llm: LLM, prompts: list[list[int]], count: int, salt: str) -> list[Stream]:
        """Of prompts that run together. Only prompts of the same salt share what is cached."""
        params = greedy(count, logprobs=2)
        several = [Request(f"{i}", ids, params, cache_salt=salt) for i, ids in enumerate(prompts)]
        return list(run(llm.engine, several).values())

    def test_prompts_of_whole_blocks(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        lengths = (15, 16, 17, 32, 48, 64)
        prompts = [on.tokenizer.encode(" word" * n) for n in lengths]
        assert tuple(map(len, prompts)) == lengths
        truth = [self.streams(off, [ids], 6, "")[0] for ids in prompts]
        for again in range(3):
            for length, expected, got in zip(lengths, truth, self.streams(on, prompts, 6, "words"), strict=True):
                assert_same(expected, got)
                assert got.cached_tokens is not None
                assert got.cached_tokens <= length - 1
                assert not again or got.cached_tokens == (length - 1) // 16 * 16

    def test_prompt_logprobs_with_a_warm_cache(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        prompts = [on.tokenizer.encode(text) for text in (" word" * 40, " word" * 33 + " end of it")]
        params = greedy(1, prompt_logprobs=2, logprobs=2)

        def values(output: RequestOutput) -> list[float]:
            given = output.prompt_logprobs or []
            assert len(given) == len(output.prompt_token_ids)
            assert given[0] is None
            rest = [*given[1:], *(output.outputs[0].logprobs or [])]
            assert [e.token_id for e in rest if e] == (output.prompt_token_ids + output.outputs[0].token_ids)[1:]
            return [e.logprob for e in rest if e]

        truth = [values(output) for prompt in prompts for output in off.generate(prompt, params)]
        for prompt, expected in zip(prompts, truth, strict=True):
            for _ in range(2):
                assert values(on.generate(prompt, params)[0]) == pytest.approx(expected, abs=1e-3)
        *both, plain = on.generate([*prompts, prompts[0]], [params, params, greedy(12)])
        for output, expected in zip(both, truth, strict=True):
            assert values(output) == pytest.approx(expected, abs=1e-3)
        assert plain.outputs[0].token_ids == off.generate(prompts[0], greedy(12))[0].outputs[0].token_ids

    def test_prompts_that_differ_in_one_token(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        base = list(range(1000, 1064))
        variants = [[*base[:k], base[k] + 1, *base[k + 1 :]] for k in (0, 15, 16, 47)]
        others = [base[1:], [999, *base], base[::-1], base[:16] + base[32:48] + base[16:32] + base[48:]]
        self.streams(on, [base], 1, "base")
        for prompt in [*variants, *others]:
            ((expected,), (got,)) = (self.streams(llm, [prompt], 2, "base") for llm in llms)
            assert_same(expected, got)
            equal = next(i for i in range(64) if prompt[i] != base[i])
            assert got.cached_tokens is not None
            assert got.cached_tokens == equal // 16 * 16 or (prompt in others and got.cached_tokens <= 16)
        assert off.engine.stats().free_blocks == off.engine.stats().num_blocks

    def test_hits_beside_misses(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        encode = on.tokenizer.encode
        words = " word" * 64
        prompts = [encode(words + " alpha"), encode(words + " beta gamma"), list(range(1000, 1071))]
        prompts += [list(range(1500, 1503)), encode(" zebra")]
        truth = [self.streams(off, [ids], 8, "")[0] for ids in prompts]
        self.streams(on, [encode(words)], 1, "beside")
        beside = self.streams(on, prompts, 8, "beside")
        for expected, got in zip(truth, beside, strict=True):
            assert_same(expected, got)
        assert [stream.cached_tokens for stream in beside] == [64, 64, 0, 0, 0]

    @full_length
    @pytest.mark.timeout(0)
    def test_a_prompt_of_256_whole_blocks(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        prompt = on.tokenizer.encode(" word" * 4096)
        assert len(prompt) == 4096
        (expected,) = self.streams(off, [prompt], 20, "")
        for again in range(3):
            (got,) = self.streams(on, [prompt], 20, "long")
            assert_same(expected, got)
            assert got.cached_tokens == (4080 if again else 0)

    @full_length
    @pytest.mark.timeout(0)
    def test_all_prompts_that_differ_in_one_token(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        base = list(range(1000, 1064))
        self.streams(on, [base], 8, "variants")
        for k in range(64):
            variant = [*base[:k], base[k] + 1, *base[k + 1 :]]
            ((expected,), (got,)) = (self.streams(llm, [variant], 8, "variants") for llm in (off, on))
            assert_same(expected, got)
            assert got.cached_tokens == k // 16 * 16

    @full_length
    @pytest.mark.timeout(0)
    def test_ten_rounds_of_hits_beside_misses(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        encode = on.tokenizer.encode
        warm = encode(" word" * 64)
        self.streams(on, [warm], 1, "rounds")
        own = [encode(" word" * 64 + end) for end in (" alpha", " beta gamma")]
        for round in range(10):
            first = 1000 if round < 7 else 2000 + 100 * round
            others = [list(range(first, first + 71)), list(range(first + 500, first + 503)), encode(" zebra")]
            truth = [self.streams(off, [ids], 30, "")[0] for ids in [*own, *others]]
            for expected, got in zip(truth, self.streams(on, [*own, *others], 30, "rounds"), strict=True):
                assert_same(expected, got)

    @full_length
    @pytest.mark.timeout(0)
    def test_many_at_once_get_their_own_answers(self, llms: tuple[LLM, LLM]) -> None:
        off, on = llms
        numbers = [str(number) for number in range(100001, 100033)]
        turns = [[{"role": "user", "content": f"Repeat this number ten times: {number}"}] for number in numbers]
        prompts = [on.tokenizer.encode_chat(turn) for turn in turns]
        truth = [self.streams(off, [ids], 40, "")[0] for ids in prompts]
        for _ in range(3):
            for number, expected, got in zip(numbers, truth, self.streams(on, prompts, 40, "many"), strict=True):
                assert_same(expected, got)
                foreign = [n for n in numbers if n != number and n in got.text]
                assert all(n in expected.text for n in foreign)
