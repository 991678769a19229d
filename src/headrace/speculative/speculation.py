"""How long drafts are, and what became of them."""

import time
from collections.abc import Callable
from typing import Any

from headrace.speculative.lengths import DraftLengths
from headrace.speculative.proposer import DraftRequest, Proposer


class Speculation:
    """Has drafts made, and keeps count.

    most: the longest draft, in tokens. lengths: chooses how long each is; without it all are as long as may be.
    num_drafts, num_proposed, num_accepted: drafts that were verified, their tokens, and those of them that were right.
    accepted_at: the latter by their place in the draft.
    seconds: spent in making drafts.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        lengths: DraftLengths | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most, self.lengths = most, lengths
        self.num_drafts = self.num_proposed = self.num_accepted = 0
        self.accepted_at = [0] * most
        self.seconds = 0.0
        self._proposer, self._clock = proposer, clock

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """A draft for each request, which may be empty."""
        if not requests:
            return []
        begun = self._clock()
        drafts = self._proposer.propose(requests)
        seconds = self._clock() - begun
        self.seconds += seconds
        if self.lengths is not None:
            self.lengths.note_drafting(sum(map(len, drafts)), seconds)
        return drafts

    def record(self, seq_id: int, proposed: int, accepted: int) -> None:
        """Notes how much of a draft was right."""
        self.num_drafts += 1
        self.num_proposed += proposed
        self.num_accepted += accepted
        if self.lengths is not None:
            self.lengths.record(seq_id, proposed, accepted)
        for place in range(accepted):
            self.accepted_at[place] += 1

    def stats(self) -> dict[str, Any]:
        """The counts, as EngineStats has them."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_proposed,
            "num_accepted_tokens": self.num_accepted,
            "accepted_at": tuple(self.accepted_at),
            "draft_seconds": self.seconds,
        }

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._proposer.forget(seq_id)
        if self.lengths is not None:
            self.lengths.forget(seq_id)
