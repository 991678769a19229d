"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A matrix `[out, in]` is stored as `qweight`, codes packed along the inputs, `[in * bits / 32, out]`; `scales`
`[groups, out]`; `qzeros`, zero points packed along the outputs, `[groups, out * bits / 32]`; and `g_idx` `[in]`, the
group of each input, which act-order makes other than 0, 0, ..., 1, 1, ... value = scale * (code - zero). The first
version of the format ("gptq") stores zero - 1, wrapped around to `bits` bits; "gptq_v2" stores the zero.
Source: the packing in https://github.com/ModelCloud/GPTQModel (gptqmodel/nn_modules/qlinear).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.formats.checkpoint import IntegerWeight, Weight
from headrace.formats.packing import pack, unpack, words_for
from headrace.formats.quantized import StoredMatrix, StoredTensors, coded_weight, codes_and_zeros

BITS = (2, 3, 4, 8)
SCALES = ("F16", "BF16", "F32")


def find_matrices(tensors: StoredTensors) -> dict[str, StoredMatrix]:
    version = tensors.config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        tensors.setting_fault(f"the checkpoint_format {version!r} is for one kind of GPU; gptq and gptq_v2 can be read")
    bits = tensors.bits("bits", allowed=BITS)
    group_size = tensors.group_size("group_size")
    return {
        f"{name}.weight": _matrix(tensors, name, bits, group_size, stored_minus_one=version == "gptq")
        for name in tensors.modules("qweight")
    }


def _matrix(tensors: StoredTensors, name: str, bits: int, group_size: int, stored_minus_one: bool) -> StoredMatrix:
    qweight, qzeros, scales, g_idx = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    words, rows = tensors.shape(qweight, ("I32",))
    has_index = g_idx in tensors.sources
    if has_index:
        (columns,) = tensors.shape(g_idx, ("I32", "I64"), 1)
        # Matrices may have bits of their own ("dynamic" in the config): they follow from the shapes.
        bits = next((b for b in (bits, *BITS) if words_for(columns, b) == words), 0)
        if not bits:
            tensors.fault(qweight, f"has {words} words for {columns} inputs, which no number of bits explains")
    else:
        columns = words * 32 // bits
        if tensors.config.get("desc_act") is True and group_size != -1:
            tensors.setting_fault(
                f"desc_act is true, but {name} has no g_idx, which would say in which group each input is"
            )
    num_groups, _ = tensors.shape(scales, SCALES)
    tensors.expect(scales, SCALES, (num_groups, rows))
    tensors.expect(qzeros, ("I32",), (num_groups, words_for(rows, bits)))
    size = columns if group_size == -1 else group_size
    if not has_index and num_groups != -(-columns // size):
        tensors.fault(
            scales, f"has {num_groups} groups; {columns} inputs in groups of {size} make {-(-columns // size)}"
        )

    def read() -> Weight:
        groups = tensors.read(g_idx).long() if has_index else torch.arange(columns) // size
        if len(groups) and not (int(groups.min()) >= 0 and int(groups.max()) < num_groups):
            tensors.fault(g_idx, f"names a group outside of 0 to {num_groups - 1}, which are all that have scales")
        codes = unpack(tensors.read(qweight).T.contiguous(), bits, columns)
        zeros = unpack(tensors.read(qzeros), bits, rows)
        if stored_minus_one:
            zeros = (zeros + 1) & (2**bits - 1)
        return coded_weight(codes, zeros.T, tensors.scales(scales).T, groups, bits)

    names = {qweight, qzeros, scales} | ({g_idx} if has_index else set())
    return StoredMatrix((rows, columns), read, frozenset(names))


def to_tensors(coded: IntegerWeight, scale_dtype: torch.dtype, version: str) -> dict[str, torch.Tensor]:
    """What to store for a matrix, by the end of its name. version: "gptq" or "gptq_v2"."""
    codes, zeros, groups = codes_and_zeros(coded)
    if version == "gptq":
        zeros = (zeros - 1) & (2**coded.bits - 1)
    return {
        "qweight": pack(codes, coded.bits).T.contiguous(),
        "qzeros": pack(zeros.T.contiguous(), coded.bits),
        "scales": coded.scales.T.to(scale_dtype).contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def config(
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    desc_act: bool,
    damping: float,
    bits_of: Mapping[str, int],
    not_converted: Sequence[str],
) -> Mapping[str, Any]:
    """`quantization_config`. Asymmetric zeros are stored as they are (v2): readers of v1 get a zero of 0 wrong.

    bits_of: other numbers of bits, for the matrices that a regular expression matches. not_converted: names of
        matrices that are dense.
    """
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "sym": symmetric,
        "lm_head": False,
        "damp_percent": damping,
        "true_sequential": True,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        "pack_dtype": "int32",
    }
    # GPTQModel's way to say what differs: "-:" before what is left out, "+:" before what has other settings.
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in not_converted if name != "lm_head"}
    dynamic |= {f"+:{pattern}": {"bits": other} for pattern, other in bits_of.items()}
    return settings | ({"dynamic": dynamic} if dynamic else {})
