"""In which order waiting sequences enter. One class for each policy, all with the same few methods."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.scheduler.sequence import Sequence, Status

# What a token costs in the fair policy, after Sheng et al. 2024: a generated one takes a step of its own.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
MAX_IDLE_TENANTS = 10_000


class WaitingQueue:
    """A priority queue by rank. A sequence that is not WAITING any more is skipped when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """In order. (For tests: it sorts.)"""
        return iter(s for _, s in sorted(self._heap, key=lambda entry: entry[0]) if s.status is Status.WAITING)

    def push(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._heap, (sequence.rank, sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes out what `peek` has shown. The caller gives it its new status."""
        self._length -= 1
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: Sequence) -> None:
        """Takes out any sequence, for good."""
        sequence.status = Status.GONE
        self._length -= 1
        if len(self._heap) > 2 * self._length + 16:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)


class FirstComeFirstServed:
    """By arrival."""

    def __init__(self) -> None:
        self._queue = WaitingQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """A sequence's place in the order, which stays the same for all its life."""
        return 0.0, sequence.seq_id

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence, a new one or one that was preempted."""
        self._queue.push(sequence)

    def peek(self) -> Sequence | None:
        """The one that enters next."""
        return self._queue.peek()

    def pop(self) -> Sequence:
        """Takes out what `peek` has shown."""
        return self._queue.pop()

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits, for good."""
        self._queue.remove(sequence)

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Notes what is computed for a sequence. (Tokens computed anew after a preemption are not charged.)"""


class Priority(FirstComeFirstServed):
    """Lower classes first, and by arrival within a class, with ageing so that nothing starves.

    A sequence stands in the queue as if it had arrived `priority * ageing` seconds later than it did. So all age alike,
    nobody's order ever changes, and one of class p is overtaken by those of class q < p for (p - q) * ageing seconds
    after its arrival and no longer.
    """

    def __init__(self, ageing: float) -> None:
        super().__init__()
        self.ageing = ageing

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.arrival + sequence.priority * self.ageing, sequence.seq_id


@dataclass(slots=True)
class _Tenant:
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    served: float = 0.0  # the counter: what has been spent on it, in units of a prompt token
    is_listed: bool = False  # among those that the heap knows


class FairShare(FirstComeFirstServed):
    """Each tenant gets the same share of the tokens while it has something waiting (Sheng et al. 2024, VTC).

    The next sequence is that of the tenant with the lowest counter, and within a tenant the first that came. A prompt
    is charged when it enters, an output token when it runs. Who comes back after a pause does not bring the unused
    share along: the counter is lifted to that of the tenant that was chosen last.

    Bound: while two tenants both have sequences waiting, their counters differ by at most P + 2 * M, with P the longest
    prompt and M the most output tokens that the sequences running at one time may still produce. For a tenant is chosen
    only while its counter is the lowest, and goes beyond the others by the prompt that enters and by what its running
    sequences still produce. What two of them are given in any such time differs by twice that at most.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, str]] = []  # counters as they were when entered; they only grow
        self._floor = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (s for _, tenant in sorted(self._tenants.items(), key=lambda t: t[1].served) for s in tenant.queue)

    def served(self, tenant: str) -> float:
        """A tenant's counter."""
        return self._tenants[tenant].served if tenant in self._tenants else 0.0

    def push(self, sequence: Sequence) -> None:
        if sequence.tenant not in self._tenants and len(self._tenants) >= MAX_IDLE_TENANTS + self._length:
            self._forget_idle()
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        if not tenant.queue:
            tenant.served = max(tenant.served, self._floor)
        tenant.queue.push(sequence)
        self._length += 1
        if not tenant.is_listed:
            tenant.is_listed = True
            heapq.heappush(self._heap, (tenant.served, sequence.tenant))

    def peek(self) -> Sequence | None:
        while self._heap:
            served, name = self._heap[0]
            tenant = self._tenants[name]
            if not tenant.queue:
                heapq.heappop(self._heap)
                tenant.is_listed = False
            elif tenant.served != served:
                heapq.heapreplace(self._heap, (tenant.served, name))
            else:
                return tenant.queue.peek()
        return None

    def pop(self) -> Sequence:
        tenant = self._tenants[self._heap[0][1]]
        self._floor = max(self._floor, tenant.served)
        self._length -= 1
        return tenant.queue.pop()

    def remove(self, sequence: Sequence) -> None:
        self._tenants[sequence.tenant].queue.remove(sequence)
        self._length -= 1

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        tenant = self._tenants.get(sequence.tenant)
        if tenant is not None:
            tenant.served += prompt_tokens * PROMPT_TOKEN_COST + output_tokens * OUTPUT_TOKEN_COST

    def _forget_idle(self) -> None:
        """Forgets the half of the tenants without waiting sequences whose counters are lowest: they lose least."""
        idle = sorted((t.served, name) for name, t in self._tenants.items() if not t.queue and not t.is_listed)
        for _, name in idle[: len(idle) // 2 + 1]:
            del self._tenants[name]
