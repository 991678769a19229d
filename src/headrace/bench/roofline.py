"""The least time that a step can take on a machine: what it must read, and what it must multiply."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bench.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.core import Engine
    from headrace.ops.reference import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on a machine (Williams et al. 2009).

    weight_bytes: of all matrices but an embedding that is not the output matrix too, as they lie in memory.
    layer_weights, head_weights: how many weights the layers and the output matrix have.
    is_integer: whether they are multiplied as whole numbers.
    windows: how many keys the queries of so many layers see; None for all.
    cache_bytes: of a token in one layer's cache. attention_operations: for a query and a key, in one layer.
    """

    limits: Limits
    weight_bytes: int
    layer_weights: int
    head_weights: int
    is_integer: bool
    windows: tuple[tuple[int | None, int], ...]
    cache_bytes: float
    attention_operations: int

    @classmethod
    def of(cls, engine: "Engine", limits: Limits) -> "Roofline":
        worker, decoder = engine.worker, engine.worker.decoder
        layers = [
            linear.weight
            for layer in decoder.layers
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        ]
        head, config, layout = decoder.head.weight, decoder.config, worker.layout
        is_whole = any(not tensor.is_floating_point() for matrix in layers for tensor in tensors(matrix))
        return cls(
            limits=limits,
            weight_bytes=sum(t.numel() * t.element_size() for matrix in (*layers, head) for t in tensors(matrix)),
            layer_weights=sum(matrix.shape[0] * matrix.shape[1] for matrix in layers),
            head_weights=head.shape[0] * head.shape[1],
            is_integer=is_whole and worker.config.activation_precision != "float32",
            windows=tuple(Counter(config.windows).items()),
            cache_bytes=worker.cache_bytes / worker.num_blocks / layout.block_size / layout.layers_per_group,
            attention_operations=4 * config.num_heads * config.head_dim,
        )

    def seconds(self, sequences: Iterable[tuple[int, int]]) -> float:
        """The least time of a step. sequences: for each, the tokens in its cache and those that run after them."""
        tokens = count = pairs = keys = 0
        for start, length in sequences:
            tokens += length
            count += 1
            for window, layers in self.windows:
                pairs += layers * _pairs(start, length, window)
                keys += layers * (start if window is None else min(start, window))
        num_bytes = self.weight_bytes + keys * self.cache_bytes
        products = 2 * (self.layer_weights * tokens + self.head_weights * count)
        multiplying = products / self.limits.multiply["int8" if self.is_integer else "float32"]
        multiplying += self.attention_operations * pairs / self.limits.multiply["float32"]
        return max(num_bytes / self.limits.bandwidth(num_bytes), multiplying)


def _pairs(start: int, length: int, window: int | None) -> int:
    """How many keys `length` tokens after `start` others see in all, themselves counted."""
    if window is None or start + length <= window:
        return length * start + length * (length + 1) // 2
    growing = max(0, window - start)  # tokens that see fewer than a window
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def tensors(matrix: "Matrix") -> "list[Tensor]":
    """What a matrix keeps in memory, whichever backend made it."""
    from torch import Tensor

    if isinstance(matrix.data, Tensor):
        return [matrix.data]
    return [tensor for piece in matrix.data for tensor in piece.tensors]
