"""The ids of messages of topics with the attribute `dedup`: a repeated send gets the result of the first one.

The id of a message is its unique key. An id is known for at least the time of the attribute, and up to an eighth of it
longer, because ids are forgotten together by slices of time. Nothing is written for it: a start reads the ids from the
messages.

A topic without the attribute is not looked up here, because `SendService` finds it when it checks the queue of a send, which
it does once for each queue and change of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple

import structlog

from ...protocol import properties as props
from ...protocol.bodies import TopicConfig, duration_s, finish
from ...protocol.message import MessageError, offset_in, physical_offset_in, properties_in, split_records, store_ms_in
from ..config import BULK_PULL_BYTES, BULK_PULL_MESSAGES
from ..runtime.runtime import Runtime
from ..store.files import StoreError
from ..store.index import ConsumeQueue
from ..store.store import Store
from .topics import Topics

log = structlog.get_logger("rocketlet.dedup")

SLICES: Final = 8
_REPLAYED: Final = props.ORIGIN_MESSAGE_ID + props.NAME_END
_ID_CHARS: Final = 36  # longer ids are kept as a digest
_DIGEST_BYTES: Final = 16
_QUEUE_BITS: Final = 24
_OFFSET_BITS: Final = 60

Id = str | bytes


class FirstMessage(NamedTuple):
    """The place of the message that was stored with an id."""

    position: int
    queue_id: int
    queue_offset: int


class TopicIds:
    """The ids of one topic's messages.

    Attributes:
        repeated: the number of messages that were sent again, and not stored.
        forgotten: the number of ids that were forgotten early, because the broker had too many.
    """

    def __init__(self, identity: str, window_ms: int) -> None:
        self.identity = identity
        self.window_ms = window_ms
        self.slice_ms = max(window_ms // SLICES, 1)
        self.slices: dict[int, dict[Id, int]] = {}
        self.count = self.repeated = self.forgotten = 0

    def find(self, key: Id) -> FirstMessage | None:
        for ids in self.slices.values():
            if (packed := ids.get(key)) is not None:
                return FirstMessage(
                    packed >> _QUEUE_BITS + _OFFSET_BITS,
                    packed >> _OFFSET_BITS & (1 << _QUEUE_BITS) - 1,
                    packed & (1 << _OFFSET_BITS) - 1,
                )
        return None

    def add(self, key: Id, stored: FirstMessage, time_ms: int) -> None:
        ids = self.slices.setdefault(time_ms // self.slice_ms, {})
        self.count += key not in ids
        ids[key] = (stored.position << _QUEUE_BITS | stored.queue_id) << _OFFSET_BITS | stored.queue_offset

    def remove(self, key: Id, position: int) -> None:
        """Remove an id, if it is that of the message at this position."""
        for ids in self.slices.values():
            packed = ids.get(key)
            if packed is not None and packed >> _QUEUE_BITS + _OFFSET_BITS == position:
                del ids[key]
                self.count -= 1

    def expire(self, now_ms: int) -> None:
        """Remove the slices that ended before the window. A loop over up to nine slices."""
        for number in [number for number in self.slices if (number + 1) * self.slice_ms + self.window_ms <= now_ms]:
            self.count -= len(self.slices.pop(number))

    def forget_oldest(self) -> int:
        """Remove an eighth of the ids of the oldest slice that has some, the oldest ones, and return their number."""
        number = min(number for number, ids in self.slices.items() if ids)
        ids = self.slices[number]
        oldest = list(islice(ids, len(ids) // SLICES + 1))
        for key in oldest:
            del ids[key]
        self.count -= len(oldest)
        self.forgotten += len(oldest)
        return len(oldest)

    def resize(self, window_ms: int) -> None:
        """Keep the ids for another time. They count as added at the ends of their slices."""
        former_ms, former = self.slice_ms, self.slices
        self.window_ms, self.slice_ms, self.slices = window_ms, max(window_ms // SLICES, 1), {}
        for number in sorted(former):
            last_ms = (number + 1) * former_ms - 1
            self.slices.setdefault(last_ms // self.slice_ms, {}).update(former[number])
        self.count = sum(map(len, self.slices.values()))


class Deduplication:
    """The ids of all topics with the attribute. Ids that cannot be read at the start are unknown, which is logged."""

    def __init__(self, runtime: Runtime, topics: Topics, store: Store) -> None:
        self._limits, self._clock = runtime.limits, runtime.clock
        self._topics, self._store = topics, store
        self._ids: dict[str, TopicIds] = {}
        self._fresh: list[tuple[TopicIds, Id, int]] = []  # ids of messages that may not be committed yet
        self._count = 0  # of the ids of all topics
        self._checked_at = -1  # generation of the topics at which `_ids` has no topic without the attribute
        for topic in topics:
            if topic.has_dedup:
                for queue in store.queues_of(topic.name):
                    try:
                        self._read(topic, queue)
                    except (StoreError, OSError) as error:  # must not stop the start
                        log.error(
                            "dedup_ids_not_read", topic=topic.name, queue=queue.queue_id, error=str(error),
                            hint="messages of this queue that are sent again are stored again",
                        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, TopicIds]]:
        return iter(self._ids.items())

    def of(self, topic: TopicConfig) -> TopicIds:
        """Return the ids of a topic with the attribute."""
        if self._checked_at != self._topics.generation.number:
            self._drop_others()
        found = self._ids.get(topic.name)
        if found is None:
            identity = self._topics.identity(topic.name)
            found = self._ids[topic.name] = TopicIds(identity, duration_s(topic.dedup) * 1000)
        return found

    def _drop_others(self) -> None:
        """Drop the ids of topics that were deleted, recreated, or have the attribute no more; keep the ids of others for the
        present time."""
        self._checked_at = self._topics.generation.number
        for name, ids in list(self._ids.items()):
            topic = self._topics.get(name)
            if topic is None or not topic.has_dedup or self._topics.identity(name) != ids.identity:
                del self._ids[name]
                self._count -= ids.count
            elif (window_ms := duration_s(topic.dedup) * 1000) != ids.window_ms:
                before = ids.count
                ids.resize(window_ms)
                self._count += ids.count - before

    def find(self, ids: TopicIds, keys: Iterable[Id | None], *, is_first: bool) -> list[FirstMessage | None]:
        """Return where the messages with these ids are stored; None for an unknown id, and for a message without one.

        Args:
            is_first: True if nothing else is staged, so that what was staged before is committed or was discarded.
        """
        if is_first:
            self._fresh.clear()
        before = ids.count
        ids.expire(self._store.now_ms)
        self._count += ids.count - before
        return [None if key is None else ids.find(key) for key in keys]

    def add(self, ids: TopicIds, stored: Iterable[tuple[Id | None, FirstMessage]]) -> None:
        """Add the ids of staged messages."""
        before = ids.count
        for key, first in stored:
            if key is not None:
                ids.add(key, first, self._store.now_ms)
                self._fresh.append((ids, key, first.position))
        self._limit(ids.count - before)

    def discard(self, end: int) -> None:
        """Remove the ids of staged messages that were discarded: those from a commit log position on."""
        for ids, key, position in self._fresh:
            if position >= end:
                before = ids.count
                ids.remove(key, position)
                self._count += ids.count - before

    def _limit(self, more: int) -> None:
        """Count further ids, and forget the oldest ones of the topic with most while there are too many."""
        self._count += more
        while self._count > self._limits.max_dedup_ids:
            name, ids = max(self._ids.items(), key=lambda item: item[1].count)
            forgotten = ids.forget_oldest()
            self._count -= forgotten
            log.warning(
                "dedup_ids_forgotten", topic=name, ids=forgotten, limit=self._limits.max_dedup_ids,
                hint="repeated sends of these messages are stored again; lower `dedup` of the topic, or use more brokers",
            )  # fmt: skip

    def _read(self, topic: TopicConfig, queue: ConsumeQueue) -> None:
        """Read the ids of a queue's messages of the last window, and of no more messages than there may be ids."""
        ids, now_ms = self.of(topic), self._clock.time_ms()
        position = finish(self._store.first_not_before(queue, now_ms - ids.window_ms))
        position = max(position, queue.next - self._limits.max_dedup_ids)
        while position < queue.next:
            fetched = self._store.fetch(queue, position, BULK_PULL_MESSAGES, max_bytes=BULK_PULL_BYTES)
            position, before = fetched.next_offset, ids.count
            for record in split_records(b"".join(fetched.pieces)):
                try:
                    key = key_of(properties_in(record))
                except MessageError:
                    continue
                if key is not None:
                    stored = FirstMessage(physical_offset_in(record), queue.queue_id, offset_in(record))
                    ids.add(key, stored, store_ms_in(record))
            self._limit(ids.count - before)


def key_of(text: str) -> Id | None:
    """Return the id in a message's properties, or its digest; None without one, and for a dead letter that is replayed."""
    key = props.find(text, props.UNIQUE_KEY)
    if not key or _REPLAYED in text:
        return None
    return key if len(key) <= _ID_CHARS else blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest()
