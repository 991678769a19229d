"""How models are told of functions, and in which form they call them: families that differ by their chat templates."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.formats.tokenizer import Tokenizer
from headrace.server.tool_parsers import JsonCalls, PythonicCalls, ToolParser

if TYPE_CHECKING:
    from headrace.server.protocol import Tool

Grammar = dict[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a family of models calls functions.

    opening, closing: the marks around each call, or around a list of calls; empty where there are none.
    form: of a call between them: one JSON object; a list of them; the name, and then the arguments.
    arguments: the key of the arguments.
    between: what stands between two calls when a grammar writes them.
    is_explained: whether we tell the model of the functions, as its template cannot.
    """

    opening: str = ""
    closing: str = ""
    form: Literal["object", "list", "named", "python"] = "object"
    arguments: str = "arguments"
    between: str = ""
    is_explained: bool = False
    id_length: int = 24

    def parser(self, names: Sequence[str], *, is_forced: bool) -> ToolParser:
        """For an answer that a grammar forces to be calls, or for one that the model is free in."""
        if self.form == "python":
            return JsonCalls(names, "", "", streams=True) if is_forced else PythonicCalls(names)
        streams = is_forced or bool(self.opening)  # as `grammar` sees to it
        return JsonCalls(names, self.opening, self.closing, streams=streams, id_length=self.id_length)

    def grammar(
        self, tokenizer: Tokenizer, names: Sequence[str], takes: Sequence[bool], *, kind: str, several: bool
    ) -> str | None:
        """The Lark grammar of answers. It refers to those of the functions' arguments as `arguments_0` and so on.

        takes: whether each function takes any arguments. several: whether there may be more than one call.
        kind: "calls", "calls or body" where `body` is another grammar, or "calls or text", which is None where only the
            whole answer could tell which of them it is.
        """
        if kind != "calls" and not self.opening:
            return None
        opening, closing = mark(tokenizer, self.opening), mark(tokenizer, self.closing)
        if self.form == "list":
            after = '"[" call (", " call)* "]"' if several else '"[" call "]"'
        else:
            after = f'"\\n" call "\\n" {closing}' if closing else "call"
        calls = [self._call(tokenizer, i, name, any_) for i, (name, any_) in enumerate(zip(names, takes, strict=True))]
        rules = [f"call: {' | '.join(calls)}", f"one: {opening} {after}"]
        all_calls = f"one ({literal(self.between)} one)*" if several and self.between else "one+" if several else "one"
        if kind == "calls":
            rules += [f"start: {all_calls}"]
        elif kind == "calls or body":
            rules += [f"start: {all_calls} | @body"]
        elif opening.startswith("<["):  # a special token, which no text can hold
            rules += ["start: text one" + ("*" if several else "?"), "text: TEXT", TEXT]
        else:  # text ends where the mark appears in it for the first time
            rules += ["start: " + ("begun* text" if several else "text | begun"), "text: TEXT", TEXT]
            rules += [f"begun: mark {after}", f"mark[lazy]: TEXT {opening}"]
        return "\n".join(rules)

    def _call(self, tokenizer: Tokenizer, index: int, name: str, takes_any: bool) -> str:
        """A call of one function, without marks, as Lark writes it."""
        arguments = f"@arguments_{index}" if takes_any else literal("{}")
        if self.form == "named":
            return f"{literal(name)} {mark(tokenizer, '[ARGS]')} {arguments}"
        before = f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments)}: '
        return f"{literal(before)} {arguments} {literal('}')}"


TEXT = r"TEXT: /(.|\n)*/"
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", between="\n"),
    "llama3_json": ToolFormat(arguments="parameters", between="; "),
    "mistral": ToolFormat("[TOOL_CALLS]", form="list", id_length=9),
    "mistral_args": ToolFormat("[TOOL_CALLS]", form="named", id_length=9),
    "pythonic": ToolFormat(form="python", between="; "),
    "generic": ToolFormat("<tool_call>", "</tool_call>", between="\n", is_explained=True),
}

# What the templates of each family hold; the first that fits decides.
SIGNS = (
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("ipython", "llama3_json"),
)


def choose_format(template: str | None, setting: str = "auto") -> ToolFormat:
    """The form of calls that goes with a chat template, or the one that a setting names."""
    if setting != "auto":
        return FORMATS[setting]
    return FORMATS[next((name for sign, name in SIGNS if sign in (template or "")), "generic")]


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def mark(tokenizer: Tokenizer, text: str) -> str:
    """A mark as the grammar's library knows it: by its id, if it is a special token, which no text can spell."""
    token_id = tokenizer.special_id(text)
    return f"<[{token_id}]>" if token_id is not None else literal(text) if text else ""


EXPLANATION = """You can call functions. These are their signatures, one JSON object each:
<tools>
{tools}
</tools>
To call one, answer with nothing but this, for each call:
<tool_call>
{{"name": "<the function's name>", "arguments": <an object with its arguments>}}
</tool_call>"""


def explained_messages(messages: list[dict[str, Any]], tools: "Sequence[Tool]") -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of functions: these become text.

    The signatures go into the system message, calls into that of the assistant, results into one of the user.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], text_of(message.get("content") or "")
        calls = message.get("tool_calls", [])
        for call in calls:
            body = json.dumps(call["function"], ensure_ascii=False)
            text += ("\n" if text else "") + f"<tool_call>\n{body}\n</tool_call>"
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += "\n" + text
                continue
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        changed = message["role"] == "tool" or calls
        plain.append(kept | {"role": role} | ({"content": text} if changed else {}))
        if message["role"] == "tool":
            plain[-1]["is_result"] = True
    for message in plain:
        message.pop("is_result", None)
    if tools:
        signatures = "\n".join(json.dumps(t.function.model_dump(exclude_none=True), ensure_ascii=False) for t in tools)
        explanation = EXPLANATION.format(tools=signatures)
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = text_of(plain[0]["content"]) + "\n\n" + explanation
        else:
            plain.insert(0, {"role": "system", "content": explanation})
    return plain


def text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
