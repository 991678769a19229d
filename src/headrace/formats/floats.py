"""Weights stored as floating-point numbers of eight bits with scales."""

import torch

from headrace.formats.checkpoint import Weight


class FloatWeight(Weight):
    """value = data * scale.

    data: float8_e4m3fn or float8_e5m2 `[out, in]`; scales: float32 `[out, groups]` with groups of `group_size` columns,
        one for all of a row where that is None.
    """

    def __init__(self, data: torch.Tensor, scales: torch.Tensor, group_size: int | None = None) -> None:
        self.data, self.scales, self.group_size = data, scales, group_size
        self.shape = tuple(data.shape)

    @property
    def coding(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scales = self.scales
        if self.group_size is not None:
            scales = scales[:, torch.arange(self.shape[1]) // self.group_size]
        return (self.data.float() * scales).to(dtype)
