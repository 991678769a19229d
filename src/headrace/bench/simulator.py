"""The real scheduler and the real bookkeeping of the cache, without a model: steps take as long as a cost model says.

What is simulated is time and memory, nothing else; so hundreds of thousands of requests take minutes, and machines can
be tried that are not there.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from headrace.bench.cost import Load, StepCost
from headrace.bench.datasets import Sample
from headrace.bench.results import Row
from headrace.bench.simulate_settings import EngineSettings
from headrace.bench.stats import percentile
from headrace.errors import ConfigError
from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.sampling.params import SamplingParams
from headrace.scheduler.policies import FairShare, FirstComeFirstServed, Priority
from headrace.scheduler.scheduler import Limits, Scheduler
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.static import StaticScheduler
from headrace.worker.cache_layout import CacheLayout
from headrace.worker.step import PADDING, StepPlan

TOKEN = 0  # that everybody says
PATIENCE = 0.001  # seconds between two looks at a static batch that waits for more sequences


class Span(NamedTuple):
    """What a row of a batch does in a step. row: its block in a static batch, else the request's number.

    kind: prompt, decode, or idle for padding. request: its number, or PADDING.
    """

    row: int
    kind: str
    tokens: int
    request: int


@dataclass(slots=True)
class Life:
    """A request, in seconds. moments: when it had each token."""

    sample: Sample
    arrival: float
    tenant: str = ""
    moments: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """What came of a simulation.

    lives: of the requests, in order. seconds: until the last was finished. steps: begin and end of each, and what ran
    where asked for. waste: the share of the cache's memory in use that held no token, on average over time.
    most_running: sequences at once. hit_tokens: of prompts that were found in the cache.
    """

    lives: list[Life]
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    hit_tokens: int = 0
    waste: float = 0.0
    most_running: int = 0
    steps: list[tuple[float, float, list[Span]]] = field(default_factory=list)

    def row(self, tenant: str | None = None) -> Row:
        """The figures of a run, or those of the requests of a tenant."""
        lives = [life for life in self.lives if tenant is None or life.tenant == tenant]
        firsts = [1000 * (life.moments[0] - life.arrival) for life in lives]
        gaps = [1000 * (b - a) for life in lives for a, b in pairwise(life.moments)]
        output = sum(len(life.moments) for life in lives)
        return {
            "requests": len(lives),
            "duration_s": self.seconds,
            "output_tok_s": output / self.seconds,
            "ttft_median_ms": percentile(firsts, 50),
            "ttft_p99_ms": percentile(firsts, 99),
            "itl_median_ms": percentile(gaps, 50) if gaps else None,
            "itl_p99_ms": percentile(gaps, 99) if gaps else None,
            "worst_gap_ms": max(gaps, default=None),
            "at_once": self.most_running,
            "wasted_percent": 100 * self.waste,
            "cached_tokens": self.hit_tokens,
            "preemptions": self.num_preemptions,
        }


class Simulator:
    """Runs requests through a scheduler of its own. `now` is its clock, in seconds."""

    def __init__(self, settings: EngineSettings, cost: StepCost) -> None:
        self.now = 0.0
        self.cost = cost
        self.settings = settings
        static = settings.scheduling_policy == "static"
        self._contiguous = settings.contiguous or static
        size = settings.max_model_len if self._contiguous else settings.block_size
        pool = BlockPool(settings.cache_tokens // size, size)
        host = BlockPool(settings.swap_tokens // size, size) if settings.swap_tokens >= size else None
        if pool.num_blocks < 1:
            raise ConfigError(f"a cache of {settings.cache_tokens} tokens does not hold a block of {size}")
        layout = CacheLayout.of([None], size, settings.max_num_batched_tokens)
        keeps = settings.enable_prefix_caching and not self._contiguous
        self.cache = CacheManager(pool, layout, index=PrefixIndex(pool, layout.windows) if keeps else None, host=host)
        limits = Limits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            target_itl=None if settings.target_itl_ms is None else settings.target_itl_ms / 1000,
        )
        if static:
            self.scheduler: Scheduler = StaticScheduler(
                self.cache, limits, timeout=settings.static_batch_timeout_ms / 1000, clock=lambda: self.now
            )
        else:
            policies: dict[str, Callable[[], FirstComeFirstServed]] = {
                "fcfs": FirstComeFirstServed, "fair": FairShare, "priority": lambda: Priority(30.0),
            }  # fmt: skip
            self.scheduler = Scheduler(
                self.cache, limits, policy=policies[settings.scheduling_policy](), clock=lambda: self.now,
                swap=host is not None,
            )  # fmt: skip

    def run(
        self, samples: Sequence_[Sample], tenants: Sequence_[str] | None = None, *, keep_steps: bool = False
    ) -> Run:
        """Runs all requests to their ends. Each arrives at its `arrival`, at once where that is None, or, in a session,
        when the one before it is answered. tenants: one for each sample."""
        lives = [
            Life(sample, sample.arrival or 0.0, tenants[i] if tenants is not None else "")
            for i, sample in enumerate(samples)
        ]
        result = Run(lives)
        after = _followers(samples)
        followers = set(after.values())
        coming = [(life.arrival, i) for i, life in enumerate(lives) if i not in followers]
        heapq.heapify(coming)
        known: dict[int, Sequence] = {}
        wasted = busy = 0.0
        while coming or self.scheduler.has_work:
            while coming and coming[0][0] <= self.now:
                _, i = heapq.heappop(coming)
                lives[i].arrival = max(lives[i].arrival, self.now) if i in followers else lives[i].arrival
                known[i] = self._submit(i, lives[i])
            plan = self.scheduler.schedule()
            if not plan.sequences:
                self._wait(coming[0][0] if coming else None)
                continue
            load = Load.of(plan)
            seconds = self.cost.seconds(load)
            begun, self.now = self.now, self.now + seconds
            result.num_steps += 1
            result.most_running = max(result.most_running, len(self.scheduler.running))
            wasted += seconds * self._waste(known)
            busy += seconds
            if keep_steps:
                result.steps.append((begun, self.now, self._spans(plan, known)))
            for i in self._commit(plan, known, lives):
                if i in after:
                    lives[after[i]].arrival = self.now
                    heapq.heappush(coming, (self.now, after[i]))
            self.scheduler.record(seconds)
        result.seconds = self.now
        result.num_preemptions = self.scheduler.num_preemptions
        result.hit_tokens = self.cache.index.num_hit_tokens if self.cache.index is not None else 0
        result.waste = wasted / busy if busy else 0.0
        return result

    def _submit(self, number: int, life: Life) -> Sequence:
        sample = life.sample
        length = len(sample.prompt) + sample.output_len
        if length > self.settings.max_model_len:
            raise ConfigError(f"request {number} has {length} tokens, more than max_model_len")
        self.scheduler.check(len(sample.prompt), length)
        params = SamplingParams(max_tokens=sample.output_len)
        sequence = Sequence(number, 0, list(sample.prompt), len(sample.prompt), params, 0, length, tenant=life.tenant)
        self.scheduler.add(sequence)
        return sequence

    def _wait(self, until: float | None) -> None:
        """Lets time pass in which nobody runs: to the next arrival, or a little, where a batch waits to be full."""
        if self.scheduler.has_work:
            self.now = (
                min(self.now + PATIENCE, until) if until is not None and until > self.now else self.now + PATIENCE
            )
        elif until is not None:
            self.now = max(self.now, until)

    def _commit(self, plan: StepPlan, known: dict[int, Sequence], lives: list[Life]) -> list[int]:
        """Gives each sequence that was due its token. Returns those that are finished."""
        finished = []
        for step in plan.sequences:
            if step.seq_id == PADDING:
                continue
            sequence = known[step.seq_id]
            self.scheduler.advance(sequence, len(step.token_ids))
            if step.samples:
                sequence.token_ids.append(TOKEN)
                lives[step.seq_id].moments.append(self.now)
                if len(sequence.token_ids) >= sequence.max_length:
                    self.scheduler.remove(sequence)
                    del known[step.seq_id]
                    finished.append(step.seq_id)
        return finished

    def _waste(self, known: dict[int, Sequence]) -> float:
        """The share of the memory in use that holds no token. What several share is in use once, and full."""
        pool = self.cache.pool
        held = (pool.num_blocks - pool.num_free) * pool.block_size
        size = pool.block_size
        empty = sum(len(s.table.blocks[0]) * size - s.num_computed for s in self.scheduler.running if s.table.blocks)
        if isinstance(self.scheduler, StaticScheduler):  # those that have ended hold theirs, for nothing
            empty = held - sum(s.num_computed for s in self.scheduler.running)
        return max(0, empty) / held if held else 0.0

    def _spans(self, plan: StepPlan, known: dict[int, Sequence]) -> list[Span]:
        is_static = isinstance(self.scheduler, StaticScheduler)
        spans = []
        for step in plan.sequences:
            row = step.block_tables[0][0] if is_static else step.seq_id  # of a static batch each row has one block
            kind = "idle"
            if step.seq_id != PADDING:
                kind = "decode" if known[step.seq_id].num_output and len(step.token_ids) == 1 else "prompt"
            spans.append(Span(row, kind, len(step.token_ids), step.seq_id))
        return spans


def _followers(samples: Sequence_[Sample]) -> dict[int, int]:
    """Who comes after whom in a session."""
    last: dict[int, int] = {}
    after = {}
    for i, sample in enumerate(samples):
        if sample.session is not None:
            if sample.session in last:
                after[last[sample.session]] = i
            last[sample.session] = i
    return after
