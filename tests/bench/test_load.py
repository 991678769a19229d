"""The load generator, in virtual time, against servers whose delays are known."""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats

from headrace.bench import load, serve
from headrace.bench.arrivals import arrivals
from headrace.bench.client import Reply
from headrace.bench.datasets import Sample
from headrace.bench.load import Record
from headrace.bench.load_settings import ServeSettings
from headrace.bench.serve import Counts
from headrace.errors import ConfigError
from helpers import virtual_time

WORDS = Counts(lambda sample: len(sample.prompt), lambda text: len(text.split()))
SETTINGS = ServeSettings()


def requests(count: int, output: int = 5, **fields: Any) -> list[Sample]:
    return [Sample([1, 2, 3], "a b c", output, **fields) for _ in range(count)]


def answers(first: Callable[[], float], gap: Callable[[], float]) -> Callable[[Sample], Awaitable[Reply]]:
    """A server with these delays, however many ask."""

    async def send(sample: Sample) -> Reply:
        loop = asyncio.get_running_loop()
        reply = Reply(loop.time(), prompt_tokens=len(sample.prompt), output_tokens=sample.output_len)
        for i in range(sample.output_len):
            await asyncio.sleep(gap() if i else first())
            reply.moments.append(loop.time())
            reply.texts.append("word ")
        reply.end = loop.time()
        return reply

    return send


def run(samples: list[Sample], moments: list[float] | None, send: Any, limit: int | None = None) -> Any:
    return virtual_time.run(load.run(samples, moments, send, limit))


def test_figures_are_the_servers_delays() -> None:
    """Against NumPy's percentiles of the delays that were drawn; they must be right to 2 %."""
    rng = np.random.default_rng(0)
    firsts, gaps = rng.lognormal(-2, 0.6, 400), rng.lognormal(-4, 0.8, (400, 7))
    draws = iter(np.concatenate([firsts[:, None], gaps], 1))

    async def send(sample: Sample) -> Reply:
        first, *rest = next(draws)
        delays = iter([float(first), *map(float, rest)])
        return await answers(lambda: next(delays), lambda: next(delays))(sample)

    records, seconds = run(requests(400, 8), arrivals(400, 5.0, random.Random(0)), send)
    row = serve.metrics(records, seconds, WORDS, SETTINGS)
    truth = {"ttft": firsts, "itl": gaps, "tpot": gaps.mean(1), "e2el": firsts + gaps.sum(1)}
    for name, values in truth.items():
        assert row[f"{name}_mean_ms"] == pytest.approx(1000 * values.mean(), rel=0.02)
        for which, percent in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
            assert row[f"{name}_{which}_ms"] == pytest.approx(1000 * np.percentile(values, percent), rel=0.02)
    assert row["worst_gap_median_ms"] == pytest.approx(1000 * np.median(gaps.max(1)), rel=0.02)
    assert (row["completed"], row["errors"]) == (400, 0)
    assert row["prompt_tokens"] == row["prompt_tokens_counted_by_server"] == 1200
    assert row["output_tokens"] == row["output_tokens_counted_by_server"] == 3200
    assert row["output_throughput_tok_s"] == pytest.approx(3200 / seconds)
    assert row["client_late_ms"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_of_their_distribution(burstiness: float) -> None:
    """Kolmogorov-Smirnov, on the moments at which requests really went out; and they would fail another's."""
    moments = arrivals(3000, 7.0, random.Random(5), burstiness=burstiness)
    records, _ = run(requests(3000, 1), moments, answers(lambda: 3.0, lambda: 0.0))
    gaps = np.diff([r.reply.sent for r in records])
    own = scipy.stats.gamma(burstiness, scale=1 / (7 * burstiness)).cdf
    other = scipy.stats.gamma(1.3 * burstiness, scale=1 / (7 * 1.3 * burstiness)).cdf
    assert scipy.stats.kstest(gaps, own).pvalue > 0.05
    assert scipy.stats.kstest(gaps, other).pvalue < 0.001
    assert np.mean(gaps) == pytest.approx(1 / 7, rel=0.1)


def test_a_poisson_process_is_exponential() -> None:
    gaps = np.diff(arrivals(3000, 2.0, random.Random(1)))
    assert scipy.stats.kstest(gaps, scipy.stats.expon(scale=0.5).cdf).pvalue > 0.05


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 20.5), ("exponential", math.sqrt(40.0))])
def test_a_ramp_goes_from_one_rate_to_another(ramp: str, middle: float) -> None:
    gaps = np.diff(arrivals(40_001, 1.0, random.Random(2), ramp=ramp, end_rate=40.0, burstiness=4.0))
    for at, rate in ((0, 1.0), (20_000, middle), (40_000, 40.0)):
        here = gaps[max(0, at - 300) : at + 300]
        assert 1 / here.mean() == pytest.approx(rate, rel=0.15)


