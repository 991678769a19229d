"""A server over a model in this process, on a port of its own, and what T0 must answer by its NumPy forward pass."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

from headrace.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.server.config import ServerConfig
from headrace.server.run import Server, bind, url_of
from helpers.tiny import t0_config, t0_numpy_logits, t0_weights

# The special tokens are there to be forged: nothing in a message may become one of them.
T0_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


class RunningServer:
    """A server that answers at `url`; `engine` is what it runs on, `thread` where; `exit_status` comes at its end."""

    def __init__(self, url: str, server: Server, thread: threading.Thread, exit_status: list[int]) -> None:
        self.url, self.thread, self.exit_status = url, thread, exit_status
        self.server, self.engine = server, server.engine
        self.http = httpx.Client(base_url=url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{route}", json=body)

    def wait_until_idle(self, seconds: float = 10) -> None:
        """Fails unless soon nothing runs or waits any more, and all blocks are free."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if stats.running == stats.waiting == 0 and stats.free_blocks == stats.num_blocks:
                return
            time.sleep(0.02)
        raise AssertionError(f"the engine is not idle after {seconds} s: {stats}")


@contextmanager
def running_server(model: Path, server: dict[str, Any] | None = None, **settings: Any) -> Iterator[RunningServer]:
    config = ServerConfig(**({"port": 0, "shutdown_timeout": 0} | (server or {})))
    with bind(config) as listener:
        runner = Server(EngineConfig(model=str(model), **settings), config, listener)
        errors: list[HeadraceError] = []

        exit_status: list[int] = []

        def run() -> None:
            try:
                exit_status.append(asyncio.run(runner.run()))
            except HeadraceError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not runner.engine.is_ready and thread.is_alive():
                time.sleep(0.01)
            if errors:
                raise errors[0]
            running = RunningServer(url_of(config, listener), runner, thread, exit_status)
            try:
                yield running
            finally:
                running.http.close()  # which a test may have replaced
                running.client.close()
        finally:
            runner.should_exit = True
            thread.join()


@lru_cache
def t0_logprobs(ids: tuple[int, ...]) -> np.ndarray:
    """Natural-log probabilities `[len(ids), vocab]` of the token after each position."""
    logits = t0_numpy_logits(t0_weights(), t0_config(), list(ids))
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def t0_greedy(prompt: list[int], count: int) -> list[int]:
    """The most likely continuation, token by token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(t0_logprobs(tuple(ids))[-1].argmax()))
    return ids[len(prompt) :]


def t0_text(ids: list[int]) -> str:
    """T0's tokens are bytes; special ones have no text."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")
