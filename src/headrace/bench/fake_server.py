"""A server that says the same word at known moments: what a load generator finds can be compared with what is true.

    python -m headrace.bench.fake_server --ttft-ms 200 --itl-ms 50

prints its address and serves until standard input ends.
"""

import argparse
import asyncio
import json
import sys

import httptools

WORD = " word"


class FakeServer(asyncio.Protocol):
    """One connection. An answer's n-th token goes out `ttft + n * itl` seconds after the request came, n from 0."""

    def __init__(self, ttft: float, itl: float) -> None:
        self._ttft, self._itl = ttft, itl
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._path = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path.endswith(b"/models"):
            data = json.dumps({"data": [{"id": "fake"}]}).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            return
        asked = json.loads(self._body)
        self._count = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": self._count}
        self._end = _event(json.dumps({"choices": [], "usage": usage})) + _event("[DONE]") + b"0\r\n\r\n"
        self._begun = self._loop.time()
        self._transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._timer = self._loop.call_at(self._begun + self._ttft, self._token, 0)

    def _token(self, number: int) -> None:
        self._transport.write(TOKEN)
        if number + 1 == self._count:
            self._transport.write(self._end)
            return
        self._timer = self._loop.call_at(self._begun + self._ttft + (number + 1) * self._itl, self._token, number + 1)


def _event(data: str) -> bytes:
    """A server-sent event as a piece of a chunked body."""
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


TOKEN = _event(json.dumps({"choices": [{"text": WORD}]}))


async def start(ttft: float, itl: float, port: int = 0) -> tuple[asyncio.Server, str]:
    """A server on this machine, and its address."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeServer(ttft, itl), "127.0.0.1", port, backlog=4096)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _main(ttft: float, itl: float, port: int) -> None:
    server, url = await start(ttft, itl, port)
    print(url, flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ttft-ms", type=float, default=200.0, help="until the first token (default: %(default)s)")
    parser.add_argument("--itl-ms", type=float, default=50.0, help="between two tokens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="(default: any that is free)")
    args = parser.parse_args()
    asyncio.run(_main(args.ttft_ms / 1000, args.itl_ms / 1000, args.port))
