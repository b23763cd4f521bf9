"""Where a message that may be stored goes: staged by the other door's own steps, whose frame it does without."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol import names
from ...protocol.bodies import TopicConfig
from ...protocol.frame import Frame
from ...protocol.headers import SendMessage
from ..broker import Broker
from ..remoting.answers import Refused
from ..remoting.connection import Connection
from ..remoting.requests.sends import Sends
from .codes import Code, Fault
from .messages import Sent


class Place(NamedTuple):
    """`offset`: in its queue; of a half message, in the half queue."""

    position: int
    offset: int
    delay_level: int
    is_half: bool


class Staging:
    """Stages messages; `commit` stores all of them at once."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._sends = Sends(broker)
        self._placed: list[Place] = []

    def mark(self) -> tuple[int, int]:
        """How much is staged."""
        store = self._broker.store
        if not store.staged:
            self._broker.appender.begin()
        return store.staged, len(self._placed)

    def undo(self, mark: tuple[int, int]) -> None:
        """Forgets what was staged since."""
        self._broker.store.roll_back(mark[0])
        del self._placed[mark[1] :]

    def place(self, connection: Connection, topic: TopicConfig, queue_id: int, sent: Sent) -> Place:
        """Raises Fault."""
        header = SendMessage(
            topic.name, topic.name, names.DEFAULT_TOPIC, 0, queue_id, sent.sys_flag, sent.born_ms, 0, sent.properties
        )
        try:
            staged = self._sends._place(connection, Frame(0, 0, {}, sent.body), header)
        except Refused as refusal:
            raise Fault(Code.INTERNAL_SERVER_ERROR, str(refusal)) from None
        place = Place(staged.position, staged.queue_offset, staged.delay_level, staged.is_half)
        self._placed.append(place)
        return place

    def commit(self) -> None:
        """Raises StoreFull; nothing that was staged is kept then."""
        placed, self._placed = self._placed, []
        self._broker.appender.commit()
        for place in placed:
            if place.delay_level:
                self._broker.delays.expect(place.delay_level)
            if place.is_half:
                self._broker.transactions.expect(place.offset, place.position, self._broker.store.now_ms)
