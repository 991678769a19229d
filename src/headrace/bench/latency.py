"""How long a fixed number of sequences take, alone on the engine: the first token, and each one after it."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.bench import limits
from headrace.bench.results import Result, Row
from headrace.bench.roofline import Roofline
from headrace.config import EngineConfig
from headrace.engine.request import Request
from headrace.errors import ConfigError
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.core import Engine


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """What is measured.

    batch_size: sequences at once; several as 1,8,32.
    input_len: tokens of each prompt; several as 128,2048.
    output_len: tokens of each answer that are timed.
    num_iters: timed rounds of each.
    num_iters_warmup: rounds before those.
    """

    batch_size: str = "1"
    input_len: str = "128"
    output_len: int = 32
    num_iters: int = 5
    num_iters_warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("output_len", "num_iters"):
            if getattr(self, name) < (2 if name == "output_len" else 1):
                raise ConfigError(f"{name} must be at least {2 if name == 'output_len' else 1}")
        if self.num_iters_warmup < 0:
            raise ConfigError("num_iters_warmup must be at least 0")
        numbers("batch_size", self.batch_size)
        numbers("input_len", self.input_len)


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers in a list like 1,8,32. Raises ConfigError for anything else."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{name} must be whole numbers of at least 1 with commas between them, not {text!r}")
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds: until all sequences had their first token; of each step in which all got one more."""

    first: float
    steps: list[float]


def run(config: EngineConfig, settings: LatencySettings) -> Result:
    """Loads the model and measures every batch size with every input length."""
    from headrace.engine.core import Engine

    batches, inputs = numbers("batch_size", settings.batch_size), numbers("input_len", settings.input_len)
    budget = max(config.max_num_batched_tokens, 2 * max(batches))
    # Those that begin first get more tokens than are timed: one in each step of the others' prompts.
    length = max(inputs) + settings.output_len + 2 + 2 * (max(batches) * max(inputs) // budget + 1)
    config = replace(
        config,
        max_num_seqs=max(batches),
        max_num_batched_tokens=budget,
        # Nobody is to be protected from the prompts: all begin together.
        target_itl_ms=0.0 if config.target_itl_ms is None else config.target_itl_ms,
        max_model_len=length if config.max_model_len == "auto" else config.max_model_len,
    )
    engine = Engine(config)
    if engine.max_model_len < length:
        raise ConfigError(f"input_len and output_len need a context of {length} tokens: max_model_len is too small")
    machine, _ = limits.measure(engine.info.threads, rounds=3)
    roofline = Roofline.of(engine, machine)
    rows: list[Row] = []
    details = {}
    for input_len in inputs:
        for batch in batches:
            every = list(rounds(engine, batch, input_len, settings))
            rows.append(row(batch, input_len, every, roofline))
            details[f"batch {batch}, input {input_len}"] = [{"first": r.first, "steps": r.steps} for r in every]
    info = engine.info
    return Result(
        benchmark="latency",
        title=f"Latency of {info.architecture}, {info.scheme}, alone on the engine",
        note="Medians over the rounds. `ttft`: from the request until all sequences of the batch have their first "
        "token; `prefill`: prompt tokens a second in that time. `tpot`: of a step in which every sequence gets a "
        "token, with the range of the rounds' medians; `decode`: tokens of all sequences a second. The shares are of "
        "the least time that reading weights and cache once, or the products' operations, could take on this machine "
        "(`headrace bench limits`).",
        rows=rows,
        settings={"model": config.model, "kernels": info.kernels, "threads": info.threads, "dtype": info.dtype,
                  "kv_cache_dtype": info.kv_cache_dtype, **vars(settings)},
        details=details,
    )  # fmt: skip


def rounds(engine: "Engine", batch: int, input_len: int, settings: LatencySettings) -> Iterator[Round]:
    rng = random.Random(batch * 1_000_003 + input_len)
    for number in range(settings.num_iters_warmup + settings.num_iters):
        prompts = [[rng.randrange(engine.vocab_size) for _ in range(input_len)] for _ in range(batch)]
        found = one_round(engine, prompts, settings.output_len)
        if number >= settings.num_iters_warmup:
            yield found


def one_round(engine: "Engine", prompts: list[list[int]], output_len: int) -> Round:
    """Runs prompts together until all have so many tokens in steps of which each brought all of them one."""
    names = [f"latency-{i}" for i in range(len(prompts))]
    # Those that had their first token early go on until the last has as many as are wanted.
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    begun = last = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(Request(name, prompt, params))
    waiting = set(names)
    first = 0.0
    steps: list[float] = []
    while len(steps) < output_len - 1:
        got = {delta.request_id for delta in engine.step()}
        now = time.perf_counter()
        if not waiting and len(got) == len(names):
            steps.append(now - last)
        elif waiting:
            waiting -= got
            first = now - begun
        if not engine.has_work:
            raise ConfigError(
                f"{len(names)} sequences of this length do not fit in the KV cache at once: give it more memory, or "
                "make the batch smaller"
            )
        last = now
    for name in names:
        engine.abort(name)
    return Round(first, steps)


def row(batch: int, input_len: int, every: list[Round], roofline: Roofline) -> Row:
    first = statistics.median(r.first for r in every)
    medians = [statistics.median(r.steps) for r in every]
    step = statistics.median(medians)
    context = input_len + len(every[0].steps) // 2
    return {
        "batch": batch,
        "input_len": input_len,
        "ttft_ms": 1e3 * first,
        "prefill_tok_s": batch * input_len / first,
        "prefill_share": roofline.seconds([(0, input_len)] * batch) / first,
        "tpot_ms": 1e3 * step,
        "tpot_range_ms": [1e3 * min(medians), 1e3 * max(medians)],
        "decode_tok_s": batch / step,
        "decode_share": roofline.seconds([(context, 1)] * batch) / step,
    }
