"""Many clients at once, slow ones and mad ones: nobody is held up, and everything is back afterwards as it was."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.full_length import FULL, full_length
from helpers.http_client import request_bytes
from helpers.model_files import smollm2
from helpers.server_process import COMPLETION, Process, process

MAX_FILES = 1250  # the server keeps some 200 of them for itself
CLIENT_TIMEOUT = 5


@pytest.fixture(scope="module")
def server(t0_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    flags = ("--client-timeout", str(CLIENT_TIMEOUT), "--max-waiting-requests", "2000")
    with process(tmp_path_factory.mktemp("load"), t0_directory, *flags, max_files=MAX_FILES) as started:
        started.wait_for("/ready")
        yield started


class Resources:
    """What the server's two processes hold."""

    def __init__(self, server: Process) -> None:
        self.server = server
        self.processes = [psutil.Process(server.popen.pid), *server.children()]
        assert len(self.processes) == 2

    def files(self) -> int:
        return sum(p.num_fds() for p in self.processes)

    def memory(self) -> int:
        return sum(p.memory_info().rss for p in self.processes)

    def threads(self) -> int:
        return sum(p.num_threads() for p in self.processes)

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.server.get("/metrics").text)
        return {s.name.removeprefix("headrace:"): s.value for family in families for s in family.samples}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            m = self.metrics()
            idle = m["requests_running"] == m["requests_waiting"] == 0
            if idle and m["kv_cache_free_blocks"] == m["kv_cache_blocks"]:
                return
            assert time.monotonic() < deadline, m
            time.sleep(0.05)

    def wait_for_files(self, count: int) -> None:
        """Until there are no more open files than that, give or take a few: connections are closed in time."""
        deadline = time.monotonic() + 20
        while self.files() > count + 5:
            assert time.monotonic() < deadline, (self.files(), count)
            time.sleep(0.1)


@asynccontextmanager
async def connection(server: Process) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of a response that is not chunked."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return int(head.split()[1]), await reader.readexactly(int(length))


async def stream(server: Process, body: dict[str, Any], counts: list[int], index: int) -> None:
    """Reads a stream to its end, counting its tokens in `counts[index]` as they come."""
    async with connection(server) as (reader, writer):
        writer.write(request_bytes("/v1/completions", COMPLETION | body | {"stream": True}))
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event
                counts[index] += 1
            elif line == b"data: [DONE]\n":
                return
    raise AssertionError(f"the stream {index} was cut off")


def run_streams(server: Process, clients: int, tokens: int) -> list[int]:
    """Runs so many streams at once. Returns how many tokens each had when the first of them was at its end."""
    counts = [0] * clients
    at_first_end: list[int] = []

    async def client(index: int) -> None:
        body = {"prompt": [index % 256, index // 256], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        await stream(server, body | {"logprobs": 0}, counts, index)
        if not at_first_end:
            at_first_end.extend(counts)

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*(client(i) for i in range(clients))), 100)

    asyncio.run(all_of_them())
    assert all(count >= tokens for count in counts), "each token is told, as its logprob is asked for"
    return at_first_end


@pytest.mark.parametrize(("clients", "tokens"), [(16, 60), (256, 16), (1000, 4)])
def test_many_streams(server: Process, clients: int, tokens: int) -> None:
    resources = Resources(server)
    run_streams(server, clients, 1)  # memory that it takes once, it may keep
    resources.wait_until_idle()
    files, memory, threads = resources.files(), resources.memory(), resources.threads()
    at_first_end = run_streams(server, clients, tokens)
    if clients <= 64:  # they all run together
        assert min(at_first_end) > tokens // 2
    resources.wait_until_idle()
    resources.wait_for_files(files)
    assert resources.threads() <= threads + 2
    assert resources.memory() - memory < 50 * 2**20


def test_more_clients_than_files(server: Process) -> None:
    """Each gets an answer, if not the one it wants; and then all is as before."""
    resources = Resources(server)
    resources.wait_until_idle()
    files = resources.files()

    async def client() -> int:
        async with connection(server) as (reader, writer):
            writer.write(request_bytes("/v1/completions", COMPLETION | {"max_tokens": 4}))
            return (await answer(reader))[0]

    async def all_of_them() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(client() for _ in range(MAX_FILES))), 100)

    statuses = asyncio.run(all_of_them())
    assert set(statuses) == {200, 503}
    assert statuses.count(200) > 900
    resources.wait_until_idle()
    assert server.post().status_code == 200
    resources.wait_for_files(files)


