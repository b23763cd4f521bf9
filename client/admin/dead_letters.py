"""Dead letters of a group: which are new, replayed or discarded.

A dead letter stays in its topic until it expires. When Rocketlet's tools replay or discard it, they store a mark: a small
message in the topic of marks, at the broker that has the dead letter. Marks therefore survive restarts, and work on
Apache's brokers.

A mark contains offsets of a queue. A mark applies only to dead letters that were stored before the mark, because the
offsets of a topic that was deleted and recreated start at 0 again. On a broker without accounts any client can write to the
topic of marks, so a message that is not a valid mark is ignored. With accounts only administrators can write to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...protocol import names
from ...protocol.admin_bodies import DeadLetterMark, MarkState, Range, decode_mark
from ...protocol.bodies import BodyError, encode_json
from ...protocol.config import MAX_MARK_RANGES
from ...protocol.names import Queue
from ..config import MARK_INTERVAL_S, REPLAY_BURST_S, check_count
from ..errors import ConfigError, ConnectionFailed, RequestTimeout, RocketletError, TopicNotFound
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


ReplayReport = Callable[[Message, RocketletError | None], object]
"""Gets each message with the error of its send, or None if the message was sent."""


class Replay:
    """A replay: resends dead letters, and marks those that were sent as replayed.

    Before the first message of a broker, a mark without offsets is stored there, so that nothing is resent if the account
    may not store marks: such messages would be resent by the next replay, too.

    Args:
        to_group: True to resend to the retry topic of the group, False to resend to the topic of each message.
        rate_per_s: the maximum number of messages per second.
        stop_after: the number of failed messages after which the replay stops.
        raises_unreachable: True to raise ConnectionFailed and RequestTimeout, so that the caller can call `run` again. False
            to count the message as failed.

    Attributes:
        sent: the number of messages that were sent.
        failed: the number of messages that could not be sent.
        error: the error of the last message that could not be sent.
    """

    def __init__(
        self,
        admin: AdminClient,
        group: str,
        *,
        to_group: bool,
        rate_per_s: float = math.inf,
        stop_after: int = 1,
        raises_unreachable: bool = False,
    ) -> None:
        if not rate_per_s > 0:
            raise ConfigError(f"rate_per_s: expected a number above 0, got {rate_per_s!r}")
        check_count("stop_after", stop_after, least=1)
        self._admin = admin
        self._group = group
        self._to = group if to_group else None
        self._interval_s = 1 / rate_per_s
        self._stop_after = stop_after
        self._raises_unreachable = raises_unreachable
        self._brokers: set[str] = set()
        self._unmarked: list[tuple[Queue, int]] = []
        self.sent = self.failed = 0
        self.error: RocketletError | None = None

    @property
    def is_stopped(self) -> bool:
        """True if too many messages have failed."""
        return self.failed >= self._stop_after

    async def run(self, messages: AsyncIterable[Message], report: ReplayReport = lambda message, error: None) -> None:
        """Resend messages until all are sent or `stop_after` of them have failed. Messages that were sent are marked every
        second and at the end, even if this is cancelled. Raises RocketletError if marks cannot be stored; a further run
        stores them before it reads its first message."""
        await self._mark()
        if self.is_stopped:
            return
        loop = asyncio.get_running_loop()
        due_s = marked_s = loop.time()
        try:
            async for message in messages:
                due_s = max(due_s, loop.time() - REPLAY_BURST_S)
                await asyncio.sleep(due_s - loop.time())
                due_s += self._interval_s
                error = await self._send(message)
                report(message, error)
                if self.is_stopped:
                    return
                if loop.time() - marked_s >= MARK_INTERVAL_S:
                    await self._mark()
                    marked_s = loop.time()
        finally:  # after an error, too, so that messages that were sent are not sent a second time
            await self._mark()

    async def _send(self, message: Message) -> RocketletError | None:
        broker = message.queue.broker_name
        if broker not in self._brokers:
            await _store(self._admin, broker, DeadLetterMark(self._group, message.queue_id, "replayed", []))
            self._brokers.add(broker)
        try:
            await self._admin.send_again(message, group=self._to)
        except RocketletError as error:
            if self._raises_unreachable and isinstance(error, ConnectionFailed | RequestTimeout):
                raise
            self.failed += 1
            self.error = error
            return error
        self.sent += 1
        self._unmarked.append((message.queue, message.queue_offset))
        return None

    async def _mark(self) -> None:
        await mark(self._admin, self._group, self._unmarked, "replayed")
        self._unmarked.clear()


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
