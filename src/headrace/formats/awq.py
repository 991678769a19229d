"""AWQ checkpoints in AutoAWQ's "gemm" version.

A matrix `[out, in]` is stored as `qweight` `[in, out / 8]`, eight codes of four bits in a word along the outputs;
`qzeros` `[groups, out / 8]` in the same way; and `scales` `[groups, out]`. Within a word the outputs lie in the order
0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up. value = scale * (code - zero).
Source: `WQLinear_GEMM` in https://github.com/casper-hansen/AutoAWQ
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.formats.checkpoint import IntegerWeight, Weight
from headrace.formats.packing import pack, unpack
from headrace.formats.quantized import StoredMatrix, StoredTensors, coded_weight, codes_and_zeros

PER_WORD = 8
PLACES = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
SCALES = ("F16", "BF16", "F32")


def find_matrices(tensors: StoredTensors) -> dict[str, StoredMatrix]:
    version = str(tensors.config.get("version", "gemm")).lower()
    if version != "gemm":
        tensors.setting_fault(f"version {version!r} of AWQ is not supported; gemm is")
    tensors.bits("bits", "w_bit", allowed=(4,))
    size = tensors.group_size("group_size", "q_group_size", default=128)
    return {f"{name}.weight": _matrix(tensors, name, size) for name in tensors.modules("qweight")}


def _matrix(tensors: StoredTensors, name: str, group_size: int) -> StoredMatrix:
    qweight, qzeros, scales = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
    columns, words = tensors.shape(qweight, ("I32",))
    rows, size = words * PER_WORD, columns if group_size == -1 else group_size
    num_groups = -(-columns // size)
    tensors.expect(scales, SCALES, (num_groups, rows))
    tensors.expect(qzeros, ("I32",), (num_groups, words))

    def read() -> Weight:
        codes, zeros = (_ordered(unpack(tensors.read(t), 4, rows)).T.contiguous() for t in (qweight, qzeros))
        groups = torch.arange(columns) // size
        return coded_weight(codes, zeros, tensors.scales(scales).T, groups, 4)

    return StoredMatrix((rows, columns), read, frozenset({qweight, qzeros, scales}))


def _ordered(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[n, out]` as they lie in the words, to the outputs' order."""
    return codes.view(len(codes), -1, PER_WORD)[..., PLACES.argsort()].flatten(1)


def _as_in_words(codes: torch.Tensor) -> torch.Tensor:
    """And back."""
    return codes.view(len(codes), -1, PER_WORD)[..., PLACES].flatten(1)


def to_tensors(coded: IntegerWeight, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What to store for a matrix of four bits without act-order, by the end of its name."""
    codes, zeros, _ = codes_and_zeros(coded)
    return {
        "qweight": pack(_as_in_words(codes.T.contiguous()), 4),
        "qzeros": pack(_as_in_words(zeros.T.contiguous()), 4),
        "scales": coded.scales.T.to(scale_dtype).contiguous(),
    }


def config(group_size: int, *, symmetric: bool, not_converted: Sequence[str]) -> Mapping[str, Any]:
    """`quantization_config`. not_converted: names of matrices that are dense."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": not symmetric,
        "modules_to_not_convert": list(not_converted) or None,
    }
