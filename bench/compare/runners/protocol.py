"""What every peer's process answers: one JSON object a line, on standard input and output.

{"run": [[token ids], ...], "output_len": n} generates n tokens after each prompt, greedily and past any end, and
answers {"seconds": s}. {"score": [token ids]} answers {"logprobs": [...]}: the natural logarithm of the probability of
each token but the first. The first line that a process writes is {"ready": true, "about": "what it is, and how set"}.

Standard library only: each peer has an environment of its own.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class Peer(ABC):
    """An engine with a model loaded.

    about: its version and settings, for the reader of the table.
    """

    about: str

    @abstractmethod
    def run(self, prompts: list[list[int]], output_len: int) -> None:
        """Generates so many tokens after each prompt, all of them at once."""

    def score(self, ids: list[int]) -> list[float] | None:
        """The log-probability of each token but the first; None where the engine does not tell."""
        return None


def serve(load: Callable[[dict[str, object]], Peer]) -> None:
    """Loads the engine with the settings in the first argument, and answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to standard error
    peer = load(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True, "about": peer.about}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "score" in asked:
            answer: dict[str, object] = {"logprobs": peer.score(asked["score"])}
        else:
            begun = time.perf_counter()
            peer.run(asked["run"], asked["output_len"])
            answer = {"seconds": time.perf_counter() - begun}
        print(json.dumps(answer), file=answers, flush=True)
