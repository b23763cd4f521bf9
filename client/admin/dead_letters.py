"""Dead letters of a group: which are new, replayed or discarded.

A dead letter stays in its topic until it expires. When Rocketlet's tools replay or discard it, they store a mark: a small
message in the topic of marks, at the broker that has the dead letter. Marks therefore survive restarts, and work on
Apache's brokers.

A mark contains offsets of a queue. A mark applies only to dead letters that were stored before the mark, because the
offsets of a topic that was deleted and recreated start at 0 again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from ...protocol import names
from ...protocol.admin_bodies import Range
from ...protocol.names import Queue
from ..config import MARKED_AT_ONCE
from ..errors import TopicNotFound
from ..message import Message
from .admin_client import AdminClient

State = Literal["new", "replayed", "discarded"]
_MARKS: Final[frozenset[str]] = frozenset(("replayed", "discarded"))


class HandledRange(NamedTuple):
    """The offsets of a queue from `begin` to before `end`, whose messages were replayed or discarded.

    Attributes:
        stored_ms: the time at which the mark was stored, by the broker's clock, in ms since the epoch.
    """

    state: State
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
        value: Any = json.loads(message.body)
        state, queue = value["state"], Queue(names.dlq_topic(value["group"]), broker, int(value["queue"]))
        ranges = [(int(begin), int(end)) for begin, end in value["ranges"]]
    except (ValueError, TypeError, KeyError):
        return []
    if state not in _MARKS:
        return []
    return [(queue, HandledRange(state, begin, end, message.store_ms)) for begin, end in ranges]


async def _valid(admin: AdminClient, queue: Queue, span: Range, marks: Iterable[HandledRange]) -> list[HandledRange]:
    """Return the marks without those of dead letters that have expired or belonged to a deleted topic of the same name."""
    near = [mark for mark in marks if mark.end > span.begin and mark.begin < span.end]
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


async def mark(admin: AdminClient, group: str, places: Iterable[tuple[Queue, int]], state: State) -> None:
    """Mark dead letters, given by queue and offset, as replayed or discarded. Raises RocketletError."""
    by_queue: dict[Queue, list[int]] = {}
    for queue, offset in places:
        by_queue.setdefault(queue, []).append(offset)
    for queue, offsets in by_queue.items():
        await _ensure_topic(admin, queue.broker_name)
        ranges = _ranges(sorted(offsets))
        for begin in range(0, len(ranges), MARKED_AT_ONCE):
            value = {
                "group": group,
                "queue": queue.queue_id,
                "state": state,
                "ranges": ranges[begin : begin + MARKED_AT_ONCE],
            }
            await admin.store(Queue(names.MARKS_TOPIC, queue.broker_name, 0), json.dumps(value).encode())


def _ranges(offsets: Iterable[int]) -> list[list[int]]:
    """Combine sorted offsets into ranges of consecutive ones: pairs of the first offset and the one after the last."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and found[-1][1] >= offset:
            found[-1][1] = offset + 1
        else:
            found.append([offset, offset + 1])
    return found


async def _ensure_topic(admin: AdminClient, broker: str) -> None:
    try:
        if broker in (await admin.topic(names.MARKS_TOPIC)).config:
            return
    except TopicNotFound:
        pass
    await admin.create_topic(names.MARKS_TOPIC, queues=1, brokers=[broker])
