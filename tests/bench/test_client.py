"""The client over real sockets: what it reads of an answer, however that comes, and what it says of a bad one."""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import fake_server, load, serve
from headrace.bench.client import Client, Reply
from headrace.bench.datasets import Sample
from headrace.bench.load_settings import SweepSettings
from headrace.bench.results import Result
from headrace.bench.sweep import keeps_up
from headrace.cli.main import main
from headrace.errors import ConfigError
from helpers.http_server import RunningServer, running_server

BODY = {"prompt": "a b", "max_tokens": 3, "stream": True}


async def answer(raw: list[bytes], ask: Callable[[Client], Awaitable[Any]]) -> tuple[Any, bytes]:
    """What a client makes of these bytes, sent piece by piece; and what it had sent."""
    asked = bytearray()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
        asked.extend(head + await reader.readexactly(int(length or 0)))
        for piece in raw:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", key="secret", timeout=20)
        return await ask(client), bytes(asked)


def stream(*raw: bytes) -> Reply:
    reply, _ = asyncio.run(answer(list(raw), lambda client: client.stream("completions", BODY)))
    assert isinstance(reply, Reply)
    return reply


def events(*data: Any) -> bytes:
    return b"".join(f"data: {d if isinstance(d, str) else json.dumps(d)}\n\n".encode() for d in data)


