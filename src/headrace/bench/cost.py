"""How long a step of the engine takes: what a simulation goes by, fitted to a machine or written down for another."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.worker.step import StepPlan


@dataclass(slots=True)
class Load:
    """What a step runs.

    tokens, sequences: in all. decode_pairs, prompt_pairs: of a token with one that it attends to, by whether its
    sequence runs a single token or a piece of a prompt. copies: blocks that are copied or swapped.
    """

    tokens: int = 0
    sequences: int = 0
    decode_pairs: int = 0
    prompt_pairs: int = 0
    copies: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> "Load":
        load = cls(copies=len(plan.copies) + len(plan.swap_in) + len(plan.swap_out), sequences=len(plan.sequences))
        for step in plan.sequences:
            count = len(step.token_ids)
            load.tokens += count
            if count == 1:
                load.decode_pairs += step.start + 1
            else:
                load.prompt_pairs += count * step.start + count * (count + 1) // 2
        return load


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step = a line through `tokens`, plus so much for each sequence, pair of tokens, and copied block.

    tokens: pairs of a number of tokens and seconds; between two the line is straight, and beyond the last it goes on.
    """

    tokens: tuple[tuple[int, float], ...]
    sequence: float
    decode_pair: float
    prompt_pair: float
    copy: float = 0.0

    def seconds(self, load: Load) -> float:
        total = sum(weight * seconds for weight, (_, seconds) in self._between(load.tokens))
        total += self.sequence * load.sequences + self.copy * load.copies
        return total + self.decode_pair * load.decode_pairs + self.prompt_pair * load.prompt_pairs

    def _between(self, tokens: int) -> list[tuple[float, tuple[int, float]]]:
        return [(weight, self.tokens[i]) for i, weight in _weights([n for n, _ in self.tokens], tokens)]

    @classmethod
    def fit(cls, knots: Sequence[int], observed: Iterable[tuple[Load, float]], copy: float) -> "StepCost":
        """The cost with these numbers of tokens that is nearest to steps and their seconds: least squares of the
        relative errors, with nothing below zero."""
        import numpy as np

        rows, targets = [], []
        for load, seconds in observed:
            row = [0.0] * len(knots)
            for i, weight in _weights(knots, load.tokens):
                row[i] = weight
            # In units in which all coefficients are of about the same size, so that the fit is well conditioned.
            row += [load.sequences, load.decode_pairs * PAIRS, load.prompt_pairs * PAIRS]
            rows.append([value / seconds for value in row])
            targets.append(1.0)
        found = non_negative_least_squares(np.array(rows), np.array(targets)).tolist()
        return cls(
            tokens=tuple(zip(knots, found, strict=False)),
            sequence=found[-3],
            decode_pair=found[-2] * PAIRS,
            prompt_pair=found[-1] * PAIRS,
            copy=copy,
        )

    @classmethod
    def load(cls, path: str) -> "StepCost":
        """From a result of `headrace bench fit`, or a JSON file that has these fields. Raises ConfigError."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            found = found["details"]["cost"] if "details" in found else found
            tokens = tuple((int(count), float(seconds)) for count, seconds in found["tokens"])
            counts = [count for count, _ in tokens]
            others = {name: float(value) for name, value in found.items() if name != "tokens"}
            if not tokens or counts != sorted(set(counts)) or min(others.values(), default=0) < 0:
                raise ValueError("tokens must be in order, and nothing below zero")
            return cls(tokens=tokens, **others)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            example = '{"tokens": [[1, 0.01], [512, 0.2]], "sequence": 0, "decode_pair": 1e-8, "prompt_pair": 1e-8}'
            raise ConfigError(
                f"{path} is no cost of steps, like {example} or what bench fit has saved: {error}"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tokens", "sequence", "decode_pair", "prompt_pair", "copy")}


PAIRS = 1e-5  # a unit of pairs takes about as long as a sequence does


def _weights(knots: Sequence[int], tokens: int) -> list[tuple[int, float]]:
    """Which knots a number of tokens lies between, and what share each has in it; beyond the ends the line goes on."""
    if len(knots) == 1:
        return [(0, 1.0)]
    high = min(max(1, bisect_left(knots, tokens)), len(knots) - 1)
    share = (tokens - knots[high - 1]) / (knots[high] - knots[high - 1])
    return [(high - 1, 1 - share), (high, share)]


def non_negative_least_squares(a: Any, b: Any) -> Any:
    """The x of numbers from 0 on for which |a x - b| is smallest: the active-set method of Lawson and Hanson (1974)."""
    import numpy as np

    count = a.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    tolerance = 1e-10 * np.abs(a).sum()
    for _ in range(10 * count):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            # Only so far towards the trial that nothing falls below zero; what reaches it is bound there.
            falling = free & (trial <= 0)
            x = x + (x[falling] / (x[falling] - trial[falling])).min() * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x
