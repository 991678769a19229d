"""vLLM on the CPU, over the model's weights in bfloat16 as a Hugging Face directory."""

import math
import os
from typing import Any

from protocol import Peer, serve


class Vllm(Peer):
    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from importlib import metadata

        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            settings["directory"], dtype="bfloat16", max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"], enable_prefix_caching=False,
        )  # fmt: skip
        self.about = f"vllm-cpu {metadata.version('vllm-cpu')}, bfloat16"

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        params = self.params(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == output_len for output in outputs)

    def score(self, ids: list[int]) -> list[float]:
        params = self.params(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        assert all(math.isfinite(value) for value in found)
        return found


serve(Vllm)
