"""The scheduler without a model: budgets, order, admission, preemption, forks, deadlines."""

import pytest

from headrace.errors import OverloadedError, RequestError
from headrace.scheduler import scheduler as module
from headrace.scheduler.sequence import Status
from headrace.worker.step import StepPlan
from helpers.scheduling import World, true_output


def counts(plan: StepPlan) -> dict[int, int]:
    return {step.seq_id: len(step.token_ids) for step in plan.sequences}


def numbered(length: int, first: int = 0) -> list[int]:
    """A prompt that shares its beginning with none of another `first`."""
    return [first * 1000 + i for i in range(length)]


class TestStep:
    def test_prompts_share_a_step_and_only_whole_ones_draw(self) -> None:
        world = World(blocks=100, tokens=10)
        (a,), (b,), (c,) = (world.submit(numbered(n, n)) for n in (4, 9, 3))
        plan = world.step()
        assert counts(plan) == {a.seq_id: 4, b.seq_id: 6}
        assert [bool(step.samples) for step in plan.sequences] == [True, False]
        plan = world.step()
        # The decode goes first, then what is left of b, then c.
        assert counts(plan) == {a.seq_id: 1, b.seq_id: 3, c.seq_id: 3}
        assert [step.start for step in plan.sequences] == [4, 6, 0]

    def test_a_long_prompt_does_not_stop_a_running_stream(self) -> None:
        world = World(blocks=1000, tokens=8)
        world.submit(numbered(100))
        (short,) = world.submit(numbered(2, 1), 50)
        while short.num_cached is None:
            world.step()
        for _ in range(20):
            assert counts(world.step())[short.seq_id] >= 1

    def test_the_sequence_limit_holds(self) -> None:
        world = World(seqs=2)
        for i in range(3):
            world.submit(numbered(1, i))
        assert len(world.step().sequences) == 2

    def test_one_long_prompt_takes_no_more_than_the_threshold(self) -> None:
        world = World(blocks=100, tokens=40, long_prefill_token_threshold=10)
        (a,), (b,), (c,) = (world.submit(numbered(n, n)) for n in (30, 12, 7))
        assert counts(world.step()) == {a.seq_id: 10, b.seq_id: 10, c.seq_id: 7}

    def test_prompt_logprobs_bound_the_rows_of_a_step(self) -> None:
        world = World(blocks=1000, tokens=2000)
        (a,), (b,) = (world.submit(numbered(n, n), prompt_logprobs=0) for n in (300, 50))
        (c,) = world.submit(numbered(400, 9))
        plan = world.step()
        assert counts(plan) == {a.seq_id: module.MAX_EXTRA_ROWS}
        assert plan.sequences[0].next_prompt_token == 300_256
        plan = world.step()
        assert counts(plan) == {a.seq_id: 44, b.seq_id: 50, c.seq_id: 400}
        assert plan.sequences[0].next_prompt_token is None


