"""Schemes: how a weight's values are coded, as data."""

from dataclasses import dataclass

from headrace.errors import ConfigError

BITS = (2, 3, 4, 8)
FORMATS = ("int", "e4m3", "e5m2")
PER_CHANNEL, PER_TENSOR = -1, 0


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a matrix `[out, in]` is coded.

    format: "int" for whole numbers, "e4m3" or "e5m2" for floating-point numbers of eight bits (kept so, not computed
        with).
    bits: of a code: 2, 3, 4 or 8.
    symmetric: value = scale * code, with codes on both sides of zero; otherwise value = scale * (code - zero), with
        codes from 0 on and a whole number as zero, so that 0.0 has a code of its own in either case.
    group_size: columns that share a scale; -1 for all of a row, 0 for the whole matrix. The last group may be short.
    activation_bits: round the activations that meet the matrix to so many bits, each token by its own scale, and
        multiply whole numbers; None to leave them as they are.
    Raises ConfigError for what does not go together.
    """

    bits: int = 8
    format: str = "int"
    symmetric: bool = True
    group_size: int = PER_CHANNEL
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, not {self.bits!r}")
        if self.format not in FORMATS:
            raise ConfigError(f"a scheme's format must be one of {', '.join(FORMATS)}, not {self.format!r}")
        if not isinstance(self.group_size, int) or self.group_size < PER_CHANNEL:
            raise ConfigError(
                f"group_size must be a number of columns, -1 for a whole row or 0 for a whole matrix, "
                f"not {self.group_size!r}"
            )
        if self.activation_bits not in (None, 8):
            raise ConfigError(f"activations can be rounded to 8 bits, not {self.activation_bits!r}")
        if self.format != "int" and (self.bits, self.symmetric, self.activation_bits) != (8, True, None):
            raise ConfigError(f"the format {self.format} has 8 bits, is symmetric, and leaves activations as they are")
        if self.format != "int" and self.group_size > 0:
            raise ConfigError(f"the format {self.format} has one scale for a row or for the matrix, not for groups")

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the greatest code. Symmetric codes of eight bits leave out -128, which has no counterpart."""
        if not self.symmetric:
            return 0, 2**self.bits - 1
        half = 2 ** (self.bits - 1)
        return (-127 if self.bits == 8 else -half), half - 1

    def columns_per_scale(self, columns: int) -> int:
        """Columns of a group in a matrix of so many."""
        return columns if self.group_size in (PER_CHANNEL, PER_TENSOR) else min(self.group_size, columns)


INT8 = Scheme(bits=8)
INT4 = Scheme(bits=4, group_size=32)
W8A8 = Scheme(bits=8, activation_bits=8)
