"""The official client over combinations of features: whole and streamed answers are the same, and as they should be."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.http_server import RunningServer, running_server
from helpers.tiny import save_t0, t0_config

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]

# One of each kind, in all combinations.
FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "tools": {"tools": TOOLS},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    "biased": {"temperature": 0.7, "seed": 5, "logit_bias": {"101": 3, "10": -50}, "extra_body": {"min_p": 0.01}},
}
REPORTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "n": 2},
    "stop": {"stop": ["e", "}}"], "stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = t0_config(max_position_embeddings=2048)
    with running_server(save_t0(tmp_path_factory.mktemp("matrix") / "T0", chat_template=TEMPLATE, config=config)) as it:
        yield it


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for part in parts:
        extra = body.get("extra_body", {}) | part.get("extra_body", {})
        body |= part
        if extra:
            body["extra_body"] = extra
    return body


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("form", FORMS)
def test_whole_and_streamed_answers_are_the_same(server: RunningServer, form: str, sampling: str) -> None:
    for report in REPORTS.values():
        base = {"model": "T0", "messages": HI, "max_completion_tokens": 25}
        body = merged(base, FORMS[form], SAMPLING[sampling], report)
        options = body.pop("stream_options", None)
        whole = server.client.chat.completions.create(**body)
        n = body.get("n", 1)
        assert [choice.index for choice in whole.choices] == list(range(n))
        text, calls, logprobs, reasons = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n
        usage = None
        for chunk in server.client.chat.completions.create(**body, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                i = choice.index
                assert reasons[i] is None  # nothing comes after the end
                text[i] += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        calls[i].append([call.function.name, ""])
                    calls[i][call.index][1] += call.function.arguments or ""
                if choice.logprobs is not None:
                    logprobs[i] += choice.logprobs.content
                reasons[i] = choice.finish_reason
        for i, choice in enumerate(whole.choices):
            assert text[i] == (choice.message.content or "")
            assert calls[i] == [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []]
            assert reasons[i] == choice.finish_reason
            assert logprobs[i] == (choice.logprobs.content if choice.logprobs else [])
            check(form, text[i], calls[i], reasons[i])
        assert whole.usage is not None
        tokens = whole.usage.completion_tokens
        assert 0 < tokens <= 25 * n
        if logprobs[0]:
            assert tokens == sum(map(len, logprobs))
        if options:
            assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, tokens)


def check(form: str, text: str, calls: list[list[str]], reason: str | None) -> None:
    """Whether an answer that has not been cut is of the form that was asked for."""
    if reason == "tool_calls":
        assert form in ("call", "tools")
        assert [name for name, _ in calls] == ["f"]
        assert json.loads(calls[0][1])["a"] in range(10)
    elif reason == "stop" and "}" in text and form == "json":
        assert json.loads(text)["a"] in range(10)
    elif reason == "stop" and form == "choice":
        assert text in ("yes", "no", "y", "")  # the last two are cut at the "e"
    else:
        assert reason in ("stop", "length")


def test_completions_too(server: RunningServer) -> None:
    for sampling, n, stop, echo in itertools.product(SAMPLING.values(), (1, 2), (None, ["e"]), (False, True)):
        body = merged({"model": "T0", "prompt": ["ab", [99, 100]], "max_tokens": 8, "n": n, "logprobs": 1}, sampling)
        body |= {"stop": stop, "echo": echo}
        whole = server.client.completions.create(**body)
        texts, tokens = [""] * 2 * n, [[] for _ in range(2 * n)]
        for chunk in server.client.completions.create(**body, stream=True):
            [choice] = chunk.choices
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
        assert texts == [choice.text for choice in whole.choices]
        assert tokens == [choice.logprobs.tokens for choice in whole.choices]
        assert all(text.startswith(("ab", "cd")) == echo or not echo for text in texts)
