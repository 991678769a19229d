"""Nothing that a client sends may end in anything but an answer or an error that says what is wrong."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.server.protocol import ChatBody, CompletionBody
from helpers.http_server import RunningServer, running_server
from helpers.tiny import save_t0

HI = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


def assert_clean(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    assert "Traceback" not in error["message"]
    for word in words:
        assert word in error["message"]
    return error


COMPLETIONS = [
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [2147483648]}, "prompt"),
    ({"prompt": [18446744073709551616]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [100, None]}, "prompt"),
    ({"prompt": [100, "a"]}, "prompt"),
    ({"prompt": ["a", 100]}, "prompt"),
    ({"prompt": [[100], [259]]}, "prompt"),
    ({"prompt": [[100], [[100]]]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt"),
    ({"prompt": ["x"] * 2000}, "prompt"),
    ({"prompt": ["x"] * 1000, "n": 2}, "n"),
    ({}, "prompt"),
    ({"stop_token_ids": [259]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["2"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": 2}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    ({"logit_bias": {"259": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.0000001}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_tokens": 10**30}, "min_tokens"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 10**30}, "seed"),
    ({"seed": 1e30}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": "1"}, "timeout"),
    ({"timeout": 10**400}, "timeout"),
    ({"queue_timeout": -0.1}, "queue_timeout"),
    ({"queue_timeout": True}, "queue_timeout"),
    ({"suffix": "end"}, "suffix"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e308}, "repetition_penalty"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_base": 0.5}, "dry_base"),
    ({"dry_allowed_length": 0}, "dry_allowed_length"),
    ({"dry_sequence_breakers": "\n"}, "dry_sequence_breakers"),
    ({"xtc_probability": 1.5}, "xtc_probability"),
    ({"xtc_threshold": -0.5}, "xtc_threshold"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [259]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
    ({"temprature": 1}, "temprature"),
    ({"messages": HI}, "messages"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"user": 5}, "user"),
    ({"user": "x" * 513}, "user"),
]


@pytest.mark.parametrize(("change", "param"), COMPLETIONS, ids=lambda value: str(value)[:60])
def test_a_bad_completion_names_the_field(server: RunningServer, change: dict[str, Any], param: str) -> None:
    body = {"model": "T0", "prompt": "x", "max_tokens": 4} | change
    if not change:
        del body["prompt"]
    if "min_tokens" in change:
        del body["max_tokens"]
    error = assert_clean(server.post("completions", **body), 400, param.split(".")[-1])
    assert error["param"] == param or error["param"].startswith(f"{param}[")


MESSAGES = [
    ([], "messages"),
    ("Hi", "messages"),
    (["Hi"], "messages[0]"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "Hi"}], "messages[0].role"),
    ([*HI, {"role": "user", "content": None}], "messages[1].content"),
    ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
     "messages[0].content[0].image_url"),
    ([{"role": "user", "content": "Hi", "nmae": "Bo"}], "messages[0].nmae"),
    ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "user", "content": "Hi"}] * 5000, "messages"),
]  # fmt: skip
CHATS = [
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"prompt": "x"}, "prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(
    ("change", "param"), [*CHATS, *(({"messages": m}, p) for m, p in MESSAGES)], ids=lambda value: str(value)[:60]
)
def test_a_bad_chat_names_the_field(server: RunningServer, change: dict[str, Any], param: str) -> None:
    body = {"model": "T0", "messages": HI, "max_tokens": 2} | change
    error = assert_clean(server.post("chat/completions", **body), 400, param)
    assert error["param"] == param


def test_values_that_ask_for_nothing_are_taken(server: RunningServer) -> None:
    plain = {"model": "T0", "max_tokens": 4, "temperature": 0}
    nothing = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "n": 1, "stop": None, "logit_bias": {}, "user": "me",
        "seed": None, "stream": False, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0, "stream_options": None,
    }  # fmt: skip
    chat_nothing = {
        "tools": None, "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "store": False, "metadata": {}, "modalities": ["text"], "service_tier": "auto", "logprobs": False,
    }  # fmt: skip
    for route, prompt, extra in (
        ("completions", {"prompt": "x"}, {"best_of": 1, "suffix": None, "echo": False}),
        ("chat/completions", {"messages": HI}, chat_nothing),
    ):
        without = server.post(route, **plain, **prompt).json()
        with_them = server.post(route, **plain, **prompt, **nothing, **extra).json()
        assert with_them["choices"] == without["choices"]


BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'{"model":"T0","prompt":"\xc4\xe3\xba\xc3","max_tokens":4}', "not UTF-8"),
    (b'{"model":"\xff","prompt":"x"}', "not UTF-8"),
    ('{"model":"T0","prompt":"x"}'.encode("utf-16"), "not UTF-8"),
    (b'{"model":"T0","prompt":"\\ud83d"}', "surrogate"),
    (b'{"model":"\\uD83D","prompt":"x"}', "surrogate"),
    (b'{"\\ud83d":1}', "surrogate"),
    (b'{"model":"T0","prompt":["x","\\udc00"],"stop":["\\udc00"]}', "surrogate"),
    (b'{"model":"T0","prompt":[' + b"9" * 5000 + b"]}", "too many digits"),
    (b'{"model":"T0","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("body", "fault"), BODIES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_body_that_is_no_json(server: RunningServer, route: str, body: bytes, fault: str) -> None:
    assert_clean(server.http.post(f"/v1/{route}", content=body, headers=JSON), 400, fault)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "seed"])
def test_numbers_are_finite(server: RunningServer, field: str, number: str) -> None:
    body = f'{{"model":"T0","prompt":"x","{field}":{number}}}'
    assert_clean(server.http.post("/v1/completions", content=body, headers=JSON), 400, number)
    body = f'{{"model":"T0","prompt":"x","logit_bias":{{"5":{number}}}}}'
    assert_clean(server.http.post("/v1/completions", content=body, headers=JSON), 400, number)


def test_odd_bodies_that_are_right(server: RunningServer) -> None:
    plain = server.post("completions", model="T0", prompt="x", max_tokens=3, temperature=0).json()
    body = b'\xef\xbb\xbf {"model":"T0","prompt":"\\u0078","max_tokens":3,"temperature":0}\r\n'
    answer = server.http.post("/v1/completions", content=body, headers=JSON)
    assert answer.json()["choices"] == plain["choices"]
    emoji = b'{"model":"T0","prompt":"\\ud83d\\ude42","max_tokens":3}'  # a whole pair
    answer = server.http.post("/v1/completions", content=emoji, headers=JSON)
    assert answer.json()["usage"]["prompt_tokens"] == 4
    zero = server.post("completions", model="T0", prompt="\0", max_tokens=1)
    assert zero.json()["usage"]["prompt_tokens"] == 1
    upper = server.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert upper.status_code == 200


def test_deep_template_variables(server: RunningServer) -> None:
    def send(depth: int) -> httpx.Response:
        value = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"model":"T0","messages":{json.dumps(HI)},"max_tokens":1,"chat_template_kwargs":{{"x":{value}}}}}'
        return server.http.post("/v1/chat/completions", content=body, headers=JSON)

    assert send(20).status_code == 200
    assert send(98).status_code == 200
    assert_clean(send(99), 400, "nested too deeply", "100")
    assert_clean(send(500), 400, "nested too deeply", "100")


def test_other_media_types_are_refused(server: RunningServer) -> None:
    body = json.dumps({"model": "T0", "prompt": "x"})
    for headers in ({}, {"content-type": "text/plain"}, JSON | {"content-encoding": "gzip"}):
        response = server.http.post("/v1/completions", content=body, headers=headers)
        assert_clean(response, 415, "Content-Type: application/json")


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    for path in ("/", "/v1", "/v1/nope", "/v1/completions/", "//v1/models", "/openapi", "/%ff"):
        assert assert_clean(server.http.get(path), 404)["code"] == "unknown_url"
    assert assert_clean(server.http.get("/v1/completions"), 405, "POST")["code"] == "method_not_allowed"
    assert assert_clean(server.http.delete("/v1/models/T0"), 405, "GET")["code"] == "method_not_allowed"
    assert assert_clean(server.http.get("/v1/models/nope"), 404, "nope", "T0")["code"] == "model_not_found"
    for name in ("nope", "t0", "T0/", "../T0"):
        response = server.post("completions", model=name, prompt="x")
        assert assert_clean(response, 404, name, "T0")["code"] == "model_not_found"
    missing = server.post("completions", prompt="x")
    assert assert_clean(missing, 400, "model")["param"] == "model"


def test_bodies_have_a_limit(t0_directory: Any) -> None:
    with running_server(t0_directory, {"max_body_size": 5000, "served_model_name": ["a", "b"]}) as small:
        assert small.post("completions", model="a", prompt="x", max_tokens=1).status_code == 200
        assert small.post("completions", model="b", prompt="x", max_tokens=1).json()["model"] == "b"
        assert_clean(small.post("completions", model="T0", prompt="x"), 404, "'a'", "'b'")
        assert [m["id"] for m in small.http.get("/v1/models").json()["data"]] == ["a", "b"]
        declared = small.post("completions", model="a", prompt="x" * 6000)
        assert_clean(declared, 413, "5000")

        def chunks() -> Any:
            for _ in range(10):
                yield b" " * 1000

        counted = small.http.post("/v1/completions", content=chunks(), headers=JSON)
        assert_clean(counted, 413, "5000")


def test_a_prompt_must_leave_room(server: RunningServer) -> None:
    for prompt, max_tokens in (("x" * 512, None), ("x" * 600, 1), ("x" * 500, 13)):
        response = server.post("completions", model="T0", prompt=prompt, max_tokens=max_tokens, stream=True)
        error = assert_clean(response, 400, "512", str(len(prompt)), "" if max_tokens is None else str(max_tokens))
        assert error["code"] == "context_length_exceeded"
    response = server.post("chat/completions", model="T0", messages=[{"role": "user", "content": "x" * 600}])
    assert assert_clean(response, 400, "512", "618")["code"] == "context_length_exceeded"
    fits = server.post("completions", model="T0", prompt="x" * 511, ignore_eos=True).json()
    assert fits["usage"]["completion_tokens"] == 1  # the default of 16 is no demand


def test_a_template_that_refuses(server: RunningServer, tmp_path: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with running_server(save_t0(tmp_path / "refusing", chat_template=template)) as refusing:
        response = refusing.post("chat/completions", model="refusing", messages=HI)
        assert_clean(response, 400, "roles must alternate")
    with running_server(save_t0(tmp_path / "bare")) as bare:
        assert_clean(bare.post("chat/completions", model="bare", messages=HI), 400, "chat template")
        assert bare.post("completions", model="bare", prompt="abc", max_tokens=2).status_code == 200


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("T0") | st.just(HI),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(("route", "kind"), [("completions", CompletionBody), ("chat/completions", ChatBody)])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_is_answered_or_refused(server: RunningServer, route: str, kind: Any, data: st.DataObject) -> None:
    names = [*kind.model_fields, *kind.not_yet, "unknown"]
    body = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=4))
    if data.draw(st.booleans()):  # mostly right, so that some get through to the engine
        body = (
            {"model": "T0", "prompt": "x"} | body if kind is CompletionBody else {"model": "T0", "messages": HI} | body
        )
    body["max_tokens"] = data.draw(st.sampled_from([1, 3])) if body.get("max_tokens") is None else body["max_tokens"]
    response = server.http.post(f"/v1/{route}", content=json.dumps(body).encode(), headers=JSON)
    if response.status_code != 200:
        assert_clean(response, response.status_code)
        assert response.status_code in (400, 404)