def response(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def piece(text: str | None) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_what_is_sent() -> None:
    _, asked = asyncio.run(
        answer([response(events(piece("x"), "[DONE]"))], lambda client: client.stream("completions", BODY))
    )
    head, _, body = asked.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == BODY


def test_pieces_of_text_are_counted_and_others_are_not() -> None:
    """A chat's first event names the role and says nothing; the last ones carry why it ended, and the usage."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    said = [{"choices": [{"delta": d}]} for d in ({"reasoning_content": "hm "}, {"content": "well"}, {})]
    reply = stream(response(events(role, *said, piece("."), piece(None), USAGE, "[DONE]")))
    assert reply.texts == ["hm ", "well", "."]
    assert len(reply.moments) == 3
    assert reply.sent <= reply.moments[0] <= reply.moments[-1] <= reply.end
    assert (reply.error, reply.prompt_tokens, reply.output_tokens) == ("", 7, 3)


def test_any_cut_of_the_bytes_gives_the_same() -> None:
    body = events(piece("é"), piece("b"), USAGE, "[DONE]")
    rng = random.Random(0)
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, len(body)), 12))
        parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        ends = sorted(rng.sample(range(1, len(whole)), 9))
        reply = stream(*(whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True)))
        assert (reply.error, reply.texts, reply.output_tokens) == ("", ["é", "b"], 3)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (response(b'{"error": "full"}', "503 Service Unavailable"), 'HTTP 503: {"error": "full"}'),
        (response(events(piece("x"))), "the answer ended without [DONE]"),
        (response(events("[DONE]")), "the answer has no text"),
        (response(events("{", "[DONE]")), "an event that is none of OpenAI's"),
        (response(events({"choices": 3}, "[DONE]")), "an event that is none of OpenAI's"),
        (response(events(piece("x"), {"error": {"message": "no"}}, "[DONE]")), "the server reports: {'message': 'no'}"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + events(piece("x")), "the connection broke off"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP"),
        (b"", "the connection broke off"),
    ],
)  # fmt: skip
def test_bad_answers_say_why(raw: bytes, error: str) -> None:
    assert stream(raw).error.startswith(error)


def test_nobody_there() -> None:
    reply = asyncio.run(Client("http://127.0.0.1:1").stream("completions", BODY))
    assert reply.error.startswith("no connection: ")
    assert reply.end >= reply.sent
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1/v1/models: no connection"):
        asyncio.run(Client("127.0.0.1:1").get("models"))


def test_an_answer_that_never_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client("http://{}:{}".format(*listener.getsockname()), timeout=0.05)
        assert asyncio.run(client.stream("completions", BODY)).error == "no answer within 0.05 s"


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must be like"):
        Client(url)


def test_the_fake_server_keeps_its_moments() -> None:
    """No earlier than it says, so that what is found beyond that is somebody's error; and many at once."""

    async def measure() -> list[load.Record]:
        server, url = await fake_server.start(ttft=0.02, itl=0.01)
        async with server:
            client = Client(url)
            assert await serve.first_model(client) == "fake"
            send = lambda sample: client.stream("completions", BODY)  # noqa: E731
            records, _ = await load.run([Sample([1, 2], "a b", 3)] * 40, [0.0] * 40, send)
            return records

    for record in asyncio.run(measure()):
        reply = record.reply
        assert (reply.error, reply.texts) == ("", [" word"] * 3)
        assert (reply.prompt_tokens, reply.output_tokens) == (2, 3)
        assert reply.moments[0] - reply.sent >= 0.02
        assert reply.moments[2] - reply.sent >= 0.04


@pytest.fixture(scope="module")
def server(t0_directory: Path) -> Any:
    with running_server(t0_directory, threads=1, kv_cache_memory=32 << 20) as running:
        yield running


def test_a_real_server(server: RunningServer, t0_directory: Path, tmp_path: Path) -> None:
    """Our server counts the same tokens of prompts as the tokenizer does."""
    saved = tmp_path / "serve.json"
    words = ["bench", "serve", "--base-url", server.url, "--tokenizer", str(t0_directory), "--num-prompts", "6"]
    words += [
        "--input-len",
        "20",
        "--output-len",
        "8",
        "--request-rate",
        "200",
        "--goodput",
        "ttft:60000",
        "tpot:60000",
    ]
    assert main([*words, "--output-json", str(saved)]) == 0
    result = Result.load(saved)
    row = result.rows[0]
    assert (row["completed"], row["errors"]) == (6, 0)
    assert row["prompt_tokens"] == row["prompt_tokens_counted_by_server"] == 120
    assert row["output_tokens_counted_by_server"] == 48
    assert row["goodput_req_s"] == row["request_throughput_req_s"]
    assert result.settings["served_model_name"] == "T0"
    assert len(result.details["requests"]) == 6
    assert all(r["moments"][0] >= r["sent"] >= r["start"] for r in result.details["requests"])


def test_a_real_server_in_chats(server: RunningServer, t0_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--base-url", f"{server.url}/v1/", "--tokenizer", str(t0_directory)]
    words += ["--backend", "openai-chat", "--max-concurrency", "2", "--num-prompts", "4", "--input-len", "9"]
    assert main([*words, "--output-len", "5"]) == 0
    figures = dict(line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines())
    assert figures["completed"] == "4"
    assert figures["prompt tokens"] == figures["prompt tokens counted by server"]
    assert figures["output tokens counted by server"] == "20"


def test_a_sweep(server: RunningServer, t0_directory: Path, tmp_path: Path) -> None:
    words = ["bench", "sweep", "--base-url", server.url, "--tokenizer", str(t0_directory), "--input-len", "8"]
    words += ["--output-len", "3", "--request-rates", "50,100", "--seconds-per-rate", "0.2"]
    saved = tmp_path / "sweep.json"
    assert main([*words, "--plot", str(tmp_path / "x.png"), "--output-json", str(saved)]) == 0
    assert [(row["rate_req_s"], row["completed"]) for row in Result.load(saved).rows] == [(50, 10), (100, 20)]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_ends_where_the_server_cannot_keep_up() -> None:
    def records(waits: list[float]) -> list[load.Record]:
        return [load.Record(Sample([1], "x", 1), 0.0, Reply(0.0, [wait], ["x"], wait)) for wait in waits]

    assert keeps_up(records([0.3] * 9))
    assert keeps_up(records([0.001] * 6 + [0.09] * 3))  # that much nobody notices
    assert not keeps_up(records([0.3, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]))
    rates = SweepSettings(start_rate=0.5).rates()
    assert [next(rates) for _ in range(4)] == [0.5, 1, 2, 4]
    assert list(SweepSettings(request_rates="3,1.5").rates()) == [3, 1.5]
    for wrong in ({"request_rates": "1,x"}, {"request_rates": "0"}, {"start_rate": 0.0}, {"seconds_per_rate": -1.0}):
        with pytest.raises(ConfigError):
            SweepSettings(**wrong)  # type: ignore[arg-type]


def test_one_line_for_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], t0_directory: Path) -> None:
    words = ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--tokenizer", str(t0_directory)]
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("error: 127.0.0.1:1/v1/models: no connection: ")
    assert main([*words, "--served-model-name", "x", "--num-warmups", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: no request was answered: no connection: ")
