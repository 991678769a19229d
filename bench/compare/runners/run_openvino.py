"""OpenVINO GenAI, which reads the GGUF file itself, with its continuous batching."""

from importlib import metadata
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Peer, serve


class OpenVino(Peer):
    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 2  # GB
        self.pipe = genai.LLMPipeline(
            settings["model"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=settings["threads"]
        )
        self.about = f"openvino-genai {metadata.version('openvino-genai')}, continuous batching"

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        found = self.pipe.generate(inputs, config)
        assert all(len(tokens) == output_len for tokens in found.tokens)


serve(OpenVino)
