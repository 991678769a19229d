"""How a model writes what it thinks and which functions it calls, and the grammars that hold its answers to that."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import StructuredOutputs
from headrace.server.protocol import ChatBody, Function, NamedTool
from headrace.server.reasoning import TAGS, ReasoningParser, ReasoningTags, opens_reasoning
from headrace.server.tool_parsers import Delta, ToolParser
from headrace.server.tools import ToolFormat, choose_format, mark

if TYPE_CHECKING:
    from headrace.structured.grammars import Grammars

Grammar = dict[str, Any]
ANY_ARGUMENTS = {"type": "object"}
# Keywords of a schema that, without any properties, describes a function without arguments.
NO_ARGUMENTS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}


@dataclass(frozen=True)
class Dialect:
    """What the chat template of a model tells of the answers that it was trained to give.

    tools: the form of its calls. reasoning: the marks around its thoughts; None if it does not think aloud.
    """

    tools: ToolFormat
    reasoning: ReasoningTags | None


@lru_cache(maxsize=8)
def dialect_of(tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> Dialect:
    """The dialect that a template gives away, or what settings say instead."""
    template = tokenizer.chat_template() or ""
    if reasoning == "auto":
        reasoning = next((name for name, tags in TAGS.items() if tags.closing in template), "none")
    return Dialect(choose_format(tokenizer.chat_template(with_tools=True), tools), TAGS.get(reasoning))


class Answer:
    """What one choice of a chat says, in deltas of OpenAI's form as the text comes."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str, finish_reason: str | None) -> list[Delta]:
        """Takes the next piece of the text, the last one together with why it ends."""
        if self._reasoning is None:
            return self._rest(text, finish_reason)
        reasoning, rest = self._reasoning.feed(text)
        if finish_reason is not None:
            more = self._reasoning.finish()
            reasoning, rest = reasoning + more[0], rest + more[1]
        deltas: list[Delta] = [{"reasoning": reasoning, "reasoning_content": reasoning}] if reasoning else []
        return deltas + self._rest(rest, finish_reason)

    def _rest(self, text: str, finish_reason: str | None) -> list[Delta]:
        if self._tools is None:
            return [{"content": text}] if text else []
        deltas = self._tools.feed(text)
        return deltas + (self._tools.finish() if finish_reason is not None else [])

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for why it has ended. Calls that were cut are no "tool_calls"."""
        has_calls = self._tools is not None and self._tools.num_calls > 0 and self._tools.is_complete
        return "tool_calls" if reason == "stop" and has_calls else reason


class AnswerForm:
    """What the answers to one chat may look like, and how to read them.

    grammar: what they are held to; None where they are free.
    keeps_special_tokens: whether marks are special tokens, which the text then has to hold.
    """

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: Tokenizer,
        grammars: "Grammars | None",
        body: ChatBody,
        prompt: list[int],
        asked: StructuredOutputs | None,
    ) -> None:
        """grammars: compiles them; needed where the body has tools. asked: what the body wants of an answer."""
        self._dialect, self._tokenizer, self._grammars = dialect, tokenizer, grammars
        self._functions = [tool.function for tool in body.tools or ()] if body.tool_choice != "none" else []
        if isinstance(body.tool_choice, NamedTool):
            chosen = body.tool_choice.function.name
            self._functions = [f for f in self._functions if f.name == chosen]
        self._is_forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        self._several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
        tags = dialect.reasoning
        # Whether the answer begins within a thought; None if that is for the model to decide.
        self._thinks = False if tags is None else opens_reasoning(tags, tokenizer, prompt, body)
        self.grammar = self._grammar(asked)
        marks = [tags.opening, tags.closing] if tags else []
        marks += [dialect.tools.opening, dialect.tools.closing, "[ARGS]"] if self._functions else []
        self.keeps_special_tokens = any(tokenizer.special_id(text) is not None for text in marks)

    def new_answer(self) -> Answer:
        tags = self._dialect.reasoning
        reasoning = None
        if tags is not None and self._thinks is not False:
            reasoning = ReasoningParser(tags, is_open=bool(self._thinks))
        names = [f.name for f in self._functions]
        return Answer(reasoning, self._dialect.tools.parser(names, is_forced=self._is_forced) if names else None)

    def _grammar(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        if asked is None and not self._functions:
            return None
        from headrace.structured.grammars import grammar_of, lark_grammar

        wanted = [] if asked is None else grammar_of(asked)
        main, others = wanted[0] if wanted else None, wanted[1:]
        if self._functions:
            if main is not None:
                others = [{"name": "body"} | main, *others]
            main, more = self._calls_grammar(has_body=bool(wanted))
            others += more
        if main is None or (self._thinks is False and not self._functions):
            return asked
        if self._thinks is not False and self._dialect.reasoning is not None:
            others = [{"name": "answer"} | main, *others]
            main = lark_grammar(self._thought(self._dialect.reasoning))
        return StructuredOutputs(grammar=json.dumps({"grammars": [main, *others]}))

    def _calls_grammar(self, *, has_body: bool) -> tuple[Grammar | None, list[Grammar]]:
        from headrace.structured.grammars import lark_grammar

        arguments = [self._arguments(index, f) for index, f in enumerate(self._functions)]
        kind = "calls" if self._is_forced else "calls or body" if has_body else "calls or text"
        names, takes = [f.name for f in self._functions], [a is not None for a in arguments]
        text = self._dialect.tools.grammar(self._tokenizer, names, takes, kind=kind, several=self._several)
        if text is None:
            if has_body:
                message = "this model takes no response_format with tools that it may choose not to call"
                raise RequestError(message, "response_format")
            return None, []
        return lark_grammar(text), [{"name": f"arguments_{i}"} | a for i, a in enumerate(arguments) if a is not None]

    def _arguments(self, index: int, function: Function) -> Grammar | None:
        """The grammar of a function's arguments; None if it takes none.

        As with OpenAI, a schema is enforced to the letter where `strict` says so, and elsewhere as far as possible.
        """
        from headrace.structured.grammars import json_grammar

        schema = function.parameters or {}
        if not schema.get("properties") and schema.keys() <= NO_ARGUMENTS and (not schema or "properties" in schema):
            return None
        grammar = json_grammar(schema, lenient=not function.strict)
        assert self._grammars is not None
        try:
            self._grammars.check(StructuredOutputs(grammar=json.dumps({"grammars": [grammar]})))
        except RequestError as error:
            if function.strict:
                raise RequestError(f"tools: the parameters of {function.name}: {error}", f"tools[{index}]") from None
            return json_grammar(ANY_ARGUMENTS)
        return grammar

    def _thought(self, tags: ReasoningTags) -> str:
        """What the model thinks, and then @answer."""
        opening, closing = mark(self._tokenizer, tags.opening), mark(self._tokenizer, tags.closing)
        rules = [r"space: /\s{0,4}/", r"TEXT: /(.|\n)*/"]
        opened = f"{opening} " if self._thinks is None else ""
        if closing.startswith("<["):
            rules += [f"thought: {opened}TEXT {closing}"]
        elif opening.startswith("<["):
            rules += [f"thought: {opened}within", f"within[suffix={closing}]: TEXT"]
        else:
            rules += [f"thought[suffix={closing}]: {opened}TEXT"]
        start = "start: (thought space)? @answer" if self._thinks is None else "start: thought space @answer"
        return "\n".join([start, *rules])
