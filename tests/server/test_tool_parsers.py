"""Calls and thoughts in a model's text: the same ones wherever it is cut, and all of it where there are none."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import StructuredOutputs
from headrace.server.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from headrace.server.dialect import dialect_of
from headrace.server.reasoning import TAGS, ReasoningParser
from headrace.server.tool_parsers import Delta, JsonCalls, PythonicCalls, ToolParser
from headrace.server.tools import FORMATS, choose_format
from headrace.structured.constraint import Constraint
from headrace.structured.grammars import Grammars, json_grammar, lark_grammar
from helpers.templates import TEMPLATES
from helpers.tiny import EOS, VOCAB, t0_tokenizer

NAMES = ["f", "get_weather"]
Made = tuple[str, list[tuple[str, str]]]


def made(deltas: list[Delta]) -> Made:
    """Content and calls that deltas make up; fails unless they are of the right form."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert list(call) == ["index", "id", "type", "function"]
                assert (call["index"], call["type"]) == (len(calls), "function")
                calls.append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert list(call) == ["index", "function"]
                assert list(call["function"]) == ["arguments"]
                assert call["function"]["arguments"]
                calls[call["index"]][1] += call["function"]["arguments"]
    return content, [(name, arguments) for name, arguments in calls]


def parsed(parser: ToolParser, *pieces: str) -> Made:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return made(deltas + parser.finish())


def hermes(streams: bool = True) -> ToolParser:
    return JsonCalls(NAMES, "<tool_call>", "</tool_call>", streams=streams)


def mistral() -> ToolParser:
    return JsonCalls(NAMES, "[TOOL_CALLS]", "", streams=True, id_length=9)


def llama() -> ToolParser:
    return FORMATS["llama3_json"].parser(NAMES, is_forced=False)


def pythonic() -> ToolParser:
    return PythonicCalls(NAMES)


