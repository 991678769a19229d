"""SmolLM2 135M and Gemma 3 270M from their GGUF files, against transformers on the same files, in float32.

`HEADRACE_FULL_LENGTH=1` adds ten prompts of each with 64 tokens, in batches and chunks of all sizes: some ten minutes.
"""

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.request import Request
from helpers import real_models
from helpers.decoding import DecoderRunner, relative_error
from helpers.full_length import full_length
from helpers.real_models import limit, transformers_greedy, transformers_logprobs, transformers_model

TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The",
    "La tour Eiffel se trouve à",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Q: What is seven times eight?\nA:",
    "The three primary colours are red,",
    "import numpy as np\n\nx = np.",
    "A good recipe for pancakes begins with flour, eggs and milk. First of all, put the flour into a large bowl and",
    "In 1969 the first man",
    "<html>\n<head>\n<title>",
    "To be, or not to be,",
    "The quick brown fox jumps over the lazy dog. " * 4 + "The quick brown",
    "Photosynthesis is the process by which",
    "My favourite animal is",
    "Roses are red,\nviolets are",
    "The opposite of hot is",
]
TEN = TEXTS[:10]
TIE = 1e-3


class Truth:
    """The prompts, and how transformers goes on with them: 64 tokens for the first ten, 16 for the rest.

    For Gemma 3, whose vocabulary of 262144 makes every token dear, there are ten prompts.
    """

    def __init__(self, name: str) -> None:
        self.llm = real_models.llm(name)
        self.model = transformers_model(name)
        texts = TEXTS if name == "smollm2" else TEN
        self.prompts = self.llm.tokenizer.encode_batch(texts)
        counts = [64] * len(TEN) + [16] * (len(texts) - len(TEN))
        limit(self.llm)
        self.ours = greedy(self.llm, self.prompts, counts)
        self.tokens = [
            transformers_greedy(self.model, prompt, count, guess=ours)
            for prompt, count, ours in zip(self.prompts, counts, self.ours, strict=True)
        ]

    def check(self, prompts: int, count: int) -> None:
        """Runs some prompts for at most `count` tokens. All must be the true ones.

        But where two tokens are as good as equally likely, an output may take the other one, and counts no further.
        """
        truths = [tokens[:count] for tokens in self.tokens[:prompts]]
        outputs = greedy(self.llm, self.prompts[:prompts], [len(truth) for truth in truths])
        for prompt, truth, ours in zip(self.prompts, truths, outputs, strict=False):
            assert len(ours) == len(truth)
            if ours != truth:
                same = next(i for i in range(len(truth)) if ours[i] != truth[i])
                best = transformers_logprobs(self.model, prompt + truth[:same], 1)[0].topk(2).values
                assert best[0] - best[1] < TIE, f"{prompt} goes another way after {same} tokens"


def greedy(llm: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def smollm2() -> Truth:
    return Truth("smollm2")


@pytest.fixture(scope="module")
def gemma3() -> Truth:
    return Truth("gemma3")


@pytest.fixture(params=["smollm2", "gemma3"])
def truth(request: pytest.FixtureRequest) -> Truth:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Truth)
    return found


def test_logits(truth: Truth) -> None:
    prompts = [truth.prompts[i] for i in (0, 3, 5, 7)] + [truth.prompts[0][:1], truth.prompts[0][:2]]
    runner = DecoderRunner(truth.llm.engine.worker.decoder)
    for chunk in (None, 3):
        for prompt, ours in zip(prompts, runner.logits(prompts, chunk=chunk), strict=True):
            with torch.inference_mode():
                theirs = truth.model(torch.tensor([prompt]), use_cache=False).logits[0]
            assert relative_error(ours, theirs) < 1e-4


def test_logits_past_the_window_of_gemma3(gemma3: Truth) -> None:
    prompt = ([token for ids in gemma3.prompts for token in ids] * 8)[:560]
    assert len(prompt) > 512 + 40
    (ours,) = DecoderRunner(gemma3.llm.engine.worker.decoder).logits([prompt], last=5)
    with torch.inference_mode():
        theirs = gemma3.model(torch.tensor([prompt]), use_cache=False, logits_to_keep=5).logits[0]
    assert relative_error(ours, theirs) < 1e-4


def test_prompts_go_on_as_in_transformers(truth: Truth) -> None:
    assert truth.ours == truth.tokens


def test_first_tokens_of_twenty_prompts(smollm2: Truth) -> None:
    limit(smollm2.llm)
    assert greedy(smollm2.llm, smollm2.prompts, [1] * 20) == [tokens[:1] for tokens in smollm2.tokens]


@pytest.mark.parametrize(("seqs", "prompts"), [(1, 4), (3, 10), (17, 20)])
def test_any_number_at_once(smollm2: Truth, seqs: int, prompts: int) -> None:
    limit(smollm2.llm, seqs=seqs)
    smollm2.check(prompts, 20)


