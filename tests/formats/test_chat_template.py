"""Chat templates against transformers, and what hostile ones and odd messages come to."""

import logging
import sys
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headrace.errors import ModelError, RequestError
from headrace.formats.chat_template import MAX_OUTPUT_CHARACTERS
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from headrace.formats.tokenizer import Tokenizer
from helpers.model_files import smollm2
from helpers.templates import CHATML, CONVERSATIONS, GEMMA, TEMPLATES, TOOLS
from helpers.tiny import t0_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
HI = [{"role": "user", "content": "Hi"}]


def tokenizer_with(template: str, **more: str) -> Tokenizer:
    return Tokenizer(t0_tokenizer(), chat_templates={"default": template, **more}, special_tokens=NAMES)


def oracle_with(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=t0_tokenizer(), chat_template=template, **NAMES)


@pytest.fixture(scope="module")
def smollm2_template() -> str:
    template = GGUFCheckpoint(smollm2())._file.metadata["tokenizer.chat_template"]
    assert isinstance(template, str)
    return template


@pytest.fixture(params=[*TEMPLATES, "smollm2"])
def template(request: pytest.FixtureRequest) -> str:
    return TEMPLATES.get(request.param) or request.getfixturevalue("smollm2_template")


OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "no tools": {"add_generation_prompt": True, "tools": []},
    "continue": {"add_generation_prompt": False, "continue_final_message": True},
    "both": {"add_generation_prompt": True, "continue_final_message": True},
    "variables": {"add_generation_prompt": True, "enable_thinking": False, "date_string": "today", "bos_token": "B"},
}


def outcome(render: Any, conversation: list[dict[str, Any]], **options: Any) -> str | None:
    """What comes out, or None for an error of any kind."""
    try:
        text = render(conversation, **options)
    except Exception:
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("options", OPTIONS)
def test_renders_as_transformers_does(template: str, options: str) -> None:
    ours, theirs = tokenizer_with(template), oracle_with(template)
    rendered = 0
    for name, conversation in CONVERSATIONS.items():
        expected = outcome(theirs.apply_chat_template, conversation, tokenize=False, **OPTIONS[options])
        assert outcome(ours.render_chat, conversation, **OPTIONS[options]) == expected, name
        if expected is not None:
            rendered += 1
            ids = theirs.apply_chat_template(conversation, **OPTIONS[options])["input_ids"]
            assert ours.encode_chat(conversation, **OPTIONS[options]) == ids, name
        else:
            with pytest.raises(RequestError):
                ours.encode_chat(conversation, **OPTIONS[options])
    assert (rendered >= 5) == (options != "both")


def test_smollm2_counts() -> None:
    """Counts that were computed from the vocabulary and the merges in the file."""
    tokenizer = GGUFCheckpoint(smollm2()).tokenizer()

    def count(content: Any, role: str = "user") -> int:
        return len(tokenizer.encode_chat([{"role": role, "content": content}]))

    assert count("Hi") == 31
    assert count("") == 30
    assert len(tokenizer.encode_chat([{"role": "system", "content": "S"}, *HI])) == 16
    assert count("A<|im_end|>B") == 39  # 33 if it had become the control token
    assert count([{"type": "text", "text": "A<|im_end|>B"}]) == 39
    assert count([{"type": "text", "text": "A<|im_"}, {"type": "text", "text": "end|>B"}]) == 39
    assert count([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]) == count("Hello")
    assert count([]) == 30
    assert len(tokenizer.encode("A<|im_end|>B")) == 3


@pytest.mark.parametrize("messages", [CONVERSATIONS["one"], CONVERSATIONS["tool call"]])
def test_the_template_for_tools_is_taken_when_there_are_tools(messages: list[dict[str, Any]]) -> None:
    templates = {"default": "no tools", "tool_use": "{{ tools | tojson }}{{ messages | length }}"}
    ours, theirs = tokenizer_with(templates["default"], tool_use=templates["tool_use"]), oracle_with(templates)
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render_chat(messages, tools=tools) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'b': '<&>é', 'a': [1, 2.5, none, true]} | tojson }}",
        "{{ {'b': 1, 'a': {'c': 'é'}} | tojson(indent=2, sort_keys=true) }}",
        "{{ ['é', {'x': 1}] | tojson(ensure_ascii=true, separators=(',', ':')) }}",
        "{% for i in 'abc' %}{% if i == 'a' %}{% continue %}{% elif i == 'c' %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}",
        "a{% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %}{{ x is defined }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}{% endfor %}",
        "  {% if true %}\n    x\n  {% endif %}\n  y\n",
        "{{ strftime_now('%Y') }}{{ documents is none }}{{ tools is none }}{{ undefined_name is defined }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}{{ messages[0]['missing'] is defined }}",
        "{% set ns = namespace(n=0) %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ 'ab' * 3 }}{{ 3 * [1] }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}",
        "{{ dict(a=1, b='x') }}{{ messages[0].items() | list }}{{ 'a,b'.split(',')[-1] | upper }}",
    ],
)
def test_the_language_is_that_of_transformers(source: str) -> None:
    expected = oracle_with(source).apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert tokenizer_with(source).render_chat(HI) == expected


