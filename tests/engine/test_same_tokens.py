"""SmolLM2: a request says the same whatever runs beside it, wherever its cache lies, and whatever interrupts it.

The truth is each request by itself with ample memory, nothing reused, and its prompt in one piece.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.models.decoder import Decoder
from headrace.models.loader import load_decoder
from headrace.worker import worker
from helpers.differential import Stream, Streams, assert_all_same, assert_same, run
from helpers.model_files import smollm2

SIZE = 16  # of a block
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
TEXTS = [
    "Once",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "A headrace is the channel that brings water to a mill wheel. " * 4,
    "Dear Sir or Madam,\n\nI am writing to you because of the noise that",
    "1, 2, 4, 8, 16, 32, 64,",
    "The three primary colours are red, yellow and blue. Mixing red and yellow gives",
    "A headrace is the channel that brings water to a mill wheel. " * 3 + "A tailrace, on the other hand, is",
]


def llm(**settings: Any) -> LLM:
    fixed: dict[str, Any] = {"block_size": SIZE, "seed": 0, "max_model_len": 96, "target_itl_ms": 0}
    return LLM(str(smollm2()), **({"kv_cache_memory": 2048 * TOKEN_BYTES} | fixed | settings))


@pytest.fixture(scope="module", autouse=True)
def _weights_are_loaded_once() -> Iterator[None]:
    """The engines differ in their caches only, so they share the weights, which take most of the time to load."""
    loaded: list[Decoder] = []

    def load(*args: Any) -> Decoder:
        if not loaded:
            loaded.append(load_decoder(*args))
        return loaded[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "load_decoder", load)
        yield


@pytest.fixture(scope="module")
def plain() -> Engine:
    return llm(enable_prefix_caching=False).engine


def requests(engine: Engine, *, n: int = 1, temperature: float = 0.0, count: int = 10) -> list[Request]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=count, ignore_eos=True, logprobs=2, n=n)
    return [Request(f"{i}", engine.tokenizer.encode(text), params) for i, text in enumerate(TEXTS)]


def alone(engine: Engine, each: Sequence[Request]) -> Streams:
    streams: Streams = {}
    for request in each:
        streams |= run(engine, [request])
    return streams


@pytest.fixture(scope="module")
def truth(plain: Engine) -> Streams:
    return alone(plain, requests(plain))


def test_all_at_once(plain: Engine, truth: Streams) -> None:
    assert_all_same(truth, run(plain, requests(plain)))


def test_arriving_one_after_the_other(plain: Engine, truth: Streams) -> None:
    assert_all_same(truth, run(plain, requests(plain), arrivals=range(0, 24, 3)))


def test_prompts_in_chunks_beside_streams(truth: Streams) -> None:
    engine = llm(enable_prefix_caching=False, max_num_batched_tokens=13, max_num_seqs=6).engine
    assert_all_same(truth, run(engine, requests(engine), arrivals=range(0, 16, 2)))


@pytest.mark.parametrize("settings", [{"kv_cache_layout": "contiguous"}, {"scheduling_policy": "static"}])
def test_one_piece_of_memory_for_each_sequence(truth: Streams, settings: dict[str, str]) -> None:
    """There is nothing to page, and in the second case nobody enters or leaves a batch that runs."""
    engine = llm(enable_prefix_caching=False, max_num_seqs=8, **settings).engine
    assert_all_same(truth, run(engine, requests(engine)))


def test_what_was_in_the_cache_already(truth: Streams) -> None:
    engine = llm().engine
    cold = run(engine, requests(engine))
    warm = run(engine, requests(engine))
    assert_all_same(truth, cold)
    assert_all_same(truth, warm)
    for request in requests(engine):
        cached = warm[request.request_id, 0].cached_tokens
        assert cached == (len(request.prompt_token_ids) - 1) // SIZE * SIZE
    assert any(stream.cached_tokens for stream in warm.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_several_continuations_of_one_prompt(plain: Engine, truth: Streams, temperature: float) -> None:
    if temperature:
        truth = alone(plain, requests(plain, temperature=temperature)[:4])
    engine = llm().engine
    several = run(engine, requests(engine, n=3, temperature=temperature)[:4])
    assert engine.stats().num_copied_blocks > 0
    for (name, index), stream in several.items():
        if temperature == 0 or index == 0:
            assert_same(truth[name, 0], stream, ties=temperature == 0)
    if temperature:
        assert len({tuple(stream.token_ids) for stream in several.values()}) == len(several)


class TestTooLittleMemory:
    """There are six blocks, as many as the longest sequence may need; all eight want more than twenty."""

    SMALL = 96 * TOKEN_BYTES

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_computed_anew(self, truth: Streams, prefix_caching: bool) -> None:
        engine = llm(kv_cache_memory=self.SMALL, enable_prefix_caching=prefix_caching).engine
        assert_all_same(truth, run(engine, requests(engine)))
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_swaps == 0

    def test_swapped_out_and_in(self, truth: Streams) -> None:
        engine = llm(kv_cache_memory=self.SMALL, enable_prefix_caching=False, swap_space=1024 * TOKEN_BYTES).engine
        assert_all_same(truth, run(engine, requests(engine)))
        assert engine.stats().num_swaps > 0

    def test_a_cache_ten_times_too_small(self, plain: Engine) -> None:
        """Requests whose sequences want ten times the blocks that there are: all finish, and say the same."""
        many = [
            Request(f"{copy}.{r.request_id}", [*r.prompt_token_ids, 1000 + copy], r.params)
            for copy in range(4)
            for r in requests(plain, count=6)
        ]
        size = 4  # so that sequences outgrow their blocks while they run
        wanted = sum(-(-(len(r.prompt_token_ids) + 6) // size) for r in many)
        small = llm(kv_cache_memory=self.SMALL, block_size=size).engine
        assert wanted >= 10 * small.stats().num_blocks
        ample = run(plain, many)
        assert all(stream.finish_reason == "length" for stream in ample.values())
        assert_all_same(ample, run(small, many))
        assert small.stats().num_preemptions > 0
        assert small.stats().free_blocks == small.stats().num_blocks


def test_int8_cache_is_close(truth: Streams) -> None:
    """Not the same: the cache has less precision. But the first token is a likely one of the truth's."""
    engine = llm(kv_cache_dtype="int8").engine
    for key, stream in run(engine, requests(engine, count=1)).items():
        first = truth[key].logprobs[0]
        assert stream.token_ids[0] in [token for token, _ in first.top]
        if stream.token_ids[0] == first.token_id:
            assert abs(stream.logprobs[0].logprob - first.logprob) < 0.1


@pytest.mark.parametrize("fault", ["a token", "a logprob", "the end", "one token less"])
def test_the_comparison_notices(truth: Streams, fault: str) -> None:
    def wrong(stream: Stream) -> Stream:
        other = Stream(list(stream.token_ids), list(stream.logprobs), stream.text, stream.finish_reason)
        entry = other.logprobs[7]
        if fault == "a token":
            other.token_ids[7] += 1
            other.logprobs[7] = type(entry)(entry.token_id + 1, entry.logprob, entry.top)
        elif fault == "a logprob":
            other.logprobs[7] = type(entry)(entry.token_id, entry.logprob - 3e-4, entry.top)
        elif fault == "the end":
            other.finish_reason = "stop"
        else:
            other.token_ids.pop()
            other.logprobs.pop()
        return other

    clear = [s for s in truth.values() if s.logprobs[7].top[0][1] - s.logprobs[7].top[1][1] > 0.01]
    assert clear
    with pytest.raises(AssertionError):
        assert_same(clear[0], wrong(clear[0]))
