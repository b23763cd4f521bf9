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
# 1. Each queue of the source is copied to a fixed queue of the target: the n-th queue of the source, ordered by broker and
#    number, to queue n // brokers of broker n % brokers. The order of messages in a queue is therefore kept.
# 2. A copy has an additional property, its origin: the position of the original. No other state is stored. A mirror that
#    resumes finds the newest copy in the queue at the target and continues after its original, so that a crash of the mirror
#    or of either cluster makes it miss no message that the source still has. The mirror looks for the newest copy among
#    the last `MIRROR_LOOK_BACK` messages of the queue. If producers have sent more messages to the queue since, it begins
#    as in a queue without copies.
# 3. After a send without a response it is unknown whether the messages were stored. The newest copy shows it, unless the
#    request is still in flight: then one batch may be stored twice.
# 4. A group's offset at the target is that of the first copy whose original the group has not consumed, found by binary
#    search, because copies are in the order of their originals. Offsets of groups with members at the target stay.


_KEPT: Final = frozenset((props.TAGS, props.KEYS))
_COMPRESSION: Final = SYS_COMPRESSED | SYS_COMPRESSION_MASK
_AWAY = (ConnectionFailed, RequestTimeout, TopicNotFound, BrokerRefused)
_BUSY = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.TOPIC_NOT_EXIST))
_NOTHING: Final = Range(0, 0, 0)


class Way(Enum):
    """The messages that the target may have besides copies."""

    COPY = auto()
    """Messages of other producers, which the source's groups do not read."""
    MOVE = auto()
    """Messages of the source's producers, which have moved to the target. The source's groups read them after the
    copies."""
    RETURN = auto()
    """Like MOVE, for a move in the opposite direction: originals of the source's messages that the target has are not
    copied."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The start position in a queue that has no copies yet: the first message, the newest `last` messages, or the first
    message that was stored at `since_ms` (ms since the epoch) or later."""

    last: int | None = None
    since_ms: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.since_ms is not None:
            raise ConfigError("last, since: both are given; give only one of them")
        if self.last is not None:
            check_count("last", self.last, 0)


@dataclass(slots=True)
class QueueCopy:
    """The progress of copying one queue.

    Attributes:
        next: the offset of the next original to copy; None until it is known.
        end: the offset at the target after the last copy that was acknowledged.
    """

    source: Queue
    target: Queue
    next: int | None = None
    end: int = 0
    copied: int = 0
    dropped: int = 0
    """The number of originals that were deleted before they were copied."""
    span: Range = _NOTHING
    """The offsets of the source's messages at the last poll."""

    @property
    def done(self) -> int:
        return min(max((self.next or 0) - self.span.begin, 0), self.span.end - self.span.begin)


