"""A server under more and more load, until it cannot keep up."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.bench.datasets import DatasetSettings, Words, samples
from headrace.bench.load import Record
from headrace.bench.load_settings import ServeSettings, SweepSettings
from headrace.bench.results import Result, Row
from headrace.bench.serve import NOTE, measure, warnings
from headrace.bench.stats import percentile
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.formats.tokenizer import Tokenizer

COLUMNS = (
    "completed", "errors", "request_throughput_req_s", "output_throughput_tok_s", "goodput_req_s", "ttft_median_ms",
    "ttft_p99_ms", "tpot_median_ms", "tpot_p99_ms", "itl_p99_ms", "e2el_median_ms",
)  # fmt: skip


def run(settings: ServeSettings, dataset: DatasetSettings, sweep: SweepSettings) -> Result:
    from headrace.formats.open import open_checkpoint

    if math.isfinite(settings.request_rate) or settings.ramp_up_strategy or dataset.dataset_name == "trace":
        raise ConfigError("a sweep sets the rates: leave request_rate, ramp_up and the trace out")
    tokenizer = open_checkpoint(settings.tokenizer).tokenizer()
    rows, warned, model = asyncio.run(_measure_all(settings, dataset, sweep, tokenizer))
    return Result(
        benchmark="sweep",
        title=f"{model} as served, under more and more load",
        note=NOTE + " A load is more than the server can keep up with where the last third of the requests waits "
        "twice as long for the first piece as the first third.",
        rows=rows,
        settings={**vars(settings), **vars(dataset), **vars(sweep), "served_model_name": model},
        details={"warnings": warned},
    )


async def _measure_all(
    settings: ServeSettings, dataset: DatasetSettings, sweep: SweepSettings, tokenizer: "Tokenizer"
) -> tuple[list[Row], list[str], str]:
    words = Words(tokenizer)
    rows: list[Row] = []
    warned: list[str] = []
    model = ""
    for number, rate in enumerate(sweep.rates()):
        # Other prompts at each rate, so that none is in a prefix cache from the one before.
        count = max(9, round(rate * sweep.seconds_per_rate))
        asked = samples(replace(dataset, num_prompts=count, dataset_seed=dataset.dataset_seed + number), words)
        here = replace(settings, request_rate=rate)
        row, records, model = await measure(here, asked, tokenizer)
        kept_up = keeps_up(records)
        rows.append({"rate_req_s": rate, **{n: row[n] for n in COLUMNS if n in row}, "keeps_up": kept_up})
        warned += [f"at {rate:g} a second: {text}" for text in warnings(row, records, here)]
        if not kept_up and not sweep.request_rates:
            break
    return rows, warned, model


def keeps_up(records: Sequence[Record]) -> bool:
    """Whether the server answers the last requests about as fast as the first."""
    waits = [r.reply.moments[0] - r.start for r in records if r.reply.moments and not r.reply.error]
    third = max(1, len(waits) // 3)
    first, last = percentile(waits[:third], 50), percentile(waits[-third:], 50)
    return last <= 2 * first or last <= 0.1
