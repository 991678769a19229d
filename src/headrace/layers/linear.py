"""A matrix product with an optional bias."""

from torch import Tensor

from headrace.ops.reference import Matrix, Ops


class Linear:
    """x @ weightᵀ + bias. bias: `[out]` in the model's dtype, or None."""

    def __init__(self, ops: Ops, weight: Matrix, bias: Tensor | None = None) -> None:
        self.ops, self.weight, self.bias = ops, weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)
