"""Root-mean-square normalization."""

from torch import Tensor

from headrace.ops.reference import Ops


class RMSNorm:
    """weight: float32 `[n]`, whole (a family that stores its difference from one has it added when loading)."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self.ops, self.weight, self.eps = ops, weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)
