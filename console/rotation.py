"""Asks for one thing after another, again and again, at a cost that does not grow with how many there are.

Asking takes at most ASKING_SHARE of the time: with few groups each is asked every 10 s, with very many each is asked less
often. Things on an open page come first, and a page that is loaded asks for its own.
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
    """`names` lists what there is; `ask` asks for one, given the sample before. `found` has the newest sample of each."""

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
        """Asks until it is cancelled. A cluster that is away is asked again."""
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
        """All names; asked for again if the list is old, or `now`. Raises RocketletError."""
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
        """A page shows these: they come first from now on. `now`: the page is loaded, and waits a moment for samples that
        are not fresh."""
        began_s = time.monotonic()
        for name in names:
            self._shown_s[name] = began_s
        for name in names:
            was_asked = began_s - self._asked_s.get(name, float("-inf")) < SHOWN_INTERVAL_S
            if not now or time.monotonic() - began_s > FIRST_SAMPLE_S:
                return  # the rest comes live
            if not was_asked or name not in self.found:  # perhaps its first answer is still under way
                await self.look(name)

    async def look(self, name: str) -> S | None:
        """Asks for one; None if it is not there, or does not answer."""
        self._asked_s[name] = time.monotonic()
        try:
            sample = await self._ask(name, self.found.get(name))
        except RocketletError as error:
            log.debug("console_sample_failed", subject=name, reason=str(error))
            return None
        if sample is not None:
            self.found[name] = sample
        return sample

    def take(self, name: str, sample: S) -> None:
        """Takes a sample that a page has asked for itself, so that it is not asked for again."""
        self._asked_s[name] = self._shown_s[name] = time.monotonic()
        self.found[name] = sample

    async def _next(self, now_s: float) -> bool:
        """Asks for the one that is due for longest, if any is."""
        never = float("-inf")
        due = [
            (self._asked_s.get(name, never) + self._interval_s(name, now_s), name)
            for name in self.names
            if now_s - self._asked_s.get(name, never) >= self._interval_s(name, now_s)
        ]
        if not due:
            return False
        await self.look(min(due)[1])
        return True

    def _interval_s(self, name: str, now_s: float) -> float:
        is_shown = now_s - self._shown_s.get(name, float("-inf")) < SHOWN_INTERVAL_S * 2
        return SHOWN_INTERVAL_S if is_shown else SAMPLE_INTERVAL_S