class TestMemory:
    def test_a_prompt_enters_only_when_all_of_it_fits(self) -> None:
        world = World(blocks=5, block_size=4)
        (a,), (b,), (c,) = (world.submit(numbered(n, n)) for n in (12, 9, 1))
        assert counts(world.step()) == {a.seq_id: 12}
        assert list(world.s.waiting) == [b, c], "first come, first served: c waits behind b though it would fit"

    def test_the_watermark_is_left_free_unless_nobody_runs(self) -> None:
        world = World(blocks=10, block_size=4, tokens=100, watermark=0.3)
        (a,), (b,), (c,) = (world.submit(numbered(n, n)) for n in (16, 13, 12))
        assert counts(world.step()) == {a.seq_id: 16}, "b would leave two blocks"
        world.abort(b)
        assert counts(world.step()) == {a.seq_id: 1}, "c needs three, of six that are free, and a takes one more"
        world.abort(c)
        world.run()
        (whole,) = world.submit(numbered(36, 7))
        assert counts(world.step()) == {whole.seq_id: 36}

    def test_one_for_which_there_was_no_room_enters_when_it_can_share(self) -> None:
        world = World(blocks=8, block_size=4, tokens=4)
        world.submit(numbered(16), 9)
        (same,) = world.submit(numbered(20), 3)
        world.step()
        assert same.status is Status.WAITING, "of eight blocks four are free, and it needs five"
        for _ in range(4):
            world.step()
        assert same.status is Status.RUNNING, "it needs one, as all others are in use already"
        assert same.num_cached == 16

    def test_the_latest_arrival_is_preempted_and_comes_first_again(self) -> None:
        world = World(blocks=4, block_size=4, prefix=False)
        (a,), (b,) = (world.submit(numbered(8, i), 9) for i in range(2))
        (waiting,) = world.submit(numbered(4, 2))
        world.step()
        plan = world.step()  # both need a third block and there is none: b gives up its two
        assert counts(plan) == {a.seq_id: 1}
        assert world.s.num_preemptions == 1
        assert list(world.s.waiting) == [b, waiting]
        assert len(b.token_ids) == 9, "what was generated stays"
        while a.status is not Status.GONE:
            world.step()
        plan = world.step()
        assert counts(plan)[b.seq_id] == 9, "prompt and output are computed anew together"
        assert [sample.position for sample in plan.sequences[0].samples] == [9]

    def test_a_sequence_that_is_last_itself_steps_back(self) -> None:
        world = World(blocks=3, block_size=4, prefix=False)
        (a,), (b,) = world.submit(numbered(5), 6), world.submit(numbered(4, 1), 6)
        world.step()
        assert counts(world.step()) == {a.seq_id: 1}  # a has room in its second block; b needs one
        assert list(world.s.waiting) == [b]

    def test_the_victim_is_the_latest_of_the_lowest_class(self) -> None:
        world = World(blocks=6, block_size=4, tokens=64, prefix=False, policy="priority")
        low, high, higher = (world.submit(numbered(8, p), 9, priority=p)[0] for p in (2, 1, 0))
        while not world.s.num_preemptions:
            world.step()
        assert world.s.running == [higher, high]
        assert list(world.s.waiting) == [low]

    def test_what_was_preempted_is_still_in_the_cache(self) -> None:
        world = World(blocks=4, block_size=4)
        (a,), (b,) = (world.submit(numbered(8, i), 5) for i in range(2))
        while not world.s.num_preemptions:
            world.step()
        while a.status is not Status.GONE:
            world.step()
        computed = counts(world.step())[b.seq_id]
        assert computed < len(b.token_ids) - 1, "the first blocks were found again"

    def test_swapped_out_tokens_are_not_computed_again(self) -> None:
        world = World(blocks=4, block_size=4, prefix=False, host_blocks=4)
        (a,), (b,) = (world.submit(numbered(8, i), 9) for i in range(2))
        world.step()
        plan = world.step()
        assert [host for _, host in plan.swap_out] == [0, 1]
        assert b.table.host_blocks == [[0, 1]]
        while a.status is not Status.GONE:
            assert not world.step().swap_in
        plan = world.step()
        assert counts(plan) == {b.seq_id: 1}
        assert [host for _, host in plan.swap_in] == [0, 1]
        assert world.cache.host is not None
        assert world.cache.host.num_free == 4
        world.run()

    def test_without_room_on_the_host_it_is_computed_again(self) -> None:
        world = World(blocks=4, block_size=4, prefix=False, host_blocks=1)
        for i in range(2):
            world.submit(numbered(8, i), 9)
        world.run()
        assert (world.s.num_swapped_out, world.s.num_preemptions) == (0, 1)

    def test_an_aborted_sequence_leaves_nothing_on_the_host(self) -> None:
        world = World(blocks=4, block_size=4, prefix=False, host_blocks=4)
        _, (b,) = (world.submit(numbered(8, i), 9) for i in range(2))
        while not b.table.host_blocks:
            world.step()
        world.abort(b)
        world.run()

    def test_removing_frees_blocks_wherever_the_sequence_is(self) -> None:
        world = World(blocks=100, seqs=1)
        (a,), (b,) = world.submit(numbered(9)), world.submit(numbered(3, 1))
        world.step()
        world.abort(b)
        assert not list(world.s.waiting)
        world.abort(a)
        assert world.cache.pool.num_free == 100
        assert not world.s.has_work

    def test_blocks_out_of_every_window_are_given_back(self) -> None:
        world = World(blocks=8, block_size=4, tokens=8, windows=(6,))
        (a,) = world.submit(numbered(20), 10)
        most = 0
        while world.s.has_work:
            world.step()
            if a.num_output > 1:
                most = max(most, world.cache.pool.num_blocks - world.cache.pool.num_free)
        assert most <= 3, "six tokens back, one more, and the one to come lie in three blocks of four at most"

    def test_what_can_never_fit_is_refused(self) -> None:
        world = World(blocks=4, block_size=4)
        with pytest.raises(RequestError, match=r"16 tokens.* 14 .* 18"):
            world.submit(numbered(14), 4)


