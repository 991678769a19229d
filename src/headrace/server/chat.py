"""The answer to a chat completion: whole, or in chunks."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.formats.tokenizer import Tokenizer
from headrace.server.logprobs import chat_logprobs
from headrace.server.protocol import ChatBody
from headrace.server.stream import Deltas
from headrace.server.translate import Job


async def chat_completion(job: Job[ChatBody], tokenizer: Tokenizer, deltas: Deltas) -> dict[str, Any]:
    """The `chat.completion` object, once all is there."""
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": [], "refusal": None} if job.body.logprobs else None,
            "finish_reason": None,
        }
        for index in range(job.n)
    ]
    completion_tokens = cached_tokens = 0
    async with aclosing(deltas):
        async for _, delta in deltas:
            completion_tokens += len(delta.token_ids)
            cached_tokens += (delta.cached_tokens or 0) if delta.index == 0 else 0
            choice = choices[delta.index]
            choice["message"]["content"] += delta.text
            if job.body.logprobs:
                choice["logprobs"]["content"] += chat_logprobs(tokenizer, delta.logprobs)
            choice["finish_reason"] = delta.finish_reason
    return job.envelope("chat.completion", choices) | {"usage": job.usage(completion_tokens, cached_tokens)}


async def chat_chunks(job: Job[ChatBody], tokenizer: Tokenizer, deltas: Deltas) -> AsyncGenerator[dict[str, Any], None]:
    """`chat.completion.chunk` objects: the role of each choice, its text as it comes, and why it ended."""

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return job.chunk("chat.completion.chunk", [choice])

    for index in range(job.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    completion_tokens = cached_tokens = 0
    async with aclosing(deltas):
        async for _, delta in deltas:
            completion_tokens += len(delta.token_ids)
            cached_tokens += (delta.cached_tokens or 0) if delta.index == 0 else 0
            logprobs = None
            if job.body.logprobs and delta.token_ids:
                logprobs = {"content": chat_logprobs(tokenizer, delta.logprobs), "refusal": None}
            if delta.text or logprobs:
                yield chunk(delta.index, {"content": delta.text}, logprobs)
            if delta.finish_reason:
                yield chunk(delta.index, {}, finish_reason=delta.finish_reason)
    if job.wants_usage:
        yield job.envelope("chat.completion.chunk", []) | {"usage": job.usage(completion_tokens, cached_tokens)}