def test_slow_clients(server: Process) -> None:
    """Heads and bodies that do not end, streams that nobody reads: all are closed in time, and others are served."""
    resources = Resources(server)
    resources.wait_until_idle()
    files = resources.files()
    endless = {"max_tokens": 300, "ignore_eos": True, "logprobs": 20, "n": 2}

    async def never_ends(data: bytes) -> None:
        async with connection(server) as (reader, writer):
            writer.write(data)
            while await reader.read(1000):  # until the server closes
                pass

    async def never_reads() -> None:
        async with connection(server) as (_, writer):
            writer.write(request_bytes("/v1/completions", COMPLETION | endless | {"stream": True}))
            await asyncio.sleep(3)

    async def canary(done: asyncio.Event) -> int:
        served = 0
        while not done.is_set():
            async with connection(server) as (reader, writer):
                writer.write(request_bytes("/health"))
                assert (await asyncio.wait_for(answer(reader), 20))[0] == 200
                writer.write(request_bytes("/v1/completions", COMPLETION | {"priority": -1}))
                assert (await asyncio.wait_for(answer(reader), 20))[0] == 200
            served += 1
            await asyncio.sleep(0.1)
        return served

    async def all_of_them() -> int:
        done = asyncio.Event()
        watching = asyncio.create_task(canary(done))
        slow = [never_ends(b"POST /v1/completions HTTP/1.1\r\nHo") for _ in range(200)]
        slow += [
            never_ends(request_bytes("/v1/completions", b"", content_length="10000000") + b"{") for _ in range(100)
        ]
        slow += [never_reads() for _ in range(100 if FULL else 20)]
        await asyncio.wait_for(asyncio.gather(*slow), 100)
        done.set()
        return await watching

    assert asyncio.run(all_of_them()) > 2
    resources.wait_until_idle()
    resources.wait_for_files(files)


def malformed(random: random.Random) -> bytes:
    """A request that no server should take."""
    good = {"model": "T0", "prompt": "x", "max_tokens": 1}
    wrong: Any = random.choice([None, "x", -1, 1e300, [], {}, [[]], {"a": 1}, "\ud800", True, 10**30, "\0"])
    field = random.choice(["temperature", "top_p", "n", "stop", "logit_bias", "seed", "stream", "max_tokens", "model"])
    match random.randrange(7):
        case 0:  # a wrong value, of which null and some others are right
            value = wrong if wrong not in (None, True, -1, [], {}, "x", "\0", 10**30) else {"a": {"b": "c"}}
            return request_bytes("/v1/completions", good | {field: value})
        case 1:  # an unknown field
            return request_bytes("/v1/completions", good | {f"field{random.random()}": wrong})
        case 2:  # no JSON
            data = json.dumps(good).encode()
            return request_bytes("/v1/chat/completions", data[: random.randrange(len(data))])
        case 3:  # bytes
            return request_bytes("/v1/completions", random.randbytes(random.randrange(200)))
        case 4:  # deep
            return request_bytes("/v1/completions", b"[" * random.randrange(1, 5000))
        case 5:  # an unknown route
            return request_bytes(f"/v{random.randrange(2, 9)}/{random.randrange(1000)}", good)
        case _:  # another content type
            return request_bytes("/v1/completions", good, content_type=random.choice(["text/plain", "", "a/b"]))


def test_two_thousand_malformed_requests(server: Process) -> None:
    resources = Resources(server)
    before = server.post(prompt="The capital", max_tokens=8, temperature=0).json()["choices"]
    chance = random.Random(1)
    requests = [malformed(chance) for _ in range(2000)]

    async def client(part: list[bytes]) -> None:
        async with connection(server) as (reader, writer):
            for request in part:
                writer.write(request)
                status, body = await asyncio.wait_for(answer(reader), 30)
                assert 400 <= status < 500, (request[:2000], status, body)
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}

    async def all_of_them() -> None:
        await asyncio.gather(*(client(requests[i::8]) for i in range(8)))

    asyncio.run(all_of_them())
    assert server.post(prompt="The capital", max_tokens=8, temperature=0).json()["choices"] == before
    resources.wait_until_idle()


@full_length
@pytest.mark.timeout(0)
def test_memory_does_not_grow_with_what_is_generated(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    grammar = {"type": "json_schema", "json_schema": {"name": "note", "schema": schema}}
    body = {"model": "smol", "prompt": "Write about B-trees.", "max_tokens": 200, "ignore_eos": True}
    body |= {"temperature": 0.7, "seed": 1}
    with process(tmp_path, smollm2(), "--served-model-name", "smol") as server:
        server.wait_for("/ready")
        resources = Resources(server)
        seen = []
        for run in range(300):
            more = {"stream": run % 2 == 0} | ({"logprobs": 2, "response_format": grammar} if run % 3 == 0 else {})
            assert server.post(**body | more).status_code == 200
            if run >= 60 and run % 30 == 0:
                held = sum(p.memory_full_info().uss for p in resources.processes)
                seen.append((held, resources.files(), resources.threads()))
        memory, files, threads = zip(*seen, strict=True)
        # Bytes for each token, by least squares, of which there are 6000 between two measurements.
        slope = float(np.polyfit(np.arange(len(memory)) * 6000, memory, 1)[0])
        assert slope < 100, memory
        assert len(set(files)) == len(set(threads)) == 1
