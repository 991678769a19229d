"""A world in which the scheduler runs without a model: memory that knows what it holds, and rules that it checks.

The world's memory holds, for every slot, the identity of the whole beginning that ends there. A step reads the slots of
the tokens before it and compares them with what they must be, and draws each token from what it has read: a block that
was lost, reused, copied or swapped wrongly is seen at once, and if it were not, the outputs would be wrong.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import NO_BLOCK, Node, PrefixIndex
from headrace.sampling.params import SamplingParams, TokenLogprob
from headrace.scheduler.policies import FairShare, FirstComeFirstServed, Priority
from headrace.scheduler.scheduler import MAX_EXTRA_ROWS, Limits, Scheduler
from headrace.scheduler.sequence import Sequence, Status
from headrace.scheduler.static import StaticScheduler
from headrace.speculative.proposer import DraftRequest
from headrace.speculative.speculation import Speculation
from headrace.worker.cache_layout import CacheLayout
from headrace.worker.step import PADDING, StepPlan

LONGEST = 120  # sequences, in tokens, however many a pool could hold
TOKENS = 3  # so few that beginnings are often equal
Memory = dict[int, tuple[int, int]]  # slot to the group of layers that wrote there, and the identity
NOTHING = (-1, 0)
POLICIES = {"fcfs": FirstComeFirstServed, "priority": lambda: Priority(5.0), "fair": FairShare}


def beginnings(salt: str, token_ids: list[int]) -> list[int]:
    """For each token, the identity of all up to it."""
    identity, out = zlib.crc32(salt.encode()), []
    for token in token_ids:
        identity = hash((identity, token))
        out.append(identity)
    return out


def drawn(sequence: Sequence, identity: int) -> int:
    """The token that follows a beginning in a sequence."""
    return hash((identity, sequence.seed, sequence.index)) % TOKENS


def true_output(sequence: Sequence, prompt: list[int], count: int) -> list[int]:
    """What a sequence must have generated."""
    ids = list(prompt)
    identity = beginnings(sequence.salt, ids)[-1]
    for _ in range(count):
        ids.append(drawn(sequence, identity))
        identity = hash((identity, ids[-1]))
    return ids[len(prompt) :]


class Guesser:
    """Drafts of which about every third token is wrong."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            sequence = self.world.known[request.seq_id]
            for table in request.block_tables:
                assert len(table) * self.world.cache.pool.block_size >= len(request.token_ids) + request.most
            truth = true_output(sequence, request.token_ids, request.most)
            noise = hash((request.seq_id, len(request.token_ids)))
            length = noise % (request.most + 1)
            drafts.append([t if hash((noise, i)) % 3 else t ^ 1 for i, t in enumerate(truth[:length])])
        return drafts

    def forget(self, seq_id: int) -> None:
        pass


