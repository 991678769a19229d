"""`AsyncEngine`: the engine in a process of its own, for servers."""

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.messages import Abort, Failed, Load, Loaded, Stop, Submit, Turn, encode, from_engine
from headrace.engine.request import Request, TokenDelta, check_request
from headrace.engine.stats import EngineStats, ModelInfo
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.formats.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A client that is so many tokens behind what the engine has made for it is given up: its buffer would grow without end.
MAX_BUFFERED_DELTAS = 8192
STOP_SECONDS = 5.0


class EngineDeadError(HeadraceError):
    """The engine process has ended, or was stopped; nothing can be generated any more."""


class Answer:
    """The deltas of some requests as they come, each with its request's index, until all sequences have finished.

    Iterating raises OverloadedError for a request that waited in vain, EngineDeadError, or HeadraceError where the
    reader is too far behind. `close` gives up what is unfinished; it may be called at any time, and twice.
    begun: when it was submitted, by `time.perf_counter`. times: for whoever measures, by (request, sequence).
    """

    def __init__(self, engine: "AsyncEngine", requests: list[Request]) -> None:
        self.requests = requests
        self.begun = time.perf_counter()
        self.times: dict[tuple[int, int], list[float]] = {}
        self._engine = engine
        self._unfinished = sum(request.params.n for request in requests)
        self._queue: asyncio.Queue[tuple[int, TokenDelta] | HeadraceError] = asyncio.Queue()
        self._unaccepted = {request.request_id for request in requests}
        self._to_come = [request.params.n for request in requests]  # sequences that the engine has not finished
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> AsyncIterator[tuple[int, TokenDelta]]:
        return self

    async def __anext__(self) -> tuple[int, TokenDelta]:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, HeadraceError):
            raise item
        index, delta = item
        if delta.error is not None:
            raise delta.error
        self._unfinished -= delta.finish_reason is not None
        return index, delta

    async def accepted(self) -> None:
        """Returns once the engine has taken in all requests. Raises what it has against one of them."""
        await self._accepted

    def accept(self, request_id: str) -> None:
        self._unaccepted.discard(request_id)
        if not self._unaccepted and not self._accepted.done():
            self._accepted.set_result(None)

    def deliver(self, index: int, delta: TokenDelta) -> bool:
        """Keeps a delta for the reader. True if it was the last of its request."""
        self._queue.put_nowait((index, delta))
        self._to_come[index] -= delta.finish_reason is not None
        return not self._to_come[index]

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= MAX_BUFFERED_DELTAS

    def fail(self, error: HeadraceError) -> None:
        """Ends the answer with an error, after what is there already."""
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # that nobody may ask for it any more is no fault
        self._queue.put_nowait(error)

    def close(self) -> None:
        self._engine.give_up(self)

    async def aclose(self) -> None:
        self.close()


