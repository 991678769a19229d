"""The native kernels (csrc/). Tensors are passed as addresses; only `headrace.ops.cpu` calls what takes them."""

def available_isas() -> list[str]:
    """Names of the instruction sets that this machine can run, the plainest first: generic, avx2, avx512."""

def isa() -> str:
    """The instruction set in use: that of the environment variable HEADRACE_ISA, or else the best one available.

    Raises ValueError for a name that is unknown or cannot run here.
    """

def select_isa(name: str) -> None:
    """Uses another instruction set from now on, for tests and measurements. Raises ValueError as `isa` does."""

def set_threads(count: int) -> None:
    """How many threads share the work of an op from now on, in the whole process; at least 1."""

def threads() -> int:
    """How many threads share the work of an op."""

def read_memory(data: int, bytes: int, rounds: int) -> int:
    """Every thread reads its share of the memory at `data`, `rounds` times. Returns the bytes read in all."""

def multiply(codes: bool, rounds: int) -> int:
    """Every thread multiplies and adds what its first cache holds: 8-bit whole numbers, or float32 values.

    Returns the operations done in all; a product and a sum are two.
    """

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
        sharing: int,
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

def pack_codes(codes: int, rows: int, columns: int, first: int, add: int, coding: int, values: int) -> None:
    """Puts codes `[rows, columns]` into the panels of a matrix, from row `first` on.

    add: to each code, modulo 256. coding: 1 for four bits, 2 for eight. values: address of the panels; see
    `headrace.ops.packing`.
    """

class Op:
    """An op whose arguments are settled, addresses among them, but for how much there is of it.

    The functions below make one each; `Ops` has a method of the same name that says what it means.
    dtype: of activations, 0 float32, 1 bfloat16, 2 float16. Results are without gaps. Strides count values.
    chosen: whether x has a row for each chosen token, and not for each of the step.
    """

    def run(self, tokens: int, chosen: int = 0, sequences: int = 0) -> None:
        """Raises IndexError for token ids, or rows to take, that are not there."""

class Program:
    """Ops to be run one after the other."""

    def __init__(self) -> None: ...
    def add(self, op: Op) -> None: ...
    def run(self, tokens: int, chosen: int, sequences: int) -> None:
        """Raises IndexError as the ops do."""

def embedding(matrix: Matrix, ids: int, y: int, dtype: int, scale: float) -> Op:
    """Rows of a matrix of one piece. ids: address of int64; scale: is a number of the dtype."""

def rms_norm(
    x: int,
    weight: int,
    y: int,
    dtype: int,
    heads: int,
    hidden: int,
    token_stride: int,
    head_stride: int,
    eps: float,
    chosen: bool = False,
) -> Op:
    """x: [tokens, heads, hidden], a head's values contiguous; weight: address of `hidden` float32 values."""

def linear(matrix: Matrix, x: int, x_stride: int, bias: int, y: int, dtype: int, chosen: bool = False) -> Op:
    """bias: address of values of x's dtype, or 0."""

def rotary(
    x: int,
    y: int,
    cosines: int,
    sines: int,
    dtype: int,
    heads: int,
    dim: int,
    half: int,
    token_stride: int,
    head_stride: int,
) -> Op:
    """A head's values are contiguous."""

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
) -> Op:
    """A head's values are contiguous; slots: address of int64."""

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
    query_lens: int,
    context_lens: int,
) -> Op:
    """softcap and window are 0 for none; lens: addresses of int64, one for each sequence."""

def gated(x: int, y: int, dtype: int, n: int, gelu: bool) -> Op:
    """x is without gaps; gelu: the tanh form of GELU instead of SiLU."""

def add(x: int, y: int, sum: int, dtype: int, n: int) -> Op:
    """x and y are without gaps, n values for each token."""

def take(x: int, rows: int, y: int, bytes: int) -> Op:
    """x is without gaps, so many bytes for each token; rows: address of int64."""

def to_float(x: int, dtype: int, y: int, n: int, chosen: bool = False) -> Op:
    """x is without gaps, n values for each token."""

def softcap(x: int, y: int, n: int, cap: float, chosen: bool = False) -> Op:
    """x is float32 without gaps, n values for each token."""

def sample(
    logits: int,
    rows: int,
    vocabulary: int,
    stride: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    uniform: int,
    xtc_threshold: int,
    tokens: int,
) -> None:
    """See `headrace.ops.sample.sample`. Settings: addresses of float64, top_k of int64; xtc_threshold may be 0."""

def logprobs(
    logits: int,
    rows: int,
    vocabulary: int,
    stride: int,
    token_ids: int,
    top: int,
    chosen: int,
    top_values: int,
    top_ids: int,
) -> None:
    """See `headrace.ops.sample.logprobs`. token_ids: of the vocabulary; top: at most its size."""
