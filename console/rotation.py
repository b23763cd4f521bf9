"""Queries groups or topics one after the other, repeatedly, for about ASKING_SHARE of the time.

Each is queried about every 10 s, and those on open pages about every 2 s; with very many less often. A page that is loaded
also queries those that it shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar

from ..client.errors import RocketletError, get_logger
from .config import ASKING_SHARE, FIRST_SAMPLE_S, NAMES_INTERVAL_S, SAMPLE_INTERVAL_S, SHOWN_INTERVAL_S

log = get_logger("rocketlet.console")

IDLE_S = 0.1


class Sample(Protocol):
    @property
    def ms(self) -> int: ...


S = TypeVar("S", bound=Sample)


class Rotation(Generic[S]):
    """Samples of named groups or topics. `names` returns all names; `ask(name, previous sample)` queries one. `found`
    has the newest sample by name."""

    def __init__(
        self, names: Callable[[], Awaitable[list[str]]], ask: Callable[[str, S | None], Awaitable[S | None]]
    ) -> None:
        self._list = names
        self._ask = ask
        self._listed_s = float("-inf")
        self._asked_s: dict[str, float] = {}
        self._shown_s: dict[str, float] = {}
        self._listing = asyncio.Lock()
        self.names: list[str] = []
        self.found: dict[str, S] = {}

    async def run(self) -> None:
        """Query until cancelled. Continue after a RocketletError."""
        while True:
            began_s = time.monotonic()
            try:
                await self.list()
                asked = await self._next(began_s)
            except RocketletError as error:
                log.debug("console_sample_failed", reason=str(error))
                asked = False
            took_s = time.monotonic() - began_s
            await asyncio.sleep(took_s / ASKING_SHARE if asked else IDLE_S)

    async def list(self, *, now: bool = False) -> list[str]:
        """Return all names. Query them if the list is older than NAMES_INTERVAL_S, or with `now`, and drop the samples of
        names that are gone. Raises RocketletError."""
        async with self._listing:
            if now or time.monotonic() - self._listed_s > NAMES_INTERVAL_S:
                self.names = await self._list()
                self._listed_s = time.monotonic()
                gone = self.found.keys() - set(self.names)
                for table in (self.found, self._asked_s, self._shown_s):
                    for name in gone & table.keys():
                        del table[name]
        return self.names

    async def show(self, names: Collection[str], *, now: bool) -> None:
        """Record that a page shows these names, which are then sampled more often. With `now`, because the page is being
        loaded, also query those without a recent sample, but begin no query after FIRST_SAMPLE_S."""
        began_s = time.monotonic()
        for name in names:
            self._shown_s[name] = began_s
        for name in names:
            was_asked = began_s - self._asked_s.get(name, float("-inf")) < SHOWN_INTERVAL_S
            if not now or time.monotonic() - began_s > FIRST_SAMPLE_S:
                return  # updates of the page have the other samples
            if not was_asked or name not in self.found:  # the response to its first query may not have arrived
                await self.query(name)

    async def query(self, name: str) -> S | None:
        """Query one name, and return its sample; None if it does not exist or the query fails."""
        self._asked_s[name] = time.monotonic()
        try:
            sample = await self._ask(name, self.found.get(name))
        except RocketletError as error:
            log.debug("console_sample_failed", subject=name, reason=str(error))
            return None
        if sample is not None:
            self.found[name] = sample
        return sample

    def put(self, name: str, sample: S) -> None:
        """Record a sample that a page has queried, so that it is not due for SHOWN_INTERVAL_S."""
        self._asked_s[name] = self._shown_s[name] = time.monotonic()
        self.found[name] = sample

    async def _next(self, now_s: float) -> bool:
        """Query a name without a query so far, or the one that has been due for longest, and return True; return False if
        none is due."""
        never = float("-inf")
        due = [
            (self._asked_s.get(name, never) + self._interval_s(name, now_s), name)
            for name in self.names
            if now_s - self._asked_s.get(name, never) >= self._interval_s(name, now_s)
        ]
        if not due:
            return False
        await self.query(min(due)[1])
        return True

    def _interval_s(self, name: str, now_s: float) -> float:
        is_shown = now_s - self._shown_s.get(name, float("-inf")) < SHOWN_INTERVAL_S * 2
        return SHOWN_INTERVAL_S if is_shown else SAMPLE_INTERVAL_S
