"""The request bodies of OpenAI's API as far as Headrace takes them, and the checks of their form.

A field that is not listed here is refused, never ignored. One that OpenAI (or a common extension) knows and Headrace
does not have yet stands in `not_yet`, with the values that ask for nothing: those may be sent.
"""

import difflib
import json
import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from headrace.sampling.params import MAX_LOGPROBS
from headrace.server.errors import ApiError

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_DEPTH = 100  # of a body; a schema for structured output has two levels per level of what it describes
MAX_PROMPTS = 1024
MAX_TOOLS = 128

Neutral = dict[str, tuple[Any, ...]]


class Body(BaseModel):
    """A JSON object with known fields only and exact types: no strings for numbers, no booleans for integers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    not_yet: ClassVar[Neutral] = {}

    @classmethod
    def known_fields(cls) -> list[str]:
        """Their names in JSON."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name in cls.not_yet:
                if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in cls.not_yet[name]):
                    raise PydanticCustomError("field", "{name} is not supported yet", {"name": name})
            elif name not in cls.known_fields():
                near = difflib.get_close_matches(name[:100], [*cls.known_fields(), *cls.not_yet], n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise PydanticCustomError(
                    "field", "{name} is not a known field{hint}", {"name": name[:100], "hint": hint}
                )
        return {name: value for name, value in body.items() if name not in cls.not_yet}


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_json(self) -> "CalledFunction":
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise PydanticCustomError("field", "{name} must be the text of a JSON object", {"name": "arguments"})
        return self


class ToolCall(Body):
    """A call that the assistant has made earlier."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    not_yet: ClassVar[Neutral] = {
        "function_call": (None,),
        "audio": (None,),
        "refusal": (None,),
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # an older name of the same

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.tool_calls is None:
            raise PydanticCustomError("field", "{name} must be a string or a list", {"name": "content"})
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise PydanticCustomError("field", "{name} belongs to the assistant's messages", {"name": name})
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it.

        They have no `developer`, OpenAI's newer word for `system`, and want the arguments of calls as objects.
        """
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        if self.reasoning is not None:
            message["reasoning_content"] = message.pop("reasoning")
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return message


class StreamOptions(Body):
    not_yet: ClassVar[Neutral] = {"include_obfuscation": (None, False), "continuous_usage_stats": (None, False)}

    include_usage: bool | None = None


class JsonSchema(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, JsonValue] | bool, Field(alias="schema")]
    description: str | None = None  # for a model that would be shown it
    strict: bool | None = None  # the answer is held to the schema in any case


class ResponseFormat(Body):
    """What the answer must look like. A schema belongs to json_schema, and to nothing else."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_json_schema(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            message = "{name} goes together with type json_schema"
            raise PydanticCustomError("field", message, {"name": "json_schema"})
        return self


class StructuredOutputsField(Body):
    """vLLM's form of the same, and more; one of its fields may be there."""

    json_: Annotated[dict[str, JsonValue] | bool | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class GenerationBody(Body):
    """What both routes take. None means what leaving the field out means.

    The ranges that SamplingParams checks are not repeated here.
    """

    not_yet: ClassVar[Neutral] = {
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "truncate_prompt_tokens": (None,),
        "spaces_between_special_tokens": (None, True),
    }

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    speculative: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Any] | None = None  # its values are checked by SamplingParams
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, JsonValue] | bool | str | None = None  # older names of the fields of structured_outputs
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    queue_timeout: float | None = None  # seconds within which it must have begun, and
    timeout: float | None = None  # have finished; the engine checks them
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # The tenant of the fair policy, which remembers thousands of them.
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: str | None = None  # names a person to a provider that watches for abuse; we do not

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("field", "{name} is only allowed with stream: true", {"name": "stream_options"})
        if self.prompt_logprobs is not None and self.stream:
            message = "{name} is not allowed with stream: true"
            raise PydanticCustomError("field", message, {"name": "prompt_logprobs"})
        return self


