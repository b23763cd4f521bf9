"""How far groups have come, as administration and metrics show it. A group without members has lag, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import structlog

from ...protocol.admin_bodies import ProgressColumns, QueueProgress
from ...protocol.bodies import LOOKS, SLICE, Work
from ...protocol.names import Queue
from ..groups.offsets import Offsets
from ..messages.topics import Topics
from ..store.index import ConsumeQueue
from ..store.store import Store
from .lite import LitePool
from .pool import QueueDeliveries
from .pools import Pools

log = structlog.get_logger("rocketlet.groups")


class Lag(NamedTuple):
    """Messages that a group has not finished: the unfinished messages of popped queues, and in other queues the
    messages after the committed offset. Messages that retention has deleted do not count.

    Attributes:
        since_ms: when the oldest of them was stored; None without one.
        in_flight: how many of them are in flight to clients that pop.
    """

    messages: int
    since_ms: int | None
    in_flight: int


class GroupProgress:
    """Messages that are finished do not count as lag, nor do those that retention has deleted. `lost`: how many messages
    retention deleted before a group had finished them, since the start, by group and topic. In its parent topic a lite group
    has messages of the lite topics that it has read or that its clients are subscribed to."""

    def __init__(self, topics: Topics, store: Store, offsets: Offsets, pools: Pools) -> None:
        self._topics, self._store, self._offsets, self._pools = topics, store, offsets, pools
        self._groups, self._broker_name = pools.groups, pools.broker_name

    def _popped(self, group: str, topic: str) -> Mapping[int, QueueDeliveries]:
        pool = self._pools.find_queues(group, topic)
        return pool.queues.deliveries if pool is not None else {}

    def _lite_pool(self, group: str, topic: str) -> LitePool | None:
        return self._pools.bound_lite_pool(group) if self._pools.is_bound(group, topic) else None

    def _offset(
        self, group: str, topic: str, queue_id: int, queue: ConsumeQueue | None, popped: QueueDeliveries | None
    ) -> tuple[int, int]:
        """Return the offset from which a group's lag in a queue is counted, and how many messages were deleted before
        the group had finished them.

        In a popped queue, as many messages lie after this offset as are stored and unfinished; in other queues, it is
        the committed offset, or the start of the queue if that is later.
        """
        begin = queue.begin if queue is not None else 0
        if popped is not None:
            lost = popped.unfinished_before(begin)
            return max(popped.lag_offset + lost, begin), lost
        offset = self._offsets.get(group, topic, queue_id)
        return max(offset or 0, begin), max(begin - offset, 0) if offset is not None else 0

    def _unreadable(self, group: str, topic: str) -> Iterator[tuple[int, ConsumeQueue, int]]:
        """Yield queues that may not be read any more and have messages that the group has not committed, with its offset.

        A group without an offset in such a queue has never been responsible for it."""
        count = self._topics.queues_of(topic)
        for queue_id, committed in sorted(self._offsets.of(group, topic).items()):
            queue = self._store.queues.get((topic, queue_id))
            if queue_id >= count and queue is not None and max(committed, queue.begin) < queue.next:
                yield queue_id, queue, max(committed, queue.begin)

    def columns(self, group: str, topic: str, *, times: bool) -> Work[ProgressColumns]:
        """Return the progress of a group in the queues of a topic on this broker. With `times`, each queue costs a read of
        the disk. A queue of a parent topic has messages of many lite topics, so the offset of a lite group there is the
        queue's end less the number of messages that are not finished."""
        found = ProgressColumns(topic, self._broker_name, [], [], [], [], [], [])
        pool = self._lite_pool(group, topic)
        if pool is not None:
            backlog = yield from pool.queues.backlog(0)
            for queue_id in range(self._topics.queues_of(topic)):
                at = self._store.queues.get((topic, queue_id))
                end = at.next if at is not None else 0
                found.broker_offsets.append(end)
                found.consumer_offsets.append(max(end - backlog.of_queues.get(queue_id, 0), 0))
                found.last_ms.append(0)
            return found
        found.unreadable.extend((queue_id, at.next, offset) for queue_id, at, offset in self._unreadable(group, topic))
        queues, popped = self._store.queues, self._popped(group, topic)
        for queue_id in range(self._topics.queues_of(topic)):
            queue, of_queue = queues.get((topic, queue_id)), popped.get(queue_id)
            offset, lost = self._offset(group, topic, queue_id, queue, of_queue)
            if lost:
                found.lost.append((queue_id, lost))
            if of_queue is not None and (in_flight := of_queue.in_flight):
                found.in_hand.append((queue_id, in_flight))
            found.broker_offsets.append(queue.next if queue else 0)
            found.consumer_offsets.append(offset)
            if times:
                found.last_ms.append(self._last_ms(queue, offset))
            if queue_id % (SLICE if times else LOOKS) == 0 or of_queue is not None:
                yield
        return found

    def _last_ms(self, queue: ConsumeQueue | None, offset: int) -> int:
        """Return when the last message before an offset was stored; 0 if that message is not there."""
        if queue is None or not queue.begin < offset <= queue.next:
            return 0
        return self._store.store_time_ms(queue, offset - 1)

    def rows(self, group: str, topic: str) -> Work[Iterator[tuple[Queue, QueueProgress]]]:
        """Return the progress by queue."""
        columns = yield from self.columns(group, topic, times=True)
        offsets = zip(columns.broker_offsets, columns.consumer_offsets, columns.last_ms, strict=True)
        lost, in_hand = dict(columns.lost), dict(columns.in_hand)
        found = [(at, *item, lost.get(at, 0), in_hand.get(at, 0)) for at, item in enumerate(offsets)]
        for at, end, offset in columns.unreadable:
            found.append((at, end, offset, self._last_ms(self._store.queues.get((topic, at)), offset), 0, 0))
        return ((Queue(topic, self._broker_name, at), QueueProgress(*progress)) for at, *progress in found)

    def lag(self, group: str, topic: str) -> Work[Lag]:
        pool = self._lite_pool(group, topic)
        if pool is not None:
            backlog = yield from pool.queues.backlog(0)
            return Lag(backlog.messages, backlog.oldest_ms or None, backlog.in_flight)
        messages, in_flight, oldest_ms = 0, 0, None
        popped = self._popped(group, topic)
        for number, queue_id in enumerate(range(self._topics.queues_of(topic)), 1):
            queue, of_queue = self._store.queues.get((topic, queue_id)), popped.get(queue_id)
            offset, _ = self._offset(group, topic, queue_id, queue, of_queue)
            if queue is not None and offset < queue.next:
                messages += queue.next - offset
                first = of_queue.committed if of_queue is not None else offset
                in_flight += of_queue.in_flight if of_queue is not None else 0
                stored_ms = self._store.store_time_ms(queue, max(first, queue.begin))
                oldest_ms = stored_ms if oldest_ms is None else min(oldest_ms, stored_ms)
            if number % SLICE == 0 or of_queue is not None:
                yield
        for _, queue, offset in self._unreadable(group, topic):
            messages += queue.next - offset
            stored_ms = self._store.store_time_ms(queue, offset)
            oldest_ms = stored_ms if oldest_ms is None else min(oldest_ms, stored_ms)
        return Lag(messages, oldest_ms, in_flight)

    def committed(self, group: str, topic: str) -> int:
        """Return the sum of a group's committed offsets in a topic."""
        pool = self._lite_pool(group, topic)
        return sum((pool.queues.offsets if pool is not None else self._offsets.of(group, topic)).values())

    def noting_lost(self) -> Work[None]:
        """Count and log the messages of deleted segments that groups had not finished, except those of broadcasting
        groups and of topics to which a group's members do not subscribe any more."""
        for group in self.groups():
            online = self._groups.online(group)
            if online is not None and online.is_broadcasting:
                continue
            for topic in self._offsets.topics_of(group):
                if online is not None and topic not in online.topics:
                    continue  # the group's members do not subscribe to this topic any more
                loser = self._groups.get(group)
                item = loser.offsets.get(topic) if loser is not None else None
                if loser is None or item is None:
                    continue  # the group or the topic was deleted meanwhile
                lost, popped = 0, self._popped(group, topic)
                for queue_id, offset in list(item.offsets.items()):
                    queue, of_queue = self._store.queues.get((topic, queue_id)), popped.get(queue_id)
                    if queue is not None and of_queue is not None:
                        before = of_queue.unfinished_before(queue.former_begin)
                        lost += of_queue.unfinished_before(queue.begin) - before
                    elif queue is not None:
                        lost += max(queue.begin - max(offset, queue.former_begin), 0)
                    if queue_id % LOOKS == 0:
                        yield
                if lost and loser.offsets.get(topic) is item:  # neither was deleted meanwhile
                    item.lost += lost
                    loser.has_lost = True
                    hint = "keep messages longer, or add consumers to catch up; delete groups that are not needed"
                    log.warning("messages_expired_unread", group=group, topic=topic, messages=lost, hint=hint)
            yield

    def lost(self) -> Iterator[tuple[str, str, int]]:
        """Yield how many messages retention deleted before a group had finished them, since the start, by group and
        topic."""
        for group in self._groups:
            for topic, item in group.offsets.items() if group.has_lost else ():
                if item.lost:
                    yield group.name, topic, item.lost
        for (name, parent), offsets in self._pools.lite_offsets.all.items():
            if offsets.lost:
                yield name, parent, offsets.lost

    def groups(self) -> list[str]:
        """Return the groups with members or offsets."""
        own = (group.name for group in self._groups if group.members or group.offsets)
        of_lite = (group for group, parent in self._pools.lite_offsets.all if self._pools.is_bound(group, parent))
        return sorted({*own, *of_lite})

    def topics_of(self, group: str) -> list[str]:
        """Return the existing topics in which a group has an offset, or to which its members subscribe; none for a
        broadcasting group, whose members keep their own offsets."""
        pool, online = self._pools.bound_lite_pool(group), self._groups.online(group)
        own = [pool.topic] if pool is not None else []
        if online is not None and online.is_broadcasting:
            return own
        names = dict.fromkeys([*own, *self._offsets.topics_of(group), *(online.topics if online else ())])
        return [name for name in names if name in own or self._topics.get(name) is not None]
