"""What a user may ask of sampling, under vLLM's names, and what the worker needs of it for one token."""

import reprlib
from dataclasses import dataclass, field

from headrace.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    n: how many continuations to make of each prompt.
    temperature: logits are divided by it; 0 takes the most likely token every time (greedy).
    top_k: keep the k most likely tokens, and all as likely as the last of them; 0 or -1 keeps all.
    top_p: keep the fewest most likely tokens that hold this much probability, and all as likely as the last of them.
    min_p: keep tokens whose probability is at least this share of the most likely one's.
    seed: makes the draws repeatable; without one each request draws its own.
    max_tokens: the most tokens to generate; None means up to the end of the context.
    min_tokens: no end-of-sequence or stop token is drawn before so many tokens are there.
    stop: strings that end the output, and are cut from it. One that is complete within the first `min_tokens` tokens
        does not count. The one that is complete first decides; among several that end together, the longest.
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
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, not 0", "top_p")
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
        self._integer("min_tokens", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({_shown(self.max_tokens)})", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_shown(getattr(self, name))}", name)
        self._check_stops()
        self._check_logit_bias()

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if not _is_integer(value):
            raise RequestError(f"{name} must be an integer, not {_shown(value)}", name)
        self._range(name, value, low, high)

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not _is_number(value):
            raise RequestError(f"{name} must be a number, not {_shown(value)}", name)
        self._range(name, value, low, high)

    def _range(self, name: str, value: float, low: float, high: float | None) -> None:
        if not (value >= low and (high is None or value <= high)):  # put so that NaN fails
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{name} must be {wanted}, not {_shown(value)}", name)

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str | list | tuple):
            raise RequestError(f"stop must be a string or a list of strings, not {_shown(self.stop)}", "stop")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(stops)}", "stop")
        for stop in stops:
            if not isinstance(stop, str) or not stop or len(stop) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters, not {_shown(stop)}", "stop"
                )
        tokens = self.stop_token_ids
        if tokens is None:
            return
        if not isinstance(tokens, list | tuple):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {_shown(tokens)}", "stop_token_ids")
        if len(tokens) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} tokens, not {len(tokens)}", "stop_token_ids"
            )
        for token in tokens:
            if not _is_integer(token) or token < 0:
                raise RequestError(f"stop_token_ids must be token ids, not {_shown(token)}", "stop_token_ids")

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, dict):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {_shown(bias)}", "logit_bias")
        if len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}", "logit_bias")
        for token, value in bias.items():
            if not _is_integer(token) or token < 0:
                raise RequestError(f"logit_bias keys must be token ids, not {_shown(token)}", "logit_bias")
            if not _is_number(value) or not -100 <= value <= 100:  # NaN fails the comparison too
                raise RequestError(f"logit_bias values must be between -100 and 100, not {_shown(value)}", "logit_bias")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value for an error message, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more than 4300 digits, which Python does not print
        return f"a huge {type(value).__name__}"


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
    """A token, its natural-log probability under the model (before bias, temperature and filters), and the likeliest.

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
