"""The memory of all connections together: incomplete frames, waiting requests, responses that clients do not read, held
pulls, and charges of other parts of the broker, such as memberships.

A connection counts itself when it holds something large. A sweep counts the others that have read or written since, so
that idle ones cost nothing. Beyond the budget, connections of the address that holds most are closed, until another
address holds more or the budget is met: first connections with large holdings, the longest silent one first, then the
others by size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from typing import Protocol

import structlog

from ..protocol.bodies import SLICE, Work
from .config import LARGE_HOLDING_BYTES, ROOM_SHARE

log = structlog.get_logger("rocketlet.memory")


class Holder(Protocol):
    """A connection. `counted_bytes` is its memory at the last count, `heard_s` the time of the last data from its client."""

    counted_bytes: int
    heard_s: float

    @property
    def address(self) -> str: ...

    def held_bytes(self) -> int: ...

    def is_changing(self) -> bool:
        """Return True if the holding may shrink without further data from the client, for example when the client reads."""
        ...

    def is_news(self, event: str) -> bool: ...

    def abort(self) -> None: ...


class Memory:
    """The memory that connections hold, against the budget of `--memory`. No request is refused for memory: above the
    budget, connections are closed, first of the addresses that hold most.

    Args:
        budget_bytes: the budget in bytes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.closed = 0
        self._changed: dict[Holder, None] = {}
        # Notes a holder whose memory may have changed, for the next sweep. Called for each read and each response, so it is
        # the dictionary's own method.
        self.note_change: Callable[[Holder], object] = self._changed.setdefault
        self._changing: dict[Holder, None] = {}  # counted in this sweep, and to be counted again in the next one
        self._holding: dict[Holder, None] = {}

    def count(self, holder: Holder) -> None:
        """Count a connection whose memory has changed. Beyond the budget, close connections."""
        self._changed[holder] = None
        self._recount(holder)
        if self.used_bytes > self.budget_bytes:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        """Remove a connection that is gone."""
        self.used_bytes -= holder.counted_bytes
        holder.counted_bytes = 0
        for table in (self._changed, self._changing, self._holding):
            table.pop(holder, None)

    def sweeping(self) -> Work[None]:
        """Count the connections that have changed, and close some if the sum is beyond the budget."""
        for number in range(len(self._changed)):
            if number % SLICE == SLICE - 1:
                yield
            if not self._changed:  # the others were closed meanwhile
                break
            holder, _ = self._changed.popitem()
            if holder.is_changing():
                self._changing[holder] = None
            self._recount(holder)
        self._changed |= self._changing
        self._changing.clear()
        if self.used_bytes > self.budget_bytes:
            self._make_room()

    def _recount(self, holder: Holder) -> None:
        held = holder.held_bytes()
        self.used_bytes += held - holder.counted_bytes
        holder.counted_bytes = held
        if held:
            self._holding[holder] = None
        else:
            self._holding.pop(holder, None)

    def _make_room(self) -> None:
        """Close connections until the budget is met. Once only small ones can be closed, close some more than needed, so that
        this is not repeated for each read."""
        victims: dict[str, list[Holder]] = {}
        sums: Counter[str] = Counter()
        for holder in self._holding:
            address = holder.address
            victims.setdefault(address, []).append(holder)
            sums[address] += holder.counted_bytes
        for holders in victims.values():
            holders.sort(key=_order)
        closed: dict[str, list[Holder]] = {}
        largest = [(-size, address) for address, size in sums.items()]
        heapify(largest)
        limit = self.budget_bytes
        while self.used_bytes > limit and largest:
            _, address = largest[0]
            if not victims[address]:
                heappop(largest)
                continue
            holder = victims[address].pop()
            before = holder.counted_bytes
            self._recount(holder)
            sums[address] += holder.counted_bytes - before
            if self.used_bytes > limit and holder.counted_bytes:
                if holder.counted_bytes <= LARGE_HOLDING_BYTES:
                    limit = self.budget_bytes - self.budget_bytes // ROOM_SHARE
                closed.setdefault(address, []).append(holder)
                sums[address] -= holder.counted_bytes
                holder.abort()
                self.forget(holder)
            heapreplace(largest, (-sums[address], address))
        for address, holders in closed.items():
            self.closed += len(holders)
            if holders[0].is_news("connection_closed_memory"):
                log.warning(
                    "connection_closed_memory",
                    address=address,
                    connections=len(holders),
                    used_bytes=self.used_bytes,
                    hint="connections hold more than --memory allows, and most of it is held for this address",
                )


def _order(holder: Holder) -> tuple[bool, float]:
    """Return the sort key of a holder; the last one in this order is closed first."""
    size = holder.counted_bytes
    return (True, -holder.heard_s) if size > LARGE_HOLDING_BYTES else (False, size)
