"""What the engine tells of itself: what it runs, and where it stands."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded, and how it is run.

    max_model_len: prompt and output of a sequence hold at most so many tokens.
    vocab_size: token ids are below it.
    default_sampling: the sampling settings in the model's generation_config.json.
    cache_tokens: what the KV cache holds of long sequences. cache_bytes: what it takes of the memory.
    architecture, scheme, dtype, kv_cache_dtype, kernels: for people to read; threads: of the CPU.
    """

    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, Any] = field(default_factory=dict)
    cache_tokens: int = 0
    cache_bytes: int = 0
    architecture: str = ""
    scheme: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    kernels: str = ""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, for whoever exports it. What begins with `num_` but `num_blocks`, and the prefix cache's
    tokens, are counts since the start; the rest is as of now. Sequences are counted where nothing else is said: a
    request has `n` of them.

    running, waiting: of them now. waiting_tokens: of the prompts of those that have not begun.
    num_blocks, free_blocks, kept_blocks: of the KV cache in all; held by no sequence; and those of the free ones that
        still hold the beginning of some. In use are `num_blocks - free_blocks`.
    num_preemptions, num_swaps: all preemptions, and those in which the cache was moved to the host's memory; the
        others are computed anew.
    num_copied_blocks: blocks copied because two sequences shared them and one went on to write.
    num_refused_requests, num_refused_tokens: requests that were refused because too many of them were waiting, or too
        many tokens of prompts.
    num_expired_waiting, num_expired_running: ended because their time was over, before and after they had begun.
    num_aborted: ended because the client had gone or asked for it. num_finished: that came to an end of their own.
    prefix_queried_tokens, prefix_hit_tokens: of the prompts that were looked up in the cache, and found there.
    num_prompt_tokens, num_generated_tokens: of the prompts of requests whose output has begun, and of all outputs.
    num_drafts, num_draft_tokens, num_accepted_tokens: drafts that were verified, their tokens, and those that were
        right; accepted_at: the latter by their place in the draft. draft_seconds: spent in making drafts.
    """

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    kept_blocks: int = 0
    num_swaps: int = 0
    num_copied_blocks: int = 0
    waiting_tokens: int = 0
    num_refused_requests: int = 0
    num_refused_tokens: int = 0
    num_expired_waiting: int = 0
    num_expired_running: int = 0
    num_aborted: int = 0
    num_finished: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    draft_seconds: float = 0.0
