"""One rank: the model and its KV cache in memory, and the running of steps."""

import os
from dataclasses import replace

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.formats.checkpoint import Checkpoint
from headrace.models.decoder import Decoder
from headrace.models.loader import load_decoder
from headrace.ops import create_ops
from headrace.ops.reference import KVCache
from headrace.quantize.on_load import QuantizedOnLoad
from headrace.sampling.sampler import prompt_logprobs
from headrace.speculative.verifier import Draft, verify
from headrace.worker.batch import ragged_batches, select_rows, token_ids
from headrace.worker.cache_size import size_cache
from headrace.worker.memory import available_cpus, available_memory
from headrace.worker.model_proposer import Computed, ModelProposer, open_draft_model
from headrace.worker.step import SequenceStep, StepPlan, StepResult

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# As torch counts the cores, or OMP_NUM_THREADS says; a worker changes it.
TORCH_THREADS = torch.get_num_threads()


def default_threads() -> int:
    """How many threads share the work where nobody says."""
    return TORCH_THREADS if "OMP_NUM_THREADS" in os.environ else min(TORCH_THREADS, available_cpus())


class Worker:
    """Loads the model, sizes the cache, and runs steps.

    max_model_len: the longest sequence, prompt and output, that this model takes on this machine.
    layout: how the layers share the blocks of the cache. num_blocks: of those; num_host_blocks: of those to swap to.
    cache_bytes: what the KV cache takes of the memory. threads: how many share the work.
    proposer: makes drafts, where a model is to make them.
    Raises ModelError, or CapacityError where the asked for context does not fit in memory.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.threads = config.threads or default_threads()
        self.ops = create_ops(config.backend, config.activation_precision, self.threads)
        # Threads of torch wait for its next op in a loop, and so would take the cores from the kernels' own.
        torch.set_num_threads(1 if self.ops.own_threads else self.threads)
        dtype = DTYPES[config.dtype]
        speculation, draft_model, draft = config.speculation, None, None
        if speculation is not None and speculation.method == "draft_model":
            draft_model = open_draft_model(speculation, checkpoint)
        if config.quantization is not None:
            checkpoint = QuantizedOnLoad(checkpoint, config.quantization)
        with torch.inference_mode():
            self.decoder = load_decoder(checkpoint, self.ops, dtype)
            if draft_model is not None:
                draft = load_decoder(draft_model, self.ops, dtype)
            kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
            if config.is_contiguous:  # is paged, with pages that hold a whole sequence
                length = config.max_model_len
                whole = length if isinstance(length, int) else self.decoder.config.max_position
                config = replace(config, block_size=whole)
            self.config = config
            # After the weights are loaded, so that what they take is not counted as free.
            draft_config = None if draft is None else draft.config
            size = size_cache(config, self.decoder.config, kv_dtype, available_memory(), draft_config)
            self.layout, self.max_model_len = size.layout, size.max_model_len
            self.num_blocks, self.num_host_blocks = size.num_blocks, size.num_host_blocks
            self.cache_bytes = size.num_blocks * size.block_bytes
            self._pages = self._kv_caches(self.num_blocks, kv_dtype)
            self._host_pages = self._kv_caches(self.num_host_blocks, kv_dtype) if self.num_host_blocks else []
            self.caches = [self._pages[place] for _, place in self.layout.places]
            most_blocks = -(-self.max_model_len // config.block_size)
            groups = [group for group, _ in self.layout.places]
            self._forward = self.decoder.ops.replayed(self.decoder.forward, self.caches, groups, most_blocks)
            self.proposer = self._make_proposer(draft, kv_dtype, most_blocks)

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
        rows, draws, scored = select_rows(steps)
        by_group = ragged_batches(steps, self.config.block_size, len(self.layout.windows))
        batches = [by_group[group] for group, _ in self.layout.places]
        logits = self._forward(token_ids(steps), batches, self.caches, torch.tensor(rows, dtype=torch.int64))
        result = StepResult()
        if draws:
            wanted = [row for step, first in draws for row in range(first, first + len(step.samples))]
            drafts = [Draft(step.samples, step.draft, probabilities=self._probabilities(step)) for step, _ in draws]
            verdicts = verify(self.ops, logits if len(wanted) == len(logits) else logits[wanted], drafts)
            result.sampled = {step.seq_id: verdict.tokens for (step, _), verdict in zip(draws, verdicts, strict=True)}
        for step, first, successors in scored:
            part = logits[first : first + len(successors)]
            result.prompt_logprobs[step.seq_id] = prompt_logprobs(self.ops, part, successors, step.prompt_logprobs or 0)
        if self.proposer is not None:
            self.proposer.settle(plan, result)
        return result

    def _probabilities(self, step: SequenceStep) -> Tensor | None:
        """From what the tokens of a step's draft were drawn, as the verifier wants it."""
        return self.proposer.probabilities_of(step) if self.proposer is not None and step.draft else None

    def _make_proposer(self, draft: Decoder | None, kv_dtype: torch.dtype, most_blocks: int) -> ModelProposer | None:
        """What makes drafts by a model: the given one, or the first layers of this one; None for other methods."""
        speculation, size = self.config.speculation, self.config.block_size
        if speculation is None or speculation.method not in ("draft_model", "self"):
            return None
        if draft is None:
            layers = speculation.num_layers or max(1, len(self.decoder.layers) // 2)
            if layers > len(self.decoder.layers):
                raise ConfigError(
                    f"speculative_config: num_layers is {layers}, and the model has {len(self.decoder.layers)}"
                )
            d = self.decoder
            draft = Decoder(d.config, d.ops, d.embedding, d.ropes, d.layers[:layers], d.norm, d.head)
            # They write what the model itself will write there.
            caches, groups, computed = self.caches[:layers], [g for g, _ in self.layout.places[:layers]], None
        else:
            heads, dim = draft.config.num_kv_heads, draft.config.head_dim
            caches = [self.ops.kv_cache(self.num_blocks, size, heads, dim, kv_dtype) for _ in draft.layers]
            groups, computed = [0] * len(draft.layers), Computed(self.num_blocks, size)
        return ModelProposer(
            draft,
            caches,
            groups,
            size,
            most_blocks,
            self.decoder.config.vocab_size,
            computed,
            probabilistic=speculation.draft_sample_method == "probabilistic",
        )
