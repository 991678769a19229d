"""Which grammars are taken, which are refused and with which words, and which texts they allow."""

import json

import pytest

from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import StructuredOutputs
from headrace.structured.constraint import Constraint
from headrace.structured.grammars import MAX_GRAMMAR_LENGTH, Grammars
from helpers.tiny import EOS, VOCAB, t0_tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer(t0_tokenizer(), chat_templates={}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return Grammars(tokenizer, VOCAB, [EOS])


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_nested_beyond_what_python_reads(grammars):
    for schema in (nested(5000), '{"items":' * 5000 + "{}" + "}" * 5000):
        with pytest.raises(RequestError, match="recursion"):
            grammars.check(StructuredOutputs(json=schema))


BAD_SCHEMAS = [
    ({"type": "not-a-type"}, "not-a-type"),
    ({"type": "object", "properties": {"a": 5}}, "object or boolean"),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "none"),
    ({"$ref": "#/nowhere"}, "$ref"),
    ({"$ref": "http://127.0.0.1:9/x.json"}, "$ref"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "array", "minItems": 5, "maxItems": 2}, "minItems"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "string", "format": "colour"}, "colour"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"required": "a"}, "required"),
    (False, "Unsatisfiable"),
    (json.dumps(nested(300)), "recursion"),
    ("x", "JSON"),
    ("[1]", "must be an object"),
    ('"x"', "must be an object"),
]


@pytest.mark.parametrize(("schema", "word"), BAD_SCHEMAS, ids=lambda value: str(value)[:60])
def test_a_schema_that_cannot_be_enforced_is_refused_by_what_is_wrong(grammars, schema, word):
    with pytest.raises(RequestError) as caught:
        grammars.check(StructuredOutputs(json=schema))
    message = str(caught.value)
    assert word in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"regex": "(a"}, "regex"),
        ({"regex": "(?<=a)b"}, "look"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "{"}, "Lark"),
        ({"grammar": '{"grammars": 5}'}, "Lark"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"choice": ["x" * MAX_GRAMMAR_LENGTH]}, str(MAX_GRAMMAR_LENGTH)),
        ({"json": {"x": {5, 6}}}, "JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_grammars_are_refused_as_well(grammars, spec, word):
    with pytest.raises(RequestError, match=word):
        grammars.check(StructuredOutputs(**spec))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"json_object": 1},
        {"json": 5},
        {"json": []},
        {"regex": ""},
        {"regex": 5},
        {"grammar": ""},
        {"choice": []},
        {"choice": "a"},
        {"choice": [""]},
        {"choice": [5]},
        {"choice": ["a"] * 5000},
        {"choice": ["\ud800"]},
        {"regex": "\udfff"},
    ],
    ids=str,
)
def test_what_is_no_structured_output(bad):
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        StructuredOutputs(**bad)
    assert caught.value.param == "structured_outputs"


def takes(grammars: Grammars, spec: StructuredOutputs, text: str) -> bool:
    """Whether the grammar allows the text, byte by byte as T0 has its tokens, and an end after it."""
    constraint = Constraint(grammars.compile(spec).result())
    for byte in text.encode():
        if constraint.finished or not allowed(constraint, byte):
            return False
        constraint.accept(byte)
    return constraint.finished or allowed(constraint, EOS)


