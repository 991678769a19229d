"""The step loop: requests in, steps through scheduler and worker, tokens out."""

import logging
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.request import FinishReason, Request, TokenDelta, check_request
from headrace.engine.stats import EngineStats, ModelInfo
from headrace.errors import HeadraceError, OverloadedError, RequestError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.open import open_checkpoint
from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.manager import CacheManager
from headrace.kvcache.prefix_index import PrefixIndex
from headrace.sampling.params import SampledToken
from headrace.sampling.words import history_of
from headrace.scheduler.policies import FairShare, FirstComeFirstServed, Priority
from headrace.scheduler.scheduler import Limits, Scheduler
from headrace.scheduler.sequence import Sequence, Status
from headrace.scheduler.static import StaticScheduler
from headrace.speculative.lengths import DraftLengths
from headrace.speculative.ngram import NgramProposer
from headrace.speculative.proposer import Proposer
from headrace.speculative.speculation import Speculation
from headrace.speculative.suffix import SuffixProposer
from headrace.worker.step import PADDING
from headrace.worker.worker import Worker

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from headrace.structured.grammars import Grammars

logger = logging.getLogger(__name__)

IDLE = 0.002  # seconds to sleep when there is work, but none that may begin yet


@dataclass(slots=True)
class _Stream:
    """A sequence that is under way, and what only the engine knows of it."""

    request_id: str
    sequence: Sequence
    detokenizer: Detokenizer


