"""Subscriptions of clients to lite topics, and the expiration of lite topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from ...protocol.bodies import (
    LITE_BIND,
    LITE_RESET_EXCLUSIVE,
    LITE_RESET_UNSUBSCRIBED,
    LOOKS,
    NO_EXPIRATION,
    SLICE,
    GroupConfig,
    TopicConfig,
    Work,
)
from ...protocol.config import MAX_SYNCED_LITE_TOPICS
from ...protocol.group_bodies import LiteAction, LiteOffset, OffsetPolicy
from ...protocol.names import lite_name_fault
from ..config import LITE_EXPIRED_AT_ONCE, LITE_SYNC_S, LITE_SYNCED_NAME_BYTES, MAX_NAMED_CHARS
from ..groups.settings import GroupConfigs
from ..messages.lite import LiteTopic
from ..runtime.clock import Clock, SingleTimer
from ..runtime.runtime import Runtime
from ..sessions.events import LiteTaken
from ..sessions.refusal import Reason, Refusal
from ..sessions.session import Session
from ..sessions.shares import AddressShares
from ..store.files import StoreFull
from .lite import LitePool, LiteSubscriber, Payer, is_lite_pool
from .pools import Pools
from .requests import PopClient

log = structlog.get_logger("rocketlet.lite")


# ------------------------------------------------------------------------------
# Subscriptions, as SyncLiteSubscription and LITE_SUBSCRIPTION_CTL change them.


class LiteSync(NamedTuple):
    """A request to change the subscriptions of a client. The protocol server has checked the names of topic and
    group."""

    client: PopClient
    session: Session
    group: str
    parent: str
    action: LiteAction
    names: Collection[str]
    offset: LiteOffset | None = None


_LAST: Final = LiteOffset(OffsetPolicy.LAST)
_REMOVALS: Final = (LiteAction.PARTIAL_REMOVE, LiteAction.COMPLETE_REMOVE)
_Left = list[tuple[LitePool, LiteSubscriber]]  # clients that have left a pool


class LiteOwner(Protocol):
    """The part of `Pops` that serves lite pools and ends the deliveries of lite topics."""

    def serve(self, pool: LitePool) -> None:
        """Serve the receives that wait, because the pool may have a message."""

    def lite_pool(self, group: str, parent: str) -> LitePool:
        """Return the pool of a lite group, created if there is none."""

    def lite_offset_reset(self, pool: LitePool, lite: LiteTopic) -> None:
        """Continue from the offset that was set for a lite topic."""

    def end_lite(self, pool: LitePool, lite: LiteTopic) -> None:
        """End the group's deliveries of a deleted lite topic."""


