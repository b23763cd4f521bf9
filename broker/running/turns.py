"""Turns of the event loop: what takes long is done in pieces, so that everybody else waits for a few ms at most.

Work is a generator that yields after each piece (`protocol.work`). It begins at once. When a turn's time is over, the rest of
it waits for the next turns, in which all that waits does a piece after the other. One turn is all that they get together,
between two looks at the sockets, however many they are.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from ...protocol.work import Work
from ..config import TURN_S, LimitExceeded

log = structlog.get_logger("rocketlet.turns")


class Turns:
    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._waiting: deque[Work[Any]] = deque()
        self._alone: set[str] = set()
        self._is_due = False
        self._end_s = 0.0

    @property
    def waiting(self) -> int:
        """How much work is not done."""
        return len(self._waiting)

    def do(self, work: Work[Any]) -> None:
        """Does the work, now if there is time left in this turn and nothing else waits."""
        if not self._is_due:
            self._is_due = True
            self._end_s = time.perf_counter() + self._turn_s
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._go_on()

    def call(self, action: Callable[..., object], *arguments: Any) -> None:
        """A call that is short, but perhaps one of very many."""
        self.do(_call(action, arguments))

    def do_alone(self, name: str, begin: Callable[[], Work[None]]) -> None:
        """Does the first piece at once and the rest in turns; nothing if such work is not done yet."""
        if name not in self._alone:
            self._alone.add(name)
            work = self._ending(name, begin())
            if not _is_over(work):
                self.do(work)

    def _ending(self, name: str, work: Work[None]) -> Work[None]:
        try:
            yield from work
        finally:
            self._alone.discard(name)

    async def done(self) -> None:
        """Returns when nothing waits any more."""
        while self._waiting:  # noqa: ASYNC110 (each turn does a piece)
            await asyncio.sleep(0)

    def _turn(self) -> None:
        self._end_s = time.perf_counter() + self._turn_s
        self._go_on()
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)

    def _go_on(self) -> None:
        while self._waiting and time.perf_counter() <= self._end_s:
            work = self._waiting[0]
            try:
                next(work)
            except StopIteration:
                self._waiting.popleft()
            except Exception:
                log.exception("work_failed")
                self._waiting.popleft()
            else:
                self._waiting.rotate(-1)


class OneATurn:
    """Calls that wait until all that the sockets have brought is done. Each turn of the event loop makes one, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, action: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(action)

    def _turn(self) -> None:
        action = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        action()


class Line:
    """Long work of one kind that clients ask for. One piece of work of each client is under way at a time, and `at_once` of
    all clients; what else they ask for waits in line, and the clients take turns."""

    def __init__(self, turns: Turns, at_once: int, max_waiting: int) -> None:
        self._turns = turns
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._waiting: dict[object, deque[Work[None]]] = {}
        self._working: set[object] = set()
        self._is_stopped = False

    def join(self, client: object, work: Work[None]) -> None:
        """Raises LimitExceeded if too much of this client waits."""
        line = self._waiting.get(client)
        if self._is_stopped or (line is not None and len(line) >= self._max_waiting):
            raise LimitExceeded(f"{self._max_waiting} requests such as this one wait already; try again later")
        self._waiting.setdefault(client, deque()).append(work)
        self._begin()

    def stop(self) -> None:
        """Begins nothing more. Work that is under way ends with its current piece."""
        self._is_stopped = True
        self._waiting.clear()

    def _begin(self) -> None:
        while len(self._working) < self._at_once:
            client = next((client for client in self._waiting if client not in self._working), None)
            if client is None:
                return
            line = self._waiting.pop(client)
            work = line.popleft()
            if line:
                self._waiting[client] = line  # behind the other clients'
            self._working.add(client)
            self._turns.do(self._doing(client, work))

    def _doing(self, client: object, work: Work[None]) -> Work[None]:
        try:
            for _ in work:
                if self._is_stopped:
                    return
                yield
        finally:
            self._working.discard(client)
            self._begin()


def _is_over(work: Work[None]) -> bool:
    """Does a piece."""
    for _ in work:
        return False
    return True


def _call(action: Callable[..., object], arguments: tuple[Any, ...]) -> Work[None]:
    action(*arguments)
    return
    yield
