"""One decoder layer at a time over the calibration data, and what its matrices are given there."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from headrace.formats.checkpoint import Checkpoint, DenseWeight, Weight
from headrace.formats.tokenizer import Tokenizer
from headrace.layers.norm import RMSNorm
from headrace.models.decoder import DecoderLayer
from headrace.models.loader import DecoderReader
from headrace.ops.reference import RaggedBatch

# The matrices of a layer in the order in which they are met; those of a stage are given the same.
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
SAMPLE_ROWS = 512  # inputs that are kept as they are
COLUMN_BLOCK = 1024  # of H: what lies below the diagonal need not be computed


class Overlay(Checkpoint):
    """A checkpoint with some of its tensors replaced: `changed`, by name."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.path, self.config, self.generation_config = source.path, source.config, source.generation_config
        self.changed: dict[str, Weight] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._source.shapes()

    def read(self, name: str) -> Weight:
        return self.changed[name] if name in self.changed else self._source.read(name)

    def values(self, name: str) -> Tensor:
        return self.read(name).dequantize()

    def replace(self, name: str, values: Tensor) -> None:
        self.changed[name] = DenseWeight(values)

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()


@dataclass
class Statistics:
    """Of the inputs `[n, in]` that a stage's matrices are given.

    hessian: float32 `[in, in]`, the sum of x xᵀ. mean_abs, max_abs: float32 `[in]`, of |x|. sample: some of the rows.
    """

    count: int
    hessian: Tensor
    mean_abs: Tensor
    max_abs: Tensor
    sample: Tensor


def statistics(inputs: Iterator[Tensor], total: int) -> Statistics:
    """inputs: pieces `[n, in]`, at least one, and `total` rows in all; the sample is taken evenly from them."""
    first = next(inputs)
    width = first.shape[1]
    hessian, sums, largest = torch.zeros(width, width), torch.zeros(width), torch.zeros(width)
    rows, count = [], 0
    stride = max(1, total // SAMPLE_ROWS)
    for x in chain([first], inputs):
        for start in range(0, width, COLUMN_BLOCK):
            end = min(start + COLUMN_BLOCK, width)
            hessian[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
        sums += x.abs().sum(0)
        largest = torch.maximum(largest, x.abs().amax(0))
        rows.append(x[-count % stride :: stride].clone())
        count += len(x)
    for start in range(0, width, COLUMN_BLOCK):  # the lower half is the upper one's mirror image
        end = min(start + COLUMN_BLOCK, width)
        hessian[end:, start:end] = hessian[start:end, end:].T
    return Statistics(count, hessian, sums / count, largest, torch.cat(rows)[:SAMPLE_ROWS])


class LayerRun:
    """All samples at the door of a layer, to be taken through it stage by stage.

    reader: of an Overlay, so that a stage's matrices may be replaced before the next stage sees what they give.
    hidden: for each sample float32 `[tokens, hidden]`, first the embeddings.
    """

    def __init__(self, reader: DecoderReader, samples: list[list[int]]) -> None:
        self.reader, self.ops = reader, reader.ops
        embedding = reader.embedding()
        scale = reader.config.embedding_scale
        self.hidden = [self.ops.embedding(torch.tensor(ids), embedding, scale) for ids in samples]
        self._held: list[Tensor] = []
        longest = max(len(ids) for ids in samples)
        config = reader.config
        self._cache = self.ops.kv_cache(1, longest, config.num_kv_heads, config.head_dim, torch.float32)
        self._angles = [self.ops.rotary_angles(torch.arange(longest), f, scale) for f, scale in reader.ropes]

    @property
    def num_tokens(self) -> int:
        return sum(len(x) for x in self.hidden)

    def inputs(self, layer: DecoderLayer, stage: int) -> Iterator[Tensor]:
        """What the matrices of a stage are given, sample by sample. The stages before must have been passed."""
        match stage:
            case 0:
                return (layer.attention_norm(x) for x in self.hidden)
            case 1:
                self._held = [self._mix(layer, x) for x in self.hidden]
                return iter(self._held)
            case 2:
                return (layer.mlp_norm(x) for x in self.hidden)
            case _:
                self._held = [layer.mlp.inner(layer.mlp_norm(x)) for x in self.hidden]
                return iter(self._held)

    def pass_stage(self, layer: DecoderLayer, stage: int) -> None:
        """Goes on behind a stage of which the inputs have been taken, with the matrices of `layer`."""
        if stage == 1:
            self._add([layer.attention.output(held) for held in self._held], layer.after_attention)
        elif stage == 3:
            self._add([layer.mlp.down(held) for held in self._held], layer.after_mlp)

    def pass_layer(self, layer: DecoderLayer) -> None:
        """Through a whole layer at once."""
        for stage in (1, 3):
            self.inputs(layer, stage)
            self.pass_stage(layer, stage)

    def _add(self, given: list[Tensor], norm: RMSNorm | None) -> None:
        self.hidden = [x + (y if norm is None else norm(y)) for x, y in zip(self.hidden, given, strict=True)]
        self._held = []

    def _mix(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        count = len(x)
        positions = torch.arange(count)
        batch = RaggedBatch([count], [count], positions, positions, torch.zeros(1, 1, dtype=torch.int64))
        cos, sin = self._angles[layer.rope]
        return layer.attention.mix(layer.attention_norm(x), (cos[:count], sin[:count]), batch, self._cache)
