"""`AsyncEngine`: the step loop in a thread of its own, for servers."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.core import Engine, EngineStats
from headrace.engine.request import Request, TokenDelta
from headrace.errors import HeadraceError, OverloadedError, RequestError
from headrace.formats.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineDeadError(HeadraceError):
    """The step loop has failed, or was stopped; nothing can be generated any more."""


class _Subscriber:
    """Where the deltas of a request go: a queue in the event loop that asked for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()


class AsyncEngine:
    """Runs requests from any number of tasks together. Loads the model at once; `start` begins the steps.

    The engine belongs to its thread. Other threads leave it messages, and it hands each step's deltas over to the event
    loop in one call; it waits for nobody.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._engine = Engine(config)
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()  # a request; an id to abort; the end
        self._subscribers: dict[str, _Subscriber] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._dead: str | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self._engine.default_sampling

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._dead is None

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Ends the step loop; whoever still waits for tokens gets an EngineDeadError."""
        self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that this model cannot serve, OverloadedError for one that has to wait."""
        self._engine.check(request)
        self._engine.check_room(request)

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of a request as they come, until each of its sequences has finished.

        Closing the iterator, or cancelling the task, aborts the request. Raises RequestError, OverloadedError, or
        EngineDeadError.
        """
        self.check(request)
        if not self.is_alive:
            raise EngineDeadError(self._dead or "the engine has not been started")
        if request.request_id in self._subscribers:
            raise RequestError(f"there is an unfinished request with the id {request.request_id!r}", "request_id")
        subscriber = self._subscribers[request.request_id] = _Subscriber()
        unfinished = request.params.n
        try:
            self._inbox.put(request)
            while unfinished:
                item = await subscriber.queue.get()
                if isinstance(item, Exception):
                    raise item
                if item.error is not None:
                    raise item.error
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._subscribers[request.request_id]
            if unfinished:
                self._inbox.put(request.request_id)

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._take_messages():
                if self._engine.has_work:
                    self._publish(self._engine.step())
            self._die("the engine was stopped")
        except Exception as error:  # whatever it is, nobody may be left waiting
            logger.exception("the step loop failed")
            self._die(f"the engine failed: {error!r}")

    def _take_messages(self) -> bool:
        """Works off the inbox, waiting for a message when there is nothing else to do. False at the end."""
        while not self._inbox.empty() or not self._engine.has_work:
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, Request):
                self._add(message)
            else:
                self._engine.abort(message)
        return True

    def _add(self, request: Request) -> None:
        try:
            self._engine.add_request(request)
        except (RequestError, OverloadedError) as error:
            subscriber = self._subscribers.get(request.request_id)
            if subscriber is not None:
                _hand_over(subscriber.loop, [(subscriber, error)])

    def _publish(self, deltas: list[TokenDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Subscriber, TokenDelta | Exception]]] = {}
        for delta in deltas:
            subscriber = self._subscribers.get(delta.request_id)
            if subscriber is not None:
                by_loop.setdefault(subscriber.loop, []).append((subscriber, delta))
        for loop, items in by_loop.items():
            _hand_over(loop, items)

    def _die(self, reason: str) -> None:
        self._dead = reason
        for subscriber in list(self._subscribers.values()):
            _hand_over(subscriber.loop, [(subscriber, EngineDeadError(reason))])


def _hand_over(loop: asyncio.AbstractEventLoop, items: list[tuple[_Subscriber, TokenDelta | Exception]]) -> None:
    def deliver() -> None:
        for subscriber, item in items:
            subscriber.queue.put_nowait(item)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # that loop is closed: nobody listens there any more
        logger.debug("dropped %d deltas of a closed event loop", len(items))
