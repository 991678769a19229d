"""What every model format offers to the rest of the house: a config, tensors by name, a tokenizer.

The names, the shapes, the order of rows and the config keys are those of Hugging Face, whatever the file is: a format
that stores a tensor in another way (GGUF permutes query and key rows of Llama models and adds one to Gemma's norm
weights) undoes this when reading. So a model family is described once, in `headrace.models.families`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class IntegerWeight:
    """A matrix `[out, in]` of small whole numbers, with a scale (and perhaps a minimum) for each group of columns.

    value[r, j] = scales[r, g] * codes[r, j] + minimums[r, g] with g = j // group_size; `order` says whose value it is.

    codes: uint8 or int8 `[out, in]`. bits: how many of a code are used, as the file counts them.
    group_size: columns of a group; the last group of a row may be short.
    scales: float32 `[out, groups]`. minimums: float32 `[out, groups]`, or None for none.
    order: int64 `[in]`: column j multiplies input feature order[j] (GPTQ's act-order); None for their own order.
    """

    codes: torch.Tensor
    bits: int
    group_size: int
    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """All values, float32 `[out, in]`, in the order of the input features."""
        columns = self.codes.shape[1]
        groups = torch.arange(columns) // self.group_size
        values = self.scales[:, groups] * self.codes.float()
        if self.minimums is not None:
            values += self.minimums[:, groups]
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


class Weight(ABC):
    """A tensor as it is stored: values in some coding, memory-mapped where the format allows it.

    shape: the logical shape, `[out_features, in_features]` for a matrix.
    dtype: the smallest of float32, bfloat16 and float16 that holds every value as it is.
    activation_bits: to how many bits the activations that it meets are to be rounded (`Ops.linear` says how); None
        where they stay as they are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    activation_bits: int | None = None

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All values as a dense tensor of `shape`, converted by value, in memory of its own."""

    @property
    @abstractmethod
    def coding(self) -> str:
        """How the values are stored, in a word or two."""

    def integers(self) -> IntegerWeight | None:
        """A matrix as the whole numbers that are stored; None for one that is stored as plain numbers."""
        return None


class DenseWeight(Weight):
    """Values stored plainly in a floating-point type."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape = tuple(data.shape)
        if data.dtype in (torch.bfloat16, torch.float16):
            self.dtype = data.dtype

    @property
    def coding(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.data.to(dtype, copy=True)


class CodedWeight(Weight):
    """A matrix in whole numbers."""

    def __init__(self, coded: IntegerWeight, activation_bits: int | None = None) -> None:
        self.coded, self.activation_bits = coded, activation_bits
        self.shape = tuple(coded.codes.shape)

    @property
    def coding(self) -> str:
        return f"int{self.coded.bits} in groups of {self.coded.group_size}"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.coded.dequantize().to(dtype)

    def integers(self) -> IntegerWeight:
        return self.coded


class Checkpoint(ABC):
    """An opened model.

    path: the file or directory, for messages.
    config: the content of `config.json` (of a GGUF file: the same keys, made from its metadata).
    generation_config: the content of `generation_config.json`; empty if there is none. `eos_token_id` is a list here.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical shape of every floating-point tensor in the checkpoint, by its Hugging Face name."""

    @abstractmethod
    def read(self, name: str) -> Weight:
        """One tensor; `name` is one of `shapes()`."""

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of this model, with its chat template."""
