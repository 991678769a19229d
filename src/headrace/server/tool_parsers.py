"""Finds the calls of functions in what a model writes, as it writes it.

A parser takes the text in any pieces and gives out deltas in OpenAI's form: `{"content": ...}`, and for each call
first its name, then its arguments as they come. Put together they are the same wherever the text was cut. White space
before a call, and after the last one, is no content.
"""

import ast
import json
import uuid
from collections.abc import Collection, Generator
from typing import Any

Delta = dict[str, Any]
Reader = Generator[None, str, None]  # is sent one character after the other


class ToolParser:
    """What all parsers share: text as it is read, and calls and content as they are given out.

    names: of the functions that may be called. id_length: 24 for ids such as `call_0123...`, else their whole length.
    num_calls: how many have been given out. is_complete: whether their arguments have been, too.
    """

    def __init__(self, names: Collection[str], id_length: int = 24) -> None:
        self.names, self.id_length = names, id_length
        self.num_calls = 0
        self.is_complete = True
        self._held = ""  # read, but not given out: it may belong to a call, or else is content
        self._space = ""  # at the end of the content so far: dropped if a call follows
        self._out: list[Delta] = []
        self._reader = self._read()
        next(self._reader)

    def feed(self, text: str) -> list[Delta]:
        for character in text:
            self._held += character
            self._reader.send(character)
        return self._taken()

    def finish(self) -> list[Delta]:
        """Ends the text: what was held back is content after all."""
        self._give_up()
        if self._space and not self.num_calls:
            self._put({"content": self._space})
        return self._taken()

    def _read(self) -> Reader:
        """The parser itself: it yields for the next character, which it finds at the end of `_held`, too."""
        raise NotImplementedError

    def _give_up(self) -> None:
        self._content(self._held)
        self._held = ""

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._put({"content": kept})

    def _call(self, name: str) -> None:
        """Gives out the beginning of a call."""
        self._space = self._held = ""
        random = uuid.uuid4().hex[: self.id_length]
        function = {"name": name, "arguments": ""}
        call_id = f"call_{random}" if self.id_length == 24 else random
        self._put({"tool_calls": [{"index": self.num_calls, "id": call_id, "type": "function", "function": function}]})
        self.num_calls += 1
        self.is_complete = False

    def _arguments(self, text: str) -> None:
        self._held = ""
        if text:
            self._put({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]})

    def _put(self, delta: Delta) -> None:
        """Gives out a delta, together with the one before where that is possible."""
        last = self._out[-1] if self._out else {}
        if "content" in delta and "content" in last:
            last["content"] += delta["content"]
        elif "tool_calls" in delta and "tool_calls" in last and "id" not in delta["tool_calls"][0]:
            last["tool_calls"][0]["function"]["arguments"] += delta["tool_calls"][0]["function"]["arguments"]
        else:
            self._out.append(delta)

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out


