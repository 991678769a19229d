"""From the steps of sequences to the tensors that a model is run on."""

import numpy as np
import torch
from torch import Tensor

from headrace.ops.reference import RaggedBatch
from headrace.worker.step import SequenceStep


def token_ids(steps: list[SequenceStep]) -> Tensor:
    """Those of all steps, int64 `[T]`."""
    return torch.tensor([token for step in steps for token in step.token_ids])


def ragged_batches(steps: list[SequenceStep], block_size: int, num_groups: int) -> list[RaggedBatch]:
    """The steps as each of the first groups of layers sees them: all the same but for the blocks."""
    counts = np.array([len(s.token_ids) for s in steps])
    starts = np.array([s.start for s in steps])
    rows = np.repeat(np.arange(len(steps)), counts)
    positions = np.arange(len(rows)) + np.repeat(starts + counts - np.cumsum(counts), counts)
    blocks, places = np.divmod(positions, block_size)
    query_lens, context_lens = counts.tolist(), (starts + counts).tolist()
    shared_positions = torch.from_numpy(positions)
    batches = []
    for group in range(num_groups):
        # All tables in one copy, each with zeros after it to be as long as the longest. (In a loop over them, or with a
        # mask, this would take longer than everything else here.)
        own = [s.block_tables[group] for s in steps]
        width = max(map(len, own))
        zeros = memoryview(bytes(8 * width))
        padded = [part for table in own for part in (table, zeros[8 * len(table) :])]
        tables = np.frombuffer(bytearray().join(padded), np.int64).reshape(len(steps), width)
        slots = tables[rows, blocks] * block_size + places
        batches.append(
            RaggedBatch(query_lens, context_lens, shared_positions, torch.from_numpy(slots), torch.from_numpy(tables))
        )
    return batches


def select_rows(
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
