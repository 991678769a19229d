"""What a request's output must look like, compiled for the model's tokenizer.

The work is done by llguidance (https://github.com/guidance-ai/llguidance): it is small, needs no other library, takes
any vocabulary as bytes, names what of a JSON schema it cannot enforce, and computes a mask in some 50 microseconds.
"""

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import StructuredOutputs

COMPILE_SECONDS = 10.0
MAX_COMPILED = 64  # grammars that are kept for the next request with the same one
MAX_GRAMMAR_LENGTH = 512 * 1024

# Between the parts of JSON at most one space, or the beginning of a line: models have been seen to go on for ever.
WHITESPACE = r"( |\n[ \t]{0,20})"


def json_grammar(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> dict[str, Any]:
    """A grammar of the library for JSON that fits `schema`.

    lenient: keywords that cannot be enforced are passed over.
    """
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {"json_schema": {**schema, "x-guidance": options}}


def lark_grammar(text: str) -> dict[str, Any]:
    """A grammar of the library in its form of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""
    return {"lark_grammar": text}


def joined(main: dict[str, Any], **named: dict[str, Any]) -> str:
    """The text of a grammar that refers to others as `@name`."""
    return json.dumps({"grammars": [main, *({"name": name} | grammar for name, grammar in named.items())]})


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def grammar_of(spec: StructuredOutputs) -> list[dict[str, Any]]:
    """What a request asks for, as grammars of the library, of which the first is the main one."""
    if spec.json is not None:
        try:
            schema = json.loads(spec.json) if isinstance(spec.json, str) else spec.json
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is no JSON: {error}", "structured_outputs") from None
        if not isinstance(schema, Mapping | bool):
            raise RequestError("a JSON schema must be an object, true or false", "structured_outputs")
        return [json_grammar(schema)]
    if spec.json_object:
        return [json_grammar({"type": "object"})]
    if spec.regex is not None:
        grammar: list[dict[str, Any]] = json.loads(llguidance.LLMatcher.grammar_from_regex(spec.regex))["grammars"]
        return grammar
    if spec.choice is not None:
        return [lark_grammar("start: " + " | ".join(map(literal, spec.choice)))]
    text = spec.grammar or ""
    if text.startswith("{"):  # as `joined` makes it
        try:
            return [dict(each) for each in json.loads(text)["grammars"]]
        except (ValueError, TypeError, RecursionError, KeyError):
            raise RequestError("the grammar is neither Lark nor a list of grammars", "structured_outputs") from None
    return [lark_grammar(text)]


class Grammars:
    """Compiles grammars for one tokenizer, each once, in threads of its own.

    vocab_size: of the model, which may differ from the tokenizer's. eos_ids: tokens that end an output, allowed where
    the grammar may end. seconds: how long `check` waits.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], seconds: float = COMPILE_SECONDS
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids, self._seconds = tokenizer, vocab_size, eos_ids, seconds
        self._threads = ThreadPoolExecutor(2, "grammar")
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._has_vocabulary = threading.Event()

    def check(self, spec: StructuredOutputs) -> None:
        """Raises RequestError for a grammar that is wrong, cannot be enforced, or takes too long. Waits for it."""
        future = self.compile(spec)
        self._has_vocabulary.wait()  # that it takes a while is not the grammar's fault
        try:
            future.result(self._seconds)
        except TimeoutError:
            message = f"the grammar takes more than {self._seconds:g} s to compile: make it simpler"
            raise RequestError(message, "structured_outputs") from None

    def compile(self, spec: StructuredOutputs) -> "Future[llguidance.LLMatcher]":
        """The grammar at its beginning, once it is ready, or a RequestError. It is shared: to be copied before use."""
        try:
            text = json.dumps(dataclasses.asdict(spec))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is no JSON: {error}", "structured_outputs") from None
        if len(text) > MAX_GRAMMAR_LENGTH:
            message = f"the grammar has {len(text)} characters, and at most {MAX_GRAMMAR_LENGTH} are allowed"
            raise RequestError(message, "structured_outputs")
        with self._lock:
            future = self._compiled.get(text)
            if future is None:
                future = self._compiled[text] = self._threads.submit(self._compile, spec)
            self._compiled.move_to_end(text)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def _compile(self, spec: StructuredOutputs) -> llguidance.LLMatcher:
        try:
            vocabulary = self._vocabulary
        finally:
            self._has_vocabulary.set()
        matcher = llguidance.LLMatcher(vocabulary, json.dumps({"grammars": grammar_of(spec)}), log_level=0)
        what = "JSON schema" if spec.json is not None else "grammar"
        if matcher.is_error():
            raise RequestError(f"the {what} cannot be enforced: {explained(matcher.get_error())}", "structured_outputs")
        first = matcher.deep_copy()
        mask = np.unpackbits(np.frombuffer(first.compute_bitmask(), np.uint8), bitorder="little")
        mask[vocabulary.eos_tokens] = 0
        if first.is_error() or not mask.any():
            raise RequestError(
                f"the {what} cannot be enforced: only an empty text fits it, or none", "structured_outputs"
            )
        return matcher

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The tokenizer as the library wants it. Making it takes seconds for a large vocabulary."""
        size = self._vocab_size
        ends = list(self._eos_ids) or [size]  # one that is never drawn, for a model without any
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, max(size, ends[0] + 1), ends[0]))
        return llguidance.LLTokenizer(wrapper, n_vocab=len(wrapper.tokens), eos_token=ends)


class _Vocabulary:
    """What the library asks of a tokenizer: each token's bytes, and how a text is tokenized."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_id, None
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        known = tokenizer.vocabulary_bytes()
        for token_id in range(size):
            text = known[token_id] if token_id < len(known) else None
            if not text:  # a special token, or a row without one: part of no text
                self.special_token_ids.append(token_id)
                text = b"\xff" + (tokenizer.token_text(token_id) or f"<[{token_id}]>").encode()
            self.tokens.append(text)
        self._id_of = {text: token_id for token_id, text in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self.tokens), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell a text in the middle of another one, where a grammar leaves no choice."""
        for before in ("", "\n", "a"):  # some tokenizers put a space in front of a text
            start = self._tokenizer.encode(before, add_special_tokens=False)
            ids = self._tokenizer.encode(before + text.decode(errors="replace"), add_special_tokens=False)
            if ids[: len(start)] == start and b"".join(self.tokens[i] for i in ids[len(start) :]) == text:
                return ids[len(start) :]
        ids, place = [], 0
        while place < len(text):  # the longest token at each place
            lengths = range(min(self._longest, len(text) - place), 0, -1)
            length = next((n for n in lengths if text[place : place + n] in self._id_of), None)
            if length is None:
                break
            ids.append(self._id_of[text[place : place + length]])
            place += length
        return ids


def explained(error: str) -> str:
    """The library's message on one line, with the name of what it is about where it leaves that out."""
    error = " ".join(error.split())[:400]
    for sign, keyword in (("regex parse error", "pattern"), ("Pointer '", "$ref"), ("Resource '", "$ref")):
        if sign in error and keyword not in error:
            return f"{keyword}: {error}"
    return error
