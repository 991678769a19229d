"""What the machine can do at best: how fast it reads memory, and how fast it multiplies."""

import statistics
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

from headrace.bench.results import Result, Row
from headrace.bench.stats import fastest

KIB, MIB = 1 << 10, 1 << 20
SIZES = (32 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)


@dataclass(frozen=True, slots=True)
class Limits:
    """reads: bytes in use and bytes a second, by size. multiply: operations a second of float32 and of int8, where a
    product and a sum are two."""

    reads: tuple[tuple[int, float], ...]
    multiply: dict[str, float]

    def bandwidth(self, num_bytes: float) -> float:
        """Bytes a second at which so many can be read again and again: that of the next larger size measured."""
        place = bisect_left([size for size, _ in self.reads], num_bytes)
        return self.reads[min(place, len(self.reads) - 1)][1]


def measure(threads: int, max_bytes: int = SIZES[-1], rounds: int = 5) -> tuple[Limits, list[Row]]:
    """Measures this machine with so many threads; memory of at most `max_bytes` is read.

    A limit is the best of the rounds, for others on the machine can only make it slower; the median shows how much.
    """
    import numpy as np

    from headrace import _native

    _native.set_threads(threads)
    rows: list[Row] = []

    def add(what: str, rates: list[float], unit: str) -> float:
        rows.append({"limit": what, "best": max(rates) / 1e9, "median": statistics.median(rates) / 1e9, "unit": unit})
        return max(rates)

    reads = []
    for size in SIZES:
        if size <= max_bytes:
            memory = np.ones(size // 4, np.float32)  # written, so that every page is there
            rates = fastest(partial(_native.read_memory, memory.ctypes.data, size), rounds=rounds)
            reads.append((size, add(f"read {_size(size)} again and again", rates, "GB/s")))
    multiply = {
        name: add(f"multiply {name}", fastest(partial(_native.multiply, codes), rounds=rounds), "Gop/s")
        for name, codes in (("float32", False), ("int8", True))
    }
    return Limits(tuple(reads), multiply), rows


def matrix_products(threads: int, rounds: int = 5, size: int = 512) -> list[Row]:
    """What torch's matrix product of two square matrices reaches: not a limit, but a yardstick of its own."""
    import torch

    torch.set_num_threads(threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))

        def run(times: int, a: torch.Tensor = a, b: torch.Tensor = b) -> int:
            for _ in range(times):
                torch.mm(a, b)
            return 2 * size**3 * times

        rates = fastest(run, seconds=0.1, rounds=rounds)
        name = str(dtype).removeprefix("torch.")
        rows.append(
            {"limit": f"torch's product of {name}, {size} x {size}", "best": max(rates) / 1e9,
             "median": statistics.median(rates) / 1e9, "unit": "Gop/s"}
        )  # fmt: skip
    return rows


def run(threads: int, rounds: int) -> Result:
    from headrace import _native

    _, rows = measure(threads, rounds=rounds)
    return Result(
        benchmark="limits",
        title="What this machine can do at best",
        note="Reading memory by the size of what is read again and again, and multiplying what lies in a core's first "
        "cache, with the instructions that the kernels use. The share of the limit in other tables is of the best "
        "figures, measured anew in the same run.",
        rows=rows + matrix_products(threads, rounds),
        settings={"threads": threads, "rounds": rounds, "isa": _native.isa()},
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
