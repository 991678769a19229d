"""Tool calls and reasoning over HTTP: whole and streamed, cut anywhere, in every choice of tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace.errors import ConfigError, ModelError
from headrace.formats.tokenizer import Tokenizer
from headrace.server.protocol import Tool
from headrace.server.tools import explained_messages
from helpers.http_server import T0_TEMPLATE, RunningServer, running_server
from helpers.tiny import save_t0, t0_config, t0_tokenizer

HI = [{"role": "user", "content": "Hi"}]

# They write down what they are given; the second thinks, or is told that it has thought.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
THINKING = TEMPLATE + "{% if thinks %}<think>{% elif thinks is false %}<think></think>{% endif %}"


def serve(path: Path, template: str, **settings: Any) -> Any:
    config = t0_config(max_position_embeddings=4096)
    return running_server(save_t0(path / "T0", chat_template=template, config=config), settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(tmp_path_factory.mktemp("tools"), TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(tmp_path_factory.mktemp("thinking"), THINKING) as running:
        yield running


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters}) | more
    return {"type": "function", "function": function}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
WORD = {"type": "string", "maxLength": 3}
ADD = tool("add", an_object(a=DIGIT, b=DIGIT))
SAY = tool("say", an_object(s=WORD))
NOW = tool("now")


def whole(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("chat/completions", **{"model": "T0", "messages": HI, "seed": 3, "max_tokens": 300} | body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(server: RunningServer, **body: Any) -> dict[str, Any]:
    """The same choice, from its chunks, whose form is checked on the way."""
    body = {"model": "T0", "messages": HI, "seed": 3, "max_tokens": 300, "stream": True} | body
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[0]["delta"]["role"] == "assistant"
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning" in delta:
            assert delta["reasoning"] == delta["reasoning_content"]
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert list(call) == ["index", "id", "type", "function"]
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert list(call) == ["index", "function"]
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": choices[-1]["finish_reason"]}


def both(server: RunningServer, **body: Any) -> dict[str, Any]:
    """The choice, which is the same whole and streamed."""
    one, other = whole(server, **body), streamed(server, **body)
    message = one["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert other["finish_reason"] == one["finish_reason"]
    assert other["message"]["content"] == (message["content"] or "")
    assert other["message"]["tool_calls"] == calls
    assert other["message"].get("reasoning") == message.get("reasoning") == message.get("reasoning_content")
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    assert all(call["type"] == "function" for call in message.get("tool_calls", []))
    return one


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("limit", [1, 8, 20, 40, 45, 300])
def test_a_call_that_is_cut_says_so(server: RunningServer, limit: int) -> None:
    body = {"tools": [SAY], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    choice = both(server, **body, max_tokens=limit)
    try:
        is_complete = [(name, list(a)) for name, a in calls_of(choice)] == [("say", ["s"])]
    except json.JSONDecodeError:
        is_complete = False
    assert choice["finish_reason"] == ("tool_calls" if is_complete else "length")
    assert is_complete == (limit == 300)


@pytest.mark.parametrize("seed", range(2))
def test_every_choice_of_tools(server: RunningServer, seed: int) -> None:
    tools = [ADD, NOW]
    schemas = {"add": ADD["function"]["parameters"], "now": an_object()}
    required = both(server, tools=tools, tool_choice="required", seed=seed)
    named = both(server, tools=tools, tool_choice={"type": "function", "function": {"name": "add"}}, seed=seed)
    for choice in (required, named):
        assert choice["message"]["content"] is None
        if choice["finish_reason"] == "tool_calls":
            for name, arguments in calls_of(choice):
                jsonschema.validate(arguments, schemas[name])
    assert [name for name, _ in calls_of(named)] == ["add"]
    assert named["finish_reason"] == "tool_calls"
    never = both(server, tools=tools, tool_choice="none", seed=seed, max_tokens=30)
    assert "tool_calls" not in never["message"]
    assert never["finish_reason"] in ("stop", "length")
    for chosen in ({}, {"tool_choice": "auto"}):
        free = both(server, tools=tools, seed=seed, max_tokens=30, **chosen)
        assert (free["finish_reason"] == "tool_calls") == bool(free["message"].get("tool_calls"))
        assert free["message"]["content"]


def test_called_of_its_own_accord(server: RunningServer) -> None:
    """The model may call or give another answer; here its first character decides."""
    body = {"tools": [NOW, ADD], "structured_outputs": {"choice": ["x"]}, "parallel_tool_calls": False}
    called = both(server, **body, logit_bias={str(ord("<")): 100})
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["content"] is None
    assert len(calls_of(called)) == 1
    answered = both(server, **body, logit_bias={str(ord("x")): 100})
    assert answered["finish_reason"] == "stop"
    assert answered["message"] == {"role": "assistant", "content": "x", "refusal": None}
    # A mark that never gets whole is text.
    begin = {str(ord("<")): 100}
    assert both(server, tools=[ADD], max_tokens=4, temperature=0, logit_bias=begin)["message"]["content"] == "<<<<"


ARGUMENTS = {
    "number": an_object(a=DIGIT),
    "text": an_object(s=WORD),
    "text, number": an_object(s=WORD, a=DIGIT),
    "number, text": an_object(a=DIGIT, s=WORD),
    "object": an_object(o=an_object(yes={"type": "boolean"})),
    "none": an_object(),
    "nothing": None,
    "empty": {},
    "any": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "boolean"}},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_brace_or_quote_is_lost(server: RunningServer, name: str) -> None:
    schema = ARGUMENTS[name]
    body = {"tools": [tool("f", schema)], "tool_choice": "required", "parallel_tool_calls": False}
    for temperature in (0, 1):
        choice = both(server, **body, temperature=temperature)
        [(called, arguments)] = calls_of(choice)
        assert called == "f"
        jsonschema.validate(arguments, schema or {"type": "object"})
        assert choice["finish_reason"] == "tool_calls"
        if name in ("none", "nothing", "empty"):
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_several_choices_and_several_calls(server: RunningServer) -> None:
    response = server.post(
        "chat/completions",
        model="T0",
        messages=HI,
        tools=[ADD, NOW],
        tool_choice="required",
        n=3,
        seed=1,
        max_tokens=400,
    )
    answers = response.json()["choices"]
    assert [c["index"] for c in answers] == [0, 1, 2]
    assert len({c["message"]["tool_calls"][0]["id"] for c in answers}) == 3
    more = both(server, tools=[NOW], tool_choice="required", max_tokens=200, logit_bias={str(ord("\n")): 100})
    assert len(more["message"]["tool_calls"]) > 1
    assert more["finish_reason"] == "length"
    one = both(server, tools=[NOW], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert len(one["message"]["tool_calls"]) == 1


BAD = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("f", parametres={})]}, "tools[0].function.parametres"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool("f", [])]}, "tools[0].function.parameters"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [tool("f", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)]}, "tools[0]"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [*HI, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": []}]}, "messages[1].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function":
      {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function":
      {"name": "f", "arguments": "{"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_tools_are_refused_by_name(server: RunningServer, change: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"model": "T0", "messages": HI, "max_tokens": 2, "stream": stream} | change
        response = server.post("chat/completions", **body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text


def test_a_schema_that_is_not_strict_is_kept_as_far_as_possible(server: RunningServer) -> None:
    odd = an_object(a={"type": "integer", "minimum": 0, "maximum": 3, "not": {"const": 1}, "x-note": 1})
    [(_, arguments)] = calls_of(both(server, tools=[tool("f", odd)], tool_choice="required", parallel_tool_calls=False))
    assert arguments["a"] in range(4)
    backwards = an_object(s={"type": "string", "pattern": "(?=a)."})
    choice = both(server, tools=[tool("f", backwards)], tool_choice="required", max_tokens=40)
    assert choice["finish_reason"] in ("length", "tool_calls")


def test_calls_and_results_are_shown_to_the_model(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    with_tools = server.post("chat/completions", model="T0", messages=messages, tools=[ADD], max_tokens=1).json()
    tools = [{"type": "function", "function": ADD["function"]}]
    prompt = (
        f'{json.dumps(tools)}\x00user:Hi\x01\x00assistant:<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}'
        "</tool_call>\x01\x00tool:3\x01\x00assistant:"
    )
    assert with_tools["usage"]["prompt_tokens"] == len(prompt)
    hidden = server.post(
        "chat/completions", model="T0", messages=messages, tools=[ADD], tool_choice="none", max_tokens=1
    ).json()
    assert hidden["usage"]["prompt_tokens"] == len(prompt) - len(json.dumps(tools))


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "one", "tool_call_id": "c"},
        {"role": "tool", "content": "two", "tool_call_id": "c"},
        {"role": "assistant", "content": "Done."},
    ]
    plain = explained_messages(messages, [Tool.model_validate(tool("f", {"type": "object"}))])
    assert [m["role"] for m in plain] == ["system", "user", "assistant", "user", "assistant"]
    assert plain[0]["content"].startswith("Be kind.\n\n")
    assert '{"name": "f", "parameters": {"type": "object"}}' in plain[0]["content"]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[2]["content"] == f"{written}\n{written}"
    assert plain[3]["content"] == ("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>")
    assert plain[4] == {"role": "assistant", "content": "Done."}
    # And a template can render them.
    tokenizer = Tokenizer(t0_tokenizer(), chat_templates={"default": T0_TEMPLATE}, special_tokens={})
    assert "<tool_response>" in tokenizer.render_chat(plain)
    assert explained_messages(messages[1:2], []) == messages[1:2]


def thinking(thinker: RunningServer, thinks: bool | None, **body: Any) -> dict[str, Any]:
    return both(thinker, chat_template_kwargs={} if thinks is None else {"thinks": thinks}, **body)


def test_thoughts_come_apart_from_the_answer(thinker: RunningServer) -> None:
    free = thinking(thinker, True, max_tokens=8)
    assert free["message"]["content"] is None
    assert free["message"]["reasoning"]
    assert free["finish_reason"] == "length"
    for thinks in (False, None):
        plain = thinking(thinker, thinks, max_tokens=8)
        assert plain["message"]["content"]
        assert "reasoning" not in plain["message"]


def test_a_grammar_holds_only_after_the_thoughts(thinker: RunningServer) -> None:
    answer = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 15}
    assert thinking(thinker, False, **answer)["message"]["content"] in ("yes", "no")
    free = thinking(thinker, None, **answer)
    assert free["message"]["content"] in ("yes", "no") or free["message"]["reasoning"]
    thought = thinking(thinker, True, **answer)
    assert thought["finish_reason"] == "length"  # T0 never comes to an end of it
    assert thought["message"]["content"] is None
    # Held to a thought of one kind of letter, it can only close it, and then has to answer.
    letters = [*b"</think>", *b"yesno", *b"\n"]
    seeds = [
        thinking(thinker, True, **answer | {"max_tokens": 400}, seed=s, allowed_token_ids=letters) for s in range(3)
    ]
    for choice in seeds:
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] in ("yes", "no")
    call = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    assert calls_of(thinking(thinker, False, **call)) == [("now", {})]
    assert thinking(thinker, True, **call)["message"]["reasoning"]


def test_the_parsers_can_be_set_by_hand(tmp_path: Path) -> None:
    with serve(tmp_path, TEMPLATE, tool_call_parser="llama3_json", reasoning_parser="think") as server:
        body = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
        message = both(server, **body)["message"]  # T0 has to begin with "{" or with "<think>"
        assert message.get("reasoning") or [c["function"]["name"] for c in message["tool_calls"]] == ["add"]
        refused = server.post(
            "chat/completions", model="T0", messages=HI, tools=[ADD], response_format={"type": "json_object"}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"


def test_a_template_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}é")
    (tmp_path / "broken.jinja").write_text("{% for %}")
    for template in (None, TEMPLATE):
        model = save_t0(tmp_path / str(template is None), chat_template=template)
        with running_server(model, {"chat_template": str(tmp_path / "own.jinja")}) as server:
            sent = server.http.post("/tokenize", json={"messages": HI}).json()
            assert bytes(sent["tokens"]).decode() == "<Hi>é"
            answer = server.post("chat/completions", model=model.name, messages=HI, max_tokens=1)
            assert answer.json()["usage"]["prompt_tokens"] == sent["count"]
    for bad, error in (("missing.jinja", ConfigError), ("broken.jinja", ModelError)):
        with pytest.raises(error, match=bad), running_server(model, {"chat_template": str(tmp_path / bad)}):
            pass
