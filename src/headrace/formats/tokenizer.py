"""Text to token ids and back, over the `tokenizers` library, and chats to prompts by the model's template."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.errors import RequestError
from headrace.formats.chat_template import ChatTemplate, prepare_messages
from headrace.formats.special_tokens import SpecialTokenGuard

logger = logging.getLogger(__name__)


class Tokenizer:
    """A model's tokenizer.

    backend: does the work; its truncation and padding are switched off.
    chat_templates: Jinja sources by name: "default", and "tool_use" for chats with tools where a model has its own.
    special_tokens: such as {"bos_token": "<s>"}, known to templates under these names.
    special_ids: the ids of all special tokens.
    Raises ModelError for a chat template that does not compile.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_templates: Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._guard = SpecialTokenGuard(backend)
        self._templates = {
            name: ChatTemplate(chat_templates[name], name) for name in ("default", "tool_use") if name in chat_templates
        }
        self.chat_templates = dict(chat_templates)
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._bos_id = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        self._warned_of_second_bos = False

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens counted. A model may have more rows than that."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def has_token(self, token_id: int) -> bool:
        """Whether an id stands for a token: vocabularies may have gaps, and models more ids than them."""
        return self._backend.id_to_token(token_id) is not None

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that stand for one byte each where the vocabulary lacks a character ("byte fallback").

        Each row of them is decoded by itself: as UTF-8, or if it is none, to a U+FFFD for each byte. Empty for
        byte-level tokenizers, which decode the bytes of all tokens together.
        """
        if "ByteFallback" not in self._decoder:
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    @property
    def definition(self) -> dict[str, Any]:
        """What tokenizer.json says of it."""
        content: dict[str, Any] = json.loads(self._backend.to_str())
        return content

    def save(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json as Hugging Face has them."""
        self._backend.save(str(directory / "tokenizer.json"))
        templates = [{"name": name, "template": source} for name, source in self.chat_templates.items()]
        only = list(self.chat_templates) == ["default"]
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
            **({"chat_template": templates[0]["template"] if only else templates} if templates else {}),
        }
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, if there is one."""
        token_id: int | None = self._backend.token_to_id(text) if text else None
        return token_id if token_id in self.special_ids else None

    def chat_template(self, *, with_tools: bool = False) -> str | None:
        """The source of the template for chats, or for those with tools; None if the model has none."""
        default = self.chat_templates.get("default")
        return self.chat_templates.get("tool_use", default) if with_tools else default

    def set_chat_template(self, source: str) -> None:
        """Replaces the model's templates by one. Raises ModelError if it does not compile."""
        self._templates = {"default": ChatTemplate(source)}
        self.chat_templates = {"default": source}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. The text of a special token becomes that token: use chats for text of others.

        add_special_tokens: add what the model wants around a text, such as a beginning-of-sequence token.
        """
        check_text(text, "prompt")
        with library_faults(_cannot_encode):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        self._warn_of_second_bos(ids)
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text, on all cores."""
        for text in texts:
            check_text(text, "prompt")
        with library_faults(_cannot_encode):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        batch = [encoding.ids for encoding in encodings]
        for ids in batch:
            self._warn_of_second_bos(ids)
        return batch

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 (such as half a character) become U+FFFD."""
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                raise RequestError(f"{token_id!r} is not a token id: they go from 0 to {self.vocab_size - 1}", "prompt")
        with library_faults(lambda fault: RequestError(f"the tokenizer cannot decode these tokens: {fault}", "prompt")):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token as it reads within a text: with its leading space, and special tokens too.

        Empty for the ids beyond the vocabulary that some models have.
        """
        if token_id >= self.vocab_size:
            return ""
        anchor, text = self._anchor
        both = self.decode([*anchor, token_id], skip_special_tokens=False)
        return both[len(text) :] if both.startswith(text) else self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token adds to a text, in UTF-8; it may be part of a character. None for a special token."""
        if token_id in self.special_ids:
            return None
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else ""
        if piece and "ByteLevel" in self._decoder and _BYTE_OF.keys() >= set(piece):
            return bytes(_BYTE_OF[character] for character in piece)
        if piece and "ByteFallback" in self._decoder and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        return self.token_text(token_id).encode()

    def vocabulary_bytes(self) -> list[bytes | None]:
        """`token_bytes` of all tokens, in a fraction of the time."""
        result: list[bytes | None] = [None] * self.vocab_size
        anchor, anchor_text = self._anchor
        others = []
        for token_id in range(self.vocab_size):
            piece = self._backend.id_to_token(token_id)
            if token_id in self.special_ids:
                continue
            if piece and "ByteLevel" in self._decoder and _BYTE_OF.keys() >= set(piece):
                result[token_id] = bytes(_BYTE_OF[character] for character in piece)
            elif token_id in self.byte_ids and piece:
                result[token_id] = bytes.fromhex(piece[3:5])
            else:
                others.append(token_id)
        texts = self._backend.decode_batch([[*anchor, i] for i in others], skip_special_tokens=False)
        for token_id, text in zip(others, texts, strict=True):
            usual = text.startswith(anchor_text)
            result[token_id] = text[len(anchor_text) :].encode() if usual else self.token_text(token_id).encode()
        return result

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a chat, as text.

        messages: of `role` and `content`, and whatever else the template reads. Content is a string or a list of text
            parts, which are joined with nothing in between, unless the template loops over parts itself.
        tools: JSON descriptions of functions; None where there are none.
        add_generation_prompt: end with the header of an answer.
        continue_final_message: end within the last message, to go on with it.
        kwargs: variables for the template, such as `enable_thinking`.
        """
        template, prepared = self._prepare(messages, tools)
        return template.render(
            prepared,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self.special_tokens | kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of what `render_chat` writes; the template has put in every special token that belongs there.

        Whatever of `messages`, `tools` and `kwargs` reads like a special token is encoded as plain text, so that no
        message can end its own turn or begin another's.
        """
        template, prepared = self._prepare(messages, tools)
        given = [prepared, tools, kwargs]
        marked = self._guard.mark(given)
        text = template.render(
            marked[0],
            tools=marked[1],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self.special_tokens | marked[2],
        )
        check_text(text, "messages")
        if marked == given and not self._guard.always_needed:
            return self.encode(text, add_special_tokens=False)
        with library_faults(_cannot_encode):
            return self._guard.encode(text)

    def _prepare(self, messages: Any, tools: Any) -> tuple[ChatTemplate, list[dict[str, Any]]]:
        """The template for a chat, and its messages checked."""
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError("tools must be a list of objects", "tools")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "this model has no chat template, so it takes plain prompts only; "
                "serve it with --chat-template FILE to give it one",
                "messages",
            )
        template = self._templates[name]
        return template, prepare_messages(messages, join_parts=not template.iterates_content)

    @cached_property
    def _decoder(self) -> str:
        """How tokens become text, as the library describes it in JSON."""
        return self._backend.decoder.__getstate__().decode() if self._backend.decoder else ""

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ordinary tokens to put before a token, so that it is not taken for the first of a text; and their text."""
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return ids, self._backend.decode(ids, skip_special_tokens=False)

    def _warn_of_second_bos(self, ids: list[int]) -> None:
        if self._bos_id is not None and ids[:2] == [self._bos_id] * 2 and not self._warned_of_second_bos:
            self._warned_of_second_bos = True
            bos = self.special_tokens["bos_token"]
            logger.warning("a prompt begins with %s, and the tokenizer has added another", bos)


@contextmanager
def library_faults(as_error: Callable[[str], Exception]) -> Iterator[None]:
    """Turns what the tokenizers library raises into an error of ours.

    It has no types of its own, and where its Rust code gives up, which bad files bring about, it raises a
    PanicException, which is not even an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise as_error(" ".join(str(error).split())) from None


def _cannot_encode(fault: str) -> RequestError:
    return RequestError(f"the tokenizer cannot encode this text: {fault}", "prompt")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE.

    Bytes that are printable in Latin-1 stand for themselves, and the others take the characters from U+0100 on.
    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def check_text(text: Any, param: str) -> None:
    """Raises RequestError for what is not a string of Unicode characters."""
    if not isinstance(text, str):
        raise RequestError(f"{param} must be text, not {type(text).__name__}", param)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} holds half of a surrogate pair, at character {error.start}", param) from None