@pytest.mark.parametrize(("chunk", "prompts"), [(1, 3), (7, 12), (16, 20), (64, 20)])
def test_prompts_in_chunks(smollm2: Truth, chunk: int, prompts: int) -> None:
    limit(smollm2.llm, tokens=chunk, seqs=min(chunk, 8))
    smollm2.check(prompts, 6)


@full_length
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("seqs", "chunk"), [(1, 2048), (3, 2048), (17, 2048), (1, 1), (7, 7), (8, 16), (8, 64)])
def test_ten_prompts_and_64_tokens(truth: Truth, seqs: int, chunk: int) -> None:
    limit(truth.llm, seqs=seqs, tokens=chunk)
    truth.check(10, 64)


def test_three_at_once_in_chunks(gemma3: Truth) -> None:
    limit(gemma3.llm, tokens=7, seqs=3)
    gemma3.check(6, 6)


def test_preemption(smollm2: Truth) -> None:
    # Seven blocks of 16: seven short prompts enter, and most want a second block before they are done.
    scheduler = limit(smollm2.llm, blocks=7)
    smollm2.check(16, 16)
    assert scheduler.num_preemptions > 0
    assert scheduler.cache.pool.num_free == 7


def test_abort_frees_all_blocks(smollm2: Truth) -> None:
    scheduler, engine = limit(smollm2.llm, tokens=64), smollm2.llm.engine
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for i, prompt in enumerate(smollm2.prompts):
        engine.add_request(Request(str(i), prompt, params))
    for _ in range(3):
        engine.step()
    assert scheduler.running
    assert scheduler.num_waiting
    assert scheduler.cache.pool.num_free < scheduler.cache.pool.num_blocks
    for i in range(len(smollm2.prompts)):
        engine.abort(str(i))
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks
    assert not engine.has_work
    smollm2.check(2, 8)  # nothing that is left over in the cache does harm either


def test_logprobs(smollm2: Truth) -> None:
    limit(smollm2.llm)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    prompt = smollm2.prompts[11]
    (output,) = smollm2.llm.generate([prompt], params)
    completion = output.outputs[0]
    ids = prompt + completion.token_ids
    theirs = transformers_logprobs(smollm2.model, ids)
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    assert output.prompt_logprobs[0] is None
    reported = [*output.prompt_logprobs[1:], *completion.logprobs]
    assert len(reported) == len(ids) - 1
    for i, report in enumerate(reported):
        assert report is not None
        assert report.token_id == ids[i + 1]
        assert report.logprob == pytest.approx(float(theirs[i, ids[i + 1]]), abs=1e-3)
        best = theirs[i].topk(5)
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert {token for token, _ in report.top} == set(best.indices.tolist())


class TestStopStrings:
    """Stop strings from anywhere in the text, most of them across the border of two tokens."""

    @pytest.fixture(scope="class")
    @staticmethod
    def text(smollm2: Truth) -> str:
        return smollm2.llm.tokenizer.decode(smollm2.tokens[1])

    def test_the_text_ends_where_it_first_stands(self, smollm2: Truth, text: str) -> None:
        limit(smollm2.llm)
        stops = [text[start : start + length] for start in range(1, 50, 8) for length in (3, 8)]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=64,
                ignore_eos=True,
                stop=["¤", stop],
                include_stop_str_in_output=i % 4 == 0,
            )
            for i, stop in enumerate(stops)
        ]
        outputs = smollm2.llm.generate([smollm2.prompts[1]] * len(stops), params)
        across = 0
        for stop, asked, output in zip(stops, params, outputs, strict=True):
            completion = output.outputs[0]
            assert completion.text == text[: text.index(stop) + len(stop) * asked.include_stop_str_in_output]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert completion.token_ids == smollm2.tokens[1][: len(completion.token_ids)]
            # No token was drawn after the one that completed it.
            before = smollm2.llm.tokenizer.decode(completion.token_ids[:-1])
            assert stop not in before
            across += any(before.endswith(stop[:n]) for n in range(1, len(stop)))
        assert across > len(stops) // 2

    def test_the_first_one_decides(self, smollm2: Truth, text: str) -> None:
        limit(smollm2.llm)
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=[text[30:33], text[10:14]])
        (output,) = smollm2.llm.generate([smollm2.prompts[1]], params)
        first = min((text.index(stop) + len(stop), stop) for stop in params.stop_strings)[1]
        assert output.outputs[0].text == text[: text.index(first)]
        assert output.outputs[0].stop_reason == first

    def test_one_that_only_the_prompt_has_does_not_count(self, smollm2: Truth, text: str) -> None:
        assert "Once upon a" not in text
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop="Once upon a")
        limit(smollm2.llm)
        (output,) = smollm2.llm.generate([TEXTS[1]], params)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == smollm2.tokens[1][:6]
        assert text.startswith(output.outputs[0].text)