def allowed(constraint: Constraint, token: int) -> bool:
    return bool(constraint.masks()[0].result()[token // 32] >> (token % 32) & 1)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["x"],
    "additionalProperties": False,
}
TEXTS = [
    ({"json": POINT}, ['{"x":1}', '{"x": -20, "s": "é🙂"}', '{\n  "x": 1\n}', '{"x":1,"s":"\\n"}'],
     ["", "{}", '{"x":1.5}', '{"x":1', '{"x":1}}', '{"x":1,}', '{"x":1,"y":2}', '{"x":1,"s":"abcd"}', "null"]),
    ({"json": json.dumps(POINT)}, ['{"x":1}'], ["{}"]),
    ({"json": True}, ["null", "[1, {}]"], ["nul", ""]),
    ({"json_object": True}, ["{}", '{"a":[1,2,{"b":null}]}'], ["[]", "1", ""]),
    ({"regex": r"\d{2}-[a-z]+"}, ["12-ab"], ["1-ab", "12-", "12-ab ", "x12-ab"]),
    ({"regex": "^a/b$"}, ["a/b"], ["a/", "xa/b"]),
    ({"choice": ["yes", "no", "né\n\"'\\"]}, ["yes", "no", "né\n\"'\\"], ["y", "yes!", "maybe", ""]),
    ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "(((x)))"], ["((x)", "()"]),
    ({"grammar": '{"grammars":[{"lark_grammar":"start: \\"=\\" @v"},{"name":"v","json_schema":{"enum":[1,2]}}]}'},
     ["=1", "=2"], ["=3", "1"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "good", "bad"), TEXTS, ids=lambda value: str(value)[:40])
def test_what_a_grammar_allows(grammars, spec, good, bad):
    for text in good:
        assert takes(grammars, StructuredOutputs(**spec), text), text
    for text in bad:
        assert not takes(grammars, StructuredOutputs(**spec), text), text


def test_white_space_comes_to_an_end(grammars):
    spec = StructuredOutputs(json=POINT)
    assert takes(grammars, spec, '{ \t"x":1}') is False
    for space in (" ", "\n", "\n" + " " * 20):
        assert takes(grammars, spec, "{" + space + '"x":1}')
    for space in ("  ", "\n\n", "\n" + " " * 21, " \n"):
        assert not takes(grammars, spec, "{" + space + '"x":1}')
    # And a schema cannot ask for other rules.
    liberal = POINT | {"x-guidance": {"whitespace_pattern": "[ ]*"}}
    assert not takes(grammars, StructuredOutputs(json=liberal), '{  "x":1}')


def test_a_grammar_is_compiled_once(grammars):
    spec = StructuredOutputs(regex="once")
    assert grammars.compile(spec) is grammars.compile(StructuredOutputs(regex="once"))
    with pytest.raises(RequestError):
        grammars.check(StructuredOutputs(regex="(twice"))
    with pytest.raises(RequestError):
        grammars.check(StructuredOutputs(regex="(twice"))


def test_what_takes_too_long_is_refused():
    tokenizer = Tokenizer(t0_tokenizer(), chat_templates={}, special_tokens={})
    impatient = Grammars(tokenizer, VOCAB, [EOS], seconds=0.0)
    with pytest.raises(RequestError, match="more than 0 s"):
        impatient.check(StructuredOutputs(json={"enum": [f"{i:x}" for i in range(20_000)]}))


def test_huge_grammars_come_to_an_end(grammars):
    for schema in (
        {"enum": ["x" * 20 + str(i) for i in range(15_000)]},
        {"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"},
        {"properties": {f"k{i}": {"type": "string", "pattern": "(.*a.{20}b){3}"} for i in range(500)}},
    ):
        error = grammars.compile(StructuredOutputs(json=schema)).exception(timeout=60)
        assert error is None or "too" in str(error)


def test_a_model_without_an_end_token_and_with_more_rows_than_tokens():
    tokenizer = Tokenizer(t0_tokenizer(), chat_templates={}, special_tokens={})
    for size in (VOCAB - 1, VOCAB, VOCAB + 40):
        constraint = Constraint(Grammars(tokenizer, size, []).compile(StructuredOutputs(regex="ab")).result())
        constraint.accept(ord("a"))
        assert not constraint.finished
        constraint.accept(ord("b"))
        assert constraint.finished


def test_a_token_that_is_not_allowed_ends_in_an_error(grammars):
    constraint = Constraint(grammars.compile(StructuredOutputs(regex="ab")).result())
    constraint.accept(ord("x"))
    assert constraint.error is not None
    assert "grammar" in str(constraint.error)
