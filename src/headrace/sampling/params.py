"""What a user may ask of sampling, under vLLM's names, and what the worker needs of it for one token."""

import reprlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import RequestError

if TYPE_CHECKING:  # the command line needs this module, and should not wait for NumPy
    import numpy as np
    from numpy.typing import NDArray

    from headrace.sampling.history import History

MAX_N = 128
LARGEST = 2**63 - 1  # what a number in a message between processes can be
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKEN_IDS = 2**19
MAX_DRY_BREAKERS = 64
MAX_DRY_BREAKER_LENGTH = 64
MAX_REPETITION = 256  # so many tokens count for DRY: with its usual base, more is beyond measure
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the output must look like: exactly one of the following.

    json: a JSON schema, as a dict or as its text. json_object: true for any JSON object.
    regex: all of the output must match it. Rust's syntax, which is Python's but for looking around and backreferences.
    choice: one of these strings.
    grammar: in Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        name = "structured_outputs"
        given = [f for f in ("json", "regex", "choice", "grammar") if getattr(self, f) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(f"{name} needs one of json, json_object, regex, choice and grammar", name)
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise RequestError(f"{name}.json_object must be true or false", name)
        if self.json is not None and not isinstance(self.json, dict | bool | str):
            raise RequestError(f"{name}.json must be a JSON schema, not {_shown(self.json)}", name)
        for field_name in ("regex", "grammar"):
            value = getattr(self, field_name)
            if value is not None and (not isinstance(value, str) or not value or not _is_unicode(value)):
                raise RequestError(f"{name}.{field_name} must be a text, not {_shown(value)}", name)
        choice = self.choice
        if choice is not None and not (
            isinstance(choice, list | tuple)
            and 0 < len(choice) <= MAX_CHOICES
            and all(isinstance(c, str) and c and _is_unicode(c) for c in choice)
        ):
            raise RequestError(f"{name}.choice must be a list of 1 to {MAX_CHOICES} texts, none empty", name)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    n: how many continuations to make of each prompt.
    temperature: logits are divided by it; 0 takes the most likely token every time (greedy).
    top_k: keep the k most likely tokens, and all as likely as the last of them; 0 or -1 keeps all.
    top_p: keep the fewest most likely tokens that hold this much probability, and all as likely as the last of them.
    min_p: keep tokens whose probability is at least this share of the most likely one's.
    xtc_probability, xtc_threshold: with this probability, of the tokens at least as likely as the threshold only the
        least likely stays, if there are several ("exclude top choices"). A threshold above 0.5 changes nothing.
    presence_penalty: subtracted from the logits of tokens that the output holds already; -2 to 2.
    frequency_penalty: subtracted as many times as the output holds the token; -2 to 2.
    repetition_penalty: positive logits of tokens that the prompt or the output holds are divided by it, negative ones
        multiplied; 1 changes nothing.
    dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: a token that would lengthen a repetition of n
        tokens (in prompt and output) loses dry_multiplier * dry_base ** (n - dry_allowed_length), if n is at least
        dry_allowed_length. A repetition does not reach across a breaker: the last token of one of these strings.
        dry_multiplier 0 changes nothing ("don't repeat yourself").
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
    allowed_token_ids: no other tokens are drawn.
    bad_words: texts that the output may not hold: the last token of such a word is not drawn after the others, as it is
        tokenized at the beginning of a text and after a space.
    structured_outputs: what the output must look like. Where it can end no further token is drawn, and it stands above
        all other settings that allow or forbid tokens.
    skip_special_tokens: leave special tokens out of the text.
    speculative: guess tokens ahead, where the engine is set up to; without it the output is the same.

    Logits change in the order of vLLM: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty; then DRY. Filters follow in the order temperature, top_k, top_p, min_p, XTC,
    each applied to what the one before has left. Temperature 0 needs no filter.
    Raises RequestError, naming the field, for a value out of range or of the wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: list[str] | None = None
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    speculative: bool = True

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_N)
        self._number("temperature", 0.0, 100.0)
        self._integer("top_k", -1, LARGEST)
        self._number("top_p", 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, not 0", "top_p")
        for name in ("min_p", "xtc_probability", "xtc_threshold"):
            self._number(name, 0.0, 1.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("dry_multiplier", 0.0, 100.0)
        self._number("dry_base", 1.0, 100.0)
        self._integer("dry_allowed_length", 1, MAX_REPETITION)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, LARGEST)
        self._integer("min_tokens", 0, LARGEST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({_shown(self.max_tokens)})", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_shown(getattr(self, name))}", name)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError(
                f"structured_outputs must be StructuredOutputs, not {_shown(self.structured_outputs)}",
                "structured_outputs",
            )
        self._check_stops()
        self._check_logit_bias()
        self._strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        self._strings("dry_sequence_breakers", MAX_DRY_BREAKERS, MAX_DRY_BREAKER_LENGTH)
        self._token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        self._token_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty: leave it out to allow all", "allowed_token_ids")

    @property
    def has_penalties(self) -> bool:
        """Whether what is drawn depends on the tokens before it, other than through the model."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.dry_multiplier
            or self.bad_words
        )

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

    def _strings(self, name: str, most: int, longest: int) -> None:
        strings = getattr(self, name)
        if strings is None:
            return
        if not isinstance(strings, list | tuple):
            raise RequestError(f"{name} must be a list of strings, not {_shown(strings)}", name)
        if len(strings) > most:
            raise RequestError(f"{name} takes at most {most} strings, not {len(strings)}", name)
        for string in strings:
            if not isinstance(string, str) or not string or len(string) > longest or not _is_unicode(string):
                raise RequestError(
                    f"{name} must be strings of 1 to {longest} characters each, not {_shown(string)}", name
                )

    def _token_ids(self, name: str, most: int) -> None:
        tokens = getattr(self, name)
        if tokens is None:
            return
        if not isinstance(tokens, list | tuple):
            raise RequestError(f"{name} must be a list of token ids, not {_shown(tokens)}", name)
        if len(tokens) > most:
            raise RequestError(f"{name} takes at most {most} tokens, not {len(tokens)}", name)
        for token in tokens:
            if not _is_integer(token) or token < 0:
                raise RequestError(f"{name} must be token ids, not {_shown(token)}", name)

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


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value for an error message, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more than 4300 digits, which Python does not print
        return f"a huge {type(value).__name__}"


class SampleRequest(msgspec.Struct, gc=False):  # made for each sequence in each step: a third of a dataclass's cost
    """Everything that decides one draw; the same request gives the same token wherever and whenever it runs.

    seed: of the request, 0 to 2**64 - 1.
    index: which of the request's `n` sequences.
    position: of the token to be drawn in its sequence, the prompt counted.
    forbidden: token ids that may not be drawn yet (end-of-sequence and stop tokens before `min_tokens`).
    history: the tokens so far, where `params.has_penalties`.
    mask: the tokens that a grammar allows next, as it is being computed: int32 `[ceil(V / 32)]`, the lowest bit of the
        first word for token 0. There is at least one. It stands above all that else forbids tokens: where nothing else
        is left, it alone counts.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    forbidden: tuple[int, ...] = ()
    history: "History | None" = None
    mask: "Future[NDArray[np.int32]] | None" = None


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
