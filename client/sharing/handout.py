"""Matches takers that wait for a message with messages that wait for a taker.

A receive takes no more messages than there are takers: a message that waits in our memory could be with another member. So
each receive reserves places before it is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from .deliveries import SharedDelivery


class Handout:
    """`unwanted` gets what comes during a pause or behind the end. `sources`: how many want places at all."""

    def __init__(self, unwanted: Callable[[SharedDelivery], None]) -> None:
        self._unwanted = unwanted
        self._takers: deque[asyncio.Future[SharedDelivery | None]] = deque()
        self._waiting: deque[SharedDelivery] = deque()
        self._line: deque[tuple[asyncio.Future[int], int]] = deque()
        self._reserved = 0
        self._holders = 0
        self.sources = 0
        self.is_paused = False
        self.is_closed = False

    # Takers

    async def take(self) -> SharedDelivery | None:
        """The next message; None behind the end. A wait that is cancelled loses nothing."""
        while not self.is_closed:
            if self._waiting:
                return self._waiting.popleft()
            taker: asyncio.Future[SharedDelivery | None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            self._grant()
            try:
                delivery = await taker
            except asyncio.CancelledError:
                if taker.done() and not taker.cancelled() and (missed := taker.result()) is not None:
                    self._hand(missed, first=True)
                elif taker in self._takers:
                    self._takers.remove(taker)
                raise
            if delivery is not None and not self.is_paused:
                return delivery
            if delivery is not None:  # the pause began before the taker ran
                self._unwanted(delivery)
        return None

    def drop(self, delivery: SharedDelivery) -> bool:
        """Takes out a message that waits; whether it did."""
        try:
            self._waiting.remove(delivery)
        except ValueError:
            return False
        return True

    # Bringers

    @property
    def _free(self) -> int:
        return len(self._takers) - self._reserved - len(self._waiting)

    async def reserve(self, most: int) -> int:
        """Returns with one to `most` places when there are some. Those who wait have their turns."""
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append((granted, most))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.put((), granted.result())
            raise

    def _grant(self) -> None:
        while self._line and not self.is_paused and not self.is_closed and self._free > 0:
            granted, most = self._line.popleft()
            if not granted.done():
                count = max(min(most, self._free - len(self._line)), 1)
                self.take_places(count)
                granted.set_result(count)

    def take_places(self, count: int) -> None:
        """Whether they are there or not."""
        self._reserved += count
        self._holders += 1

    @property
    def is_short(self) -> bool:
        """Whether somebody waits for a place, or would if he came now: nobody should keep one for long."""
        return self._free < self.sources - self._holders

    def put(self, deliveries: Iterable[SharedDelivery], places: int) -> None:
        """Hands out the messages that came for so many places, which are free again."""
        self._reserved -= places
        self._holders -= 1
        for delivery in deliveries:
            self._hand(delivery)
        self._grant()

    def _hand(self, delivery: SharedDelivery, *, first: bool = False) -> None:
        if self.is_paused or self.is_closed:
            self._unwanted(delivery)
            return
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(delivery)
                return
        if first:
            self._waiting.appendleft(delivery)
        else:
            self._waiting.append(delivery)

    # Pauses

    def pause(self) -> None:
        self.is_paused = True
        self._give_all_back()

    def resume(self) -> None:
        self.is_paused = False
        self._grant()

    def close(self) -> None:
        """Takers get None; what waits is not wanted."""
        self.is_closed = True
        self._give_all_back()
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)

    def _give_all_back(self) -> None:
        while self._waiting:
            self._unwanted(self._waiting.popleft())
