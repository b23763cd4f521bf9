"""How far groups have come, as administration and metrics show it. A group without members has lag, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import structlog

from ....protocol.admin_bodies import Progress, ProgressColumns
from ....protocol.queue import Queue
from ....protocol.work import LOOKS, SLICE, Work
from ...messages.topics import Topics
from ...store.consume_queue import ConsumeQueue
from ...store.store import Store
from ..members import ConsumerGroups
from .offsets import Offsets

log = structlog.get_logger("rocketlet.groups")


class Popped(Protocol):
    """A queue that clients pop. lag_offset: as many messages lie behind it as are not finished. committed: the lowest that
    is not. in_hand: how many were popped and are not finished; it takes a look at each."""

    @property
    def lag_offset(self) -> int: ...

    @property
    def committed(self) -> int: ...

    @property
    def in_hand(self) -> int: ...


class Lag(NamedTuple):
    """Messages that a group has not committed. since_ms: when the oldest of them was stored; None without one. in_hand: how
    many of them clients have popped."""

    messages: int
    since_ms: int | None
    in_hand: int


class GroupProgress:
    """popped: for a topic that the group pops, the queues by id. Messages that are finished do not count as lag, nor do those
    that retention has deleted. `lost`: how many messages retention deleted before a group had committed them, since the
    start, by group and topic."""

    def __init__(
        self,
        broker_name: str,
        topics: Topics,
        store: Store,
        offsets: Offsets,
        groups: ConsumerGroups,
        popped: Callable[[str, str], Mapping[int, Popped]],
    ) -> None:
        self._broker_name = broker_name
        self._topics = topics
        self._store = store
        self._offsets = offsets
        self._groups = groups
        self._popped = popped
        self.lost: Counter[tuple[str, str]] = Counter()

    def _offset(
        self, group: str, topic: str, queue_id: int, queue: ConsumeQueue | None, popped: Popped | None
    ) -> tuple[int, int]:
        """The offset at which the group goes on in a queue, and how many messages were deleted before it had committed
        them."""
        begin = queue.begin if queue is not None else 0
        offset = popped.lag_offset if popped is not None else self._offsets.get(group, topic, queue_id)
        return max(offset or 0, begin), max(begin - offset, 0) if offset is not None else 0

    def _unreadable(self, group: str, topic: str) -> Iterator[tuple[int, ConsumeQueue, int]]:
        """Yield queues that may not be read any more and have messages that the group has not committed, with its offset.

        A group without an offset in such a queue has never been responsible for it."""
        count = self._topics.queues_of(topic)
        for queue_id, committed in sorted(self._offsets.of(group, topic).items()):
            queue = self._store.queues.get((topic, queue_id))
            if queue_id >= count and queue is not None and max(committed, queue.begin) < queue.next:
                yield queue_id, queue, max(committed, queue.begin)

    def of(self, group: str, topic: str) -> Iterator[tuple[Queue, Progress]]:
        """How far a group is in the queues of a topic that the broker has. Each costs a read of the disk."""
        popped = self._popped(group, topic)
        for queue_id in range(self._topics.queues_of(topic)):
            queue = self._store.queues.get((topic, queue_id))
            end, of_queue = queue.next if queue else 0, popped.get(queue_id)
            offset, lost = self._offset(group, topic, queue_id, queue, of_queue)
            in_hand = of_queue.in_hand if of_queue is not None else 0
            progress = Progress(end, offset, self._last_ms(queue, offset), lost, in_hand)
            yield Queue(topic, self._broker_name, queue_id), progress
        for queue_id, queue, offset in self._unreadable(group, topic):
            progress = Progress(queue.next, offset, self._last_ms(queue, offset))
            yield Queue(topic, self._broker_name, queue_id), progress

    def columns(self, group: str, topic: str, *, times: bool) -> Work[ProgressColumns]:
        """Like `of`, in lists. Without `times` it reads nothing."""
        found = ProgressColumns(topic, self._broker_name, [], [], [], [], [], [])
        found.unreadable.extend((queue_id, at.next, offset) for queue_id, at, offset in self._unreadable(group, topic))
        queues, popped = self._store.queues, self._popped(group, topic)
        for queue_id in range(self._topics.queues_of(topic)):
            queue, of_queue = queues.get((topic, queue_id)), popped.get(queue_id)
            offset, lost = self._offset(group, topic, queue_id, queue, of_queue)
            if lost:
                found.lost.append((queue_id, lost))
            if of_queue is not None and (in_hand := of_queue.in_hand):
                found.in_hand.append((queue_id, in_hand))
            found.broker_offsets.append(queue.next if queue else 0)
            found.consumer_offsets.append(offset)
            if times:
                found.last_ms.append(self._last_ms(queue, offset))
            if queue_id % (SLICE if times else LOOKS) == 0 or of_queue is not None:
                yield
        return found

    def _last_ms(self, queue: ConsumeQueue | None, offset: int) -> int:
        """When the last message before an offset was stored; 0 if it is not there."""
        if queue is None or not queue.begin < offset <= queue.next:
            return 0
        return self._store.store_time_ms(queue, offset - 1)

    def lag(self, group: str, topic: str) -> Work[Lag]:
        messages, in_hand, oldest_ms = 0, 0, None
        popped = self._popped(group, topic)
        for number, queue_id in enumerate(range(self._topics.queues_of(topic)), 1):
            queue, of_queue = self._store.queues.get((topic, queue_id)), popped.get(queue_id)
            offset, _ = self._offset(group, topic, queue_id, queue, of_queue)
            if queue is not None and offset < queue.next:
                messages += queue.next - offset
                first = of_queue.committed if of_queue is not None else offset
                in_hand += of_queue.in_hand if of_queue is not None else 0
                stored_ms = self._store.store_time_ms(queue, max(first, queue.begin))
                oldest_ms = stored_ms if oldest_ms is None else min(oldest_ms, stored_ms)
            if number % SLICE == 0 or of_queue is not None:
                yield
        for _, queue, offset in self._unreadable(group, topic):
            messages += queue.next - offset
            stored_ms = self._store.store_time_ms(queue, offset)
            oldest_ms = stored_ms if oldest_ms is None else min(oldest_ms, stored_ms)
        return Lag(messages, oldest_ms, in_hand)

    def noting_lost(self) -> Work[None]:
        """Names the groups that had not committed the messages of deleted segments."""
        for group in self.groups():
            online = self._groups.get(group)
            if online is not None and online.is_broadcasting:
                continue
            for topic in self._offsets.topics_of(group):
                if online is not None and topic not in online.topics:
                    continue  # its members do not subscribe to it any more
                lost = 0
                for queue_id, offset in self._offsets.of(group, topic).items():
                    queue = self._store.queues.get((topic, queue_id))
                    if queue is not None:
                        lost += max(queue.begin - max(offset, queue.former_begin), 0)
                    if queue_id % LOOKS == 0:
                        yield
                if lost:
                    self.lost[group, topic] += lost
                    hint = "keep messages longer, or add consumers to catch up; delete groups that nobody needs"
                    log.warning("messages_expired_unread", group=group, topic=topic, messages=lost, hint=hint)
            yield

    def groups(self) -> list[str]:
        """The groups with members or offsets."""
        return sorted({group.name for group in self._groups} | self._offsets.groups())

    def topics_of(self, group: str) -> list[str]:
        """Return the topics in which a group has an offset, and those its members subscribe to; none for a broadcasting
        group, whose members keep their own offsets."""
        online = self._groups.get(group)
        if online is not None and online.is_broadcasting:
            return []
        names = dict.fromkeys([*self._offsets.topics_of(group), *(online.topics if online else ())])
        return [name for name in names if self._topics.get(name) is not None]
