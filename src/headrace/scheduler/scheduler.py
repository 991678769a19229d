"""Continuous batching: at every step finished sequences have left, new ones enter, and all share one ragged batch.

Yu et al. 2022 (Orca) for scheduling by iteration, Agrawal et al. 2023 (Sarathi) for prompts in chunks beside decodes,
Kwon et al. 2023 (vLLM) for paged memory and preemption.
"""

import gc
import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.errors import OverloadedError, RequestError
from headrace.kvcache.manager import CacheManager
from headrace.scheduler.cost_model import CostModel, Work
from headrace.scheduler.policies import FirstComeFirstServed
from headrace.scheduler.sequence import Sequence, Status
from headrace.speculative.lengths import DraftLengths
from headrace.speculative.proposer import DraftRequest
from headrace.speculative.speculation import Speculation
from headrace.worker.step import SequenceStep, StepPlan

# Prompt logprobs need the logits of every token of a chunk, and drafts those of every token; this many rows of them are
# in memory at most, beside the one of each sequence.
MAX_EXTRA_ROWS = 256
# However short the time, a prompt gets on by so many tokens in each step.
MIN_CHUNK = 16
# Without a target of the user's, a step beside running streams may take so long, or twice as long as without prompts.
AUTO_TARGET_ITL = 0.2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's settings; times in seconds.

    max_num_seqs, max_num_batched_tokens: most sequences that run at once, and most tokens in a step; as many tokens as
        sequences at least.
    long_prefill_token_threshold: most tokens of one prompt in a step; 0 for no such limit.
    target_itl: how long a step may take while streams run; None chooses, 0 sets no limit.
    max_waiting_requests, max_waiting_tokens: how many requests, and tokens of their prompts, may wait; None for any.
    watermark: share of the blocks that is left free when a sequence enters, so that those who run can grow a while.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    target_itl: float | None = 0.0
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    watermark: float = 0.01


class _Draft:
    """A step in the making: how many tokens of each prompt run, and what is left of the step's budgets."""

    def __init__(self, limits: Limits, cost: CostModel) -> None:
        self.chunks: dict[Sequence, int] = {}  # of prompts, or single tokens of sequences that have just entered
        self.work = Work()
        self._limits, self._cost = limits, cost
        self._tokens_left, self._rows_left = limits.max_num_batched_tokens, MAX_EXTRA_ROWS
        self._end: float | None = None  # seconds that the step may take
        self._has_chunk = False

    def put_decodes(self, count: int, context: int) -> None:
        """Puts in the sequences that decode, with so many tokens in all. From now on the step's duration is limited."""
        self.work = Work(count, context, count)
        self._tokens_left -= count
        target = self._limits.target_itl
        if count and target != 0:
            self._end = target if target is not None else max(AUTO_TARGET_ITL, 2 * self._cost.predict(self.work))

    def room_for(self, sequence: Sequence) -> int:
        """How many of its tokens a sequence may run beside those planned already."""
        return self.room(sequence.num_to_compute, sequence.num_computed, sequence.wants_prompt_logprobs)

    def room(self, count: int, start: int, has_rows: bool) -> int:
        count = min(count, self._tokens_left)
        if has_rows:
            count = min(count, self._rows_left)
        if self._limits.long_prefill_token_threshold:
            count = min(count, self._limits.long_prefill_token_threshold)
        if self._end is not None:
            least = 0 if self._has_chunk else MIN_CHUNK
            count = min(count, max(least, self._cost.tokens_within(self._end - self._cost.predict(self.work), start)))
        return count

    def put(self, sequence: Sequence, count: int) -> None:
        self.chunks[sequence] = count
        self.work.add(sequence.num_computed, count)
        self._tokens_left -= count
        self._has_chunk |= count > 1
        if sequence.wants_prompt_logprobs:
            self._rows_left -= count

    @property
    def room_for_drafts(self) -> int:
        """How many tokens of drafts may run beside all that."""
        return min(self._tokens_left, self._rows_left)

    def put_draft(self, start: int, count: int) -> None:
        """Puts in so many tokens of a draft, which come after `start` others of their sequence."""
        self.work.add(start, count, sequences=0)
        self._tokens_left -= count
        self._rows_left -= count


