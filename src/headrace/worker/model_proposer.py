"""Drafts of a model: a smaller one with the same vocabulary, or the first layers of the model itself."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from headrace.config import SpeculativeConfig
from headrace.errors import ConfigError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.open import open_checkpoint
from headrace.formats.tokenizer import Tokenizer
from headrace.models.decoder import Decoder
from headrace.ops.reference import KVCache
from headrace.quantize.on_load import QuantizedOnLoad
from headrace.sampling.params import SampleRequest
from headrace.sampling.random import uniform
from headrace.sampling.sampler import distribution, draw, drawn_from
from headrace.speculative.proposer import DraftRequest
from headrace.speculative.verifier import DRAFT_STREAM
from headrace.worker.batch import ragged_batches, token_ids
from headrace.worker.step import SequenceStep, StepPlan, StepResult

# Tokens that a draft model runs in a step to catch up with the model, before it makes drafts: of prompts, mostly.
MAX_CATCH_UP = 256


class ModelProposer:
    """Has a model say how sequences go on, a token of each in turn.

    A token is drawn as the sequence's own will be: with the same settings, and with the same random number. Where both
    models think alike they mostly say the same then, at any temperature. If `probabilistic`, it is drawn with a number
    of its own, and its distribution is kept for the verifier.

    decoder: the draft's. caches, groups: by layer, its cache, and which of a sequence's block tables it uses.
    computed: what of the sequences is in these caches; None where the model itself writes to them.
    vocab_size: of the model. most_blocks: of a sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: list[KVCache],
        groups: Sequence[int],
        block_size: int,
        most_blocks: int,
        vocab_size: int,
        computed: "Computed | None",
        *,
        probabilistic: bool,
    ) -> None:
        self.ops, self._config = decoder.ops, decoder.config
        self._tables = sorted(set(groups))  # those of a sequence's block tables that are used
        self._groups = [self._tables.index(group) for group in groups]
        self._forward = decoder.ops.replayed(decoder.forward, caches, self._groups, most_blocks)
        self._caches, self._block_size = caches, block_size
        self._vocab_size, self._computed, self._probabilistic = vocab_size, computed, probabilistic
        self._probabilities: dict[int, list[Tensor]] = {}  # of the last drafts, by sequence, for each token

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        self._probabilities = {}
        drafts: list[list[int]] = [[] for _ in requests]
        lengths = [min(r.most, self._config.max_position - len(r.token_ids)) for r in requests]
        steps, going = self._beginnings(requests, lengths)
        samples = {i: self._first(requests[i]) for i in going}
        while steps:
            logits = self._run(steps, len(going))
            tokens = self._draw(logits, [requests[i] for i in going], [samples[i] for i in going])
            for i, token in zip(going, tokens, strict=True):
                drafts[i].append(token)
                samples[i] = _next(samples[i], token)
            going = [i for i in going if len(drafts[i]) < lengths[i] and drafts[i][-1] not in requests[i].stop_ids]
            steps = [
                self._step(requests[i], drafts[i][-1:], len(requests[i].token_ids) + len(drafts[i]) - 1) for i in going
            ]
        return drafts

    def forget(self, seq_id: int) -> None:
        pass  # nothing is known of a sequence but what is in the cache

    def probabilities_of(self, step: SequenceStep) -> Tensor | None:
        """From what the tokens of a step's draft were drawn, as the verifier's Draft has it."""
        kept = self._probabilities.get(step.seq_id)
        # After the last token nothing was drawn, and nobody asks.
        return None if kept is None else torch.stack([*kept, kept[-1]][: len(step.samples)])

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Notes what has become of the cache in a step of the model."""
        if self._computed is None:
            return
        self._computed.clear([*(new for _, new in plan.copies), *(device for device, _ in plan.swap_in)])
        for step in plan.sequences:
            # The draft model has run the token before its draft, and the draft but for the last token.
            right = min(len(result.sampled[step.seq_id]), len(step.draft)) if step.draft else 0
            self._computed.cut(step.block_tables[0], step.start + right)

    def _beginnings(self, requests: list[DraftRequest], lengths: list[int]) -> tuple[list[SequenceStep], list[int]]:
        """The first step: of each sequence what the draft model has not seen yet, as far as there is time for it.

        Returns it with the numbers of the requests that are seen to their ends then; their steps come first.
        """
        whole, parts, going, left = [], [], [], MAX_CATCH_UP
        for i, request in enumerate(requests):
            ids, start = request.token_ids, len(request.token_ids) - 1
            if lengths[i] < 1:
                continue
            if self._computed is not None:
                start = self._computed.length(request.block_tables[0], start)
            end = min(len(ids), start + max(1, left))  # the last token alone is no catching up
            if (end < len(ids) and not left) or max(ids[start:end]) >= self._config.vocab_size:
                continue
            step = self._step(request, ids[start:end], start)
            left = max(0, left - (end - start - 1))
            if end == len(ids):
                whole.append(step)
                going.append(i)
            else:
                parts.append(step)
        return whole + parts, going

    def _step(self, request: DraftRequest, ids: list[int], start: int) -> SequenceStep:
        return SequenceStep(request.seq_id, ids, start, [request.block_tables[table] for table in self._tables])

    def _run(self, steps: list[SequenceStep], count: int) -> Tensor:
        """Runs the draft model. Returns logits after the first `count` steps, in the model's vocabulary."""
        by_group = ragged_batches(steps, self._block_size, len(self._tables))
        batches = [by_group[group] for group in self._groups]
        ends = np.cumsum([len(step.token_ids) for step in steps])[:count] - 1
        logits = self._forward(token_ids(steps), batches, self._caches, torch.from_numpy(ends))
        if self._computed is not None:
            for step in steps:
                self._computed.extend(step.block_tables[0], step.start, step.start + len(step.token_ids))
        # A model may have rows that stand for no token. What only the draft knows is never proposed.
        return F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-torch.inf).contiguous()

    def _is_probabilistic(self, request: DraftRequest) -> bool:
        """A draft that is cut by what it says is not distributed as its tokens were, so there must be no grammar."""
        return self._probabilistic and not request.has_grammar and request.sample.params.temperature > 0

    def _first(self, request: DraftRequest) -> SampleRequest:
        """How to draw the first token of a draft."""
        if not self._is_probabilistic(request):
            return request.sample
        # Nor must it be cut at the sequence's end: so it never says that.
        return replace(request.sample, forbidden=(*request.sample.forbidden, *request.stop_ids))

    def _draw(self, logits: Tensor, requests: list[DraftRequest], samples: list[SampleRequest]) -> list[int]:
        tokens = draw(self.ops, logits, samples)
        own = [row for row, request in enumerate(requests) if self._is_probabilistic(request)]
        if own:
            each = [samples[row] for row in own]
            for row, sample, q in zip(own, each, distribution(self.ops, logits[own], each), strict=True):
                tokens[row] = drawn_from(q, uniform(sample.seed, sample.index, sample.position, DRAFT_STREAM))
                self._probabilities.setdefault(requests[row].seq_id, []).append(q)
        return tokens


