"""The CPU backend: the ops that csrc/ has kernels for, and torch's packed product; all others are the reference's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.formats.checkpoint import Weight
from headrace.ops.reference import Matrix, Ops

try:
    from headrace import _native
except ImportError as error:
    raise HeadraceError(
        f"the native kernels cannot be loaded ({error}): install Headrace again with `pip install .`, "
        "or run with backend='reference'"
    ) from error

# These two are what torch's own compiler calls; they have no public name.
HAS_PACKED_LINEAR = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
)
PACKED_FOR_ROWS = 16

# How the kernels number the dtypes (csrc/kernels.h).
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuOps(Ops):
    """Ops on the CPU's own vector instructions. The kernels in csrc/ give the same bits on every instruction set."""

    name = "cpu"

    def __init__(self) -> None:
        try:
            self.isa = _native.isa()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype) -> Matrix:
        """As the reference, in the order in which oneDNN reads it, where this torch has that: products of few rows, as
        decoding has them, take half the time."""
        matrix = super().matrix(weights, dtype)
        if HAS_PACKED_LINEAR and dtype == torch.float32 and matrix.parts is None:
            matrix.data = torch.ops.mkldnn._reorder_linear_weight(matrix.data, PACKED_FOR_ROWS)
        return matrix

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not weight.data.is_mkldnn:
            return super().linear(x, weight, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        count, hidden = rows.shape
        row_stride, stride = rows.stride()
        if stride != 1:
            rows = rows.contiguous()
            row_stride = hidden
        weight = weight.contiguous()
        if x.dtype not in DTYPES or weight.dtype != torch.float32 or weight.numel() != hidden:
            raise ValueError(
                f"rms_norm takes float32, bfloat16 or float16 and a float32 weight of size {hidden}, "
                f"not {x.dtype} and {weight.dtype} of size {weight.numel()}"
            )
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _native.rms_norm(
            rows.data_ptr(), weight.data_ptr(), y.data_ptr(), count, hidden, row_stride, eps, DTYPES[x.dtype]
        )
        return y
