"""Lite topics in groups: offsets, deliveries in order, and the lite topics that each client is subscribed to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, TypeGuard

import orjson
import structlog
from msgspec import Struct

from ...protocol.admin_bodies import LiteTopicLag
from ...protocol.bodies import SLICE, Work, joined, shaped
from ...protocol.message import Record, decode_record
from ..config import LITE_READS, LITE_SUBSCRIPTION_BYTES, LITE_SYNC_S, MAX_POP_MESSAGES, LimitExceeded, Limits
from ..messages.lite import LiteTopic, LiteTopics
from ..messages.topics import Topics
from ..runtime.jobs import Job, run
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from ..sessions.shares import AddressShares
from ..store.files import Damaged, StoreFull, replace_state
from ..store.index import ConsumeQueue
from .deliveries import DeliveriesOf, Delivery, DeliveryState, PopPart, ReadDelivery
from .pool import Pool, PoolOf, PoppingClients, QueueDeliveries, QueueSource, Receive, firsts
from .requests import PopClient, PopRequest

log = structlog.get_logger("rocketlet.lite")


# ------------------------------------------------------------------------------
# The offsets of groups in lite topics. Offsets in lite topics are kept apart from offsets in queues, because a group
# may have 100,000 of them, each of which takes about 100 bytes here.


_GROUPS_IN_TUPLE: Final = 8  # groups with an offset in a lite topic that a tuple has; a list is larger


class Payer(NamedTuple):
    """The client for which an offset counts (`AddressShares`)."""

    address: str
    account: str = ""


NOBODY: Final = Payer("")  # the offsets of an earlier run count for no client


class GroupLiteOffsets(dict[str, int]):
    """The committed offsets of a group in the lite topics of a parent topic, by the lite topic's name.

    Attributes:
        lost: how many messages expired before the group had finished them, since the start.
        payers: for which clients these offsets count, and how many for each. Which of them are whose is not kept.
    """

    __slots__ = ("lost", "payers")

    def __init__(self, offsets: Mapping[str, int] = MappingProxyType({})) -> None:
        super().__init__(offsets)
        self.lost = 0
        self.payers: Counter[Payer] = Counter()


class _SavedOffsets(Struct):
    """The state file's entry of a group in the lite topics of a parent topic: the id of the parent, and offsets by lite
    topic."""

    identity: str
    offsets: dict[str, int]


class LiteOffsets:
    """The committed offsets of all groups in lite topics, by group and parent topic.

    Attributes:
        is_unsaved: True while offsets are saved, and after a save that failed or was cancelled.
    """

    def __init__(self, runtime: Runtime, lites: LiteTopics, topics: Topics) -> None:
        self._shares = AddressShares(runtime.limits.max_lite_offsets)
        self._topics = topics
        self.lites = lites
        self._file = file = lites.file
        self._dirty = False
        self.is_unsaved = False
        self.all: dict[tuple[str, str], GroupLiteOffsets] = {}
        of_parent: dict[str, list[GroupLiteOffsets]] = {}
        runtime.adoption.each("lite offsets", file.offsets.items(), self._adopt)
        for (_, parent), offsets in self.all.items():
            of_parent.setdefault(parent, []).append(offsets)
        for line in file.deleted:
            if line.identity == topics.identity(line.parent):
                for offsets in of_parent.get(line.parent, ()):
                    offsets.pop(line.name, None)
        file.clear()
        for group, parent in list(self.all):
            stored, kept = self.all[group, parent], GroupLiteOffsets()
            self._clamp(lites, group, parent, stored)
            for name, offset in stored.items():
                kept[self._note_group(group, parent, name)] = offset
                self._pay(kept, NOBODY)
            self.all[group, parent] = kept
        if lites.is_truncated:
            self._dirty = True
            try:
                run(self.saving(is_synced=True))
            except StoreFull as error:
                log.error("save_failed", reason=str(error))

    def _adopt(self, entry: tuple[str, object]) -> None:
        """Adopt the offsets of a group in the lite topics of a parent topic."""
        key, kept = entry
        parent, _, group = key.partition("@")
        saved = shaped(kept, _SavedOffsets)
        if group and saved.identity == self._topics.identity(parent) and self._topics.get(parent) is not None:
            self.all[group, parent] = GroupLiteOffsets(saved.offsets)

    def _clamp(self, lites: LiteTopics, group: str, parent: str, offsets: dict[str, int]) -> None:
        """Remove the offsets of lite topics that are gone, and set back offsets after messages that were lost."""
        for name, offset in list(offsets.items()):
            lite = lites.get(parent, name)
            if lite is None:
                del offsets[name]
            elif offset > lite.next:
                log.warning(
                    "offset_set_back", group=group, topic=parent, lite_topic=name, offset=offset, end=lite.next,
                    hint="it was beyond the end of the lite topic",
                )  # fmt: skip
                offsets[name] = lite.next

    def of(self, group: str, parent: str) -> GroupLiteOffsets:
        """Return the offsets of a group in the lite topics of a parent topic, created if there are none."""
        found = self.all.get((group, parent))
        if found is None:
            found = self.all[group, parent] = GroupLiteOffsets()
        return found

    @property
    def count(self) -> int:
        """How many offsets there are."""
        return self._shares.count

    def put(self, group: str, parent: str, name: str, offset: int, payer: Payer = NOBODY) -> None:
        """Commit a group's offset in a lite topic. The first one counts for the client that opens it."""
        offsets = self.of(group, parent)
        if name not in offsets:
            name = self._note_group(group, parent, name)
            self._pay(offsets, payer)
        offsets[name] = offset
        self._dirty = True

    def _pay(self, offsets: GroupLiteOffsets, payer: Payer) -> None:
        self._shares.acquire(*payer)
        offsets.payers[payer] += 1

    def check_room(self, offsets: GroupLiteOffsets, name: str, payer: Payer) -> None:
        """Raises LimitExceeded if a group has no offset in a lite topic, and cannot get one because there are too many, of
        all clients or of the address or account of this one."""
        if name not in offsets and not self._shares.has_room(payer.address, account=payer.account):
            raise LimitExceeded(
                f"this broker keeps {self._shares.most} offsets of groups in lite topics, half of them for one "
                "address or account; delete groups that are not needed, or set an expiration for the parent topics"
            )

    def _note_group(self, group: str, parent: str, name: str) -> str:
        """Note in a lite topic that a group has an offset there, so that its deletion looks for these groups only. Return the
        lite topic's own name, so that the offsets of all groups share one object."""
        lite = self.lites.get(parent, name)
        if lite is None:
            return name
        groups = lite.groups
        if isinstance(groups, tuple) and len(groups) < _GROUPS_IN_TUPLE:
            lite.groups = groups if group in groups else (*groups, group)
            return lite.name
        if isinstance(groups, tuple) or len(groups).bit_count() == 1:  # so that deleted groups do not accumulate
            groups = lite.groups = [known for known in dict.fromkeys(groups) if (known, parent) in self.all]
        groups.append(group)
        return lite.name

    def delete(self, lite: LiteTopic) -> None:
        """Delete a lite topic with the offsets of all groups in it, first on the disk. Raises StoreFull; nothing is deleted
        then."""
        self.lites.delete(lite)
        self._dirty = True
        for group in lite.groups:
            offsets = self.all.get((group, lite.queue.topic))
            if offsets is not None and offsets.pop(lite.name, None) is not None:
                payer = next(iter(offsets.payers))
                self._shares.release(payer.address, account=payer.account)
                offsets.payers[payer] -= 1
                if not offsets.payers[payer]:
                    del offsets.payers[payer]

    def topic_deleted(self, parent: str) -> None:
        for key in [key for key in self.all if key[1] == parent]:
            self._delete(key)

    def group_deleted(self, group: str) -> None:
        for key in [key for key in self.all if key[0] == group]:
            self._delete(key)

    def _delete(self, key: tuple[str, str]) -> None:
        for payer, count in self.all.pop(key).payers.items():
            self._shares.release(payer.address, count, payer.account)
        self._dirty = True

    def saving(self, is_synced: bool) -> Job[None]:
        """Save all offsets and deletions, if any has changed. Raises StoreFull; the next call retries."""
        if not (self._dirty or self.is_unsaved):
            return
        self._dirty, self.is_unsaved = False, True  # until it is written, also if this save is cancelled
        yield from self._file.journal.shortening(self._saving(is_synced))
        self.is_unsaved = False

    def _saving(self, is_synced: bool) -> Job[None]:
        # First: an offset must not be saved with the identity of a topic that was recreated meanwhile.
        known = [(key, self._topics.identity(key[1]), offsets) for key, offsets in self.all.items()]
        parts = yield from self.lites.deletions()
        for (group, parent), identity, offsets in known:
            if self.all.get((group, parent)) is offsets:  # else deleted meanwhile
                items = (orjson.dumps(name) + b":%d" % offset for name, offset in list(offsets.items()))
                content = yield from joined(items)
                key = orjson.dumps(f"{parent}@{group}")
                parts.append(b'%b:{"identity":%b,"offsets":{%b}}' % (key, orjson.dumps(identity), content))
        yield partial(replace_state, self._file.path, b"{%b}" % b",".join(parts), sync=is_synced)


