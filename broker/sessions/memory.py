"""The memory of all connections together: half frames, requests that wait, answers that nobody reads, held pulls.

A connection counts itself when it holds something large; a sweep counts the others that have read or written since, so that
idle ones cost nothing. Beyond the budget, connections that hold much are closed, those first that were silent for longest;
small ones stay. If that is not enough, because very many hold a little, requests are refused with a reason until there is
room again.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getsizeof
from typing import Protocol

import structlog

from ...protocol.subscription import Subscription
from ...protocol.work import SLICE, Work
from ..config import LARGE_HOLDING_BYTES, SUBSCRIPTION_BYTES, TAG_BYTES

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
    peer: str

    def held_bytes(self) -> int: ...

    def is_changing(self) -> bool:
        """Whether it will hold less by itself, as when its client reads."""
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
        self._large: dict[Holder, None] = {}
        self._is_used_up = False

    @property
    def is_full(self) -> bool:
        return self.used_bytes > self.budget_bytes

    def count(self, holder: Holder) -> None:
        """Counts a connection whose memory has changed."""
        self._marked[holder] = None
        self._recount(holder)
        if self.is_full:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        """The connection is gone."""
        self.used_bytes -= holder.counted_bytes
        holder.counted_bytes = 0
        for table in (self._marked, self._changing, self._large):
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
        if self.is_full:
            self._make_room()
        else:
            self._is_used_up = False

    def _recount(self, holder: Holder) -> None:
        held = holder.held_bytes()
        self.used_bytes += held - holder.counted_bytes
        holder.counted_bytes = held
        if held > LARGE_HOLDING_BYTES:
            self._large[holder] = None
        else:
            self._large.pop(holder, None)

    def _make_room(self) -> None:
        for holder in sorted(self._large, key=lambda holder: holder.heard_s):
            self._recount(holder)
            if not self.is_full:
                return
            if holder not in self._large:
                continue
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
        if not self._is_used_up:  # once, not for each read until there is room again
            self._is_used_up = True
            log.error("memory_used_up", used_bytes=self.used_bytes, hint="requests are refused until clients have read")
