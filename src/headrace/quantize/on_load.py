"""Quantization while a model is loaded: a checkpoint whose matrices come out in fewer bits."""

from headrace.errors import ModelError
from headrace.formats.checkpoint import Checkpoint, CodedWeight, Weight
from headrace.formats.tokenizer import Tokenizer
from headrace.models.loader import EMBEDDING, HEAD
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import INT4, INT8, Scheme

SCHEMES = {"int8": INT8, "int4": INT4}


class QuantizedOnLoad(Checkpoint):
    """A checkpoint that rounds the matrices of another to nearest when they are read.

    method: "int8" (a scale for each row) or "int4" (for every 32 columns, chosen by least squared error). Embedding
    and output matrix, which suffer most, get eight bits in either case. A matrix that is stored in as few bits
    already is left as it is: rounding it once more could only lose.
    """

    def __init__(self, source: Checkpoint, method: str) -> None:
        self._source, self._scheme = source, SCHEMES[method]
        self.path, self.config, self.generation_config = source.path, source.config, source.generation_config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._source.shapes()

    def read(self, name: str) -> Weight:
        weight = self._source.read(name)
        if len(weight.shape) != 2:
            return weight
        scheme = INT8 if name in (EMBEDDING, HEAD) else self._scheme
        return rounded(weight, scheme, f"{self.path}: tensor {name!r}", search=scheme.bits < 8)

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()


def rounded(weight: Weight, scheme: Scheme, what: str, *, search: bool) -> Weight:
    """The weight in this scheme of whole numbers, unless it is in so few bits already. `what` names it in errors."""
    stored = weight.integers()
    if stored is not None and stored.bits <= scheme.bits:
        return weight
    try:
        return CodedWeight(round_to_nearest(weight.dequantize(), scheme, search=search), scheme.activation_bits)
    except ModelError as error:
        raise ModelError(f"{what} {error}") from None
