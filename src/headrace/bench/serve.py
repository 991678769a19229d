"""The speed of a server as its clients see it: any that speaks OpenAI's API."""

import asyncio
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.bench import load
from headrace.bench.arrivals import arrivals
from headrace.bench.client import Client, Reply
from headrace.bench.datasets import DatasetSettings, Sample, Words, samples
from headrace.bench.load import Record
from headrace.bench.load_settings import BACKENDS, ServeSettings, goals, percentiles
from headrace.bench.results import Result, Row
from headrace.bench.stats import percentile, summary
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.formats.tokenizer import Tokenizer

LATE_SECONDS = 0.02  # of the client itself, beyond which its figures are not to be trusted


def run(settings: ServeSettings, dataset: DatasetSettings) -> Result:
    from headrace.formats.open import open_checkpoint

    tokenizer = open_checkpoint(settings.tokenizer).tokenizer()
    asked = samples(dataset, Words(tokenizer))
    row, records, model = asyncio.run(measure(settings, asked, tokenizer))
    warned = warnings(row, records, settings)
    return Result(
        benchmark="serve",
        title=f"{model} as served: {load_of(settings, dataset)}",
        note=NOTE,
        rows=[row],
        settings={**vars(settings), **vars(dataset), "served_model_name": model},
        details={"warnings": warned, "requests": [_detail(record, records[0].start) for record in records]},
    )


NOTE = (
    "As clients see it. In an open loop a request's times count from the moment at which it was to be sent, in a "
    "closed one from when it was. `ttft`: until the first piece of text; `itl`: between two pieces; `tpot`: an "
    "answer's time after its first piece, by its tokens after the first; `e2el`: until the end; `worst gap`: the "
    "longest `itl` of an answer. Tokens are counted by the same tokenizer for every server; beside that stands what "
    "the server has counted."
)


def load_of(settings: ServeSettings, dataset: DatasetSettings) -> str:
    """The load in a few words."""
    many = f"{dataset.num_prompts} {dataset.dataset_name} requests"
    if dataset.dataset_name == "trace":
        return f"{many} at the moments of the trace"
    if settings.ramp_up_strategy:
        return f"{many}, {settings.ramp_up_start_rps:g} to {settings.ramp_up_end_rps:g} a second"
    if math.isfinite(settings.request_rate):
        return f"{many}, {settings.request_rate:g} a second"
    return f"{many} by {settings.max_concurrency} clients" if settings.max_concurrency else f"{many} at once"


async def measure(
    settings: ServeSettings, asked: list[Sample], tokenizer: "Tokenizer"
) -> tuple[Row, list[Record], str]:
    """The table's row, what came of each request, and what the model is called there."""
    client = Client(settings.base_url, os.environ.get("OPENAI_API_KEY"), settings.answer_timeout)
    model = settings.served_model_name or await first_model(client)
    route = BACKENDS[settings.backend]

    async def send(sample: Sample) -> Reply:
        return await client.stream(route, body_of(settings, sample, model))

    for sample in asked[: settings.num_warmups]:
        warm = await send(sample)
        if warm.error:
            raise ConfigError(f"{settings.base_url}: {warm.error}")
    records, seconds = await load.run(asked, moments_of(settings, asked), send, settings.max_concurrency)
    return metrics(records, seconds, counter(tokenizer, settings.backend), settings), records, model


