"""The states of a delivery.

    (not looked at) --pop--> IN_FLIGHT --acknowledged--> ACKNOWLEDGED --on the disk--> FINISHED
                                | time over, nack, not taken      | the disk refused it
                                v                                 v
                             VISIBLE --pop--> IN_FLIGHT           VISIBLE

In groups in order, a message behind another one of its message group is BEHIND, looked at and never popped. There, one that
is acknowledged stays ACKNOWLEDGED while one before it is not, and is popped again together with that.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from .values import PopClient


class DeliveryState(Enum):
    BEHIND = "behind another message of its message group"
    VISIBLE = "to be popped again"
    IN_FLIGHT = "in a client's hands"
    ACKNOWLEDGED = "not yet on the disk, or behind one that is not"
    FINISHED = "acknowledged, or given up"


class Event(Enum):
    POP = "a client gets it"
    RELEASE = "its time is over, or somebody gave it back"
    CHANGE = "its client wants another time"
    ACKNOWLEDGE = "its client, or the broker, is done with it"
    REFUSE = "the disk refused the acknowledgement"
    FINISH = "that is on the disk"
    FORGET = "the group goes elsewhere, or the queue is gone"


_S, _E = DeliveryState, Event
TRANSITIONS: Final = {
    (_S.BEHIND, _E.POP): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.POP): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.POP): _S.IN_FLIGHT,  # in order: with the one before it
    (_S.ACKNOWLEDGED, _E.POP): _S.IN_FLIGHT,  # the same
    (_S.IN_FLIGHT, _E.RELEASE): _S.VISIBLE,
    (_S.BEHIND, _E.RELEASE): _S.VISIBLE,  # the group is not in order any more
    (_S.IN_FLIGHT, _E.CHANGE): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.CHANGE): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.VISIBLE, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.BEHIND, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,  # by the broker, for one that can be read no more
    (_S.ACKNOWLEDGED, _E.REFUSE): _S.VISIBLE,
    (_S.ACKNOWLEDGED, _E.FINISH): _S.FINISHED,
    **{(state, _E.FORGET): _S.FINISHED for state in DeliveryState},
}


class Delivery:
    """A message that was popped. Times in seconds are of the monotonic clock. entry: of the heap of deadlines, that looks
    after it. renewals: how often the broker has prolonged it; -1: that is not wanted. is_delayed: its client has said when
    it comes again. attempts: 0 for one that only waits."""

    __slots__ = (
        "attempts",
        "client",
        "deadline_s",
        "entry",
        "is_delayed",
        "key",
        "offset",
        "pop_ms",
        "renewals",
        "since_s",
        "state",
    )

    def __init__(self, offset: int, state: DeliveryState = DeliveryState.VISIBLE, key: str | None = None) -> None:
        self.offset = offset
        self.state = state
        self.key = key
        self.attempts = 0
        self.pop_ms = 0
        self.deadline_s = 0.0
        self.since_s = 0.0
        self.entry = -1
        self.renewals = -1
        self.client: PopClient | None = None
        self.is_delayed = False

    def turn(self, event: Event) -> None:
        """Raises KeyError for what cannot happen."""
        self.state = TRANSITIONS[self.state, event]
