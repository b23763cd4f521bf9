"""How long a queue is this member's: until its lease is over by the member's own clock, whatever anybody has told it.

The broker counts a lease from when a renewal reaches it, the member from when it sent the last renewal that was answered. The
member's lease therefore ends first, even if the answer was long on its way. The clock goes on while the process is stopped
and, where the system has such a clock, while the machine is suspended.
"""

from __future__ import annotations

import math
import time
from typing import Final

_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def clock_s() -> float:
    """Seconds of the clock that leases are measured by. An event loop's own time may be older."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class Lease:
    """One ownership of one queue. `epoch` grows with every owner; it is 0 where the broker has none (Apache's). `address`: of
    the connection by which it was granted or last renewed. When that closes, the broker may free the queue. `asked_s`: when
    the request that granted or last renewed it was sent."""

    __slots__ = ("address", "asked_s", "ends_s", "epoch")

    def __init__(self, epoch: int, ends_s: float = math.inf, address: str = "", asked_s: float = -math.inf) -> None:
        self.address = address
        self.asked_s = asked_s
        self.epoch = epoch
        self.ends_s = ends_s

    @property
    def is_over(self) -> bool:
        return clock_s() >= self.ends_s

    def renew(self, fresh: Lease) -> None:
        """The broker has granted it again."""
        self.address, self.asked_s, self.ends_s = fresh.address, fresh.asked_s, fresh.ends_s

    def end(self) -> None:
        """Another member may have the queue from now on."""
        self.ends_s = -math.inf


NO_LEASE: Final = Lease(0)  # for messages that did not come from a queue of ours