class TestForks:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("prefix", [False, True])
    def test_the_prompt_is_computed_once_and_its_blocks_are_shared(self, length: int, prefix: bool) -> None:
        world = World(blocks=40, block_size=4, tokens=64, prefix=prefix)
        sequences = world.submit(numbered(length), 3, n=4)
        assert counts(world.step()) == {0: length}
        plan = world.step()
        assert counts(plan) == dict.fromkeys(range(4), 1), "the first one goes on, the others draw their first token"
        shared = (length - 1) // 4
        assert len(plan.copies) == (3 if (length - 1) % 4 else 0)
        for i in range(shared):
            assert len({s.table.blocks[0][i] for s in sequences if s.status is Status.RUNNING}) == 1
        assert len({s.table.blocks[0][shared] for s in sequences if s.status is Status.RUNNING}) == 4
        world.run()
        assert [world.streamed[i] for i in range(4)] == [true_output(s, numbered(length), 3) for s in sequences]

    def test_they_come_before_those_who_arrived_later(self) -> None:
        world = World(blocks=40, seqs=3)
        siblings = world.submit(numbered(4), n=3)
        (later,) = world.submit(numbered(4, 1))
        world.step()
        assert later.status is Status.RUNNING, "there was nothing else to do for it then"
        world.step()
        assert [s.status for s in siblings] == [Status.RUNNING, Status.RUNNING, Status.WAITING]

    def test_when_the_first_is_aborted_the_next_computes_the_prompt(self) -> None:
        world = World(blocks=40, tokens=4)
        first, second, third, fourth = world.submit(numbered(8), n=4)
        world.step()
        world.abort(second)
        world.abort(first)
        assert list(world.s.waiting) == [third]
        assert fourth.status is Status.HELD
        world.run()
        assert world.finished == [third, fourth]

    def test_prompt_logprobs_are_those_of_the_first(self) -> None:
        world = World(blocks=40, tokens=64)
        sequences = world.submit(numbered(9), n=3, prompt_logprobs=0)
        world.run()
        assert [len(s.prompt_logprobs) for s in sequences] == [9, 9, 9]


class TestQueue:
    def test_it_is_bounded_in_requests(self) -> None:
        world = World(seqs=1, max_waiting_requests=2)
        for i in range(3):
            world.s.check_queue(1)
            world.submit(numbered(1, i), 9)
            if not i:
                world.step()
        with pytest.raises(OverloadedError, match=r"2 requests wait .* limit is 2; try again in \d+ s") as error:
            world.s.check_queue(1)
        assert error.value.retry_after >= 1
        assert not error.value.has_waited

    def test_it_is_bounded_in_tokens_of_prompts_that_have_not_begun(self) -> None:
        world = World(blocks=40, seqs=1, tokens=64, max_waiting_tokens=30)
        world.submit(numbered(25), 9)
        world.step()
        world.submit(numbered(20, 1), 9)
        world.s.check_queue(10)
        with pytest.raises(OverloadedError, match="20 prompt tokens wait"):
            world.s.check_queue(11)
        world.run()
        world.s.check_queue(1000)  # an empty queue takes any

    def test_a_sequence_that_does_not_begin_in_time_is_ended(self) -> None:
        world = World(seqs=1, step_seconds=lambda plan: 1.0)
        (a,) = world.submit(numbered(1), 9, queue_timeout=0.5)
        world.step()
        (b,) = world.submit(numbered(1, 1), queue_timeout=3)
        (c,) = world.submit(numbered(1, 2), queue_timeout=100)
        world.run()
        assert world.ended == [b]
        assert world.finished == [a, c]

    def test_a_sequence_that_does_not_finish_in_time_is_ended(self) -> None:
        world = World(blocks=40, seqs=4, step_seconds=lambda plan: 1.0)
        world.submit(numbered(1), 20, timeout=5, n=2)
        (c,) = world.submit(numbered(1, 2), 20)
        world.run()
        assert len(world.ended) == 2
        assert world.finished == [c]
        assert len(world.streamed[0]) == 5

    def test_deadlines_far_away_do_not_pile_up(self) -> None:
        world = World(seqs=4)
        for i in range(500):
            world.submit(numbered(1, i), 1, n=2, timeout=1e9, queue_timeout=1e9)
            world.step()
            world.step()
        assert len(world.finished) == 1000
        assert max(len(world.s._deadlines), len(world.s._queue_deadlines)) < 100

    def test_a_request_that_does_not_begin_in_time_is_ended_whole(self) -> None:
        """In the step in which there is room at last: none of its sequences takes it."""
        world = World(seqs=1, step_seconds=lambda plan: 1.0)
        world.submit(numbered(1), 2)
        world.submit(numbered(1, 1), n=3, queue_timeout=2)
        world.step()
        world.step()
        assert len(world.finished) == 1
        assert not world.step().sequences
        assert len(world.ended) == 3

    def test_one_that_is_not_ready_holds_its_place_and_its_time_runs(self) -> None:
        world = World(seqs=1, max_waiting_requests=2, step_seconds=lambda plan: 1.0)
        (first,) = world.submit(numbered(1), 1, is_ready=False)
        (second,) = world.submit(numbered(1, 1), 2)
        (third,) = world.submit(numbered(1, 2), 2, is_ready=False, queue_timeout=2)
        with pytest.raises(OverloadedError):
            world.s.check_queue(1)
        world.step()
        world.release()
        (last,) = world.submit(numbered(1, 3), 1)
        while world.s.has_work:
            world.step()
        assert world.finished == [second, first, last], "by arrival, among those who were ready"
        assert world.ended == [third]

    def test_one_that_was_preempted_does_not_expire_in_the_queue(self) -> None:
        world = World(blocks=4, block_size=4, prefix=False, step_seconds=lambda plan: 1.0)
        for i in range(2):
            world.submit(numbered(8, i), 9, queue_timeout=2)
        world.run()
        assert world.s.num_preemptions
        assert len(world.finished) == 2
