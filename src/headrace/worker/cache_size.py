"""How many blocks of KV cache to make, and how long a sequence may be."""

import logging
from dataclasses import dataclass

import torch

from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.models.config import DecoderConfig
from headrace.ops.reference import KV_SCALE_DTYPE
from headrace.worker.cache_layout import CacheLayout
from headrace.worker.memory import Available

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """max_model_len: the longest sequence, in tokens. num_blocks: of the cache; num_host_blocks: of that to swap to.

    layout: how the layers share the blocks. block_bytes: what a block takes in all layers of a group together.
    """

    layout: CacheLayout
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    block_bytes: int


def size_cache(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: torch.dtype,
    available: Available,
    draft: DecoderConfig | None = None,
) -> CacheSize:
    """Fits the cache into memory, and says how it came out.

    dtype: in which keys and values are stored; see `Ops.kv_cache`.
    available: once the weights are loaded. The cache takes `config.kv_cache_memory` of it, or the share that
        `config.gpu_memory_utilization` allows, but no more than `max_num_seqs` sequences of the greatest length fill.
    draft: a draft model, all of whose layers have the same blocks as those of this model that see everything.
    Raises CapacityError, saying what would fit, if one such sequence does not fit.
    """
    longest = config.max_model_len
    if isinstance(longest, int) and longest > model.max_position:
        raise CapacityError(
            f"max_model_len {longest} is more than the {model.max_position} tokens that the model was made for; "
            f"use at most {model.max_position}"
        )
    layout = _layout(config, model, keep_all=draft is not None)
    block_bytes = _block_bytes(layout, model, dtype, draft)
    budget, source = _budget(config, available)
    length = longest if isinstance(longest, int) else model.max_position
    fitting = layout.longest(budget // block_bytes, length)
    if fitting < length and (isinstance(longest, int) or fitting < 1):
        least = length if isinstance(longest, int) else config.block_size
        raise CapacityError(_what_would_fit(layout, config, model, least, dtype, available, draft))
    if fitting < length:
        logger.warning(
            "the context is cut from %d to %d tokens, which is what fits in %s (%s)",
            length,
            fitting,
            _human(budget),
            source,
        )
        length = fitting
    most_blocks = layout.blocks_for(length) * config.max_num_seqs
    num_blocks = min(budget // block_bytes, most_blocks)
    host_block_bytes = _block_bytes(layout, model, dtype)
    num_host_blocks = min(int(config.swap_space) // host_block_bytes, most_blocks)
    if config.swap_space and not num_host_blocks:
        raise CapacityError(
            f"swap_space {_human(int(config.swap_space))} is less than a block of the KV cache: give at least "
            f"{host_block_bytes} bytes, or 0 to compute preempted sequences anew"
        )
    sequences = num_blocks / layout.blocks_for(length)
    tokens = sequences * -(-length // config.block_size) * config.block_size
    swap = f", and {num_host_blocks} blocks to swap to" if num_host_blocks else ""
    logger.info(
        "KV cache: %d blocks = %d tokens = %.1f sequences of max length %d; %s of %s%s",
        num_blocks,
        tokens,
        sequences,
        length,
        _human(num_blocks * block_bytes),
        str(dtype).removeprefix("torch."),
        swap,
    )
    return CacheSize(layout, length, num_blocks, num_host_blocks, block_bytes)


def _layout(config: EngineConfig, model: DecoderConfig, *, keep_all: bool) -> CacheLayout:
    """keep_all: some layers have to keep all tokens, as a draft model needs them."""
    longest = config.max_model_len if isinstance(config.max_model_len, int) else model.max_position
    # A contiguous cache keeps all that a sequence has, and nothing ever falls out of a window that is longer than it.
    windows = [None if w is None or w >= longest or config.is_contiguous else w for w in model.windows]
    if keep_all and None not in windows:
        windows = [None] * len(windows)
    return CacheLayout.of(windows, config.block_size, config.max_num_batched_tokens)


def _block_bytes(
    layout: CacheLayout, model: DecoderConfig, dtype: torch.dtype, draft: DecoderConfig | None = None
) -> int:
    scale = KV_SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
    per_token = model.kv_bytes_per_token(dtype.itemsize, scale, num_layers=layout.layers_per_group)
    if draft is not None:
        per_token += draft.kv_bytes_per_token(dtype.itemsize, scale)
    return layout.block_size * per_token


def _budget(config: EngineConfig, available: Available) -> tuple[int, str]:
    """Bytes for the cache, and where the number comes from."""
    if isinstance(config.kv_cache_memory, int):
        return config.kv_cache_memory, "kv_cache_memory"
    share = config.gpu_memory_utilization
    left = max(0, available.num_bytes - int(config.swap_space))
    less = f" less the swap_space of {_human(int(config.swap_space))}" if config.swap_space else ""
    return int(left * share), f"{share:.0%} of {available.limited_by}{less}; gpu_memory_utilization sets the share"


def _what_would_fit(
    layout: CacheLayout,
    config: EngineConfig,
    model: DecoderConfig,
    length: int,
    dtype: torch.dtype,
    available: Available,
    draft: DecoderConfig | None,
) -> str:
    """The message for a sequence of `length` tokens that does not fit: by how much, and every way out there is."""
    budget, source = _budget(config, available)
    block_bytes = _block_bytes(layout, model, dtype, draft)
    needed = layout.blocks_for(length) * block_bytes
    ways = []
    fitting = layout.longest(budget // block_bytes, length)
    if fitting:
        ways.append(f"max_model_len of at most {fitting} (or 'auto')")
    fitting = layout.longest(budget // _block_bytes(layout, model, torch.int8, draft), length)
    if dtype != torch.int8 and fitting:
        ways.append("kv_cache_dtype int8" + (f" with max_model_len of at most {fitting}" if fitting < length else ""))
    if layout.block_size > 1 and not fitting:
        ways.append("a smaller block_size")
    if needed <= available.num_bytes:
        ways.append(f"kv_cache_memory of at least {_human(needed)} ({needed} bytes)")
    else:
        ways.append(f"{_human(needed - available.num_bytes)} more memory")
    return (
        f"a context of {length} tokens needs {_human(needed)} of KV cache, and there are {_human(budget)} for it "
        f"({source}); what would fit: {'; or '.join(ways)}"
    )


def _human(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"
