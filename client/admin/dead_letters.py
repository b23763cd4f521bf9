"""Dead letters of a group: which are new, replayed or discarded.

A dead letter stays in its topic until it expires. When Rocketlet's tools replay or discard it, they store a mark: a small
message in the topic of marks, at the broker that has the dead letter. Marks therefore survive restarts, and work on
Apache's brokers.

A mark contains offsets of a queue. A mark applies only to dead letters that were stored before the mark, because the
offsets of a topic that was deleted and recreated start at 0 again. On a broker without accounts any client can write to the
topic of marks, so a message that is not a valid mark is ignored. With accounts only administrators can write to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...protocol import names
from ...protocol.admin_bodies import DeadLetterMark, MarkState, Range, decode_mark
from ...protocol.bodies import BodyError, encode_json
from ...protocol.config import MAX_MARK_RANGES
from ...protocol.names import Queue
from ..errors import TopicNotFound
from ..message import Message
from .admin_client import AdminClient

State = Literal["new", "replayed", "discarded"]


class HandledRange(NamedTuple):
    """The offsets of a queue from `begin` to before `end`, whose messages were replayed or discarded.

    Attributes:
        stored_ms: the time at which the mark was stored, by the broker's clock, in ms since the epoch.
    """

    state: MarkState
    begin: int
    end: int
    stored_ms: int


Marks = Mapping[Queue, list[HandledRange]]
"""The marks of each queue of a dead-letter topic, oldest first."""


@dataclass(frozen=True, slots=True)
class DeadLetterTopic:
    """The dead letters of one group.

    Attributes:
        ranges: the stored offsets by queue; empty if the group has no dead-letter topic.
        marks: the valid marks by queue.
        new: the number of dead letters without a mark.
    """

    group: str
    ranges: Mapping[Queue, Range]
    marks: Marks
    new: int

    @property
    def stored(self) -> int:
        return sum(span.end - span.begin for span in self.ranges.values())

    def state_of(self, message: Message) -> State:
        state: State = "new"
        for mark in self.marks.get(message.queue, ()):
            if mark.begin <= message.queue_offset < mark.end and message.store_ms <= mark.stored_ms:
                state = mark.state
        return state


async def dead_letters(admin: AdminClient, group: str, marks: Marks | None = None) -> DeadLetterTopic:
    """Query the dead letters of a group. Raises RocketletError.

    Args:
        marks: the result of `all_marks`, for a caller that queries several groups.
    """
    try:
        ranges = (await admin.topic(names.dlq_topic(group))).ranges
    except TopicNotFound:
        return DeadLetterTopic(group, {}, {}, 0)
    known = await all_marks(admin) if marks is None else marks
    valid = {queue: await _valid(admin, queue, span, known.get(queue, ())) for queue, span in ranges.items()}
    new = sum(span.end - span.begin - _covered(span, valid[queue]) for queue, span in ranges.items())
    return DeadLetterTopic(group, ranges, valid, new)


async def all_marks(admin: AdminClient) -> Marks:
    """Read the marks of all groups. Raises RocketletError."""
    try:
        ranges = (await admin.topic(names.MARKS_TOPIC)).ranges
    except TopicNotFound:
        return {}
    marks: dict[Queue, list[HandledRange]] = {}
    for queue, span in ranges.items():
        async for messages in admin.read(queue, span.begin, span.end):
            for message in messages:
                for letters, mark in _read(message, queue.broker_name):
                    marks.setdefault(letters, []).append(mark)
    return marks


def _read(message: Message, broker: str) -> list[tuple[Queue, HandledRange]]:
    """Decode a mark. Return an empty list for a message that is not a mark."""
    try:
        found = decode_mark(message.body)
    except BodyError:
        return []
    queue = Queue(names.dlq_topic(found.group), broker, found.queue)
    return [(queue, HandledRange(found.state, begin, end, message.store_ms)) for begin, end in found.ranges]


async def _valid(admin: AdminClient, queue: Queue, span: Range, marks: Iterable[HandledRange]) -> list[HandledRange]:
    """Return the marks without those of dead letters that have expired or belonged to a deleted topic of the same name, and
    without those whose offsets the queue has not reached, which are forged or belonged to a deleted topic."""
    near = [mark for mark in marks if span.begin < mark.end <= span.end]
    if not near:
        return []
    async for messages in admin.read(queue, span.begin, span.begin + 1):
        return [mark for mark in near if messages and mark.stored_ms >= messages[0].store_ms]
    return []


def _covered(span: Range, marks: Iterable[HandledRange]) -> int:
    """Return the number of offsets of a range that have a mark."""
    count, reached = 0, span.begin
    for mark in sorted(marks, key=lambda mark: mark.begin):
        begin, end = max(mark.begin, reached), min(mark.end, span.end)
        if begin < end:
            count += end - begin
            reached = end
    return count


async def replay(admin: AdminClient, group: str, messages: AsyncIterable[Message], *, to_group: bool) -> int:
    """Resend dead letters, mark those that were sent as replayed, and return their number. Raises RocketletError.

    Before the first message of a broker, a mark without offsets is stored there, so that nothing is resent if the account
    may not store marks: such messages would be resent by the next replay, too.

    Args:
        to_group: True to resend to the retry topic of the group, False to resend to the topic of each message.
    """
    sent: list[tuple[Queue, int]] = []
    brokers: set[str] = set()
    try:
        async for message in messages:
            broker = message.queue.broker_name
            if broker not in brokers:
                await _store(admin, broker, DeadLetterMark(group, message.queue_id, "replayed", []))
                brokers.add(broker)
            await admin.send_again(message, group=group if to_group else None)
            sent.append((message.queue, message.queue_offset))
    finally:  # after an error, too, so that messages that were sent are not sent a second time
        await mark(admin, group, sent, "replayed")
    return len(sent)


async def mark(admin: AdminClient, group: str, places: Iterable[tuple[Queue, int]], state: MarkState) -> None:
    """Mark dead letters, given by queue and offset, as replayed or discarded. Raises RocketletError."""
    by_queue: dict[Queue, list[int]] = {}
    for queue, offset in places:
        by_queue.setdefault(queue, []).append(offset)
    for queue, offsets in by_queue.items():
        ranges = _ranges(sorted(offsets))
        for begin in range(0, len(ranges), MAX_MARK_RANGES):
            value = DeadLetterMark(group, queue.queue_id, state, ranges[begin : begin + MAX_MARK_RANGES])
            await _store(admin, queue.broker_name, value)


async def _store(admin: AdminClient, broker: str, value: DeadLetterMark) -> None:
    """Store a mark at a broker; create the topic of marks there if it is missing."""
    try:
        is_missing = broker not in (await admin.topic(names.MARKS_TOPIC)).config
    except TopicNotFound:
        is_missing = True
    if is_missing:
        await admin.create_topic(names.MARKS_TOPIC, queues=1, brokers=[broker])
    await admin.store(Queue(names.MARKS_TOPIC, broker, 0), encode_json(value))


def _ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Combine sorted offsets into ranges of consecutive ones: pairs of the first offset and the one after the last."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and found[-1][1] >= offset:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found
