"""The scheduler without a model: budgets, order, blocks, preemption, and that everyone gets done."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kvcache.block_pool import BlockPool
from headrace.sampling.params import SamplingParams, TokenLogprob
from headrace.scheduler import scheduler as module
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.sequence import Sequence
from headrace.worker.step import StepPlan

_ids = itertools.count()


def make(prompt: int, output: int = 4, **params: int) -> Sequence:
    """A sequence with a prompt of so many tokens, which ends after so many more."""
    return Sequence(
        seq_id=next(_ids),
        index=0,
        token_ids=[7] * prompt,
        num_prompt=prompt,
        params=SamplingParams(max_tokens=output, **params),
        seed=0,
        max_length=prompt + output,
    )


def scheduler(blocks: int = 100, block_size: int = 4, seqs: int = 8, tokens: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), max_num_seqs=seqs, max_num_batched_tokens=tokens)


def run(s: Scheduler, plan: StepPlan, known: dict[int, Sequence]) -> list[Sequence]:
    """Does what an engine does with a plan; returns the sequences that have finished."""
    finished = []
    for step in plan.sequences:
        sequence = known[step.seq_id]
        s.advance(sequence, len(step.token_ids))
        if step.sample is not None:
            sequence.token_ids.append(9)
            if len(sequence.token_ids) == sequence.max_length:
                s.remove(sequence)
                finished.append(sequence)
    return finished


def counts(plan: StepPlan) -> dict[int, int]:
    return {step.seq_id: len(step.token_ids) for step in plan.sequences}


def test_prompts_share_a_step_and_only_whole_ones_draw() -> None:
    s = scheduler(tokens=10)
    a, b, c = make(4), make(9), make(3)
    for sequence in (a, b, c):
        s.add(sequence)
    plan = s.schedule()
    assert counts(plan) == {a.seq_id: 4, b.seq_id: 6}
    assert [step.sample is not None for step in plan.sequences] == [True, False]
    run(s, plan, {a.seq_id: a, b.seq_id: b})
    plan = s.schedule()
    # The decode goes first, then what is left of b, then c.
    assert counts(plan) == {a.seq_id: 1, b.seq_id: 3, c.seq_id: 3}
    assert [step.start for step in plan.sequences] == [4, 6, 0]


def test_a_long_prompt_does_not_stop_a_running_stream() -> None:
    s = scheduler(blocks=1000, tokens=8)
    long, short = make(100), make(2, output=50)
    s.add(long)
    s.add(short)
    known = {x.seq_id: x for x in (long, short)}
    while len(s.running) < 2:
        run(s, s.schedule(), known)
    for _ in range(20):
        plan = s.schedule()
        assert counts(plan)[short.seq_id] >= 1
        run(s, plan, known)


def test_a_prompt_enters_only_when_all_of_it_fits() -> None:
    s = scheduler(blocks=5, block_size=4)
    a, b, c = make(12), make(9), make(1)
    for sequence in (a, b, c):
        s.add(sequence)
    assert counts(s.schedule()) == {a.seq_id: 12}
    assert list(s.waiting) == [b, c], "first come, first served: c waits behind b though it would fit"


def test_the_sequence_limit_holds() -> None:
    s = scheduler(seqs=2)
    for sequence in (make(1), make(1), make(1)):
        s.add(sequence)
    assert len(s.schedule().sequences) == 2


def test_the_latest_arrival_is_preempted_and_comes_first_again() -> None:
    s = scheduler(blocks=4, block_size=4)
    a, b, waiting = make(8, output=9), make(8, output=9), make(4)
    for sequence in (a, b, waiting):
        s.add(sequence)
    known = {x.seq_id: x for x in (a, b, waiting)}
    run(s, s.schedule(), known)
    plan = s.schedule()  # both need a third block and there is none: b gives up its two
    assert counts(plan) == {a.seq_id: 1}
    assert s.num_preemptions == 1
    assert list(s.waiting) == [b, waiting]
    assert (b.num_computed, b.block_table) == (0, [])
    assert len(b.token_ids) == 9, "what was generated stays"
    finished = run(s, plan, known)
    while a not in finished:
        finished += run(s, s.schedule(), known)
    plan = s.schedule()
    assert counts(plan)[b.seq_id] == 9, "prompt and output are computed anew together"
    assert plan.sequences[0].sample is not None
    assert plan.sequences[0].sample.position == 9


def test_a_sequence_that_is_last_itself_steps_back() -> None:
    s = scheduler(blocks=3, block_size=4)
    a, b = make(5, output=6), make(4, output=6)
    s.add(a)
    s.add(b)
    known = {x.seq_id: x for x in (a, b)}
    run(s, s.schedule(), known)
    plan = s.schedule()  # a has room in its second block; b needs one
    assert counts(plan) == {a.seq_id: 1}
    assert list(s.waiting) == [b]


def test_removing_frees_blocks_wherever_the_sequence_is() -> None:
    s = scheduler(seqs=1)
    a, b = make(9), make(3)
    s.add(a)
    s.add(b)
    s.schedule()
    s.remove(b)
    assert not s.waiting
    s.remove(a)
    assert s.pool.num_free == 100
    assert not s.has_work


def test_prompt_logprobs_bound_the_rows_of_a_step() -> None:
    s = scheduler(blocks=1000, tokens=2000)
    a, b, c = make(300, prompt_logprobs=0), make(50, prompt_logprobs=1), make(400)
    for sequence in (a, b, c):
        s.add(sequence)
    plan = s.schedule()
    assert counts(plan) == {a.seq_id: module.MAX_PROMPT_LOGPROB_ROWS}
    a.prompt_logprobs += [None] + [TokenLogprob(7, -1.0)] * module.MAX_PROMPT_LOGPROB_ROWS
    assert plan.sequences[0].next_prompt_token == 7
    run(s, plan, {a.seq_id: a})
    plan = s.schedule()
    assert counts(plan) == {a.seq_id: 44, b.seq_id: 50, c.seq_id: 400}
    assert plan.sequences[0].next_prompt_token is None


class SchedulerMachine(RuleBasedStateMachine):
    """Random submissions, aborts and steps; the invariants hold after each, and at the end everyone finishes."""

    @initialize(
        blocks=st.integers(3, 20), block_size=st.integers(1, 8), seqs=st.integers(1, 6), tokens=st.integers(6, 40)
    )
    def start(self, blocks: int, block_size: int, seqs: int, tokens: int) -> None:
        self.s = scheduler(blocks, block_size, seqs, tokens)
        self.capacity = blocks * block_size
        self.known: dict[int, Sequence] = {}
        self.streamed: dict[int, int] = {}

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 30))
    def submit(self, prompt: int, output: int) -> None:
        prompt = min(prompt, self.capacity - 1)
        sequence = make(prompt, min(output, self.capacity - prompt))
        if len(sequence.token_ids) < self.capacity:
            self.known[sequence.seq_id] = sequence
            self.s.add(sequence)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.s.remove(self.known.pop(data.draw(st.sampled_from(sorted(self.known)))))

    @precondition(lambda self: self.known)
    @rule()
    def step(self) -> None:
        oldest = min(self.known)
        before = len(self.known[oldest].token_ids), self.known[oldest].num_computed
        plan = self.s.schedule()
        assert 0 < plan.num_tokens <= self.s.max_num_batched_tokens
        for step in plan.sequences:
            sequence = self.known[step.seq_id]
            end = step.start + len(step.token_ids)
            assert step.start == sequence.num_computed
            assert step.token_ids == sequence.token_ids[step.start : end]
            assert len(step.block_table) * self.s.pool.block_size >= end
            assert (step.sample is not None) == (end == len(sequence.token_ids))
        for sequence in run(self.s, plan, self.known):
            del self.known[sequence.seq_id]
        if oldest in self.known:
            after = len(self.known[oldest].token_ids), self.known[oldest].num_computed
            assert after > before, "the sequence that came first makes progress in every step"

    @invariant()
    def blocks_are_exact(self) -> None:
        if not hasattr(self, "s"):
            return
        owned = [b for x in self.s.running for b in x.block_table]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.s.pool.num_free == self.s.pool.num_blocks
        assert all(not x.block_table and x.num_computed == 0 for x in self.s.waiting)

    @invariant()
    def order_and_limits_are_kept(self) -> None:
        if not hasattr(self, "s"):
            return
        running, waiting = [x.seq_id for x in self.s.running], [x.seq_id for x in self.s.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
        assert not running or not waiting or running[-1] < waiting[0]
        assert len(running) <= self.s.max_num_seqs
        assert sorted(running + waiting) == sorted(self.known)

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        steps = sum(len(x.token_ids) + x.max_length for x in self.known.values()) * (len(self.known) + 1) + 1
        for _ in range(steps):
            if not self.known:
                break
            self.step()
        assert not self.known, "everyone finishes"
        assert self.s.pool.num_free == self.s.pool.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
