"""The engine's deltas on their way into an answer: those of several prompts together, and as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from headrace.engine.request import Request, TokenDelta
from headrace.server.errors import as_api_error, to_json

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

Deltas = AsyncGenerator[tuple[int, TokenDelta], None]


async def run_together(engine: "AsyncEngine", requests: list[Request]) -> Deltas:
    """The deltas of all requests as they come, each with the index of its request. Closing it aborts them all."""
    arrived: asyncio.Queue[tuple[int, TokenDelta] | Exception | None] = asyncio.Queue()

    async def run(index: int, request: Request) -> None:
        try:
            async with aclosing(engine.generate(request)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((index, delta))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(run(index, request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events, one for each chunk, and `[DONE]` at the end. An error on the way is an event as well."""

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], request_id: str) -> None:
        self.events = self._events(chunks, request_id)
        super().__init__(self.events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(
        self, chunks: AsyncGenerator[dict[str, Any], None], request_id: str
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield b"data: " + to_json(chunk) + b"\n\n"
            except Exception as error:
                yield b"data: " + to_json(as_api_error(error, request_id).body()) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.events):
            await super().stream_response(send)
