"""How long a step takes, learned from the steps that were run."""

from dataclasses import dataclass
from math import sqrt


@dataclass(slots=True)
class Work:
    """What makes a step long.

    tokens: that run through the network; pairs: of a token with one that it attends to; sequences: in the step.
    """

    tokens: int = 0
    pairs: int = 0
    sequences: int = 0

    def add(self, start: int, count: int, sequences: int = 1) -> None:
        """Adds a sequence that runs `count` tokens after `start` others; with 0 for `sequences`, tokens of one that is
        there already."""
        self.tokens += count
        self.pairs += count * start + count * (count + 1) // 2
        self.sequences += sequences


# One unit of each feature is about as long on a small machine, which keeps the numbers of the fit well apart from zero.
_SCALES = (1.0, 1 / 16, 1 / 65536, 1 / 16)
_PRIOR = (0.005, 0.016, 0.002, 0.0005)  # seconds a unit, until steps have been seen: a slow machine


class CostModel:
    """Seconds of a step = a + b * tokens + c * pairs + d * sequences, by recursive least squares with forgetting.

    Errors count relative to the step's duration, so that short steps are fitted as well as long ones. A step far off
    the usual error moves the fit no more than one at the edge of the usual does (Huber 1964), so a pause of the machine
    leaves it where it was. A machine that becomes slower as a whole is followed by one factor, within some fifty steps,
    where the coefficients would take hundreds. Only what a step tells anew is forgotten (directional forgetting,
    Kulhavý 1987): else, while all steps are alike, the fit would become ever more impressionable in all other
    directions.
    """

    def __init__(self, forgetting: float = 0.97) -> None:
        self.num_observed = 0
        self._forgetting = forgetting
        self._coefficients = list(_PRIOR)
        # In units of the square of a step's relative error: at first a coefficient may be a hundred times the prior.
        self._covariance = [[1e4 * (i == j) * _PRIOR[i] ** 2 for j in range(4)] for i in range(4)]
        self._usual_error = 0.3
        self._drift = 0.0  # mean of the last errors
        self._pace = 1.0  # how much slower the machine is than when the coefficients were learned

    def predict(self, work: Work) -> float:
        """Seconds that a step with this work takes."""
        return self._pace * sum(max(0.0, c) * x for c, x in zip(self._coefficients, _features(work), strict=True))

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many tokens after `start` others a step can run in so much more time."""
        if seconds <= 0:
            return 0
        _, per_token, per_pair, per_sequence = (
            self._pace * max(0.0, c) * s for c, s in zip(self._coefficients, _SCALES, strict=True)
        )
        seconds -= per_sequence
        linear, square = per_token + per_pair * (start + 0.5), per_pair / 2
        if seconds <= 0:
            return 0
        if linear <= 0 and square <= 0:
            return 1 << 30
        # The positive root of square x² + linear x = seconds, in the form that does not cancel.
        return min(1 << 30, int(2 * seconds / (linear + sqrt(linear * linear + 4 * square * seconds))))

    def observe(self, work: Work, seconds: float) -> None:
        """Learns from a step that was run."""
        seconds /= self._pace
        # In shares of what was expected, or, where that is more, of what it was: so an error is never above one.
        scale = max(self.predict(work) / self._pace, seconds, 1e-6)
        x = [f / scale for f in _features(work)]
        error = seconds / scale - sum(c * f for c, f in zip(self._coefficients, x, strict=True))
        self.num_observed += 1
        p = self._covariance
        px = [sum(a * f for a, f in zip(row, x, strict=True)) for row in p]
        spread = sum(a * f for a, f in zip(px, x, strict=True))
        if spread < 1e-9:
            return
        if self.num_observed > 8:  # the first ones have most to say
            limit = max(0.5, 3 * self._usual_error)
            error = max(-limit, min(limit, error))
            self._usual_error += 0.05 * (max(abs(error), 0.02) - self._usual_error)
        self._drift += 0.1 * (error - self._drift)
        if self.num_observed > 32 and abs(self._drift) > 0.1:  # by now the coefficients are right in proportion
            self._pace *= 1 + 0.1 * self._drift
        self._coefficients = [c + a * error / (1 + spread) for c, a in zip(self._coefficients, px, strict=True)]
        # What is known along x, 1 / spread, becomes forgetting * (1 / spread + 1), and nothing else changes.
        weight = (self._forgetting - (1 - self._forgetting) / spread) / (self._forgetting * (1 + spread))
        self._covariance = [[p[i][j] - weight * px[i] * px[j] for j in range(4)] for i in range(4)]


def _features(work: Work) -> tuple[float, float, float, float]:
    return 1.0, work.tokens * _SCALES[1], work.pairs * _SCALES[2], work.sequences * _SCALES[3]
