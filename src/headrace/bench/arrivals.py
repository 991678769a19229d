"""When requests arrive, whether or not those before them have been answered (an open loop)."""

import math
import random

from headrace.errors import ConfigError

RAMPS = (None, "linear", "exponential")


def arrivals(
    count: int,
    rate: float,
    rng: random.Random,
    *,
    burstiness: float = 1.0,
    ramp: str | None = None,
    end_rate: float | None = None,
) -> list[float]:
    """Seconds after the start at which each of `count` requests arrives; the first one at once.

    rate: requests a second; infinity for all at once. burstiness: the shape of the gamma distribution of the gaps: 1 is
    a Poisson process, less comes in bursts, more is more even.
    ramp: how the rate goes over to `end_rate` from the first request to the last: "linear" or "exponential".
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"rate and burstiness must be above 0, not {rate} and {burstiness}")
    if (ramp is None) != (end_rate is None) or ramp not in RAMPS:
        raise ConfigError("a ramp needs both its form, linear or exponential, and the rate at its end")
    if end_rate is not None and (not 0 < end_rate < math.inf or math.isinf(rate)):
        raise ConfigError("a ramp goes from one rate above 0 to another")
    moments, now = [], 0.0
    for i in range(count):
        if i and math.isfinite(rate):
            share = i / max(1, count - 1)
            here = rate
            if ramp == "linear" and end_rate is not None:
                here = rate + (end_rate - rate) * share
            elif ramp == "exponential" and end_rate is not None:
                here = rate * (end_rate / rate) ** share
            now += rng.gammavariate(burstiness, 1 / (here * burstiness))
        moments.append(now)
    return moments
