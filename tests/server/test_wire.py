"""What goes over the wire, byte by byte."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import EngineConfig
from headrace.server.config import ServerConfig
from headrace.server.service import model_names
from helpers.http_server import RunningServer

HI = [{"role": "user", "content": "Hi"}]


def events(response: httpx.Response) -> list[Any]:
    """The data of an event stream, each event checked to be one line and a blank one."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert re.fullmatch(rb"(data: [^\n]+\n\n)+", response.content)
    lines = [line.removeprefix("data: ") for line in response.content.decode().split("\n\n")[:-1]]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_has_exactly_these_fields(server: RunningServer) -> None:
    answer = server.post("chat/completions", model="T0", messages=HI, max_tokens=2, ignore_eos=True).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    [choice] = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert choice["logprobs"] is choice["message"]["refusal"] is None
    details = {"cached_tokens": 0}
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 2,
        "total_tokens": 22,
        "prompt_tokens_details": details,
    }


def test_a_completion_has_exactly_these_fields(server: RunningServer) -> None:
    answer = server.post("completions", model="T0", prompt="ab", max_tokens=2, ignore_eos=True, logprobs=0).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    [choice] = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert set(choice["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_no_usage_unless_asked(server: RunningServer, route: str, options: Any) -> None:
    prompt = {"messages": HI} if route.startswith("chat") else {"prompt": "x"}
    response = server.post(route, model="T0", max_tokens=3, stream=True, stream_options=options, **prompt)
    assert not any("usage" in chunk for chunk in events(response))


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_usage_comes_last_and_alone(server: RunningServer, route: str) -> None:
    prompt = {"messages": HI} if route.startswith("chat") else {"prompt": "x"}
    body = {"model": "T0", "max_tokens": 5, "n": 2, "seed": 1, "ignore_eos": True} | prompt
    *chunks, last = events(server.post(route, **body, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == server.post(route, **body).json()["usage"]
    assert last["usage"]["completion_tokens"] == 10
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (last["id"], last["object"], last["created"], last["model"])
    }


def test_chunks_of_a_chat(server: RunningServer) -> None:
    body = {"model": "T0", "messages": HI, "max_tokens": 4, "logit_bias": {"120": 100}, "stream": True}
    chunks = events(server.post("chat/completions", **body))
    assert [c["choices"] for c in chunks] == [
        [
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            | ({"stop_reason": None} if reason else {})
        ]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            *[({"content": "x"}, None)] * 4,
            ({}, "length"),
        ]
    ]


def test_every_response_has_an_id_of_its_own(server: RunningServer) -> None:
    routes = ["/health", "/v1/models", "/nowhere", "/health"]
    ids = [server.http.get(route).headers["x-request-id"] for route in routes]
    assert len(set(ids)) == 4


def test_health_and_version(server: RunningServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 512


def test_a_character_is_never_split(server: RunningServer) -> None:
    """T0's tokens are bytes. Biases leave it the two bytes of 'é', in any order, so that some make characters."""
    bias = {str(byte): 100 for byte in "é".encode()}
    body = {"model": "T0", "prompt": "x", "max_tokens": 60, "seed": 2, "logit_bias": bias}
    whole = server.post("completions", **body, logprobs=0).json()["choices"][0]
    data = b"".join(bytes.fromhex(token.removeprefix("bytes:\\x")) for token in whole["logprobs"]["tokens"])
    assert len(data) == 60
    assert whole["text"] == data.decode("utf-8", "replace")
    assert whole["text"].count("é") >= 3
    assert "\ufffd" in whole["text"]
    pieces = [chunk["choices"][0]["text"] for chunk in events(server.post("completions", **body, stream=True))]
    assert "".join(pieces) == whole["text"]


@pytest.mark.parametrize(
    ("model", "served_model_name", "names"),
    [
        ("default", None, ["SmolLM2-135M-Instruct.Q4_1", "default"]),
        ("org/name", None, ["org/name"]),
        ("{tmp}/some.model.gguf", None, ["some.model"]),
        ("{tmp}/.", None, ["models"]),
        ("default", ["a", "b"], ["a", "b"]),
    ],
)
def test_names_of_a_model(tmp_path: Path, model: str, served_model_name: list[str] | None, names: list[str]) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "some.model.gguf").touch()
    engine_config = EngineConfig(model=model.format(tmp=folder))
    assert model_names(engine_config, ServerConfig(served_model_name=served_model_name)) == names
