"""T0Q, the tiny model with quantized linear layers, in the formats of others; packed bit by bit in plain Python/NumPy.

Nothing here imports Headrace. Every matrix has random codes, zeros and scales, and its values are computed in float64
from the definition: scale * (code - zero).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.tiny import save_t0, t0_config, t0_weights

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[rows, n]` to int32 `[rows, ceil(n * bits / 32)]`: each row one long number, the first code lowest."""
    words = -(-codes.shape[1] * bits // 32)
    out = np.zeros((len(codes), words), np.int32)
    for row, values in enumerate(codes):
        number = sum(int(value) << (bits * place) for place, value in enumerate(values))
        out[row] = np.frombuffer(number.to_bytes(words * 4, "little"), "<i4")
    return out


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits `[n, out]` to int32 `[n, out / 8]` in AWQ's order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate(AWQ_PLACES):
            words[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


@dataclass
class RandomMatrix:
    """codes `[out, in]`, zeros and scales `[out, groups]`, groups `[in]`."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shifted = self.codes.astype(np.float64) - self.zeros.astype(np.float64)[:, self.groups]
        self.values = self.scales.astype(np.float64)[:, self.groups] * shifted


def random_matrix(
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    *,
    seed: int,
    symmetric: bool = False,
    order: str = "monotone",
) -> RandomMatrix:
    """order: "monotone", or "permuted": the inputs of each group lie anywhere."""
    rng = np.random.default_rng(seed)
    size = columns if group_size == -1 else group_size
    groups = np.arange(columns) // size
    num_groups = int(groups.max()) + 1
    if order == "permuted":
        groups = rng.permutation(groups)
    top = 2**bits
    zeros = np.full((rows, num_groups), top // 2) if symmetric else rng.integers(0, top, (rows, num_groups))
    if not symmetric:
        zeros[:2, 0] = 0, top - 1
    # Such that values are of T0's size, whatever the bits.
    scales = (rng.uniform(0.5, 1.5, (rows, num_groups)) * 0.3 / top).astype(np.float16)
    return RandomMatrix(rng.integers(0, top, (rows, columns)), zeros, scales, groups)


def gptq_tensors(name: str, m: RandomMatrix, bits: int, *, version: str, g_idx: bool) -> dict[str, torch.Tensor]:
    stored = m.zeros if version == "gptq_v2" else (m.zeros - 1) % 2**bits
    tensors = {
        f"{name}.qweight": pack_rows(m.codes, bits).T,
        f"{name}.qzeros": pack_rows(stored.T, bits),
        f"{name}.scales": m.scales.T,
    }
    if g_idx:
        tensors[f"{name}.g_idx"] = m.groups.astype(np.int32)
    return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}


def awq_tensors(name: str, m: RandomMatrix) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.qweight": pack_awq(m.codes.T),
        f"{name}.qzeros": pack_awq(m.zeros.T),
        f"{name}.scales": m.scales.T,
    }
    return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}


def t0q_config(**more: Any) -> dict[str, Any]:
    return t0_config(**({"hidden_size": 128, "intermediate_size": 256, "head_dim": 32} | more))


def save_t0q(
    directory: Path,
    quantization: dict[str, Any],
    tensors_of: Any,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = False,
    order: str = "monotone",
    change: Any = None,
) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    """Saves T0Q; returns the directory, the float values of all tensors, and the config.

    tensors_of: (name, RandomMatrix) to the tensors of a module. change: is given all tensors before they are saved.
    """
    config = t0q_config(quantization_config=quantization)
    values = t0_weights(config=config)
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, value) in enumerate(list(values.items())):
        if "_proj.weight" not in name:
            tensors[name] = torch.from_numpy(value)
            continue
        matrix = random_matrix(*value.shape, bits, group_size, seed=seed, symmetric=symmetric, order=order)
        tensors |= tensors_of(name.removesuffix(".weight"), matrix)
        values[name] = matrix.values
    if change is not None:
        change(tensors)
    return save_t0(directory, config=config, weights=tensors), values, config
