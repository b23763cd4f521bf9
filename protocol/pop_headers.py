"""The headers of messages that are shared (POP), 5.x's. As in `headers`: each class is one, its fields are the wire's."""

from __future__ import annotations

from typing import Final, NamedTuple

FROM_FIRST: Final = 0
FROM_NEWEST: Final = 1  # Apache's other one: with the newest message of each queue
FROM_END: Final = 2  # ours: behind the newest message. Apache takes every other number for 1


class PopMessage(NamedTuple):
    """POP_MESSAGE. `queue_id` below 0: any. Times in ms. `init_mode`: where a new group begins. `order`: the messages
    come in order."""

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int
    invisible_time: int
    poll_time: int
    init_mode: int = 1
    born_time: int = 0
    exp_type: str | None = None
    exp: str | None = None
    attempt_id: str | None = None
    order: bool = False


class PopMessageResult(NamedTuple):
    """`rest_num`: messages that nobody has popped. The other texts are those of `popped`."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    rest_num: int
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessage(NamedTuple):
    """ACK_MESSAGE. `extra_info` is the receipt handle."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int


class ChangeInvisibleTime(NamedTuple):
    """CHANGE_MESSAGE_INVISIBLETIME. `suspend`, of 5.5 and later: it was no try."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int
    invisible_time: int
    suspend: bool = False


class ChangedInvisibleTime(NamedTuple):
    """Its answer: `invisible_time` counts from `pop_time`."""

    pop_time: int
    invisible_time: int
    revive_qid: int


class Notification(NamedTuple):
    """NOTIFICATION: whether there is something to pop. Times in ms."""

    consumer_group: str
    topic: str
    queue_id: int
    poll_time: int
    born_time: int = 0


class Notified(NamedTuple):
    has_msg: bool
    polling_full: bool


class PollingInfo(NamedTuple):
    """POLLING_INFO: how many receives wait."""

    consumer_group: str
    topic: str
    queue_id: int


class Polling(NamedTuple):
    polling_num: int


class PeekMessage(NamedTuple):
    """PEEK_MESSAGE: looks, and takes nothing."""

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int
