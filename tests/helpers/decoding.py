"""Logits of Headrace's decoder, without engine and scheduler around it."""

import random
from pathlib import Path

import torch

from headrace.formats.open import open_checkpoint
from headrace.models.decoder import Decoder
from headrace.models.loader import load_decoder
from headrace.ops import create_ops
from headrace.ops.reference import RaggedBatch


class DecoderRunner:
    """A decoder, and a paged cache of the size that a call needs."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.ops = decoder, decoder.ops

    @classmethod
    def load(cls, path: str | Path, backend: str = "reference") -> "DecoderRunner":
        """The decoder of a checkpoint, in float32."""
        with torch.inference_mode():
            return cls(load_decoder(open_checkpoint(str(path)), create_ops(backend), torch.float32))

    @torch.inference_mode()
    def logits(
        self, prompts: list[list[int]], *, chunk: int | None = None, block_size: int = 16, last: int | None = None
    ) -> list[torch.Tensor]:
        """Logits `[len(prompt), vocab]` of each prompt, all of them run together as ragged batches.

        chunk: how many tokens of each prompt a step takes; None for all. The blocks of the cache are dealt out at
            random, so that nothing comes out right by lying in order.
        last: give those of the last so many tokens of each prompt only.
        """
        blocks = [-(-len(prompt) // block_size) for prompt in prompts]
        deck = random.Random(0).sample(range(sum(blocks) + 3), sum(blocks))
        tables = [[deck.pop() for _ in range(n)] for n in blocks]
        padded = torch.tensor([table + [0] * (max(blocks) - len(table)) for table in tables])
        config = self.decoder.config
        caches = [
            self.ops.kv_cache(sum(blocks) + 3, block_size, config.num_kv_heads, config.head_dim, torch.float32)
            for _ in range(config.num_layers)
        ]
        out: list[list[torch.Tensor]] = [[] for _ in prompts]
        size = chunk or max(len(prompt) for prompt in prompts)
        for start in range(0, max(len(prompt) for prompt in prompts), size):
            pieces = {i: prompt[start : start + size] for i, prompt in enumerate(prompts) if len(prompt) > start}
            places = [(i, start + j) for i, piece in pieces.items() for j in range(len(piece))]
            batch = RaggedBatch(
                query_lens=[len(piece) for piece in pieces.values()],
                context_lens=[start + len(piece) for piece in pieces.values()],
                positions=torch.tensor([p for _, p in places]),
                slots=torch.tensor([tables[i][p // block_size] * block_size + p % block_size for i, p in places]),
                block_tables=padded[list(pieces)],
            )
            ids = torch.tensor([token for piece in pieces.values() for token in piece])
            wanted = [row for row, (i, p) in enumerate(places) if last is None or p >= len(prompts[i]) - last]
            logits = self.decoder.forward(ids, [batch] * len(caches), caches, torch.tensor(wanted, dtype=torch.int64))
            for place, row in zip(wanted, logits, strict=True):
                out[places[place][0]].append(row)
        return [torch.stack(rows) for rows in out]


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest over all positions of |ours - truth| / |truth| (Euclidean norms over the vocabulary)."""
    ours, truth = ours.double(), truth.double()
    return float(((ours - truth).norm(dim=-1) / truth.norm(dim=-1)).max())
