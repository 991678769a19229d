"""How many tokens a second the engine makes when all requests are there from the start."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.bench.datasets import DatasetSettings, Sample, Words, samples
from headrace.bench.results import Result, Row
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM


def run(config: EngineConfig, dataset: DatasetSettings, rounds: int) -> Result:
    """Each round asks for other prompts of the dataset, so that none is in the prefix cache from the round before."""
    from headrace.engine.llm import LLM

    llm = LLM(**vars(config))
    words = Words(llm.tokenizer)
    rows = []
    for number in range(rounds):
        asked = samples(replace(dataset, dataset_seed=dataset.dataset_seed + number), words)
        longest = max(len(s.prompt) + s.output_len for s in asked)
        if longest > llm.max_model_len:
            raise ConfigError(
                f"the longest prompt and answer have {longest} tokens, and the context holds {llm.max_model_len}: "
                "choose a larger max_model_len, or shorter lengths"
            )
        rows.append(one_round(llm, asked))
    info = llm.engine.info
    return Result(
        benchmark="throughput",
        title=f"Throughput of {info.architecture}, {info.scheme}: {dataset.num_prompts} requests at once",
        note="All requests are there from the start; the clock stops with the last answer. Each row is a round, with "
        "other prompts.",
        rows=rows,
        settings={"model": config.model, "kernels": info.kernels, "threads": info.threads, "dtype": info.dtype,
                  "policy": config.scheduling_policy, "max_num_seqs": config.max_num_seqs, **vars(dataset)},
    )  # fmt: skip


def one_round(llm: "LLM", asked: list[Sample]) -> Row:
    params = [SamplingParams(temperature=0, max_tokens=s.output_len, ignore_eos=True) for s in asked]
    prompts: list[Any] = [s.prompt for s in asked]
    steps = llm.engine.num_steps
    preempted = llm.engine.scheduler.num_preemptions
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    prompt_tokens = sum(len(s.prompt) for s in asked)
    output_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return {
        "requests": len(asked),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(o.num_cached_tokens for o in outputs),
        "output_tokens": output_tokens,
        "elapsed_s": seconds,
        "steps": llm.engine.num_steps - steps,
        "preemptions": llm.engine.scheduler.num_preemptions - preempted,
        "req_s": len(asked) / seconds,
        "total_tok_s": (prompt_tokens + output_tokens) / seconds,
        "output_tok_s": output_tokens / seconds,
    }
