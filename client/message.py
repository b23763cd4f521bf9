"""Messages as applications see them, and how long a queue is leased to a member."""

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
# How long a queue is this member's: until its lease is over by the member's own clock, whatever anybody has told it.
#
# The broker counts a lease from when a renewal reaches it, the member from when it sent the last renewal that was
# answered. The member's lease therefore ends first, even if the answer was long on its way. The clock goes on while
# the process is stopped and, where the system has such a clock, while the machine is suspended.


_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def clock_s() -> float:
    """Seconds of the clock that leases are measured by. An event loop's own time may be older."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class Lease:
    """One ownership of one queue. `epoch` grows with every owner; it is 0 where the broker has none (Apache's). `address`: of
    the connection by which it was granted or last renewed. When that closes, the broker may free the queue. `asked_s`: when
    the request that granted or last renewed it was sent."""

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
        """The broker has granted it again."""
        self.address, self.asked_s, self.ends_s = fresh.address, fresh.asked_s, fresh.ends_s

    def end(self) -> None:
        """Another member may have the queue from now on."""
        self.ends_s = -math.inf


NO_LEASE: Final = Lease(0)  # for messages that did not come from a queue of ours


# ------------------------------------------------------------------------------
# Messages as users have them: one to be sent, one received.


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. `delay_level`: 0 delivers at once, 1 to 18 after 1 s to 2 h (with the broker's default levels).
    `delay`, a time or seconds, and `at`, with a time zone, say any time. `message_id`: how consumers recognize the message
    if it is sent twice. Default: a new one. `priority`: the larger, the more urgent, in topics of the type PRIORITY."""

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


_PRIORITY_DIGITS: Final = 10  # of a Java int


class SendResult(NamedTuple):
    """The place where a message was stored. `message_id` is the sender's id, `offset_id` the broker's. A batch has several
    of both, separated by commas. For a one-way send, whose result only middleware sees, `status` is "unknown", `offset_id`
    is empty, and `queue_offset` is -1. A message that was sent to a time has a `recall_handle`."""

    message_id: str
    offset_id: str
    queue: Queue
    queue_offset: int
    status: Literal["ok", "flush timeout", "slave timeout", "no slave", "unknown"] = "ok"
    recall_handle: str = ""


class Message:
    """A received message. Its parts are parsed when you ask for them.

    Made of a record or of its bytes, which are decoded when somebody looks: many a message is only counted or passed on."""

    __slots__ = ("__dict__", "_stored", "lease", "queue", "size_bytes", "topic")
    is_given_up = False
    """This message of a batch is a dead letter already, whatever becomes of the others."""

    def __init__(self, stored: Record | bytes, queue: Queue, topic: str, lease: Lease = NO_LEASE) -> None:
        self._stored = stored
        self.queue = queue
        self.topic = topic
        self.lease = lease
        self.size_bytes = len(stored) if type(stored) is bytes else stored[0]

    @property
    def record(self) -> Record:
        """The message as it is stored, with U+FFFD for bytes of its properties that are not UTF-8. Raises MessageError if it
        cannot be read."""
        stored = self._stored
        if isinstance(stored, bytes):
            stored = self._stored = decode_record(stored, 0, "replace")
        return stored

    @property
    def epoch(self) -> int:
        """A fencing token: it grows with each owner of the queue. 0 on an Apache broker, which has no epochs."""
        return self.lease.epoch

    @property
    def lease_lost(self) -> bool:
        """Whether another member may have the queue by now, and this message with it. It asks the clock, so it is right even
        when this process has just been stopped for a minute."""
        return self.lease.is_over

    @cached_property
    def body(self) -> bytes:
        """The body as it was sent. Raises MessageError if it was compressed and cannot be read."""
        return decompressed(self.record.body, self.record.sys_flag)

    def body_begin(self, size: int) -> tuple[bytes, bool]:
        """The first `size` bytes of the body as it was sent, and whether they are all of it. Inflates no more than that, and
        keeps nothing. Raises MessageError as `body` does."""
        return begin_of(self.record.body, self.record.sys_flag, size)

    @cached_property
    def properties(self) -> dict[str, str]:
        """All properties by name, RocketMQ's own among them."""
        return props.decode(self.record.properties)

    @property
    def user_properties(self) -> dict[str, str]:
        """The properties that the sender set, without those that RocketMQ adds: they may be sent again."""
        return {name: value for name, value in self.properties.items() if name not in props.RESERVED}

    def outgoing(self) -> Outgoing:
        """The message as it was sent first, to be sent again. Raises MessageError as `body` does."""
        return Outgoing(
            self.body,
            self.tag,
            self.keys,
            self.user_properties,
            flag=self.record.flag,
            message_id=self.message_id,
            priority=self.priority,
        )

    @property
    def origin(self) -> str:
        """The topic that it was first sent to, also of a message of a dead-letter or retry topic."""
        return self.properties.get(props.RETRY_TOPIC) or self.topic

    @property
    def tag(self) -> str | None:
        """The kind of the message, by which consumers filter. None without one."""
        return self.properties.get(props.TAGS)

    @property
    def keys(self) -> list[str]:
        """The words to search it by."""
        return self.properties.get(props.KEYS, "").split()

    @property
    def priority(self) -> int | None:
        """The priority that the sender gave it, None without one. Larger is more urgent."""
        text = self.properties.get(props.PRIORITY, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= _PRIORITY_DIGITS else None

    @property
    def message_id(self) -> str:
        """The sender's unique key if it set one, the broker's offset id otherwise, or if the record cannot be read."""
        try:
            key = props.find(self.record.properties, props.UNIQUE_KEY)
        except MessageError:
            key = None
        return key or self.offset_id

    @property
    def offset_id(self) -> str:
        """The broker's id: its address and the message's place in its log, as hex digits."""
        stored = self._stored
        return offset_id_in(stored) if isinstance(stored, bytes) else stored.offset_id

    @property
    def physical_offset(self) -> int:
        """Its place in its broker's log."""
        stored = self._stored
        return physical_offset_in(stored) if isinstance(stored, bytes) else stored.physical_offset

    @property
    def queue_id(self) -> int:
        """The number of its queue on its broker, from 0."""
        return self.record.queue_id

    @property
    def queue_offset(self) -> int:
        """Its number in its queue, from 0."""
        stored = self._stored
        return offset_in(stored) if isinstance(stored, bytes) else stored.queue_offset

    @property
    def born_ms(self) -> int:
        """When it was sent, by the sender's clock: ms since the epoch."""
        return self.record.born_ms

    @property
    def store_ms(self) -> int:
        """When it was stored, by the broker's clock: ms since the epoch."""
        return self.record.store_ms

    @property
    def born_host(self) -> tuple[str, int]:
        """The sender's IP address and port, as the broker saw them."""
        return decode_host(self.record.born_host)

    @property
    def failure(self) -> str:
        """Why it was not handled the last time, or was given up. Empty if nobody said: an Apache broker does not keep it."""
        return self.properties.get(props.DLQ_REASON, "")

    @property
    def attempt(self) -> int:
        """The number of this try in the group, from 1."""
        return self.reconsume_times + 1

    @property
    def reconsume_times(self) -> int:
        """How often the group has tried this message before; 0 the first time."""
        return tried(self.record.reconsume_times)

    def __repr__(self) -> str:
        size = "unreadable" if record_fault(self) else f"{len(self.record.body)} bytes"
        return f"<Message {self.message_id} of {self.queue} at {self.queue_offset}, {size}>"


def record_fault(message: Message) -> str | None:
    """Why a message's record cannot be read; None if it can."""
    try:
        _ = message.record
    except MessageError as error:
        return str(error)
    return None
