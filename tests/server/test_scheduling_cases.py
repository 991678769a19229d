"""Behaviour of schedulers that other servers got wrong, as many clients at once see it."""

import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from helpers.http_server import RunningServer, running_server, t0_greedy, t0_text
from helpers.tiny import save_t0, t0_config

NUMBERS = range(100001, 100033)


def chat_prompt(text: str) -> list[int]:
    """The ids that the template of T0 makes of one turn: text as bytes, `<s>` is 256 and `</s>` is 257."""
    return [256, *f"user:{text}".encode(), 257, 256, *b"assistant:"]


def test_streams_go_on_beside_long_prompts(tmp_path: Path) -> None:
    """Four prompts of 3,200 tokens, one after the other: the stream gets tokens during each, and each is answered."""
    save_t0(tmp_path, config=t0_config(max_position_embeddings=16384))
    settings = {"max_model_len": 16384, "kv_cache_memory": 64 << 20, "threads": 1}
    settings |= {"max_num_batched_tokens": 128, "target_itl_ms": 20}
    with running_server(tmp_path, **settings) as server:
        body = {"model": tmp_path.name, "prompt": "Once", "max_tokens": 16000, "ignore_eos": True, "stream": True}
        received = 0
        ten, ended = threading.Event(), threading.Event()

        def read() -> None:
            nonlocal received
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body | {"logprobs": 0}, timeout=60
            ) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        received += len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"])
                    if received >= 10:
                        ten.set()
                    if ended.is_set():
                        return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert ten.wait(60)
            for first in range(4):
                before = received
                long = server.post(
                    "completions",
                    model=tmp_path.name,
                    prompt=[first, *(b" word" * 640)[1:]],
                    max_tokens=1,
                    ignore_eos=True,
                )
                assert long.json()["usage"]["completion_tokens"] == 1
                assert long.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                assert received - before >= 10
                assert reader.is_alive(), "it is still under way"
        finally:
            ended.set()
            reader.join()
        server.wait_until_idle()


def test_many_at_once_get_their_own_answers(server: RunningServer) -> None:
    texts = [f"Repeat this number ten times: {number}" for number in NUMBERS]
    truth = [t0_text(t0_greedy(chat_prompt(text), 40)) for text in texts]
    assert len(set(truth)) > len(truth) / 2, "answers that were mixed up would be noticed"

    def ask(text: str, stream: bool) -> tuple[str, str]:
        """The answer's id and text."""
        body = {"model": "T0", "messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=body | {"stream": stream, "ignore_eos": True}, timeout=100
        )
        assert answer.status_code == 200
        if not stream:
            return answer.json()["id"], answer.json()["choices"][0]["message"]["content"]
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        (name,) = {chunk["id"] for chunk in chunks}
        return name, "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    ids: list[str] = []
    with ThreadPoolExecutor(len(texts)) as pool:
        for round in range(3):
            streamed = [(i + round) % 2 == 0 for i in range(len(texts))]
            answers = list(pool.map(ask, texts, streamed))
            assert [text for _, text in answers] == truth
            ids += [name for name, _ in answers]
    assert len(set(ids)) == len(ids)


class TestIdOfTheClient:
    """The server gives requests ids of its own; a client's is neither used nor echoed, so it can do no harm."""

    BODY: ClassVar[dict[str, Any]] = {"model": "T0", "temperature": 0, "ignore_eos": True}

    def post(self, server: RunningServer, name: str | bytes, prompt: str, count: int) -> httpx.Response:
        body = self.BODY | {"prompt": prompt, "max_tokens": count}
        headers: Sequence[tuple[bytes, bytes]] = [(b"x-request-id", name if isinstance(name, bytes) else name.encode())]
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)

    def test_the_same_twice(self, server: RunningServer) -> None:
        prompts, counts = ["one", "two", "three"], [100, 50, 20]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(self.post, [server] * 2, ["same"] * 2, prompts[:2], counts[:2]))
        answers.append(self.post(server, "same", prompts[2], counts[2]))
        for answer, prompt, count in zip(answers, prompts, counts, strict=True):
            assert answer.json()["choices"][0]["text"] == t0_text(t0_greedy(list(prompt.encode()), count))
        assert len({*(a.json()["id"] for a in answers), "same"}) == 4
        assert [a.headers["x-request-id"] for a in answers] == ["same"] * 3, "it is the client's to say"

    def test_in_the_body(self, server: RunningServer) -> None:
        answer = server.post("completions", **self.BODY, prompt="a", max_tokens=2, request_id="same")
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "request_id"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 2

    @pytest.mark.parametrize("name", [b"x" * 2**20, "ü\N{PILE OF POO}".encode(), b"a\rb", b"a\nb", b"a\x00b"])
    def test_an_id_that_is_none(self, server: RunningServer, name: bytes) -> None:
        body = json.dumps(self.BODY | {"prompt": "a", "max_tokens": 5, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t0\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=60) as connection:
            answer = b""
            try:
                connection.sendall(head + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (name, len(body), body))
                while piece := connection.recv(1 << 16):
                    answer += piece
            except ConnectionError:  # it may hang up on what it will not read
                pass
        assert not answer or answer.split(None, 2)[1] in (b"200", b"400", b"431")
        assert name not in answer
        assert self.post(server, "after", "a", 5).json()["usage"]["completion_tokens"] == 5
