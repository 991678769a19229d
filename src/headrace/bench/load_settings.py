"""How a server is put under load: settings, which the command line has as flags."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.bench.arrivals import RAMPS
from headrace.errors import ConfigError

BACKENDS = {"openai": "completions", "openai-chat": "chat/completions"}
GOODPUT = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the server is asked.

    base_url: of the server, with or without /v1.
    served_model_name: what the model is called there (default: the first that the server lists).
    tokenizer: the model whose tokenizer makes the prompts and counts all tokens, the same for every server.
    backend: openai sends texts to /v1/completions, openai-chat messages to /v1/chat/completions.
    request_rate: requests a second, on average; without one all are sent at once, or as max_concurrency allows.
    burstiness: of the arrivals: 1 is a Poisson process, less comes in bursts, more is more even.
    max_concurrency: requests that are under way at once, at most.
    ramp_up_strategy: linear or exponential: the rate goes over from ramp_up_start_rps to ramp_up_end_rps.
    ramp_up_start_rps: requests a second at first.
    ramp_up_end_rps: requests a second in the end.
    goodput: what a good answer keeps to, in milliseconds, as ttft:200 tpot:50; also itl (its worst) and e2el.
    num_warmups: requests that are sent before, one after the other, and not counted.
    metric_percentiles: with commas.
    ignore_eos: ask for as many tokens as the dataset says, whatever the model would say. Servers that do not know this
        field may refuse it.
    temperature: of the sampling.
    arrival_seed: another one gives other moments of arrival.
    answer_timeout: seconds for an answer.
    """

    base_url: str = "http://127.0.0.1:8000"
    served_model_name: str | None = None
    tokenizer: str = "default"
    backend: str = "openai"
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    goodput: str | None = None
    num_warmups: int = 1
    metric_percentiles: str = "90,95,99"
    ignore_eos: bool = True
    temperature: float = 0.0
    arrival_seed: int = 0
    answer_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        for name in ("request_rate", "burstiness", "answer_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {self.max_concurrency}")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups must be at least 0, not {self.num_warmups}")
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy not in RAMPS or (ramp.count(None) not in (0, 3)):
            raise ConfigError("a ramp needs ramp_up_strategy (linear or exponential), ramp_up_start_rps and _end_rps")
        if self.ramp_up_strategy is not None and math.isfinite(self.request_rate):
            raise ConfigError("a ramp has rates of its own: leave request_rate out")
        goals(self.goodput)
        percentiles(self.metric_percentiles)


def goals(text: str | None) -> dict[str, float]:
    """Milliseconds by what they are the limit of, as in "ttft:200 tpot:50"."""
    found = {}
    for word in (text or "").replace(",", " ").split():
        name, _, limit = word.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in GOODPUT or not found[name] > 0:
            raise ConfigError(f"goodput must be like ttft:200 tpot:50, of {', '.join(GOODPUT)}, not {word!r}")
    return found


def percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 < value <= 100 for value in found):
        raise ConfigError(f"metric_percentiles must be numbers up to 100 with commas, not {text!r}")
    return found


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Which loads are tried.

    request_rates: requests a second, with commas; by default from start_rate on, doubled until the server cannot keep
        up.
    start_rate: the first of those.
    seconds_per_rate: for how long requests arrive at each rate.
    """

    request_rates: str | None = None
    start_rate: float = 0.5
    seconds_per_rate: float = 20.0

    def __post_init__(self) -> None:
        for name in ("start_rate", "seconds_per_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {getattr(self, name)}")
        self.given()

    def given(self) -> list[float]:
        try:
            rates = [float(word) for word in (self.request_rates or "1").split(",")]
        except ValueError:
            rates = [-1.0]
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(f"request_rates must be numbers above 0 with commas, not {self.request_rates!r}")
        return rates if self.request_rates else []

    def rates(self) -> Iterator[float]:
        """Those given, or ever larger ones."""
        if self.request_rates:
            yield from self.given()
            return
        rate = self.start_rate
        while True:
            yield rate
            rate *= 2