class ChatPrompt(Body):
    """What a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _prompt_can_be_made(self) -> "ChatPrompt":
        self._check_tools()
        if self.continue_final_message and self.add_generation_prompt:
            message = "{name} and add_generation_prompt exclude each other: set one of them"
            raise PydanticCustomError("field", message, {"name": "continue_final_message"})
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "{name} needs a final message of the assistant"
            raise PydanticCustomError("field", message, {"name": "continue_final_message"})
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("field", "{name} has two functions of the same name", {"name": "tools"})
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (chosen is not None or self.tool_choice == "required") and not names:
            raise PydanticCustomError(
                "field", "{name} asks for a call, but there are no tools", {"name": "tool_choice"}
            )
        if chosen is not None and chosen not in names:
            message = "{name} asks for {chosen}, which is not among the tools: {names}"
            context = {"name": "tool_choice", "chosen": chosen[:64], "names": ", ".join(names)[:500]}
            raise PydanticCustomError("field", message, context)


class ChatBody(GenerationBody, ChatPrompt):
    """POST /v1/chat/completions"""

    not_yet: ClassVar[Neutral] = GenerationBody.not_yet | {
        "functions": (None,),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "moderation": (None,),
        "store": (None, False),
        "metadata": (None, {}),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "service_tier": (None, "auto", "default"),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": (None,),
        "echo": (None, False),
        "add_special_tokens": (None, False),
    }

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("field", "{name} is only allowed with logprobs: true", {"name": "top_logprobs"})
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    not_yet: ClassVar[Neutral] = GenerationBody.not_yet | {
        "suffix": (None, ""),
    }

    prompt: Any  # a string, token ids, or a list of such: told apart in translate.py
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "CompletionBody":
        if self.best_of not in (None, self.n or 1):
            message = "{name} is not supported: make n choices, and choose by their logprobs"
            raise PydanticCustomError("field", message, {"name": "best_of"})
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            message = "{name} and echo with logprobs exclude each other: both report the prompt"
            raise PydanticCustomError("field", message, {"name": "prompt_logprobs"})
        return self


class TokenizeBody(Body):
    """POST /tokenize, of a prompt"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatPrompt):
    """POST /tokenize, of a chat"""

    # A template writes the special tokens itself.
    not_yet: ClassVar[Neutral] = {"add_special_tokens": (None, False)}

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A request body from its bytes. Raises ApiError 400 that says what is wrong with it, and where."""
    document = parse_json(raw)
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        param, message = explain(error)
        raise ApiError(400, message, param=param) from None


def parse_json(raw: bytes) -> Any:
    """JSON as its standard has it, which Python's own parser takes more liberally. Raises ApiError 400."""
    try:
        text = raw.decode("utf-8-sig")
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        if is_deeper(document, MAX_DEPTH):
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:  # only such an escape makes a surrogate, and only a lone one stays one
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text: byte {error.start} does not fit"
    except UnicodeEncodeError:
        fault = "has half of a surrogate pair in a string, which is no character"
    except NotANumber as error:
        fault = f"is not valid JSON: {error} is not a finite number"
    except json.JSONDecodeError as error:
        fault = f"is not valid JSON: {error}"
    except RecursionError:
        fault = f"is nested too deeply: at most {MAX_DEPTH} levels of lists and objects are allowed"
    except ValueError:  # Python's limit on the digits of an integer
        fault = "has a number with too many digits"
    else:
        return document
    raise ApiError(400, f"the body {fault}", code="invalid_json")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects in a JSON value are nested in more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [x for x in level if isinstance(x, dict | list)]
        if not level:
            return False
        level = [item for x in level for item in (x.values() if isinstance(x, dict) else x)]
    return True


class NotANumber(ValueError):
    """What Python takes for a number and JSON does not."""


def _refuse_constant(name: str) -> Any:
    raise NotANumber(name)


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise NotANumber(text[:40])
    return number


MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "string_too_long": "may have at most {max_length} characters",
    "too_long": "may have at most {max_length} items",
    "recursion_loop": "is nested too deeply",
    "recursion_depth_exceeded": "is nested too deeply",
}


def explain(error: ValidationError) -> tuple[str, str]:
    """The field at fault, and what is wrong with it."""
    faults = error.errors(include_url=False, include_input=False)
    # A field that may be of several types has a fault for each; those that lie deepest are of the type that was meant.
    depth = max(len(fault["loc"]) for fault in faults)
    deepest = [fault for fault in faults if len(fault["loc"]) == depth]
    path = _path(deepest[0]["loc"])
    if deepest[0]["type"] == "field":  # one of our own; its message begins with the field's name
        path = f"{path}." if path else ""
        return path + deepest[0]["ctx"]["name"], path + deepest[0]["msg"]
    wrong = dict.fromkeys(_wrong(fault) for fault in deepest)
    return path, f"{path} {' or '.join(wrong).replace(' or must be ', ' or ')}"


def _wrong(fault: ErrorDetails) -> str:
    if fault["type"] in MESSAGES:
        return MESSAGES[fault["type"]].format(**fault.get("ctx", {}))
    return fault["msg"].replace("Input should be", "must be")


def _path(loc: tuple[int | str, ...]) -> str:
    """messages[0].content for ("messages", 0, "content", "str"): pydantic adds the name of the type it has tried."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "bool") and not step[0].isupper():
            path += f".{step}" if path else step
    return path[:100]
