"""The network's ops, with exact semantics: `reference` (plain torch, the truth) and `cpu` (native)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ops.reference import Ops


def create_ops(backend: str) -> "Ops":
    """The ops of a backend: "reference", "cpu", or "auto" for the fastest that this machine has."""
    if backend == "reference":
        from headrace.ops.reference import Ops

        return Ops()
    from headrace.ops.cpu import CpuOps

    return CpuOps()