class LiteMessages:
    """The messages of a lite topic, and the progress of a group there."""

    def __init__(self, queues: LiteQueues, lite: LiteTopic) -> None:
        self.queue = lite
        self.lite_topic = lite.name
        self._queues = queues

    @property
    def offset(self) -> int:
        return self._queues.offsets.get(self.lite_topic, 0)

    def commit(self, offset: int) -> None:
        self._queues.set_offset(self.lite_topic, offset)

    def record(self, offset: int) -> bytes | None:
        return self._queues.of_all.lites.record(self.queue, offset)

    def message(self, offset: int) -> Record:
        record = self.record(offset)
        if record is None:
            raise Damaged(f"message {offset} of the lite topic {self.lite_topic} is damaged or lost")
        return decode_record(record)

    def read(self, position: int, count: int, request: PopRequest, room: int) -> tuple[list[ReadDelivery], int, int]:
        """Return up to `count` messages, of whatever tag."""
        found: list[ReadDelivery] = []
        size = 0
        for _ in range(MAX_POP_MESSAGES):
            position = self.queue.readable_from(position)
            if len(found) >= count or position >= self.queue.next:
                break
            record = self.record(position)
            if record is not None:
                if found and size + len(record) > room:
                    break
                size += len(record)
                found.append(ReadDelivery(Delivery(position), record))
            position += 1
        return found, size, position


