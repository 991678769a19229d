"""What a user may ask of sampling, under vLLM's names, and what the worker needs of it for one token."""

import math
from dataclasses import dataclass, field

from headrace.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    n: how many continuations to make of each prompt.
    temperature: logits are divided by it; 0 takes the most likely token every time (greedy).
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens that holds at least this much probability.
    min_p: keep tokens whose probability is at least this share of the most likely one's.
    seed: makes the draws repeatable; without one each request draws its own.
    max_tokens: the most tokens to generate; None means up to the end of the context.
    min_tokens: no end-of-sequence or stop token is drawn before so many tokens are there.
    stop: strings that end the output, and are cut from it. They are looked for after `min_tokens` tokens.
    stop_token_ids: tokens that end the output.
    include_stop_str_in_output: keep the stop string in the text.
    ignore_eos: go on past the model's end-of-sequence tokens.
    logprobs: report the logprob of each token and of this many most likely alternatives.
    prompt_logprobs: the same for the tokens of the prompt.
    logit_bias: added to the logits of the given token ids, -100 to 100.
    skip_special_tokens: leave special tokens out of the text.

    Filters apply in the order temperature, top_k, top_p, min_p, each to what the one before has left.
    Raises RequestError, naming the field, for a value out of range or of the wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_N)
        self._number("temperature", 0.0, 100.0)
        self._integer("top_k", -1, None)
        self._number("top_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, not 0", "top_p")
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
        self._integer("min_tokens", 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        self._check_stops()
        self._check_logit_bias()

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(f"{name} must be an integer, not {value!r}", name)
        self._range(name, value, low, high)

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number, not {value!r}", name)
        self._range(name, value, low, high)

    def _range(self, name: str, value: float, low: float, high: float | None) -> None:
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{name} must be {wanted}, not {value}", name)

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            raise RequestError(f"stop must be a string or a list of strings, not {self.stop!r}", "stop")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(stops)}", "stop")
        for stop in stops:
            if not isinstance(stop, str) or not stop or len(stop) > MAX_STOP_LENGTH:
                raise RequestError(f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")
        for token in self.stop_token_ids or []:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise RequestError(f"stop_token_ids must be token ids, not {token!r}", "stop_token_ids")

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}", "logit_bias")
        for token, value in bias.items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise RequestError(f"logit_bias keys must be token ids, not {token!r}", "logit_bias")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not -100 <= value <= 100:  # NaN fails the comparison too
                raise RequestError(f"logit_bias values must be between -100 and 100, not {value!r}", "logit_bias")


@dataclass(slots=True)
class SampleRequest:
    """Everything that decides one draw; the same request gives the same token wherever and whenever it runs.

    seed: of the request, 0 to 2**64 - 1.
    index: which of the request's `n` sequences.
    position: of the token to be drawn in its sequence, the prompt counted.
    forbidden: token ids that may not be drawn yet (end-of-sequence and stop tokens before `min_tokens`).
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    forbidden: tuple[int, ...] = ()


@dataclass(slots=True)
class TokenLogprob:
    """A token, its natural-log probability under the model (before bias, temperature and filters), and the most likely ones.

    top: (token id, logprob), most likely first; equal ones by lower id first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class SampledToken:
    """A drawn token; `logprob` is filled when the request asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None
