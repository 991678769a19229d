"""Behaviour that other engines got wrong, asked of a running engine."""

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from helpers.t0_engine import t0_llm
from helpers.tiny import EOS, PAD, save_t0, save_t0_gguf


class TestSeveralEndTokens:
    """A model that may end with either of two tokens must not run on past the second one."""

    @pytest.fixture(scope="class", params=["safetensors", "gguf"])
    @staticmethod
    def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
        directory: Path = tmp_path_factory.mktemp("ends")
        if request.param == "safetensors":  # config.json names the first one only
            return t0_llm(save_t0(directory, generation_config={"eos_token_id": [EOS, PAD]}))
        return t0_llm(save_t0_gguf(directory / "t0.gguf", extra_metadata={"tokenizer.ggml.eot_token_id": PAD}))

    @pytest.mark.parametrize("end", [EOS, PAD])
    def test_each_ends_the_output(self, llm: LLM, end: int) -> None:
        (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100.0}))
        (completion,) = output.outputs
        assert output.prompt_token_ids == [97, 98, 99]
        assert (completion.token_ids, completion.text) == ([end], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)

    @pytest.mark.parametrize("end", [EOS, PAD])
    def test_neither_does_when_ends_are_ignored(self, llm: LLM, end: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100.0}, ignore_eos=True)
        (output,) = llm.generate("abc", params)
        (completion,) = output.outputs
        assert (completion.token_ids, completion.finish_reason) == ([end] * 20, "length")

    @pytest.mark.parametrize("end", [EOS, PAD])
    def test_min_tokens_holds_for_both(self, llm: LLM, end: int) -> None:
        bias = {EOS: 50.0, PAD: 50.0} | {end: 100.0}
        params = SamplingParams(temperature=0, max_tokens=20, logit_bias=bias, min_tokens=3)
        (output,) = llm.generate("abc", params)
        token_ids = output.outputs[0].token_ids
        assert token_ids[-1] == end
        assert len(token_ids) == 4
        assert not {EOS, PAD} & set(token_ids[:3])
