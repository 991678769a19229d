"""One rank: the model and its KV cache in memory, and the running of steps."""

import os
from dataclasses import replace

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.formats.checkpoint import Checkpoint
from headrace.models.loader import load_decoder
from headrace.ops import create_ops
from headrace.ops.reference import KVCache, RaggedBatch
from headrace.quantize.on_load import QuantizedOnLoad
from headrace.sampling.sampler import prompt_logprobs
from headrace.speculative.verifier import Draft, verify
from headrace.worker.cache_size import size_cache
from headrace.worker.memory import available_cpus, available_memory
from headrace.worker.step import SequenceStep, StepPlan, StepResult

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# As torch counts the cores, or OMP_NUM_THREADS says; a worker changes it.
TORCH_THREADS = torch.get_num_threads()


def _default_threads() -> int:
    return TORCH_THREADS if "OMP_NUM_THREADS" in os.environ else min(TORCH_THREADS, available_cpus())


class Worker:
    """Loads the model, sizes the cache, and runs steps.

    max_model_len: the longest sequence, prompt and output, that this model takes on this machine.
    layout: how the layers share the blocks of the cache. num_blocks: of those; num_host_blocks: of those to swap to.
    cache_bytes: what the KV cache takes of the memory. threads: how many share the work.
    Raises ModelError, or CapacityError where the asked for context does not fit in memory.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.threads = config.threads or _default_threads()
        self.ops = create_ops(config.backend, config.activation_precision, self.threads)
        # Threads of torch wait for its next op in a loop, and so would take the cores from the kernels' own.
        torch.set_num_threads(1 if self.ops.own_threads else self.threads)
        dtype = DTYPES[config.dtype]
        if config.quantization is not None:
            checkpoint = QuantizedOnLoad(checkpoint, config.quantization)
        with torch.inference_mode():
            self.decoder = load_decoder(checkpoint, self.ops, dtype)
            kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
            if config.is_contiguous:  # is paged, with pages that hold a whole sequence
                length = config.max_model_len
                whole = length if isinstance(length, int) else self.decoder.config.max_position
                config = replace(config, block_size=whole)
            self.config = config
            # After the weights are loaded, so that what they take is not counted as free.
            size = size_cache(config, self.decoder.config, kv_dtype, available_memory())
            self.layout, self.max_model_len = size.layout, size.max_model_len
            self.num_blocks, self.num_host_blocks = size.num_blocks, size.num_host_blocks
            self.cache_bytes = size.num_blocks * size.block_bytes
            self._pages = self._kv_caches(self.num_blocks, kv_dtype)
            self._host_pages = self._kv_caches(self.num_host_blocks, kv_dtype) if self.num_host_blocks else []
            self.caches = [self._pages[place] for _, place in self.layout.places]
            most_blocks = -(-self.max_model_len // config.block_size)
            groups = [group for group, _ in self.layout.places]
            self._forward = self.decoder.ops.replayed(self.decoder.forward, self.caches, groups, most_blocks)

    def _kv_caches(self, num_blocks: int, dtype: torch.dtype) -> list[KVCache]:
        """A cache for each place of a group of layers. Every block of it is in use by one of the groups, or free."""
        model, size = self.decoder.config, self.config.block_size
        return [
            self.ops.kv_cache(num_blocks, size, model.num_kv_heads, model.head_dim, dtype)
            for _ in range(self.layout.layers_per_group)
        ]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Moves blocks about as the plan says, runs one step and draws the tokens it asks for."""
        if plan.swap_out or plan.swap_in:
            for cache, host in zip(self._pages, self._host_pages, strict=True):
                self.ops.copy_blocks(cache, host, plan.swap_out)
                self.ops.copy_blocks(host, cache, [(block, device) for device, block in plan.swap_in])
        for cache in self._pages:
            self.ops.copy_blocks(cache, cache, plan.copies)
        steps = plan.sequences
        if not steps:
            return StepResult()
        ids = torch.tensor([t for s in steps for t in s.token_ids])
        rows, draws, scored = _select_rows(steps)
        by_group = self._batches(steps)
        batches = [by_group[group] for group, _ in self.layout.places]
        logits = self._forward(ids, batches, self.caches, torch.tensor(rows, dtype=torch.int64))
        result = StepResult()
        if draws:
            wanted = [row for step, first in draws for row in range(first, first + len(step.samples))]
            drafts = [Draft(step.samples, step.draft) for step, _ in draws]
            tokens = verify(self.ops, logits if len(wanted) == len(logits) else logits[wanted], drafts)
            result.sampled = {step.seq_id: drawn for (step, _), drawn in zip(draws, tokens, strict=True)}
        for step, first, successors in scored:
            part = logits[first : first + len(successors)]
            result.prompt_logprobs[step.seq_id] = prompt_logprobs(self.ops, part, successors, step.prompt_logprobs or 0)
        return result

    def _batches(self, steps: list[SequenceStep]) -> list[RaggedBatch]:
        """The step as each group of layers sees it: all the same but for the blocks."""
        counts = np.array([len(s.token_ids) for s in steps])
        starts = np.array([s.start for s in steps])
        rows = np.repeat(np.arange(len(steps)), counts)
        positions = np.arange(len(rows)) + np.repeat(starts + counts - np.cumsum(counts), counts)
        blocks, places = np.divmod(positions, self.config.block_size)
        query_lens, context_lens = counts.tolist(), (starts + counts).tolist()
        shared_positions = torch.from_numpy(positions)
        batches = []
        for group in range(len(self.layout.windows)):
            # All tables in one copy, each with zeros after it to be as long as the longest. (In a loop over them, or
            # with a mask, this would take longer than everything else here.)
            own = [s.block_tables[group] for s in steps]
            width = max(map(len, own))
            zeros = memoryview(bytes(8 * width))
            padded = [part for table in own for part in (table, zeros[8 * len(table) :])]
            tables = np.frombuffer(bytearray().join(padded), np.int64).reshape(len(steps), width)
            slots = tables[rows, blocks] * self.config.block_size + places
            batches.append(
                RaggedBatch(
                    query_lens, context_lens, shared_positions, torch.from_numpy(slots), torch.from_numpy(tables)
                )
            )
        return batches


def _select_rows(
    steps: list[SequenceStep],
) -> tuple[list[int], list[tuple[SequenceStep, int]], list[tuple[SequenceStep, int, list[int]]]]:
    """Which tokens of the step need logits.

    Returns their row numbers in the batch; the steps that draw, each with its first place among those rows; and those
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
        if step.samples:
            draws.append((step, len(rows)))
            rows += range(end - len(step.samples), end)
        start = end
    return rows, draws, scored