def test_all_at_once() -> None:
    assert arrivals(3, math.inf, random.Random(0)) == [0, 0, 0]
    assert arrivals(0, 1.0, random.Random(0)) == []


@pytest.mark.parametrize(
    "wrong", [{"rate": 0}, {"burstiness": 0}, {"ramp": "linear"}, {"end_rate": 3}, {"ramp": "x", "end_rate": 3},
              {"ramp": "linear", "end_rate": 0}, {"ramp": "linear", "end_rate": 2, "rate": math.inf}],
)  # fmt: skip
def test_arrivals_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        arrivals(3, **{"rate": 1.0, "rng": random.Random(0), **wrong})


def test_a_stalled_server_delays_all_who_would_have_come() -> None:
    """Coordinated omission: one request at a time, 10 ms each, 20 come a second, and for ten seconds nothing moves.

    A client that waited for its answer before it asked again would see one slow answer. Two hundred people did.
    """
    free = asyncio.Lock()

    async def send(sample: Sample) -> Reply:
        loop = asyncio.get_running_loop()
        reply = Reply(loop.time())
        async with free:
            if 5 <= loop.time() < 15:
                await asyncio.sleep(15 - loop.time())
            await asyncio.sleep(0.010)
        reply.moments, reply.texts, reply.end = [loop.time()], ["word"], loop.time()
        return reply

    records, seconds = run(requests(600, 1), [i / 20 for i in range(600)], send)
    row = serve.metrics(records, seconds, WORDS, SETTINGS)
    # Who comes during the pause waits for the rest of it, and for those before; they are served at 100 a second.
    truth, done = [], 0.0
    for i in range(600):
        begin = max(i / 20, done)
        begin = 15.0 if 5 <= begin < 15 else begin
        done = begin + 0.010
        truth.append(1000 * (done - i / 20))
    assert sum(t > 20 for t in truth) > 200
    for which, percent in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
        assert row[f"ttft_{which}_ms"] == pytest.approx(np.percentile(truth, percent), rel=0.02)


def test_who_waits_for_a_free_slot_is_late() -> None:
    """In an open loop with two slots, the wait for one is part of an answer's time; in a closed loop there is none."""
    second = answers(lambda: 1.0, lambda: 0.0)
    records, seconds = run(requests(6, 1), [0.0] * 6, second, 2)
    assert [r.reply.moments[0] - r.start for r in records] == pytest.approx([1, 1, 2, 2, 3, 3])
    assert load.lateness(records) == pytest.approx(2)
    records, closed = run(requests(6, 1), None, second, 2)
    assert [r.reply.moments[0] - r.start for r in records] == pytest.approx([1] * 6)
    assert seconds == closed == pytest.approx(3)


def test_never_more_than_max_concurrency() -> None:
    under_way = most = 0

    async def send(sample: Sample) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        reply = await answers(lambda: 1.0, lambda: 0.0)(sample)
        under_way -= 1
        return reply

    run(requests(50, 1), arrivals(50, 100.0, random.Random(0)), send, 7)
    assert most == 7


def test_turns_of_a_session_wait_for_each_other() -> None:
    samples = [Sample([1], "x", 3, session=s) for s in (0, 0, 0, 1, 1)]
    records, seconds = run(samples, [0.0, 0.5], answers(lambda: 1.0, lambda: 0.25))
    assert [r.start for r in records] == pytest.approx([0, 1.5, 3, 0.5, 2])
    assert seconds == pytest.approx(4.5)
    assert [r.sample for r in records] == samples


