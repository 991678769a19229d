"""Single ops of a backend, in the shapes of real models: how long they take, and what share of the limit that is."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.bench import limits
from headrace.bench.latency import numbers
from headrace.bench.limits import Limits
from headrace.bench.results import Result, Row
from headrace.bench.stats import fastest
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.formats.checkpoint import Weight
    from headrace.ops.reference import Ops

WEIGHTS = ("int4", "int8", "bfloat16", "float32")
OPS = ("linear", "attention", "norm", "gated")
GROUP = 32  # inputs that share a scale


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """What is measured.

    ops: any of linear, attention, norm, gated, with commas.
    shapes: of matrices, as outputs x inputs: 1536x576,2048x2048.
    weights: how matrices are stored: any of int4 and int8 (in groups of 32), bfloat16, float32.
    rows: tokens at once: of linear, norm and gated; sequences that decode in attention.
    heads: query heads, key/value heads and the size of a head in attention, as 9/3x64; several with commas.
    contexts: tokens in the cache of each sequence in attention.
    rotate_mb: matrices of so many MB in all are used in turn, so that they come from memory and not from a cache.
    backend: reference, cpu, or auto for the fastest of this machine.
    rounds: of which the median counts.
    """

    ops: str = "linear,attention,norm,gated"
    shapes: str = "960x576,3072x576,576x1536,49152x576,3072x2048,16384x2048,2048x8192"
    weights: str = "int4,int8,bfloat16"
    rows: str = "1,8,32,512"
    heads: str = "9/3x64,32/8x64"
    contexts: str = "128,2048"
    rotate_mb: int = 0
    backend: str = "auto"
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, known in (("ops", OPS), ("weights", WEIGHTS)):
            for word in getattr(self, name).split(","):
                if word not in known:
                    raise ConfigError(f"{name} must be some of {', '.join(known)} with commas, not {word!r}")
        numbers("rows", self.rows)
        numbers("contexts", self.contexts)
        for name, form, example in (("shapes", r"\d+x\d+", "1536x576"), ("heads", r"\d+/\d+x\d+", "9/3x64")):
            for word in getattr(self, name).split(","):
                if not re.fullmatch(form, word) or 0 in map(int, re.findall(r"\d+", word)):
                    raise ConfigError(f"{name} must be like {example}, several with commas, not {word!r}")
        for heads, kv_heads, _ in self.head_shapes:
            if heads % kv_heads:
                raise ConfigError(f"heads: {heads} query heads cannot share {kv_heads} key/value heads evenly")
        if self.rounds < 1 or self.rotate_mb < 0:
            raise ConfigError("rounds must be at least 1, and rotate_mb at least 0")

    @property
    def matrix_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(map(int, word.split("x"))) for word in self.shapes.split(",")]

    @property
    def head_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(map(int, re.findall(r"\d+", word))) for word in self.heads.split(",")]


def run(settings: KernelSettings, threads: int) -> Result:
    import torch

    from headrace.ops import create_ops

    torch.set_num_threads(threads)
    ops = create_ops(settings.backend, threads=threads)
    machine, _ = limits.measure(threads, rounds=3)
    measures = {"linear": _linear, "attention": _attention, "norm": _norm, "gated": _gated}
    with torch.inference_mode():
        rows = [row for name in settings.ops.split(",") for row in measures[name](ops, machine, settings)]
    return Result(
        benchmark="kernels",
        title=f"Single ops of the `{ops.name}` backend",
        note="Medians. The share is of the least time that reading the op's data once, or its products and sums, could "
        "take on this machine, whichever is more.",
        rows=rows,
        settings={"isa": getattr(ops, "isa", None), "threads": threads, **vars(settings)},
    )


def _row(
    op: str, shape: str, rows: int, call: Callable[[], object], settings: KernelSettings, machine: Limits,
    *, num_bytes: float, in_use: float, operations: float, kind: str,
) -> Row:  # fmt: skip
    """num_bytes: read by a call; in_use: by all that are called in turn. kind: of the operations."""

    def calls(times: int) -> int:
        for _ in range(times):
            call()
        return times

    seconds = 1 / statistics.median(fastest(calls, rounds=settings.rounds))
    least = max(num_bytes / machine.bandwidth(in_use), operations / machine.multiply[kind])
    return {
        "op": op,
        "shape": shape,
        "rows": rows,
        "time_us": 1e6 * seconds,
        "read_gb_s": num_bytes / seconds / 1e9,
        "done_gop_s": operations / seconds / 1e9,
        "share": least / seconds,
    }


def _linear(ops: "Ops", machine: Limits, settings: KernelSettings) -> Iterator[Row]:
    import torch

    from headrace.bench.roofline import tensors

    for (outputs, inputs), name in itertools.product(settings.matrix_shapes, settings.weights.split(",")):
        first = ops.matrix([_weight(name, outputs, inputs, 0)], torch.float32)
        size = sum(t.numel() * t.element_size() for t in tensors(first))
        copies = max(1, -(-settings.rotate_mb * 10**6 // size))
        matrices = [first, *(ops.matrix([_weight(name, outputs, inputs, i)], torch.float32) for i in range(1, copies))]
        is_integer = any(not t.is_floating_point() for t in tensors(first))
        for rows in numbers("rows", settings.rows):
            x = torch.randn(rows, inputs)
            turn = map(ops.linear, itertools.repeat(x), itertools.cycle(matrices))
            yield _row(
                f"linear {name}", f"{outputs} x {inputs}", rows, partial(next, turn),
                settings, machine, num_bytes=size, in_use=size * copies, operations=2 * rows * outputs * inputs,
                kind="int8" if is_integer else "float32",
            )  # fmt: skip


def _weight(name: str, outputs: int, inputs: int, seed: int) -> "Weight":
    import torch

    from headrace.formats.checkpoint import CodedWeight, DenseWeight, IntegerWeight

    random = torch.Generator().manual_seed(seed)
    if name not in ("int4", "int8"):
        return DenseWeight(torch.randn(outputs, inputs, generator=random).to(getattr(torch, name)))
    bits = int(name[3:])
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    scales = torch.rand(outputs, -(-inputs // GROUP), generator=random).half().float()
    return CodedWeight(IntegerWeight(codes, bits, GROUP, scales, -scales * (1 << (bits - 1))))


def _attention(ops: "Ops", machine: Limits, settings: KernelSettings) -> Iterator[Row]:
    """Sequences that decode, and one prompt of 512 tokens after others in the cache."""
    import torch

    from headrace.ops.reference import RaggedBatch

    block = 32
    for (heads, kv_heads, dim), context in itertools.product(
        settings.head_shapes, numbers("contexts", settings.contexts)
    ):
        cases = [(f"attention, {n} decode", n, 1) for n in numbers("rows", settings.rows) if n <= 64]
        for name, sequences, queries in [*cases, ("attention, a prompt of 512", 1, 512)]:
            length = context + queries
            blocks = -(-length // block)
            cache = ops.kv_cache(sequences * blocks, block, kv_heads, dim, torch.float32)
            tables = torch.arange(sequences * blocks).view(sequences, blocks)
            positions = torch.arange(context, length).repeat(sequences)
            places = torch.arange(length)
            every = (tables[:, places // block] * block + places % block).flatten()
            keys, values = (torch.randn(len(every), kv_heads, dim) for _ in range(2))
            ops.store_kv(keys, values, cache, every)
            slots = (tables[:, positions[:queries] // block] * block + positions[:queries] % block).flatten()
            query = torch.randn(sequences * queries, heads, dim)
            batch = RaggedBatch([queries] * sequences, [length] * sequences, positions, slots, tables)
            num_bytes = 2 * 4 * sequences * length * kv_heads * dim
            pairs = sequences * (queries * context + queries * (queries + 1) // 2)
            yield _row(
                name, f"{heads}/{kv_heads} x {dim}, after {context}", sequences * queries,
                partial(ops.attention, query, cache, batch, scale=dim**-0.5),
                settings, machine, num_bytes=num_bytes, in_use=num_bytes, operations=4 * pairs * heads * dim,
                kind="float32",
            )  # fmt: skip


def _norm(ops: "Ops", machine: Limits, settings: KernelSettings) -> Iterator[Row]:
    import torch

    for inputs, rows in itertools.product(_widths(settings, 1), numbers("rows", settings.rows)):
        x, weight = torch.randn(rows, inputs), torch.ones(inputs)
        yield _elementwise("norm", inputs, rows, partial(ops.rms_norm, x, weight, 1e-5), x, settings, machine)


def _gated(ops: "Ops", machine: Limits, settings: KernelSettings) -> Iterator[Row]:
    import torch

    for width, rows in itertools.product(_widths(settings, 0), numbers("rows", settings.rows)):
        x = torch.randn(rows, 2 * width)
        yield _elementwise("gated", width, rows, partial(ops.gated, x, "silu"), x, settings, machine)


def _elementwise(
    op: str, width: int, rows: int, call: Callable[[], object], x: "Tensor", settings: KernelSettings, machine: Limits
) -> Row:
    size = 4 * x.numel()
    return _row(
        op, f"{width}", rows, call, settings, machine, num_bytes=size, in_use=size, operations=0, kind="float32"
    )


def _widths(settings: KernelSettings, side: int) -> list[int]:
    """Outputs (0) or inputs (1) of the matrices that a model's activations would have, the very wide ones left out."""
    return sorted({shape[side] for shape in settings.matrix_shapes if shape[side] <= 1 << 14})
