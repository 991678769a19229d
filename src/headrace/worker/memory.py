"""How much memory there is for the KV cache, and how many CPUs there are for threads.

A process may take what the machine has free, but no more than the control groups (cgroups) above it have left: its own,
and each that contains that one. A container is such a group, and so is a service of systemd.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Available:
    """So many bytes, and what it is that sets this limit, as words for a message."""

    num_bytes: int
    limited_by: str


def available_memory(proc: Path = Path("/proc"), root: Path = Path("/")) -> Available:
    """What this process may still take. Other processes and whatever this one holds already are accounted for.

    proc: where to read which groups the process is in, and where they are mounted; root: below which those mounts are.
    """
    available = [Available(psutil.virtual_memory().available, "the machine's free memory")]
    for directory, version in _groups(proc, root, "memory"):
        left = _left_in(directory, version)
        if left is not None:
            available.append(Available(left, f"the memory limit of the control group {directory}"))
    return min(available, key=lambda a: a.num_bytes)


def available_cpus(proc: Path = Path("/proc"), root: Path = Path("/")) -> int:
    """How many threads can run at once: the cores that this process may use, or fewer by the quota of a control group.

    More threads than that would use up the group's quota early, and then all stand still until the next period.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for directory, version in _groups(proc, root, "cpu"):
        if version == 2:
            quota, period = _words(directory / "cpu.max", 2)
        else:
            quota, period = (_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and quota > 0 and period:
            limits.append(quota / period)
    return max(1, int(min(limits)))


def _groups(proc: Path, root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The directories of a controller's groups that the process is in, innermost first, each with its version."""
    try:
        memberships = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[int, str] = {}  # by version
    for line in memberships:  # 4:memory,cpu:/path of version 1; 0::/path of version 2
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for line in mounts:  # id parent device root mount-point options ... - type source options
        mount, _, kind = line.partition(" - ")
        filesystem, _, options = (*kind.split(" ", 2), "", "")[:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(filesystem, 0)
        if version not in paths or (version == 1 and controller not in options.split(",")):
            continue
        shown, point = (_unescaped(field) for field in mount.split()[3:5])
        top = root / point.lstrip("/")
        # A mount may show a part of the tree only; a group outside of that part is seen as its top.
        inside = Path(paths[version])
        parts = inside.relative_to(shown).parts if inside.is_relative_to(shown) and ".." not in inside.parts else ()
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), version


def _left_in(group: Path, version: int) -> int | None:
    """How much more memory a group may use; None if it has no limit, or is not there.

    What it uses includes files that the kernel has cached for it. Those that were not read lately are given up as soon
    as memory is needed, so they count as free.
    """
    if version == 2:
        # Above memory.high the kernel slows a group down until it hardly moves: that is no room to plan with.
        limits = [_number(group / name) for name in ("memory.max", "memory.high")]
        used, cache = _number(group / "memory.current"), "inactive_file"
    else:
        limits = [_number(group / "memory.limit_in_bytes")]
        used, cache = _number(group / "memory.usage_in_bytes"), "total_inactive_file"
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    try:
        idle = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        idle = None
    return max(0, min(known) - max(0, used - (int(idle[1]) if idle else 0)))


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _words(path: Path, count: int) -> list[int | None]:
    """The numbers on the line in a file; None for "max", and for all where there is no such file."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return [int(word) if word.isdigit() else None for word in words[:count]] + [None] * (count - len(words))


def _unescaped(field: str) -> str:
    r"""mountinfo writes blanks and the like as octal numbers: `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
