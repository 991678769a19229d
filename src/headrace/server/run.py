"""Runs the server in this process: takes the port, loads the model, serves until a signal."""

import asyncio
import contextlib
import errno
import json
import logging
import shlex
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from headrace.config import EngineConfig
from headrace.errors import ConfigError, RequestError
from headrace.server.app import create_app, model_names
from headrace.server.config import ServerConfig

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine


def bind(config: ServerConfig) -> socket.socket:
    """A socket that has the address, but does not accept connections yet. Raises ConfigError where it cannot be had."""
    try:
        address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"host {config.host!r} is neither an address nor a known name") from None
    family, kind, protocol, _, where = address
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart has to wait for old connections
    try:
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise _cannot_bind(config, error) from None
    return listener


def _cannot_bind(config: ServerConfig, error: OSError) -> ConfigError:
    where = f"{config.host}:{config.port}"
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigError(f"{where} is in use: end the program that listens there, or choose another --port")
        case errno.EACCES:
            return ConfigError(f"{where} may not be used by this user: choose a --port above 1023")
        case errno.EADDRNOTAVAIL:
            return ConfigError(f"{config.host} is no address of this machine: choose another --host")
    return ConfigError(f"cannot listen on {where}: {error.strerror}")


def serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    """Loads the model and serves it on `listener`. Returns the exit status once a signal has ended it."""
    from headrace.engine.async_engine import AsyncEngine

    engine = AsyncEngine(engine_config)
    app = create_app(engine, config)
    try:
        listener.listen(2048)
    except OSError as error:  # another program has bound it as we did, and was faster
        raise _cannot_bind(config, error) from None
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    greeting = ready_message(url_of(config, listener), model_names(engine.config, config)[0], takes_chats(engine))
    asyncio.run(Server(settings, engine, greeting).serve(sockets=[listener]))
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready, and which ends at once and in order on SIGINT and SIGTERM."""

    def __init__(self, config: uvicorn.Config, engine: "AsyncEngine", greeting: str) -> None:
        super().__init__(config)
        self.engine = engine
        self.greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.greeting, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.engine.stop()  # ends what runs, so that nobody has to be waited for
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, so that a server that was told to end seems to have failed.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def takes_chats(engine: "AsyncEngine") -> bool:
    try:
        engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except RequestError:
        return False
    return True


def ready_message(url: str, model: str, has_chat: bool) -> str:
    """Where the server is, and a command to try it with."""
    body: dict[str, object] = {"model": model}
    if has_chat:
        route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "What is a mill race?"}]
    else:
        route, body["prompt"] = "/v1/completions", "A mill race is"
    data = shlex.quote(json.dumps(body))
    return f"Serving {model} on {url}/v1. Try:\n\n  curl {url}{route} -H 'Content-Type: application/json' -d {data}\n"
