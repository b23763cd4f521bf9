"""What all connections together may hold: half frames, requests that wait, answers that nobody reads, held pulls.

A connection counts itself when it holds something large; a sweep counts the others that have read or written since, so that
idle ones cost nothing. Beyond the budget those that hold most of
it are closed, the ones first that were silent for longest; who holds little stays. If that is not enough, because very many
hold a little, requests are refused with a reason until there is room again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import structlog

from ..config import LARGE_HOLDING_BYTES, MEMORY_SHARE, MIN_MEMORY_BYTES

log = structlog.get_logger("rocketlet.memory")

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Holder(Protocol):
    """A connection. `counted_bytes` is what it was last found to hold, `heard_s` when its client was last heard of."""

    counted_bytes: int
    heard_s: float
    peer: str

    def held_bytes(self) -> int: ...

    def is_changing(self) -> bool:
        """Whether it will hold less by itself, as when its client reads."""
        ...

    def abort(self) -> None: ...


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
    """What this process has in memory; 0 where the system does not say (it is Linux that does)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """`holders` are the connections that are open."""

    def __init__(self, budget_bytes: int, holders: Iterable[Holder]) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.closed = 0
        self._holders = holders
        self._marked: dict[Holder, None] = {}

    @property
    def is_full(self) -> bool:
        return self.used_bytes > self.budget_bytes

    def mark(self, holder: Holder) -> None:
        """The holder may hold something else than it was counted with; the next sweep looks."""
        self._marked[holder] = None

    def count(self, holder: Holder) -> None:
        """What a connection holds has changed."""
        self._marked[holder] = None
        self._recount(holder)
        if self.used_bytes > self.budget_bytes:
            self.sweep()

    def forget(self, holder: Holder) -> None:
        """The connection is gone."""
        self.used_bytes -= holder.counted_bytes
        holder.counted_bytes = 0
        self._marked.pop(holder, None)

    def sweep(self) -> None:
        """Counts those anew that may have changed, and makes room if that is too much."""
        marked = self._marked
        self._marked = {holder: None for holder in marked if holder.is_changing()}
        for holder in marked:
            self._recount(holder)
        if self.is_full:
            self._make_room()

    def _recount(self, holder: Holder) -> None:
        held = holder.held_bytes()
        self.used_bytes += held - holder.counted_bytes
        holder.counted_bytes = held

    def _make_room(self) -> None:
        large = [holder for holder in self._holders if holder.counted_bytes > LARGE_HOLDING_BYTES]
        for holder in sorted(large, key=lambda holder: holder.heard_s):
            log.warning(
                "connection_closed_memory",
                peer=holder.peer,
                held_bytes=holder.counted_bytes,
                used_bytes=self.used_bytes,
                hint="connections hold more than --memory allows; this one was silent for longest",
            )
            self.closed += 1
            holder.abort()
            self.forget(holder)
            if not self.is_full:
                return
        log.error("memory_used_up", used_bytes=self.used_bytes, hint="requests are refused until clients have read")