@dataclass(frozen=True, slots=True)
class MirrorProgress:
    """The number of a topic's messages that are copied, including copies of earlier runs, and the number of all
    messages."""

    topic: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The numbers of messages at the source that are not due yet.

    Attributes:
        retries: messages that wait for a retry, by group. The mirror does not copy them.
        delayed: delayed messages, by topic. A mirror copies them if it runs when they are due, or later.
    """

    retries: Mapping[str, int]
    delayed: Mapping[str, int]


class Mirror:
    """`async with Mirror("a:9876", "b:9876", topics=["orders"], groups=["shop"]) as mirror: await mirror.run()`

    - `topics`: the topics to copy. Default: all.
    - `groups`: the groups whose settings and progress are copied. Default: all groups that read these topics.
    - `begin`: the start position in queues that have no copies yet.
    - `way`: the messages that the target may have besides copies.
    - `patience_s`: the time in seconds for which `run` retries without progress while a cluster is unreachable; with
      `follow` it retries until it is cancelled.

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
            raise ConfigError(f"source and target are both {source}; give two clusters")
        check_seconds("patience_s", patience_s)
        self._source = AdminClient(source, access=source_access, limits=limits)
        self._target = AdminClient(target, access=target_access, limits=limits)
        # No automatic retries, because after a send without a response the newest copy shows whether it was stored.
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
        """The offsets that were set at the target, by group and queue."""

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
        """Copy the present messages, then the progress of groups. With `follow`, continue until cancelled, or until a cluster
        refuses a request."""
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
                    raise  # the topic does not exist, so retrying is useless
                if self._copied != copied:  # the time is counted from the first failure since the last progress
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
        """Progress of the topic being copied, or of the last one; None before the first."""
        copies = [copy for copy in self.copies.values() if copy.source.topic == self._copying]
        total = sum(copy.span.end - copy.span.begin for copy in copies)
        return MirrorProgress(self._copying, sum(copy.done for copy in copies), total) if copies else None

    async def waiting(self) -> Waiting:
        """Return the numbers of messages at the source that wait for a retry or a delay."""
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
        """Query the topics to copy at the source."""
        return [await self._source.topic(name) for name in self._names or await self._source.topics()]

    # Messages

    async def _copy(self, topic: Topic) -> None:
        targets = await self._queues_over_there(topic)
        self._copying = topic.name
        for source, target in zip(topic.ranges, targets, strict=True):
            self.copies.setdefault(source, QueueCopy(source, target)).span = topic.ranges[source]
        # Wait for all of them before any is retried, because concurrent copies of the same queue would get out of order.
        ended = await asyncio.gather(
            *(self._copy_queue(self.copies[source], span) for source, span in topic.ranges.items()),
            return_exceptions=True,
        )
        for error in ended:
            if error is not None:
                raise error

    async def _queues_over_there(self, topic: Topic) -> list[Queue]:
        """Return the target's queue for each queue of the source. Create the topic or add queues if necessary."""
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
            if self._way is not Way.COPY:  # read-only until the last copy, so that no producer writes before it
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
        """Return the offset of the original at the target if the target has it, which is known only in Way.RETURN; else
        None."""
        origin = origin_of(message) if self._way is Way.RETURN else None
        if origin is None or origin[:2] != (copy.target.broker_name, copy.target.queue_id):
            return None
        return origin.offset

    async def _place(self, copy: QueueCopy, span: Range) -> int:
        """Return the offset after the original of the newest copy among the last `MIRROR_LOOK_BACK` messages, or the start
        position of a queue without copies."""
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
        """Return the largest offset of an original that has its copy in this range of the target; None without any."""
        newest = None
        async for messages in self._target.read(copy.target, begin, end):
            for message in messages:
                offset = _offset_of(copy, message)
                if offset is not None:
                    newest = max(offset, newest or 0)
        return newest

    async def _target_as_copied(self, copies: Iterable[QueueCopy]) -> Mapping[Queue, Range]:
        """Return the ranges of the target's queues, once they contain each copy that was acknowledged.

        Apache's brokers index a message a moment after they acknowledge it (ReputMessageService). If a copy is missing for
        longer, raise RequestTimeout, after which `run` continues after the newest copy.
        """
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
                    f"{missing[0]} does not show all copies that were acknowledged; were they lost at the target?"
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
        """Return the groups that read a topic and whose progress is to be copied."""
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
            log.info("mirror_leaves_group", group=group, hint="it has members at the target")
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
        """Return the offset at the target of the first copy whose original has at least `offset`. Without one, return
        the offset after the last copy of an earlier original, because other producers may have sent messages after it."""
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
        """Return the offset at the target of a source's message that is itself a copy from the target; None for other
        messages."""
        if self._way is Way.RETURN and offset >= 0:
            async for messages in self._source.read(copy.source, offset, offset + 1):
                if messages:
                    return self._original_there(copy, messages[0])
        return None

    async def _next_copy(self, copy: QueueCopy, begin: int, end: int) -> tuple[int, int] | None:
        """Return the offset of the first copy from `begin` on, and the offset of its original."""
        async for messages in self._target.read(copy.target, begin, end):
            for message in messages:
                offset = _offset_of(copy, message)
                if offset is not None:
                    return message.queue_offset, offset
        return None


def _batches(copy: QueueCopy, messages: Iterable[Message]) -> Iterable[tuple[int, list[BatchEntry]]]:
    """Split messages into batches for one request each. A batch has bodies with the same compression, which are not
    decompressed, and is returned with the system flag of that compression."""
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
    """Return a copy of a message with its body as stored, its tag, keys, id and user properties, and its origin. Any message
    that a broker has stored can be copied; if its properties are too long, some are dropped."""
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
    """Return the offset of a copy's original; None for a message that is not a copy. Raises ConfigError for a copy of
    another queue."""
    origin = origin_of(message)
    if origin is None:
        return None
    if origin[:2] != (copy.source.broker_name, copy.source.queue_id):
        raise ConfigError(
            f"{copy.target} contains copies of queue {origin.queue_id} of {origin.broker_name} instead of {copy.source}, "
            "because the brokers of one cluster have changed; delete the topic at the target, or mirror to another cluster"
        )
    return origin.offset


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------
# Messages that brokers deliver later: sent with a delay, or returned by a consumer for a retry.
#
# Such messages are stored in SCHEDULE_TOPIC_XXXX, which has a queue for each delay level, or in rmq_sys_wheel_timer if
# they have a delivery time. They are not part of any group's lag. Brokers report the delivered offset of each level.


async def delayed(admin: AdminClient) -> Counter[str]:
    """Return the number of delayed messages by target topic, which is the group's retry topic for messages that wait for a
    retry."""
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
    """Return the number of messages with a delivery time by target topic, including recalled ones."""
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
