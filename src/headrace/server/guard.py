"""What holds for every request: it has an id and limits, may be here, ends when its client leaves, crashes nothing."""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError, as_api_error, error_response

if TYPE_CHECKING:
    from headrace.server.service import Service

logger = logging.getLogger(__name__)

MAX_LOGGED = 10_000  # bytes of a body in the log
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Guard:
    """ASGI middleware that checks who asks, reads the body, runs the route, and cancels it when the client hangs up.

    What a route puts into `request.state.on_end` is undone in the end, however that comes; there the engine's work is
    given up. So it makes no difference whether the answer is streamed, or whether a first token is there. Each response
    has in `x-request-id` the id that the client gave, or a new one.
    """

    def __init__(self, app: ASGIApp, service: "Service") -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        async def refuse(error: ApiError) -> None:
            self.service.metrics.error(error.reason)
            await error_response(error)(scope, receive, send_with_id)

        async def respond(replay: Receive) -> None:
            try:
                await self.app(scope, replay, send_with_id)
            except Exception as error:  # a fault of ours is told as one; the next request is none the worse for it
                api_error = as_api_error(error, request_id)
                if not status:
                    await refuse(api_error)

        with ExitStack() as on_end:
            scope.setdefault("state", {}).update(request_id=request_id, on_end=on_end, key=None)
            try:
                scope["state"]["key"] = self.service.admit(scope)
                body = await self.read_body(scope, receive)
                if body is None:
                    return
                self.log_body(scope, request_id, body)
            except ApiError as error:
                await refuse(error)
            else:
                await until_disconnect(respond(replaying(body)), receive)
        if self.service.config.access_log:
            # The path as it was sent, in ASCII; it cannot forge a line of the log.
            line = f"{scope['method']} {scope['raw_path'].decode('ascii', 'replace')[:200]} {status or 'disconnected'}"
            logger.info(line, extra={"request_id": request_id})

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None if the client left before its end. Raises ApiError if it is too large or too slow."""
        limit, seconds = self.service.config.max_body_size, self.service.config.client_timeout
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large", closes=True)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            late = f"the body was not complete after {seconds:g} s"
            raise ApiError(408, late, code="request_timeout", closes=True) from None

    def log_body(self, scope: Scope, request_id: str, body: bytes) -> None:
        if body and self.service.config.enable_log_requests:
            text = body[:MAX_LOGGED].decode("utf-8", "backslashreplace")
            logger.info("%s %s %r", scope["method"], scope["path"], text, extra={"request_id": request_id})


def request_id_of(scope: Scope) -> str:
    """What the client calls its request, if that is one plain word; otherwise a new id."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return str(given[0].decode("ascii"))
    return f"req_{uuid.uuid4().hex}"


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
