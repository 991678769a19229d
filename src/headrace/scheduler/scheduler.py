"""Continuous batching: at every step finished sequences have left, new ones enter, and all share one ragged batch.

Yu et al. 2022 (Orca) for scheduling by iteration, Agrawal et al. 2023 (Sarathi) for prompts in chunks beside decodes,
Kwon et al. 2023 (vLLM) for paged memory and preemption.
"""

from collections import deque

from headrace.kvcache.block_pool import BlockPool
from headrace.scheduler.sequence import Sequence
from headrace.worker.step import SequenceStep, StepPlan

# Prompt logprobs need the logits of every token of a chunk; this many rows of them are in memory at most.
MAX_PROMPT_LOGPROB_ROWS = 256


class _Draft:
    """A step in the making: how many tokens each sequence runs, and what is left of the step's budgets."""

    def __init__(self, tokens: int) -> None:
        self.counts: dict[Sequence, int] = {}
        self.tokens_left, self.rows_left = tokens, MAX_PROMPT_LOGPROB_ROWS

    def room_for(self, sequence: Sequence) -> int:
        """How many of its tokens a sequence may run beside those planned already."""
        count = min(sequence.num_to_compute, self.tokens_left)
        return min(count, self.rows_left) if sequence.wants_prompt_logprobs else count

    def put(self, sequence: Sequence, count: int) -> None:
        self.counts[sequence] = count
        self._spend(sequence, count)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out again, if it is in."""
        self._spend(sequence, -self.counts.pop(sequence, 0))

    def _spend(self, sequence: Sequence, count: int) -> None:
        self.tokens_left -= count
        if sequence.wants_prompt_logprobs:
            self.rows_left -= count


class Scheduler:
    """First come, first served, within a budget of tokens and of sequences a step.

    A sequence enters when there are blocks for all the tokens that it has, so a prompt once begun is not starved by
    later ones. Each decoded token may need one more block; when there is none, the sequence that arrived last gives up
    its blocks and goes back to the head of the queue, to be computed anew (preemption by recompute). The one that
    arrived first is never the victim of another, so there is always progress, provided that the pool holds one sequence
    of the greatest length; the engine sees to that.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that has finished or was aborted, wherever it is, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> StepPlan:
        """Chooses what runs now. The caller runs it, then calls `advance` with the same plan."""
        draft = _Draft(self.max_num_batched_tokens)
        preemptions = self.num_preemptions
        # Decodes first, so that no chunk of a prompt delays a running stream; then prompts that are under way.
        for sequence in sorted(self.running, key=lambda s: s.num_to_compute > 1):
            count = draft.room_for(sequence)
            if count and self._grow(sequence, draft):
                draft.put(sequence, count)
        # Who has just been preempted is first in the queue: letting it in again at once would be thrashing.
        while self.waiting and self.num_preemptions == preemptions and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            needed = self.pool.blocks_for(len(sequence.token_ids))
            count = draft.room_for(sequence)
            if needed > self.pool.num_free or count == 0:
                break
            self.waiting.popleft()
            sequence.block_table = self.pool.take(needed)
            self.running.append(sequence)
            draft.put(sequence, count)
        return StepPlan([self._step(sequence, count) for sequence, count in draft.counts.items()])

    def advance(self, sequence: Sequence, count: int) -> None:
        """Notes that the next `count` tokens of a sequence are in the cache now."""
        sequence.num_computed += count

    def _grow(self, sequence: Sequence, draft: _Draft) -> bool:
        """Sees to it that a running sequence has blocks for all its tokens, preempting the latest arrivals if need be.

        False if the sequence was itself preempted, now or by another one before.
        """
        if not sequence.block_table:
            return False
        missing = self.pool.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
        while missing > self.pool.num_free:
            victim = self.running.pop()
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        sequence.block_table += self.pool.take(missing)
        return True

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        draft.drop(victim)
        self._free(victim)
        victim.num_computed = 0
        if victim.wants_prompt_logprobs:
            victim.prompt_logprobs.clear()  # they come again with the prompt
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.block_table)
        sequence.block_table = []

    @staticmethod
    def _step(sequence: Sequence, count: int) -> SequenceStep:
        start, end = sequence.num_computed, sequence.num_computed + count
        step = SequenceStep(sequence.seq_id, sequence.token_ids[start:end], start, sequence.block_table)
        if end == len(sequence.token_ids):
            step.sample = sequence.sample_request()
        if sequence.wants_prompt_logprobs:
            step.prompt_logprobs = sequence.params.prompt_logprobs
            step.next_prompt_token = sequence.token_ids[end] if end < sequence.num_prompt else None
        return step
