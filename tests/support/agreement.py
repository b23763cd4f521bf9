"""One broker's half of an agreement, and the other one's words by hand."""

from __future__ import annotations

from collections.abc import Callable

from rocketlet.broker.groups.agreement import Agreement
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.stages import IssuedByPeer, Others
from rocketlet.protocol.group_bodies import AgreedMembers, PeerMessage
from rocketlet.protocol.headers import AgreeOnMembers
from rocketlet.testing.clock import MovableClock

from .locks import Changes


class PeerScript:
    """An agreement of broker-a: its words to broker-b, and the answers."""

    def __init__(self) -> None:
        self.clock = MovableClock(stands=True)
        self.group = ConsumerGroup("g")
        self.away: list[str] = []
        changes = Changes(away=lambda group: self.away.append(group.name))
        self.agreement = Agreement("broker-a", self.clock, self, changes)
        self._make: Callable[[], PeerMessage | None] = lambda: None
        self.failed: Callable[[bool], None] = lambda is_for_good: None

    def send(
        self, address: str, group: str, make: Callable[[], PeerMessage | None], failed: Callable[[bool], None]
    ) -> None:
        self._make, self.failed = make, failed

    def announce(self, digest: str, *waiting: str) -> None:
        self.agreement.begin_change(self.group)
        self.agreement.announce(self.group, Others({"broker-b": ("host:1", digest)}, {}), waiting)

    def message(self) -> PeerMessage | None:
        return self._make()

    def sent(self) -> PeerMessage:
        message = self.message()
        assert message is not None
        return message

    def receives(
        self, digest: str, *waiting: str, heard: int, number: int = 1, given: str = "", asks: bool = False
    ) -> list[IssuedByPeer]:
        header = AgreeOnMembers("g", "broker-b", number, heard, asks, digest)
        return self.agreement.on_message(
            self.group, header, AgreedMembers(frozenset(waiting), {given: ("c1",)} if given else {})
        )
