"""What Prometheus scrapes at `/metrics`: where the engine stands, what it has done, how long clients waited for it.

Gauges and counters are read from the engine's own counts when they are asked for; only times, and the outcomes of
requests, are collected here. Labels have few values, none of which a client can choose.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import __version__
from headrace.engine.async_engine import Answer, AsyncEngine
from headrace.engine.request import TokenDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

# Our name, without its prefix; vLLM's, where it has one; the attribute of EngineStats; and the help text.
GAUGES = (
    ("requests_running", "num_requests_running", "running", "Sequences that run now."),
    ("requests_waiting", "num_requests_waiting", "waiting", "Sequences that wait for their turn."),
    ("waiting_prompt_tokens", None, "waiting_tokens", "Tokens in the prompts of those that have not begun."),
    ("kv_cache_blocks", None, "num_blocks", "Blocks of the KV cache."),
    ("kv_cache_free_blocks", None, "free_blocks", "Blocks of the KV cache that no sequence holds."),
    ("kv_cache_kept_blocks", None, "kept_blocks", "Free blocks that still hold the beginning of a finished sequence."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "num_prompt_tokens", "Tokens of the prompts whose output has begun."),
    ("generation_tokens", "generation_tokens", "num_generated_tokens", "Tokens that were generated."),
    ("prefix_cache_queries", "prefix_cache_queries", "prefix_queried_tokens", "Prompt tokens looked up in the cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the cache."),
    ("preemptions", "num_preemptions", "num_preemptions", "Sequences that had to make room for others."),
    ("swaps", None, "num_swaps", "Preemptions in which the cache was moved to the host's memory."),
    ("engine_steps", None, "num_steps", "Steps that the engine has run."),
    ("spec_decode_num_drafts", "spec_decode_num_drafts", "num_drafts", "Drafts that were verified."),
    ("spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens of these drafts."),
    (
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "num_accepted_tokens",
        "Those of them that were right.",
    ),
    ("spec_decode_draft_seconds", None, "draft_seconds", "Time spent in making drafts."),
    ("sequences_aborted", None, "num_aborted", "Sequences whose client has gone."),
    ("sequences_finished", None, "num_finished", "Sequences that came to an end of their own."),
)
QUEUE_REFUSALS = (("requests", "num_refused_requests"), ("prompt_tokens", "num_refused_tokens"))
EXPIRED = (("waiting", "num_expired_waiting"), ("running", "num_expired_running"))


class Metrics:
    """The measurements of one server. model: the name that dashboards show. compat: "vllm" for vLLM's names."""

    def __init__(self, model: str, compat: str = "none") -> None:
        self.is_vllm = compat == "vllm"
        self.prefix = "vllm:" if self.is_vllm else "headrace:"
        self.labels = {"model_name": model}
        self.registry = CollectorRegistry()
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", LONG
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", SHORT)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a sequence after its first.", SHORT
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From a request's arrival to its first turn.", LONG)
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", SIZES)
        self._outputs = self._histogram("request_generation_tokens", "Tokens of a sequence's output.", SIZES)
        self._success = Counter(
            f"{self.prefix}request_success", "Sequences that ended, by their finish reason.",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._errors = Counter(
            f"{self.prefix}request_errors", "Requests that were answered with an error, by its kind.",
            ["model_name", "reason"], registry=self.registry,
        )  # fmt: skip

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"{self.prefix}{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self.labels)

    def watch(self, engine: AsyncEngine) -> None:
        """From now on the engine's own counts are among the metrics."""
        self.registry.register(_EngineCollector(self, engine))

    def error(self, reason: str) -> None:
        """Counts an answer that was an error. reason: one of the few `code`s and `type`s that errors have."""
        self._errors.labels(**self.labels, reason=reason).inc()

    def delta(self, answer: Answer, index: int, delta: TokenDelta) -> None:
        """Notes what has arrived of the request `index` of an answer, at this moment."""
        now = time.perf_counter()
        times = answer.times.setdefault((index, delta.index), [])
        if delta.token_ids:
            if not times:
                times += [now, now, 0]
                self._ttft.observe(now - answer.begun)
                if delta.queue_time is not None:
                    self._queue.observe(delta.queue_time)
                if delta.index == 0:
                    self._prompts.observe(len(answer.requests[index].prompt_token_ids))
            else:
                self._itl.observe(now - times[1])
                times[1] = now
            times[2] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._success.labels(**self.labels, finished_reason=delta.finish_reason).inc()
            self._e2e.observe(now - answer.begun)
            if times:
                self._outputs.observe(times[2])
                if times[2] > 1:
                    self._tpot.observe((times[1] - times[0]) / (times[2] - 1))

    def render(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's counts, as they are when Prometheus asks."""

    def __init__(self, metrics: Metrics, engine: AsyncEngine) -> None:
        self.metrics, self.engine = metrics, engine

    def collect(self) -> Iterator[Metric]:
        stats, metrics = self.engine.stats(), self.metrics
        names, values = list(metrics.labels), list(metrics.labels.values())

        def named(ours: str, theirs: str | None) -> str:
            return metrics.prefix + (theirs if metrics.is_vllm and theirs else ours)

        for ours, theirs, attribute, text in GAUGES:
            gauge = GaugeMetricFamily(named(ours, theirs), text, labels=names)
            gauge.add_metric(values, getattr(stats, attribute))
            yield gauge
        usage = GaugeMetricFamily(f"{metrics.prefix}kv_cache_usage_perc", "Share of the KV cache in use.", labels=names)
        usage.add_metric(values, 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        yield usage
        for ours, theirs, attribute, text in COUNTERS:
            counter = CounterMetricFamily(named(ours, theirs), text, labels=names)
            counter.add_metric(values, getattr(stats, attribute))
            yield counter
        for name, text, label, kinds in (
            ("queue_refusals", "Requests that found the queue full, by what it was full of.", "limit", QUEUE_REFUSALS),
            ("sequences_expired", "Sequences whose time was over, by what they did.", "state", EXPIRED),
        ):
            counter = CounterMetricFamily(f"{metrics.prefix}{name}", text, labels=[*names, label])
            for kind, attribute in kinds:
                counter.add_metric([*values, kind], getattr(stats, attribute))
            yield counter
        accepted = CounterMetricFamily(
            f"{metrics.prefix}spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were right, by their place in the draft.",
            labels=[*names, "position"],
        )
        for place, count in enumerate(stats.accepted_at):
            accepted.add_metric([*values, str(place)], count)
        yield accepted
        info = GaugeMetricFamily(f"{metrics.prefix}build_info", "Always 1.", labels=[*names, "version"])
        info.add_metric([*values, __version__], 1)
        yield info
