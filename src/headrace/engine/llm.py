"""`LLM`: the engine in the caller's own process, for programs that have a list of prompts."""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from headrace.config import EngineConfig
from headrace.engine.core import Engine
from headrace.engine.request import CompletionOutput, Request, RequestOutput, TokenDelta
from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A loaded model.

    model: a Hugging Face directory, a GGUF file, or `org/name` on the hub; settings: the fields of EngineConfig.
    Raises ConfigError, ModelError or CapacityError with a message for the user.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.engine = Engine(EngineConfig.from_dict({"model": model, **settings}))
        self._count = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt (a text, or a list of token ids).

        params: for all prompts, or a list with one for each.
        use_tqdm: show a progress bar on a terminal.
        Returns one output per prompt, in their order. Raises RequestError, before anything has run, for a prompt that
        cannot be served.
        """
        batch = _as_list(prompts)
        texts = [p if isinstance(p, str) else None for p in batch]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, texts, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several. A message is `{"role": ..., "content": ...}`.

        The prompt is what the model's own chat template makes of the messages. Otherwise as `generate`.
        """
        if not messages:
            raise RequestError("there are no messages", "messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        ids = [
            self.tokenizer.encode_chat(
                list(conversation),  # type: ignore[arg-type]  # told apart two lines above
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(ids, [None] * len(ids), params, use_tqdm)

    def stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Generator[TokenDelta, None, None]:
        """Continues one prompt, token by token. Closing the iterator ends the request.

        No other request may be under way in this LLM.
        """
        request = self._request(list(prompt_token_ids), params)
        self.engine.add_request(request)
        try:
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            self.engine.abort(request.request_id)

    def _request(self, ids: list[int], params: SamplingParams) -> Request:
        self._count += 1
        return Request(f"request-{self._count}", ids, params)

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams(**self.engine.default_sampling)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(each)} sampling parameters: give one each, or one for all"
            )
        requests = [self._request(ids, p) for ids, p in zip(prompts, each, strict=True)]
        for request in requests:
            self.engine.check(request)
            self.engine.check_grammar(request)
        outputs = {
            r.request_id: RequestOutput(
                r.request_id,
                text,
                r.prompt_token_ids,
                [CompletionOutput(i, logprobs=None if r.params.logprobs is None else []) for i in range(r.params.n)],
            )
            for r, text in zip(requests, texts, strict=True)
        }
        unsent = deque(requests)
        total = sum(r.params.n for r in requests)
        try:
            with tqdm(total=total, desc="Generating", unit="seq", disable=None if use_tqdm else True) as bar:
                while unsent or self.engine.has_work:
                    while unsent and self.engine.has_room(unsent[0]):
                        self.engine.add_request(unsent.popleft())
                    for delta in self.engine.step():
                        _add(outputs[delta.request_id], delta)
                        bar.update(delta.finish_reason is not None)
        finally:  # an interrupt leaves nothing behind for the next call
            for request in requests:
                self.engine.abort(request.request_id)
        return list(outputs.values())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, told apart: a text is one prompt, and so is a list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a text, token ids, or a list of them, not {prompts!r:.80}", "prompt")
    batch = list(prompts)
    if batch and all(isinstance(p, int) for p in batch):
        return [batch]  # type: ignore[list-item]  # a list of ids
    for prompt in batch:
        if isinstance(prompt, str) or (isinstance(prompt, Sequence) and all(isinstance(t, int) for t in prompt)):
            continue
        raise RequestError(f"a prompt must be a text or a list of token ids, not {prompt!r:.80}", "prompt")
    return batch  # type: ignore[return-value]  # checked just now


def _add(output: RequestOutput, delta: TokenDelta) -> None:
    """Adds what a step brought to the output that is being collected."""
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if completion.logprobs is not None:
        completion.logprobs += delta.logprobs or []
    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    output.num_drafted_tokens += delta.num_drafted
    output.num_accepted_tokens += delta.num_accepted
    if delta.cached_tokens is not None and delta.index == 0:
        output.num_cached_tokens = delta.cached_tokens
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
