"""The gated feed-forward block."""

from torch import Tensor

from headrace.layers.linear import Linear
from headrace.ops.reference import Ops


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate and up are one matrix, gate first."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear, activation: str) -> None:
        self.ops, self.gate_up, self.down, self.activation = ops, gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the down projection is given: `[T, intermediate]`."""
        return self.ops.gated(self.gate_up(x), self.activation)
