"""Keeps the text of special tokens that stands in a user's message from becoming those tokens.

A chat template writes special tokens and users' text into one string, and the tokenizer would read `<|im_end|>` as the
end of a turn whoever wrote it. So a marker is put into each such text before the template runs, and the prompt is
encoded by a copy of the tokenizer that takes the marker out after it has looked for special tokens. Everything is
then encoded in one go, in its full context, as if the text had never been special.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import normalizers

from headrace.errors import RequestError

# Two noncharacters: they stand for nothing, and text that is exchanged should not hold them, least of all in a row.
MARKER = "\ufdd0\ufdd1"

# Templates compare these strings with their own; half a special token in one of them is no attack.
_WORDS = frozenset({"role", "type"})


class SpecialTokenGuard:
    """`mark` what users wrote, render it, `encode` the result.

    A special token of a single character cannot be broken by a marker; it is left alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        special = [token for token in backend.get_added_tokens_decoder().values() if token.special]
        self._tokens = frozenset(token.content for token in special if len(token.content) > 1)
        self._beginnings = frozenset(token[:n] for token in self._tokens for n in range(1, len(token)))
        self._longest = max(map(len, self._tokens), default=0)
        self._lengths: dict[str, set[int]] = {}  # by the first two characters
        for token in self._tokens:
            self._lengths.setdefault(token[:2], set()).add(len(token))
        starts = "|".join(map(re.escape, self._lengths)) or "(?!)"
        self._start = re.compile(f"(?=({starts}))", re.DOTALL)
        # These are looked for in normalized text, where a marker is gone and where more than their own text matches.
        self.always_needed = any(token.normalized for token in special)

    def mark(self, value: Any) -> Any:
        """A copy of JSON-like `value` in which no string, nor strings side by side, spell a special token."""
        try:
            return self._mark(value)
        except RecursionError:
            raise RequestError("messages are nested too deeply", "messages") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt that holds markers, which leave no trace."""
        text = text.replace(json.dumps(MARKER)[1:-1], MARKER)  # a template may have escaped it, as JSON in ASCII
        return self._marker_free_backend.encode(text, add_special_tokens=False).ids

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark_end(self._mark_within(value))
        if isinstance(value, Mapping):
            return {self._mark_key(key): self._mark_item(key, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise RequestError(f"messages must be made of JSON values, not {type(value).__name__}", "messages")

    def _mark_key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise RequestError(f"keys in messages must be strings, not {type(key).__name__}", "messages")
        return self._mark_within(key)

    def _mark_item(self, key: str, item: Any) -> Any:
        return self._mark_within(item) if key in _WORDS and isinstance(item, str) else self._mark(item)

    def _mark_within(self, text: str) -> str:
        """A marker after the first character of every special token's text, wherever they overlap."""
        places = []
        for match in self._start.finditer(text):
            at = match.start()
            if any(text[at : at + length] in self._tokens for length in self._lengths[match[1]]):
                places.append(at + 1)
        bounds = [0, *places, len(text)]
        return MARKER.join(text[a:b] for a, b in pairwise(bounds))

    def _mark_end(self, text: str) -> str:
        """A marker after a text that ends like the beginning of a special token, which the next text could complete.

        White space at the end is passed over, since templates strip it.
        """
        end = len(text.rstrip())
        for length in range(1, min(self._longest, end + 1)):
            if text[end - length : end] in self._beginnings:
                return text[:end] + MARKER + text[end:]
        return text

    @cached_property
    def _marker_free_backend(self) -> tokenizers.Tokenizer:
        """A tokenizer over the same vocabulary in memory. It looks for all special tokens before normalizing."""
        backend = self._backend
        copy = tokenizers.Tokenizer(backend.model)
        remove_marker = normalizers.Replace(MARKER, "")
        copy.normalizer = (
            normalizers.Sequence([remove_marker, backend.normalizer]) if backend.normalizer else remove_marker
        )
        if backend.pre_tokenizer:
            copy.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())  # in the order of their ids they get the same ones
        copy.add_tokens([_in_raw_text(token) for _, token in added])
        return copy


def _in_raw_text(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """The token, looked for before normalizing (and so before a marker is gone) if it is special."""
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not token.special,
        special=token.special,
    )
