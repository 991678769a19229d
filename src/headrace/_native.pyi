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

def set_threads(count: int) -> None:
    """How many threads share the work of an op from now on, in the whole process; at least 1."""

def threads() -> int:
    """How many threads share the work of an op."""

class Matrix:
    """A packed matrix; the tensors must live as long as it is used."""

    def __init__(self) -> None: ...
    def add(
        self,
        coding: int,
        dtype: int,
        outputs: int,
        inputs: int,
        group: int,
        offset: int,
        whole_rows: bool,
        values: int,
        scales: int,
        minimums: int,
        order: int,
    ) -> None:
        """Puts a piece, `headrace.ops.packing.Packed`, below those that are there; addresses may be 0 for none.

        dtype: of the scales, or of the values where there are none.
        """

class Cache:
    """A layer's keys and values in blocks, as `headrace.ops.cpu.NativeKVCache` says; the tensors must live as long."""

    def __init__(
        self,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        dtype: int,
        scale_dtype: int,
        heads: int,
        dim: int,
        block_size: int,
        chunk: int,
        blocks: int,
    ) -> None: ...

def linear(matrix: Matrix, x: int, rows: int, x_stride: int, bias: int, y: int, dtype: int) -> None:
    """See `Ops.linear`. bias: address of values of x's dtype, or 0; y: without gaps."""

def embedding(matrix: Matrix, ids: int, y: int, tokens: int) -> None:
    """Rows of a matrix of one piece, as float32. ids: address of int64, which must be rows of the matrix."""

def rotary(
    x: int,
    y: int,
    cosines: int,
    sines: int,
    dtype: int,
    tokens: int,
    heads: int,
    dim: int,
    half: int,
    token_stride: int,
    head_stride: int,
) -> None:
    """See `Ops.rotary`. A head's values are contiguous; y is without gaps."""

def store_kv(
    cache: Cache,
    key: int,
    value: int,
    dtype: int,
    key_token_stride: int,
    value_token_stride: int,
    key_head_stride: int,
    value_head_stride: int,
    slots: int,
    tokens: int,
) -> None:
    """See `Ops.store_kv`. A head's values are contiguous; slots: address of int64."""

def attention(
    cache: Cache,
    query: int,
    out: int,
    dtype: int,
    heads: int,
    token_stride: int,
    tables: int,
    table_stride: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: int,
    sequences: int,
    query_lens: int,
    context_lens: int,
) -> None:
    """See `Ops.attention`. softcap and window are 0 for none; lens: addresses of int64, one for each sequence."""

def gated(x: int, y: int, dtype: int, tokens: int, n: int, gelu: bool) -> None:
    """See `Ops.gated`. x and y are without gaps; gelu: the tanh form of GELU instead of SiLU."""
