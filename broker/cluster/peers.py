"""A broker's connections to other brokers, opened when there is something to say, and closed when there is nothing for long.

Each gets one request at a time. Changes of a group that come while a request is under way are sent once, in their latest
state.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ...protocol.agreement import Word, encode_members
from ...protocol.codes import RequestCode, ResponseCode, code_name
from ...protocol.frame import Frame, FrameError
from ...protocol.headers import write
from ..clock import Clock, Timer
from ..config import LIMITS, PEER_IDLE_S, Limits
from ..listening.tls import Tls
from ..running.tasks import Tasks
from .link import Link, Sign

log = structlog.get_logger("rocketlet.groups")

Make = Callable[[], Word | None]
Failed = Callable[[bool], None]


class Peers:
    def __init__(self, tls: Tls, sign: Sign | None, tasks: Tasks, clock: Clock, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._tls = tls
        self._sign = sign
        self._tasks = tasks
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._due: dict[str, dict[str, tuple[Make, Failed]]] = {}  # by address and group
        self._idle: dict[str, Timer] = {}
        self._refused: set[str] = set()  # logged already
        self._is_crowded = False  # the log has it
        self._asking = 0
        self._is_closed = False

    def say(self, address: str, group: str, make: Make, failed: Failed) -> None:
        """Sends what `make` gives when its turn comes, or nothing if that is None. `failed(is_for_good)`: the broker cannot
        be reached, or refuses; for good if it does not know the request."""
        if self._is_closed:
            return
        if address in self._due:
            self._due[address][group] = make, failed
            return
        self._due[address] = {group: (make, failed)}
        self._tasks.spawn(self._say_due(address))

    async def _say_due(self, address: str) -> None:
        due = self._due[address]
        try:
            while due:
                group = next(iter(due))
                make, failed = due.pop(group)
                word = make()
                code = await self._ask(address, _frame(word)) if word is not None else ResponseCode.SUCCESS
                if code is None:  # the others would wait in vain, too
                    failed(False)
                    for _, other_failed in list(due.values()):
                        other_failed(False)
                    due.clear()
                elif code != ResponseCode.SUCCESS:
                    failed(code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        finally:
            del self._due[address]
        if address in self._links:
            self._close_later(address)

    async def _ask(self, address: str, frame: Frame) -> int | None:
        """The code of the answer; None if there is none."""
        if not self._has_room(address):
            return None
        link = self._links.setdefault(address, Link(address, self._tls, self._sign))
        was_open = not link.is_fresh
        try:
            answer = await link.request(frame)
        except TimeoutError:
            reason = "timeout"
        except (OSError, FrameError, ValueError) as error:  # ValueError: of an address
            # it may have closed a connection on which nothing was said for long
            if was_open:
                return await self._ask(address, frame)
            reason = str(error)
        else:
            self._note(address, answer)
            return answer.code
        if address not in self._refused:
            self._refused.add(address)
            log.warning("peer_unreachable", address=address, reason=reason)
        return None

    @property
    def may_ask(self) -> bool:
        """Whether there is room for one more `confirms`."""
        return self._asking < self._limits.max_proofs

    async def confirms(self, address: str, question: Frame) -> bool:
        """Whether the broker at this address says yes. Asks by a connection of its own: a request on the other one may wait
        for an answer that waits for this."""
        link = Link(address, self._tls, self._sign)
        self._asking += 1
        try:
            return (await link.request(question)).code == ResponseCode.SUCCESS
        except (OSError, FrameError, ValueError):  # ValueError: of an address
            return False
        finally:
            self._asking -= 1
            link.close()

    def _has_room(self, address: str) -> bool:
        """Whether a broker may be connected to. Anybody may register some at a name server without accounts, ever others."""
        if address in self._links or len(self._links) < self._limits.max_peer_links:
            return True
        idle = next((other for other in self._links if other not in self._due), None)
        if idle is not None:
            self._close_idle(idle)
        elif not self._is_crowded:
            others = f"{self._limits.max_peer_links} others are asked just now"
            log.warning("peer_unreachable", address=address, reason=others)
        self._is_crowded = idle is None
        return idle is not None

    def _note(self, address: str, answer: Frame) -> None:
        if answer.code == ResponseCode.SUCCESS:
            self._refused.discard(address)
        elif address not in self._refused:
            self._refused.add(address)
            log.warning("peer_refused", address=address, code=code_name(answer.code), remark=answer.remark)

    def _close_later(self, address: str) -> None:
        if address in self._idle:
            self._idle[address].cancel()
        self._idle[address] = self._clock.call_later(PEER_IDLE_S, self._close_idle, address)

    def _close_idle(self, address: str) -> None:
        if address not in self._due:
            timer = self._idle.pop(address, None)
            if timer is not None:
                timer.cancel()
            self._refused.discard(address)
            link = self._links.pop(address, None)
            if link is not None:
                link.close()

    def close(self) -> None:
        """Sends nothing any more. The owner of the tasks ends them."""
        self._is_closed = True
        for timer in self._idle.values():
            timer.cancel()
        self._idle.clear()
        for link in self._links.values():
            link.close()
        self._links.clear()


def _frame(word: Word) -> Frame:
    return Frame(RequestCode.AGREE_ON_MEMBERS, ext=write(word.header), body=encode_members(word.members))
