"""The text of a sequence as its tokens come: never half a character, and nothing of a stop string."""

import copy
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from headrace.sampling.params import SamplingParams

# A token is decoded together with some before it: when there are more than WINDOW, the last KEPT stay. Their text must
# go on as if all were there, for which a token that is not the first of a text is enough, or in byte-level vocabularies
# as many bytes as a character may have.
WINDOW = 12
KEPT = 6

# In a row of byte tokens, stop strings are looked for with every byte up to this number of tokens in the window.
LONGEST_PREVIEW = 64

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of `headrace.formats.tokenizer.Tokenizer`, which see."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def byte_ids(self) -> frozenset[int]: ...

    def has_token(self, token_id: int) -> bool: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Makes the text of one sequence's output, piece by piece.

    The pieces that `append` and `finish` return add up to the text by which decoding prompt and output together exceeds
    decoding the prompt alone, cut at a stop string: the one that is complete first, and among several that end with the
    same character the longest. One that is complete with the first `min_tokens` tokens does not count and stays in the
    text; one that begins there and goes on does count.

    stopped_by: the stop string that has been found, after which no more text comes.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.stopped_by: str | None = None
        self._decoder = _IncrementalDecoder(tokenizer, prompt_ids, params.skip_special_tokens)
        stops = params.stop_strings
        self._stops = _StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._min_tokens = params.min_tokens
        self._count = 0

    def append(self, token_id: int) -> str:
        """Takes the next token. Returns the text that is certain now and was not before; it may be empty."""
        if self.stopped_by is not None:
            return ""
        self._count += 1
        text = self._decoder.append(token_id)
        if self._stops is None:
            return text
        if not text and (preview := self._decoder.preview()):
            # As these bytes read now so they read for ever if they are the last: if they complete a stop string.
            piece = self._search(copy.copy(self._stops), preview)
            if self.stopped_by is not None:
                return piece
        return self._search(self._stops, text)

    def finish(self) -> str:
        """Ends the output. Returns the text that was held back, in which a stop string may still be found."""
        if self.stopped_by is not None:
            return ""
        text = self._decoder.finish()
        if self._stops is None:
            return text
        text = self._search(self._stops, text)
        return text if self.stopped_by is not None else text + self._stops.held

    def _search(self, stops: "_StopStrings", text: str) -> str:
        text = stops.feed(text, may_stop=self._count > self._min_tokens)
        self.stopped_by = stops.found
        return text


class _IncrementalDecoder:
    """Decodes token by token, and gives out text as soon as no later token can change it.

    How tokens add up to text is the tokenizer's affair. Of the kinds that there are,
    - byte-level ones decode the bytes of all tokens as one UTF-8 text. Only its last character can still change, and
      only while it is incomplete, which shows as U+FFFD;
    - those with byte fallback decode each row of byte tokens by itself, and if any byte in it is wrong, then each of
      its bytes becomes a U+FFFD. So all of it can change until another token ends it;
    - the first token of a text may lose a leading space.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The last tokens, and how many characters of their text have been given out or belong to the prompt.
        self._window = self._tail(prompt_ids)
        self._done = 0
        # Until the output has brought any text: what the prompt's tokens read by themselves.
        self._prompt_text: str | None = self._decode(self._window)

    def append(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._decode(self._window)
        piece = self._new(text.removesuffix(REPLACEMENT))
        if piece:
            self._prompt_text = None
            self._done += len(piece)
        if len(self._window) > WINDOW:
            held = len(text) - self._done
            del self._window[:-KEPT]
            self._done = len(self._decode(self._window)) - held
            self._prompt_text = None
        return piece

    def preview(self) -> str:
        """What an unfinished row of byte tokens adds to the text as it stands; empty if its bytes are not UTF-8."""
        if not self._window or self._window[-1] not in self._tokenizer.byte_ids or len(self._window) > LONGEST_PREVIEW:
            return ""
        text = self._new(self._decode(self._window))
        return "" if REPLACEMENT in text else text

    def finish(self) -> str:
        return self._new(self._decode(self._window))

    def _new(self, text: str) -> str:
        """The part of the window's text that has not been given out."""
        if self._prompt_text is not None:
            # Not all that the prompt reads by itself need stay: the output may complete a character that it began.
            both = zip(self._prompt_text, text, strict=False)
            self._done = next((i for i, (a, b) in enumerate(both) if a != b), min(len(self._prompt_text), len(text)))
        return text[self._done :]

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt: KEPT of them, or more if it ends in a long row of byte tokens."""
        tail: deque[int] = deque()
        for token_id in reversed(prompt_ids):
            if len(tail) >= KEPT and tail[0] not in self._tokenizer.byte_ids:
                break
            if not self._is_silent(token_id):
                tail.appendleft(token_id)
        return list(tail)

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token is no part of any text: a special one that is skipped, or an id without a token."""
        skipped = self._skip_special_tokens and token_id in self._tokenizer.special_ids
        return skipped or not self._tokenizer.has_token(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


class _StopStrings:
    """Finds the first of several strings in a text that comes in pieces, and holds back what may be part of one.

    found: the string that was found.
    held: the end of the text so far that has not been given out.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        """include: whether a string that is found is given out too; then nothing need be held back."""
        self.found: str | None = None
        self.held = ""
        self._include = include
        self._tree = _stop_tree(tuple(strings))
        self._state = 0

    def feed(self, text: str, may_stop: bool) -> str:
        """Takes the next piece of the text. Returns what can be given out: up to a string, if one is found.

        may_stop: whether a string counts that ends within this piece.
        """
        tree = self._tree
        for i, character in enumerate(text):
            self._state = tree.after(self._state, character)
            ending = tree.ending[self._state]
            if ending is not None and may_stop:
                self.found = ending
                text, self.held = self.held + text[: i + 1], ""
                return text if self._include else text[: -len(ending)]
        text = self.held + text
        certain = len(text) - (0 if self._include else tree.growing[self._state])
        self.held = text[certain:]
        return text[:certain]


class _StopTree:
    """All beginnings of some strings as states of an automaton that reads a text in time linear in its length.

    (Aho & Corasick, "Efficient string matching: an aid to bibliographic search", 1975.) State 0 is the empty beginning;
    the state after a text is the longest beginning with which the text ends.

    ending: for each state the longest of the strings with which its text ends.
    growing: for each state the length of the longest end of its text that is not all of a string but may become one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.ending: list[str | None] = [None]
        depth = [0]
        for string in strings:
            state = 0
            for character in string:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.ending.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.ending[state] = string
        self.growing = [length if following else 0 for length, following in zip(depth, self._next, strict=True)]
        # Where to go on from a state that does not go on: the longest beginning with which its own text ends, itself
        # not counted. It is shorter, so that going through the states by length finds it done.
        self._fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.ending[state] = self.ending[state] or self.ending[self._fallback[state]]
            self.growing[state] = self.growing[state] or self.growing[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.after(self._fallback[state], character)
                queue.append(child)

    def after(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


@lru_cache(maxsize=8)
def _stop_tree(strings: tuple[str, ...]) -> _StopTree:
    """One tree for all sequences of a request: that of the longest stop strings takes some 10 ms."""
    return _StopTree(strings)