class AsyncEngine:
    """Runs requests from any number of tasks together, in a process of its own. Belongs to one event loop.

    Nothing here waits for a step: requests go into a socket, and one task takes what comes out of it and puts it where
    the readers find it. A reader who is slow holds up nobody, and one who is too slow loses its request.

    on_delta: called with each delta as it arrives, for measurements.
    tokenizer, info: once it is ready. death: why nothing can be generated any more, once that is so.
    """

    tokenizer: Tokenizer
    info: ModelInfo

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_format: str = "text",
        on_delta: Callable[[Answer, int, TokenDelta], None] | None = None,
    ) -> None:
        self.config = config
        self.is_ready = False
        self.death: str | None = None
        self._log_format = log_format
        self._on_delta = on_delta
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._answers: dict[str, tuple[Answer, int]] = {}
        self._stats = EngineStats()
        self._ended = asyncio.Event()
        self._stopping = False

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self.info.default_sampling

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._answers)

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the engine process and loads the model. Raises HeadraceError for the user where that fails."""
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-"))  # only this user may enter it
        path = self._directory / "engine"
        if len(str(path)) > 100:
            self._directory.rmdir()
            raise ConfigError(f"{self._directory} is too long a path for a socket: set TMPDIR to a shorter one")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # what it may hold is bounded by the engine's own queue, and by the readers' buffers
        self._socket.bind(f"ipc://{path}")
        # -P: a file in the current directory is no module of ours. The new session keeps Ctrl-C from it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "headrace.engine.process", str(path), self._log_format,
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._run(self._watch(self._process))
        tokenizer = await in_thread(self._open)  # while the process imports what it needs
        self._send(Load(self.config))
        # Both are under way now: the process reads the weights.
        self.tokenizer = await in_thread(tokenizer)
        first = from_engine(await self._first_message())
        if isinstance(first, Failed):
            raise first.error
        assert isinstance(first, Loaded)
        self.info, self._stats = first.info, first.stats
        self._run(self._receive())
        self.is_ready = True

    def _open(self) -> Callable[[], Tokenizer]:
        """Opens the model, after having fetched it where it is not here yet. Returns what makes its tokenizer."""
        from headrace.formats.open import open_checkpoint

        return open_checkpoint(self.config.model, self.config.revision).tokenizer

    async def _first_message(self) -> bytes:
        message = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait([message, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not message.done():
            message.cancel()
            raise EngineDeadError(f"{self.death} while it loaded the model")
        return message.result()

    async def stop(self) -> None:
        """Ends the engine process, at any time; whoever still waits for tokens gets an EngineDeadError."""
        self._stopping = True
        was_ready, self.is_ready = self.is_ready, False
        self._die("the server was stopped")
        process = self._process
        if process is not None:
            if was_ready:
                self._send(Stop())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_SECONDS)
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._socket.close(linger=0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def stats(self) -> EngineStats:
        """As of the engine's last message."""
        return self._stats

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that this model cannot serve. Any thread may call it."""
        check_request(request, self.max_model_len, self.vocab_size)

    async def submit(self, requests: list[Request]) -> Answer:
        """Hands requests over to the engine, and returns when it has taken them in.

        Raises RequestError, OverloadedError where its queue is full, and EngineDeadError. Who gets an answer has to
        close it in the end, also where it was not read.
        """
        for request in requests:
            self.check(request)
            if request.request_id in self._answers:
                raise RequestError(f"there is an unfinished request with the id {request.request_id!r}", "request_id")
        if not self.is_ready:
            raise EngineDeadError(self.death or "the model is not loaded yet")
        answer = Answer(self, requests)
        self._answers |= {request.request_id: (answer, index) for index, request in enumerate(requests)}
        with contextlib.ExitStack() as undo:
            undo.callback(answer.close)
            for request in requests:
                self._send(Submit(request))
            await answer.accepted()
            undo.pop_all()
        return answer

    def give_up(self, answer: Answer) -> None:
        """Aborts what is unfinished of an answer."""
        for request in answer.requests:
            if self._answers.pop(request.request_id, None) is not None and self.is_ready:
                self._send(Abort(request.request_id))

    def _send(self, message: Load | Submit | Abort | Stop) -> None:
        """Nobody waits for it: it goes at once, or when the process has connected, or never where that has died."""
        self._socket.send(encode(message))

    async def _receive(self) -> None:
        while True:
            turn = from_engine(await self._socket.recv())
            assert isinstance(turn, Turn)
            self._stats = turn.stats
            for request_id in turn.accepted:
                if request_id in self._answers:
                    self._answers[request_id][0].accept(request_id)
            for request_id, error in turn.refused.items():
                if request_id in self._answers:
                    self._answers.pop(request_id)[0].fail(error)
            for delta in turn.deltas:
                self._deliver(delta)

    def _deliver(self, delta: TokenDelta) -> None:
        answer, index = self._answers.get(delta.request_id, (None, 0))
        if answer is None:  # its client has gone
            return
        if answer.is_full:
            answer.fail(HeadraceError(f"the client is more than {MAX_BUFFERED_DELTAS} tokens behind and is given up"))
            self.give_up(answer)
            return
        if self._on_delta is not None:
            self._on_delta(answer, index, delta)
        if answer.deliver(index, delta):
            del self._answers[delta.request_id]

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
        self._die(f"the engine process {how}")
        self._ended.set()

    def _die(self, reason: str) -> None:
        self.is_ready = False
        if self.death is None:
            self.death = reason
            if not self._stopping:
                logger.error("%s", reason)
        for answer, _ in list(self._answers.values()):
            answer.fail(EngineDeadError(self.death))
        self._answers.clear()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the engine's own tasks. If it fails, that is the engine's end: nobody may be left waiting."""
        task = asyncio.create_task(work)
        self._tasks.append(task)

        def on_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.error("the connection to the engine failed", exc_info=task.exception())
                self._die("the connection to the engine failed; the log tells why")

        task.add_done_callback(on_end)


async def in_thread(function: Callable[[], T]) -> T:
    """As asyncio.to_thread, in a thread that does not keep the process from ending: it may wait for a download."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
