"""Messages as applications see them, and the lease that a member has of a queue."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final, Literal, NamedTuple

from ..protocol import properties as props
from ..protocol.message import (
    MessageError,
    Record,
    begin_of,
    decode_host,
    decode_record,
    decompressed,
    offset_id_in,
    offset_in,
    physical_offset_in,
    tried,
)
from ..protocol.names import Queue

# ------------------------------------------------------------------------------
# How long a member owns a queue: until its lease has expired by the member's own clock.
#
# The broker counts a lease from the arrival of a renewal. The member counts it from the sending of the last renewal that
# the broker confirmed. The lease therefore expires at the member first, however long the response took. The clock
# includes the time for which the process is stopped and, on systems that have such a clock, for which the machine is
# suspended.


_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def clock_s() -> float:
    """Return the time, in seconds, of the clock that measures leases. An event loop's own time may lag behind this
    clock."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class Lease:
    """The ownership of one queue by one member, until the lease expires or ends.

    Attributes:
        epoch: a number that grows with each owner; 0 on Apache's brokers, which have no epochs.
        ends_s: the time of `clock_s` at which the lease expires.
        address: the address of the broker that granted or last renewed the lease. When the connection to it closes, the
            broker may release the queue.
        asked_s: the time of `clock_s` at which the request that granted or last renewed the lease was sent.
    """

    __slots__ = ("address", "asked_s", "ends_s", "epoch")

    def __init__(self, epoch: int, ends_s: float = math.inf, address: str = "", asked_s: float = -math.inf) -> None:
        self.address = address
        self.asked_s = asked_s
        self.epoch = epoch
        self.ends_s = ends_s

    @property
    def is_over(self) -> bool:
        return clock_s() >= self.ends_s

    def renew(self, fresh: Lease) -> None:
        """Extend the lease to that of a renewal, which the broker has just granted."""
        self.address, self.asked_s, self.ends_s = fresh.address, fresh.asked_s, fresh.ends_s

    def end(self) -> None:
        """Expire the lease now, because another member may own the queue."""
        self.ends_s = -math.inf


NO_LEASE: Final = Lease(0)  # for messages that were not read as the owner of a queue