class LiteSubscriptions:
    """The subscriptions of all lite groups."""

    def __init__(
        self,
        runtime: Runtime,
        settings: GroupConfigs,
        pools: Pools,
        pops: LiteOwner,
    ) -> None:
        self._clock: Clock = runtime.clock
        self._limits = runtime.limits
        self._settings = settings
        self._pools = pools
        self._pops = pops
        self._turns = runtime.turns
        self._second = -1
        self._synced = AddressShares(0)  # the synchronizations in the current second
        self._shares = AddressShares(runtime.limits.max_lite_subscriptions)

    @property
    def count(self) -> int:
        """The number of subscriptions, including those of clients that have left until they are removed."""
        return self._shares.count

    def bind(self, name: str, topic: str) -> GroupConfig:
        """Return the settings of the lite group of a parent topic. Where groups are created automatically, bind the group to
        the topic if it is bound to none and has no members or offsets. Raises Refusal, LimitExceeded."""
        if self._pools.topics.get(topic) is None:
            hint = f"create it with `rocketlet topics create {topic} --lite`"
            raise Refusal(Reason.NO_TOPIC, f"No topic route info of {topic}: {hint}")
        if not self._pools.lites.is_parent(topic):
            hint = "lite consumers need a topic of the type LITE, such as `rocketlet topics create NAME --lite` makes"
            raise Refusal(Reason.NOT_LITE, f"the topic {topic} is not of the type LITE: {hint}")
        group = self._settings.ensure(name)
        if group is None:
            raise Refusal(Reason.NO_GROUP, f"the group {name} does not exist: create it first")
        if not group.lite_topic and self._settings.auto_create and not self._has_members_or_offsets(name):
            group = msgspec.structs.replace(group, attributes={**group.attributes, LITE_BIND: topic})
            self._settings.put(group)
            log.info("group_bound", group=name, topic=topic)
        if group.lite_topic != topic:
            now = f"bound to {group.lite_topic}" if group.lite_topic else "not a lite group"
            hint = f"use another group, or set its attribute {LITE_BIND}"
            raise Refusal(Reason.NOT_LITE, f"the group {name} is {now}, not bound to {topic}: {hint}")
        return group

    def group_of(self, name: str, topic: str, action: LiteAction) -> GroupConfig | None:
        """Return the settings of the lite group of a parent topic, whose subscriptions a client changes. A group that does
        not exist is not created to remove subscriptions; None is returned for it. Raises Refusal, LimitExceeded."""
        if action not in _REMOVALS:
            return self.bind(name, topic)
        return self.check_bound(name, topic) if self._settings.get(name) is not None else None

    def _has_members_or_offsets(self, name: str) -> bool:
        group = self._pools.groups.get(name)
        return group is not None and bool(group.members or group.offsets)

    def offer_all(self, pool: LitePool, client_id: str) -> Work[None]:
        """Find again which lite topics have messages, for a client or for all, and serve the receives that wait."""
        for subscriber in list(pool.queues.subscribers.values()):
            if client_id in ("", subscriber.client.client_id):
                names = [lite.name for lite in subscriber.ready] if pool.queues.is_wildcard else list(subscriber.names)
                for number, name in enumerate(names, 1):
                    lite = self._pools.lites.get(pool.topic, name)
                    if lite is not None:
                        pool.queues.offer(lite)
                    if number % SLICE == 0:
                        yield
        self._pops.serve(pool)

    def check_bound(self, group: str, parent: str) -> GroupConfig:
        """Return the settings of the lite group of a parent topic. Raises Refusal if the group is not that."""
        settings = self._settings.get(group)
        if settings is None or settings.lite_topic != parent or not self._pools.lites.is_parent(parent):
            raise Refusal(Reason.NOT_LITE, f"the group {group[:MAX_NAMED_CHARS]} is not bound to {parent}")
        return settings

    def _check(self, change: LiteSync) -> Work[None]:
        """Check what does not depend on the state of groups and topics. Raises Refusal."""
        if len(change.names) > MAX_SYNCED_LITE_TOPICS:
            reason = f"the request has {len(change.names)} lite topics; expected up to {MAX_SYNCED_LITE_TOPICS}"
            raise Refusal(Reason.TOO_MANY_LITE_SUBSCRIPTIONS, reason)
        if change.action in (LiteAction.PARTIAL_ADD, LiteAction.COMPLETE_ADD):
            for number, name in enumerate(change.names, 1):
                if fault := lite_name_fault(name):
                    raise Refusal(Reason.ILLEGAL_LITE_TOPIC, fault)
                if number % LOOKS == 0:
                    yield
        if change.offset is not None and change.offset.value < 0:
            policy, value = change.offset
            raise Refusal(Reason.ILLEGAL_OFFSET, f"{policy.name.lower()}: got {value}; expected 0 or more")

    def sync(self, change: LiteSync) -> Work[None]:
        """Change the subscriptions of a client, some at a time, after its earlier changes; a removal of all ends these.
        Raises Refusal."""
        second = int(self._clock.monotonic_s())
        if second != self._second:
            self._second, self._synced = second, AddressShares(self._limits.max_lite_syncs_per_s)
        synced, address = self._synced, change.session.address
        if not synced.has_room(address):
            limit = f"the broker synchronizes subscriptions {synced.most} times a second, half of them for one address"
            raise Refusal(Reason.BUSY, f"{limit}; retry in a second")
        synced.acquire(address)
        size = LITE_SYNCED_NAME_BYTES * len(change.names)
        change.session.charge(size)
        try:
            yield from self._sync(change)
        except Refusal:
            synced.release(address)  # a refused request does not count
            raise
        finally:
            change.session.charge(-size)

    def _sync(self, change: LiteSync) -> Work[None]:
        yield from self._check(change)
        # From here on the group and the topic may be gone, and a removal of subscriptions creates nothing.
        if change.action is LiteAction.COMPLETE_REMOVE:
            left = self._left(change.client, change.group)
            self._remove_all(left)  # outside of this request, whose connection may be lost meanwhile
            while any(subscriber.names for _, subscriber in left):
                yield
            return
        if change.session.is_closed:  # since the names were checked, so nothing would remove the subscriptions later
            return
        group = self.check_bound(change.group, change.parent)
        while (known := self._subscriber(change)) is not None and known.is_syncing:
            yield
            if change.session.is_closed:
                return
            group = self.check_bound(change.group, change.parent)
        if change.action is LiteAction.PARTIAL_REMOVE and known is None:
            return
        pool = self._pool_of(group, change)
        if group.lite_is_wildcard and change.action is LiteAction.PARTIAL_ADD:
            reason = f"clients of the group {group.name} receive from every lite topic; synchronize an empty set"
            raise Refusal(Reason.ILLEGAL, reason)
        self._check_quota(group, pool, change)
        subscriber = pool.queues.join(change.client)
        subscriber.address = subscriber.address or change.session.address
        subscriber.synced_s = self._clock.monotonic_s()
        if subscriber.session is not change.session:
            subscriber.stop_paying()
            subscriber.session = change.session
        if not group.lite_is_wildcard:
            subscriber.is_syncing = True
            try:
                for number, _ in enumerate(self._changes(group, pool, subscriber, change), 1):
                    if number % SLICE == 0:
                        subscriber.pay()
                        yield
                        if subscriber.has_left:  # meanwhile the client or the group has gone
                            return
            finally:
                subscriber.is_syncing = False
                subscriber.pay()
        if pool.queues.is_wildcard and not pool.queues.is_scanned:
            self._turns.do(pool.queues.scan(self._pops.serve))
        else:
            self._pops.serve(pool)

    def _subscriber(self, change: LiteSync) -> LiteSubscriber | None:
        pool = self._pools.find_lite(change.group, change.parent)
        return pool.queues.subscribers.get(change.client) if pool is not None else None

    def _pool_of(self, group: GroupConfig, change: LiteSync) -> LitePool:
        pool = self._pops.lite_pool(group.name, change.parent)
        pool.queues.set_wildcard(is_wildcard=group.lite_is_wildcard)
        return pool

    def _check_quota(self, group: GroupConfig, pool: LitePool, change: LiteSync) -> None:
        if change.action is LiteAction.PARTIAL_REMOVE or group.lite_is_wildcard:
            return
        subscriber = pool.queues.subscribers.get(change.client)
        held = subscriber.names if subscriber is not None else {}
        is_whole = change.action is LiteAction.COMPLETE_ADD
        wanted = len(change.names) if is_whole else len(held) + sum(name not in held for name in change.names)
        if wanted <= len(held):
            return
        if 0 <= group.lite_quota < wanted:
            reason = f"the client subscribes to {wanted} lite topics; the group {group.name} allows {group.lite_quota}"
            raise Refusal(Reason.TOO_MANY_LITE_SUBSCRIPTIONS, reason)
        address = subscriber.address if subscriber is not None and subscriber.address else change.session.address
        self._check_room(address, change.client.owner, wanted - len(held))

    def _check_room(self, address: str, account: str, more: int = 1) -> None:
        if not self._shares.has_room(address, more, account):
            most = self._shares.most
            reason = (
                f"this broker has up to {most} subscriptions to lite topics, half of them of one address or account"
            )
            raise Refusal(Reason.TOO_MANY_LITE_SUBSCRIPTIONS, f"{reason}; unsubscribe from some, or use another broker")

    def _changes(
        self, group: GroupConfig, pool: LitePool, subscriber: LiteSubscriber, change: LiteSync
    ) -> Iterator[None]:
        if change.action is LiteAction.COMPLETE_ADD:
            if change.names == subscriber.names.keys():
                return  # the usual case
            wanted = dict.fromkeys(change.names)
            for name in [name for name in subscriber.names if name not in wanted]:
                self._remove(pool, subscriber, name)
                yield
            for name in wanted:
                if group.lite_is_exclusive:
                    self._take_over(pool, subscriber, name)
                if group.lite_is_exclusive and _others(pool, subscriber, name):
                    _notify(group, subscriber, name)
                else:
                    self._add(pool, subscriber, name)
                yield
            return
        for name in change.names:
            if change.action is LiteAction.PARTIAL_REMOVE:
                if self._remove(pool, subscriber, name) and group.resets_lite(LITE_RESET_UNSUBSCRIBED):
                    self._set_offset(pool, subscriber, name, LiteOffset(OffsetPolicy.MIN))
            else:
                if group.lite_is_exclusive:
                    self._evict(group, pool, subscriber, name)
                self._set_offset(pool, subscriber, name, change.offset or _LAST)
                self._add(pool, subscriber, name)
            yield

    def _add(self, pool: LitePool, subscriber: LiteSubscriber, name: str) -> None:
        if name not in subscriber.names:
            self._check_room(subscriber.address, subscriber.client.owner)  # others may have subscribed meanwhile
            pool.queues.subscribe(subscriber, name)
            self._shares.acquire(subscriber.address, subscriber.client.owner)

    def _remove(self, pool: LitePool, subscriber: LiteSubscriber, name: str) -> bool:
        """Remove a subscription. Return False if the client did not have it."""
        if name not in subscriber.names:
            return False
        pool.queues.unsubscribe(subscriber, name)
        self._give_back(subscriber)
        return True

    def _take_over(self, pool: LitePool, subscriber: LiteSubscriber, name: str) -> None:
        """Take a lite topic of an exclusive group from an earlier connection of the same client. The client is not
        notified, because it would remove the lite topic from its set."""
        for other in _others(pool, subscriber, name):
            if subscriber.client.is_reconnect_of(other.client):
                self._take_from(pool, other, name)

    def _take_from(self, pool: LitePool, other: LiteSubscriber, name: str) -> None:
        pool.queues.unsubscribe(other, name)
        other.pay()
        self._give_back(other)

    def _evict(self, group: GroupConfig, pool: LitePool, subscriber: LiteSubscriber, name: str) -> None:
        """Take a lite topic from the client of an exclusive group that has it. Messages that the previous client has in
        flight stay in flight to it, unless the group's settings reset the offset on a change of clients."""
        self._take_over(pool, subscriber, name)
        for other in _others(pool, subscriber, name):
            self._take_from(pool, other, name)
            if group.resets_lite(LITE_RESET_EXCLUSIVE):
                self._set_offset(pool, subscriber, name, LiteOffset(OffsetPolicy.MIN))
            _notify(group, other, name)

    def _set_offset(self, pool: LitePool, subscriber: LiteSubscriber, name: str, option: LiteOffset) -> None:
        """Set the group's offset in a lite topic that has messages, for a client. If the offset changes or the group has
        deliveries there, receipt handles from before no longer acknowledge anything. Raises LimitExceeded."""
        policy, value = option
        lite = self._pools.lites.of(pool.topic).get(name)
        if policy is OffsetPolicy.LAST or lite is None:
            return
        begin, end = lite.begin, lite.next
        committed = pool.queues.offsets.get(name)
        offset = {
            OffsetPolicy.MIN: lambda: begin,
            OffsetPolicy.MAX: lambda: end,
            OffsetPolicy.OFFSET: lambda: min(value, end),
            OffsetPolicy.TAIL: lambda: (end if committed is None else committed) - value,
            OffsetPolicy.TIMESTAMP: lambda: self._pools.lites.first_not_before(lite, value),
        }[policy]()
        offset = max(offset, begin)
        if offset != max(committed or 0, begin) or lite in pool.queues.deliveries:
            payer = Payer(subscriber.address, subscriber.client.owner)
            self._pools.lite_offsets.check_room(pool.queues.offsets, name, payer)
            pool.queues.set_offset(name, offset, payer)
            self._pops.lite_offset_reset(pool, lite)

    # Clients that are gone

    def client_gone(self, client: PopClient) -> None:
        """Remove the subscriptions of a client, some at a time."""
        self._remove_all(self._left(client))

    def _left(self, client: PopClient, group: str | None = None) -> _Left:
        """Take a client out of the lite pools of one group or of all, and return these with its subscribers."""
        found = self._pools.clients.all.get(client)
        pools = [pool for pool in found.lite_pools if is_lite_pool(pool)] if found is not None else []
        left = [(pool, pool.queues.leave(client)) for pool in pools if group in (None, pool.group)]
        return [(pool, subscriber) for pool, subscriber in left if subscriber is not None]

    def _remove_all(self, left: _Left) -> None:
        if left:
            self._turns.do(self._removing_left(left))

    def _removing_left(self, left: _Left) -> Work[None]:
        """Remove the subscriptions of clients that have left, some at a time."""
        for pool, subscriber in left:
            for number, name in enumerate(list(subscriber.names), 1):
                if name in subscriber.names:  # else removed meanwhile
                    pool.queues.remove_left(subscriber, name)
                    self._give_back(subscriber)
                if number % SLICE == 0:
                    yield
            yield

    def pool_deleted(self, pool: LitePool) -> None:
        """Remove the subscriptions of a pool whose group or parent topic is deleted."""
        for subscriber, count in pool.queues.remove_subscriptions():
            self._give_back(subscriber, count)

    def _give_back(self, subscriber: LiteSubscriber, count: int = 1) -> None:
        self._shares.release(subscriber.address, count, subscriber.client.owner)

    def expire(self) -> None:
        """Remove the subscriptions of clients that have not synchronized them for LITE_SYNC_S."""
        before_s = self._clock.monotonic_s() - LITE_SYNC_S
        for pool in self._pools.lite_pools():
            silent = [client for client, item in pool.queues.subscribers.items() if item.synced_s < before_s]
            left = [(pool, pool.queues.leave(client)) for client in silent]
            self._remove_all([(pool, subscriber) for pool, subscriber in left if subscriber is not None])


