"""From a request body to what the engine is to run: the prompt as tokens, and SamplingParams."""

import reprlib
import time
import uuid
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.engine.request import Request, TokenDelta
from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams, StructuredOutputs
from headrace.server.config import ServerConfig
from headrace.server.dialect import AnswerForm, Dialect, dialect_of
from headrace.server.errors import ApiError
from headrace.server.protocol import MAX_PROMPTS, ChatBody, ChatPrompt, CompletionBody, GenerationBody, parse_body
from headrace.server.tools import explained_messages

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine
    from headrace.structured.grammars import Grammars

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for this route; in a chat the answer may go on to the end of the context
MAX_CHOICES = 1024

AnyGenerationBody = TypeVar("AnyGenerationBody", ChatBody, CompletionBody)


@dataclass(slots=True)
class Tally:
    """What the deltas of an answer add up to.

    tokens: of all its choices. cached: tokens of the prompts that were in the cache already, each prompt counted once.
    drafted, accepted: tokens that were guessed ahead, and those of them that are in the answer.
    """

    tokens: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, delta: TokenDelta) -> None:
        self.tokens += len(delta.token_ids)
        self.cached += (delta.cached_tokens or 0) if delta.index == 0 else 0
        self.drafted += delta.num_drafted
        self.accepted += delta.num_accepted


@dataclass(frozen=True)
class Job(Generic[AnyGenerationBody]):
    """A request that has been checked, and what its answer needs to know.

    requests: one for each prompt. echoes: the text of each prompt, where it is to be repeated, else "".
    form: of a chat's answers.
    """

    body: AnyGenerationBody
    id: str
    created: int
    requests: list[Request]
    echoes: list[str]
    form: AnswerForm | None = None

    @property
    def n(self) -> int:
        return self.body.n or 1

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer around its choices. `kind` is the name that OpenAI gives this object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model, "choices": choices}

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A streamed piece of an answer. A client that wants the usage finds a null in all chunks but the last."""
        return self.envelope(kind, choices) | ({"usage": None} if self.wants_usage else {})

    @property
    def wants_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def usage(self, tally: Tally) -> dict[str, Any]:
        """Tokens of all prompts, each counted once however many continuations it has, and of all continuations."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tally.tokens,
            "total_tokens": prompt_tokens + tally.tokens,
            "prompt_tokens_details": {"cached_tokens": tally.cached},
        }
        if tally.drafted:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": tally.accepted,
                "rejected_prediction_tokens": tally.drafted - tally.accepted,
            }
        return usage


