"""Cooperative scheduling: long work is done in pieces, so that other clients wait for a few ms and not for the whole work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from ...protocol.bodies import Work
from ..config import ADDRESS_SHARE, LIMITS, MOMENT_S, TURN_S, LimitExceeded, Limits
from .clock import MACHINE

log = structlog.get_logger("rocketlet.turns")


# Work is a generator that yields after each piece (`protocol.bodies.Work`). It starts immediately if no other work waits and
# the time slice of this event-loop iteration (a turn) is not used up. All waiting work shares one time slice between two
# polls of the sockets, whatever its amount, and runs a piece each in round-robin order: each client address in its turn,
# however many connections it has, and every other piece the broker's own work, if there is some.
#
# Requests that were just read are served immediately for a short time (`Moment`); the remaining ones become such work.


class Turns:
    """
    Args:
        call_soon: Makes a call in the next event-loop iteration.
        limits: say how many pieces `do_some` does immediately.
    """

    def __init__(
        self,
        turn_s: float = TURN_S,
        call_soon: Callable[..., object] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._at_once = limits.affected_at_once
        self.turn_s = turn_s
        self._call_soon = call_soon or MACHINE.call_soon
        self._own: deque[Work[object]] = deque()
        self._of_clients: dict[str, deque[Work[object]]] = {}  # by address, in the order of their turns
        self._is_own_turn = True
        self.waiting = 0
        self._alone: set[str] = set()
        self._is_due = False
        self._end_s = 0.0

    def do(self, work: Work[object], address: str = "") -> None:
        """Do the work. Start immediately if time is left in this turn and no other work waits, otherwise in the next turn.

        Args:
            address: The address of the client whose work it is; empty for the broker's own.
        """
        is_new = not self._is_due
        self.do_later(work, address)
        if is_new:
            self._end_s = time.perf_counter() + self.turn_s
        if self.waiting == 1:
            self._do_pieces()

    def do_later(self, work: Work[object], address: str = "") -> None:
        """Do the work from the next turn on."""
        (self._of_clients.setdefault(address, deque()) if address else self._own).append(work)
        self.waiting += 1
        if not self._is_due:
            self._is_due = True
            self._end_s = 0.0
            self._call_soon(self._turn)

    def do_some(self, work: Work[object], pieces: int = 0) -> None:
        """Do some pieces of the work immediately, whatever other work waits, and the rest from the next turn on. This is for
        what one event does to many clients, groups or messages: a few of them do not have to wait for a turn."""
        for number, _ in enumerate(work, 1):
            if number >= (pieces or self._at_once):
                self.do_later(work)
                return

    def call(self, action: Callable[..., object], *arguments: object) -> None:
        """Make a short call as the broker's own work of one piece, because there may be very many."""
        self.do(_call(action, arguments))

    def call_for(self, address: str, action: Callable[..., object], *arguments: object) -> None:
        """Make a short call as work of a client, from the next turn on."""
        self.do_later(_call(action, arguments), address)

    def do_alone(self, name: str, begin: Callable[[], Work[None]]) -> None:
        """Do the first piece immediately and the rest in turns. Do nothing if earlier work of this name is not done yet."""
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
        """Return when no work waits."""
        while self.waiting:  # noqa: ASYNC110 (each turn does a piece)
            await asyncio.sleep(0)

    def _turn(self) -> None:
        self._end_s = time.perf_counter() + self.turn_s
        self._do_pieces()
        self._is_due = bool(self.waiting)
        if self._is_due:
            self._call_soon(self._turn)

    def _do_pieces(self) -> None:
        while self.waiting and time.perf_counter() <= self._end_s:
            self._do_piece()

    def _do_piece(self) -> None:
        self._is_own_turn = bool(self._own) and (not self._is_own_turn or not self._of_clients)
        address = "" if self._is_own_turn else next(iter(self._of_clients))
        works = self._own if self._is_own_turn else self._of_clients[address]
        work = works.popleft()
        try:
            next(work)
        except StopIteration:
            self.waiting -= 1
        except Exception:
            log.exception("work_failed")
            self.waiting -= 1
        else:
            works.append(work)
        if address:
            del self._of_clients[address]
            if works:
                self._of_clients[address] = works  # after the other addresses


class Moment:
    """The time spent on the requests of larger reads since the event loop last polled the sockets. Beyond MOMENT_S in all, or
    ADDRESS_SHARE of it for one address, the requests of further larger reads become work in turns."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self._of: dict[str, float] = {}
        self._is_due = False

    def record(self, address: str, used_s: float) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end)
        self.used_s += used_s
        self._of[address] = self._of.get(address, 0.0) + used_s

    def _end(self) -> None:
        self._is_due = False
        self.used_s = 0.0
        self._of.clear()

    def is_over(self, address: str) -> bool:
        return self.used_s > MOMENT_S or self._of.get(address, 0.0) > MOMENT_S * ADDRESS_SHARE


class OnePerIteration:
    """A queue of calls, of which each event-loop iteration makes one. A call is made in the iteration after `call` at the
    earliest, so that other sockets with input at that time are served before."""

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


class FairQueue:
    """Long requests of one kind, shared fairly among clients. One request of each client runs at a time, and up to
    `at_once` of all clients. Further requests wait, and the clients are served in round-robin order."""

    def __init__(self, turns: Turns, at_once: int, max_waiting: int) -> None:
        self._turns = turns
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._waiting: dict[object, deque[Work[None]]] = {}
        self._working: set[object] = set()
        self._is_stopped = False

    @property
    def waiting(self) -> int:
        """The number of works that wait, of all clients."""
        return sum(map(len, self._waiting.values()))

    def join(self, client: object, work: Work[None]) -> None:
        """Run the work when it is the client's turn. Raises LimitExceeded if too many requests of this client wait, or after
        `stop`."""
        line = self._waiting.get(client)
        if self._is_stopped:
            raise LimitExceeded("the broker is stopping; retry at another one, or later")
        if line is not None and len(line) >= self._max_waiting:
            raise LimitExceeded(f"{self._max_waiting} requests such as this one wait already; retry later")
        self._waiting.setdefault(client, deque()).append(work)
        self._begin()

    def stop(self) -> None:
        """Drop the waiting work, and start no more. Running work ends after its current piece."""
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
                self._waiting[client] = line  # after the other clients
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
    """Do a piece of the work. Return True if it was the last one."""
    for _ in work:
        return False
    return True


def _call(action: Callable[..., object], arguments: tuple[object, ...]) -> Work[None]:
    action(*arguments)
    return
    yield
