"""What goes into the engine and what comes out of it."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import HeadraceError, RequestError
from headrace.sampling.params import SamplingParams, TokenLogprob

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Request:
    """A prompt as token ids, and how to continue it.

    request_id: unique among the unfinished ones.
    priority: its class, where the policy asks for one; lower ones go first.
    tenant: whose share it counts to, where the policy is a fair one.
    cache_salt: its prompt shares cached blocks only with prompts of the same salt.
    queue_timeout, timeout: seconds within which it must have begun, and have finished. The config's hold too, so they
        can only be shorter than those; None takes them as they are.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    queue_timeout: float | None = None
    timeout: float | None = None


def check_request(request: Request, max_model_len: int, vocab_size: int) -> None:
    """Raises RequestError for a request that a model of this context and vocabulary cannot serve."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise RequestError("the prompt is empty: it needs at least one token", "prompt")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the context holds {max_model_len}, "
            "of which at least one is for the output",
            "prompt",
        )
    groups = (
        ("prompt", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
    )
    for name, ids in groups:
        for token in ids or ():
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise RequestError(f"{name}: {token!r} is no token id; they go from 0 to {vocab_size - 1}", name)
    for name in ("queue_timeout", "timeout"):
        seconds = getattr(request, name)
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise RequestError(f"{name} must be a number of seconds from 0 on, not {seconds!r}", name)


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one sequence of a request.

    index: which of the request's `n` sequences.
    text: the new text. It never ends within a character and never holds part of a stop string, so it may be empty
        though there are new tokens, and may hold the text of earlier ones.
    token_ids: the new tokens (none where a request only ends, as on abort).
    logprobs: one entry per new token, where asked for.
    prompt_logprobs: on the first delta of a sequence, where asked for: one entry per prompt token, None for the first.
    finish_reason: None while the sequence goes on; "stop" (end token, stop token or stop string), "length", "abort".
    stop_reason: the stop string or the stop token id that ended it; "timeout" for an abort when its time was over; None
        for the model's own end-of-sequence tokens.
    cached_tokens: on the first delta with a token, how many tokens of the prompt were in the cache already.
    queue_time: with it, how many seconds the sequence has waited for its turn.
    error: on the last delta of a sequence that was given up, before it began or within its grammar, why.
    num_drafted, num_accepted: tokens of a draft that were verified in this step, and those of them that are among
        `token_ids`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    queue_time: float | None = None
    error: HeadraceError | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One finished continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations, in order of their index.

    num_cached_tokens: how many tokens of the prompt were in the cache already.
    num_drafted_tokens, num_accepted_tokens: of all drafts for its outputs, and those of them that are in the outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
