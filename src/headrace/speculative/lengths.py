"""How long drafts should be: as long as they bring more tokens in a second than they cost, and not at all otherwise."""

import heapq
from collections import deque
from dataclasses import dataclass
from statistics import median

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 512  # steps without a draft, until one token is tried again
MARGIN = 1.05  # by how much a token must be worth more than it costs, as both are estimates
PRIOR_WEIGHT = 1.5  # of what all sequences have seen, in tokens, beside what one has seen itself
HIGHEST_RATE = 0.99


@dataclass(slots=True)
class _Record:
    """What has become of the drafts of one sequence, the last ones counting most, and for how long it has had none.

    right, judged: tokens that were accepted, and those of which it is known whether they were right: after the first
        wrong one of a draft nobody knows.
    """

    right: float = 0.0
    judged: float = 0.0
    idle: int = 0
    patience: int = FIRST_PATIENCE

    def add(self, proposed: int, accepted: int, memory: float) -> None:
        self.right = self.right * memory + accepted
        self.judged = self.judged * memory + accepted + (accepted < proposed)


class DraftLengths:
    """Chooses the lengths of a step's drafts from how many tokens were right so far, and from what a token costs.

    If each token of a draft is right with probability r, the j-th one brings r ** j tokens more. A step that brings E
    tokens in T seconds is made better by a token that brings g in t seconds more just if g / t > E / T. So tokens are
    put in by falling g, of whichever sequence, as long as that is so.

    A sequence without drafts is given a single token from time to time, to see whether it would be right by now; each
    time in vain it waits twice as long.
    """

    def __init__(self) -> None:
        self._all = _Record(right=7.0, judged=10.0)  # a guess, until something is known
        self._records: dict[int, _Record] = {}
        self._drafting: deque[float] = deque(maxlen=9)

    def choose(
        self, longest: dict[int, int], draws: int, seconds: float, token_seconds: float, room: int
    ) -> dict[int, int]:
        """For each sequence how long its draft is to be, 0 for none.

        longest: by sequence, how long its draft may be. room: how long all of them together.
        draws: tokens that the step brings without drafts, in so many `seconds`; `token_seconds`: for each token more.
        """
        each = token_seconds + self.draft_seconds
        prior = self._all.right / self._all.judged
        chosen = dict.fromkeys(longest, 0)
        heap = []
        for seq_id in longest:
            own = self._records.setdefault(seq_id, _Record())
            rate = min(HIGHEST_RATE, (own.right + PRIOR_WEIGHT * prior) / (own.judged + PRIOR_WEIGHT))
            heap.append((-rate, seq_id, rate))
        heapq.heapify(heap)
        tokens = float(draws)
        while heap and room:
            negative, seq_id, rate = heapq.heappop(heap)
            if -negative * seconds <= MARGIN * each * tokens:
                break  # and those that are left bring even less
            chosen[seq_id] += 1
            tokens -= negative
            seconds += each
            room -= 1
            if chosen[seq_id] < longest[seq_id]:
                heapq.heappush(heap, (negative * rate, seq_id, rate))
        for seq_id, count in chosen.items():
            own = self._records[seq_id]
            if count:
                own.idle, own.patience = 0, FIRST_PATIENCE
            else:
                own.idle += 1
                if own.idle > own.patience and room:
                    chosen[seq_id] = 1
                    room -= 1
        return chosen

    @property
    def draft_seconds(self) -> float:
        """What it takes to make a token of a draft; 0 until there are some to judge by."""
        return median(self._drafting) if len(self._drafting) >= 3 else 0.0

    def note_drafting(self, tokens: int, seconds: float) -> None:
        """So many tokens of drafts were made in a step, in so much time."""
        if tokens:
            self._drafting.append(seconds / tokens)

    def record(self, seq_id: int, proposed: int, accepted: int) -> None:
        """Notes how much of a draft was right."""
        self._all.add(proposed, accepted, 0.99)
        own = self._records.setdefault(seq_id, _Record())
        own.add(proposed, accepted, 0.9)
        if own.idle > own.patience:
            own.idle, own.patience = 0, min(2 * own.patience, LONGEST_PATIENCE)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._records.pop(seq_id, None)
