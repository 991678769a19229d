"""The two real models in transformers and in the engine, each loaded once, and what transformers generates."""

import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy
import torch
import transformers
from transformers import PreTrainedModel

from headrace import LLM
from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.scheduler.scheduler import Limits, Scheduler
from helpers.model_files import gemma3, smollm2

PATHS = {"smollm2": smollm2, "gemma3": gemma3}
THREADS = int(os.environ["OMP_NUM_THREADS"])  # the engines of tiny models have set torch to one thread


@functools.cache
def transformers_model(name: str) -> PreTrainedModel:
    """transformers' own reading of the GGUF file, float32."""
    path: Path = PATHS[name]()
    # It takes most of a minute, unless the file is parsed only once, slicing is that of plain arrays, and the table of
    # names is not made anew for each module.
    plain = functools.partial(_plain_memmap, numpy.memmap)
    with (
        patch("numpy.memmap", plain),
        patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)),
        patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def _plain_memmap(memmap: type[numpy.memmap], *arguments: Any, **keywords: Any) -> numpy.ndarray:
    return memmap(*arguments, **keywords).view(numpy.ndarray)


@functools.cache
def llm(name: str) -> LLM:
    return LLM(
        str(PATHS[name]()),
        max_model_len=1024,
        kv_cache_memory=256 << 20,
        block_size=16,
        seed=0,
        threads=THREADS,
        activation_precision="float32",  # as transformers, which is the truth here, has them
    )


def limit(engine_of: LLM, *, seqs: int = 64, tokens: int = 2048, blocks: int | None = None) -> Scheduler:
    """Gives an idle engine a scheduler with other limits, and at most `blocks` of its blocks, without loading again.

    It remembers nothing of earlier prompts, and never cuts prompts shorter than it must.
    """
    engine = engine_of.engine
    assert not engine.has_work
    layout = engine.worker.layout
    pool = BlockPool(blocks or engine.worker.num_blocks, layout.block_size)
    limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, target_itl=0.0)
    engine.scheduler = Scheduler(CacheManager(pool, layout, index=PrefixIndex(pool, layout.windows)), limits)
    return engine.scheduler


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int, guess: list[int]) -> list[int]:
    """The `count` tokens that greedy decoding finds after the prompt; end-of-sequence tokens are like any other.

    `guess` changes nothing but the time: as far as it is what the model finds, one forward pass finds all of it.
    """
    tokens: list[int] = []
    while len(tokens) < count:
        ahead = guess[len(tokens) : count - 1] if tokens == guess[: len(tokens)] else []
        found = transformers_logprobs(model, prompt + tokens + ahead, len(ahead) + 1).argmax(-1).tolist()
        right = next((i for i, token in enumerate(ahead) if token != found[i]), len(ahead))
        tokens += found[: right + 1]
    return tokens


def transformers_logprobs(model: PreTrainedModel, ids: list[int], last: int = 0) -> torch.Tensor:
    """Log-probabilities `[last, vocab]` after each of the last tokens of `ids` (0 for all of them)."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False, logits_to_keep=last).logits[0]
        return logits.log_softmax(-1)