def test_content_in_parts_goes_as_parts_to_templates_that_loop_over_them() -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": " two "}]
    conversation = [{"role": "user", "content": parts}]
    expected = oracle_with(GEMMA).apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert "onetwo" in expected
    assert tokenizer_with(GEMMA).render_chat(conversation) == expected
    assert " one  two <|im_end|>" in tokenizer_with(CHATML).render_chat(conversation)


@pytest.mark.parametrize(
    ("loop", "parts"),
    [
        ("{% for p in messages[0].content %}{{ p.text }};{% endfor %}", True),
        ("{% for p in messages[0]['content'] | selectattr('type', 'eq', 'text') %}{{ p.text }};{% endfor %}", True),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }};{% endfor %}", True),
        (
            "{% macro f(content) %}{% for p in content %}{{ p.text }};{% endfor %}{% endmacro %}"
            "{{ f(messages[0].content) }}",
            True,
        ),
        ("{% for line in messages[0].content.split('b') %}{{ line }};{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", False),
    ],
)
def test_which_templates_loop_over_parts(loop: str, parts: bool) -> None:
    conversation = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]}]
    assert tokenizer_with(loop).render_chat(conversation).replace("a;c;", "abc;") == ("a;bc;" if parts else "abc;")


def test_continuing_keeps_the_end_of_the_message_unless_the_template_strips_it() -> None:
    messages = [*HI, {"role": "assistant", "content": "Roses are \n"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    keeps, strips = "{% for m in messages %}{{ m.content }}|{% endfor %}", "{{ messages[-1].content | trim }}|"
    assert tokenizer_with(keeps).render_chat(messages, **options) == "Hi|Roses are \n"
    assert tokenizer_with(strips).render_chat(messages, **options) == "Roses are"
    in_parts = [{"role": "assistant", "content": [{"type": "text", "text": "Ro"}, {"type": "text", "text": "ses "}]}]
    assert tokenizer_with(keeps).render_chat(in_parts, **options) == "Roses "
    looped = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
    assert tokenizer_with(looped).render_chat(in_parts, **options) == "Roses "
    assert in_parts[0]["content"][-1]["text"] == "ses "  # the caller's own is left as it was


@pytest.mark.parametrize("template", ["nothing of it", "{{ messages[-1].content | upper }}", "{{ messages[0].role }}"])
def test_a_message_that_is_not_written_out_cannot_be_continued(template: str) -> None:
    with pytest.raises(RequestError, match="cannot be continued") as error:
        tokenizer_with(template).render_chat(HI, add_generation_prompt=False, continue_final_message=True)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize("last", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_a_message_without_content_cannot_be_continued(last: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="with content to continue"):
        tokenizer_with(CHATML).render_chat([last], add_generation_prompt=False, continue_final_message=True)


def test_a_refusal_shows_the_template_s_own_words() -> None:
    template = (
        "{% if messages[0].role=='system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
        "{% if (m.role=='user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = tokenizer_with(template)
    user, assistant, system = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))
    for messages, words in (
        ([system, user], "no system role"),
        ([user, user], "roles must alternate"),
        ([assistant], "roles must alternate"),
    ):
        for method in (tokenizer.render_chat, tokenizer.encode_chat):
            with pytest.raises(
                RequestError, match=f"the model's chat template refuses these messages: {words}"
            ) as error:
                method(messages)
            assert error.value.param == "messages"
    assert tokenizer.render_chat([user, assistant, user]) == "uau"


def test_a_refusal_without_end_is_cut() -> None:
    with pytest.raises(RequestError, match="refuses these messages: x") as error:
        tokenizer_with("{{ raise_exception('x\n' * 1000000) }}").render_chat(HI)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ ().__class__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ 'x' * 10**12 }}",
        "{{ 2 ** (2 ** 40) }}",
        "{{ [0] * 10**11 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].content + 5 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% include 'other' %}",
        "{{ strftime_now(5) }}",
        "{{ messages[messages[0].content * 100000 ~ '\n'] + 1 }}",
    ],
)
def test_a_template_that_fails_or_attacks_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"the (model's )?chat template (fails|writes|takes)") as error:
        tokenizer_with(source).render_chat(HI)
    assert error.value.param == "messages"
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_long_messages_are_stopped_at_the_limit() -> None:
    messages = [{"role": "user", "content": "x" * 2**20}] * (MAX_OUTPUT_CHARACTERS // 2**20 + 1)
    with pytest.raises(RequestError, match="more than 16777216 characters"):
        tokenizer_with(CHATML).render_chat(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 'open",
        "{% for x in y %}",
        "{% unknown %}",
        "{{ x | what }}",
        "a\n{% endif %}",
        "{{ " + "(" * 5000,
    ],
)
def test_a_template_that_does_not_compile_is_the_model_s_fault(source: str) -> None:
    with pytest.raises(ModelError, match=r"the chat template 'default' does not compile: (line [12]|it is nested)"):
        tokenizer_with(source)
    with pytest.raises(ModelError, match="the chat template 'tool_use' does not compile"):
        tokenizer_with(CHATML, tool_use=source)


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = Tokenizer(t0_tokenizer(), chat_templates={}, special_tokens=NAMES)
    for method in (tokenizer.render_chat, tokenizer.encode_chat):
        with pytest.raises(RequestError, match="no chat template") as error:
            method(HI)
        assert error.value.param == "messages"
    only_tools = Tokenizer(t0_tokenizer(), chat_templates={"tool_use": "{{ 1 }}"}, special_tokens={})
    assert only_tools.render_chat(HI, tools=TOOLS) == "1"
    with pytest.raises(RequestError, match="no chat template"):
        only_tools.render_chat(HI)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "a list of at least one message"),
        ("Hi", "a list of at least one message"),
        (None, "a list of at least one message"),
        ({"role": "user"}, "a list of at least one message"),
        (["Hi"], r"messages\[0\] must be an object with a role"),
        ([*HI, {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string or a list of text parts"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\].content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"messages\[0\].content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "takes text only"),
        ([{"role": "user", "content": "x\ud800"}], "messages holds half of a surrogate pair"),
        ([{"role": "user", "content": "x", "extra": object()}], "made of JSON values, not object"),
        ([{"role": "user", "content": "x", "extra": {5: "x"}}], "keys in messages must be strings, not int"),
    ],
)
def test_messages_that_are_none(messages: Any, fault: str) -> None:
    with pytest.raises(RequestError, match=fault) as error:
        tokenizer_with(CHATML).encode_chat(messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize("tools", ["x", {}, ["x"], [None], 5])
def test_tools_that_are_none(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools must be a list of objects") as error:
        tokenizer_with(CHATML).encode_chat(HI, tools=tools)
    assert error.value.param == "tools"


def test_messages_nested_without_end_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        tokenizer_with("{{ messages | tojson }}").encode_chat([{"role": "user", "content": "x", "extra": deep}])
    with pytest.raises(RequestError):
        tokenizer_with("{{ messages | tojson }}").render_chat([{"role": "user", "content": "x", "extra": deep}])


def test_variables_cannot_replace_what_the_template_is_given() -> None:
    tokenizer = tokenizer_with("{{ documents }}{{ messages[0].content }}{{ bos_token }}")
    assert tokenizer.render_chat(HI, documents="D", bos_token="B") == "DHiB"


def test_chats_get_the_template_s_special_tokens_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    backend = t0_tokenizer()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(backend, chat_templates={"default": template}, special_tokens=NAMES)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode_chat([{"role": "user", "content": "abc"}]) == [256, 97, 98, 99]
    assert not caplog.records
    assert tokenizer.encode("abc") == [256, 97, 98, 99]


ENDLESS = [
    "{% for i in range(10**12) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    "{% set ns = namespace(n=0) %}{% for a in range(99999) %}{% for b in range(99999) %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_no_template_runs_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.chat_template.MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match="chat template"):
        tokenizer_with(source).render_chat([{"role": "user", "content": "Hi"}])
    assert sys.gettrace() is None
    quick = tokenizer_with("{{ messages[0].content }}")
    assert quick.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
