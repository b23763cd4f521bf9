"""The waiting receives of all groups, and how each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from ..clock import Clock
from ..sessions.session import Session
from ..sessions.shares import Shares
from .pool import Pool, Wait
from .values import Delivered, PopClient, PopResult, Why

log = structlog.get_logger("rocketlet.pops")


class Waits:
    """put_back: takes the messages of an answer that could not be given, with their group and topic. most: receives that may
    wait."""

    def __init__(self, clock: Clock, put_back: Callable[[str, str, Iterable[Delivered]], None], most: int) -> None:
        self._clock = clock
        self._put_back = put_back
        self._pools: dict[Wait, Pool] = {}
        self._shares = Shares(most)
        self._of: dict[PopClient, dict[Wait, None]] = {}

    def has_room(self, session: Session | None) -> bool:
        """Whether another receive of this session may wait."""
        return self._shares.has_room(_address_of(session))

    @property
    def count(self) -> int:
        return len(self._pools)

    def of(self, client: PopClient) -> list[Wait]:
        return list(self._of.get(client, ()))

    def all(self) -> list[Wait]:
        return list(self._pools)

    def hold(self, pool: Pool, wait: Wait) -> None:
        """Waits for a message, until its time is up."""
        pool.hold(wait)
        self._pools[wait] = pool
        wait.address = _address_of(wait.request.session)
        self._shares.take(wait.address)
        self._of.setdefault(wait.request.client, {})[wait] = None
        wait_s = wait.request.wait_ms / 1000
        wait.timer = self._clock.call_later(wait_s, self.end, wait, PopResult(Why.NOTHING_NEW))

    def drop(self, wait: Wait) -> None:
        """Drops a wait without an answer."""
        if not wait.end():
            return
        self._pools.pop(wait).drop(wait)
        self._shares.give_back(wait.address)
        waits = self._of[wait.request.client]
        del waits[wait]
        if not waits:
            del self._of[wait.request.client]

    def end(self, wait: Wait, received: PopResult) -> None:
        """Answers a wait. A door that fails must not harm the sender of the message."""
        if wait.is_over:
            return
        self.drop(wait)
        try:
            wait.answer(received)
        except Exception:
            log.exception("receive_not_answered", group=wait.request.group, topic=wait.request.topic)
            self._put_back(wait.request.group, wait.request.topic, received.messages)


def _address_of(session: Session | None) -> str:
    return session.address if session is not None else ""
