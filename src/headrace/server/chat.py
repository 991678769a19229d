"""The answer to a chat completion: whole, or in chunks."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.engine.request import TokenDelta
from headrace.formats.tokenizer import Tokenizer
from headrace.server.dialect import Answer
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.protocol import ChatBody
from headrace.server.stream import Deltas
from headrace.server.tool_parsers import Delta
from headrace.server.translate import Job, Tally


async def chat_completion(job: Job[ChatBody], tokenizer: Tokenizer, deltas: Deltas) -> dict[str, Any]:
    """The `chat.completion` object, once all is there."""
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": None, "refusal": None},
            "logprobs": {"content": [], "refusal": None} if job.body.logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }
        for index in range(job.n)
    ]
    pieces = Pieces(job)
    tally = Tally()
    of_prompt = None
    async with aclosing(deltas):
        async for _, delta in deltas:
            tally.add(delta)
            of_prompt = of_prompt or delta.prompt_logprobs
            choice = choices[delta.index]
            for piece in pieces.of(delta):
                add(choice["message"], piece)
            if job.body.logprobs:
                choice["logprobs"]["content"] += chat_logprobs(tokenizer, delta.logprobs)
            if delta.finish_reason is not None:
                choice["finish_reason"], choice["stop_reason"] = pieces.finish_reason(delta), delta.stop_reason
    for choice in choices:
        message = choice["message"]
        if message["content"] is None and len(message) == 3:  # neither calls nor thoughts: an empty text
            message["content"] = ""
    answer = job.envelope("chat.completion", choices) | {"usage": job.usage(tally)}
    if of_prompt is not None:
        answer["prompt_logprobs"] = prompt_logprobs(tokenizer, of_prompt)
    return answer


async def chat_chunks(job: Job[ChatBody], tokenizer: Tokenizer, deltas: Deltas) -> AsyncGenerator[dict[str, Any], None]:
    """`chat.completion.chunk` objects: the role of each choice, what it says as it comes, and why it ended."""

    def chunk(index: int, delta: Delta, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return job.chunk("chat.completion.chunk", [choice])

    for index in range(job.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    pieces = Pieces(job)
    tally = Tally()
    async with aclosing(deltas):
        async for _, delta in deltas:
            tally.add(delta)
            logprobs = None
            if job.body.logprobs and delta.token_ids:
                logprobs = {"content": chat_logprobs(tokenizer, delta.logprobs), "refusal": None}
            # Tokens may bring no text yet, but their logprobs are known.
            for piece in pieces.of(delta) or ([{"content": ""}] if logprobs else []):
                yield chunk(delta.index, piece, logprobs)
                logprobs = None
            if delta.finish_reason is not None:
                last = chunk(delta.index, {})
                last["choices"][0] |= {"finish_reason": pieces.finish_reason(delta), "stop_reason": delta.stop_reason}
                yield last
    if job.wants_usage:
        yield job.envelope("chat.completion.chunk", []) | {"usage": job.usage(tally)}


class Pieces:
    """Makes OpenAI's deltas of the engine's, for each choice."""

    def __init__(self, job: Job[ChatBody]) -> None:
        self._answers: list[Answer] = [] if job.form is None else [job.form.new_answer() for _ in range(job.n)]

    def of(self, delta: TokenDelta) -> list[Delta]:
        return self._answers[delta.index].feed(delta.text, delta.finish_reason)

    def finish_reason(self, delta: TokenDelta) -> str | None:
        return None if delta.finish_reason is None else self._answers[delta.index].finish_reason(delta.finish_reason)


def add(message: dict[str, Any], delta: Delta) -> None:
    """Adds a delta to the message that the deltas so far make up."""
    for key, value in delta.items():
        if key != "tool_calls":
            message[key] = (message.get(key) or "") + value
            continue
        calls = message.setdefault("tool_calls", [])
        for call in value:
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
