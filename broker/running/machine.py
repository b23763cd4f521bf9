"""The memory that the machine or the container has, and how much of it this process takes."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import MEMORY_SHARE, MIN_MEMORY_BYTES

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def default_budget() -> int:
    """A quarter of the machine's memory, or of the container's."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        if text.strip().isdecimal():  # "max" is no limit
            found.append(int(text))
    return max(int(min(found) * MEMORY_SHARE), MIN_MEMORY_BYTES)


def resident_bytes() -> int:
    """Resident memory of this process; 0 on systems other than Linux, which do not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
