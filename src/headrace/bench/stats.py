"""Percentiles and summaries, and measuring several things in turns."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

PERCENTILES = (90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent of `values` lie, between two neighbours in proportion (as NumPy does)."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(
    name: str, values: Sequence[float], unit: str, percentiles: Iterable[float] = PERCENTILES
) -> dict[str, float]:
    """Mean, median, percentiles and the largest, by names like `ttft_p99_ms`."""
    figures = {"mean": statistics.fmean(values) if values else float("nan"), "median": percentile(values, 50)}
    figures |= {f"p{p:g}": percentile(values, p) for p in percentiles}
    figures["max"] = max(values, default=float("nan"))
    return {f"{name}_{which}_{unit}": value for which, value in figures.items()}


def in_turns(rounds: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Runs each measure once for nothing, then all in turn so many times (A B A B ...), so that a machine that becomes
    slower does so for all alike. Returns what each said, round by round."""
    for measure in measures.values():  # memory, caches, clocks
        measure()
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def fastest(run: Callable[[int], int], *, seconds: float = 0.02, rounds: int = 5) -> list[float]:
    """How much a piece of work does in a second, in each round.

    run: does the work so many times and returns how much that was; for ever more of it, until it takes `seconds`.
    """
    times = 1
    while True:
        begun = time.perf_counter()
        run(times)
        if (took := time.perf_counter() - begun) >= seconds:
            break
        times *= 2 if took <= 0 else max(2, min(16, int(1.5 * seconds / took)))
    rates = []
    for _ in range(rounds):
        begun = time.perf_counter()
        done = run(times)
        rates.append(done / (time.perf_counter() - begun))
    return rates
