"""Chat templates: Jinja programs inside a model that turn messages into its prompt.

They come from strangers, so they run in Jinja's sandbox, which keeps attributes of Python objects from them and limits
`range`, and their output and their time are limited too. What a template may use is what `transformers` gives it:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import ModelError, RequestError

MAX_OUTPUT_CHARACTERS = 16 * 2**20
MAX_SECONDS = 2.0

# Ends the final message while it is being continued; a noncharacter, which no text should hold.
_END = "\ufdd2"


class ChatTemplate:
    """A compiled template; `name` is for messages.

    iterates_content: whether the template loops over the parts of a message's content, and so takes it as a list.
    Raises ModelError for a template that does not compile.
    """

    def __init__(self, source: str, name: str = "default") -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self.iterates_content = _iterates_content(_ENVIRONMENT.parse(source))
        except TemplateSyntaxError as error:
            fault = f"line {error.lineno}: {(error.message or '')[:500]}"
            raise ModelError(f"the chat template {name!r} does not compile: {fault}") from None
        except RecursionError:
            raise ModelError(f"the chat template {name!r} does not compile: it is nested too deeply") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt, as text.

        messages: as `prepare_messages` gives them.
        add_generation_prompt: end with the header of an answer that is to come.
        continue_final_message: end within the last message, so that the model goes on with it.
        variables: further names for the template, such as special tokens.
        Raises RequestError where the template refuses the messages or fails on them.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
                    "set only one of them",
                    "continue_final_message",
                )
            messages = [*messages[:-1], _open_ended(messages[-1])]
        values = {"documents": None, **variables, "messages": messages, "tools": tools}
        text = self._run(values | {"add_generation_prompt": add_generation_prompt})
        return _cut(text, messages[-1]) if continue_final_message else text

    def _run(self, values: dict[str, Any]) -> str:
        pieces, length = [], 0
        try:
            with _time_limit(MAX_SECONDS):
                for piece in self._template.generate(values):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_OUTPUT_CHARACTERS:
                        raise RequestError(
                            f"the chat template writes more than {MAX_OUTPUT_CHARACTERS} characters for these messages",
                            "messages",
                        )
        except RequestError:
            raise
        except _TimeIsOver:
            fault = f"the model's chat template takes more than {MAX_SECONDS:g} s for these messages"
            raise RequestError(fault, "messages") from None
        except _Refusal as refusal:
            fault = f"the model's chat template refuses these messages: {_in_short(refusal)}"
            raise RequestError(fault, "messages") from None
        except Exception as error:  # the template is a program of somebody else: it can fail in any way
            fault = f"the model's chat template fails on these messages: {_in_short(error)}"
            raise RequestError(fault, "messages") from None
        return "".join(pieces)


class _TimeIsOver(BaseException):
    """No Exception, which a filter of Jinja's might take for one of its own."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TimeIsOver in what this thread runs within, if it takes longer.

    A template may loop without end and without writing anything. So Python itself looks at the clock, by the hook that
    debuggers use, at each line and call. While a debugger or a profiler of lines is at work there is no limit.
    """
    end = time.monotonic() + seconds

    def look(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise _TimeIsOver
        return look

    if sys.gettrace() is not None:
        yield
        return
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)


def _in_short(error: Exception) -> str:
    """The error on one line of bounded length."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def prepare_messages(messages: Any, *, join_parts: bool) -> list[dict[str, Any]]:
    """Checked copies of chat messages: keys whose value is None are left out, as templates expect.

    join_parts: give content that is a list of text parts as one string, the parts joined with nothing in between.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    return [_prepare(message, f"messages[{i}]", join_parts) for i, message in enumerate(messages)]


def _prepare(message: Any, place: str, join_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{place} must be an object with a role", "messages")
    prepared = {key: value for key, value in message.items() if value is not None}
    content = prepared.get("content", "")
    if isinstance(content, list):
        texts = [_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content)]
        if join_parts:
            prepared["content"] = "".join(texts)
    elif not isinstance(content, str):
        raise RequestError(f"{place}.content must be a string or a list of text parts", "messages")
    return prepared


def _part_text(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f'{place} must be {{"type": "text", "text": "..."}}: this model takes text only', "messages")
    text: str = part["text"]
    return text


# The trailing space shows whether the template keeps white space at the end of a message, or strips it.


def _open_ended(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with `_END` and a space at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END + " "}
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + _END + " "}
        return {**message, "content": [*content[:-1], last]}
    raise RequestError("continue_final_message needs a last message with content to continue", "continue_final_message")


def _cut(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of its last message, which `_open_ended` has made."""
    content = message["content"] if isinstance(message["content"], str) else message["content"][-1]["text"]
    end = text.rfind(_END)
    if end < 0 or content.strip() not in text:
        raise RequestError(
            "the last message cannot be continued: the chat template does not write it out as it is",
            "continue_final_message",
        )
    return text[:end] if text.startswith(" ", end + 1) else text[:end].rstrip()


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether a `for` goes over a message's content, or over a variable that was set to it."""
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):  # `content | selectattr(...)`
            node = node.node
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


class _Refusal(TemplateError):
    """What a template raises on purpose."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model writes; that matters in training, not here."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models know it: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, with limits on the two operators by which a few characters can ask for all of the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _check_limit(len(text) * count)
        elif isinstance(left, int) and isinstance(right, int):
            _check_limit(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _check_limit(size: int) -> None:
    if size > MAX_OUTPUT_CHARACTERS:
        raise OverflowError("a value in it grows too large")


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