# ------------------------------------------------------------------------------
# The clients of a lite group, and what each of them is subscribed to.
#
# A client that is subscribed to a lite topic with messages has it among its *ready* ones. A receive of the client tries
# these only. So neither a message nor a receive scans lite topics without new messages.
#
# A client may subscribe to a lite topic before its first message, so subscriptions are kept by name. Deliveries end with
# the lite topic, so one that is recreated by the same name starts without them.


class LiteSubscriber:
    """A client of a lite group.

    Attributes:
        names: the lite topics that it is subscribed to.
        ready: those of them that may have a message, the one served longest ago first. Clients that receive from all lite
            topics share one.
        held: its messages in flight, and some that are settled or returned already.
        waiting: its receives that wait.
        address: the address from which it first synchronized its subscriptions, which count for this address.
        synced_s: when it last synchronized its subscriptions, or joined without them.
        is_syncing: True while a synchronization of it is carried out in pieces.
        has_left: True once the client has left. The subscriptions are then removed in pieces, and a client that comes back
            meanwhile is another subscriber.
    """

    __slots__ = (
        "_charged_bytes",
        "address",
        "client",
        "has_left",
        "held",
        "is_syncing",
        "names",
        "ready",
        "session",
        "synced_s",
        "waiting",
    )

    def __init__(self, client: PopClient) -> None:
        self.client = client
        self.names: dict[str, None] = {}
        self.ready: OrderedDict[LiteTopic, None] = OrderedDict()
        self.held: dict[Delivery, None] = {}
        self.waiting: OrderedDict[Receive, None] = OrderedDict()
        self.address = ""
        self.synced_s = 0.0
        self.is_syncing = False
        self.has_left = False
        self.session: Session | None = None
        self._charged_bytes = 0

    def holds(self) -> int:
        """Return how many messages it has in flight, except those that it has returned to be redelivered later."""
        for delivery in list(self.held):
            is_in_flight = delivery.state is DeliveryState.IN_FLIGHT and not delivery.is_delayed
            if not is_in_flight or delivery.client != self.client:
                del self.held[delivery]
        return len(self.held)

    def pay(self) -> None:
        """Charge its session, if it has one, for its subscriptions."""
        size = LITE_SUBSCRIPTION_BYTES * len(self.names)
        if self.session is not None and size != self._charged_bytes:
            self.session.charge(size - self._charged_bytes)
            self._charged_bytes = size

    def stop_paying(self) -> None:
        if self.session is not None:
            self.session.charge(-self._charged_bytes)
        self.session, self._charged_bytes = None, 0