class JsonCalls(ToolParser):
    """Calls that are JSON objects, `{"name": ..., "arguments": {...}}`, after a mark such as `<tool_call>`.

    There may be several after one mark, in a list or with commas or semicolons between them, or each with its own. In
    Mistral's newer form the name stands before the object, which is that of the arguments.

    opening: the mark; with an empty one all of the text is calls, or none is. closing: the one at the end, or empty.
    streams: whether a grammar sees to it that calls are right, so that their arguments can be given out as they come.
        Without one a call is given out when it is complete, and what turns out to be none is content.
    """

    def __init__(
        self, names: Collection[str], opening: str, closing: str, *, streams: bool, id_length: int = 24
    ) -> None:
        self.opening, self.closing, self.streams = opening, closing, streams
        super().__init__(names, id_length)

    def _read(self) -> Reader:
        while True:
            yield from self._text()
            yield from self._calls()
            if not self.opening:
                break
        while True:  # without a mark, there are no calls in the middle of a text
            self._give_up()
            yield

    def _text(self) -> Reader:
        """Up to and with the mark."""
        while not self._held.endswith(self.opening):
            safe = len(self._held) - overlap(self._held, self.opening)
            self._content(self._held[:safe])
            self._held = self._held[safe:]
            yield
        self._content(self._held.removesuffix(self.opening))
        self._held = self.opening

    def _calls(self) -> Reader:
        """After the mark: calls, up to the closing mark, or to something that is neither."""
        before = self.num_calls
        while True:
            yield
            character, inside = self._held[-1], self._held.removeprefix(self.opening).strip(" \t\r\n[],;")
            if character == "{":
                name = inside[:-1].partition("[CALL_ID]")[0].removesuffix("[ARGS]")
                yield from self._object(name)
                if self._held:  # that was no call
                    return self._give_up()
            elif self.num_calls > before and not inside:  # only what stands between calls, or a mark begins
                self._held = self._held[len(self._held) - overlap(self._held, self.opening) :]
            elif self.num_calls > before and self.closing and self.closing.startswith(inside):
                if inside == self.closing:
                    self._held = ""
                    return None
            elif inside and not (self.num_calls == before and self._may_be_name(inside)):
                if self.num_calls == before:
                    return self._give_up()
                return None  # it may be the next mark

    def _may_be_name(self, text: str) -> bool:
        """Whether a text after the mark can become the name of a function, with Mistral's own marks after it."""
        name, mark, _ = text.partition("[")
        names = self.names if mark else [n[: len(name)] for n in self.names]
        return not self.closing and bool(self.opening) and name in names

    def _object(self, name: str) -> Reader:
        """One call, of which the first brace was read. Afterwards `_held` is empty, unless it was none.

        name: what stood before the brace; then the object is that of the arguments.
        """
        call = CallObject()
        for character in f'{{"name": {json.dumps(name)}, "arguments": {{' if name else "{":
            call.feed(character)
        sent: int | None = None  # characters of the arguments that have been given out; None before the name has been
        while not call.done:
            yield
            try:
                call.feed(self._held[-1])
                if name and call.depth == 1:
                    call.feed("}")
            except ValueError:
                return
            if self.streams and call.name in self.names and call.arguments:
                if sent is None:
                    self._call(call.name or "")
                self._arguments(call.arguments[sent or 0 :])
                sent = len(call.arguments)
        if sent is None and call.is_right(self.names):
            self._call(call.name or "")
            self._arguments(call.arguments or "{}")
            sent = 0
        if sent is not None:
            self.is_complete = True


class CallObject:
    """One `{"name": "...", "arguments": {...}}`, read character by character. `parameters` is another word for it.

    name: once it is known. arguments: their JSON so far, as it was written. depth: of open brackets. done: its last
    brace was there.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.depth = 0
        self.done = False
        self._in_string = self._escaped = False
        self._key: str | None = None  # whose value is being read
        self._text = ""  # of a key, or of a value other than the arguments

    def feed(self, character: str) -> None:
        """Raises ValueError for what is no such object."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif self.depth <= 1 and character.isspace():
            return
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self.depth += 1
            if self.depth == 1:
                return
        elif character in "}]":
            self.depth -= 1
            if self.depth == 0:
                self._end_value()
                self.done = True
                return
        elif self.depth == 1 and character == ":" and self._key is None:
            self._key, self._text = str(json.loads(self._text)), ""
            return
        elif self.depth == 1 and character == ",":
            self._end_value()
            return
        if self._key in ("arguments", "parameters"):
            self.arguments += character
        else:
            self._text += character

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = str(json.loads(self._text))
        self._key, self._text = None, ""

    def is_right(self, names: Collection[str]) -> bool:
        """Whether it calls one of these functions, with an object."""
        try:
            return self.name in names and isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            return False


class PythonicCalls(ToolParser):
    """All of the text is a list of calls in Python, `[f(a=1), g()]`, or none of it is.

    They are given out when the list is complete: only then it is certain what they mean.
    """

    def _read(self) -> Reader:
        yield
        while not self._held.strip():
            yield
        if self._held.strip() == "[":
            yield from self._list()
            self._give_out(self._held)
        while True:
            self._give_up()
            yield

    def _list(self) -> Reader:
        """Up to the bracket that closes the list."""
        depth, quote, escaped = 1, "", False
        while depth:
            yield
            character = self._held[-1]
            if quote:
                quote = "" if character == quote and not escaped else quote
                escaped = character == "\\" and not escaped
            elif character in "\"'":
                quote = character
            else:
                depth += (character == "[") - (character == "]")

    def _give_out(self, text: str) -> None:
        for name, arguments in python_calls(text.strip(), self.names) or []:
            self._call(name)
            self._arguments(arguments)
            self.is_complete = True


def python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Name and arguments, as JSON, of each call in a Python list of calls with literal arguments; None for all else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args or ast.unparse(node.func) not in names:
                return None
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            calls.append((ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
