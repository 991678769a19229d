"""The engine's settings: one dataclass, filled from flags, a YAML file or Python, and checked in one place."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from headrace.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = (None, "int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority", "fair", "static")
KV_CACHE_LAYOUTS = ("auto", "paged", "contiguous")
PREEMPTION_MODES = ("auto", "recompute", "swap")
BACKENDS = ("auto", "reference", "cpu")
ACTIVATION_PRECISIONS = ("auto", "int8", "float32")
DRAFT_SAMPLE_METHODS = ("coupled", "probabilistic")
MAX_SPECULATIVE_TOKENS = 32

# The settings of each method, beside those that all have.
SPECULATIVE_METHODS = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": ("prompt_lookup_min",),
    "draft_model": ("model", "quantization", "draft_sample_method"),
    "self": ("num_layers", "draft_sample_method"),
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead. The names are vLLM's where the meaning is the same.

    method: "ngram" looks for the last few tokens further to the front, in prompt and output; "suffix" for the
        longest end there is, in recent requests of the same tenant as well; "draft_model" asks a smaller model with the
        same tokenizer; "self" asks the first layers of the model itself.
    num_speculative_tokens: the longest draft.
    adaptive: make drafts shorter, or none, where they do not pay; false makes all as long as may be.
    prompt_lookup_max, prompt_lookup_min: for "ngram" and "suffix" (which has no maximum), how many tokens are looked
        for, at most and at least.
    model: for "draft_model", which one, as the model itself is given. quantization: of it, as EngineConfig has it.
    num_layers: for "self", how many layers; None for half of them.
    draft_sample_method: how a model draws a draft for a request with a temperature. "coupled" with the random numbers
        of the request's own tokens, and the output is what it is without speculation, token by token; "probabilistic"
        with others, and the output has the same distribution.
    """

    method: str
    num_speculative_tokens: int = 4
    adaptive: bool = True
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | None = None
    quantization: str | None = None
    num_layers: int | None = None
    draft_sample_method: str = "coupled"

    def __post_init__(self) -> None:
        for name, high in (
            ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", 32),
            ("prompt_lookup_min", 32),
            ("num_layers", 1000),
        ):
            value = getattr(self, name)
            is_given = value is not None or name != "num_layers"
            if is_given and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high):
                raise ConfigError(f"{name} must be an integer from 1 to {high}, not {value!r}")
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be true or false, not {self.adaptive!r}")
        if self.method == "ngram" and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.method == "draft_model" and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"model must be the draft model's path or hub name, not {self.model!r}")
        for name, choices in (("quantization", QUANTIZATIONS), ("draft_sample_method", DRAFT_SAMPLE_METHODS)):
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice is not None)
                raise ConfigError(f"{name} must be one of {known}, not {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "SpeculativeConfig":
        """Raises ConfigError also for a key that is unknown, or that another method has."""
        method = settings.get("method")
        if method not in SPECULATIVE_METHODS:
            raise ConfigError(f"method must be one of {', '.join(SPECULATIVE_METHODS)}, not {method!r}")
        known = ("method", "num_speculative_tokens", "adaptive", *SPECULATIVE_METHODS[method])
        reject_unknown(settings, known, f"setting of the method {method}")
        return cls(**settings)


@dataclass(kw_only=True)
class EngineConfig:
    """How to run a model. The names are vLLM's where the meaning is the same.

    model: a Hugging Face directory, a GGUF file, `org/name` on the Hugging Face hub, or `default`, a small model that
        is fetched as a Python package.
    revision: branch, tag or commit, for a model from the hub.
    dtype: of activations and KV cache; "auto" is float32 on a CPU.
    quantization: code weights in fewer bits while they are loaded: "int8" with a scale for each row, "int4" with one
        for every 32 columns (embedding and output matrix in 8 bits); weights that are in so few bits already stay.
    max_model_len: longest prompt plus output, in tokens; "auto" takes the model's own limit, or what fits in memory.
    max_num_seqs: most sequences in one step.
    max_num_batched_tokens: most tokens in one step; longer prompts are run in chunks.
    scheduling_policy: in which order requests enter: "fcfs" by arrival, "priority" by their class, "fair" so that each
        tenant gets the same share of the tokens; "static" is the old way, for comparison: it gathers `max_num_seqs`
        sequences, pads them, and runs them to the end of the longest.
    static_batch_timeout_ms: milliseconds after which a static batch starts with fewer sequences.
    preemption_mode: what becomes of a sequence that has to make room: "recompute" computes it anew, "swap" moves its
        cache to the host's memory, "auto" swaps where there is `swap_space`.
    priority_ageing: seconds of waiting that make up for one class of priority.
    long_prefill_token_threshold: most tokens of one prompt in a step; 0 for no limit but that of the step.
    target_itl_ms: most milliseconds between two tokens of a stream while prompts are run beside it in chunks; 0 for no
        such limit. By default none but on a CPU, where it is 200, or where a step without prompts takes more than 100,
        twice that.
    max_waiting_requests: most sequences in the queue; what comes beyond that is refused.
    max_waiting_tokens: most tokens in the prompts in the queue.
    queue_timeout: seconds after which a request that has not begun is refused; None for never.
    request_timeout: seconds after which a request is ended; None for never.
    enable_prefix_caching: keep the cache of finished requests while there is room, for others that begin alike.
    kv_cache_layout: "paged" gives a sequence blocks as it grows, "contiguous" one piece for `max_model_len` tokens;
        "auto" is paged, and contiguous for static batches.
    block_size: tokens per KV block of the paged cache.
    kv_cache_memory: memory for the KV cache, in bytes or as 4GiB or 500MB; None sizes it from the memory that is free.
    kv_cache_dtype: in which keys and values are stored: "auto" as they are computed, "int8" in a half of bfloat16's
        memory or a quarter of float32's, at a small cost in quality.
    swap_space: memory of the host to which the cache of preempted sequences is moved, in bytes or as 4GiB; without any
        they are computed anew.
    gpu_memory_utilization: share of the device's free memory (on a CPU: of the host's) that the KV cache may take when
        `kv_cache_memory` is not given; it takes no more than `max_num_seqs` sequences of `max_model_len` can fill.
    tensor_parallel_size, pipeline_parallel_size: ranks to split the model over; 1 is all there is so far.
    seed: from which requests without a seed of their own draw theirs; None differs from run to run.
    threads: CPU threads for the kernels; None takes OMP_NUM_THREADS, or the cores that this process may use, as
        far as the quotas of its control groups allow.
    backend: which implementation of the ops; "auto" is the fastest that this machine has.
    activation_precision: with which activations the native kernels multiply weights that are stored as whole numbers:
        "auto" rounds them to eight bits, with a scale for every 16; "int8" with one for every 32, which is less exact
        and quicker with many tokens at once; "float32" computes with the values of both as they are, which is slower.
        The reference backend always does the last.
    speculative_config: how to guess tokens ahead, as JSON such as {"method": "ngram", "num_speculative_tokens": 4}; the
        output stays the same (docs/speculative.md). Requests without speculation say so themselves.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: str = "fcfs"
    static_batch_timeout_ms: float = 100.0
    preemption_mode: str = "auto"
    priority_ageing: float = 30.0
    long_prefill_token_threshold: int = 0
    target_itl_ms: float | None = None
    max_waiting_requests: int = 2048
    max_waiting_tokens: int = 2**20
    queue_timeout: float | None = None
    request_timeout: float | None = None
    enable_prefix_caching: bool = True
    kv_cache_layout: str = "auto"
    block_size: int = 32
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    swap_space: int | str = 0
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    seed: int | None = None
    threads: int | None = None
    backend: str = "auto"
    activation_precision: str = "auto"
    speculative_config: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ConfigError(f"model must be a path or a hub name, not {self.model!r}")
        self.model = str(self.model)
        self._choice("dtype", DTYPES)
        self._choice("backend", BACKENDS)
        self._choice("activation_precision", ACTIVATION_PRECISIONS)
        if self.revision is not None and not isinstance(self.revision, str):
            raise ConfigError(f"revision must be a string, not {self.revision!r}")
        self._choice("kv_cache_dtype", KV_CACHE_DTYPES)
        self._choice("quantization", QUANTIZATIONS)
        if self.max_model_len is None:  # as a file or an older program says it
            self.max_model_len = "auto"
        if self.max_model_len != "auto":
            self.max_model_len = _whole(self.max_model_len)
            self._integer("max_model_len", 1, other="'auto'")
        for name, low in (("kv_cache_memory", 1), ("swap_space", 0)):
            setattr(self, name, byte_size(getattr(self, name)))
            self._integer(name, low, optional=name == "kv_cache_memory", other="a size like 4GiB or 500MB")
        self._integer("threads", 1, optional=True)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_waiting_requests",
            "max_waiting_tokens",
        ):
            self._integer(name, 1)
        self._choice("scheduling_policy", SCHEDULING_POLICIES)
        self._choice("kv_cache_layout", KV_CACHE_LAYOUTS)
        self._choice("preemption_mode", PREEMPTION_MODES)
        if self.scheduling_policy == "static" and self.kv_cache_layout == "paged":
            raise ConfigError("scheduling_policy 'static' needs the contiguous kv_cache_layout; leave that at 'auto'")
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("preemption_mode 'swap' needs memory to swap to: set swap_space, such as 4GiB")
        self._integer("long_prefill_token_threshold", 0)
        for name in ("priority_ageing", "static_batch_timeout_ms", "target_itl_ms", "queue_timeout", "request_timeout"):
            self._seconds(name)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be true or false, not {self.enable_prefix_caching!r}")
        self._integer("seed", -(2**63), optional=True)
        self._check_speculation()
        utilization = self.gpu_memory_utilization
        if not isinstance(utilization, int | float) or isinstance(utilization, bool) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {utilization!r}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            self._integer(name, 1)
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not supported yet: Headrace runs on one rank; use 1"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence gets its token in every step"
            )

    @property
    def is_contiguous(self) -> bool:
        """Whether each sequence has its cache in one piece."""
        static = self.scheduling_policy == "static"
        return self.kv_cache_layout == "contiguous" or (self.kv_cache_layout == "auto" and static)

    def _check_speculation(self) -> None:
        if isinstance(self.speculative_config, str):
            try:
                self.speculative_config = json.loads(self.speculative_config)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"speculative_config is no JSON: {error}") from None
        if not isinstance(self.speculative_config, dict | None):
            raise ConfigError(f"speculative_config must be a JSON object, not {self.speculative_config!r}")
        try:
            speculation = self.speculation
        except ConfigError as error:
            raise ConfigError(f"speculative_config: {error}") from None
        if speculation is not None and self.scheduling_policy == "static":
            raise ConfigError("speculative_config needs sequences that go on at their own pace: not the policy static")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What `speculative_config` says."""
        config = self.speculative_config
        return SpeculativeConfig.from_dict(config) if isinstance(config, dict) else None

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "EngineConfig":
        """A config from keyword settings; an unknown key is an error that names the nearest known one."""
        reject_unknown(settings, (f.name for f in fields(cls)), "setting")
        if "model" not in settings:
            raise ConfigError("no model given: name a Hugging Face directory, a GGUF file or a hub model")
        return cls(**settings)

    def _choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in choices:
            known = ", ".join(choice for choice in choices if choice is not None)
            raise ConfigError(f"{name} must be one of {known}, not {getattr(self, name)!r}")

    def _integer(self, name: str, low: int, *, optional: bool = False, other: str = "") -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            alternative = f" or {other}" if other else ""
            raise ConfigError(f"{name} must be an integer of at least {low}{alternative}, not {value!r}")

    def _seconds(self, name: str) -> None:
        """A time of zero or more, in the unit that its name or docstring says; None only where that is its default."""
        value = getattr(self, name)
        optional = next(f.default for f in fields(self) if f.name == name) is None
        if value is None and optional:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be a number from 0 on, not {value!r}")


def byte_size(value: Any) -> Any:
    """The bytes that a text like "4GiB", "1.5 GB", "500MB" or "4096" means; anything else as it is.

    K, M, G and T are powers of 1024 with an i (KiB) or without B (K), and of 1000 as KB, MB, GB and TB.
    """
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B)?", value.strip(), re.I)
        if isinstance(value, str)
        else None
    )
    if match is None:
        return value
    power = " KMGT".index((match[2] or " ").upper())
    return int(Decimal(match[1]) * (1000 if (match[3] or "").upper() == "B" else 1024) ** power)


def _whole(value: Any) -> Any:
    """The integer that a text of digits means, as it comes from the command line; anything else as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value) else value


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ConfigError for the first of `given` that is not among `known`, with the nearest one as a suggestion."""
    known = sorted(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            raise ConfigError(f"unknown {what} {key!r}: {hint}")
