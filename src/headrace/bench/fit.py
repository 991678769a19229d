"""Fits the cost of a step to this machine, and checks what a simulation with it says against real runs."""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from headrace.bench import limits
from headrace.bench.cost import Load, StepCost
from headrace.bench.datasets import Sample
from headrace.bench.results import Result, Row
from headrace.bench.simulate_settings import EngineSettings
from headrace.bench.simulator import Simulator
from headrace.config import EngineConfig
from headrace.engine.request import Request
from headrace.errors import ConfigError
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.core import Engine
    from headrace.worker.step import StepPlan, StepResult
    from headrace.worker.worker import Worker

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (16, 120, 300)
MOST_CONTEXT = 2400  # tokens of all sequences of a step together
MAX_LENGTH = 528  # of the loads that are checked; of whole lanes, so that a contiguous cache is as fast as a paged one
CHECK_ROUNDS = 3


class Watched:
    """A worker that keeps the plans that it runs."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.plans: list[StepPlan] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, plan: "StepPlan") -> "StepResult":
        self.plans.append(plan)
        return self._worker.execute(plan)


def run(config: EngineConfig, rounds: int) -> Result:
    """Loads the model, times steps of all kinds, fits, and runs loads for real and in simulation."""
    engine = load(config)
    longest = min(engine.max_model_len - 2, engine.config.max_num_batched_tokens)
    knots = [n for n in TOKENS if n <= longest]
    if len(knots) < 4:
        raise ConfigError("steps of at least 8 tokens are needed: max_model_len or max_num_batched_tokens is too small")
    observed = list(timed_steps(engine, knots, rounds))
    machine, _ = limits.measure(engine.info.threads, rounds=3)
    block = engine.worker.cache_bytes / engine.worker.num_blocks
    cost = StepCost.fit(knots, observed, copy=2 * block / machine.bandwidth(engine.worker.cache_bytes))
    checks = [
        (n, prompts, outputs) for n, prompts, outputs in CHECKS if prompts[1] + outputs[1] <= engine.max_model_len
    ]
    rows = [check(engine, cost, *shape) for shape in checks]
    static = load(replace(config, scheduling_policy="static", kv_cache_layout="auto"))
    rows += [check(static, cost, *shape) for shape in checks]
    errors = sorted(abs(cost.seconds(work) / seconds - 1) for work, seconds in observed)
    info = engine.info
    return Result(
        benchmark="fit",
        title=f"The cost of a step, and what a simulation says: {info.architecture}, {info.scheme}",
        note="Steps of this machine are fitted by a line through numbers of tokens, and a cost for each sequence and "
        f"each pair of tokens; half of {len(observed)} steps are within {errors[len(errors) // 2]:.1%} of that, and "
        f"nine tenths within {errors[9 * len(errors) // 10]:.1%}. Then loads are run for real, and by the real "
        "scheduler with that cost for a clock; `ratio` is predicted by measured.",
        rows=rows,
        settings={"model": config.model, "kernels": info.kernels, "threads": info.threads, "dtype": info.dtype,
                  "rounds": rounds},
        details={"cost": cost.as_dict(), "observed": [[w.tokens, w.sequences, w.decode_pairs, w.prompt_pairs, seconds]
                                                      for w, seconds in observed]},
    )  # fmt: skip


def load(config: EngineConfig) -> "Engine":
    from headrace.engine.core import Engine

    length = config.max_model_len if config.max_model_len != "auto" else MAX_LENGTH
    engine = Engine(replace(config, max_num_seqs=min(32, config.max_num_seqs), max_model_len=length))
    engine.worker = cast("Worker", Watched(engine.worker))
    return engine


def timed_steps(engine: "Engine", knots: Sequence[int], rounds: int) -> Iterator[tuple[Load, float]]:
    """Steps with prompts of every length, with decodes of many sequences and contexts, and with both."""
    rng = random.Random(0)
    limit = engine.scheduler.limits
    engine.scheduler.limits = replace(limit, target_itl=0.0)  # chunks as they are asked for, not as time allows
    steps_of(engine, rng, [knots[-1]], 4)  # warms up
    for _ in range(rounds):
        for count in knots:
            yield from steps_of(engine, rng, [count], 1)
        for sequences in (n for n in (1, 2, 4, 8, 16, 32) if n <= engine.config.max_num_seqs):
            for context in CONTEXTS:
                if context + 8 <= engine.max_model_len and sequences * context <= MOST_CONTEXT:
                    yield from steps_of(engine, rng, [context] * sequences, 6)
    engine.scheduler.limits = limit


def steps_of(engine: "Engine", rng: random.Random, prompts: list[int], output: int) -> list[tuple[Load, float]]:
    """Runs prompts of these lengths together. Returns what each step ran, and its seconds."""
    watched = cast(Watched, engine.worker)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i, length in enumerate(prompts):
        ids = [rng.randrange(engine.vocab_size) for _ in range(length)]
        engine.add_request(Request(f"fit-{i}", ids, params))
    found = []
    while engine.has_work:
        watched.plans.clear()
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        found += [(Load.of(plan), seconds) for plan in watched.plans if plan.sequences]
    return found


# Requests, and between which lengths their prompts and answers are.
CHECKS = ((16, (16, 200), (8, 64)), (4, (300, 500), (4, 16)), (24, (8, 24), (20, 60)))


def check(engine: "Engine", cost: StepCost, count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> Row:
    """A load for real and in simulation, as tokens a second from the first request to the last token."""
    rng = random.Random(count)
    samples = [
        Sample([rng.randrange(engine.vocab_size) for _ in range(rng.randint(*prompts))], "", rng.randint(*outputs))
        for _ in range(count)
    ]
    measured = statistics.median(real_seconds(engine, samples, salt) for salt in map(str, range(CHECK_ROUNDS)))
    config, worker, target = engine.config, engine.worker, engine.scheduler.limits.target_itl
    simulated = Simulator(
        EngineSettings(
            scheduling_policy=config.scheduling_policy,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            cache_tokens=worker.num_blocks * worker.layout.block_size,
            block_size=config.block_size,
            target_itl_ms=None if target is None else 1000 * target,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        cost,
    ).run(samples)
    tokens = sum(len(s.prompt) + s.output_len for s in samples)
    return {
        "scheduling": "static" if config.scheduling_policy == "static" else "continuous",
        "requests": count,
        "prompts": f"{prompts[0]} to {prompts[1]}",
        "answers": f"{outputs[0]} to {outputs[1]}",
        "measured_tok_s": tokens / measured,
        "predicted_tok_s": tokens / simulated.seconds,
        "ratio": measured / simulated.seconds,
    }


def real_seconds(engine: "Engine", samples: Sequence[Sample], salt: str) -> float:
    """Runs all requests, which are there from the start. salt: another one finds nothing in the prefix cache."""
    begun = time.perf_counter()
    for i, sample in enumerate(samples):
        params = SamplingParams(temperature=0, max_tokens=sample.output_len, ignore_eos=True)
        engine.add_request(Request(f"check-{i}", sample.prompt, params, cache_salt=salt))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun
