"""An answer as server-sent events, while it is made."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.engine.async_engine import Answer
from headrace.server.errors import as_api_error, to_json
from headrace.server.metrics import Metrics

Deltas = Answer

KEEP_ALIVE_SECONDS = 10.0  # proxies close a connection on which nothing comes for a while, often 60 s


class EventStream(Response):
    """Server-sent events, one for each chunk, and `[DONE]` at the end. An error on the way is an event as well.

    While there is nothing to say, as in a long queue, comments keep the connection alive.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], request_id: str, metrics: Metrics) -> None:
        self.chunks, self.request_id, self.metrics = chunks, request_id, metrics
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        super().__init__(headers=headers | {"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent_at = asyncio.get_running_loop().time()

        async def event(data: bytes, *, more: bool = True) -> None:
            nonlocal sent_at
            sent_at = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(KEEP_ALIVE_SECONDS)
                if asyncio.get_running_loop().time() - sent_at >= KEEP_ALIVE_SECONDS:
                    await event(b": keep-alive\n\n")

        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        heart = asyncio.create_task(keep_alive())
        try:
            async with aclosing(self.chunks):
                try:
                    async for chunk in self.chunks:
                        await event(b"data: " + to_json(chunk) + b"\n\n")
                except Exception as error:  # it is too late for a status; the client has to hear of it all the same
                    api_error = as_api_error(error, self.request_id)
                    self.metrics.error(api_error.reason)
                    await event(b"data: " + to_json(api_error.body()) + b"\n\n")
            await event(b"data: [DONE]\n\n", more=False)
        finally:
            heart.cancel()
