"""Messages in clients' hands, as the clients know it: to whom a message may be given, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocketlet.broker.pops.deliveries import SHARDING_KEY
from rocketlet.protocol.message import Record
from rocketlet.protocol.names import Queue
from rocketlet.protocol.properties import find

if TYPE_CHECKING:
    from .popping import PoppingMember

Place = tuple[Queue, int]


class Hand:
    """A message in a client's hands, since `since_s`, or renewed then. Until `held_s` nobody else may get it; `due_s`: when
    it comes again, if it was handed back. is_free: others may have it, for a reason that the broker may not know. is_sent:
    an acknowledgement was."""

    def __init__(self, member: PoppingMember, record: Record, queue: Queue, popped_s: float, held_s: float) -> None:
        self.member = member
        self.record = record
        self.queue = queue
        self.popped_s, self.held_s = popped_s, held_s
        self.since_s = 0.0
        self.due_s: float | None = None
        self.is_free = self.is_sent = False
        self.behind: list[Hand] = []  # messages of its group that were given with it

    def renewed(self, held_s: float, now_s: float) -> None:
        self.held_s, self.since_s = max(self.held_s, held_s), now_s

    def free_behind(self) -> None:
        for hand in self.behind:
            hand.is_free = True

    @property
    def place(self) -> Place:
        return self.queue, self.record.queue_offset

    @property
    def attempt(self) -> int:
        return self.record.reconsume_times + 1

    @property
    def key(self) -> str:
        return find(self.record.properties, SHARDING_KEY) or ""