def _others(pool: LitePool, subscriber: LiteSubscriber, name: str) -> list[LiteSubscriber]:
    return [other for other in pool.queues.subscribers_of(name) if other is not subscriber and not other.has_left]


def _notify(group: GroupConfig, subscriber: LiteSubscriber, name: str) -> None:
    """Notify a client that another client has a lite topic of an exclusive group."""
    if subscriber.session is not None:
        subscriber.session.send_event(LiteTaken(group.name, name, subscriber.client.client_id))


# ------------------------------------------------------------------------------
# Expiration: if the parent topic has an expiration time, a lite topic that got no message for this time is deleted.
#
# While a client is subscribed whose group has messages of it left, it is kept until the group has finished them, or
# retention deletes them. Otherwise the messages that a group has not finished are counted and reported.
#
# A client that was connected needs some time to come back. So a lite topic is kept for LITE_SYNC_S after such a client has
# left. Which clients an earlier run of the broker had is unknown, so a lite topic without a message since the start of the
# broker is kept for LITE_SYNC_S from the start, except after an upgrade (`_delete_returned`).


class LiteExpiry:
    """Deletes lite topics that have expired, or of which retention has left no message.

    Attributes:
        expired: how many were deleted since the start.
    """

    def __init__(self, runtime: Runtime, pools: Pools, pops: LiteOwner) -> None:
        self._clock: Clock = runtime.clock
        self._topics = pools.topics
        self._lites = pools.lites
        self._pools = pools
        self._pops = pops
        # They had expired at the last check, but a group whose client is subscribed or may come back had messages left, or
        # the disk refused the deletion.
        self._kept: dict[LiteTopic, None] = {}
        self._is_refused = False  # True if the disk refused the last deletion, which was logged
        self._timer = SingleTimer(self._clock, self._fire)
        self._is_stopped = False
        self._started_ms = self._clock.time_ms()
        self.expired = 0

    def start(self) -> None:
        self._started_ms = self._clock.time_ms()
        self._set_timer()

    def stop(self) -> None:
        self._is_stopped = True
        self._timer.cancel()

    def appended(self, lites: Iterable[LiteTopic]) -> None:
        """Keep lite topics with new messages no longer, and set the timer for their expiration if none is set."""
        for lite in lites if self._kept else ():
            self._kept.pop(lite, None)
        if not self._timer.is_set and any(self._minutes(lite.queue.topic) != NO_EXPIRATION for lite in lites):
            self._set_timer()

    def settings_changed(self, topic: TopicConfig) -> None:
        """Set the timer again if a topic with lite topics is new or has other settings."""
        if topic.is_lite:
            self._set_timer()

    def _minutes(self, parent: str) -> int:
        """Return for how long lite topics of a topic are kept without a message, or NO_EXPIRATION."""
        topic = self._topics.get(parent)
        return topic.lite_expiration_min if topic is not None and topic.is_lite else NO_EXPIRATION

    def _expires_ms(self, lite: LiteTopic) -> int | None:
        minutes = self._minutes(lite.queue.topic)
        return None if minutes == NO_EXPIRATION else self._lites.last_ms(lite) + minutes * 60_000

    def _deadline_ms(self, lite: LiteTopic) -> int | None:
        """Return when a lite topic may be deleted; None if it does not expire."""
        expires_ms = self._expires_ms(lite)
        if expires_ms is None or self._lites.last_ms(lite) >= self._started_ms:
            return expires_ms
        return max(expires_ms, self._started_ms + round(LITE_SYNC_S * 1000))

    def _first_ms(self, lites: Mapping[str, LiteTopic]) -> int | None:
        """Return when the next lite topic of a parent topic expires, except those that are kept."""
        first = next((lite for lite in lites.values() if lite not in self._kept), None)
        return None if first is None else self._deadline_ms(first)

    def _set_timer(self) -> None:
        self._timer.cancel()
        firsts = map(self._first_ms, self._lites.by_parent())
        due_ms = min((time_ms for time_ms in firsts if time_ms is not None), default=None)
        if due_ms is not None and not self._is_stopped:
            self._timer.set(max(due_ms - self._clock.time_ms(), 0) / 1000)

    def _fire(self) -> None:
        try:
            left, now_ms = LITE_EXPIRED_AT_ONCE, self._clock.time_ms()
            for lites in self._lites.by_parent():
                due_ms = self._first_ms(lites)
                if due_ms is not None and due_ms <= now_ms:  # else only kept ones are due, and would use up `left`
                    left -= self._expire_some(lites, left, now_ms)
        except Exception:
            log.exception("lite_topics_not_expired")
        else:
            self._set_timer()

    def _expire_some(self, of_parent: dict[str, LiteTopic], most: int, now_ms: int) -> int:
        """Delete lite topics of a parent topic that have expired, or keep them. Return how many there were."""
        count = min(most, len(of_parent))
        for number in range(count):
            lite = next(iter(of_parent.values()))
            due_ms = self._deadline_ms(lite)
            if due_ms is None or due_ms > now_ms:
                return number
            if self.is_needed(lite) or not self.delete(lite):
                of_parent[lite.name] = of_parent.pop(lite.name)
                self._kept[lite] = None
        return count

    def check_kept(self) -> None:
        """Check again up to LITE_EXPIRED_AT_ONCE of the lite topics that were kept: delete those without messages, and those
        that have expired and that no group needs any more."""
        self._pools.left.forget()
        for lite in list(islice(self._kept, LITE_EXPIRED_AT_ONCE)):
            del self._kept[lite]
            if lite.begin == lite.next:
                self.delete(lite)
            elif self.is_needed(lite):
                self._kept[lite] = None  # now the last one
            else:
                self.finished(lite)

    def is_needed(self, lite: LiteTopic) -> bool:
        """Return True if a client is subscribed, or may come back, whose group has not finished the messages."""
        return any(
            (pool.queues.subscribers_of(lite.name) or pool.queues.is_awaited(lite)) and pool.queues.lag(lite)
            for pool in self._pools.lite_pools(lite.queue.topic)
        )

    def _readers(self, lite: LiteTopic) -> list[LitePool]:
        """Return the pools of a parent topic. For a bound group without one that has an offset in the lite topic, a pool is
        created."""
        parent = lite.queue.topic
        for group in lite.groups:  # a group without members has no pool
            if self._pools.is_bound(group, parent):
                self._pops.lite_pool(group, parent)
        return self._pools.lite_pools(parent)

    def finished(self, lite: LiteTopic) -> None:
        """Delete a lite topic, all of whose messages a group has finished, if it has expired and no other group needs it."""
        due_ms = self._deadline_ms(lite)
        if due_ms is not None and due_ms <= self._clock.time_ms() and not self.is_needed(lite):
            self.delete(lite)

    def delete(self, lite: LiteTopic) -> bool:
        """Delete a lite topic, with the offsets and deliveries of all groups, and report the messages that a group has not
        finished. Return False if the disk refuses the deletion."""
        parent = lite.queue.topic
        pools = [pool for pool in self._readers(lite) if pool.queues.has(lite)]
        of_pools = [(pool, pool.queues.lost(lite, lite.next)) for pool in pools]
        try:
            self._pools.lite_offsets.delete(lite)
        except StoreFull as error:
            if not self._is_refused:
                log.error("lite_topic_not_deleted", topic=parent, lite_topic=lite.name, reason=str(error))
            self._is_refused = True
            self._kept[lite] = None
            return False
        self._is_refused = False
        for pool, lost in of_pools:
            if lost:
                pool.queues.offsets.lost += lost
                hint = "they were not consumed in time; set a longer lite.topic.expiration"
                log.warning(
                    "lite_topic_expired_unread",
                    group=pool.group, topic=parent, lite_topic=lite.name, messages=lost, hint=hint,
                )  # fmt: skip
        self._kept.pop(lite, None)
        for pool in pools:
            self._pops.end_lite(pool, lite)
        self.expired += 1
        log.debug("lite_topic_deleted", topic=parent, lite_topic=lite.name)
        return True

    def topic_deleted(self, parent: str) -> None:
        for lite in [lite for lite in self._kept if lite.queue.topic == parent]:
            del self._kept[lite]

    def retained(self) -> Work[None]:
        """Count the messages deleted by retention that groups had not finished, and delete lite topics that have none left,
        some at a time."""
        for parent in self._lites.parents:
            lost: Counter[str] = Counter()
            shortened = yield from self._lites.shortened(parent)
            for number, lite in enumerate(shortened, 1):
                if self._lites.get(parent, lite.name) is lite:  # else deleted meanwhile
                    begin = lite.begin
                    for pool in self._readers(lite):
                        messages = pool.queues.lost(lite, begin)
                        pool.queues.offsets.lost += messages
                        lost[pool.group] += messages
                    lite.counted = begin
                    if begin == lite.next:
                        self.delete(lite)
                if number % SLICE == 0:
                    yield
            for group, messages in (+lost).items():
                hint = "keep messages longer, or add consumers to catch up; delete groups that are not needed"
                log.warning("messages_expired_unread", group=group, topic=parent, messages=messages, hint=hint)
