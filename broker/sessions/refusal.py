"""Why a client's request is refused. Each door has its own code for each reason."""

from __future__ import annotations

from enum import Enum, auto


class Reason(Enum):
    """Clients react to the reason; the text is for people."""

    NOT_PERMITTED = auto()
    """The topic, the group or the broker does not allow it."""
    NO_TOPIC = auto()
    """The topic does not exist, and is not created."""
    NO_GROUP = auto()
    """The group does not exist, and is not created."""
    ILLEGAL_MESSAGE = auto()
    """The message is too large, or says what cannot be."""
    ILLEGAL = auto()
    """The request says what cannot be."""
    BAD_EXPRESSION = auto()
    """The subscription's expression cannot be read."""
    NOT_SUBSCRIBED = auto()
    """No member of the group subscribes to the topic, or the group has none."""
    UNKNOWN_MEMBER = auto()
    """It reads a queue that a member of the group has read, and has sent no heartbeat."""
    SUBSCRIPTION_NOT_LATEST = auto()
    """The client names a later version of its subscription than its last heartbeat."""
    BUSY = auto()
    """Too much is under way; the same request may be served later."""


class Refusal(Exception):
    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
