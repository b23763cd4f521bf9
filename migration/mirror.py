"""Copy topics, groups and messages to another cluster while clients keep using the source."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Self

from ..client.admin.admin_client import AdminClient, Topic
from ..client.admin.messages import ORIGINS, marked, origin_of
from ..client.config import (
    CLIENT_LIMITS,
    MIRROR_BATCH_BYTES,
    MIRROR_BATCH_MESSAGES,
    MIRROR_INDEXED_LIMIT_S,
    MIRROR_INDEXED_S,
    MIRROR_LOOK_BACK,
    MIRROR_POLL_S,
    MIRROR_QUEUES_AT_ONCE,
    MIRROR_TIMEOUT_S,
    ClientLimits,
    check_count,
    check_seconds,
)
from ..client.errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, TopicNotFound, get_logger
from ..client.message import Message
from ..client.producer import Producer
from ..client.wire.connection import Access
from ..protocol import names
from ..protocol import properties as props
from ..protocol.admin_bodies import Range
from ..protocol.codes import PERM_WRITE, SYS_COMPRESSED, SYS_COMPRESSION_MASK, ResponseCode
from ..protocol.message import BatchEntry
from ..protocol.names import Queue

log = get_logger("rocketlet.mirror")


# ------------------------------------------------------------------------------
# Copies topics and the progress of groups to another cluster, queue by queue, Rocketlet's or Apache's.
#
# 1. Each queue of the source has one queue over there, always the same: the n-th of the source, counted by broker and
#     number,
#    is queue n // brokers of broker n % brokers. So order is kept.
# 2. A copy has one property more, its origin: where the original lies. Nothing else is stored: a mirror that resumes
#     looks for
#    the newest copy in the queue over there and continues behind its original. That is how a mirror survives its own
#     end and
#    that of either cluster, without a gap.
# 3. A send without an answer may have been stored or not. The newest copy shows which, unless the request is still under
#     way: then
#    one batch is there twice, and nothing else ever is.
# 4. A group's offset is the offset of the first copy whose original the group has not consumed: a binary search,
#     because
#    originals are in order. Groups that have members over there are left alone.


_KEPT: Final = frozenset((props.TAGS, props.KEYS))
_COMPRESSION: Final = SYS_COMPRESSED | SYS_COMPRESSION_MASK
_AWAY = (ConnectionFailed, RequestTimeout, TopicNotFound, BrokerRefused)
_BUSY = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.TOPIC_NOT_EXIST))
_NOTHING: Final = Range(0, 0, 0)


class Way(Enum):
    """Which messages the target has beside copies."""

    COPY = auto()
    """Messages of others, which the source's groups do not read."""
    MOVE = auto()
    """Messages of the source's producers, which have gone there: its groups read them behind the copies."""
    RETURN = auto()
    """As MOVE; and messages of the source may have their originals there, which are not copied."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The begin of a queue that has no copies yet: the first message, the newest `last` messages, or the first one that was
    stored at `since_ms` (ms since the epoch) or later."""

    last: int | None = None
    since_ms: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.since_ms is not None:
            raise ConfigError("last and since: give one of them")
        if self.last is not None:
            check_count("last", self.last, 0)


@dataclass(slots=True)
class QueueCopy:
    """How far a queue is copied. `next`: the offset of the next original; None until it is known. `end`: the offset over
    there behind the last copy that was acknowledged."""

    source: Queue
    target: Queue
    next: int | None = None
    end: int = 0
    copied: int = 0
    dropped: int = 0
    """Originals that were deleted before they were copied."""
    span: Range = _NOTHING
    """The source's messages at the last poll."""

    @property
    def done(self) -> int:
        return min(max((self.next or 0) - self.span.begin, 0), self.span.end - self.span.begin)


