"""Clients that pop, as members of a group in which others pull: each has a seat among the members, so that the others leave
it its share. A seat says nothing and is asked nothing; its client has a door of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ...protocol.bodies import ConsumerData
from ...protocol.subscription import Subscription
from ..groups.member import POPS
from ..sessions.events import Event, Question
from ..sessions.session import Session

_numbers = itertools.count(1)


class Seat:
    """A session without a client at its other end. told: hears that its group has changed."""

    held_pulls = 0
    peer = ""
    born_host = b""
    address = ""
    reached = ""
    is_left = True
    is_external = False
    is_closed = False
    known: object = None

    def __init__(self, told: Callable[[], object]) -> None:
        self.number = next(_numbers)
        self.subscriptions: dict[str, Subscription] = {}  # by topic: what its client pops
        self._told = told
        self._session: Session | None = None
        self._charged_bytes = 0

    def tell(self, event: Event) -> None:
        self._told()

    def ask(self, number: int, question: Question) -> None:
        pass

    def charge(self, size: int) -> None:
        self._charged_bytes += size
        if self._session is not None:
            self._session.charge(size)

    def pay_by(self, session: Session | None) -> None:
        """The session of its client, which is charged for it."""
        if session is not self._session:
            if self._session is not None:
                self._session.charge(-self._charged_bytes)
            self._session = session
            if session is not None:
                session.charge(self._charged_bytes)

    def is_news(self, event: str) -> bool:
        return True

    def when_read(self, action: Callable[[], None]) -> None:
        action()

    def on_lost(self, action: Callable[[Session], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def data(self, group: str, strategy: str) -> ConsumerData:
        return ConsumerData(group, POPS, subscriptions=tuple(self.subscriptions.values()), strategy=strategy)