# ------------------------------------------------------------------------------
# Messages as applications see them: outgoing and received.


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send.

    Attributes:
        delay_level: 0 for immediate delivery, 1 to 18 for a delay of 1 s to 2 h (with the broker's default levels).
        flag: an int for the application, which RocketMQ stores and does not use.
        message_id: the id by which consumers recognize a message that is sent twice. Default: a new id.
        delay: the delay until delivery, as a timedelta or seconds.
        at: the time of delivery, as a datetime with a time zone.
        priority: an int from 0; larger means more urgent, in topics of the type PRIORITY.
        lite_topic: the name of a lite topic, in topics of the type LITE.
    """

    body: bytes
    tag: str | None = None
    keys: str | Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    delay_level: int = 0
    flag: int = 0
    message_id: str | None = None
    delay: timedelta | float | None = None
    at: datetime | None = None
    priority: int | None = None
    lite_topic: str | None = None


_PRIORITY_DIGITS: Final = 10  # the maximum of a Java int


class SendResult(NamedTuple):
    """The result of a send.

    Attributes:
        message_id: the sender's id of the message; for a batch the ids of all messages, separated by commas.
        offset_id: the broker's id of the message, or of all messages of a batch, separated by commas.
        queue: the queue that the message was stored in, or will be stored in when its time has come or its transaction
            commits.
        queue_offset: the offset of the message, or of the first message of a batch, in the queue. -1 for a message of a
            transaction, or with `delay_level`, `delay` or `at`, which has no offset in the queue yet.
        status: "ok", or what the broker reports of its disk or its slave. A one-way send, whose result only middleware
            gets, has "unknown", an empty `offset_id` and the `queue_offset` -1.
        recall_handle: the handle for `Producer.recall` if the message was sent with `delay` or `at` and the broker
            supports recalls; otherwise empty.
    """

    message_id: str
    offset_id: str
    queue: Queue
    queue_offset: int
    status: Literal["ok", "flush timeout", "slave timeout", "no slave", "unknown"] = "ok"
    recall_handle: str = ""


class Message:
    """A received message.

    A Message contains the stored record, or the record's bytes, which are decoded at the first access, because many
    messages are only counted or passed on.
    """

    __slots__ = ("__dict__", "_stored", "lease", "queue", "size_bytes", "topic")
    is_given_up = False
    """True if this message of a batch is dead-lettered or skipped, so that the handler gets only the other messages."""

    def __init__(self, stored: Record | bytes, queue: Queue, topic: str, lease: Lease = NO_LEASE) -> None:
        self._stored = stored
        self.queue = queue
        self.topic = topic
        self.lease = lease
        self.size_bytes = len(stored) if type(stored) is bytes else stored[0]

    @property
    def record(self) -> Record:
        """The stored record, with U+FFFD in place of bytes of topic and properties that are not UTF-8.

        Raises MessageError if the record cannot be decoded.
        """
        stored = self._stored
        if isinstance(stored, bytes):
            stored = self._stored = decode_record(stored, 0, "replace")
        return stored

    @property
    def epoch(self) -> int:
        """A fencing token, which grows with each owner of the queue. The token is 0 on Apache's brokers, which have no
        epochs, and for messages that were not read by the owner of a queue, such as those of a SharedConsumer."""
        return self.lease.epoch

    @property
    def lease_lost(self) -> bool:
        """True if the lease of the queue, or that of a popped message, has expired, so that another member may have
        received this message.

        `lease_lost` reads the clock each time, so that it is up to date directly after the process was suspended, too.
        """
        return self.lease.is_over

    @cached_property
    def body(self) -> bytes:
        """The body as it was sent. Raises MessageError if the record is unreadable or the body cannot be decompressed."""
        return decompressed(self.record.body, self.record.sys_flag)

    def body_begin(self, size: int) -> tuple[bytes, bool]:
        """Return the first `size` bytes of the body as it was sent, and True if that is the whole body.

        `body_begin` decompresses only about as much of the body as it returns, and caches nothing. Raises MessageError
        as `body` does.
        """
        return begin_of(self.record.body, self.record.sys_flag, size)

    @cached_property
    def properties(self) -> dict[str, str]:
        """All properties by name, including those that RocketMQ adds."""
        return props.decode(self.record.properties)

    @property
    def user_properties(self) -> dict[str, str]:
        """The properties by name, without the names that RocketMQ reserves."""
        return {name: value for name, value in self.properties.items() if name not in props.RESERVED}

    def outgoing(self) -> Outgoing:
        """Return a copy of the message as it was first sent, without a delay. Raises MessageError as `body` does."""
        return Outgoing(
            self.body,
            self.tag,
            self.keys,
            self.user_properties,
            flag=self.record.flag,
            message_id=self.message_id,
            priority=self.priority,
            lite_topic=self.lite_topic,
        )

    @property
    def origin(self) -> str:
        """The topic that the message was first sent to, even if it was received from a dead-letter or retry topic."""
        return self.properties.get(props.RETRY_TOPIC) or self.topic

    @property
    def tag(self) -> str | None:
        """The tag, by which consumers can filter; None without one."""
        return self.properties.get(props.TAGS)

    @property
    def keys(self) -> list[str]:
        """The keys by which tools can find the message."""
        return self.properties.get(props.KEYS, "").split()

    @property
    def priority(self) -> int | None:
        """The sender's priority; None without a valid one. Larger means more urgent."""
        text = self.properties.get(props.PRIORITY, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= _PRIORITY_DIGITS else None

    @property
    def lite_topic(self) -> str | None:
        """The lite topic of the message in its topic; None without one."""
        return self.properties.get(props.LITE_TOPIC)

    @property
    def message_group(self) -> str | None:
        """The message group, whose messages keep their order in a FIFO topic; None without one."""
        return self.properties.get(props.SHARDING_KEY)

    @property
    def message_id(self) -> str:
        """The sender's unique key, or the broker's offset id if there is no unique key or the record is unreadable."""
        try:
            key = props.find(self.record.properties, props.UNIQUE_KEY)
        except MessageError:
            key = None
        return key or self.offset_id

    @property
    def offset_id(self) -> str:
        """The broker's id of the message: the broker's address and the physical offset, as hex digits."""
        stored = self._stored
        return offset_id_in(stored) if isinstance(stored, bytes) else stored.offset_id

    @property
    def physical_offset(self) -> int:
        """The position of the message in its broker's commit log, in bytes."""
        stored = self._stored
        return physical_offset_in(stored) if isinstance(stored, bytes) else stored.physical_offset

    @property
    def queue_id(self) -> int:
        """The number of the message's queue on its broker, from 0."""
        return self.record.queue_id

    @property
    def queue_offset(self) -> int:
        """The offset of the message in its queue, from 0."""
        stored = self._stored
        return offset_in(stored) if isinstance(stored, bytes) else stored.queue_offset

    @property
    def born_ms(self) -> int:
        """The time of sending by the sender's clock, in ms since the epoch."""
        return self.record.born_ms

    @property
    def store_ms(self) -> int:
        """The time of storing by the broker's clock, in ms since the epoch."""
        return self.record.store_ms

    @property
    def born_host(self) -> tuple[str, int]:
        """The sender's IP address and port, as seen by the broker."""
        return decode_host(self.record.born_host)

    @property
    def failure(self) -> str:
        """The reason why the last attempt failed or the message was dead-lettered, as a Rocketlet broker has stored it.
        Empty on Apache's brokers, and for retries within an orderly Consumer."""
        return self.properties.get(props.DLQ_REASON, "")

    @property
    def attempt(self) -> int:
        """The number of this attempt in the group, from 1, as the broker counts. It does not count retries within an
        orderly Consumer."""
        return self.reconsume_times + 1

    @property
    def reconsume_times(self) -> int:
        """The number of earlier attempts in the group, as the broker counts; 0 for the first one."""
        return tried(self.record.reconsume_times)

    def __repr__(self) -> str:
        size = "unreadable" if record_fault(self) else f"{len(self.record.body)} bytes"
        return f"<Message {self.message_id} of {self.queue} at {self.queue_offset}, {size}>"


def record_fault(message: Message) -> str | None:
    """Return why a message's record cannot be decoded; None if it can."""
    try:
        _ = message.record
    except MessageError as error:
        return str(error)
    return None