TRICKY = '{"a": "}{\\" <tool_call> ]", "b": [1, {"c": null}], "é": "\\u00e9🙂"}'
CASES: list[tuple[Callable[[], ToolParser], str, Made]] = [
    (hermes, "Hello, no call.", ("Hello, no call.", [])),
    (hermes, "  spaces kept \n", ("  spaces kept \n", [])),
    (hermes, "a <tool and a < b <tool_cal", ("a <tool and a < b <tool_cal", [])),
    (hermes, f'<tool_call>\n{{"name": "f", "arguments": {TRICKY}}}\n</tool_call>', ("", [("f", TRICKY)])),
    (hermes, 'Sure.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', ("Sure.", [("f", "{}")])),
    (hermes, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ("", [("f", '{"x": 1}')])),
    (hermes, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    (hermes,
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": '
     '{"city": "Köln"}}\n</tool_call>', ("", [("f", "{}"), ("get_weather", '{"city": "Köln"}')])),
    (hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_call> and so', (" and so", [("f", "{}")])),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
    (hermes, '<tool_call>\n{"na', ('<tool_call>\n{"na', [])),
    (lambda: hermes(False), '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x',
     ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x', [])),
    (lambda: hermes(False), "<tool_call> is a mark", ("<tool_call> is a mark", [])),
    (lambda: hermes(False), '<tool_call>{"name": "f", "arguments": {"a": "x',
     ('<tool_call>{"name": "f", "arguments": {"a": "x', [])),
    (mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]',
     ("", [("f", '{"x": 1}'), ("f", '{"x": 2}')])),
    (mistral, 'hi [TOOL_CALLS]get_weather[ARGS]{"city": "[x]"}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}',
     ("hi", [("get_weather", '{"city": "[x]"}'), ("f", "{}")])),
    (mistral, '[TOOL_CALLS]f{"a": 1}', ("", [("f", '{"a": 1}')])),
    (mistral, "[1, 2] is a list", ("[1, 2] is a list", [])),
    (llama, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (llama, '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
     ("", [("f", '{"a": 1}'), ("f", "{}")])),
    (llama, '{"name": "Bob", "age": 5}', ('{"name": "Bob", "age": 5}', [])),
    (llama, '{"name": "f", "parameters": {"a": ', ('{"name": "f", "parameters": {"a": ', [])),
    (llama, '{"name": "f", "parameters": [1]}', ('{"name": "f", "parameters": [1]}', [])),
    (llama, 'So: {"name": "f", "parameters": {}}', ('So: {"name": "f", "parameters": {}}', [])),
    (llama, "{} ok", ("{} ok", [])),
    (pythonic, '[f(a=1, b="x]"), get_weather(city={"n": ["é", None, True]})]',
     ("", [("f", '{"a": 1, "b": "x]"}'), ("get_weather", '{"city": {"n": ["é", null, true]}}')])),
    (pythonic, " [f()] ", ("", [("f", "{}")])),
    (pythonic, "[f(a=b)]", ("[f(a=b)]", [])),
    (pythonic, "[__import__('os')]", ("[__import__('os')]", [])),
    (pythonic, "[f(1)]", ("[f(1)]", [])),
    (pythonic, "[1, 2] are numbers", ("[1, 2] are numbers", [])),
    (pythonic, "A list: [f()]", ("A list: [f()]", [])),
    (pythonic, "[f(a=1", ("[f(a=1", [])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_the_same_calls_wherever_the_text_is_cut(make: Callable[[], ToolParser], text: str, expected: Made) -> None:
    assert parsed(make(), text) == expected
    for cut in range(len(text) + 1):
        assert parsed(make(), text[:cut], text[cut:]) == expected
    assert parsed(make(), *text) == expected


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f", "arguments": ', '{"name":', '"f"', "{",
     "}", "[", "]", '"', "\\", ",", ";", " ", "\n", "f", "f(", "a=1", ")", "é", "x", "{}", '{"a": 1}}', "<",
     "[CALL_ID]"]
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.lists(pieces, max_size=14).map("".join), st.sampled_from([hermes, mistral, llama, pythonic]))
def test_any_text_gives_the_same_whole_and_character_by_character(text: str, make: Callable[[], ToolParser]) -> None:
    whole = parsed(make(), text)
    assert parsed(make(), *text) == whole
    assert parsed(make(), *(text[i : i + 3] for i in range(0, len(text), 3))) == whole


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda x: st.lists(x, max_size=3), max_leaves=4
    ), max_size=3),
    st.sampled_from(NAMES),
    st.booleans(),
    st.sampled_from([None, 1]),
)  # fmt: skip
def test_whatever_the_arguments_are_they_arrive(
    arguments: dict[str, Any], name: str, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    call = {"name": name, "arguments": arguments}
    body = json.dumps(call, ensure_ascii=ascii_only, indent=indent)
    for make, written in (
        (hermes, f"<tool_call>{body}</tool_call>"),
        (mistral, f"[TOOL_CALLS][{body}]"),
        (mistral, f"[TOOL_CALLS]{name}[ARGS]{text}"),
        (llama, body),
    ):
        _, [(called, received)] = parsed(make(), *written)
        assert called == name
        assert json.loads(received) == arguments


def test_ids_are_unique_and_as_long_as_the_family_wants() -> None:
    parser = mistral()
    deltas = parser.feed('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')
    ids = [call["id"] for delta in deltas for call in delta["tool_calls"] if "id" in call]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[0-9a-z]{9}", each) for each in ids)
    [first, *_] = hermes().feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert re.fullmatch("call_[0-9a-f]{24}", first["tool_calls"][0]["id"])


def test_arguments_come_as_they_are_written() -> None:
    parser = hermes()
    assert made(parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo')) == ("", [("f", '{"a": "lo')])
    assert not parser.is_complete
    [delta] = parser.feed("ng")
    assert delta == {"tool_calls": [{"index": 0, "function": {"arguments": "ng"}}]}
    parser.feed('"}}')
    assert parser.is_complete


def template_of(text: str) -> Tokenizer:
    return Tokenizer(t0_tokenizer(), chat_templates={"default": text}, special_tokens={})


def test_the_family_is_told_by_the_template() -> None:
    for name, family in (
        ("qwen", "hermes"),
        ("llama3", "llama3_json"),
        ("mistral", "generic"),  # this one knows no tools
        ("chatml", "generic"),
        ("gemma", "generic"),
    ):
        assert dialect_of(template_of(TEMPLATES[name])).tools is FORMATS[family], name
    assert choose_format("{{ '[TOOL_CALLS]' }}") is FORMATS["mistral"]
    assert choose_format("{% if x %}[TOOL_CALLS]name[ARGS]{% endif %}") is FORMATS["mistral_args"]
    assert choose_format("format of [func_name1(params_name1=params_value1)]") is FORMATS["pythonic"]
    assert choose_format(None) is FORMATS["generic"]
    assert choose_format(TEMPLATES["qwen"], "mistral") is FORMATS["mistral"]
    assert set(TOOL_CALL_PARSERS) == {"auto", *FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *TAGS}
    assert dialect_of(template_of("{{ '<think>' }}x</think>")).reasoning == TAGS["think"]
    assert dialect_of(template_of(TEMPLATES["chatml"])).reasoning is None
    assert dialect_of(template_of("x</think>"), reasoning="none").reasoning is None


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 'y"']}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", [*FORMATS, "special"])
@pytest.mark.parametrize("kind", ["calls", "calls or body", "calls or text"])
@pytest.mark.parametrize("several", [True, False])
def test_what_the_grammar_of_a_family_allows_its_parser_reads(family: str, kind: str, several: bool) -> None:
    """Random walks through the grammar; the parser must find right calls in them, or the other kind of answer."""
    backend = t0_tokenizer()
    if family == "special":
        backend.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(backend, chat_templates={}, special_tokens={})
    form = FORMATS["mistral" if family == "special" else family]
    text = form.grammar(tokenizer, NAMES, [True, False], kind=kind, several=several)
    if text is None:
        assert kind != "calls"
        assert not form.opening
        return
    parts = [lark_grammar(text), {"name": "arguments_0"} | json_grammar(ARGUMENTS)]
    parts += [{"name": "body", "lark_grammar": 'start: "only " ("this" | "that")'}]
    spec = StructuredOutputs(grammar=json.dumps({"grammars": parts}))
    beginning = Grammars(tokenizer, VOCAB + (family == "special"), [EOS]).compile(spec).result()
    rng = np.random.default_rng(0)
    numbers = set()
    for _ in range(15):
        constraint, ids = Constraint(beginning), []
        while not constraint.finished and len(ids) < 400:
            allowed = np.flatnonzero(np.unpackbits(constraint.masks()[0].result().view(np.uint8), bitorder="little"))
            if EOS in allowed and rng.random() < 0.2:
                break
            if len(allowed) > 150 and kind == "calls or text" and rng.random() < 0.2:  # where text may go on
                tokens = tokenizer.encode(form.opening, False)
            else:
                tokens = [
                    int(
                        rng.choice(
                            [t for t in allowed if 32 <= t < 127 or t == 259] or [t for t in allowed if t != EOS]
                        )
                    )
                ]
            ids += tokens
            for token in tokens:
                constraint.accept(token)
        assert constraint.error is None
        written = tokenizer.decode(ids, skip_special_tokens=False)
        parser = form.parser(NAMES, is_forced=kind == "calls")
        content, calls = parsed(parser, *written)
        numbers.add(len(calls))
        if len(ids) >= 400:
            continue
        assert parser.is_complete
        if not calls:
            assert kind != "calls"
            assert content == written
            assert kind != "calls or body" or written in ("only this", "only that")
        for name, arguments in calls:
            assert (name == "get_weather" and arguments == "{}") or (name == "f" and right(json.loads(arguments)))
    assert max(numbers) > 1 if several else max(numbers) == 1


def right(arguments: dict[str, Any]) -> bool:
    return list(arguments) == ["a", "b"] and 0 <= arguments["a"] <= 99 and arguments["b"] in ("x", 'y"')


THOUGHTS = [
    ("<think>\nhm  mm\n</think>\n\nyes ", False, ("hm  mm", "yes ")),
    ("hm</think>ok", True, ("hm", "ok")),
    ("hm < / </thin", True, ("hm < / </thin", "")),
    ("hm < / </thin ", True, ("hm < / </thin", "")),
    ("<thought>", False, ("", "<thought>")),
    ("no thought", False, ("", "no thought")),
    ("  <think>", False, ("", "")),
    (" <thi", False, ("", " <thi")),
    (" a ", False, ("", " a ")),
    ("x \n y \n", True, ("x \n y", "")),
    ("</think>", True, ("", "")),
    ("<think></think>", False, ("", "")),
    ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
    ("", True, ("", "")),
    ("", False, ("", "")),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), THOUGHTS)
def test_thoughts_are_told_from_answers_wherever_the_text_is_cut(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    for size in range(1, len(text) + 2):
        parser = ReasoningParser(TAGS["think"], is_open=is_open)
        parts = [parser.feed(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
        assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == expected
