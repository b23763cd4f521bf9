"""Why a client's request is refused. Each protocol server has its own code for each reason."""

from __future__ import annotations

from enum import Enum, auto


class Reason(Enum):
    """Clients react to the reason; the text is for people."""

    NOT_PERMITTED = auto()
    """The topic, the group or the broker does not allow it."""
    NO_TOPIC = auto()
    """The topic does not exist, and is not created."""
    NO_QUEUE = auto()
    """The topic does not have the queue."""
    NO_GROUP = auto()
    """The group does not exist, and is not created."""
    ILLEGAL_MESSAGE = auto()
    """The message is too large or invalid."""
    ILLEGAL = auto()
    """The request is invalid."""
    BAD_EXPRESSION = auto()
    """The subscription's expression cannot be parsed."""
    NOT_SUBSCRIBED = auto()
    """No member of the group subscribes to the topic, or the group has no members."""
    UNKNOWN_MEMBER = auto()
    """The client has sent no heartbeat, and pulls a queue that a member of the group reads."""
    SUBSCRIPTION_NOT_LATEST = auto()
    """The client names a later version of its subscription than its last heartbeat."""
    TOO_MANY_LITE_TOPICS = auto()
    """The broker has as many lite topics as it may."""
    LITE_GROUP = auto()
    """The group receives lite topics, and consumes nothing else."""
    NOT_LITE = auto()
    """The topic has no lite topics, or the group is not bound to it."""
    ILLEGAL_LITE_TOPIC = auto()
    """The name of a lite topic is invalid."""
    ILLEGAL_OFFSET = auto()
    """The offset is invalid."""
    TOO_MANY_LITE_SUBSCRIPTIONS = auto()
    """The client, or the broker, has as many subscriptions to lite topics as it may."""
    BUSY = auto()
    """The broker has too many such requests; the client may retry later."""


class Refusal(Exception):
    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
