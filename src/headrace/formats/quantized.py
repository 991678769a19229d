"""Quantized matrices of Hugging Face directories: several tensors that make up one weight.

Each format is a module (`gptq`, `awq`, `compressed_tensors`) with a function that finds such matrices among a
directory's tensors, and one that gives the tensors to write for a matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from headrace.errors import ModelError
from headrace.formats.checkpoint import CodedWeight, DenseWeight, IntegerWeight, Weight
from headrace.formats.files import quoted
from headrace.formats.safetensors import SafetensorsFile


@dataclass(frozen=True)
class StoredMatrix:
    """shape: `[out, in]`. read: makes the weight of the stored tensors. tensors: the names of these."""

    shape: tuple[int, int]
    read: Callable[[], Weight]
    tensors: frozenset[str]


class StoredTensors:
    """A directory's tensors by name, with checks whose errors name file and tensor.

    config: the quantization's settings, read from `config_path`.
    """

    def __init__(self, sources: Mapping[str, SafetensorsFile], config: Mapping[str, Any], config_path: Path) -> None:
        self.sources, self.config, self.config_path = sources, config, config_path

    def modules(self, ending: str) -> list[str]:
        """The names before `.ending`."""
        return [name.removesuffix("." + ending) for name in self.sources if name.endswith("." + ending)]

    def shape(self, name: str, dtypes: tuple[str, ...], dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that must be there, of one of these dtypes."""
        if name not in self.sources:
            raise ModelError(f"{self.config_path.parent}: tensor {quoted(name)} is missing: the weight is incomplete")
        info = self.sources[name].tensors[name]
        if info.dtype not in dtypes or len(info.shape) != dimensions:
            self.fault(
                name, f"must be of {' or '.join(dtypes)} with {dimensions} dimensions, is {info.dtype} {[*info.shape]}"
            )
        return info.shape

    def expect(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        found = self.shape(name, dtypes, len(shape))
        if found != shape:
            self.fault(name, f"must be {[*shape]}, is {[*found]}")

    def read(self, name: str) -> torch.Tensor:
        return self.sources[name].read(name)

    def scales(self, name: str) -> torch.Tensor:
        """Scales in float32. Raises ModelError for NaN and infinity, which would spoil everything after them."""
        scales = self.read(name).float()
        if not torch.isfinite(scales).all():
            self.fault(name, "holds NaN or infinity: the file is damaged")
        return scales

    def fault(self, name: str, message: str) -> NoReturn:
        raise ModelError(f"{self.sources[name].path}: tensor {quoted(name)} {message}")

    def setting_fault(self, message: str) -> NoReturn:
        raise ModelError(f"{self.config_path}: quantization_config: {message}")

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of these settings that is there."""
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool):
                    self.setting_fault(f"{key!r} must be an integer, not {value!r}")
                return value
        if default is None:
            self.setting_fault(f"{keys[0]!r} is missing")
        return default

    def group_size(self, *keys: str, default: int | None = None) -> int:
        size = self.integer(*keys, default=default)
        if size != -1 and size < 1:
            self.setting_fault(f"{keys[0]!r} must be -1 or a number of columns, not {size}")
        return size

    def bits(self, *keys: str, allowed: tuple[int, ...]) -> int:
        bits = self.integer(*keys)
        if bits not in allowed:
            self.setting_fault(f"{bits} bits are not supported here; {', '.join(map(str, allowed))} are")
        return bits


def coded_weight(
    codes: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    activation_bits: int | None = None,
) -> Weight:
    """value = scale * (code - zero), with scale and zero of the group that `groups` gives each column.

    codes: uint8 or int8 `[out, in]`; zeros: whole numbers `[out, n]`, or None; scales: float32 `[out, n]`; groups:
        int64 `[in]`, any assignment of columns. One that does not cut them into equal groups has no form in whole
        numbers that kernels compute with, and comes out dense.
    """
    order = groups.argsort(stable=True)
    counts = groups.bincount()
    size = int(counts.max())
    columns = len(groups)
    if not torch.equal(groups[order], torch.arange(columns) // size):
        values = codes.float() if zeros is None else codes.float() - zeros[:, groups].float()
        return DenseWeight(values * scales[:, groups])
    used = scales[:, : len(counts)].contiguous()
    minimums = None
    if zeros is not None:
        middle = 2 ** (bits - 1)
        if codes.dtype == torch.uint8 and (zeros == middle).all():  # symmetric
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
        else:
            minimums = -used * zeros[:, : len(counts)].float()
    is_in_order = torch.equal(order, torch.arange(columns))
    if not is_in_order:
        codes = codes[:, order]
    coded = IntegerWeight(codes, bits, size, used, minimums, None if is_in_order else order)
    return CodedWeight(coded, activation_bits)


def codes_and_zeros(coded: IntegerWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The way back: uint8 codes `[out, in]` in the features' order, uint8 zeros `[out, n]`, and groups int64 `[in]`."""
    columns = coded.codes.shape[1]
    codes = coded.codes.to(torch.int16)
    if coded.minimums is None:
        middle = 2 ** (coded.bits - 1) if coded.codes.dtype == torch.int8 else 0
        codes = codes + middle
        zeros = torch.full(coded.scales.shape, middle, dtype=torch.uint8)
    else:
        zeros = (-coded.minimums / coded.scales).round().to(torch.uint8)
    groups = torch.arange(columns) // coded.group_size
    if coded.order is not None:
        codes = torch.empty_like(codes).index_copy_(1, coded.order, codes)
        groups = torch.empty_like(groups).index_copy_(0, coded.order, groups)
    return codes.to(torch.uint8), zeros, groups
