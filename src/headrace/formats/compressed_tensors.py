"""compressed-tensors checkpoints (llm-compressor's): packed whole numbers, int8, and eight-bit floating point.

`pack-quantized` stores a matrix `[out, in]` as `weight_packed`, codes packed along the inputs, `weight_scale`
`[out, groups]`, `weight_shape`, and for asymmetric schemes `weight_zero_point`, packed along the outputs. Codes and
zeros are signed there, with half of their range added before packing. `int-quantized` and `float-quantized` store
`weight` itself in int8 or float8. The config says in groups which modules have which scheme.
Source: https://github.com/vllm-project/compressed-tensors
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.formats.checkpoint import IntegerWeight, Weight
from headrace.formats.floats import FloatWeight
from headrace.formats.packing import pack, unpack, words_for
from headrace.formats.quantized import StoredMatrix, StoredTensors, coded_weight, codes_and_zeros

BITS = (2, 3, 4, 8)
SCALES = ("F16", "BF16", "F32")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


def find_matrices(tensors: StoredTensors) -> dict[str, StoredMatrix]:
    form = tensors.config.get("format", "dense")
    if form not in FORMATS:
        tensors.setting_fault(f"the format {form!r} is not supported; known are {', '.join(FORMATS)}")
    groups = tensors.config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        tensors.setting_fault("'config_groups' must be an object of schemes")
    found = {}
    for name in tensors.modules("weight_packed"):
        found[f"{name}.weight"] = _packed(tensors, name, _Args(tensors, name))
    for name in tensors.modules("weight_scale"):
        if f"{name}.weight_packed" not in tensors.sources:
            found[f"{name}.weight"] = _plain(tensors, name, _Args(tensors, name))
    return found


class _Args:
    """The scheme of a module: that of the group whose targets name it, or else its class."""

    def __init__(self, tensors: StoredTensors, name: str) -> None:
        group = self._group(tensors, name)
        weights = group.get("weights")
        if not isinstance(weights, dict):
            tensors.setting_fault(f"no group of config_groups has a scheme for the weight of {name}")
        self.bits = weights.get("num_bits", 8)
        self.symmetric = weights.get("symmetric", True)
        self.strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        self.group_size = weights.get("group_size") if self.strategy == "group" else None
        if self.bits not in BITS or not isinstance(self.symmetric, bool):
            tensors.setting_fault(f"num_bits must be one of {BITS} and symmetric true or false (for {name})")
        if self.strategy not in ("tensor", "channel", "group"):
            tensors.setting_fault(f"the strategy {self.strategy!r} is not supported; tensor, channel and group are")
        if self.strategy == "group" and (not isinstance(self.group_size, int) or self.group_size < 1):
            tensors.setting_fault(f"group_size must be a number of columns, not {self.group_size!r}")
        activations = group.get("input_activations")
        # Eight-bit floating-point activations have no op here: their weights meet activations as they are, which is
        # nearer to the original model.
        rounds = isinstance(activations, dict) and activations.get("type", "int") == "int"
        self.activation_bits = activations.get("num_bits") if rounds and activations else None
        if self.activation_bits not in (None, 8):
            tensors.setting_fault(f"activations of {self.activation_bits} bits are not supported; 8 bits are")

    @staticmethod
    def _group(tensors: StoredTensors, name: str) -> Mapping[str, Any]:
        by_class: Mapping[str, Any] = {}
        for group in tensors.config["config_groups"].values():
            for target in group.get("targets") or ():
                if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                    return dict(group)
                if target == "Linear":
                    by_class = group
        return by_class


def _packed(tensors: StoredTensors, name: str, args: _Args) -> StoredMatrix:
    packed, scales, zeros_name, index = (
        f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    )
    shape_name = f"{name}.weight_shape"
    tensors.expect(shape_name, ("I64", "I32"), (2,))
    rows, columns = (int(n) for n in tensors.read(shape_name))
    tensors.expect(packed, ("I32",), (rows, words_for(columns, args.bits)))
    size = args.group_size or columns
    num_groups = -(-columns // size)
    tensors.expect(scales, SCALES, (rows, num_groups) if args.strategy != "tensor" else (1,))
    names = {packed, scales, shape_name}
    if not args.symmetric:
        tensors.expect(zeros_name, ("I32",), (words_for(rows, args.bits), num_groups))
        names.add(zeros_name)
    has_index = index in tensors.sources
    if has_index:
        tensors.expect(index, ("I32", "I64"), (columns,))
        names.add(index)

    def read() -> Weight:
        codes = unpack(tensors.read(packed), args.bits, columns)
        if args.symmetric:
            zeros = torch.full((rows, num_groups), 2 ** (args.bits - 1), dtype=torch.uint8)
        else:
            zeros = unpack(tensors.read(zeros_name).T.contiguous(), args.bits, rows).T
        groups = torch.arange(columns) // size
        if has_index and not (tensors.read(index) < 0).any():  # -1 throughout says that there is no order
            groups = tensors.read(index).long()
            if len(groups) and int(groups.max()) >= num_groups:
                tensors.fault(index, f"names a group outside of 0 to {num_groups - 1}, which are all that have scales")
        scale = tensors.scales(scales).expand(rows, num_groups)
        return coded_weight(codes, zeros, scale, groups, args.bits, args.activation_bits)

    return StoredMatrix((rows, columns), read, frozenset(names))


def _plain(tensors: StoredTensors, name: str, args: _Args) -> StoredMatrix:
    weight, scales, zeros_name = (f"{name}.{part}" for part in ("weight", "weight_scale", "weight_zero_point"))
    shape = tensors.shape(weight, ("I8", "F8_E4M3", "F8_E5M2"))
    rows, columns = shape
    is_int = tensors.sources[weight].tensors[weight].dtype == "I8"
    size = args.group_size or columns
    num_groups = -(-columns // size)
    found = tensors.sources[scales].tensors[scales].shape
    if args.strategy == "tensor" and found in ((), (1,), (1, 1)):
        num_groups = 1
    else:
        tensors.expect(scales, SCALES, (rows, num_groups))
    has_zeros = is_int and not args.symmetric
    if has_zeros and tensors.sources.get(zeros_name) is None:
        tensors.shape(zeros_name, ("I8",))
    names = {weight, scales} | {n for n in (zeros_name, f"{name}.input_scale") if n in tensors.sources}

    def read() -> Weight:
        scale = tensors.scales(scales).reshape(-1, num_groups).expand(rows, num_groups).contiguous()
        data = tensors.read(weight)
        if not is_int:
            return FloatWeight(data, scale, size)
        zeros = tensors.read(zeros_name).reshape(-1, num_groups).expand(rows, num_groups) if has_zeros else None
        return coded_weight(data, zeros, scale, torch.arange(columns) // size, args.bits, args.activation_bits)

    return StoredMatrix((rows, columns), read, frozenset(names))


def to_tensors(
    stored: IntegerWeight | FloatWeight, scale_dtype: torch.dtype, *, packed: bool
) -> dict[str, torch.Tensor]:
    """What to store for a matrix, by the end of its name. packed: as `pack-quantized`, or else as int8 or float8."""
    if isinstance(stored, FloatWeight):
        return {"weight": stored.data, "weight_scale": stored.scales.to(scale_dtype)}
    if not packed:
        if stored.minimums is not None or stored.codes.dtype != torch.int8:
            raise ConfigError("int8 weights of compressed-tensors are symmetric here")
        return {"weight": stored.codes.contiguous(), "weight_scale": stored.scales.to(scale_dtype)}
    codes, zeros, groups = codes_and_zeros(stored)
    tensors = {
        "weight_packed": pack(codes, stored.bits),
        "weight_scale": stored.scales.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if stored.minimums is not None:
        tensors["weight_zero_point"] = pack(zeros.T.contiguous(), stored.bits).T.contiguous()
    if stored.order is not None:
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors


def scheme(bits: int, group_size: int, *, symmetric: bool, activation_bits: int | None) -> dict[str, Any]:
    """A scheme of `config_groups` for whole numbers, without its targets. group_size: as in Scheme."""
    strategy = {-1: "channel", 0: "tensor"}.get(group_size, "group")
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size if strategy == "group" else None,
        "dynamic": False,
        "actorder": None,
    }
    activations = None
    if activation_bits is not None:
        activations = {
            "num_bits": activation_bits,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return {"weights": weights, "input_activations": activations, "output_activations": None}


def config(groups: Mapping[str, Any], form: str, ignore: list[str]) -> Mapping[str, Any]:
    """`quantization_config`. groups: schemes with their targets, by any name."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": dict(groups),
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