@dataclass(frozen=True, slots=True)
class MirrorProgress:
    """How many of a topic's messages are over there, also from earlier times, and how many there are."""

    topic: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Messages that wait at the source. `retries`: those that a group handed back, by group: it must handle them there.
    `delayed`: by topic; they are copied when they are due."""

    retries: Mapping[str, int]
    delayed: Mapping[str, int]


class Mirror:
    """`async with Mirror("a:9876", "b:9876", topics=["orders"], groups=["shop"]) as mirror: await mirror.run()`

    - `topics`: default all.
    - `groups`: whose settings and progress are copied; default all that read these topics.
    - `begin`: where queues begin that have no copies yet.
    - `way`: which other messages the target has.
    - `patience_s`: how long `run` waits for a cluster that is away; with `follow` it waits for ever.

    Raises RocketletError.
    """

    def __init__(
        self,
        source: str,
        target: str,
        *,
        topics: Sequence[str] = (),
        groups: Sequence[str] | None = None,
        begin: Begin | None = None,
        way: Way = Way.COPY,
        source_access: Access | None = None,
        target_access: Access | None = None,
        patience_s: float = MIRROR_TIMEOUT_S,
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        if source == target:
            raise ConfigError(f"source and target are both {source}")
        check_seconds("patience_s", patience_s)
        self._source = AdminClient(source, access=source_access, limits=limits)
        self._target = AdminClient(target, access=target_access, limits=limits)
        # no send is repeated blindly: after a send without a response the newest copy shows what to do
        self._producer = Producer(target, "rocketlet-mirror", retries=0, access=target_access, limits=limits)
        self._limits = limits
        self._names = tuple(topics)
        self._groups = groups
        self._begin = begin or Begin()
        self._way = way
        self._patience_s = patience_s
        self._stack = AsyncExitStack()
        self._busy = asyncio.Semaphore(MIRROR_QUEUES_AT_ONCE)
        self._progress: dict[tuple[str, Queue], int] = {}
        self._copying = ""
        self.copies: dict[Queue, QueueCopy] = {}
        self.offsets: dict[tuple[str, Queue], int] = {}
        """The offsets set at the target, by its group and queue."""

    async def __aenter__(self) -> Self:
        try:
            for client in (self._source, self._target, self._producer):
                await self._stack.enter_async_context(client)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def run(self, *, follow: bool = False) -> None:
        """Copies the present messages, then the progress of groups; with `follow`, continues until it is cancelled."""
        deadline_s, copied, logged = 0.0, -1, ""
        while True:
            try:
                for topic in await self._topics():
                    await self._copy(topic)
                for topic in await self._topics():
                    await self._copy_progress(topic)
            except _AWAY as error:
                if isinstance(error, BrokerRefused) and error.code not in _BUSY:
                    raise
                if isinstance(error, TopicNotFound) and not follow and not self.copies:
                    raise  # nothing is away: the name is wrong
                if self._copied != copied:  # patience counts from the first failure since something was copied
                    deadline_s, copied = _now_s() + self._patience_s, self._copied
                if not follow and _now_s() > deadline_s:
                    raise
                if str(error) != logged:
                    logged = str(error)
                    log.warning("mirror_waits", reason=logged, hint="the mirror resumes after the newest copies")
                for copy in self.copies.values():
                    copy.next = None
                await asyncio.sleep(self._limits.mirror_backoff_s)
                continue
            if not follow:
                return
            logged = ""
            await asyncio.sleep(MIRROR_POLL_S)

    @property
    def _copied(self) -> int:
        return sum(copy.copied for copy in self.copies.values())

    @property
    def progress(self) -> MirrorProgress | None:
        """How far the topic is that is copied, or was the last one; None before the first."""
        copies = [copy for copy in self.copies.values() if copy.source.topic == self._copying]
        total = sum(copy.span.end - copy.span.begin for copy in copies)
        return MirrorProgress(self._copying, sum(copy.done for copy in copies), total) if copies else None

    async def waiting(self) -> Waiting:
        """The messages at the source that will not be copied as they are."""
        later = await delayed(self._source)
        topics = [topic.name for topic in await self._topics()]
        groups = {group for topic in topics for group in await self._groups_of(topic)}
        retries = {group: await self._to_retry(group) + later[names.retry_topic(group)] for group in sorted(groups)}
        return Waiting(
            {group: count for group, count in retries.items() if count},
            {topic: later[topic] for topic in topics if later[topic]},
        )

    async def _to_retry(self, group: str) -> int:
        retry = names.retry_topic(group)
        progress = await self._source.progress(group, times=False)
        return sum(item.lag for queue, item in progress.items() if queue.topic == retry)

    async def _topics(self) -> list[Topic]:
        """The topics to copy, as they are now at the source."""
        return [await self._source.topic(name) for name in self._names or await self._source.topics()]

    # Messages

    async def _copy(self, topic: Topic) -> None:
        targets = await self._queues_over_there(topic)
        self._copying = topic.name
        for source, target in zip(topic.ranges, targets, strict=True):
            self.copies.setdefault(source, QueueCopy(source, target)).span = topic.ranges[source]
        # all of them end before any is retried: two copies of a queue at once would mix
        ended = await asyncio.gather(
            *(self._copy_queue(self.copies[source], span) for source, span in topic.ranges.items()),
            return_exceptions=True,
        )
        for error in ended:
            if error is not None:
                raise error

    async def _queues_over_there(self, topic: Topic) -> list[Queue]:
        """A queue for each of the source's; the topic is made, or gets more queues, if it needs to."""
        brokers = [broker.name for broker in await self._target.brokers() if 0 in broker.addresses]
        if not brokers:
            raise ConnectionFailed("the target's name servers know no broker")
        count = -(-len(topic.ranges) // len(brokers))
        try:
            found = await self._target.topic(topic.name)
        except TopicNotFound:
            found = None
        there = found.config if found is not None else {}
        if set(there) != set(brokers):
            perm = max(config.perm for config in topic.config.values())
            if self._way is not Way.COPY:  # producers come when the last copy is there, and not between
                perm &= ~PERM_WRITE
            most = max((config.read_queues for config in there.values()), default=0)
            await self._target.create_topic(topic.name, queues=max(count, most), perm=perm)
        short = [broker for broker, config in there.items() if config.read_queues < count]
        if short:
            await self._target.change_topic(topic.name, queues=count, brokers=short)
        return [
            Queue(topic.name, brokers[number % len(brokers)], number // len(brokers))
            for number in range(len(topic.ranges))
        ]

    async def _copy_queue(self, copy: QueueCopy, span: Range) -> None:
        async with self._busy:
            if copy.next is None:
                copy.next = await self._place(copy, span)
            if copy.next < span.begin:
                copy.dropped += span.begin - copy.next
                log.warning("mirror_too_late", queue=str(copy.source), first=copy.next, last=span.begin - 1)
                copy.next = span.begin
            async for messages in self._source.read(copy.source, copy.next, span.end):
                for sys_flag, batch in _batches(
                    copy, (one for one in messages if self._original_there(copy, one) is None)
                ):
                    stored = await self._producer.send_stored(copy.target, batch, sys_flag)
                    copy.end = stored.queue_offset + len(batch)
                    copy.copied += len(batch)
                if messages:
                    copy.next = messages[-1].queue_offset + 1

    def _original_there(self, copy: QueueCopy, message: Message) -> int | None:
        """The original's offset at the target, if it has the original."""
        origin = origin_of(message) if self._way is Way.RETURN else None
        if origin is None or origin[:2] != (copy.target.broker_name, copy.target.queue_id):
            return None
        return origin.offset

    async def _place(self, copy: QueueCopy, span: Range) -> int:
        """The offset behind the original of the newest copy, or where a queue without copies begins."""
        there = (await self._target_as_copied([copy]))[copy.target]
        end = there.end
        while end > there.begin and there.end - end < MIRROR_LOOK_BACK:
            begin = max(end - MIRROR_BATCH_MESSAGES, there.begin)
            newest = await self._newest_original(copy, begin, end)
            if newest is not None:
                return newest + 1
            end = begin
        if self._begin.last is not None:
            return max(span.end - self._begin.last, span.begin)
        if self._begin.since_ms is not None:
            return await self._source.offset_at(copy.source, self._begin.since_ms)
        return span.begin

    async def _newest_original(self, copy: QueueCopy, begin: int, end: int) -> int | None:
        """The largest offset of an original that has its copy in this range, which may take several answers to read."""
        newest = None
        async for messages in self._target.read(copy.target, begin, end):
            for message in messages:
                offset = _offset_of(copy, message)
                if offset is not None:
                    newest = max(offset, newest or 0)
        return newest

    async def _target_as_copied(self, copies: Iterable[QueueCopy]) -> Mapping[Queue, Range]:
        """The target's queues, as soon as they show each copy that was acknowledged: Apache's brokers index a message a
        moment later (ReputMessageService). A copy that they do not show after some seconds was lost, and is made again."""
        wanted = {copy.target: copy.end for copy in copies}
        topic = next(iter(wanted)).topic
        deadline_s = _now_s() + MIRROR_INDEXED_LIMIT_S
        while True:
            there = (await self._target.topic(topic)).ranges
            missing = [queue for queue, end in wanted.items() if queue not in there or there[queue].end < end]
            if not missing:
                return there
            if _now_s() > deadline_s:
                raise RequestTimeout(
                    f"{missing[0]} does not show all copies that were acknowledged; were they lost over there?"
                )
            await asyncio.sleep(MIRROR_INDEXED_S)

    # Groups

    async def _copy_progress(self, topic: Topic) -> None:
        for group in await self._groups_of(topic.name):
            progress = await self._source.progress(group, times=False)
            await self._set_offsets(
                group,
                topic.name,
                {queue: item.consumer_offset for queue, item in progress.items() if queue.topic == topic.name},
            )

    async def _groups_of(self, topic: str) -> list[str]:
        """The groups that read a topic and whose progress is copied."""
        found = (group for group in await self._source.consumed_by(topic) if not names.is_made_by_brokers(group))
        return [group for group in found if self._groups is None or group in self._groups]

    async def _set_offsets(self, group: str, topic: str, committed: Mapping[Queue, int]) -> None:
        changed = {
            queue: offset
            for queue, offset in committed.items()
            if queue in self.copies and self._progress.get((group, queue)) != offset
        }
        if not changed:
            return
        there = await self._target_as_copied(self.copies[queue] for queue in changed)
        wanted: dict[Queue, int] = {}
        for queue, offset in changed.items():
            copy = self.copies[queue]
            wanted[copy.target] = await self._first_copy(copy, there[copy.target], offset)
        await self._copy_settings(group)
        if (await self._target.group(group)).members:
            log.info("mirror_leaves_group", group=group, hint="it has members over there")
        else:
            await self._target.reset(group, topic, wanted)
            self.offsets |= {(group, queue): offset for queue, offset in wanted.items()}
        self._progress |= {(group, queue): offset for queue, offset in changed.items()}

    async def _copy_settings(self, group: str) -> None:
        if not await self._target.group_configs(group):
            for config in (await self._source.group_configs(group)).values():
                await self._target.create_group(config)
                break

    async def _first_copy(self, copy: QueueCopy, there: Range, offset: int) -> int:
        """The offset over there of the first copy of an original at `offset` or behind it; without one the place behind the
        copies before it: others may have sent there since."""
        came_from = await self._came_from(copy, offset)
        if came_from is not None:
            return came_from
        low, high = there.begin, there.end
        while low < high:
            middle = (low + high) // 2
            found = await self._next_copy(copy, middle, high)
            if found is None:
                high = middle
            elif found[1] < offset:
                low = found[0] + 1
            else:
                high = middle
        found = await self._next_copy(copy, low, there.end)
        if found is not None:
            return found[0]
        before = await self._came_from(copy, offset - 1)
        if before is not None:
            return max(before + 1, low)
        return there.end if low == there.begin and self._way is Way.COPY else low

    async def _came_from(self, copy: QueueCopy, offset: int) -> int | None:
        """The offset over there of a message that came from there; None of others."""
        if self._way is Way.RETURN and offset >= 0:
            async for messages in self._source.read(copy.source, offset, offset + 1):
                if messages:
                    return self._original_there(copy, messages[0])
        return None

    async def _next_copy(self, copy: QueueCopy, begin: int, end: int) -> tuple[int, int] | None:
        """The first copy from an offset on, and the offset of its original."""
        async for messages in self._target.read(copy.target, begin, end):
            for message in messages:
                offset = _offset_of(copy, message)
                if offset is not None:
                    return message.queue_offset, offset
        return None


def _batches(copy: QueueCopy, messages: Iterable[Message]) -> Iterable[tuple[int, list[BatchEntry]]]:
    """Batches for one request each: bodies that are compressed alike, as they are, and the flag that says how."""
    batch: list[BatchEntry] = []
    size = sys_flag = 0
    for message in messages:
        entry = _entry(copy, message)
        entry_bytes, entry_flag = len(entry.body) + len(entry.properties), message.record.sys_flag & _COMPRESSION
        is_full = size + entry_bytes > MIRROR_BATCH_BYTES or len(batch) >= MIRROR_BATCH_MESSAGES
        if batch and (is_full or entry_flag != sys_flag):
            yield sys_flag, batch
            batch, size = [], 0
        batch.append(entry)
        size += entry_bytes
        sys_flag = entry_flag
    if batch:
        yield sys_flag, batch


def _entry(copy: QueueCopy, message: Message) -> BatchEntry:
    """The message as the source has it, whatever its sender gave it: nothing that a broker took stops a mirror."""
    kept = {
        name: value
        for name, value in message.properties.items()
        if name not in ORIGINS and (name not in props.RESERVED or name in _KEPT)
    }
    text, dropped = marked(props.encode({**kept, props.UNIQUE_KEY: message.message_id}), message)
    if dropped:
        log.warning("mirror_shortened", queue=str(copy.source), offset=message.queue_offset, properties=dropped[:10])
    return BatchEntry(message.record.flag, message.record.body, text)


def _offset_of(copy: QueueCopy, message: Message) -> int | None:
    """The original's offset; None for a message that somebody else sent, perhaps with any properties. Raises ConfigError
    for a copy of another queue."""
    origin = origin_of(message)
    if origin is None:
        return None
    if origin[:2] != (copy.source.broker_name, copy.source.queue_id):
        raise ConfigError(
            f"{copy.target} holds copies of queue {origin.queue_id} of {origin.broker_name}, and should hold those of "
            f"{copy.source}: the brokers of one side have changed since; delete the topic over there, or mirror to another "
            "cluster"
        )
    return origin.offset


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------
# Messages that wait at the brokers for their time: sent with a delay, or sent back by a consumer for a retry.
#
# They lie in SCHEDULE_TOPIC_XXXX, a queue for each level, or, sent to a time, in rmq_sys_wheel_timer; no lag counts
# them. Brokers report how far a level is delivered.


async def delayed(admin: AdminClient) -> Counter[str]:
    """How many wait, by the topic that they will be stored in: of those that were handed back, the group's retry topic."""
    return await _at_levels(admin) + await _to_times(admin)


async def _at_levels(admin: AdminClient) -> Counter[str]:
    waiting: Counter[str] = Counter()
    levels = await _ranges(admin, names.SCHEDULE_TOPIC)
    delivered = await admin.delay_offsets() if levels else {}
    for queue, span in levels.items():
        begin = max(delivered.get(queue.broker_name, {}).get(queue.queue_id + 1, 0), span.begin)
        async for messages in admin.read(queue, begin, span.end):
            waiting.update(message.properties.get(props.REAL_TOPIC, "") for message in messages)
    return waiting


async def _to_times(admin: AdminClient) -> Counter[str]:
    """Counts messages by the times that they have; recalled ones count, too."""
    waiting: Counter[str] = Counter()
    now_ms = time.time() * 1000
    for queue, span in (await _ranges(admin, names.TIMER_TOPIC)).items():
        async for messages in admin.read(queue, span.begin, span.end):
            late = (message.properties for message in messages if _due_ms(message) > now_ms)
            waiting.update(properties.get(props.REAL_TOPIC, "") for properties in late)
    return waiting


def _due_ms(message: Message) -> int:
    due_ms = message.properties.get(props.TIMER_OUT_MS, "")
    return int(due_ms) if due_ms.isascii() and due_ms.isdecimal() else 0


async def _ranges(admin: AdminClient, topic: str) -> Mapping[Queue, Range]:
    try:
        return (await admin.topic(topic)).ranges
    except TopicNotFound:
        return {}
