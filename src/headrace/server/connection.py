"""A client's connection: uvicorn's, with limits on their number, on the size of a head, and on a client's slowness."""

import asyncio
import json
import resource
import socket

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.server.config import ServerConfig
from headrace.server.errors import ApiError

REFUSED_RETRY = 1  # seconds
ACCEPTS = 32  # connections that one turn of the event loop takes in


class Connection(HttpToolsProtocol):
    """HTTP/1.1. A client that is too slow is cut off: in sending a request's head, and in taking an answer.

    (How long its body may take is the Guard's affair, which can still answer.)
    """

    settings: ServerConfig  # set by `with_settings`
    limit = 0

    @classmethod
    def with_settings(cls, settings: ServerConfig, limit: int) -> "type[Connection]":
        """The class for a server. limit: how many connections it may have."""
        return type("Connection", (cls,), {"settings": settings, "limit": limit})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        watch_for_silence(transport.get_extra_info("socket"))
        self._head_size: int | None = 0  # bytes of the request's head so far; None when it is complete
        self._deadline: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limit:
            headers = {"retry-after": str(REFUSED_RETRY)}
            message = f"the server has {self.limit} connections already, which is its limit"
            self._refuse(ApiError(503, message, code="too_many_connections", headers=headers))
        else:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_size is not None:
            if not self._head_size and self._deadline is None:  # the first bytes of a further request
                self._set_deadline()
            self._head_size += len(data)
        super().data_received(data)
        # What came is at most a read's worth beyond the head, which may be a body; so only a head that goes on counts.
        if self._head_size is not None and self._head_size > self.settings.max_header_size:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.max_header_size:
            self._refuse_head()
            return
        self._head_size = None
        self._clear_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._head_size is None:  # not if the head was refused
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._head_size is None:
            super().on_message_complete()
        self._head_size = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear_deadline()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered as a plain request, and does not belong in the log."""

    def _refuse_head(self) -> None:
        message = f"the request's first line and headers are larger than {self.settings.max_header_size} bytes"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answers with an error, and closes the connection."""
        if self.transport.is_closing():
            return
        body = json.dumps(error.body()).encode()
        headers = error.headers | {
            "content-type": "application/json", "content-length": str(len(body)), "connection": "close",
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self.settings.client_timeout, self._cut_off)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut_off(self) -> None:
        """Ends the connection, if it is still its client that we wait for."""
        if self.cycle is None or self._head_size or self.transport.get_write_buffer_size():
            self.transport.abort()


def watch_for_silence(connection: socket.socket) -> None:
    """Has the kernel ask from time to time whether the client's machine is still there."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connection_limit(settings: ServerConfig) -> int:
    """How many connections there may be: what the settings say, as far as the limit on open files allows.

    That limit is raised as far as it can be. Some files are for other things, and for connections that are refused.
    """
    reserve = 64 + 4 * ACCEPTS  # it takes some turns of the event loop until a refused one is closed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + reserve
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        settings.max_connections
        if soft == resource.RLIM_INFINITY
        else max(1, min(settings.max_connections, soft - reserve))
    )