async def first_model(client: Client) -> str:
    listed = await client.get("models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError("the server lists no model: give served_model_name") from None


def body_of(settings: ServeSettings, sample: Sample, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sample.output_len,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.backend == "openai":
        return body | {"prompt": sample.text}
    return body | {"messages": [{"role": "user", "content": sample.text}]}


def moments_of(settings: ServeSettings, asked: Sequence[Sample]) -> list[float] | None:
    """When each session begins; None in a closed loop."""
    if asked and asked[0].arrival is not None:
        if math.isfinite(settings.request_rate) or settings.ramp_up_strategy:
            raise ConfigError("a trace has moments of its own: leave request_rate and ramp_up out")
        return [sample.arrival or 0.0 for sample in asked]
    all_at_once = math.isinf(settings.request_rate) and not settings.ramp_up_strategy
    if all_at_once and settings.max_concurrency is not None:
        return None
    rng = random.Random(settings.arrival_seed)
    rate = settings.ramp_up_start_rps or settings.request_rate
    sessions = len({("alone", i) if s.session is None else s.session for i, s in enumerate(asked)})
    return arrivals(
        sessions, rate, rng, burstiness=settings.burstiness, ramp=settings.ramp_up_strategy,
        end_rate=settings.ramp_up_end_rps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts tokens: of a prompt as it is sent, and of an answer's text."""

    prompt: Callable[[Sample], int]
    output: Callable[[str], int]


def counter(tokenizer: "Tokenizer", backend: str) -> Counts:
    specials = len(tokenizer.encode(""))

    def prompt(sample: Sample) -> int:
        if backend == "openai":
            return len(sample.prompt)
        return len(tokenizer.encode_chat([{"role": "user", "content": sample.text}], add_generation_prompt=True))

    return Counts(prompt, lambda text: len(tokenizer.encode(text)) - specials)


def metrics(records: Sequence[Record], seconds: float, counts: Counts, settings: ServeSettings) -> Row:
    """The figures of a run. Requests that failed count as errors and nowhere else; that all have is an error."""
    done = [record for record in records if not record.reply.error]
    if not done:
        raise ConfigError(f"no request was answered: {records[0].reply.error}")
    limits = {name: limit / 1000 for name, limit in goals(settings.goodput).items()}
    times: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "itl", "e2el", "worst_gap")}
    prompt_tokens = output_tokens = good = 0
    for record in done:
        moments, reply = record.reply.moments, record.reply
        output = max(1, counts.output("".join(reply.texts)))
        prompt_tokens += counts.prompt(record.sample)
        output_tokens += output
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        own = {"ttft": moments[0] - record.start, "e2el": reply.end - record.start, "itl": max(gaps, default=0.0)}
        own["tpot"] = (moments[-1] - moments[0]) / (output - 1) if output > 1 else 0.0
        good += all(own[name] <= limit for name, limit in limits.items())
        times["ttft"].append(1000 * own["ttft"])
        times["e2el"].append(1000 * own["e2el"])
        times["itl"] += [1000 * gap for gap in gaps]
        if output > 1:
            times["tpot"].append(1000 * own["tpot"])
        if gaps:
            times["worst_gap"].append(1000 * own["itl"])
    row: Row = {
        "completed": len(done),
        "errors": len(records) - len(done),
        "duration_s": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prompt_tokens_counted_by_server": _total(r.reply.prompt_tokens for r in done),
        "output_tokens_counted_by_server": _total(r.reply.output_tokens for r in done),
        "request_throughput_req_s": len(done) / seconds,
        "output_throughput_tok_s": output_tokens / seconds,
        "total_throughput_tok_s": (prompt_tokens + output_tokens) / seconds,
    }
    if limits:
        row["goodput_req_s"] = good / seconds
    for name in ("ttft", "tpot", "itl", "e2el"):
        row |= summary(name, times[name], "ms", percentiles(settings.metric_percentiles))
    row["worst_gap_median_ms"] = percentile(times["worst_gap"], 50)
    row["client_late_ms"] = 1000 * load.lateness(records)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def _total(counts: Any) -> int | None:
    """The sum; None where one is not known."""
    known = list(counts)
    return None if None in known else sum(known)


def warnings(row: Row, records: Sequence[Record], settings: ServeSettings) -> list[str]:
    """What whoever reads the figures should know."""
    found = [
        f"{times} x {error}" for error, times in Counter(r.reply.error for r in records if r.reply.error).most_common(3)
    ]
    if settings.max_concurrency is None and row["client_late_ms"] > 1000 * LATE_SECONDS:
        found.append(
            f"a request went out {row['client_late_ms']:.0f} ms after its moment: this machine is too busy to measure "
            "the server, or the server runs on the same cores"
        )
    for kind in ("prompt", "output"):
        server, own = row[f"{kind}_tokens_counted_by_server"], row[f"{kind}_tokens"]
        if server is not None and own and abs(server / own - 1) > 0.02:
            found.append(f"the server counts {server} tokens of {kind}s, and the tokenizer {own}")
    return found


def _detail(record: Record, zero: float) -> dict[str, Any]:
    """A request's moments, in seconds after the first one's start."""
    reply = record.reply
    return {
        "prompt_len": len(record.sample.prompt),
        "start": record.start - zero,
        "sent": reply.sent - zero,
        "moments": [round(moment - zero, 6) for moment in reply.moments],
        "end": reply.end - zero,
        "error": reply.error,
    }