def chat_job(engine: "AsyncEngine", names: list[str], raw: bytes, config: ServerConfig) -> Job[ChatBody]:
    """Checks the body of a chat completion. Raises ApiError or RequestError. Blocks: it tokenizes."""
    body = parse_body(ChatBody, raw)
    check_model(body.model, names)
    dialect = dialect_of(engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
    ids = chat_prompt(engine, body, dialect)
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    max_tokens = min(limits) if limits else None
    check_context(engine, ids, max_tokens, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    compiler = grammars(engine.tokenizer, engine.vocab_size) if body.tools else None
    asked = structured_outputs(engine, body)
    form = AnswerForm(dialect, engine.tokenizer, compiler, body, ids, asked)
    rest: dict[str, Any] = {"structured_outputs": form.grammar}
    if form.keeps_special_tokens:
        rest["skip_special_tokens"] = False
    if form.grammar is not None and form.grammar is not asked:
        checked_grammar(engine, "tools" if body.tools else "response_format", grammar=form.grammar.grammar)
    params = sampling_params(engine, body, max_tokens=max_tokens, logprobs=logprobs, **rest)
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return Job(body, id, int(time.time()), checked_requests(engine, id, [ids], params, body), [""], form)


def completion_job(engine: "AsyncEngine", names: list[str], raw: bytes) -> Job[CompletionBody]:
    """Checks the body of a completion. Raises ApiError or RequestError. Blocks: it tokenizes."""
    body = parse_body(CompletionBody, raw)
    check_model(body.model, names)
    prompts = told_apart(body.prompt)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts with n={body.n} are more than {MAX_CHOICES} choices", "n")
    tokenizer = engine.tokenizer
    with_special = body.add_special_tokens is not False
    ids = [tokenizer.encode(prompt, with_special) if isinstance(prompt, str) else prompt for prompt in prompts]
    for prompt_ids in ids:
        check_context(engine, prompt_ids, body.max_tokens, "prompt")
    params = sampling_params(
        engine,
        body,
        max_tokens=body.max_tokens or COMPLETION_MAX_TOKENS,
        logprobs=body.logprobs,
        structured_outputs=structured_outputs(engine, body),
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    id = f"cmpl-{uuid.uuid4().hex}"
    requests = checked_requests(engine, id, ids, params, body)
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    return Job(body, id, int(time.time()), requests, echoes)


def checked_requests(
    engine: "AsyncEngine", id: str, prompts: list[list[int]], params: SamplingParams, body: GenerationBody
) -> list[Request]:
    """The engine's requests. It checks them before the answer begins, as after that there is no way to say 400."""
    requests = [
        Request(
            f"{id}-{index}",
            ids,
            params,
            priority=body.priority or 0,
            tenant=body.user or "",
            cache_salt=body.cache_salt or "",
            queue_timeout=body.queue_timeout,
            timeout=body.timeout,
        )
        for index, ids in enumerate(prompts)
    ]
    for request in requests:
        engine.check(request)
    return requests


def chat_prompt(engine: "AsyncEngine", body: ChatPrompt, dialect: Dialect) -> list[int]:
    own = {"tools", "add_generation_prompt", "continue_final_message"}
    kwargs: dict[str, Any] = {**(body.chat_template_kwargs or {})}
    for key in kwargs:
        if key in own or key == "messages":
            raise RequestError(f"chat_template_kwargs cannot set {key}", "chat_template_kwargs")
    messages = [message.for_template() for message in body.messages]
    tools = (body.tools or []) if body.tool_choice != "none" else []
    described: list[dict[str, Any]] | None = [tool.model_dump(exclude_none=True) for tool in tools] or None
    if dialect.tools.is_explained:
        messages, described = explained_messages(messages, tools), None
    return engine.tokenizer.encode_chat(
        messages,
        tools=described,
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        **kwargs,
    )


def check_model(name: str, names: list[str]) -> None:
    if name not in names:
        message = f"the model {name[:200]!r} does not exist here; there is {', '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_context(engine: "AsyncEngine", ids: list[int], max_tokens: int | None, param: str) -> None:
    """Refuses a prompt that leaves no room for what was asked for, or for a single token."""
    limit = engine.max_model_len
    if len(ids) + (max_tokens or 1) > limit:
        wanted = f" and max_tokens asks for {max_tokens} more" if max_tokens else ""
        message = f"the context of this model is {limit} tokens, but the prompt has {len(ids)} tokens{wanted}"
        param = "max_tokens" if len(ids) < limit else param
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def sampling_params(engine: "AsyncEngine", body: GenerationBody, **rest: Any) -> SamplingParams:
    """What the body says; for what it does not say the model's generation_config.json, or else OpenAI's defaults."""
    names = (field.name for field in fields(SamplingParams))
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    return SamplingParams(**(engine.default_sampling | given | {"logit_bias": token_bias(body.logit_bias)} | rest))


def structured_outputs(engine: "AsyncEngine", body: GenerationBody) -> StructuredOutputs | None:
    """What the answer must look like. Compiles the grammar, to know that it can be enforced."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.json_schema is not None:
        asked["response_format"] = {"json": body.response_format.json_schema.schema_}
    elif body.response_format is not None and body.response_format.type == "json_object":
        asked["response_format"] = {"json_object": True}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} exclude each other: send one of them", list(asked)[1])
    for name, what in asked.items():
        return checked_grammar(engine, name, **what)
    return None


def checked_grammar(engine: "AsyncEngine", name: str, **what: Any) -> StructuredOutputs:
    """The structured outputs that the field `name` asks for, compiled to know that they can be enforced."""
    try:
        spec = StructuredOutputs(**what)
        grammars(engine.tokenizer, engine.vocab_size).check(spec)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from None
    return spec


@lru_cache(maxsize=8)
def grammars(tokenizer: Tokenizer, vocab_size: int) -> "Grammars":
    """Only to check them, for which it does not matter how an output ends."""
    from headrace.structured.grammars import Grammars

    return Grammars(tokenizer, vocab_size, ())


def token_bias(bias: dict[str, Any] | None) -> dict[int, Any]:
    """JSON's keys are strings; here they are token ids."""
    for key in bias or {}:
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise RequestError(f"logit_bias: {reprlib.repr(key)} is no token id", "logit_bias")
    return {int(key): value for key, value in (bias or {}).items()}


def told_apart(prompt: Any) -> list[str | list[int]]:
    """The prompts in the `prompt` field: a text or a list of token ids, or a list of such. Ids may be any integers."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"there are {len(prompts)} prompts; at most {MAX_PROMPTS} may be sent at once", "prompt")
    for index, item in enumerate(prompts):
        place = f"prompt[{index}]" if several else "prompt"
        if not isinstance(item, str | list):
            several_too = "" if several else ", or a list of several"
            raise RequestError(f"{place} must be a string or a list of token ids{several_too}", "prompt")
        for token in item if isinstance(item, list) else ():
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"{place}: {reprlib.repr(token)} is no token id", "prompt")
    return prompts
