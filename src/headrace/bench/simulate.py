"""Ideas of scheduling and of memory, tried one against the other in simulation."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.bench.arrivals import arrivals
from headrace.bench.cost import StepCost
from headrace.bench.datasets import DatasetSettings, Numbers, Sample, samples
from headrace.bench.results import Result, Row
from headrace.bench.simulate_settings import EXPERIMENTS, EngineSettings, SimulateSettings
from headrace.bench.simulator import Run, Simulator

# About that of a model of 135 million weights on two cores. `headrace bench fit` finds that of a machine.
ROUND_COST = StepCost(
    tokens=((1, 0.016), (8, 0.024), (32, 0.06), (128, 0.2), (512, 0.8)),
    sequence=0.0004, decode_pair=1.5e-6, prompt_pair=0.8e-6, copy=1e-4,
)  # fmt: skip


def run(settings: SimulateSettings, engine: EngineSettings, dataset: DatasetSettings) -> Result:
    cost = cost_of(settings)
    if settings.experiment == "load":
        rows = [{"experiment": "load", "variant": engine.scheduling_policy, **_load(settings, engine, dataset, cost)}]
    else:
        names = EXPERIMENTS if settings.experiment == "all" else (settings.experiment,)
        rows = [row for name in names for row in _EXPERIMENTS[name](cost, settings)]
    return Result(
        benchmark="simulate",
        title="Ideas of scheduling, in simulation",
        note="The real scheduler and the real bookkeeping of the cache; steps take as long as the cost model says. "
        "`at once`: the most sequences that ran together; `wasted`: memory of the cache in use that held no token, on "
        "average. Times as clients see them.",
        rows=rows,
        settings={"cost": cost.as_dict(), **vars(settings), **vars(engine)},
    )


def cost_of(settings: SimulateSettings) -> StepCost:
    return ROUND_COST if settings.cost is None else StepCost.load(settings.cost)


def _load(settings: SimulateSettings, engine: EngineSettings, dataset: DatasetSettings, cost: StepCost) -> Row:
    asked = samples(dataset, Numbers())
    if settings.request_rate is not None:
        _arrive(asked, settings.request_rate, settings.arrival_seed)
    return Simulator(engine, cost).run(asked).row()


def _arrive(asked: Sequence[Sample], rate: float, seed: int) -> None:
    """Gives each request that stands alone, and the first of each session, its moment."""
    seen = set()
    firsts = []
    for i, sample in enumerate(asked):
        session = ("alone", i) if sample.session is None else sample.session
        if session not in seen:
            seen.add(session)
            firsts.append(sample)
    for sample, moment in zip(firsts, arrivals(len(firsts), rate, random.Random(seed)), strict=True):
        sample.arrival = moment


def lengths(
    count: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int, rate: float | None = None
) -> list[Sample]:
    """Requests with lengths between these; of the answers most are short and a few long, as those of real ones are."""
    rng = random.Random(seed)
    numbers = Numbers()
    low, high = outputs
    moments = [0.0] * count if rate is None else arrivals(count, rate, rng)
    return [
        Sample(
            numbers.made_up(rng.randint(*prompts), rng)[0], "", min(high, low + int(rng.expovariate(4 / (high - low)))),
            arrival=moment,
        )
        for moment in moments
    ]  # fmt: skip


def _row(experiment: str, variant: str, found: Run, tenant: str | None = None) -> Row:
    return {"experiment": experiment, "variant": variant, **found.row(tenant)}


def _batching(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """All requests are there; a static batch runs to the end of its longest answer."""
    asked = lengths(200 * settings.scale, (16, 256), (8, 256), settings.arrival_seed)
    base = EngineSettings(max_num_seqs=16, max_model_len=512, cache_tokens=16 * 512)
    return [
        _row("batching", name, Simulator(replace(base, scheduling_policy=policy), cost).run(asked))
        for name, policy in (("static", "static"), ("continuous", "fcfs"))
    ]


def _memory(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """The same memory, for sequences in one piece of the greatest length, and in blocks."""
    asked = lengths(200 * settings.scale, (16, 256), (8, 256), settings.arrival_seed)
    base = EngineSettings(max_num_seqs=64, max_model_len=1024, cache_tokens=8 * 1024, enable_prefix_caching=False)
    return [
        _row("memory", name, Simulator(engine, cost).run(asked))
        for name, engine in (("contiguous", replace(base, contiguous=True)), ("paged", base))
    ]


def _chunking(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """Streams, and a long prompt every now and then: whole, in chunks of tokens, and in chunks by time."""
    streams = lengths(60 * settings.scale, (16, 64), (100, 300), settings.arrival_seed, rate=0.5)
    long = lengths(4 * settings.scale, (3000, 3000), (8, 16), settings.arrival_seed + 1, rate=0.04)
    asked = sorted([*streams, *long], key=lambda s: s.arrival or 0.0)
    base = EngineSettings(max_num_seqs=32, max_model_len=4096, max_num_batched_tokens=4096)
    variants = {
        "whole prompts": replace(base, target_itl_ms=0.0),
        "chunks of 256 tokens": replace(base, target_itl_ms=0.0, max_num_batched_tokens=256),
        "chunks of 200 ms": replace(base, target_itl_ms=200.0),
    }
    return [_row("chunking", name, Simulator(engine, cost).run(asked)) for name, engine in variants.items()]


def _prefix(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """Four beginnings of 512 tokens that all prompts share."""
    dataset = DatasetSettings(
        dataset_name="shared-prefix", num_prompts=100 * settings.scale, input_len=64, output_len=48,
        dataset_seed=settings.arrival_seed,
    )  # fmt: skip
    asked = samples(dataset, Numbers())
    return [
        _row("prefix", name, Simulator(EngineSettings(enable_prefix_caching=on, max_num_seqs=16), cost).run(asked))
        for name, on in (("without a prefix cache", False), ("with a prefix cache", True))
    ]


def _fairness(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """One tenant asks for a hundred answers at once, another for one every ten seconds."""
    many = lengths(100 * settings.scale, (64, 256), (32, 128), settings.arrival_seed)
    few = lengths(8 * settings.scale, (64, 256), (32, 128), settings.arrival_seed + 1)
    for i, sample in enumerate(few):
        sample.arrival = 10.0 * (i + 1)
    tenants = ["many"] * len(many) + ["few"] * len(few)
    rows = []
    for policy in ("fcfs", "fair"):
        engine = EngineSettings(scheduling_policy=policy, max_num_seqs=8)
        found = Simulator(engine, cost).run([*many, *few], tenants)
        rows += [_row("fairness", f"{policy}: who asks for {tenant}", found, tenant) for tenant in ("many", "few")]
    return rows


def _preemption(cost: StepCost, settings: SimulateSettings) -> list[Row]:
    """A cache that is too small for those that run: computed anew, swapped, and room for all."""
    asked = lengths(100 * settings.scale, (64, 256), (64, 512), settings.arrival_seed)
    base = EngineSettings(max_num_seqs=16, max_model_len=1024, cache_tokens=2048, enable_prefix_caching=False)
    variants = {
        "computed anew": base,
        "swapped to the host": replace(base, swap_tokens=16_384),
        "room for all": replace(base, cache_tokens=16_384),
    }
    return [_row("preemption", name, Simulator(engine, cost).run(asked)) for name, engine in variants.items()]


_EXPERIMENTS: dict[str, Callable[[StepCost, SimulateSettings], list[Row]]] = {
    "batching": _batching,
    "memory": _memory,
    "chunking": _chunking,
    "prefix": _prefix,
    "fairness": _fairness,
    "preemption": _preemption,
}


def timeline(cost: StepCost) -> list[tuple[str, Run]]:
    """Twelve requests on four places, static and continuous, with all that ran in each step."""
    asked = lengths(12, (24, 160), (6, 60), seed=3)
    base = EngineSettings(max_num_seqs=4, max_model_len=256, cache_tokens=1024, enable_prefix_caching=False)
    return [
        (name, Simulator(replace(base, scheduling_policy=policy), cost).run(asked, keep_steps=True))
        for name, policy in (("static", "static"), ("continuous", "fcfs"))
    ]