class LiteQueues:
    """The lite topics of a parent topic in the pool of a lite group.

    Attributes:
        deliveries: the deliveries by lite topic, for lite topics that a receive has tried.
        offsets: the group's committed offsets by name.
        subscribers: the clients that have synchronized their subscriptions, or have waited for messages without that.
        is_wildcard: True if clients receive from every lite topic.
        is_scanned: True once a scan for lite topics with messages has begun, which only a wildcard group needs.
        awaited: the number of its entries in `LeftSubscribers.since_s`.
        idle: deliveries that are not needed now, in the order in which they were finished.
        is_in_order: False, because a lite topic is in order whatever the group's settings are (`QueueDeliveries.is_lite`).
    """

    is_divided = is_in_order = False

    def __init__(
        self,
        of_all: LiteOffsets,
        offsets: GroupLiteOffsets,
        source: QueueSource,
        left: LeftSubscribers,
        pool: LitePool,
        *,
        wildcard: bool,
    ) -> None:
        self.pool = pool
        self._source, self._left, self._all_clients = source, left, pool.all_clients
        self.group, self.topic = pool.group, pool.topic
        self.deliveries: dict[LiteTopic, QueueDeliveries] = {}
        self._lites = of_all.lites
        self.of_all = of_all
        self.offsets = offsets
        self.subscribers: dict[PopClient, LiteSubscriber] = {}
        self._of_name: dict[str, LiteSubscriber | dict[LiteSubscriber, None]] = {}
        # those with something ready and a receive that waits
        self._serveable: OrderedDict[LiteSubscriber, None] = OrderedDict()
        self.idle: OrderedDict[QueueDeliveries, None] = OrderedDict()
        self.is_wildcard = wildcard
        self._all_ready: OrderedDict[LiteTopic, None] = OrderedDict()
        self.is_scanned = False
        self.awaited = 0

    def set_offset(self, name: str, offset: int, payer: Payer = NOBODY) -> None:
        """Commit the group's offset in a lite topic."""
        self.of_all.put(self.group, self.topic, name, offset, payer)

    def allows(self, request: PopRequest) -> int:
        """Return how many messages a receive may pop, so that its client, if it is a subscriber, has up to
        `max_unfinished_of_lite_client` in flight that it has not delayed."""
        subscriber, most = self.subscribers.get(request.client), self._source.limits.max_unfinished_of_lite_client
        if subscriber is not None and len(subscriber.held) + request.count > most:
            most = max(most - subscriber.holds(), 0)
        return min(request.count, most)

    def delivered(self, client: PopClient, deliveries: Iterable[Delivery]) -> None:
        subscriber = self.subscribers.get(client)
        if subscriber is not None:
            subscriber.held.update(dict.fromkeys(deliveries))

    def scan(self, serve: Callable[[LitePool], None]) -> Work[None]:
        """Find the lite topics that have messages, some at a time, and serve the receives that wait for them. Messages that
        arrive meanwhile make their lite topics ready on their own."""
        self.is_scanned, ready = True, self._all_ready
        for number, lite in enumerate(list(self._lites.of(self.topic).values()), 1):
            if ready is not self._all_ready:  # the settings have changed
                return
            if lite not in ready and self._lites.get(self.topic, lite.name) is lite and self.has_news(lite):
                ready[lite] = None
            if number % SLICE == 0:
                self._serve_all(serve)
                yield
        self._serve_all(serve)

    def _serve_all(self, serve: Callable[[LitePool], None]) -> None:
        for subscriber in self.subscribers.values():
            self._note_serveable(subscriber)
        serve(self.pool)

    @property
    def is_pinned(self) -> bool:
        """True while the pool has subscribers, or awaits some that have left, so that it is not removed."""
        return bool(self.subscribers) or self.awaited > 0

    def opened(self) -> Collection[QueueDeliveries]:
        return self.deliveries.values()

    def remove(self, deliveries: QueueDeliveries) -> None:
        del self.deliveries[_lite_of(deliveries)]
        self.idle.pop(deliveries, None)

    def rest(self) -> int:
        return 0

    def make_ready(self) -> None:
        """Do nothing, because a subscription and a scan find which lite topics have messages."""

    def has(self, lite: LiteTopic) -> bool:
        """Return True if the group has read a lite topic, or may because clients are subscribed to it or receive from all."""
        name = lite.name
        return self.is_wildcard or name in self._of_name or name in self.offsets or lite in self.deliveries

    # Readiness

    def has_news(self, lite: LiteTopic) -> bool:
        """Return True if a receive may find a message in a lite topic."""
        deliveries = self.deliveries.get(lite)
        if deliveries is not None:
            return deliveries.is_ready
        return max(self.offsets.get(lite.name, 0), lite.begin) < lite.next

    def subscribers_of(self, name: str) -> Collection[LiteSubscriber]:
        if self.is_wildcard:
            return self.subscribers.values()
        found = self._of_name.get(name, {})
        return (found,) if isinstance(found, LiteSubscriber) else found.keys()

    def offer(self, lite: LiteTopic) -> None:
        """Find whether a lite topic has a message, for the clients that are subscribed to it."""
        self._set_ready(lite, is_ready=self.has_news(lite))

    def _set_ready(self, lite: LiteTopic, *, is_ready: bool) -> None:
        if self.is_wildcard and (lite in self._all_ready) is not is_ready:
            if is_ready:
                self._all_ready[lite] = None
            else:
                del self._all_ready[lite]
        for subscriber in self.subscribers_of(lite.name):
            if self.is_wildcard:
                pass
            elif is_ready:
                subscriber.ready[lite] = None
            else:
                subscriber.ready.pop(lite, None)
            self._note_serveable(subscriber)

    def lite_deleted(self, lite: LiteTopic) -> None:
        """Remove a deleted lite topic from those that are ready."""
        self._set_ready(lite, is_ready=False)

    def _note_serveable(self, subscriber: LiteSubscriber) -> None:
        if subscriber.ready and subscriber.waiting:
            self._serveable[subscriber] = None
        else:
            self._serveable.pop(subscriber, None)

    def tried(self, request: PopRequest) -> Iterator[tuple[QueueDeliveries, PopPart]]:
        """Yield the deliveries of lite topics that may have a message. Raises LimitExceeded if the group cannot have another
        offset in the first of them; the next receive then begins with another one."""
        subscriber = self.subscribers.get(request.client)
        for number, lite in enumerate(firsts(subscriber.ready) if subscriber is not None else ()):
            try:
                deliveries = self._open(lite, request)
            except LimitExceeded:
                for other in self.subscribers_of(lite.name):
                    if lite in other.ready:
                        other.ready.move_to_end(lite)
                if number:
                    return
                raise
            yield deliveries, PopPart.ALL

    def _open(self, lite: LiteTopic, request: PopRequest) -> QueueDeliveries:
        """Return the deliveries of a lite topic. Raises LimitExceeded."""
        found = self.deliveries.get(lite)
        if found is None:
            session = request.session
            payer = Payer(session.address, request.client.owner) if session is not None else NOBODY
            self.of_all.check_room(self.offsets, lite.name, payer)
            start = self.offsets.get(lite.name, 0)
            self.set_offset(lite.name, start, payer)  # takes the place of the offset that acknowledgements will commit
            found = self.open_lite(lite, start)
        return found

    def open_lite(self, lite: LiteTopic, start: int) -> QueueDeliveries:
        """Return the new deliveries of a lite topic that the pool has not read yet."""
        source = self._source
        found: QueueDeliveries = DeliveriesOf(
            source.next_number(), self.pool, LiteMessages(self, lite), start, source.limits
        )
        self.deliveries[lite] = found
        self.pool.pay()
        return found

    def has_some(self, request: PopRequest) -> bool:
        subscriber = self.subscribers.get(request.client)
        return subscriber is not None and bool(subscriber.ready)

    def rotate(self, deliveries: QueueDeliveries) -> None:
        lite = _lite_of(deliveries)
        is_ready = self.has_news(lite)
        self._set_ready(lite, is_ready=is_ready)
        if is_ready:
            for subscriber in self.subscribers_of(lite.name):
                subscriber.ready.move_to_end(lite)
        if deliveries.unfinished or is_ready:
            self.idle.pop(deliveries, None)
        else:
            self.idle[deliveries] = None

    refresh = rotate

    def held(self, receive: Receive) -> None:
        subscriber = self.join(receive.request.client)
        subscriber.waiting[receive] = None
        self._note_serveable(subscriber)

    def ended(self, receive: Receive) -> None:
        subscriber = self.subscribers.get(receive.request.client)
        if subscriber is not None:
            subscriber.waiting.pop(receive, None)
            self._note_serveable(subscriber)

    def next_receive(self) -> Receive | None:
        subscriber = next(iter(self._serveable), None)
        return next(iter(subscriber.waiting), None) if subscriber is not None else None

    # Subscriptions

    def join(self, client: PopClient) -> LiteSubscriber:
        """Return the subscriber of a client, created without subscriptions if there is none."""
        found = self.subscribers.get(client)
        if found is None:
            found = self.subscribers[client] = LiteSubscriber(client)
            self._all_clients.obtain(client).lite_pools[self.pool] = None
            if self.is_wildcard:
                found.ready = self._all_ready
            found.synced_s = self._all_clients.now_s()
        return found

    def subscribe(self, subscriber: LiteSubscriber, name: str) -> None:
        if name in subscriber.names:
            return
        subscriber.names[name] = None
        found = self._of_name.get(name)
        if found is None:
            self._of_name[name] = subscriber
        elif isinstance(found, dict):
            found[subscriber] = None
        else:
            self._of_name[name] = {found: None, subscriber: None}
        lite = self._lites.get(self.topic, name)
        if lite is not None and self.has_news(lite):
            subscriber.ready[lite] = None
            self._note_serveable(subscriber)

    def unsubscribe(self, subscriber: LiteSubscriber, name: str) -> None:
        if name not in subscriber.names:
            return
        del subscriber.names[name]
        lite = self._lites.get(self.topic, name)
        if lite is not None and not self.is_wildcard:
            subscriber.ready.pop(lite, None)
            self._note_serveable(subscriber)
        found = self._of_name.get(name)
        if found is subscriber:
            del self._of_name[name]
        elif isinstance(found, dict):
            found.pop(subscriber, None)
            if len(found) == 1:
                self._of_name[name] = next(iter(found))

    def leave(self, client: PopClient) -> LiteSubscriber | None:
        """Take a client out of the pool, and return its subscriber, whose subscriptions the caller removes; None if it is no
        subscriber. Its messages in flight stay in flight. If it has waiting receives, it joins again, with none."""
        subscriber = self.subscribers.pop(client, None)
        if subscriber is None:
            return None
        subscriber.has_left, subscriber.ready = True, OrderedDict()
        subscriber.stop_paying()
        self._serveable.pop(subscriber, None)
        if self.is_wildcard and self._may_return(subscriber):
            self._left.note(self.pool, None)
        if subscriber.waiting:
            staying = self.join(client)
            staying.waiting, staying.held = subscriber.waiting, subscriber.held
            subscriber.waiting = OrderedDict()
            self._note_serveable(staying)
            return subscriber
        of_client = self._all_clients.all[client]
        del of_client.lite_pools[self.pool]
        self._all_clients.remove_if_idle(of_client)
        if not self.pool.clients:
            self._all_clients.note_unused(self.pool)
        return subscriber

    def _may_return(self, subscriber: LiteSubscriber) -> bool:
        return self._all_clients.now_s() - subscriber.synced_s < LITE_SYNC_S

    def remove_left(self, subscriber: LiteSubscriber, name: str) -> None:
        """Remove one of the subscriptions of a client that has left. If the client may come back, and its group has not
        finished the lite topic, keep the lite topic for LITE_SYNC_S."""
        self.unsubscribe(subscriber, name)
        lite = self._lites.get(self.topic, name)
        if lite is not None and self._may_return(subscriber) and self.lag(lite):
            self._left.note(self.pool, lite)

    def remove_subscriptions(self) -> list[tuple[LiteSubscriber, int]]:
        """Remove the subscriptions of all subscribers, because the pool is deleted. Return their number by subscriber."""
        counts = [(subscriber, len(subscriber.names)) for subscriber in self.subscribers.values()]
        for subscriber, _ in counts:
            subscriber.names.clear()
            self.leave(subscriber.client)
        self._of_name.clear()
        return counts

    def set_wildcard(self, *, is_wildcard: bool) -> None:
        """Apply the group's setting: True if its clients receive from every lite topic."""
        if is_wildcard is self.is_wildcard:
            return
        self.is_wildcard, self.is_scanned = is_wildcard, False
        self._all_ready = OrderedDict()
        for subscriber in self.subscribers.values():
            subscriber.ready = self._all_ready if is_wildcard else self._ready_of(subscriber)
            self._note_serveable(subscriber)

    def _ready_of(self, subscriber: LiteSubscriber) -> OrderedDict[LiteTopic, None]:
        lites = map(self._lites.of(self.topic).get, subscriber.names)
        return OrderedDict((lite, None) for lite in lites if lite is not None and self.has_news(lite))

    def is_awaited(self, lite: LiteTopic) -> bool:
        """Return True if a client that was subscribed to a lite topic has left so recently that it may come back, and its
        group had messages of the lite topic left."""
        left_s = self._left.since_s.get((self.pool, None if self.is_wildcard else lite))
        return left_s is not None and self._all_clients.now_s() - left_s < LITE_SYNC_S

    # Reports

    def lag(self, lite: LiteTopic) -> int:
        """Return how many messages of a lite topic the group has not finished."""
        deliveries = self.deliveries.get(lite)
        if deliveries is not None:
            return max(lite.next - max(deliveries.next, lite.begin), 0) + len(deliveries.unfinished)
        return max(lite.next - max(self.offsets.get(lite.name, 0), lite.begin), 0)

    def lost(self, lite: LiteTopic, end: int) -> int:
        """Return how many messages from `lite.counted` to before an offset the group has not finished; 0 if it has not read
        the lite topic and no client is subscribed."""
        deliveries = self.deliveries.get(lite)
        if deliveries is not None:
            return deliveries.unfinished_before(end) - deliveries.unfinished_before(lite.counted)
        is_known = lite.name in self.offsets or bool(self.subscribers_of(lite.name))
        return max(end - max(self.offsets.get(lite.name, 0), lite.counted), 0) if is_known else 0

    def committed(self, lite: LiteTopic) -> int:
        """Return the lowest offset in a lite topic that the group has not finished."""
        deliveries = self.deliveries.get(lite)
        offset = deliveries.committed if deliveries is not None else self.offsets.get(lite.name, 0)
        return max(offset, lite.begin)

    def lag_of(self, lite: LiteTopic) -> LiteTopicLag:
        """Return what the group has not finished in a lite topic. It costs up to two reads of the disk."""
        lag, first, waiting = self.lag(lite), self.committed(lite), self._deliverable(lite)
        oldest_ms = waiting_ms = self._lites.stored_ms(lite, first) if lag else 0
        if waiting != first:
            waiting_ms = self._lites.stored_ms(lite, waiting) if waiting is not None else 0
        deliveries = self.deliveries.get(lite)
        in_flight = deliveries.in_flight if deliveries is not None else 0
        return LiteTopicLag(lite.name, lag, oldest_ms, in_flight, waiting_ms)

    def _deliverable(self, lite: LiteTopic) -> int | None:
        """Return the offset of the first message that is not in flight; None if there is none, or if an earlier message
        was returned to be redelivered later, because later messages wait for it as its client wants."""
        deliveries = self.deliveries.get(lite)
        if deliveries is None:
            waiting = self.committed(lite)
        else:
            for item in deliveries.unfinished.values():
                if item.state is DeliveryState.VISIBLE:
                    return item.offset
                if item.is_delayed:
                    return None
            waiting = max(deliveries.next, lite.begin)
        return waiting if waiting < lite.next else None

    def backlog(self, most: int) -> Work[LiteBacklog]:
        """Return what the group has not finished in the lite topics that it has read or that its clients are subscribed to;
        in all, if they receive from all.
        The number of reads of the disk depends on `most` and on the queues of the parent topic, not on the lite topics.

        Args:
            most: how many lite topics are listed.
        """
        of_topic = self._lites.of(self.topic)
        known = self.offsets, (lite.name for lite in self.deliveries), self._of_name
        names = of_topic if self.is_wildcard else dict.fromkeys(chain.from_iterable(known))
        messages, topics, of_queues = 0, 0, dict[int, int]()
        longest: list[tuple[int, int, LiteTopic]] = []
        oldest, unread = _EarliestOfQueues(most), _EarliestOfQueues(most)
        stuck, in_order = _EarliestOfQueues(most), _EarliestOfQueues(most)
        for number, name in enumerate(list(names), 1):
            lite = of_topic.get(name)
            lag = self.lag(lite) if lite is not None else 0
            if lite is not None and lag:
                topics += 1
                messages += lag
                of_queues[lite.queue.queue_id] = of_queues.get(lite.queue.queue_id, 0) + lag
                oldest.add(lite, self.committed(lite))
                if most:
                    heappush(longest, (lag, number, lite))
                    if len(longest) > most:
                        heappop(longest)
                    waiting = self._deliverable(lite)
                    if waiting is not None:
                        subscribed = stuck if self.has_news(lite) else in_order
                        (subscribed if self.subscribers_of(name) else unread).add(lite, waiting)
            if number % SLICE == 0:
                yield
        in_flight = self.pool.counts[DeliveryState.IN_FLIGHT]
        oldest_ms = yield from self._lites.earliest_ms(oldest.first_offsets)
        of_oldest = yield from self._lags(oldest.lites())
        of_oldest.sort(key=lambda lag: lag.oldest_ms)
        waiting_lags: list[list[LiteTopicLag]] = []
        for waiting_lites in (stuck, in_order, unread):
            lags = yield from self._lags(waiting_lites.lites())
            waiting_lags.append(sorted(lags, key=lambda lag: lag.waiting_ms))
        of_stuck, of_in_order, of_unread = waiting_lags
        of_longest = yield from self._lags(lite for *_, lite in sorted(longest, reverse=True))
        of_oldest, of_stuck, of_unread = of_oldest[:most], [*of_stuck, *of_in_order][:most], of_unread[:most]
        return LiteBacklog(
            messages, topics, oldest_ms, in_flight, of_queues, of_longest, of_oldest, of_stuck, of_unread
        )

    def _lags(self, lites: Iterable[LiteTopic]) -> Work[list[LiteTopicLag]]:
        """Return what the group has not finished in lite topics, except those that it has finished meanwhile."""
        found: list[LiteTopicLag] = []
        for number, lite in enumerate(lites, 1):
            lag = self.lag_of(lite)
            if lag.messages:
                found.append(lag)
            if number % LITE_READS == 0:
                yield
        return found


