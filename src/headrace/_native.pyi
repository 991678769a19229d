"""The native kernels (csrc/). Tensors are passed as addresses; only `headrace.ops.cpu` calls what takes them."""

def available_isas() -> list[str]:
    """Names of the instruction sets that this machine can run, the plainest first: generic, avx2, avx512."""

def isa() -> str:
    """The instruction set in use: that of the environment variable HEADRACE_ISA, or else the best one available.

    Raises ValueError for a name that is unknown or cannot run here.
    """

def select_isa(name: str) -> None:
    """Uses another instruction set from now on, for tests and measurements. Raises ValueError as `isa` does."""

def rms_norm(x: int, weight: int, y: int, rows: int, hidden: int, x_stride: int, eps: float, dtype: int) -> None:
    """See `headrace.ops.reference.Ops.rms_norm`.

    x: address of `rows` rows of `hidden` contiguous values, `x_stride` values apart; y: the same without gaps;
    weight: address of `hidden` float32 values; dtype: of x and y, 0 float32, 1 bfloat16, 2 float16.
    """
