"""The answer to a completion: whole, or in chunks of the same form."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.engine.request import TokenDelta
from headrace.formats.tokenizer import Tokenizer
from headrace.server.logprobs import CompletionLogprobs, prompt_logprobs
from headrace.server.protocol import CompletionBody
from headrace.server.stream import Deltas
from headrace.server.translate import Job, Tally


async def completion(job: Job[CompletionBody], tokenizer: Tokenizer, deltas: Deltas) -> dict[str, Any]:
    """The `text_completion` object, once all is there. Its choices are in the order of the prompts."""
    pieces = Pieces(job, tokenizer)
    choices: list[dict[str, Any]] = [
        {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        for index in range(pieces.count)
    ]
    tally = Tally()
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            tally.add(delta)
            piece = pieces.piece(prompt, delta)
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            choice["logprobs"] = joined(choice["logprobs"], piece["logprobs"])
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if job.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(tokenizer, delta.prompt_logprobs)
    return job.envelope("text_completion", choices) | {"usage": job.usage(tally)}


async def completion_chunks(
    job: Job[CompletionBody], tokenizer: Tokenizer, deltas: Deltas
) -> AsyncGenerator[dict[str, Any], None]:
    """`text_completion` objects, one for each piece of a choice."""
    pieces = Pieces(job, tokenizer)
    tally = Tally()
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            tally.add(delta)
            piece = pieces.piece(prompt, delta)
            if piece["text"] or piece["logprobs"] or piece["finish_reason"]:
                yield job.chunk("text_completion", [piece])
    if job.wants_usage:
        yield job.envelope("text_completion", []) | {"usage": job.usage(tally)}


class Pieces:
    """Makes choices, as far as they are there, of deltas. The first piece of a choice begins with the echo."""

    def __init__(self, job: Job[CompletionBody], tokenizer: Tokenizer) -> None:
        self.job = job
        self.count = len(job.requests) * job.n
        self.unbegun = set(range(self.count))
        self.logprobs = [CompletionLogprobs(tokenizer) for _ in range(self.count)]

    def piece(self, prompt: int, delta: TokenDelta) -> dict[str, Any]:
        index = prompt * self.job.n + delta.index
        text = delta.text
        logprobs = None
        if index in self.unbegun:
            self.unbegun.remove(index)
            echo = self.job.echoes[prompt]
            text = echo + text
            if delta.prompt_logprobs is not None and self.job.body.echo:
                ids = self.job.requests[prompt].prompt_token_ids
                logprobs = self.logprobs[index].lists(ids, delta.prompt_logprobs, echo)
        if delta.logprobs is not None:
            ids = [entry.token_id for entry in delta.logprobs]
            logprobs = joined(logprobs, self.logprobs[index].lists(ids, delta.logprobs))
        ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return {"index": index, "text": text, "logprobs": logprobs, **ending}


def joined(first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}
