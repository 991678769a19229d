"""Logprobs in the two forms that OpenAI gives them: of chats, and the older one of completions."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import TokenLogprob

LOWEST = -9999.0  # OpenAI's number for a token that cannot come; JSON has no infinity


@lru_cache(maxsize=2**16)
def token_name(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes | None]:
    """A token's text and its bytes. A special token has no bytes, as it is not part of the text.

    A token that is no text by itself, such as half a character, is called bytes:\\xf0\\x9f. A model may have more rows
    than there are tokens; such a row has no name.
    """
    if token_id >= tokenizer.vocab_size:
        return "", None
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return tokenizer.token_text(token_id), None
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob] | None) -> list[dict[str, Any]]:
    """One object per token, with its alternatives."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        name, data = token_name(tokenizer, token_id)
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": None if data is None else list(data)}

    return [
        described(entry.token_id, entry.logprob) | {"top_logprobs": [described(*other) for other in entry.top]}
        for entry in entries or []
    ]


class CompletionLogprobs:
    """The logprobs of one choice of a completion, made as its tokens come.

    `text_offset` counts characters in the choice's text; a token that begins within a character has that one's offset.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # it keeps the bytes of half a character

    def lists(
        self, token_ids: list[int], entries: Sequence[TokenLogprob | None], echo: str = ""
    ) -> dict[str, list[Any]]:
        """The parallel lists for the next tokens. An entry is None for a prompt's first token, which nothing predicts.

        echo: the text of the prompt, if the tokens are a prompt's.
        """
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self.offset)
            self.offset += len(self._text(token_id, echo))
            tops.append(None if entry is None else self._top(entry))
        return {
            "tokens": [token_name(self.tokenizer, token_id)[0] for token_id in token_ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the token itself in any case."""
        top = [*entry.top, (entry.token_id, entry.logprob)]
        return {token_name(self.tokenizer, token_id)[0]: max(logprob, LOWEST) for token_id, logprob in top}

    def _text(self, token_id: int, echo: str) -> str:
        """What a token adds to the choice's text."""
        name, data = token_name(self.tokenizer, token_id)
        if data is None:  # a special token is there only where the prompt was written with it
            return name if echo.startswith(name, self.offset) else ""
        text = self.decoder.decode(data)
        if self.offset == 0 and echo and not echo.startswith(" "):
            return text.removeprefix(" ")  # some tokenizers put a space before a text
        return text


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's form of a prompt's logprobs: for each token but the first, itself and its alternatives by their ids."""

    def described(entry: TokenLogprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        both = {entry.token_id: entry.logprob} | dict(entry.top)
        return {
            str(token): {
                "logprob": max(logprob, LOWEST),
                "rank": ranks.get(token),
                "decoded_token": token_name(tokenizer, token)[0],
            }
            for token, logprob in both.items()
        }

    return [None if entry is None else described(entry) for entry in entries]
