"""Static batching, as it was done before Orca: the measure of what continuous batching brings."""

from dataclasses import dataclass
from typing import Any

from headrace.kvcache.manager import CacheManager
from headrace.scheduler.cost_model import Work
from headrace.scheduler.scheduler import MAX_EXTRA_ROWS, Limits, Scheduler
from headrace.scheduler.sequence import Sequence, Status
from headrace.worker.step import PADDING, SequenceStep, StepPlan


@dataclass(slots=True)
class _Member:
    """A row of the batch.

    padding: how many tokens make its prompt as long as the longest. num_padded: how many of them have run.
    num_idle: tokens that it has run since its own end, while others went on.
    """

    sequence: Sequence
    padding: int
    num_padded: int = 0
    num_idle: int = 0


class StaticScheduler(Scheduler):
    """Waits until `max_num_seqs` sequences are there, or until the first has waited for `timeout` seconds, pads their
    prompts to the longest, and runs all of them to the end of the last. Nobody enters or leaves on the way.

    Each sequence has one block, which is as long as any sequence may become (the contiguous cache). Padding and ended
    rows cost what they would cost in a rectangular batch: their tokens run through the model, and nobody looks at what
    comes out. A row's padding runs before its prompt and at the same positions, which the prompt then overwrites.
    """

    def __init__(self, cache: CacheManager, limits: Limits, *, timeout: float, **rest: Any) -> None:
        super().__init__(cache, limits, **rest)
        self.timeout = timeout
        self._batch: list[_Member] = []

    def add(self, sequence: Sequence, siblings: list[Sequence] | None = None, *, is_ready: bool = True) -> None:
        for each in (sequence, *(siblings or [])):  # nothing is shared, so that each is a row of its own
            super().add(each, is_ready=is_ready)

    def release(self, sequence: Sequence, siblings: list[Sequence] | None = None) -> None:
        for each in (sequence, *(siblings or [])):
            if each.status is Status.HELD:
                super().release(each)

    def remove(self, sequence: Sequence) -> None:
        if sequence.status is not Status.RUNNING:
            super().remove(sequence)
            return
        sequence.status = Status.GONE
        del self.running[self._place(sequence)]
        if not self.running:
            for member in self._batch:
                self._release(member.sequence)
            self._batch = []

    def schedule(self) -> StepPlan:
        """As Scheduler's. The plan is empty while the batch is gathered."""
        if not self._batch:
            self._gather()
        plan = StepPlan()
        begun = all(m.num_padded == m.padding and not self._in_prompt(m.sequence) for m in self._batch)
        self._work = Work()
        if begun:
            plan.sequences = [self._decode(member) for member in self._batch]
        else:
            self._fill(plan.sequences)
        for step in plan.sequences:
            self._work.add(step.start, len(step.token_ids))
        return plan

    @staticmethod
    def _in_prompt(sequence: Sequence) -> bool:
        return sequence.status is Status.RUNNING and sequence.num_computed < sequence.num_prompt

    def _gather(self) -> None:
        first = self.waiting.peek()
        size = self.limits.max_num_seqs
        if first is None or (len(self.waiting) < size and self.clock() - first.arrival < self.timeout):
            return
        while first is not None and len(self.running) < size:
            computed = self.cache.admit(first.table, first.token_ids, first.salt, reuse=False)
            if computed is None:
                break
            self._start(first, computed)
            first = self.waiting.peek()
        longest = max(s.num_prompt for s in self.running)
        self._batch = [_Member(s, longest - s.num_prompt) for s in self.running]

    def _fill(self, steps: list[SequenceStep]) -> None:
        """Padding and prompts, as much as a step holds."""
        left, rows = self.limits.max_num_batched_tokens, MAX_EXTRA_ROWS
        for member in self._batch:
            sequence = member.sequence
            if left and member.num_padded < member.padding:
                count = min(left, member.padding - member.num_padded)
                steps.append(SequenceStep(PADDING, [0] * count, member.num_padded, sequence.table.blocks))
                member.num_padded += count
                left -= count
            elif left and self._in_prompt(sequence):
                count = min(left, sequence.num_prompt - sequence.num_computed)
                if sequence.wants_prompt_logprobs:
                    count = min(count, rows)
                    rows -= count
                if count:
                    steps.append(self._step(sequence, count))
                    left -= count

    def _decode(self, member: _Member) -> SequenceStep:
        sequence = member.sequence
        if sequence.status is Status.RUNNING:
            return self._step(sequence, 1)
        at = min(len(sequence.token_ids) - 1 + member.num_idle, self.cache.pool.block_size - 1)
        member.num_idle += 1
        return SequenceStep(PADDING, sequence.token_ids[-1:], at, sequence.table.blocks)
