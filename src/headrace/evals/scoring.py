"""Log-probabilities of a text's tokens, computed as serving computes them: by the worker, in chunks, over its cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from headrace.formats.tokenizer import Tokenizer
from headrace.ops.reference import RaggedBatch
from headrace.worker.worker import Worker


@dataclass(frozen=True)
class Window:
    """A stretch of a text that the model sees at once, tokens `start` to `end`; those from `first` on are scored."""

    start: int
    first: int
    end: int


def windows(length: int, size: int, stride: int) -> list[Window]:
    """Windows over a text of `length` tokens that score each token once, but for those that nothing precedes: the very
    first, and where windows do not overlap the first of each. Each begins `stride` tokens after the one before it, so
    that after the first window all tokens have at least `size - stride` tokens before them.

    Source: https://huggingface.co/docs/transformers/perplexity
    """
    found, scored = [], 0
    for start in range(0, length, stride):
        end = min(start + size, length)
        first = max(scored, start + 1)
        if end > first:
            found.append(Window(start, first, end))
        scored = end
        if end == length:
            break
    return found


class TextModel:
    """A model that scores texts.

    config: max_model_len is the longest window; max_num_batched_tokens the tokens of a chunk.
    Raises ConfigError or ModelError as loading does.
    """

    def __init__(self, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(config.model, config.revision)
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.worker = Worker(config, checkpoint)
        self.max_length = self.worker.max_model_len
        self._chunk = config.max_num_batched_tokens
        worker, model = self.worker, self.worker.decoder.config
        size, dtype = worker.config.block_size, worker.caches[0].keys.dtype
        # A cache for one sequence, in which each layer has all blocks: the worker's own is shared out by a scheduler.
        self._num_blocks = -(-self.max_length // size)
        self._caches = [
            worker.ops.kv_cache(self._num_blocks, size, model.num_kv_heads, model.head_dim, dtype)
            for _ in range(model.num_layers)
        ]

    @property
    def vocab_size(self) -> int:
        return self.worker.decoder.config.vocab_size

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as one prompt. Raises ConfigError for one that is too short to be scored."""
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise ConfigError(f"the text has {len(ids)} tokens: scoring takes at least 2")
        return ids

    @torch.inference_mode()
    def logprobs(self, ids: list[int], window: Window) -> Iterator[Tensor]:
        """The distributions, float32 `[n, vocab]`, from which each scored token of a window comes, in pieces."""
        part = ids[window.start : window.end]
        wanted = window.first - window.start - 1  # the row whose successor is the first scored token
        for start in range(0, len(part), self._chunk):
            end = min(start + self._chunk, len(part))
            positions = torch.arange(start, end)
            batch = RaggedBatch([end - start], [end], positions, positions, torch.arange(self._num_blocks)[None])
            stop = min(end, len(part) - 1) - start  # the last token's successor is not in the window
            rows = torch.arange(min(max(wanted - start, 0), stop), stop)
            logits = self.worker.decoder.forward(
                torch.tensor(part[start:end]), [batch] * len(self._caches), self._caches, rows
            )
            if len(rows):
                yield logits.log_softmax(-1)