def _next(sample: SampleRequest, token: int) -> SampleRequest:
    """How to draw the token after this one."""
    history = None if sample.history is None else sample.history.followed_by(token)
    return replace(sample, position=sample.position + 1, history=history)


class Computed:
    """Of each block of a draft model's cache, how many tokens it holds: those that the model's own block holds.

    A draft model runs a prompt when it first makes a draft for it, and does not run the tokens of sequences without
    drafts. But blocks move, are shared and found again by the model's cache as it likes; so it is kept block by block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._filled, self._size = np.zeros(num_blocks, np.int64), block_size

    def length(self, blocks: "array[int]", most: int) -> int:
        """How many of a sequence's first `most` tokens are there."""
        filled = self._filled[np.frombuffer(blocks, np.int64)[: -(-most // self._size)]]
        short = np.flatnonzero(filled < self._size)
        return min(most, int(short[0]) * self._size + int(filled[short[0]])) if len(short) else most

    def extend(self, blocks: "array[int]", start: int, end: int) -> None:
        """Tokens `start` to `end` of a sequence have come; those before were there."""
        for place in range(start // self._size, -(-end // self._size)):
            self._filled[blocks[place]] = min(self._size, end - place * self._size)

    def cut(self, blocks: "array[int]", start: int) -> None:
        """The model has written tokens from `start` on that are others than those here."""
        place, rest = divmod(start, self._size)
        table = np.frombuffer(blocks, np.int64)[place:]
        if len(table):
            self._filled[table[0]] = min(self._filled[table[0]], rest)
            self._filled[table[1:]] = 0

    def clear(self, blocks: list[int]) -> None:
        """The model has put other things into these blocks."""
        self._filled[blocks] = 0


def open_draft_model(config: SpeculativeConfig, target: Checkpoint) -> Checkpoint:
    """The draft model of a config. Raises ConfigError if its tokens are not the model's."""
    assert config.model is not None
    checkpoint = open_checkpoint(config.model, None)
    check_same_tokens(target.tokenizer(), checkpoint.tokenizer(), str(checkpoint.path))
    return checkpoint if config.quantization is None else QuantizedOnLoad(checkpoint, config.quantization)


def check_same_tokens(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ConfigError, naming the first difference, unless both tokenizers have the same tokens."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {path} has {draft.vocab_size} tokens and the model "
            f"{target.vocab_size}; a draft needs a model with the same tokenizer"
        )
    for token_id, (ours, theirs) in enumerate(zip(_names(target), _names(draft), strict=True)):
        if ours != theirs:
            raise ConfigError(
                f"speculative_config: token {token_id} is {theirs!r} in the draft model {path} and {ours!r} in the "
                "model; a draft needs a model with the same tokenizer"
            )


def _names(tokenizer: Tokenizer) -> list[str | bytes]:
    return [data or tokenizer.token_text(token_id) for token_id, data in enumerate(tokenizer.vocabulary_bytes())]
