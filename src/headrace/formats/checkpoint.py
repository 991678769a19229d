"""What every model format offers to the rest of the house: a config, tensors by name, a tokenizer.

The names, the shapes, the order of rows and the config keys are those of Hugging Face, whatever the file is: a format
that stores a tensor in another way (GGUF permutes query and key rows of Llama models and adds one to Gemma's norm
weights) undoes this when reading. So a model family is described once, in `headrace.models.families`.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.formats.tokenizer import Tokenizer


class Weight(ABC):
    """A tensor as it is stored: values in some coding, memory-mapped where the format allows it.

    shape: the logical shape, `[out_features, in_features]` for a matrix.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All values as a dense tensor of `shape`, converted by value, in memory of its own."""


class DenseWeight(Weight):
    """Values stored plainly in a floating-point type."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape = tuple(data.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.data.to(dtype, copy=True)


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
