"""The memory of all connections together: half frames, requests that wait, answers that nobody reads, held pulls.

A connection counts itself when it holds something large; a sweep counts the others that have read or written since, so that
idle ones cost nothing. Beyond the budget, the address whose connections hold most together loses some of them, until another
address holds more or there is room: first those that hold much, of these the one that was silent for longest first, then the
others by what they hold. So nobody takes another address's share, neither by one large request nor by very many small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from sys import getsizeof
from typing import Protocol

import structlog

from ...protocol.subscription import Subscription
from ...protocol.work import SLICE, Work
from ..config import LARGE_HOLDING_BYTES, ROOM_SHARE, SUBSCRIPTION_BYTES, TAG_BYTES

log = structlog.get_logger("rocketlet.memory")


def subscription_bytes(subscription: Subscription) -> int:
    """About how much memory a subscription takes. Characters beyond Latin-1 take two or four bytes."""
    text = getsizeof(subscription.expression)
    tags = len(subscription.tags)
    return SUBSCRIPTION_BYTES + text + (text + TAG_BYTES * tags if tags else 0)


class Holder(Protocol):
    """A connection. `counted_bytes` is its memory at the last count, `heard_s` when its client was last heard of."""

    counted_bytes: int
    heard_s: float

    @property
    def address(self) -> str:
        """The client's, without the port."""
        ...

    def held_bytes(self) -> int: ...

    def is_changing(self) -> bool:
        """Whether it will hold less by itself, as when its client reads."""
        ...

    def is_news(self, event: str) -> bool:
        """Whether the log does not have this event of the client's address yet; it counts as logged then."""
        ...

    def abort(self) -> None: ...


class Memory:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.closed = 0
        self._marked: dict[Holder, None] = {}
        # The holder may hold something else than it was counted with; the next sweep looks. A call for each read and each
        # answer, so it is the table's own.
        self.mark: Callable[[Holder], object] = self._marked.setdefault
        self._changing: dict[Holder, None] = {}  # those that this sweep has counted, and the next one will
        self._holding: dict[Holder, None] = {}

    def count(self, holder: Holder) -> None:
        """Counts a connection whose memory has changed."""
        self._marked[holder] = None
        self._recount(holder)
        if self.used_bytes > self.budget_bytes:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        """The connection is gone."""
        self.used_bytes -= holder.counted_bytes
        holder.counted_bytes = 0
        for table in (self._marked, self._changing, self._holding):
            table.pop(holder, None)

    def sweeping(self) -> Work[None]:
        """Counts those anew that may have changed, and makes room if that is too much."""
        for number in range(len(self._marked)):
            if number % SLICE == SLICE - 1:
                yield
            if not self._marked:  # they hung up meanwhile
                break
            holder, _ = self._marked.popitem()
            if holder.is_changing():
                self._changing[holder] = None
            self._recount(holder)
        self._marked |= self._changing
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
        """When only small ones can be closed, some more than needed, so that it is not to be done again for each read."""
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
    """The first to be closed is the last one."""
    size = holder.counted_bytes
    return (True, -holder.heard_s) if size > LARGE_HOLDING_BYTES else (False, size)
