"""The load generator: sends requests at their moments, and keeps what came of each.

In an open loop a request is sent at its moment however slow the server is, and its times count from that moment, not
from when it really went out: what a slow server, or a slow client, makes others wait for is not left out
("coordinated omission").
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.bench.client import Reply
from headrace.bench.datasets import Sample

Send = Callable[[Sample], Awaitable[Reply]]


@dataclass(slots=True)
class Record:
    """A request and its answer. start: from which its times count, on the event loop's clock, as all of them."""

    sample: Sample
    start: float
    reply: Reply


async def run(
    samples: Sequence[Sample], moments: Sequence[float] | None, send: Send, max_concurrency: int | None = None
) -> tuple[list[Record], float]:
    """Sends all samples. Returns their records, in order, and the seconds until the last was answered.

    moments: seconds after the start, one for each sample that begins a session or stands alone; None for a closed loop,
        in which each of `max_concurrency` clients sends its next request when the one before is answered.
    max_concurrency: requests that are under way at once, at most. Those of an open loop that have to wait for that are
        late, and their times say so.
    """
    loop = asyncio.get_running_loop()
    sessions: dict[object, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        sessions[("alone", i) if sample.session is None else sample.session].append(i)
    if moments is not None and len(moments) != len(sessions):
        raise ValueError(f"{len(sessions)} sessions and {len(moments)} moments")
    records: list[Record | None] = [None] * len(samples)
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    begun = loop.time()

    async def session(turns: list[int], moment: float | None) -> None:
        start = begun if moment is None else begun + moment
        for i in turns:
            if slots is None:
                records[i] = Record(samples[i], start, await send(samples[i]))
            else:
                async with slots:
                    if moment is None:
                        start = loop.time()
                    records[i] = Record(samples[i], start, await send(samples[i]))
            start = loop.time()

    async with asyncio.TaskGroup() as tasks:
        for number, turns in enumerate(sessions.values()):
            moment = None if moments is None else moments[number]
            if moment is not None and (wait := begun + moment - loop.time()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(session(turns, moment))
    return [record for record in records if record is not None], loop.time() - begun


def lateness(records: Sequence[Record]) -> float:
    """Seconds by which the worst request went out after its moment: where it is long, the client was too slow, or all
    of `max_concurrency` were under way."""
    return max((record.reply.sent - record.start for record in records), default=math.nan)
