"""One rank: the model and its KV cache in memory, and the running of steps."""

import logging

import torch

from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.formats.checkpoint import Checkpoint
from headrace.models.loader import load_decoder
from headrace.ops import create_ops
from headrace.ops.reference import KVCache, RaggedBatch
from headrace.sampling.sampler import prompt_logprobs, sample_tokens
from headrace.worker.memory import available_memory
from headrace.worker.step import SequenceStep, StepPlan, StepResult

logger = logging.getLogger(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Loads the model, sizes the cache, and runs steps.

    max_model_len: the longest sequence, prompt and output, that this model takes on this machine.
    num_blocks: of the KV cache; each holds `config.block_size` tokens.
    Raises ModelError, or CapacityError where the asked for context does not fit in memory.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.ops = create_ops(config.backend)
        dtype = DTYPES[config.dtype]
        with torch.inference_mode():
            self.decoder = load_decoder(checkpoint, self.ops, dtype)
            self.max_model_len, self.num_blocks = self._size_cache(dtype)
            model = self.decoder.config
            self.caches: list[KVCache] = [
                self.ops.kv_cache(self.num_blocks, config.block_size, model.num_kv_heads, model.head_dim, dtype)
                for _ in range(model.num_layers)
            ]

    def _size_cache(self, dtype: torch.dtype) -> tuple[int, int]:
        """The longest sequence, and how many blocks of KV cache to make."""
        config, model = self.config, self.decoder.config
        if config.max_model_len is not None and config.max_model_len > model.max_position:
            raise CapacityError(
                f"max_model_len {config.max_model_len} is more than the {model.max_position} tokens "
                f"that the model was made for; use at most {model.max_position}"
            )
        length = config.max_model_len or model.max_position
        block_bytes = config.block_size * model.kv_bytes_per_token(dtype.itemsize)
        budget = config.kv_cache_memory
        if budget is None:
            budget = int(available_memory() * config.gpu_memory_utilization)
        blocks_per_sequence = -(-length // config.block_size)
        num_blocks = min(budget // block_bytes, blocks_per_sequence * config.max_num_seqs)
        capacity = num_blocks * config.block_size
        if capacity < length and config.max_model_len is None and capacity > 0:
            length = capacity  # nobody asked for more
            logger.warning("the context is cut to %d tokens, which is what fits in memory", length)
        if capacity < length:
            raise CapacityError(
                f"a context of {length} tokens needs {_gib(blocks_per_sequence * block_bytes)} of KV cache and there "
                f"are {_gib(budget)}: use a max_model_len of at most {capacity}, or more memory with kv_cache_memory"
            )
        logger.info(
            "KV cache: %d blocks = %d tokens = %.1f sequences of %d tokens, %s",
            num_blocks,
            capacity,
            capacity / length,
            length,
            _gib(num_blocks * block_bytes),
        )
        return length, num_blocks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step and draws the tokens it asks for."""
        steps = plan.sequences
        ids = torch.tensor([t for s in steps for t in s.token_ids])
        rows, draws, scored = _select_rows(steps)
        logits = self.decoder.forward(ids, self._batch(steps), self.caches, torch.tensor(rows, dtype=torch.int64))
        result = StepResult()
        if draws:
            requests = [step.sample for step, _ in draws if step.sample is not None]
            tokens = sample_tokens(self.ops, logits[[row for _, row in draws]], requests)
            result.sampled = {step.seq_id: token for (step, _), token in zip(draws, tokens, strict=True)}
        for step, first, successors in scored:
            part = logits[first : first + len(successors)]
            result.prompt_logprobs[step.seq_id] = prompt_logprobs(self.ops, part, successors, step.prompt_logprobs or 0)
        return result

    def _batch(self, steps: list[SequenceStep]) -> RaggedBatch:
        size = self.config.block_size
        positions = [p for s in steps for p in range(s.start, s.start + len(s.token_ids))]
        slots = [
            s.block_table[p // size] * size + p % size
            for s in steps
            for p in range(s.start, s.start + len(s.token_ids))
        ]
        widest = max(len(s.block_table) for s in steps)
        return RaggedBatch(
            query_lens=[len(s.token_ids) for s in steps],
            context_lens=[s.start + len(s.token_ids) for s in steps],
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            block_tables=torch.tensor([s.block_table + [0] * (widest - len(s.block_table)) for s in steps]),
        )


def _select_rows(
    steps: list[SequenceStep],
) -> tuple[list[int], list[tuple[SequenceStep, int]], list[tuple[SequenceStep, int, list[int]]]]:
    """Which tokens of the step need logits.

    Returns their row numbers in the batch; the steps that draw, each with its place among those rows; and the steps
    whose prompt is scored, each with its first place and the prompt tokens that follow, one per row.
    """
    rows: list[int] = []
    draws: list[tuple[SequenceStep, int]] = []
    scored: list[tuple[SequenceStep, int, list[int]]] = []
    start = 0
    for step in steps:
        end = start + len(step.token_ids)
        if step.prompt_logprobs is not None:
            successors = step.token_ids[1:] + ([] if step.next_prompt_token is None else [step.next_prompt_token])
            scored.append((step, len(rows), successors))
            rows += range(start, start + len(successors))
        if step.sample is not None:
            draws.append((step, len(rows)))
            rows.append(end - 1)
        start = end
    return rows, draws, scored


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
