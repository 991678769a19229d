"""How much memory there is for the KV cache."""

from pathlib import Path

import psutil

_CGROUPS = (  # (limit, use) of version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has free, within the limit of its container."""
    free = psutil.virtual_memory().available
    for limit, use in _CGROUPS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(use).read_text()))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
    return max(0, int(free))