def test_goodput_counts_those_that_keep_to_everything() -> None:
    """The i-th first token after i / 10 s, the gaps i / 100 s."""
    delays = itertools.count(1)

    async def send(sample: Sample) -> Reply:
        i = next(delays)
        return await answers(lambda: i / 10, lambda: i / 100)(sample)

    records, seconds = run(requests(10, 4), [float(i) for i in range(10)], send)
    for text, good in (
        ("ttft:450", 4), ("tpot:75", 7), ("ttft:850 tpot:25", 2), ("itl:55", 5), ("e2el:400", 3), ("ttft:5000", 10),
    ):  # fmt: skip
        row = serve.metrics(records, seconds, WORDS, ServeSettings(goodput=text))
        assert row["goodput_req_s"] == pytest.approx(good / seconds)
    assert "goodput_req_s" not in serve.metrics(records, seconds, WORDS, SETTINGS)


def test_failures_are_counted_and_told() -> None:
    good = Record(requests(1)[0], 0.0, Reply(0.0, [1.0], ["word"], 1.0))
    bad = Record(requests(1)[0], 0.0, Reply(0.0, end=9.0, error="HTTP 503: full"))
    row = serve.metrics([good, bad, bad], 2.0, WORDS, SETTINGS)
    assert (row["completed"], row["errors"], row["output_tokens"]) == (1, 2, 1)
    assert row["itl_mean_ms"] is None  # one token has no gaps
    assert row["output_tokens_counted_by_server"] is None
    assert serve.warnings(row, [good, bad, bad], SETTINGS) == ["2 x HTTP 503: full"]
    with pytest.raises(ConfigError, match="no request was answered: HTTP 503: full"):
        serve.metrics([bad], 1.0, WORDS, SETTINGS)


def test_what_makes_figures_doubtful_is_told() -> None:
    late = Record(requests(1)[0], 0.0, Reply(0.5, [1.0], ["word"], 1.0, prompt_tokens=3, output_tokens=2))
    row = serve.metrics([late], 2.0, WORDS, SETTINGS)
    found = serve.warnings(row, [late], SETTINGS)
    assert [text.split(":")[0] for text in found] == [
        "a request went out 500 ms after its moment", "the server counts 2 tokens of outputs, and the tokenizer 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"backend": "grpc"}, "backend must be one of openai, openai-chat"),
        ({"request_rate": 0.0}, "request_rate must be above 0"),
        ({"request_rate": math.nan}, "request_rate must be above 0"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"num_warmups": -1}, "num_warmups must be at least 0"),
        ({"ramp_up_strategy": "linear"}, "a ramp needs"),
        ({"goodput": "ttft"}, "goodput must be like ttft:200"),
        ({"goodput": "foo:1"}, "goodput must be like ttft:200"),
        ({"goodput": "ttft:-1"}, "goodput must be like ttft:200"),
        ({"metric_percentiles": "50,101"}, "metric_percentiles must be"),
        ({"metric_percentiles": "x"}, "metric_percentiles must be"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 1.0},
         "leave request_rate out"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSettings(**wrong)


def test_moments() -> None:
    asked = requests(4)
    assert serve.moments_of(SETTINGS, asked) == [0, 0, 0, 0]
    assert serve.moments_of(ServeSettings(max_concurrency=2), asked) is None
    drawn = serve.moments_of(ServeSettings(request_rate=2.0, max_concurrency=2), asked)
    assert drawn == arrivals(4, 2.0, random.Random(0))
    assert drawn != serve.moments_of(ServeSettings(request_rate=2.0, arrival_seed=1), asked)
    ramp = ServeSettings(ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=3.0)
    assert serve.moments_of(ramp, asked) == arrivals(4, 1.0, random.Random(0), ramp="linear", end_rate=3.0)
    trace = [Sample([1], "x", 1, arrival=0.5 * i) for i in range(3)]
    assert serve.moments_of(SETTINGS, trace) == [0, 0.5, 1]
    with pytest.raises(ConfigError, match="a trace has moments of its own"):
        serve.moments_of(ServeSettings(request_rate=2.0), trace)
    assert serve.moments_of(SETTINGS, [Sample([1], "x", 1, session=0)] * 3) == [0]
