"""What is simulated: settings, which the command line has as flags."""

from dataclasses import dataclass

from headrace.errors import ConfigError

EXPERIMENTS = ("batching", "memory", "chunking", "prefix", "fairness", "preemption")
POLICIES = ("fcfs", "priority", "fair", "static")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine that is simulated; the names are EngineConfig's where the meaning is the same.

    scheduling_policy: fcfs, priority, fair or static.
    max_num_seqs: most sequences in one step.
    max_num_batched_tokens: most tokens in one step.
    max_model_len: longest prompt and output, in tokens.
    cache_tokens: what the KV cache holds.
    swap_tokens: what the host's memory holds of preempted sequences.
    block_size: tokens of a block.
    contiguous: each sequence has its cache in one piece of max_model_len tokens; so have those of a static batch.
    enable_prefix_caching: keep the cache of finished requests.
    target_itl_ms: most milliseconds of a step while streams run; 0 for no limit; by default as on a CPU.
    long_prefill_token_threshold: most tokens of one prompt in a step; 0 for no limit.
    static_batch_timeout_ms: after which a static batch starts with fewer sequences.
    """

    scheduling_policy: str = "fcfs"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    cache_tokens: int = 65_536
    swap_tokens: int = 0
    block_size: int = 32
    contiguous: bool = False
    enable_prefix_caching: bool = True
    target_itl_ms: float | None = None
    long_prefill_token_threshold: int = 0
    static_batch_timeout_ms: float = 100.0

    def __post_init__(self) -> None:
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}, not {self.scheduling_policy!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "cache_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("swap_tokens", "long_prefill_token_threshold", "static_batch_timeout_ms", "target_itl_ms"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError("max_num_batched_tokens must be at least max_num_seqs")


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """What is simulated.

    experiment: batching, memory, chunking, prefix, fairness, preemption or all: each an idea with and without. Or load:
        the requests that the dataset's flags ask for.
    cost: a file: what headrace bench fit has saved, or JSON with the same fields for another machine, such as a GPU. By
        default round figures, about those of a model of 135 million weights on two cores.
    request_rate: requests a second in a load; without one all are there at once.
    arrival_seed: another one gives other moments and lengths.
    scale: so many times the requests of an experiment.
    """

    experiment: str = "all"
    cost: str | None = None
    request_rate: float | None = None
    arrival_seed: int = 0
    scale: int = 1

    def __post_init__(self) -> None:
        if self.experiment not in ("all", "load", *EXPERIMENTS):
            raise ConfigError(f"experiment must be one of all, load, {', '.join(EXPERIMENTS)}, not {self.experiment!r}")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate must be above 0, not {self.request_rate}")
        if self.request_rate is not None and self.experiment != "load":
            raise ConfigError("request_rate is that of a load: give experiment load")
        if self.scale < 1:
            raise ConfigError(f"scale must be at least 1, not {self.scale}")
