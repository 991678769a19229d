"""The messages between scheduler and worker: what one step runs, and what came of it."""

from array import array
from dataclasses import dataclass, field

import msgspec

from headrace.sampling.params import SampledToken, SampleRequest, TokenLogprob

PADDING = -1


class SequenceStep(msgspec.Struct, gc=False):  # made for each sequence in each step, and a third of a dataclass's cost
    """One sequence's share of a step: a piece of a prompt, or the one token sampled last and perhaps a draft after it.

    seq_id: the sequence this belongs to; PADDING for tokens of which nobody wants to know what comes out.
    token_ids: the tokens to run, at positions `start`, `start + 1`, ...
    start: how many tokens of the sequence already have their keys and values in the cache.
    block_tables: by group of layers (see CacheLayout), the cache blocks of the sequence in order, enough for
        `start + len(token_ids)` tokens, as an array of typecode "q". They stay the scheduler's, and change after the
        step.
    samples: how to draw the tokens that follow the last `len(samples)` of `token_ids`: none while more of the prompt is
        to come, else one, and one more for each token of a draft.
    prompt_logprobs: how many alternatives to report for every token of the prompt; None for no report.
    next_prompt_token: with `prompt_logprobs`, the prompt token that follows this piece; None after the last piece.
    """

    seq_id: int
    token_ids: list[int]
    start: int
    block_tables: "list[array[int]]"
    samples: list[SampleRequest] = []
    prompt_logprobs: int | None = None
    next_prompt_token: int | None = None

    @property
    def draft(self) -> list[int]:
        """Those of `token_ids` that are guesses, at their end."""
        return self.token_ids[1 - len(self.samples) :] if len(self.samples) > 1 else []


@dataclass(slots=True)
class StepPlan:
    """One scheduling step: to the model it is one ragged batch of tokens, whether they come from prompts or not.

    sequences: what is run; it may be none.
    swap_out: (device block, host block) pairs, to be copied to the host's memory. Before all else: their device blocks
        may be in use for something else already in this step.
    swap_in: (device block, host block) pairs, to be copied to the device, once `swap_out` is done.
    copies: (source, destination) device blocks, to be copied when both are done and before the sequences run: a
        sequence is about to write into a block that it has shared with others so far (copy-on-write).
    """

    sequences: list[SequenceStep] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(slots=True)
class StepResult:
    """What a step brought, by sequence.

    sampled: the tokens of its draft that were accepted, and the one drawn after them.
    prompt_logprobs: the logprobs of prompt tokens, where asked for.
    """

    sampled: dict[int, list[SampledToken]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
