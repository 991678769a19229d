"""The step loop: requests in, steps through scheduler and worker, tokens out."""

import logging
import random
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.request import FinishReason, Request, TokenDelta
from headrace.errors import RequestError
from headrace.formats.open import open_checkpoint
from headrace.kvcache.block_pool import BlockPool
from headrace.sampling.params import SampledToken
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.sequence import Sequence
from headrace.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """A sequence that is under way, and what only the engine knows of it."""

    request_id: str
    sequence: Sequence
    detokenizer: Detokenizer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands: sequences running and waiting, KV blocks, and counts since the start."""

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    num_preemptions: int
    num_steps: int


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
        settings = ("temperature", "top_k", "top_p", "min_p")
        self.default_sampling = {
            k: checkpoint.generation_config[k] for k in settings if checkpoint.generation_config.get(k) is not None
        }
        self.worker = Worker(config, checkpoint)
        self.max_model_len = self.worker.max_model_len
        self.vocab_size = self.worker.decoder.config.vocab_size
        # A tokenizer may know more tokens than the model has rows for; what is never drawn ends nothing.
        ends: list[int] = checkpoint.generation_config.get("eos_token_id", [])
        self.eos_ids = tuple(token for token in ends if token < self.vocab_size)
        pool = BlockPool(self.worker.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            pool, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.num_steps = 0
        self._random = random.Random(config.seed)
        self._streams: dict[int, _Stream] = {}  # by seq_id
        self._requests: dict[str, list[int]] = {}  # the unfinished seq_ids of each request
        self._next_seq_id = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        s = self.scheduler
        return EngineStats(
            running=len(s.running),
            waiting=len(s.waiting),
            num_blocks=s.pool.num_blocks,
            free_blocks=s.pool.num_free,
            num_preemptions=s.num_preemptions,
            num_steps=self.num_steps,
        )

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that this model cannot serve. Any thread may call it."""
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_model_len}, "
                "of which at least one is for the output",
                "prompt",
            )
        groups = (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias))
        for name, ids in groups:
            for token in ids or ():
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"{name}: {token!r} is no token id; they go from 0 to {self.vocab_size - 1}", name
                    )

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises RequestError as `check` does, or if one with the same id is unfinished."""
        self.check(request)
        if request.request_id in self._requests:
            raise RequestError(f"there is an unfinished request with the id {request.request_id!r}", "request_id")
        params, prompt = request.params, request.prompt_token_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        room = self.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = () if params.ignore_eos else self.eos_ids
        ids = list(range(self._next_seq_id, self._next_seq_id + params.n))
        self._next_seq_id += params.n
        self._requests[request.request_id] = ids
        for index, seq_id in enumerate(ids):
            sequence = Sequence(
                seq_id=seq_id,
                index=index,
                token_ids=list(prompt),
                num_prompt=len(prompt),
                params=params,
                seed=seed,
                max_length=len(prompt) + max_tokens,
                stop_ids=(*ends, *(params.stop_token_ids or ())),
            )
            detokenizer = Detokenizer(self.tokenizer, prompt, params)
            self._streams[seq_id] = _Stream(request.request_id, sequence, detokenizer)
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Ends a request and frees its memory; one that has finished already is none of its business.

        Returns the last delta of each sequence that was under way.
        """
        deltas = []
        for seq_id in list(self._requests.get(request_id, ())):
            stream = self._streams[seq_id]
            deltas.append(
                TokenDelta(request_id, stream.sequence.index, stream.detokenizer.finish(), [], finish_reason="abort")
            )
            self._forget(stream)
        return deltas

    def step(self) -> list[TokenDelta]:
        """Runs one step. Returns what is new, for each sequence that got a token."""
        plan = self.scheduler.schedule()
        result = self.worker.execute(plan)
        self.num_steps += 1
        deltas = []
        for step in plan.sequences:
            stream = self._streams[step.seq_id]
            sequence = stream.sequence
            if step.prompt_logprobs is not None:
                if step.start == 0:
                    sequence.prompt_logprobs.append(None)  # nothing comes before the first token
                sequence.prompt_logprobs += result.prompt_logprobs.get(step.seq_id, [])
            self.scheduler.advance(sequence, len(step.token_ids))
            if step.sample is not None:
                deltas.append(self._commit(stream, result.sampled[step.seq_id]))
        return deltas

    def _commit(self, stream: _Stream, sampled: SampledToken) -> TokenDelta:
        """Adds a drawn token to its sequence, and ends the sequence if that is the last one."""
        sequence, params, token = stream.sequence, stream.sequence.params, sampled.token_id
        first = sequence.num_output == 0
        sequence.token_ids.append(token)
        text, reason, cause = self._text(stream, token)
        if reason is not None:
            self._forget(stream)
        return TokenDelta(
            stream.request_id,
            sequence.index,
            text,
            [token],
            logprobs=None if sampled.logprob is None else [sampled.logprob],
            prompt_logprobs=list(sequence.prompt_logprobs) if first and params.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_reason=cause,
        )

    def _text(self, stream: _Stream, token: int) -> tuple[str, FinishReason | None, int | str | None]:
        """The text that a token brings, and whether and why it ends the output."""
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
            reason = "length" if len(sequence.token_ids) >= sequence.max_length else None
        if reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped_by is not None:  # by this token, or in what was held back until the end
            reason, cause = "stop", detokenizer.stopped_by
        return text, reason, cause

    def _forget(self, stream: _Stream) -> None:
        """Takes a sequence that has ended out of everything."""
        seq_id = stream.sequence.seq_id
        self.scheduler.remove(stream.sequence)
        del self._streams[seq_id]
        unfinished = self._requests[stream.request_id]
        unfinished.remove(seq_id)
        if not unfinished:
            del self._requests[stream.request_id]
