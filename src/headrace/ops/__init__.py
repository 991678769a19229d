"""The network's ops, with exact semantics: `reference` (plain torch, the truth) and `cpu` (native)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ops.reference import Ops


def create_ops(backend: str, activation_precision: str = "auto", threads: int | None = None) -> "Ops":
    """The ops of a backend: "reference", "cpu", or "auto" for the fastest that this machine has.

    activation_precision, threads: as `CpuOps` has them; the reference computes with the dtype's own precision.
    """
    if backend == "reference":
        from headrace.ops.reference import Ops

        return Ops()
    from headrace.ops.cpu import CpuOps

    return CpuOps(activation_precision, threads)