def _lite_of(deliveries: QueueDeliveries) -> LiteTopic:
    assert isinstance(deliveries.queue, LiteTopic), "the queues of a lite pool are lite topics"
    return deliveries.queue


LitePool: TypeAlias = PoolOf[LiteQueues]


def is_lite_pool(pool: Pool | None) -> TypeGuard[LitePool]:
    """Return True if the queues of a pool are lite topics."""
    return pool is not None and isinstance(pool.queues, LiteQueues)


class _EarliestOfQueues:
    """The lite topics with the earliest messages of each queue of a parent topic. Messages of a queue are stored in the
    order of their offsets, so their times need not be read.

    Args:
        most: how many lite topics of each queue are kept.

    Attributes:
        first_offsets: the offset of the earliest message in each queue. It remains if the group finishes it meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.first_offsets: dict[ConsumeQueue, int] = {}
        self._of_queues: dict[int, list[tuple[int, LiteTopic]]] = {}

    def add(self, lite: LiteTopic, offset: int) -> None:
        """Add a lite topic, with the offset of a message in it."""
        offsets = map(lite.parent_offset, range(offset, lite.next))
        first = next((found for found in offsets if found is not None), None)
        if first is not None:  # else all messages are lost
            self.first_offsets[lite.queue] = min(first, self.first_offsets.get(lite.queue, first))
            kept = self._of_queues.setdefault(lite.queue.queue_id, [])
            heappush(kept, (-first, lite))
            if len(kept) > self._most:
                heappop(kept)

    def lites(self) -> list[LiteTopic]:
        return [lite for kept in self._of_queues.values() for _, lite in kept]


class LiteBacklog(NamedTuple):
    """What a group has not finished in all lite topics.

    Attributes:
        topics: the number of lite topics with such messages.
        oldest_ms: when the oldest of the messages was stored, or 0.
        in_flight: how many of them are in flight.
        of_queues: their number by the id of the parent topic's queue.
        longest: the lite topics with most of them, the first one has most.
        oldest: the lite topics with the oldest ones, the first one has the oldest.
        stuck: the lite topics with a subscriber and a message that is not in flight: first those whose next message could
            be delivered now, then those whose next message waits for one in flight. The oldest is the first of each.
        unread: the lite topics without a subscriber and with a message that is not in flight, the oldest first.
    """

    messages: int
    topics: int
    oldest_ms: int
    in_flight: int
    of_queues: dict[int, int]
    longest: list[LiteTopicLag]
    oldest: list[LiteTopicLag]
    stuck: list[LiteTopicLag]
    unread: list[LiteTopicLag]


class LeftSubscribers:
    """The clients that have left lite pools, and may come back.

    Attributes:
        since_s: when a client last left that was subscribed to a lite topic in which its group has unfinished messages, in
            this order, by pool and lite topic. None stands for all lite topics of a wildcard group's pool.
    """

    def __init__(self, clients: PoppingClients, limits: Limits) -> None:
        self._clients, self._limits = clients, limits
        self.since_s: OrderedDict[tuple[LitePool, LiteTopic | None], float] = OrderedDict()

    def note(self, pool: LitePool, lite: LiteTopic | None) -> None:
        """Record that a client has left that was subscribed to a lite topic, or to all."""
        pool.queues.awaited += (pool, lite) not in self.since_s
        self.since_s[pool, lite] = self._clients.now_s()
        self.since_s.move_to_end((pool, lite))
        if len(self.since_s) > self._limits.max_lite_subscriptions:
            self._forget_first()

    def forget(self) -> None:
        """Forget the clients that have left too long ago to be awaited."""
        before_s = self._clients.now_s() - LITE_SYNC_S
        while self.since_s and next(iter(self.since_s.values())) <= before_s:
            self._forget_first()

    def _forget_first(self) -> None:
        (pool, _), _ = self.since_s.popitem(last=False)
        pool.queues.awaited -= 1
        if not pool.queues.awaited and not pool.clients and pool.of.pools.get(pool.topic) is pool:
            self._clients.note_unused(pool)
