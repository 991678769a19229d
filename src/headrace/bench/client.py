"""A client of OpenAI's API that notes when each piece of an answer arrives.

It does as little as it can: a connection of its own for each request, an HTTP parser in C, and no object for a piece
but its moment and its text. `bench/load_generator.py` measures what it costs.
"""

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.errors import ConfigError

MAX_FAULT = 300  # characters of a server's complaint that are kept


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reply:
    """An answer, on the clock of the event loop.

    sent: when the request went out. moments: when each piece with text came; texts: what it said.
    end: when the answer was complete. error: what went wrong; empty if nothing did.
    prompt_tokens, output_tokens: what the server has counted; None where it says nothing.
    """

    sent: float
    moments: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: float = 0.0
    error: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Client:
    """Sends requests to one server.

    base_url: such as http://127.0.0.1:8000, with or without /v1. key: for the Authorization header.
    timeout: seconds for a whole answer.
    """

    def __init__(self, base_url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"base_url must be like http://127.0.0.1:8000, not {base_url!r}")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\n"
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._timeout = timeout

    async def stream(self, route: str, body: Mapping[str, Any]) -> Reply:
        """The answer to a request that asks for one in pieces. What goes wrong is in its `error`."""
        data = json.dumps(body).encode()
        return await self._exchange("POST", route, data, _Events)

    async def get(self, route: str) -> Any:
        """What a route answers, as JSON. Raises ConfigError if it does not."""
        reply = await self._exchange("GET", route, b"", _Whole)
        if not reply.error:
            try:
                return json.loads("".join(reply.texts))
            except ValueError:
                reply.error = "the answer is not JSON"
        raise ConfigError(f"{self._host}:{self._port}{self._path}/{route}: {reply.error}")

    async def _exchange(self, method: str, route: str, data: bytes, kind: "type[_Connection]") -> Reply:
        loop = asyncio.get_running_loop()
        reply = Reply(loop.time())
        head = f"{method} {self._path}/{route} HTTP/1.1\r\n{self._head}"
        if data:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(self._timeout):
                transport, connection = await loop.create_connection(
                    lambda: kind(reply), self._host, self._port, ssl=self._ssl
                )
                transport.write(head.encode() + b"\r\n" + data)
                await connection.done
        except TimeoutError:
            reply.error = f"no answer within {self._timeout:g} s"
        except OSError as error:
            reply.error = f"no connection: {error.strerror or error}"
        finally:
            if transport is not None:
                transport.abort()
        reply.end = reply.end or loop.time()
        return reply


class _Connection(asyncio.Protocol):
    """Reads one answer from beginning to end; `done` is set then."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._loop = asyncio.get_running_loop()
        self.done = self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._fault = b""

    def data_received(self, data: bytes) -> None:
        self._now = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("the connection broke off before the answer was complete")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self.take(body)
        elif len(self._fault) < MAX_FAULT:
            self._fault += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        fault = self._fault[:MAX_FAULT].decode(errors="replace")
        self._finish(self.complete() if status == 200 else f"HTTP {status}: {fault}")

    def take(self, body: bytes) -> None:
        """A piece of the body of an answer that is well."""
        raise NotImplementedError

    def complete(self) -> str:
        """What is wrong with an answer that has ended; empty if nothing."""
        return ""

    def _finish(self, error: str) -> None:
        if not self.done.done():
            self.reply.error, self.reply.end = error, self._now or self._loop.time()
            self.done.set_result(None)


class _Whole(_Connection):
    def take(self, body: bytes) -> None:
        self.reply.texts.append(body.decode(errors="replace"))


class _Events(_Connection):
    """Server-sent events: lines of `data: {...}`, and `data: [DONE]` at the end."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._rest = b""
        self._is_done = False
        self._problem = ""

    def take(self, body: bytes) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self._problem = self._problem or f"an event that is none of OpenAI's: {error}"
            return
        if event.error is not None:
            self._problem = self._problem or f"the server reports: {str(event.error)[:MAX_FAULT]}"
        if event.usage is not None:
            self.reply.prompt_tokens = event.usage.prompt_tokens
            self.reply.output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            text = choice.text
            if choice.delta is not None:
                text = (choice.delta.reasoning_content or "") + (choice.delta.content or "")
            if text:
                self.reply.moments.append(self._now)
                self.reply.texts.append(text)

    def complete(self) -> str:
        if not self._problem and not self._is_done:
            return "the answer ended without [DONE]"
        return self._problem or ("" if self.reply.texts else "the answer has no text")
