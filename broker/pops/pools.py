"""The pools of all groups, found by group and topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import cast

import structlog

from ...protocol.message import offset_in, split_records
from ...protocol.names import Subscription, is_lite_queue, parent_and_name, parse_subscription
from ..groups.group import ConsumerGroup, ConsumerGroups
from ..groups.offsets import Offsets
from ..groups.settings import GroupConfigs
from ..messages.appender import Appender
from ..messages.topics import Topics
from ..runtime.runtime import Runtime
from ..store.index import ConsumeQueue
from .deliveries import Delivery, KeptQueue, PopNumbers
from .lite import GroupLiteOffsets, LeftSubscribers, LiteOffsets, LitePool, LiteQueues, is_lite_pool
from .pool import Pool, PoolOf, PoppedQueues, PoppingClients, QueueDeliveries, QueuePool, QueueSource, is_queue_pool
from .requests import TOPIC_MARK, AckStatus, Delivered, Handle, PopClient, PopRequest, decode_handle

log = structlog.get_logger("rocketlet.pops")


class Pools:
    """Every pool. A group that is bound to a parent topic has a pool of lite topics there.

    Attributes:
        all: the pools; `ConsumerGroup.pools` has those of a group by topic.
        left: the clients that have left lite pools, and may come back.
    """

    def __init__(
        self,
        runtime: Runtime,
        topics: Topics,
        appender: Appender,
        groups: ConsumerGroups,
        offsets: Offsets,
        settings: GroupConfigs,
        lite_offsets: LiteOffsets,
    ) -> None:
        self._limits = runtime.limits
        self.broker_name = groups.broker_name
        self.topics, self.groups, self._offsets, self._settings = topics, groups, offsets, settings
        self._store = appender.store
        self.clients = PoppingClients(runtime)
        self.source = QueueSource(topics, appender.store, offsets, runtime.limits)
        self.lite_offsets, self.lites = lite_offsets, lite_offsets.lites
        self.left = LeftSubscribers(self.clients, runtime.limits)
        self.all: dict[Pool, None] = {}
        self.of_topic = cast("Callable[[str], Collection[Pool]]", groups.pools_of)

    @property
    def has_unsaved_offsets(self) -> bool:
        return self._offsets.is_unsaved or self.lite_offsets.is_unsaved

    # Making

    def find(self, group: str, topic: str) -> Pool | None:
        of = self.groups.get(group)
        return cast("Pool | None", of.pools.get(topic)) if of is not None else None

    def find_queues(self, group: str, topic: str) -> QueuePool | None:
        """Return the pool of a topic's queues; None if the group has no pool of the topic, or one of lite topics."""
        pool = self.find(group, topic)
        return pool if is_queue_pool(pool) else None

    def get_or_make(self, request: PopRequest) -> QueuePool:
        """Return the pool of a receive, created if there is none. Raises LimitExceeded if the group has too many offsets."""
        pool = self.find_queues(request.group, request.topic)
        if pool is None:
            starts = list(self.source.starts(request))
            for queue, offset in starts:
                if self._offsets.get(request.group, request.topic, queue.queue_id) is None:
                    self._offsets.put(request.group, request.topic, queue.queue_id, offset)
            pool = self.make(request.group, request.topic)
            pool.queues.ready.update((queue.queue_id, None) for queue, offset in starts if offset < queue.next)
        return pool

    def make(self, group: str, topic: str) -> QueuePool:
        pool = PoolOf(self.clients, self.groups.obtain(group), topic, partial(PoppedQueues, self.source))
        self.add(pool)
        return pool

    def add(self, pool: Pool) -> None:
        assert self.find(pool.group, pool.topic) is None, "a topic has one pool in a group"
        self.all[pool] = None
        self.groups.add_pool(pool.of, pool.topic, pool)
        self.clients.note_unused(pool)

    def adopt(self, kept: KeptQueue, to_monotonic_s: Callable[[int], float]) -> QueueDeliveries | None:
        """Continue the deliveries of a queue of the last run, and return them; None if its topic was recreated since. Of a
        queue that left its pool without unfinished messages, only commit the offset; also if the group was bound to a parent
        topic since it popped the parent's queues, or is not bound any more. Raises LimitExceeded."""
        identity, group, topic, _ = kept.key
        lite_key = parent_and_name(topic) if is_lite_queue(topic) else None
        if lite_key is None:
            if self.is_bound(group, topic):
                kept.next, kept.is_yielded = kept.committed(0, kept.next), True
                kept.unfinished.clear()
            return self._adopt_queue(kept, to_monotonic_s)
        parent, name = lite_key
        lite = self.lites.get(parent, name) if self.topics.identity(parent) == identity else None
        if lite is None:
            return None
        if kept.has_left or not self.is_bound(group, parent):
            offset = self.lite_offsets.of(group, parent).get(name, 0)
            kept.next = max(offset, min(kept.committed(lite.begin, lite.next), lite.next))
            kept.is_adopted = True
            self.lite_offsets.put(group, parent, name, kept.next)
            return None
        pool = self.lite_pool(group, parent)
        deliveries = pool.queues.open_lite(lite, 0)
        deliveries.adopt(kept, to_monotonic_s)
        deliveries.reported = deliveries.committed
        pool.queues.set_offset(name, deliveries.committed)
        return deliveries

    def _adopt_queue(self, kept: KeptQueue, to_monotonic_s: Callable[[int], float]) -> QueueDeliveries | None:
        _, group, topic, queue_id = kept.key
        queue = self._store.queues.get((topic, queue_id))
        if self.topics.get(topic) is None or self.topics.identity(topic) != kept.key.identity or queue is None:
            return None
        if kept.is_ahead:
            committed = max(self._offsets.get(group, topic, queue_id) or 0, kept.committed(queue.begin, queue.next))
            self._offsets.put(group, topic, queue_id, committed)
            if committed < kept.next <= queue.next:  # else the messages were lost, and others get their offsets
                self._offsets.put_ahead(self.groups.obtain(group), topic, queue_id, kept.ahead)
                kept.is_adopted = True
            return None
        if kept.has_left:
            kept.next = max(self._offsets.get(group, topic, queue_id) or 0, min(kept.next, queue.next))
            kept.is_adopted = True
            self._offsets.put(group, topic, queue_id, kept.next)
            return None
        if kept.next > queue.next:
            log.warning(
                "offset_set_back", group=group, topic=topic, queue=queue_id, offset=kept.next, end=queue.next,
                hint="it was beyond the end of the queue",
            )  # fmt: skip
        committed = kept.committed(queue.begin, queue.next)
        self._offsets.put(group, topic, queue_id, committed)
        pool = self.find_queues(group, topic) or self.make(group, topic)
        deliveries = self.source.deliveries(pool, queue, 0)
        deliveries.adopt(kept, to_monotonic_s)
        deliveries.reported = committed
        return deliveries

    # Lite topics

    def is_bound(self, group: str, topic: str) -> bool:
        """Return True if a group is the lite group of a parent topic."""
        settings = self._settings.get(group)
        return settings is not None and settings.lite_topic == topic and self.lites.is_parent(topic)

    def lite_pool(self, group: str, parent: str) -> LitePool:
        pool = self.find_lite(group, parent)
        if pool is None:
            pool = self._new(self.groups.obtain(group), parent, self.lite_offsets.of(group, parent))
            self.add(pool)
        return pool

    def _new(self, group: ConsumerGroup, parent: str, offsets: GroupLiteOffsets) -> LitePool:
        settings = self._settings.get(group.name)
        is_wildcard = settings is not None and settings.lite_is_wildcard
        make = partial(LiteQueues, self.lite_offsets, offsets, self.source, self.left, wildcard=is_wildcard)
        return PoolOf(self.clients, group, parent, make)

    def find_lite(self, group: str, parent: str) -> LitePool | None:
        pool = self.find(group, parent)
        return pool if is_lite_pool(pool) else None

    def bound_lite_pool(self, group: str) -> LitePool | None:
        """Return the pool of a lite group, for reports; None for a group that is not bound to a parent topic. Without
        clients there may be no pool, and the one that is returned is not kept."""
        settings = self._settings.get(group)
        parent = settings.lite_topic if settings is not None else ""
        if not parent or not self.lites.is_parent(parent):
            return None
        found = self.find_lite(group, parent)
        if found is not None:
            return found
        of = self.groups.get(group) or ConsumerGroup(group, self._limits)
        return self._new(of, parent, self.lite_offsets.all.get((group, parent)) or GroupLiteOffsets())

    def lite_pools(self, parent: str | None = None) -> list[LitePool]:
        pools = self.all if parent is None else self.of_topic(parent)
        return [pool for pool in pools if is_lite_pool(pool)]

    # Deliveries

    def delivery(self, group: str, topic: str, text: str) -> tuple[QueueDeliveries, Delivery] | AckStatus:
        """Return the delivery of a receipt handle, or why there is none."""
        handle = decode_handle(text)
        if handle is None:
            return AckStatus.UNREADABLE
        if handle.broker_name != self.broker_name:
            return AckStatus.UNKNOWN
        deliveries = self.deliveries_of(group, topic, handle)
        if isinstance(deliveries, AckStatus):
            return deliveries
        if handle.offset >= deliveries.next or not handle.pop_ms:  # a delivery that was never popped has the pop time 0
            return AckStatus.UNKNOWN
        delivery = deliveries.unfinished.get(handle.offset)
        if delivery is None:
            return AckStatus.DONE
        if delivery.pop_ms != handle.pop_ms:
            return AckStatus.REDELIVERED if handle.pop_ms < delivery.pop_ms else AckStatus.UNKNOWN
        return deliveries, delivery

    def deliveries_of(self, group: str, topic: str, handle: Handle) -> QueueDeliveries | AckStatus:
        """Return the deliveries of a handle's queue or lite topic, or why there are none."""
        of_queues = self.find_queues(group, topic)
        if of_queues is not None and not (handle.lite_topic and self.lites.is_parent(topic)):
            found = of_queues.queues.deliveries.get(handle.queue_id) if handle.mark == TOPIC_MARK else None
            return AckStatus.UNKNOWN if found is None else found
        lite_key = parent_and_name(topic) if is_lite_queue(topic) else None
        if lite_key is None and handle.lite_topic and self.lites.is_parent(topic):
            lite_key = topic, handle.lite_topic  # Java's client 5.2 dead-letters without naming the lite topic
        if lite_key is None:
            return AckStatus.UNKNOWN
        pool, lite = self.find_lite(group, lite_key[0]), self.lites.get(*lite_key)
        deliveries = pool.queues.deliveries.get(lite) if pool is not None and lite is not None else None
        if deliveries is None:
            is_finished = pool is not None and handle.offset < pool.queues.offsets.get(lite_key[1], 0)
            return AckStatus.DONE if is_finished else AckStatus.UNKNOWN
        return deliveries

    def deliveries(self) -> Iterator[QueueDeliveries]:
        for pool in list(self.all):
            yield from list(pool.queues.opened())

    def peek(self, group: str, topic: str, queue_id: int | None, wanted: int) -> list[Delivered]:
        """Return messages that clients of the group would pop for the first time, up to the size of a result, without handles
        and without popping them; none of lite topics. This changes nothing. Raises the errors of reading."""
        if self.is_bound(group, topic) or self.find_lite(group, topic) is not None:
            return []
        request = PopRequest(group, topic, PopClient(""), wanted, 0, queue_id=queue_id)
        pool, of = self.find_queues(group, topic), self.groups.get(group)
        found: list[Delivered] = []
        size = 0
        for queue, offset in self.source.starts(request):
            number = queue.queue_id
            if queue_id not in (None, number) or (pool is not None and number not in pool.queues.ready):
                continue
            deliveries = pool.queues.deliveries.get(number) if pool is not None else None
            ahead = of.finished_ahead(topic, number) if of is not None else None
            position = max(deliveries.next if deliveries is not None else offset, ahead.end if ahead is not None else 0)
            for message in self._read_without_handles(queue, max(position, queue.begin), wanted - len(found)):
                size += len(message.record)
                if found and size > request.max_bytes:
                    return found
                found.append(message)
            if len(found) >= wanted:
                break
        return found

    def _read_without_handles(self, queue: ConsumeQueue, position: int, count: int) -> list[Delivered]:
        """Return messages of a queue from a position on, without handles."""
        if position >= queue.next:
            return []
        records = split_records(b"".join(self._store.fetch(queue, position, count).pieces))
        return [Delivered(record, queue.topic, queue.queue_id, offset_in(record), 1, "", 0) for record in records]

    # The end of pools

    def of_group(self, group: str) -> list[Pool]:
        of = self.groups.get(group)
        return cast("list[Pool]", list(of.pools.values())) if of is not None else []

    def remove(self, pool: Pool) -> None:
        """Remove a pool with its clients."""
        self.clients.pool_removed(pool)
        del self.all[pool]
        self.groups.remove_pool(pool.of, pool.topic, pool)

    def group_deleted(self, group: str) -> None:
        """Reset the figures of a group whose pools are removed, and whose members may stay."""
        of = self.groups.get(group)
        if of is not None:
            of.redelivered = 0

    # Reports

    def waits(self, group: str, topic: str) -> int:
        pool = self.find(group, topic)
        return len(pool.waiting) if pool is not None else 0

    def numbers(self, group: str, topic: str) -> dict[int, PopNumbers]:
        """Return the figures by queue id, for queues with deliveries. For other queues the committed offset is enough."""
        pool = self.find_queues(group, topic)
        return {} if pool is None else {queue_id: of.numbers() for queue_id, of in pool.queues.deliveries.items()}

    def full(self, group: str) -> Iterator[tuple[str, str]]:
        """Yield topic and label of the queues of which no new message is popped because too many are unfinished."""
        is_full = self.unfinished(group) >= self._limits.max_unfinished_of_group
        for pool in self.of_group(group):
            for of in pool.queues.opened():
                if of.next < of.queue.next and (is_full or len(of.unfinished) >= of.limit):
                    yield pool.topic, of.label

    def unfinished(self, group: str) -> int:
        """Return how many deliveries of a group are not finished."""
        of = self.groups.get(group)
        return of.unfinished if of is not None else 0

    def clients_of(self, group: str) -> dict[str, list[Subscription]]:
        """Return the latest subscriptions of the clients in the group's pools, by client id, and the subscribers of its lite
        pools."""
        found: dict[str, list[Subscription]] = {}
        for pool in self.of_group(group):
            for item in pool.clients.values():
                found.setdefault(item.of.client.client_id, []).append(item.wanted)
            for client in pool.queues.subscribers if is_lite_pool(pool) else ():
                found.setdefault(client.client_id, [parse_subscription(pool.topic, "*")])
        return found
