"""A message in our hands.

Its time counts from when the answer came, less what this process stood still meanwhile: the answer may have waited in the
socket for so long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...protocol import properties as props
from ...protocol.frame import Frame
from ...protocol.headers import read
from ...protocol.message import MessageError, offset_in, properties_in, split_records
from ...protocol.pop_headers import PopMessageResult
from ...protocol.popped import POP_CK, Receipt, receipt_of, starts_of, tried_in
from ...protocol.queue import Queue
from ..lease import Lease, clock_s
from ..log import get_logger
from ..message import Message
from ..wire.connection import Connection

log = get_logger("rocketlet.consumer")

_MARGIN: Final = 0.1  # the part of its time by which a message is ours for less than the broker says


class SharedDelivery:
    """`receipt` is what it is acknowledged with; a renewal may replace it. `settle`: what to say of it as soon as the renewal
    that is under way is answered. `is_settled`: whoever had it has said what becomes of it. `since_s`: when it came."""

    __slots__ = ("is_renewing", "is_settled", "message", "named_s", "receipt", "settle", "since_s")

    def __init__(self, message: Message, receipt: Receipt) -> None:
        self.message = message
        self.receipt = receipt
        self.since_s = self.named_s = clock_s()
        self.is_renewing = self.is_settled = False
        self.settle: Callable[[], None] | None = None

    @property
    def lease(self) -> Lease:
        return self.message.lease

    def renewed(self, receipt: Receipt, asked_s: float, invisible_s: float) -> None:
        self.receipt = receipt
        self.lease.ends_s = asked_s + invisible_s * (1 - _MARGIN)


class Asked:
    """When a receive was sent, by the clock and by the time that this process ran."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began_s, self._running_s = clock_s(), connection.running_s()

    def ends_s(self, invisible_s: float) -> float:
        """Until when a message that came now is ours."""
        now_s = clock_s()
        stood_s = max(now_s - self._began_s - (self._connection.running_s() - self._running_s), 0.0)
        return now_s - stood_s + invisible_s * (1 - _MARGIN)


def deliveries_of(answer: Frame, topic: str, broker_name: str, ends_s: float) -> tuple[list[SharedDelivery], int]:
    """The messages of a receive, and about how many are left. A record that cannot be read is left to its broker, which
    redelivers it and makes a dead letter of it in the end. Raises MessageError if it cannot be told where records begin, and
    HeaderError."""
    result = read(PopMessageResult, answer.ext)
    starts, tried = starts_of(result.start_offset_info or ""), tried_in(result.order_count_info or "")
    found = []
    for record in split_records(answer.body):
        try:
            text = props.find(properties_in(record), POP_CK)
        except MessageError as error:
            log.error(
                "message_unreadable", topic=topic, broker=broker_name, offset=offset_in(record), reason=str(error),
                hint="its broker redelivers it until it is a dead letter",
            )  # fmt: skip
            continue
        message = Message(
            record, Queue(topic, broker_name, int.from_bytes(record[12:16], "big")), topic, Lease(0, ends_s)
        )
        if text is not None:
            receipt = receipt_of(text)
        else:  # as Java's client makes it: PopCallback's processPopResponse
            queue_id, offset = message.queue.queue_id, offset_in(record)
            times = result.pop_time, result.invisible_time, result.revive_qid
            receipt = Receipt(starts.get(queue_id, offset), *times, "0", broker_name, queue_id, offset)
            count = tried.get(f"qo{queue_id}%{offset}", tried.get(str(queue_id), 0))
            if count:  # in order the record stays as it was stored
                stored = message.record._replace(reconsume_times=count)
                message = Message(stored, message.queue, topic, message.lease)
        found.append(SharedDelivery(message, receipt))
    return found, result.rest_num
