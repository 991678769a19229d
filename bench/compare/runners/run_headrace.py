"""Headrace, as it comes."""

from typing import Any

from protocol import Peer, serve

import headrace
from headrace import LLM, SamplingParams


class Headrace(Peer):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.llm = LLM(
            settings["model"], threads=settings["threads"], max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"], enable_prefix_caching=False, target_itl_ms=0,
        )  # fmt: skip
        info = self.llm.engine.info
        self.about = f"Headrace {headrace.__version__}, {info.scheme}, kernels {info.kernels}"

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            assert len(output.outputs[0].token_ids) == output_len

    def score(self, ids: list[int]) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = self.llm.generate(ids, params, use_tqdm=False)
        return [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]


serve(Headrace)
