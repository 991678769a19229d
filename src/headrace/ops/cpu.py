"""The native CPU backend: the ops that csrc/ has kernels for; all others are the reference's."""

import torch
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.ops.reference import Ops

try:
    from headrace import _native
except ImportError as error:
    raise HeadraceError(
        f"the native kernels cannot be loaded ({error}): install Headrace again with `pip install .`, "
        "or run with backend='reference'"
    ) from error

# How the kernels number the dtypes (csrc/kernels.h).
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuOps(Ops):
    """Ops on the CPU's own vector instructions. Every instruction set gives the same bits."""

    name = "cpu"

    def __init__(self) -> None:
        try:
            self.isa = _native.isa()
        except ValueError as error:
            raise ConfigError(str(error)) from error

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
