"""Tells what a model thinks, `<think>...</think>`, from what it answers, as it writes both."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.formats.tokenizer import Tokenizer
from headrace.server.tool_parsers import overlap

if TYPE_CHECKING:
    from headrace.server.protocol import ChatBody


@dataclass(frozen=True)
class ReasoningTags:
    """The marks around what a model thinks."""

    opening: str
    closing: str


TAGS = {"think": ReasoningTags("<think>", "</think>"), "mistral": ReasoningTags("[THINK]", "[/THINK]")}


class ReasoningParser:
    """Splits a text that comes in any pieces into reasoning, which it gives out, and the rest, which it hands back.

    White space around the reasoning belongs to neither.
    in_reasoning: whether the text is reasoning still.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        """is_open: whether the prompt ends with the opening mark. If not, the text may begin with it."""
        self.tags = tags
        self.in_reasoning = is_open
        self._is_decided = is_open  # whether it is known if there is any
        self._begins = True  # nothing but white space has come since the last mark
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Takes the next piece. Returns what of it is reasoning, and what is the rest."""
        self._held += text
        if not self._is_decided:
            start = self._held.lstrip()
            if len(start) < len(self.tags.opening) and self.tags.opening.startswith(start):
                return "", ""
            self._is_decided = True
            self.in_reasoning = start.startswith(self.tags.opening)
            if not self.in_reasoning:
                self._begins = False
            else:
                self._held = start.removeprefix(self.tags.opening)
        reasoning = self._reasoning() if self.in_reasoning else ""
        return reasoning, "" if self.in_reasoning else self._rest()

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.in_reasoning else ("", held)

    def _reasoning(self) -> str:
        if self._begins:
            self._held = self._held.lstrip()
        self._begins = self._begins and not self._held
        text, mark, rest = self._held.partition(self.tags.closing)
        if mark:
            self.in_reasoning, self._begins, self._held = False, True, rest
            return text.rstrip()
        text = self._held[: len(self._held) - overlap(self._held, self.tags.closing)].rstrip()
        self._held = self._held[len(text) :]
        return text

    def _rest(self) -> str:
        rest = self._held.lstrip() if self._begins else self._held
        self._begins = self._begins and not rest
        self._held = ""
        return rest


def opens_reasoning(tags: ReasoningTags, tokenizer: Tokenizer, prompt: list[int], body: "ChatBody") -> bool | None:
    """Whether an answer begins within a thought, to judge by its prompt; None if the model may begin one."""
    if body.continue_final_message:
        content = body.messages[-1].for_template().get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if text.rfind(tags.opening) != text.rfind(tags.closing):
            return text.rfind(tags.opening) > text.rfind(tags.closing)
        return False if text.strip() else None
    end = tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip()
    return True if end.endswith(tags.opening) else False if end.endswith(tags.closing) else None