class World:
    """Runs a scheduler, checking everything after each step.

    now: its clock. streamed: by sequence, what has been sent to the client. finished, ended: sequences.
    """

    def __init__(
        self,
        *,
        blocks: int = 20,
        block_size: int = 4,
        seqs: int = 4,
        tokens: int = 16,
        policy: str = "fcfs",
        prefix: bool = True,
        host_blocks: int = 0,
        windows: tuple[int | None, ...] = (None,),
        draft: int = 0,
        step_seconds: Callable[[StepPlan], float] = lambda plan: 0.01,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        pool = BlockPool(blocks, block_size)
        host = BlockPool(host_blocks, block_size) if host_blocks else None
        layout = CacheLayout.of(windows, block_size, tokens)  # as of a model with a layer for each window
        self.cache = CacheManager(pool, layout, index=PrefixIndex(pool, layout.windows) if prefix else None, host=host)
        bounds = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, **limits)
        if policy == "static":
            self.s: Scheduler = StaticScheduler(self.cache, bounds, timeout=0.5, clock=lambda: self.now)
        else:
            self.s = Scheduler(
                self.cache,
                bounds,
                policy=POLICIES[policy](),
                clock=lambda: self.now,
                swap=host is not None,
                speculation=Speculation(Guesser(self), draft) if draft else None,
            )
        self.step_seconds = step_seconds
        self.memory: Memory = {}
        self.host_memory: Memory = {}
        self.known: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.streamed: dict[int, list[int]] = {}
        self.unready: list[list[Sequence]] = []  # requests that are held
        self.finished: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.num_steps = 0
        self._next_id = 0

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens."""
        if isinstance(self.s, StaticScheduler):  # each has one block
            return self.cache.pool.block_size
        return self.cache.layout.longest(self.cache.pool.num_blocks, LONGEST)

    def submit(
        self, prompt: list[int], output: int = 4, *, n: int = 1, is_ready: bool = True, **fields: Any
    ) -> list[Sequence]:
        """Queues a request of n sequences. `queue_timeout` and `timeout` are from now."""
        params = SamplingParams(n=n, max_tokens=output, prompt_logprobs=fields.pop("prompt_logprobs", None))
        for name in ("queue_timeout", "timeout"):
            seconds = fields.pop(name, None)
            if seconds is not None:
                fields["queue_deadline" if name == "queue_timeout" else "deadline"] = self.now + seconds
        sequences = []
        for index in range(n):
            sequence = Sequence(
                seq_id=self._next_id,
                index=index,
                token_ids=list(prompt),
                num_prompt=len(prompt),
                params=params,
                seed=self._next_id - index,
                max_length=len(prompt) + output,
                **fields,
            )
            self._next_id += 1
            self.known[sequence.seq_id] = sequence
            self.prompts[sequence.seq_id] = list(prompt)
            self.streamed[sequence.seq_id] = []
            sequences.append(sequence)
        self.s.check(len(prompt), len(prompt) + output)
        self.s.add(sequences[0], sequences[1:], is_ready=is_ready)
        if not is_ready:
            self.unready.append(sequences)
        return sequences

    def release(self) -> None:
        """Releases the request that has been held longest. If its first sequence is gone, all are aborted, as they are
        in the engine."""
        first, *siblings = self.unready.pop(0)
        if first.status is Status.HELD:
            self.s.release(first, siblings)
            return
        for sequence in siblings:
            if sequence.seq_id in self.known:
                self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        self.s.remove(sequence)
        self._forget(sequence, self.ended)

    def step(self) -> StepPlan:
        before = {s.seq_id: (len(s.token_ids), s.num_computed) for s in self.s.running}
        first = self.s.running[0] if self.s.running else None
        waiting = [s.rank for s in self.s.waiting] if not isinstance(self.s.waiting, FairShare) else []
        was_running = set(before)
        for sequence, waited_in_vain in self.s.expire():
            assert sequence.status is Status.GONE
            if sequence.seq_id in self.known:
                self._forget(sequence, self.ended)
            for sibling in list(self.known.values()):
                if waited_in_vain and sibling.seed == sequence.seed:  # seeds are by request
                    assert sibling.num_cached is None or isinstance(self.s, StaticScheduler)
                    self.abort(sibling)
        plan = self.s.schedule()
        self.num_steps += 1
        for sequence in self.known.values():
            assert sequence.deadline is None or sequence.deadline > self.now, "a deadline has passed"
            late = sequence.queue_deadline is not None and sequence.queue_deadline <= self.now
            assert not late or sequence.num_cached is not None or sequence.index, "waits beyond its deadline"
        self._check_limits(plan)
        entered = sorted(s.rank for s in self.s.running if s.seq_id not in was_running and s.rank in waiting)
        gone = {s.rank for s in self.ended}
        assert entered == [r for r in waiting if r not in gone][: len(entered)], "somebody has jumped the queue"
        self._execute(plan)
        self.now += self.step_seconds(plan)
        self.s.record(self.step_seconds(plan))
        if first is not None and first.seq_id in self.known and not isinstance(self.s, StaticScheduler):
            after = len(first.token_ids), first.num_computed
            # With swapping, one that was brought back may have to compute nothing but its next token.
            assert after > before[first.seq_id], "the first one makes progress in every step"
        self.check_blocks()
        return plan

    def run(self, most: int = 5000) -> None:
        """Until everyone has finished."""
        while self.unready:
            self.release()
        for _ in range(most):
            if not self.s.has_work:
                break
            self.step()
        assert not self.s.has_work, "somebody never finishes"
        assert not self.known
        pool = self.cache.pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        assert self.cache.host is None or self.cache.host.num_free == self.cache.host.num_blocks

    def _check_limits(self, plan: StepPlan) -> None:
        limits = self.s.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(self.s.running) <= limits.max_num_seqs
        assert len({s.seq_id for s in plan.sequences if s.seq_id != PADDING}) == sum(
            s.seq_id != PADDING for s in plan.sequences
        )
        rows = sum(len(s.token_ids) for s in plan.sequences if s.prompt_logprobs is not None)
        rows += sum(len(s.draft) for s in plan.sequences)
        assert rows <= MAX_EXTRA_ROWS
        ranks = [s.rank for s in self.s.running]
        assert ranks == sorted(ranks)
        waiting = sum(s.status is Status.WAITING for s in self.known.values())
        assert len(self.s.waiting) == waiting == len(list(self.s.waiting))
        assert self.s.num_waiting + len(self.s.running) == len(self.known)

    def _execute(self, plan: StepPlan) -> None:
        size = self.cache.pool.block_size

        def copy(source: Memory, a: int, target: Memory, b: int) -> None:
            for i in range(size):
                target[b * size + i] = source.get(a * size + i, NOTHING)

        for device, host in plan.swap_out:
            copy(self.memory, device, self.host_memory, host)
        for device, host in plan.swap_in:
            copy(self.host_memory, host, self.memory, device)
        for a, b in plan.copies:
            copy(self.memory, a, self.memory, b)
        written: set[int] = set()
        for step in plan.sequences:
            sequence = self.known.get(step.seq_id)
            ids = sequence.token_ids + step.draft if sequence is not None else [0] * step.start + step.token_ids
            truth = beginnings(sequence.salt if sequence is not None else "padding", ids)
            end = step.start + len(step.token_ids)
            for group, table in enumerate(step.block_tables):
                assert len(table) * size >= end
                for p in range(step.start, end):
                    slot = table[p // size] * size + p % size
                    assert slot not in written, "two tokens in one slot"
                    written.add(slot)
                    self.memory[slot] = (group, truth[p])
            if sequence is not None:
                assert step.start == sequence.num_computed
                assert step.token_ids == ids[step.start : end]
                assert len(step.samples) == (1 + len(step.draft) if end == len(ids) else 0)
                assert not step.draft or len(ids) < sequence.max_length, "a draft goes on past the end"
        tokens: dict[int, list[int]] = {}
        for step in plan.sequences:  # all write before any reads, as in a layer of a model
            if step.seq_id == PADDING:
                continue
            sequence = self.known[step.seq_id]
            truth = beginnings(sequence.salt, sequence.token_ids + step.draft)
            end = step.start + len(step.token_ids)
            for group, (table, window) in enumerate(zip(step.block_tables, self.cache.windows, strict=True)):
                for p in range(0 if window is None else max(0, step.start - window + 1), end):
                    found = self.memory.get(table[p // size] * size + p % size, NOTHING)
                    assert found == (group, truth[p]), "a token reads what is not its own"
            if step.samples:
                assert [s.position for s in step.samples] == [
                    len(sequence.token_ids) + i for i in range(1 + len(step.draft))
                ]
                said = tokens[step.seq_id] = [drawn(sequence, truth[end - len(step.samples)])]
                for i, guess in enumerate(step.draft):
                    if guess != said[-1]:
                        break
                    said.append(drawn(sequence, truth[end - len(step.draft) + i]))
        for step in plan.sequences:
            if step.seq_id == PADDING:
                continue
            sequence = self.known[step.seq_id]
            if step.prompt_logprobs is not None:
                if step.start == 0:
                    sequence.prompt_logprobs.append(None)
                followers = step.token_ids[1:] + ([] if step.next_prompt_token is None else [step.next_prompt_token])
                sequence.prompt_logprobs += [TokenLogprob(t, -1.0) for t in followers]
            said = tokens.get(step.seq_id, [])
            rejected = len(step.draft) - (len(said) - 1) if step.draft else 0
            if step.draft:
                self.s.accept(sequence, step.draft, len(said) - 1)
            self.s.advance(sequence, len(step.token_ids) - rejected)
            if said:
                self._commit(sequence, said)

    def _commit(self, sequence: Sequence, said: list[int]) -> None:
        prompt = self.prompts[sequence.seq_id]
        streamed = self.streamed[sequence.seq_id]
        streamed += said[:-1]
        assert sequence.token_ids == prompt + streamed, "what was streamed has changed"
        if sequence.params.prompt_logprobs is not None:
            assert [e.token_id for e in sequence.prompt_logprobs if e is not None] == prompt[1:]
        sequence.token_ids.append(said[-1])
        streamed.append(said[-1])
        if len(sequence.token_ids) == sequence.max_length:
            assert streamed == true_output(sequence, prompt, len(streamed)), "a wrong output"
            self.s.remove(sequence)
            self._forget(sequence, self.finished)

    def _forget(self, sequence: Sequence, where: list[Sequence]) -> None:
        del self.known[sequence.seq_id]
        where.append(sequence)

    def check_blocks(self) -> None:
        """Every block has as many holders as tables name it; nothing is lost."""
        pool = self.cache.pool
        members = [m.sequence for m in self.s._batch] if isinstance(self.s, StaticScheduler) else self.s.running
        named = Counter(
            b
            for s in members
            for blocks, dropped in zip(s.table.blocks, s.table.num_dropped, strict=True)
            for b in blocks[dropped:]
        )
        for block in range(pool.num_blocks):
            assert pool.holders(block) == named[block], f"block {block} has the wrong number of holders"
        assert pool.num_free == pool.num_blocks - len(named), "blocks are lost"
        if self.cache.index is not None:
            self._check_index(self.cache.index)
        away = Counter(b for s in self.known.values() for blocks in s.table.host_blocks for b in blocks)
        assert not away or max(away.values()) == 1
        assert self.cache.host is None or self.cache.host.num_free == self.cache.host.num_blocks - len(away)
        for sequence in self.known.values():
            if sequence.status is not Status.RUNNING:
                assert not sequence.table.blocks
                assert sequence.num_computed == 0
        used = sum(s.num_prompt for s in self.s.waiting if s.num_cached is None and s.leader is None)
        assert self.s.waiting_tokens == used

    @staticmethod
    def _check_index(index: PrefixIndex) -> None:
        """Each block is known for what it is, and no node is kept that leads nowhere."""
        nodes = index._nodes.values()
        children = Counter(node.parent.number for node in nodes if isinstance(node.parent, Node))
        named = {b: (node, group) for node in nodes for group, b in enumerate(node.blocks) if b != NO_BLOCK}
        assert len(named) == sum(b != NO_BLOCK for node in nodes for b in node.blocks), "two nodes name a block"
        assert all(index._owners[block] == owner for block, owner in named.items())
        for node in nodes:
            assert node.num_children == children[node.number]
            assert children[node.number] or any(b != NO_BLOCK for b in node.blocks), "a node leads nowhere"


def random_world(rng: random.Random, **settings: Any) -> World:
    """A small world with settings at random, so that all kinds of shortage come up."""
    block_size = rng.choice([1, 2, 3, 4, 8])
    windows = rng.choice([(None,), (None,), (1,), (5,), (9,), (5, None), (9, 9, None), (None, 2, 6), (3, 3, 7)])
    chosen: dict[str, Any] = {
        "blocks": rng.randint(4, 24) * len(windows),
        "block_size": block_size,
        "seqs": (seqs := rng.randint(1, 6)),
        "tokens": rng.randint(seqs, 40),
        "policy": rng.choice(["fcfs", "priority", "fair"]),
        "prefix": rng.random() < 0.8,
        "host_blocks": rng.choice([0, 0, 3, 30]),
        "windows": windows,
        "watermark": rng.choice([0.0, 0.01, 0.1]),
        "long_prefill_token_threshold": rng.choice([0, 0, 3]),
        "target_itl": rng.choice([0.0, None, 0.02]),
        "draft": rng.choice([0, 0, 1, 4]),
    }
    return World(**(chosen | settings))


def random_action(world: World, rng: random.Random) -> None:
    """A submission, an abort, or (most often) a step."""
    dice = rng.random()
    if dice < 0.25 and len(world.known) < 30:
        room = world.capacity - 1
        prompt = [rng.randrange(TOKENS) for _ in range(min(rng.choice([1, 3, 8, 20, 60]), room))]
        if rng.random() < 0.7:  # mostly the same beginnings, so that there is something to share
            prompt = [0] * (len(prompt) // 2) + prompt[len(prompt) // 2 :]
        world.submit(
            prompt,
            rng.randint(1, max(1, min(30, world.capacity - len(prompt)))),
            n=rng.choice([1, 1, 1, 2, 4]),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("abc"),
            salt=rng.choice(["", "", "s"]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            is_ready=rng.random() < 0.9,
            queue_timeout=rng.choice([None, None, None, 0.05, 1.0]),
            timeout=rng.choice([None, None, None, 0.5]),
        )
    elif dice < 0.27 and world.unready:
        world.release()
    elif dice < 0.3 and world.known:
        world.abort(world.known[rng.choice(sorted(world.known))])
    else:
        world.step()
