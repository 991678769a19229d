"""Structured output over HTTP: schemas that must be refused, patterns, references, and all forms of asking for it."""

import json
import re
from typing import Any

import jsonschema
import pytest

from helpers.http_server import RunningServer

HI = [{"role": "user", "content": "Hi"}]


def ask(server: RunningServer, schema: Any, **more: Any) -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    body = {"model": "T0", "messages": HI, "max_tokens": 60, "response_format": form, "seed": 1} | more
    return server.post("chat/completions", **body)


BAD_SCHEMAS = [
    ({"type": "not-a-type"}, "not-a-type"),
    ({"type": "object", "properties": {"a": 5}}, "schema"),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "none"),
    ({"$ref": "#/nowhere"}, "$ref"),
    ({"$ref": "http://127.0.0.1:9/x.json"}, "$ref"),
    ("x", "object"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "array", "minItems": 5, "maxItems": 2}, "minItems"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "description": "x" * 2_000_000}, "at most"),
]


@pytest.mark.parametrize(("schema", "word"), BAD_SCHEMAS, ids=lambda value: str(value)[:50])
def test_a_bad_schema_is_refused_by_name(server: RunningServer, schema: Any, word: str) -> None:
    for stream in (False, True):
        response = ask(server, schema, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert word in error["message"]
        assert error["param"].startswith("response_format")
        assert len(error["message"]) < 1000


def test_deep_schemas_are_refused(server: RunningServer) -> None:
    text = '{"type":"object","properties":{"a":' * 500 + "{}" + "}}" * 500
    body = '{"model":"T0","messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_schema",'
    body += f'"json_schema":{{"name":"a","schema":{text}}}}}}}'
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]


PATTERNS = [r"^\d{3}-[a-z]{2}$", r"^\w{4}\s\w{2}$", "^(a|bc)+x?$", '^[^"]{2,4}$', "^é{2}$"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("nested", [False, True])
def test_patterns_are_kept(server: RunningServer, pattern: str, nested: bool) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": pattern}},
        "required": ["id"],
        "additionalProperties": False,
    }
    if nested:
        schema = {"type": "object", "properties": {"in": schema}, "required": ["in"], "additionalProperties": False}
    for temperature in (0, 1.0):
        response = ask(server, schema, temperature=temperature, max_tokens=100)
        assert response.status_code == 200
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            answer = json.loads(choice["message"]["content"])
            value = answer["in"]["id"] if nested else answer["id"]
            assert re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value)
        else:  # only a pattern without an end
            assert choice["finish_reason"] == "length"
            assert "+" in pattern


TREE = {
    "type": "object",
    "properties": {
        "v": {"enum": ["A", "B"]},
        "l": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]},
        "r": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]},
    },
    "required": ["v", "l", "r"],
    "additionalProperties": False,
}
PAIR = {"type": "array", "items": {"$ref": "#/$defs/one"}, "minItems": 2, "maxItems": 2}
REFERENCES = [
    {"$ref": "#/$defs/t", "$defs": {"t": TREE}},
    {
        "type": "object",
        "properties": {
            "x": {"anyOf": [{"type": "boolean"}, {"enum": [1, 2]}]},
            "y": {"$ref": "#/properties/x/anyOf/1"},
        },
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/two"}, "b": {"$ref": "#/$defs/two"}, "c": {"$ref": "#/$defs/three"}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {"one": {"type": "boolean"}, "two": PAIR, "three": {"enum": ["z"]}},
    },
    {
        "type": "object",
        "properties": {
            "a/b": {"$ref": "#/$defs/x~1y"},
            "c~d": {"$ref": "#/$defs/x~0y"},
            "é": {"$ref": "#/$defs/%C3%BC"},
        },
        "required": ["a/b", "c~d", "é"],
        "additionalProperties": False,
        "$defs": {"x/y": {"enum": [1]}, "x~y": {"enum": [2]}, "ü": {"enum": [3]}},
    },
]


@pytest.mark.parametrize("schema", REFERENCES, ids=range(len(REFERENCES)))
def test_references_are_followed(server: RunningServer, schema: dict[str, Any]) -> None:
    for seed in range(3):
        response = ask(server, schema, max_tokens=200, temperature=0.7, seed=seed)
        if response.status_code == 400:  # then it says so
            assert "$ref" in response.json()["error"]["message"]
            continue
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)


FORMS = [
    ({"response_format": {"type": "json_object"}}, lambda t: isinstance(json.loads(t), dict)),
    ({"structured_outputs": {"json_object": True}}, lambda t: isinstance(json.loads(t), dict)),
    ({"structured_outputs": {"json": {"enum": [1, 2]}}}, lambda t: json.loads(t) in (1, 2)),
    ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, lambda t: json.loads(t) in (1, 2)),
    ({"structured_outputs": {"regex": "[a-c]{2}"}}, re.compile("[a-c]{2}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].__contains__),
    ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab".__eq__),
    ({"guided_json": {"enum": [1, 2]}}, lambda t: json.loads(t) in (1, 2)),
    ({"guided_regex": "[a-c]{2}"}, re.compile("[a-c]{2}").fullmatch),
    ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
    ({"guided_grammar": 'start: "a" "b"'}, "ab".__eq__),
]


@pytest.mark.parametrize(("form", "fits"), FORMS, ids=range(len(FORMS)))
def test_every_form_on_both_routes_whole_and_streamed(server: RunningServer, form: dict[str, Any], fits: Any) -> None:
    settings = {"model": "T0", "n": 2, "seed": 4, "max_tokens": 150} | form
    chat = server.post("chat/completions", messages=HI, **settings).json()["choices"]
    plain = server.post("completions", prompt="x", **settings).json()["choices"]
    for choice, text in [(c, c["message"]["content"]) for c in chat] + [(c, c["text"]) for c in plain]:
        assert choice["finish_reason"] == "length" or fits(text)
    chunks = server.client.chat.completions.create(
        model="T0", messages=HI, n=2, seed=4, max_tokens=150, stream=True, extra_body=form
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c["message"]["content"] for c in chat]


def test_many_compile_while_others_run(server: RunningServer) -> None:
    """A schema that takes a while to compile holds up neither the answer of another nor the engine."""
    big = {"enum": [f"{i:x}" * 3 for i in range(15_000)]}
    slow = server.client.chat.completions.create(
        model="T0", messages=HI, max_tokens=50, stream=True, extra_body={"ignore_eos": True}
    )
    assert ask(server, big, max_tokens=5).status_code == 200
    assert sum(1 for _ in slow) > 1