class Scheduler:
    """Fills each step within a budget of tokens, of sequences and of time, in the order of a policy.

    Sequences that decode come first. What is left goes to prompts under way and then to new ones, in pieces. A sequence
    enters when there are blocks for all the tokens that it has, so a prompt once begun is not starved by later ones.
    Each decoded token may need one more block; when there is none, the sequence with the highest rank (the latest
    arrival of the lowest class) gives up its blocks and goes back to its place in the queue, to be computed anew or to
    be brought back from the host's memory. The one with the lowest rank is never the victim of another, so there is
    always progress, provided that the pool holds one sequence of the greatest length; `check` sees to that.

    Neither clock nor cost model need be real: a simulation hands in its own.

    clock: seconds from any origin. swap: preempted sequences go to the host's memory, if there is room.
    speculation: makes drafts for sequences that decode, if there is one.
    running: in order of rank. waiting_tokens: of the prompts of sequences that wait for their first turn.
    num_refused: requests for which the queue was too full, by what it was full of.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: Limits,
        *,
        policy: FirstComeFirstServed | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        swap: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self.cache, self.limits, self.clock, self.swap = cache, limits, clock, swap
        self.speculation = speculation
        self.waiting = FirstComeFirstServed() if policy is None else policy
        self.cost = CostModel() if cost is None else cost
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_swapped_out = self.num_copied_blocks = 0
        self.num_refused = {"requests": 0, "prompt tokens": 0}
        self.waiting_tokens = 0
        self._num_held = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._queue_deadlines: list[tuple[float, int, Sequence]] = []
        self._work = Work()  # of the step planned last
        self._draft_seconds = 0.0  # of that step, spent in making drafts
        self._tokens_per_second = 0.0
        self._stuck: tuple[Sequence, int] | None = None  # who found no room lately, and how many blocks were free then

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._num_held)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._num_held

    def check(self, num_prompt: int, max_length: int) -> None:
        """Raises RequestError for a sequence that can never run."""
        capacity = self.cache.layout.longest(self.cache.pool.num_blocks, max_length - 1)
        if capacity < max_length - 1:  # nobody reads the last token
            raise RequestError(
                f"the KV cache holds {capacity} tokens, and the prompt of {num_prompt} with its output may become "
                f"{max_length}",
                "prompt",
            )

    def has_room(self, num_prompt: int, n: int = 1) -> bool:
        """Whether the queue has room for a request. An empty one takes any."""
        return self._overflow(num_prompt, n) is None

    def check_queue(self, num_prompt: int, n: int = 1) -> None:
        """Raises OverloadedError if there is no room in the queue for a request."""
        overflow = self._overflow(num_prompt, n)
        if overflow is not None:
            what, waiting, limit = overflow
            self.num_refused[what] += 1
            retry = self.retry_after()
            raise OverloadedError(
                f"the queue is full: {waiting} {what} wait and the limit is {limit}; try again in {retry} s", retry
            )

    def _overflow(self, num_prompt: int, n: int) -> tuple[str, int, int] | None:
        """Of what a request would make the queue too long, how many are there, and the limit; None if it fits."""
        limits = self.limits
        if self.num_waiting:
            for what, waiting, more, limit in (
                ("requests", self.num_waiting, n, limits.max_waiting_requests),
                ("prompt tokens", self.waiting_tokens, num_prompt, limits.max_waiting_tokens),
            ):
                if limit is not None and waiting + more > limit:
                    return what, waiting, limit
        return None

    def add(self, sequence: Sequence, siblings: list[Sequence] | None = None, *, is_ready: bool = True) -> None:
        """Queues the first sequence of a request, and holds its siblings until it has computed their prompt.

        One that is not ready is held too, until `release`. Meanwhile it takes a place in the queue, and its time runs.
        """
        now = self.clock()
        sequence.siblings = siblings or []
        self._num_held += len(sequence.siblings)
        for each in (sequence, *sequence.siblings):
            each.arrival = now
            each.rank = self.waiting.rank(each)
            self._watch(self._deadlines, each.deadline, each)
        self._watch(self._queue_deadlines, sequence.queue_deadline, sequence)
        if is_ready:
            self._queue(sequence)
        else:
            self._num_held += 1

    def release(self, sequence: Sequence, siblings: list[Sequence] | None = None) -> None:
        """Queues what was added when it was not ready, in its place by arrival. To be called as `add` was."""
        self._num_held -= 1
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that has finished or was aborted, wherever it is, and frees its blocks."""
        was, sequence.status = sequence.status, Status.GONE
        if was is Status.RUNNING:
            del self.running[self._place(sequence)]
        elif was is Status.WAITING:
            self._unqueue(sequence)
        elif was is Status.HELD:
            self._num_held -= 1
        self._release(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence.seq_id)
        if sequence.num_computed < sequence.num_prompt:
            self._let_siblings_go(sequence, forked=False)

    def expire(self) -> list[tuple[Sequence, bool]]:
        """Takes out the sequences whose time is over; to be called before `schedule`.

        Returns each with whether its request has not begun. If so, it is for the caller to end the rest of that.
        """
        now = self.clock()
        expired = []
        for heap, in_queue in ((self._queue_deadlines, True), (self._deadlines, False)):
            while heap and (heap[0][0] <= now or heap[0][2].status is Status.GONE):
                sequence = heapq.heappop(heap)[2]
                # While the first sequence of a request waits, so do the others.
                waits_in_vain = sequence.num_cached is None and sequence.index == 0
                if sequence.status is not Status.GONE and (waits_in_vain or not in_queue):
                    expired.append((sequence, waits_in_vain))
                    self.remove(sequence)
        return expired

    def schedule(self) -> StepPlan:
        """Chooses what runs now. The caller runs it, then calls `advance` for each sequence, and `record`.

        The plan may have no sequences: where all have to wait for something.
        """
        draft = _Draft(self.limits, self.cost)
        preemptions = self.num_preemptions
        with _without_collections():
            decoding, prompts = self._plan_decodes(draft)
            for sequence in prompts:
                done = sequence.num_computed
                count = min(draft.room_for(sequence), self.cache.room(sequence.table) - done)
                if count > 0 and self.cache.grow(sequence.table, done + count):
                    draft.put(sequence, count)
            # Who has just been preempted is among the first in the queue; to let it in again at once would be thrashing
            if self.num_preemptions == preemptions:
                self._enter(draft)
            guesses = self._drafts(decoding, draft)
            steps = [self._decode_step(sequence, guesses.get(sequence.seq_id, [])) for sequence in decoding]
            steps += [self._step(sequence, count) for sequence, count in draft.chunks.items()]
        self._work = draft.work
        cache = self.cache
        plan = StepPlan(steps, cache.copies, cache.swap_out, cache.swap_in)
        self.num_copied_blocks += len(cache.copies)
        cache.copies, cache.swap_out, cache.swap_in = [], [], []
        return plan

    def accept(self, sequence: Sequence, draft: list[int], count: int) -> None:
        """Takes over the first `count` tokens of a draft, which were right. To be called before `advance`."""
        sequence.token_ids += draft[:count]
        self.waiting.charge(sequence, 0, count)
        if self.speculation is not None:
            self.speculation.record(sequence.seq_id, len(draft), count)

    def advance(self, sequence: Sequence, count: int) -> None:
        """Notes that the next `count` tokens of a sequence are in the cache now."""
        sequence.num_computed = computed = sequence.num_computed + count
        in_prompt = computed < len(sequence.token_ids)
        if computed % self.cache.pool.block_size == 0 or count > 1 or in_prompt:
            self.cache.note_computed(sequence.table, sequence.token_ids, computed, sequence.salt)
            if count > 1:
                self._stuck = None  # it may share what has just been computed
        if sequence.siblings and computed >= sequence.num_prompt:
            self._let_siblings_go(sequence, forked=True)

    def record(self, seconds: float) -> None:
        """Notes how long the step planned last has taken."""
        if self._work.tokens and seconds > self._draft_seconds:
            seconds -= self._draft_seconds
            self.cost.observe(self._work, seconds)
            self._tokens_per_second += 0.1 * (self._work.tokens / seconds - self._tokens_per_second)

    def retry_after(self) -> int:
        """Seconds until the queue may be half as long, by the speed of the last steps."""
        tokens = self.waiting_tokens + sum(s.num_to_compute for s in self.running)
        return max(1, min(600, round(tokens / 2 / self._tokens_per_second))) if self._tokens_per_second else 1

    # Who waits

    def _watch(self, heap: list[tuple[float, int, Sequence]], deadline: float | None, sequence: Sequence) -> None:
        """Notes a deadline. Those of sequences that are gone do not pile up, however far away they are."""
        if deadline is not None:
            if len(heap) > 2 * (self.num_waiting + len(self.running)) + 64:
                heap[:] = [entry for entry in heap if entry[2].status is not Status.GONE]
                heapq.heapify(heap)
            heapq.heappush(heap, (deadline, sequence.seq_id, sequence))

    def _queue(self, sequence: Sequence) -> None:
        self.waiting_tokens += self._tokens_in_queue(sequence)
        self.waiting.push(sequence)

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting_tokens -= self._tokens_in_queue(sequence)
        self.waiting.remove(sequence)

    @staticmethod
    def _tokens_in_queue(sequence: Sequence) -> int:
        """What counts towards the limit of the queue: not a prompt that was admitted before, or that is shared."""
        return 0 if sequence.num_cached is not None or sequence.leader is not None else sequence.num_prompt

    def _let_siblings_go(self, sequence: Sequence, forked: bool) -> None:
        """Queues those that waited for a sequence's prompt: to share its blocks, or to compute it by themselves."""
        held = [s for s in sequence.siblings if s.status is Status.HELD]
        sequence.siblings = []
        if forked:
            for sibling in held:
                sibling.leader = sequence
                sibling.prompt_logprobs = list(sequence.prompt_logprobs)
        elif held:
            held[0].siblings = held[1:]
            held = held[:1]
        for sibling in held:
            self._num_held -= 1
            self._queue(sibling)

    # Who runs

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self.running, sequence.rank, key=_rank)

    def _plan_decodes(self, draft: _Draft) -> tuple[list[Sequence], list[Sequence]]:
        """Plans the sequences that decode. Returns them, and the running sequences that are in their prompts.

        All of them have blocks for a token more. In order of rank, so that nobody is a victim who was planned.
        """
        size, charge = self.cache.pool.block_size, self.waiting.charge
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        context = 0
        for sequence in self.running[:]:
            if sequence.status is not Status.RUNNING:  # preempted by one before it
                continue
            table, length = sequence.table, len(sequence.token_ids)
            in_prompt = length - sequence.num_computed > 1 or sequence.wants_prompt_logprobs
            if in_prompt:
                length = sequence.num_computed + 1
            # The last group's table is as long as any that has to grow.
            if length > len(table.blocks[-1]) * size and not self._grow(sequence, length):
                continue
            if in_prompt:
                prompts.append(sequence)
            else:
                context += length
                charge(sequence, 0, 1)
                decoding.append(sequence)
        draft.put_decodes(len(decoding), context)
        return decoding, prompts

    def _drafts(self, decoding: list[Sequence], draft: _Draft) -> dict[int, list[int]]:
        """Guesses how sequences that decode go on, as far as the step's budgets allow.

        Nobody gives way to a guess: all that runs has been planned already, and beyond the blocks that guesses take,
        each running sequence could still have one.
        """
        self._draft_seconds = 0.0
        # Blocks that have yet to go to the host may be some of those that a proposer would write to now.
        if self.speculation is None or self.cache.swap_out:
            return {}
        longest = {}
        for sequence in decoding:
            # What is drawn after the draft is the last token at most.
            most = min(self.speculation.most, sequence.max_length - len(sequence.token_ids) - 1)
            if most > 0 and sequence.params.speculative:
                longest[sequence.seq_id] = most
        by_id = {sequence.seq_id: sequence for sequence in decoding if sequence.seq_id in longest}
        requests: list[DraftRequest] = []
        for seq_id, length in self._draft_lengths(self.speculation.lengths, longest, len(decoding), draft).items():
            request = self._draft_request(by_id[seq_id], length)
            if request is not None:
                requests.append(request)
        before = self.speculation.seconds
        proposed = self.speculation.propose(requests)
        self._draft_seconds = self.speculation.seconds - before
        guesses: dict[int, list[int]] = {}
        for request, guess in zip(requests, proposed, strict=True):
            guesses[request.seq_id] = guess = by_id[request.seq_id].sensible(guess)
            draft.put_draft(len(request.token_ids), len(guess))
        return guesses

    def _draft_lengths(
        self, lengths: DraftLengths | None, longest: dict[int, int], num_decoding: int, draft: _Draft
    ) -> dict[int, int]:
        """How long each draft is to be, by sequence; at most as long as `longest` says."""
        room = draft.room_for_drafts
        if lengths is not None and longest:
            work, seconds = draft.work, self.cost.predict(draft.work)
            context = work.pairs // work.tokens  # a draft's token has as many tokens before it as others, on average
            one_more = Work(work.tokens + 1, work.pairs + context, work.sequences)
            token_seconds = self.cost.predict(one_more) - seconds
            return lengths.choose(longest, num_decoding, seconds, token_seconds, room)
        chosen = {}
        for seq_id, most in longest.items():
            chosen[seq_id] = min(most, room)
            room -= chosen[seq_id]
        return chosen

    def _draft_request(self, sequence: Sequence, length: int) -> DraftRequest | None:
        """Asks for a draft, and takes blocks for it. It is shorter where blocks are short; None for none."""
        pool, tokens, table = self.cache.pool, sequence.token_ids, sequence.table
        groups = len(self.cache.windows)
        missing = max(0, pool.blocks_for(len(tokens) + length) - len(table.blocks[-1])) * groups
        reserve = len(self.running) * groups
        if missing > pool.num_free - reserve or not self.cache.grow(table, len(tokens) + length):
            length = min(length, len(table.blocks[-1]) * pool.block_size - len(tokens))
        if length < 1:
            return None
        (sample,) = sequence.sample_requests(masked=False)
        return DraftRequest(
            sequence.seq_id,
            tokens,
            length,
            table.blocks,
            sample,
            scope=f"{sequence.tenant}\0{sequence.salt}",
            stop_ids=sequence.stop_ids,
            has_grammar=sequence.constraint is not None,
        )

    def _decode_step(self, sequence: Sequence, guess: list[int]) -> SequenceStep:
        """A step of a sequence that decodes: its last token, and perhaps a guess of the next ones."""
        tokens, samples = sequence.token_ids, sequence.sample_requests(guess)
        return SequenceStep(sequence.seq_id, [tokens[-1], *guess], len(tokens) - 1, sequence.table.blocks, samples)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Sees to it that a running sequence has blocks for so many tokens, preempting the last ones if need be.

        False if the sequence was itself preempted.
        """
        while not self.cache.grow(sequence.table, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        if self.swap and self.cache.move_to_host(victim.table, victim.num_computed):
            self.num_swapped_out += 1
        else:
            self._release(victim)
            if victim.wants_prompt_logprobs:
                victim.prompt_logprobs.clear()  # they come again with the prompt
        victim.num_computed = 0
        self._queue(victim)

    def _release(self, sequence: Sequence) -> None:
        self.cache.free(sequence.table)
        self._stuck = None

    def _enter(self, draft: _Draft) -> None:
        """Lets sequences in, as long as there is room for them and for at least one token of theirs."""
        while len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting.peek()
            if sequence is None or not self._admit(sequence, draft):
                break

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        wants_rows = sequence.wants_prompt_logprobs
        if draft.room(1, 0, wants_rows) < 1:
            return False
        cache, pool = self.cache, self.cache.pool
        if self._stuck is not None and self._stuck[0] is sequence and pool.num_free <= self._stuck[1]:
            return False  # so that a long prompt is not looked up again in each step
        spare = int(self.limits.watermark * pool.num_blocks) if self.running else 0
        leader, computed = sequence.leader, None
        if leader is not None and leader.status is Status.RUNNING and leader.num_computed >= sequence.num_prompt:
            computed = cache.fork(sequence.table, leader.table, sequence.num_prompt, spare=spare)
        if computed is None:
            computed = cache.admit(sequence.table, sequence.token_ids, sequence.salt, reuse=not wants_rows, spare=spare)
        if computed is None:
            self._stuck = (sequence, pool.num_free)
            return False
        self._start(sequence, computed)
        count = draft.room_for(sequence)
        if count > 0:
            draft.put(sequence, count)
        return True

    def _start(self, sequence: Sequence, computed: int) -> None:
        """Makes the sequence that is first in the queue, and has got its blocks, one that runs."""
        self.waiting.pop()
        self.waiting_tokens -= self._tokens_in_queue(sequence)
        sequence.status, sequence.leader = Status.RUNNING, None
        insort(self.running, sequence, key=_rank)
        sequence.num_computed = computed
        if sequence.num_cached is None:
            sequence.begun = self.clock()
            sequence.num_cached = min(computed, sequence.num_prompt)
            if self.cache.index is not None and not sequence.wants_prompt_logprobs:
                self.cache.index.num_queried_tokens += sequence.num_prompt
                self.cache.index.num_hit_tokens += sequence.num_cached
            self.waiting.charge(sequence, sequence.num_prompt - sequence.num_cached, 0)

    def _step(self, sequence: Sequence, count: int) -> SequenceStep:
        start = sequence.num_computed
        end = start + count
        tokens = sequence.token_ids
        step = SequenceStep(sequence.seq_id, tokens[start:end], start, sequence.table.blocks)
        if end == len(tokens):
            step.samples = sequence.sample_requests()
            self.waiting.charge(sequence, 0, 1)
        if sequence.wants_prompt_logprobs:
            step.prompt_logprobs = sequence.params.prompt_logprobs
            step.next_prompt_token = tokens[end] if end < sequence.num_prompt else None
        return step


@contextmanager
def _without_collections() -> Iterator[None]:
    """None of the thousands of small objects of a step is garbage, and Python would look for some again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
