"""Runs the server: takes the port, listens, has the model loaded, serves until a signal, and ends in order."""

import asyncio
import contextlib
import errno
import json
import logging
import shlex
import signal
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import uvicorn

from headrace.config import EngineConfig
from headrace.engine.stats import EngineStats
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.formats.chat_template import ChatTemplate
from headrace.server.app import create_app
from headrace.server.config import ServerConfig
from headrace.server.connection import ACCEPTS, Connection, connection_limit
from headrace.server.service import Service

logger = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
BACKLOG = 2048  # connections that may wait to be taken in
LAST_WORDS_SECONDS = 2  # for errors to reach the clients whose answers were cut off


class Exit(IntEnum):
    """Why the server has ended. (2 is a wrong command line.)"""

    DONE = 0  # told to, and all that ran was finished
    ERROR = 1  # the model, the settings or the machine do not allow it
    ENGINE_DIED = 3
    CUT_OFF = 4  # told to, and answers had to be cut off: the time for them was over, or there was a second signal


def bind(config: ServerConfig) -> socket.socket:
    """A socket that has the address, but does not accept connections yet. Raises ConfigError where it cannot be had."""
    if config.uds is not None:
        return _bind_unix(Path(config.uds))
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


def _bind_unix(path: Path) -> socket.socket:
    """As `bind`. A socket that a server has left behind is replaced; one that a server listens on is not."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{path} is in use: end the program that listens there, or choose another --uds"
            ) from None
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
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
    """Loads the model and serves it on `listener`. Returns the exit status once it has ended; see `Exit`.

    Raises HeadraceError where the model cannot be loaded.
    """
    try:
        server = Server(engine_config, config, listener)
        return asyncio.run(server.run())
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _read_template(path: Path) -> str:
    """A chat template from a file. Raises ConfigError if it cannot be read, ModelError if it does not compile."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from None
    ChatTemplate(source, str(path))
    return source


class Server(uvicorn.Server):
    """uvicorn's server, with an engine beside it.

    It answers from the first moment on; `/ready` says 503 until the model is loaded. At the first SIGINT or SIGTERM new
    requests are refused while those that run go on; at the second, or when the time is over, all ends.
    """

    def __init__(self, engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
        self.settings, self.listener = config, listener
        self.chat_template = None if config.chat_template is None else _read_template(Path(config.chat_template))
        self.service = Service(engine_config, config)
        self.engine = self.service.engine
        super().__init__(self._uvicorn_config())
        self.was_cut_off = self.is_hurried = False
        self.error: HeadraceError | None = None

    def _uvicorn_config(self) -> uvicorn.Config:
        settings = self.settings
        try:
            self.listener.listen(BACKLOG)
        except OSError as error:  # another program has bound it as we did, and was faster
            raise _cannot_bind(settings, error) from None
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says there, it has told the client
        config = uvicorn.Config(
            create_app(self.service),
            http=Connection.with_settings(settings, connection_limit(settings)),
            backlog=ACCEPTS,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            root_path=settings.root_path,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            files = f"{settings.ssl_certfile} and {settings.ssl_keyfile}"
            raise ConfigError(f"{files} are not a certificate and its key: {error.strerror or error}") from None
        return config

    async def run(self) -> int:  # type: ignore[override]
        """Serves until the end. Returns the exit status. Raises HeadraceError where the model cannot be loaded."""
        await self.serve(sockets=[self.listener])
        if self.error is not None:
            raise self.error
        if self.engine_died:
            return Exit.ENGINE_DIED
        return Exit.CUT_OFF if self.was_cut_off else Exit.DONE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listener.listen(BACKLOG)  # asyncio has set it to what it takes in at once
        self.engine_died = False
        self.tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._report())]

    async def _load(self) -> None:
        try:
            await self.engine.start()
            if self.chat_template is not None:
                self.engine.tokenizer.set_chat_template(self.chat_template)
        except HeadraceError as error:
            self.error, self.should_exit = error, True
            return
        print(self.greeting(), flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self.engine.death is not None and self.tasks[0].done():  # else `_load` will say why
            self.engine_died = self.error is None
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = self.settings.shutdown_timeout
        self.service.drains_until = time.monotonic() + patience
        if self.engine.is_ready and self.engine.num_unfinished:
            logger.info("ending; up to %g s for %d requests to finish", patience, self.engine.num_unfinished)
        # Also those whose last tokens are on their way to the client.
        while self.engine.is_ready and (self.engine.num_unfinished or self._is_answering()):
            if self.is_hurried or time.monotonic() > self.service.drains_until:
                self.was_cut_off = True
                break
            await asyncio.sleep(0.02)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.engine.stop()
        await super().shutdown(sockets)

    def _is_answering(self) -> bool:
        return bool(self.server_state.tasks)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.is_hurried = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, so that a server that was told to end seems to have failed.
        with contextlib.suppress(ValueError):  # a server in a thread hears of no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
        yield

    async def _report(self) -> None:
        """A line on where the engine stands, every few seconds in which something happened."""
        before, at = EngineStats(), time.monotonic()
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if self.engine.is_ready:
                now, moment = self.engine.stats(), time.monotonic()
                if now != before:
                    logger.info("%s", status_line(before, now, moment - at))
                before, at = now, moment

    def greeting(self) -> str:
        """What is served and how, where it is, and a command to try it with."""
        info, model = self.engine.info, self.service.names[0]
        about = (
            f"{model}: {info.architecture}, weights {info.scheme}, computed in {info.dtype}; kernels {info.kernels}, "
            f"{info.threads} thread{'s' if info.threads > 1 else ''}\n"
            f"KV cache: {info.cache_tokens} tokens ({info.cache_bytes / 2**20:.0f} MiB), "
            f"context {info.max_model_len} tokens\n"
        )
        body: dict[str, object] = {"model": model}
        if takes_chats(self.service):
            route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "What is a mill race?"}]
        else:
            route, body["prompt"] = "/v1/completions", "A mill race is"
        url, options = url_of(self.settings, self.listener), ""
        if self.settings.uds is not None:
            options += f" --unix-socket {shlex.quote(self.settings.uds)}"
        if self.service.keys.keys:
            options += " -H 'Authorization: Bearer '$KEY"
        data = shlex.quote(json.dumps(body))
        curl = f"curl{options} {url}{route} -H 'Content-Type: application/json' -d {data}"
        return f"{about}Serving {model} on {url}/v1. Try:\n\n  {curl}\n"


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What has happened between two moments, and where the engine stands at the second."""

    def rate(attribute: str) -> float:
        return float(getattr(now, attribute) - getattr(before, attribute)) / seconds

    queried = now.prefix_queried_tokens - before.prefix_queried_tokens
    hits = (now.prefix_hit_tokens - before.prefix_hit_tokens) / queried if queried else 0.0
    return (
        f"prompts {rate('num_prompt_tokens'):.1f} tokens/s, output {rate('num_generated_tokens'):.1f} tokens/s, "
        f"running {now.running}, waiting {now.waiting}, "
        f"KV cache {1 - now.free_blocks / max(1, now.num_blocks):.1%} in use, prefix hits {hits:.1%}"
    )


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where this machine reaches the server."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def takes_chats(service: Service) -> bool:
    try:
        service.engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except RequestError:
        return False
    return True
