"""What holds for every request: it has an id and a size limit, ends when its client leaves, and crashes nothing."""

import asyncio
import uuid
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError, as_api_error, error_response


class Guard:
    """ASGI middleware that reads the body, runs the route, and cancels it when the client hangs up.

    The cancellation reaches the engine's iterator, which aborts the request; so it makes no difference whether the
    answer is streamed, or whether a first token is there. Each response has its id in `x-request-id`.
    """

    def __init__(self, app: ASGIApp, max_body_size: int) -> None:
        self.app = app
        self.max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        async def respond() -> None:
            try:
                await self.app(scope, replay, send_with_id)
            except Exception as error:
                api_error = as_api_error(error, request_id)
                if not started:
                    await error_response(api_error)(scope, replay, send_with_id)

        try:
            body = await self.read_body(scope, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
            return
        if body is None:
            return
        replay = replaying(body)
        await until_disconnect(respond(), receive)

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None if the client left before it was complete."""
        too_large = ApiError(413, f"the body is larger than {self.max_body_size} bytes", code="request_too_large")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self.max_body_size):
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_body_size:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(chunks)


def replaying(body: bytes) -> Receive:
    """A `receive` that gives the body that has been read already, and then waits for ever."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never

    return receive


async def until_disconnect(work: Awaitable[None], receive: Receive) -> None:
    """Runs `work` to its end, or until the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
