"""Requests through the engine, from prompt to output, on the tiny model T0. The truth is NumPy's forward pass."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.request import Request, RequestOutput
from headrace.errors import CapacityError, RequestError
from helpers.t0_engine import LENGTHS, numpy_greedy, numpy_logprobs, random_prompt, t0_llm
from helpers.tiny import EOS, PAD, VOCAB, save_t0

PROMPTS = [random_prompt(n) for n in LENGTHS]
COUNT = 24  # of outputs
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def only(outputs: list[RequestOutput]) -> Any:
    """The one continuation of the one prompt."""
    ((completion,),) = (output.outputs for output in outputs)
    return completion


def expected(prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    return [numpy_greedy(tuple(p), count) for p in prompts]


class TestGreedy:
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("block_size", [1, 16, 32])
    def test_tokens_are_numpys(self, t0_dir: Path, backend: str, block_size: int) -> None:
        llm = t0_llm(t0_dir, backend=backend, block_size=block_size)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == expected(PROMPTS)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(PROMPTS)
        assert [o.prompt_token_ids for o in outputs] == PROMPTS

    def test_one_after_the_other(self, t0: LLM) -> None:
        assert [only(t0.generate(p, GREEDY)).token_ids for p in PROMPTS] == expected(PROMPTS)

    @pytest.mark.parametrize("seqs", [1, 3, 17])
    def test_any_number_at_once(self, t0_dir: Path, seqs: int) -> None:
        prompts = [random_prompt(n, seed) for seed in range(3) for n in LENGTHS][:17]
        llm = t0_llm(t0_dir, max_num_seqs=seqs)
        assert tokens(llm.generate(prompts, GREEDY)) == expected(prompts)

    @pytest.mark.parametrize("chunk", [1, 7, 16, 64])
    def test_prompts_in_chunks(self, t0_dir: Path, chunk: int) -> None:
        llm = t0_llm(t0_dir, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(PROMPTS)

    def test_through_preemption(self, t0_dir: Path) -> None:
        # Five blocks of 32 hold one sequence of 160 tokens, and there are six that would fill 17.
        llm = t0_llm(t0_dir, max_model_len=160, kv_cache_memory=5 * 32 * bytes_per_token())
        assert llm.engine.stats().num_blocks == 5
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(PROMPTS)
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.stats().free_blocks == 5

    def test_preemption_within_prompts_in_chunks(self, t0_dir: Path) -> None:
        settings = {"max_model_len": 160, "max_num_batched_tokens": 7, "max_num_seqs": 6, "block_size": 4}
        llm = t0_llm(t0_dir, kv_cache_memory=160 * bytes_per_token(), **settings)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(PROMPTS)
        assert llm.engine.scheduler.num_preemptions > 0

    def test_logit_bias(self, t0: LLM) -> None:
        bias = {7: 50.0, 9: -100.0}
        prompt = PROMPTS[2]
        first = int((numpy_logits_with(prompt, bias)).argmax())
        params = SamplingParams(temperature=0, max_tokens=1, logit_bias=bias)
        assert only(t0.generate(prompt, params)).token_ids == [first] == [7]

    def test_text_is_the_tokens_text(self, t0: LLM) -> None:
        for output in t0.generate(PROMPTS, GREEDY):
            completion = output.outputs[0]
            # T0's tokens are bytes, except for the special ones, which have no text.
            text = bytes(t for t in completion.token_ids if t < 256).decode(errors="replace")
            assert completion.text == text


def bytes_per_token() -> int:
    """Float32 keys and values of T0: 2 layers, 2 heads, 16 numbers each."""
    return 2 * 2 * 2 * 16 * 4


def numpy_logits_with(prompt: list[int], bias: dict[int, float]) -> np.ndarray:
    row = numpy_logprobs(prompt)[-1].copy()
    for token, amount in bias.items():
        row[token] += amount
    return row


class TestSampling:
    RANDOM = SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True, seed=7)

    def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(self, t0: LLM) -> None:
        alone = [only(t0.generate(p, self.RANDOM)).token_ids for p in PROMPTS]
        others = [random_prompt(n, 5) for n in range(3, 30)]
        together = tokens(t0.generate([*others, *PROMPTS], self.RANDOM))
        assert together[len(others) :] == alone

    def test_a_seed_gives_the_same_tokens_in_chunks_and_after_preemption(self, t0: LLM, t0_dir: Path) -> None:
        truth = tokens(t0.generate(PROMPTS, self.RANDOM))
        settings = {"max_model_len": 160, "max_num_batched_tokens": 7, "max_num_seqs": 6, "block_size": 4}
        small = t0_llm(t0_dir, kv_cache_memory=160 * bytes_per_token(), **settings)
        assert tokens(small.generate(PROMPTS, self.RANDOM)) == truth
        assert small.engine.scheduler.num_preemptions > 0

    def test_seeds_and_indices_differ(self, t0: LLM) -> None:
        params = [SamplingParams(temperature=1.5, max_tokens=24, n=4, seed=seed) for seed in (1, 2, -1)]
        outputs = t0.generate([PROMPTS[1]] * 3, params)
        everything = tokens(outputs)
        assert len(everything) == 12
        assert [c.index for c in outputs[0].outputs] == [0, 1, 2, 3]
        assert len({tuple(t) for t in everything}) == 12
        first = only(t0.generate(PROMPTS[1], SamplingParams(temperature=1.5, max_tokens=24, seed=1)))
        assert first.token_ids == everything[0]  # n does not change what an index draws

    def test_without_seeds_the_engines_own_decides(self, t0_dir: Path) -> None:
        params = SamplingParams(temperature=1.5, max_tokens=24)
        runs = [tokens(t0_llm(t0_dir, seed=seed).generate([PROMPTS[1]] * 2, params)) for seed in (3, 3, 4)]
        assert runs[0] == runs[1] != runs[2]
        assert runs[0][0] != runs[0][1]

    def test_tokens_are_those_that_numpys_random_numbers_draw(self, t0: LLM) -> None:
        # The random numbers are the first words of Philox with key (seed, index) and counter (position, 0, 0, 0); a
        # token is the first whose cumulative probability, in order of ids, exceeds its number.
        params = SamplingParams(temperature=0.8, n=3, seed=11, max_tokens=16, ignore_eos=True)
        for output in t0.generate(PROMPTS, params):
            prompt = output.prompt_token_ids
            for completion in output.outputs:
                ids = prompt + completion.token_ids
                probabilities = np.exp(numpy_logprobs(ids) / 0.8)
                cumulative = probabilities.cumsum(axis=-1) / probabilities.sum(axis=-1, keepdims=True)
                for position in range(len(prompt), len(ids)):
                    # NumPy counts up before it draws.
                    generator = np.random.Philox(key=[11, completion.index], counter=[position - 1, 0, 0, 0])
                    number = (int(generator.random_raw()) >> 11) * 2.0**-53
                    drawn = int((cumulative[position - 1] <= number).sum())
                    near = abs(cumulative[position - 1] - number).min() < 1e-5  # float32 may fall on the other side
                    assert ids[position] == drawn or near

    def test_draws_follow_the_models_distribution(self, t0: LLM) -> None:
        prompt, count = PROMPTS[0], 3000
        params = [SamplingParams(max_tokens=1, n=100, seed=seed, top_k=8) for seed in range(count // 100)]
        drawn = Counter(t for (t,) in tokens(t0.generate([prompt] * len(params), params)))
        logprobs = numpy_logprobs(prompt)[-1]
        best = logprobs.argsort()[::-1][:8]
        shares = np.exp(logprobs[best]) / np.exp(logprobs[best]).sum()
        assert set(drawn) <= set(best.tolist())
        for token, share in zip(best.tolist(), shares.tolist(), strict=True):
            # Five standard deviations of a binomial: one run in a hundred thousand would fail, and seeds are fixed.
            assert abs(drawn[token] - count * share) <= 5 * np.sqrt(count * share * (1 - share)) + 1


class TestEnds:
    """What ends an output, and what does not."""

    EAGER: ClassVar = {EOS: 100.0}  # makes the end of the sequence the most likely token everywhere

    def test_end_of_sequence(self, t0: LLM) -> None:
        completion = only(t0.generate(PROMPTS[0], SamplingParams(temperature=0, logit_bias=self.EAGER)))
        assert (completion.token_ids, completion.text) == ([EOS], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)

    def test_ignore_eos(self, t0: LLM) -> None:
        params = SamplingParams(temperature=0, logit_bias=self.EAGER, ignore_eos=True, max_tokens=5)
        completion = only(t0.generate(PROMPTS[0], params))
        assert (completion.token_ids, completion.finish_reason) == ([EOS] * 5, "length")
        assert completion.text == ""
        shown = SamplingParams(
            temperature=0, logit_bias=self.EAGER, ignore_eos=True, max_tokens=2, skip_special_tokens=False
        )
        assert only(t0.generate(PROMPTS[0], shown)).text == "</s></s>"

    @pytest.mark.parametrize("minimum", [1, 5])
    def test_min_tokens(self, t0: LLM, minimum: int) -> None:
        params = SamplingParams(temperature=0, logit_bias=self.EAGER, min_tokens=minimum, max_tokens=20)
        completion = only(t0.generate(PROMPTS[2], params))
        assert len(completion.token_ids) == minimum + 1
        assert EOS not in completion.token_ids[:-1]
        assert (completion.token_ids[-1], completion.finish_reason) == (EOS, "stop")

    def test_min_tokens_holds_for_stop_tokens_too(self, t0: LLM) -> None:
        prompt, truth = PROMPTS[2], numpy_greedy(tuple(PROMPTS[2]), COUNT)
        params = SamplingParams(
            temperature=0, max_tokens=10, ignore_eos=True, min_tokens=4, stop_token_ids=[truth[0], truth[1]]
        )
        completion = only(t0.generate(prompt, params))
        assert not set(completion.token_ids[:4]) & {truth[0], truth[1]}

    @pytest.mark.parametrize("count", [1, 2, 33])
    def test_max_tokens(self, t0: LLM, count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        completion = only(t0.generate(PROMPTS[3], params))
        assert completion.token_ids == numpy_greedy(tuple(PROMPTS[3]), count)
        assert completion.finish_reason == "length"

    @pytest.mark.parametrize("shown", [False, True])
    def test_stop_token_ids(self, t0: LLM, shown: bool) -> None:
        prompt = PROMPTS[4]
        truth = numpy_greedy(tuple(prompt), COUNT)
        place = next(i for i in range(3, COUNT) if truth[i] < 128 and truth[i] not in truth[:i])
        stop = truth[place]
        params = SamplingParams(
            temperature=0,
            max_tokens=COUNT,
            ignore_eos=True,
            stop_token_ids=[stop, PAD],
            include_stop_str_in_output=shown,
        )
        completion = only(t0.generate(prompt, params))
        assert completion.token_ids == truth[: place + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        text = bytes(t for t in truth[: place + shown] if t < 256).decode(errors="replace")
        assert completion.text == text

    def test_stop_strings_of_single_bytes(self, t0: LLM) -> None:
        prompt = PROMPTS[4]
        truth = numpy_greedy(tuple(prompt), COUNT)
        place = next(i for i in range(3, 47) if truth[i] < 128 and truth[i + 1] < 128)
        text = bytes(t for t in truth if t < 256).decode(errors="replace")
        stop = bytes(truth[place : place + 2]).decode()
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, stop=["never there", stop])
        completion = only(t0.generate(prompt, params))
        assert completion.text == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == truth[: len(completion.token_ids)]


class TestContext:
    """The longest sequence is 64 tokens here."""

    @pytest.fixture(scope="class")
    @staticmethod
    def short(t0_dir: Path) -> LLM:
        return t0_llm(t0_dir, max_model_len=64)

    def test_the_context_ends_the_output(self, short: LLM) -> None:
        prompt = random_prompt(60)
        for max_tokens in (None, 4, 100):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            completion = only(short.generate(prompt, params))
            assert completion.token_ids == numpy_greedy(tuple(prompt), 4)
            assert completion.finish_reason == "length"

    def test_the_longest_prompt_leaves_room_for_one_token(self, short: LLM) -> None:
        prompt = random_prompt(63)
        completion = only(short.generate(prompt, SamplingParams(temperature=0, ignore_eos=True)))
        assert completion.token_ids == numpy_greedy(tuple(prompt), 1)
        assert completion.finish_reason == "length"

    @pytest.mark.parametrize("length", [64, 65, 1000])
    def test_a_longer_prompt_is_refused(self, short: LLM, length: int) -> None:
        with pytest.raises(RequestError, match=rf"{length} tokens.* 64") as error:
            short.generate(random_prompt(length), GREEDY)
        assert error.value.param == "prompt"

    def test_a_whole_context_of_output(self, short: LLM) -> None:
        completion = only(short.generate([65], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)))
        assert completion.token_ids == numpy_greedy((65,), 63)

    def test_more_than_the_model_was_made_for(self, t0_dir: Path) -> None:
        with pytest.raises(CapacityError, match=r"513.*512"):
            t0_llm(t0_dir, max_model_len=513)

    def test_more_than_fits_in_memory_says_what_would(self, t0_dir: Path) -> None:
        with pytest.raises(CapacityError, match=r"512.*at most 96"):
            t0_llm(t0_dir, max_model_len=512, kv_cache_memory=100 * bytes_per_token())


class TestRequests:
    def test_no_prompts(self, t0: LLM) -> None:
        assert t0.generate([], GREEDY) == []

    @pytest.mark.parametrize("prompt", ["", [[]]])
    def test_an_empty_prompt_is_refused(self, t0: LLM, prompt: Any) -> None:
        with pytest.raises(RequestError, match="empty"):
            t0.generate(prompt, GREEDY)

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**64 - 1])
    def test_token_ids_out_of_range_are_refused(self, t0: LLM, token: int) -> None:
        with pytest.raises(RequestError, match=f"{token}.*{VOCAB - 1}"):
            t0.generate([[1, token]], GREEDY)
        if token > 0:
            with pytest.raises(RequestError, match="stop_token_ids"):
                t0.generate([[1]], SamplingParams(stop_token_ids=[token]))
            with pytest.raises(RequestError, match="logit_bias"):
                t0.generate([[1]], SamplingParams(logit_bias={token: 1.0}))

    @pytest.mark.parametrize("prompts", [[1.5], [True, None], [[1], [1.5]], [[1], None], 5])
    def test_prompts_of_another_kind_are_refused(self, t0: LLM, prompts: Any) -> None:
        with pytest.raises(RequestError):
            t0.generate(prompts, GREEDY)

    def test_one_bad_prompt_runs_none(self, t0: LLM) -> None:
        before = t0.engine.stats()
        with pytest.raises(RequestError):
            t0.generate([[1], [VOCAB]], GREEDY)
        assert t0.engine.stats() == before
        assert not t0.engine.has_work

    def test_as_many_parameters_as_prompts(self, t0: LLM) -> None:
        with pytest.raises(RequestError, match="2 prompts and 3"):
            t0.generate([[1], [2]], [GREEDY] * 3)

    def test_ids_are_unique_among_the_unfinished(self, t0: LLM) -> None:
        engine = t0.engine
        engine.add_request(Request("twice", [1, 2], GREEDY))
        with pytest.raises(RequestError, match="'twice'"):
            engine.add_request(Request("twice", [3], GREEDY))
        produced = []
        while engine.has_work:
            produced += [t for delta in engine.step() for t in delta.token_ids]
        assert produced == numpy_greedy((1, 2), COUNT)  # the first one did not suffer
        engine.add_request(Request("twice", [3], GREEDY))
        engine.abort("twice")

    def test_texts_are_tokenized(self, t0: LLM) -> None:
        outputs = t0.generate(["héllo", "ab"], GREEDY)
        assert [o.prompt for o in outputs] == ["héllo", "ab"]
        assert [o.prompt_token_ids for o in outputs] == [list("héllo".encode()), [97, 98]]
        assert tokens(outputs) == expected([o.prompt_token_ids for o in outputs])

    def test_thousands_at_once(self, t0_dir: Path) -> None:
        llm = t0_llm(t0_dir, max_num_seqs=256)
        prompts = [[i % 256, i // 256] for i in range(3000)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert [o.prompt_token_ids for o in outputs] == prompts
        assert all(len(o.outputs[0].token_ids) == 2 for o in outputs)
        some = range(0, 3000, 97)
        assert [outputs[i].outputs[0].token_ids for i in some] == expected([prompts[i] for i in some], 2)
        assert llm.engine.stats().free_blocks == llm.engine.stats().num_blocks

    def test_chat(self, tmp_path: Path) -> None:
        template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        )
        llm = t0_llm(save_t0(tmp_path, chat_template=template))
        conversations = [
            [{"role": "user", "content": "Hi"}],
            [{"role": "system", "content": "Be"}, {"role": "user", "content": "you"}],
        ]
        outputs = llm.chat(conversations, GREEDY)
        assert [bytes(o.prompt_token_ids).decode() for o in outputs] == ["<user>Hi>", "<system>Be<user>you>"]
        assert tokens(outputs) == expected([o.prompt_token_ids for o in outputs])
        assert tokens(llm.chat(conversations[0], GREEDY)) == tokens(outputs)[:1]


class TestAbort:
    def test_abort_frees_everything_at_any_moment(self, t0: LLM) -> None:
        engine = t0.engine
        for steps in range(6):
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(Request(str(i), prompt, SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=1)))
            for _ in range(steps):
                engine.step()
            for i in range(len(PROMPTS)):
                deltas = engine.abort(str(i))
                assert [d.finish_reason for d in deltas] == ["abort"] * len(deltas)
                assert len(deltas) == (2 if steps < 4 else 5 - steps)  # the second one begins a step later
                assert engine.abort(str(i)) == []
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks)
            assert not engine.has_work

    def test_abort_of_one_leaves_the_others(self, t0: LLM) -> None:
        engine = t0.engine
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(Request(str(i), prompt, GREEDY))
        got: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
        for step in range(100):
            if step == 5:
                engine.abort("2")
            if not engine.has_work:
                break
            for delta in engine.step():
                got[delta.request_id] += delta.token_ids
        truth = expected(PROMPTS)
        assert got.pop("2") == truth[2][:5]
        assert [got[key] for key in got] == [t for i, t in enumerate(truth) if i != 2]

    def test_abort_of_a_waiting_request(self, t0_dir: Path) -> None:
        llm = t0_llm(t0_dir, max_num_seqs=1)
        llm.engine.add_request(Request("first", [1], GREEDY))
        llm.engine.add_request(Request("second", [2], GREEDY))
        llm.engine.step()
        (delta,) = llm.engine.abort("second")
        assert (delta.request_id, delta.finish_reason, delta.token_ids) == ("second", "abort", [])
        llm.engine.abort("first")
        assert not llm.engine.has_work


class TestLogprobs:
    def check(self, got: Any, truth: np.ndarray, token: int, top: int) -> None:
        assert got.token_id == token
        assert got.logprob == pytest.approx(truth[token], abs=1e-4)
        assert len({token for token, _ in got.top}) == top
        values = [value for _, value in got.top]
        assert values == pytest.approx(np.sort(truth)[::-1][:top].tolist(), abs=1e-4)  # the largest ones, in order
        assert values == pytest.approx([truth[token] for token, _ in got.top], abs=1e-4)

    @pytest.mark.parametrize("top", [0, 1, 5, 20])
    def test_of_the_output(self, t0: LLM, top: int) -> None:
        params = SamplingParams(temperature=1.2, seed=3, max_tokens=12, ignore_eos=True, logprobs=top)
        for output in t0.generate(PROMPTS, params):
            completion = output.outputs[0]
            ids = output.prompt_token_ids + completion.token_ids
            truth = numpy_logprobs(ids)
            assert len(completion.logprobs) == 12
            for i, got in enumerate(completion.logprobs):
                at = len(output.prompt_token_ids) + i
                self.check(got, truth[at - 1], ids[at], top)

    def test_they_are_of_the_model_itself(self, t0: LLM) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=3, logit_bias={5: 100.0}, min_tokens=1, stop_token_ids=[6]
        )
        (got,) = only(t0.generate(PROMPTS[1], params)).logprobs
        self.check(got, numpy_logprobs(PROMPTS[1])[-1], 5, 3)

    @pytest.mark.parametrize("chunk", [7, 32, 2048])
    @pytest.mark.parametrize("top", [0, 4])
    def test_of_the_prompt(self, t0_dir: Path, chunk: int, top: int) -> None:
        llm = t0_llm(t0_dir, max_num_batched_tokens=chunk, max_num_seqs=7)
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=top)
        outputs = llm.generate([*PROMPTS, random_prompt(300)], params)
        for output in outputs:
            ids = output.prompt_token_ids
            truth = numpy_logprobs(ids)
            assert len(output.prompt_logprobs) == len(ids)
            assert output.prompt_logprobs[0] is None
            for i in range(1, len(ids)):
                self.check(output.prompt_logprobs[i], truth[i - 1], ids[i], top)
        assert tokens(outputs) == expected([o.prompt_token_ids for o in outputs], 2)

    @pytest.mark.parametrize("prompts", [PROMPTS, [[1], random_prompt(100)]], ids=["many", "in-the-middle"])
    def test_of_prompts_that_were_preempted(self, t0_dir: Path, prompts: list[list[int]]) -> None:
        # The pair takes all 26 blocks, and the short one needs another before the long one's prompt is done.
        settings = {"max_model_len": 104, "max_num_batched_tokens": 7, "max_num_seqs": 6, "block_size": 4}
        if len(prompts) == 2:
            settings |= {"max_num_batched_tokens": 4, "max_num_seqs": 2}
        llm = t0_llm(t0_dir, kv_cache_memory=104 * bytes_per_token(), **settings)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0, logprobs=0)
        outputs = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preemptions > 0
        for output in outputs:
            ids = output.prompt_token_ids + output.outputs[0].token_ids
            reported = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            truth = numpy_logprobs(ids)
            assert [r.token_id for r in reported] == ids[1:]
            values = [truth[i, token] for i, token in enumerate(ids[1:])]
            assert [r.logprob for r in reported] == pytest.approx(values, abs=1e-4)

    def test_none_unless_asked(self, t0: LLM) -> None:
        (output,) = t0.generate(PROMPTS[1], GREEDY)
        assert output.prompt_logprobs is None
        assert output.outputs[0].logprobs is None