class Engine:
    """Loads a model and runs requests, one step at a call. Not thread-safe: one thread owns it.

    tokenizer: the model's. max_model_len: prompt and output of a sequence hold at most so many tokens.
    vocab_size: token ids are below it. eos_ids: tokens with which the model ends its output.
    default_sampling: the sampling settings in the model's generation_config.json.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        checkpoint = open_checkpoint(config.model, config.revision)
        self.tokenizer = checkpoint.tokenizer()
        settings = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        self.default_sampling = {
            k: checkpoint.generation_config[k] for k in settings if checkpoint.generation_config.get(k) is not None
        }
        self.worker = Worker(config, checkpoint)
        self._scheme = _scheme(config, checkpoint)
        self.max_model_len = self.worker.max_model_len
        self.vocab_size = self.worker.decoder.config.vocab_size
        # A tokenizer may know more tokens than the model has rows for; what is never drawn ends nothing.
        ends: list[int] = checkpoint.generation_config.get("eos_token_id", [])
        self.eos_ids = tuple(token for token in ends if token < self.vocab_size)
        self.scheduler = self._scheduler()
        self.num_steps = self.num_finished = self.num_aborted = 0
        self.num_expired_waiting = self.num_expired_running = 0
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self._random = random.Random(config.seed)
        self._streams: dict[int, _Stream] = {}  # by seq_id
        self._requests: dict[str, list[int]] = {}  # the unfinished seq_ids of each request
        self._next_seq_id = 0
        self._compiling: list[tuple[Future[LLMatcher], list[Sequence]]] = []  # whose grammars are not ready yet

    def _scheduler(self) -> Scheduler:
        config = self.config
        layout = self.worker.layout
        pool = BlockPool(self.worker.num_blocks, layout.block_size)
        swap = self.worker.num_host_blocks > 0 and config.preemption_mode != "recompute"
        cache = CacheManager(
            pool,
            layout,
            index=PrefixIndex(pool, layout.windows)
            if config.enable_prefix_caching and not config.is_contiguous
            else None,
            host=BlockPool(self.worker.num_host_blocks, layout.block_size) if swap else None,
        )
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            target_itl=self._target_itl(),
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        if config.scheduling_policy == "static":
            return StaticScheduler(cache, limits, timeout=config.static_batch_timeout_ms / 1000)
        policies: dict[str, Callable[[], FirstComeFirstServed]] = {
            "fcfs": FirstComeFirstServed,
            "priority": lambda: Priority(config.priority_ageing),
            "fair": FairShare,
        }
        policy = policies[config.scheduling_policy]()
        return Scheduler(cache, limits, policy=policy, swap=swap, speculation=self._speculation())

    def _speculation(self) -> Speculation | None:
        config = self.config.speculation
        if config is None:
            return None
        proposer: Proposer
        if self.worker.proposer is not None:
            proposer = self.worker.proposer
        elif config.method == "suffix":
            proposer = SuffixProposer(config.prompt_lookup_min)
        else:
            proposer = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
        return Speculation(proposer, config.num_speculative_tokens, DraftLengths() if config.adaptive else None)

    @cached_property
    def _grammars(self) -> "Grammars":
        from headrace.structured.grammars import Grammars  # most requests need no grammar

        return Grammars(self.tokenizer, self.vocab_size, self.eos_ids)

    def _target_itl(self) -> float | None:
        """As `Limits` has it. Devices that compute thousands of prompt tokens in a moment have no limit by default."""
        if self.config.target_itl_ms is not None:
            return self.config.target_itl_ms / 1000
        return None if self.worker.ops.device == "cpu" else 0.0

    @property
    def info(self) -> ModelInfo:
        worker, config = self.worker, self.config
        return ModelInfo(
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            default_sampling=self.default_sampling,
            cache_tokens=int(worker.num_blocks / worker.layout.blocks_for(self.max_model_len) * self.max_model_len),
            cache_bytes=worker.cache_bytes,
            architecture=worker.decoder.config.architecture,
            scheme=self._scheme,
            dtype="float32" if config.dtype == "auto" else config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            kernels=worker.ops.description,
            threads=worker.threads,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        s = self.scheduler
        pool, index = s.cache.pool, s.cache.index
        return EngineStats(
            running=len(s.running),
            waiting=s.num_waiting,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            num_preemptions=s.num_preemptions,
            num_steps=self.num_steps,
            kept_blocks=pool.num_kept,
            num_swaps=s.num_swapped_out,
            num_copied_blocks=s.num_copied_blocks,
            waiting_tokens=s.waiting_tokens,
            num_refused_requests=s.num_refused["requests"],
            num_refused_tokens=s.num_refused["prompt tokens"],
            num_expired_waiting=self.num_expired_waiting,
            num_expired_running=self.num_expired_running,
            num_aborted=self.num_aborted,
            num_finished=self.num_finished,
            prefix_queried_tokens=0 if index is None else index.num_queried_tokens,
            prefix_hit_tokens=0 if index is None else index.num_hit_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            **({} if s.speculation is None else s.speculation.stats()),
        )

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that this model cannot serve. Any thread may call it."""
        check_request(request, self.max_model_len, self.vocab_size)
        self.scheduler.check(len(request.prompt_token_ids), self._max_length(request))

    def check_grammar(self, request: Request) -> None:
        """Raises RequestError for a grammar that cannot be enforced. Waits for it; any thread may call it."""
        if request.params.structured_outputs is not None:
            self._grammars.check(request.params.structured_outputs)

    def check_room(self, request: Request) -> None:
        """Raises OverloadedError if the queue is too full for a request."""
        self.scheduler.check_queue(len(request.prompt_token_ids), request.params.n)

    def has_room(self, request: Request) -> bool:
        """Whether the queue has room for a request now."""
        return self.scheduler.has_room(len(request.prompt_token_ids), request.params.n)

    def _max_length(self, request: Request) -> int:
        room = self.max_model_len - len(request.prompt_token_ids)
        most = request.params.max_tokens
        return len(request.prompt_token_ids) + (room if most is None else min(most, room))

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises RequestError as `check` does, or if one with the same id is unfinished, and OverloadedError. A grammar is
        compiled meanwhile; what `check_grammar` would have refused ends with an error.
        """
        self.check(request)
        self.check_room(request)
        if request.request_id in self._requests:
            raise RequestError(f"there is an unfinished request with the id {request.request_id!r}", "request_id")
        params, prompt = request.params, request.prompt_token_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        ends = () if params.ignore_eos else self.eos_ids
        now = self.scheduler.clock()
        queue_deadline = _earliest(now, request.queue_timeout, self.config.queue_timeout)
        deadline = _earliest(now, request.timeout, self.config.request_timeout)
        ids = list(range(self._next_seq_id, self._next_seq_id + params.n))
        self._next_seq_id += params.n
        self._requests[request.request_id] = ids
        sequences = [
            Sequence(
                seq_id=seq_id,
                index=index,
                token_ids=list(prompt),
                num_prompt=len(prompt),
                params=params,
                seed=seed,
                max_length=self._max_length(request),
                stop_ids=(*ends, *(params.stop_token_ids or ())),
                priority=request.priority,
                tenant=request.tenant,
                salt=request.cache_salt,
                queue_deadline=queue_deadline,
                deadline=deadline,
                history=history_of(params, self.tokenizer, len(prompt)) if params.has_penalties else None,
            )
            for index, seq_id in enumerate(ids)
        ]
        for sequence in sequences:
            detokenizer = Detokenizer(self.tokenizer, prompt, params)
            self._streams[sequence.seq_id] = _Stream(request.request_id, sequence, detokenizer)
        self.scheduler.add(sequences[0], sequences[1:], is_ready=params.structured_outputs is None)
        if params.structured_outputs is not None:
            self._compiling.append((self._grammars.compile(params.structured_outputs), sequences))

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Ends a request and frees its memory; one that has finished already is none of its business.

        Returns the last delta of each sequence that was under way.
        """
        deltas = self._end_all(request_id)
        self.num_aborted += len(deltas)
        return deltas

    def step(self) -> list[TokenDelta]:
        """Runs one step. Returns what is new, for each sequence that got a token."""
        begun = self.scheduler.clock()
        deltas = self._take_compiled() + self._expire()
        plan = self.scheduler.schedule()
        if not plan.sequences:
            if self.has_work:
                time.sleep(IDLE)
            return deltas
        result = self.worker.execute(plan)
        self.num_steps += 1
        for step in plan.sequences:
            if step.seq_id == PADDING:
                continue
            stream = self._streams[step.seq_id]
            sequence = stream.sequence
            if step.prompt_logprobs is not None:
                if step.start == 0:
                    sequence.prompt_logprobs.append(None)  # nothing comes before the first token
                sequence.prompt_logprobs += result.prompt_logprobs.get(step.seq_id, [])
            drawn, count = result.sampled.get(step.seq_id, []), len(step.token_ids)
            if draft := step.draft:
                accepted = len(drawn) - 1
                self.scheduler.accept(sequence, draft, accepted)
                count -= len(draft) - accepted
            self.scheduler.advance(sequence, count)
            if drawn:
                deltas.append(self._commit(stream, drawn, len(draft)))
        self.scheduler.record(self.scheduler.clock() - begun)
        return deltas

    def _take_compiled(self) -> list[TokenDelta]:
        """Queues the sequences whose grammars are ready now. Returns the last deltas of those whose have failed."""
        compiling, self._compiling = self._compiling, []
        deltas = []
        for grammar, sequences in compiling:
            if sequences[0].seq_id not in self._streams:  # aborted
                continue
            if not grammar.done():
                self._compiling.append((grammar, sequences))
            elif isinstance(error := grammar.exception(), HeadraceError):
                last = self._end_all(self._streams[sequences[0].seq_id].request_id)
                for delta in last:
                    delta.error = error
                deltas += last
            else:
                from headrace.structured.constraint import Constraint

                for sequence in sequences:
                    sequence.constraint = Constraint(grammar.result())
                self.scheduler.release(sequences[0], sequences[1:])
        return deltas

    def _expire(self) -> list[TokenDelta]:
        """Ends the sequences whose time is over. One that waited in vain takes its whole request with it."""
        deltas = []
        for sequence, waited_in_vain in self.scheduler.expire():
            stream = self._streams.get(sequence.seq_id)
            if stream is None:  # gone with the first of its request
                continue
            if waited_in_vain:
                last = self._end_all(stream.request_id)
                self.num_expired_waiting += len(last)
                waited = self.scheduler.clock() - sequence.arrival
                retry = self.scheduler.retry_after()
                message = (
                    f"the request has waited {waited:.1f} s for its turn, and its time is over; try again in {retry} s"
                )
                for delta in last:
                    delta.error = OverloadedError(message, retry, has_waited=True)
            else:
                last = [self._end(stream)]
                self.num_expired_running += 1
            for delta in last:
                delta.stop_reason = "timeout"
            deltas += last
        return deltas

    def _end_all(self, request_id: str) -> list[TokenDelta]:
        return [self._end(self._streams[seq_id]) for seq_id in list(self._requests.get(request_id, ()))]

    def _end(self, stream: _Stream) -> TokenDelta:
        """The last delta of a sequence that ends before it would."""
        text = stream.detokenizer.finish()
        self._forget(stream)
        return TokenDelta(stream.request_id, stream.sequence.index, text, [], finish_reason="abort")

    def _commit(self, stream: _Stream, drawn: list[SampledToken], num_drafted: int) -> TokenDelta:
        """Adds drawn tokens to their sequence, and ends the sequence with the one that is the last.

        All but the last of `drawn` come from a draft, of `num_drafted` tokens, and have been accepted already.
        """
        sequence, params = stream.sequence, stream.sequence.params
        first = sequence.num_output == 0
        num_accepted = len(drawn) - 1
        length = len(sequence.token_ids) - num_accepted
        sequence.token_ids.append(drawn[-1].token_id)
        if first and sequence.index == 0:
            self.num_prompt_tokens += sequence.num_prompt
        text = ""
        for count, sampled in enumerate(drawn, 1):
            piece, reason, cause = self._text(stream, sampled.token_id, length + count)
            text += piece
            if reason is not None:
                drawn = drawn[:count]
                break
        self.num_generated_tokens += len(drawn)
        error = None if sequence.constraint is None else sequence.constraint.error
        if reason is not None:
            self._forget(stream)
            self.num_finished += error is None
        return TokenDelta(
            stream.request_id,
            sequence.index,
            text,
            [sampled.token_id for sampled in drawn],
            logprobs=[s.logprob for s in drawn if s.logprob is not None] if params.logprobs is not None else None,
            prompt_logprobs=list(sequence.prompt_logprobs) if first and params.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_reason=cause,
            cached_tokens=sequence.num_cached if first else None,
            queue_time=sequence.begun - sequence.arrival if first else None,
            error=error,
            num_drafted=num_drafted,
            num_accepted=min(num_accepted, len(drawn)),
        )

    def _text(self, stream: _Stream, token: int, length: int) -> tuple[str, FinishReason | None, int | str | None]:
        """The text that a token brings to a sequence of `length` tokens with it, and whether and why it ends that."""
        sequence, params, detokenizer = stream.sequence, stream.sequence.params, stream.detokenizer
        text = ""
        reason: FinishReason | None = None
        cause: int | str | None = None
        if token in sequence.stop_ids:
            reason = "stop"
            if token in (params.stop_token_ids or ()):
                cause = token
                text = detokenizer.append(token) if params.include_stop_str_in_output else ""
        else:
            text = detokenizer.append(token)
            reason = "length" if length >= sequence.max_length else None
            if sequence.constraint is not None:
                sequence.constraint.accept(token)
                if sequence.constraint.error is not None:
                    reason = "abort"
                elif sequence.constraint.finished:
                    reason = "stop"
        if reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped_by is not None:  # by this token, or in what was held back until the end
            reason, cause = "stop", detokenizer.stopped_by
        return text, reason, cause

    def _forget(self, stream: _Stream) -> None:
        """Takes a sequence that has ended out of everything."""
        seq_id = stream.sequence.seq_id
        if stream.sequence.status is not Status.GONE:
            self.scheduler.remove(stream.sequence)
        del self._streams[seq_id]
        unfinished = self._requests[stream.request_id]
        unfinished.remove(seq_id)
        if not unfinished:
            del self._requests[stream.request_id]


def _scheme(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """How the weights are coded, as the first layer's smallest matrix shows it."""
    matrices = {name: math.prod(shape) for name, shape in checkpoint.shapes().items() if len(shape) == 2}
    first = {name: size for name, size in matrices.items() if ".layers.0." in name} or matrices
    stored = checkpoint.read(min(first, key=lambda name: first[name])).coding if first else ""
    return stored if config.quantization is None else f"{stored}, coded as {config.quantization}"


def _earliest(now: float, *timeouts: float | None) -> float | None:
    """When the first of some times is over; None where there is none."""
    return min((now + seconds for seconds in timeouts if seconds is not None), default=None)
