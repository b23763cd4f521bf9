"""Known faults of other designs, planted into ours, to see that the simulation finds them."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rocketlet.broker.config import HANDOVER_LEASE_S
from rocketlet.broker.groups.agreement import Agreement, Drain, Others
from rocketlet.broker.groups.claims import Allotment, Claims
from rocketlet.broker.groups.drains import Draining, Notices, Notifications
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.members import ConsumerGroup, Member
from rocketlet.broker.groups.pulling import Commits
from rocketlet.broker.remoting.connection import Connection
from rocketlet.broker.store.journals import Ledger
from rocketlet.client.consuming.queues import Assignment, ProcessQueue, Puller, QueueEvent
from rocketlet.client.errors import ConnectionFailed, RocketletError
from rocketlet.client.member import membership as shares_module
from rocketlet.client.member.leases import Leases, MemberLocks
from rocketlet.client.member.membership import Membership, Share, Shares
from rocketlet.client.member.offsets import GroupOffsets, begin_offset
from rocketlet.client.message import Lease, clock_s
from rocketlet.client.wire.cluster import Cluster
from rocketlet.protocol import group_bodies
from rocketlet.protocol.bodies import ConsumerData, Work
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from .planted_pops import POP_FAULTS


async def _no_drain(self: Assignment, queue: Queue) -> int | None:
    """A queue is given up while its handlers run."""
    process_queue = self.queues.get(queue)
    if process_queue is None:
        return None
    process_queue.stop()
    return process_queue.commit_offset


def _no_epoch(self: Locks, group: str, queue: tuple[str, int], connection: Any, epoch: int | None) -> str | None:
    """Every commit is believed."""
    return None


async def _commit_after_unlock(self: Leases, queue: Queue, lease: Lease) -> None:
    """The next owner asks for the offset before it is there."""
    offset = await self._user.give_queue(queue)
    await self._locks.unlock(queue)
    if offset is not None:
        await self._commit_one(queue, offset, lease)
    self._releasing.pop(queue, None)
    self._handing_over.pop(queue, None)
    self._end(queue, lease)
    self._wake.set()


_members = Shares._members


async def _stale_list(self: Shares, topic: str, queues: list[Queue], detail: str | None) -> Frame:
    """The first list of members is used for ever."""
    lists: dict[str, Frame] = self.__dict__.setdefault("_stale", {})
    if topic not in lists:
        lists[topic] = await _members(self, topic, queues, detail)
    return lists[topic]


_update = Member.update


def _table_overwritten(self: Member, data: ConsumerData, now_s: float) -> bool:
    """A group has one table of subscriptions, the last heartbeat's."""
    changed = _update(self, data, now_s)
    _tables[data.group] = dict(self.subscriptions)
    return changed


_tables: dict[str, Any] = {}


def _last_table(self: ConsumerGroup, connection: Any, topic: str) -> Any:
    return _tables.get(self.name, {}).get(topic)


def _everyone(self: ConsumerGroup, topic: str | None = None) -> list[str]:
    return list(dict.fromkeys(member.client_id for member in self.members.values()))


def _releasing_is_not_held(self: Leases, queue: Queue) -> Lease | None:
    """A queue that is given up is not renewed while its handlers run."""
    return self.owned.get(queue)


async def _idle_but_one(self: ProcessQueue) -> None:
    """The drain ends one message early."""
    while self.running > 1:
        await asyncio.sleep(0.001)


async def _mirrored(self: Shares, topic: str, queues: list[Queue], detail: str | None) -> Frame:
    """Some members sort the group in another order."""
    answer = await _members(self, topic, queues, detail)
    if "index" not in answer.ext or zlib.crc32(self.client_id.encode()) % 2:
        return answer
    mirrored = int(answer.ext["count"]) - 1 - int(answer.ext["index"])
    return answer._replace(ext={**answer.ext, "index": mirrored})


_of = Shares.of


async def _of_any_queues(self: Shares, topic: str, queues: list[Queue]) -> Share | None:
    """A place among members that see more queues divides those that this one sees."""
    told = self._told.get(topic)
    if told is not None and told.place is not None:
        self._told[topic] = told._replace(place=told.place._replace(queues=len(queues)))
    return await _of(self, topic, queues)


_ask_for = MemberLocks._ask
_renewed = Leases._renewed


async def _lock_anew(self: MemberLocks, connection: Any, queues: Any, epochs: Any) -> Any:
    return await _ask_for(self, connection, queues, {})


def _renewed_with_any_epoch(self: Leases, queue: Queue, lease: Lease, fresh: Lease | None) -> None:
    """A queue that another member had meanwhile is taken for the same one."""
    if fresh is not None:
        lease.epoch = fresh.epoch
    _renewed(self, queue, lease, fresh)


_lock_one = Locks._lock_one


_expiring = Locks.expiring
_kept: dict[Any, int] = {}


def _expiring_with_epoch(self: Locks) -> Work[None]:
    """A lease that has ended leaves its epoch to the next owner."""
    before = {key: lock.epoch for key, lock in self._locks.items()}
    yield from _expiring(self)
    _kept.update((key, epoch) for key, epoch in before.items() if key not in self._locks)


def _with_kept_epoch(
    self: Locks, request: Any, queue: Queue, connection: Any, now_s: float, *, has_had: bool
) -> int | None:
    key = (request.group, queue.topic, queue.queue_id)
    is_new = key not in self._locks
    epoch = _lock_one(self, request, queue, connection, now_s, has_had=has_had)
    if is_new and epoch is not None and key in _kept:
        epoch = self._locks[key].epoch = _kept.pop(key)
    return epoch


def _for_everybody(
    self: Locks, request: Any, queue: Queue, connection: Any, now_s: float, *, has_had: bool
) -> int | None:
    """A lock is given to whoever asks."""
    self._locks.pop((request.group, queue.topic, queue.queue_id), None)
    return _lock_one(self, request, queue, connection, now_s, has_had=has_had)


_open_locks = Locks.__init__


def _short_reclaim(self: Locks, *arguments: Any, **options: Any) -> None:
    """After a restart a lease lasts 5 s, while its owner believes in it for longer."""
    _open_locks(self, *arguments, **options)
    for lock in self._locks.values():
        lock.renewed_s -= HANDOVER_LEASE_S - 5


async def _leave_at_once(self: Membership) -> None:
    """A leaving member stops renewing before its handlers have ended."""
    self._has_left = True
    for task in self._tasks:
        task.cancel()
    await self._heartbeats.beat()
    await self._leases.give_all()
    await asyncio.gather(*map(self._unregister, self.cluster.masters().values()))


def _goes_on_suspended(self: ProcessQueue) -> bool:
    """A queue whose broker is away, or whose lease is over, is handled on."""
    return not self.is_stopped


async def _start_over(self: GroupOffsets, connection: Any, queue: Queue, epoch: int = 0) -> int:
    """A queue is read from its start whatever the group has committed."""
    return await begin_offset(connection, queue, "first")


def _resume_quietly(self: Assignment, queue: Queue) -> None:
    """Commits that a killed broker has forgotten are not sent again."""
    process_queue = self.queues.get(queue)
    if process_queue is not None:
        process_queue.turn(QueueEvent.RESUME)
        self._go_on(process_queue)


def _commit_ahead(self: Puller, process_queue: ProcessQueue, offset: int) -> int:
    """A pull commits what it has brought before, handled or not."""
    return process_queue.next_offset


def _highest(self: ProcessQueue) -> int:
    """The last message that is done counts, also while one before it is in its handler."""
    done = [run.messages[run.done - 1].queue_offset + 1 for run in self.runs if run.done]
    first_open: int = _first_open.__get__(self)
    return max([first_open, *done])


_first_open = ProcessQueue.__dict__["commit_offset"]


def _lost_goes_on(self: Leases, queue: Queue, reason: str) -> None:
    """A member that is told that a queue is another's reads on."""
    lease = self.owned.get(queue)
    if lease is not None:
        lease.ends_s = math.inf
        self._suspended.discard(queue)
        self._user.resume_queue(queue)


async def _keep_doubtful(self: Leases, queues: Any) -> None:
    """A lock whose answer nobody waited for is not given back."""


async def _overtake(self: MemberLocks, queue: Queue) -> None:
    """An unlock does not wait for the lock that is under way."""


def _given_at_once(self: Notices, group: ConsumerGroup, connection: Connection) -> list[str]:
    """A foreign member learns of a change while its queues are drained."""
    members = group.list_for(connection)
    member = group.foreign.get(connection)
    if member is None:
        return members.ids
    self._allotment.give(group.name, connection, member.client_id, members)
    return members.told(member.client_id)


def _write_later(self: Ledger) -> None:
    """A lease is written a moment after the member was told."""
    self._freed += self._changes
    self._changes.clear()


def _no_peers(self: Agreement, group: Any, routes: Any) -> Any:
    """Each broker drains for itself."""
    return Others({}, {})
    yield


async def _from_the_answer(self: MemberLocks, connection: Any, queues: Any, epochs: Any) -> Any:
    """A lease is counted from when its renewal was answered."""
    answer, leases = await _ask_for(self, connection, queues, epochs)
    for lease in leases.values():
        lease.ends_s += clock_s() - lease.asked_s
        lease.asked_s = clock_s()
    return answer, leases


_commit_while_ours = Leases._commit_while_ours


async def _gives_up(self: Leases, queue: Queue, offset: int, lease: Lease) -> RocketletError | None:
    """A hand-over waits 15 s for its broker."""
    try:
        async with asyncio.timeout(15):
            return await _commit_while_ours(self, queue, offset, lease)
    except TimeoutError:
        return ConnectionFailed("given up")


_group_changed = Notifications.changed


def _told_already(self: Notifications, group: ConsumerGroup) -> None:
    """A member that is being told of a change is not told of another one."""
    if not self._is_telling:
        _group_changed(self, group)


def _dropped_if_never_read(self: Drain, connection: Any, place: Any) -> list[Any]:
    """A member that has not come back to a queue counts as having dropped it."""
    rounds = self.rounds.setdefault(connection, {})
    rounds[place] = count = rounds.get(place, max(rounds.values(), default=0)) + 1
    return [other for other in self.waiting.get(connection, ()) if rounds.get(other, 0) < count]


def _late_lists_ignored(self: Notices, group: ConsumerGroup, given: Any) -> bool:
    """A list that another broker gave before the last change is not noted."""
    return _take(self, group, given) if given.is_current else False


_take = Notices.take


def _list_of_all(self: ConsumerGroup, connection: Any) -> Any:
    """Apache's members are told of all members, whoever subscribes to what."""
    return self.companions(connection)


def _no_last_reader(self: Claims, group: Any, place: Any, claims: Any) -> Iterator[Any]:
    """A member that was told of itself alone is not drained of its queues."""
    yield from ()


Fault = tuple[Any, str, Any]

FAULTS: dict[str, list[Fault]] = {
    "allotted-to-everybody": [(Allotment, "is_anothers", lambda self, *about: False)],
    "blind-newcomer": [(shares_module, "_unknown", lambda topic, queues, answer: [])],
    "commit-ahead": [(ProcessQueue, "commit_offset", property(lambda self: self.next_offset))],
    "commit-after-unlock": [(Leases, "_hand_over", _commit_after_unlock)],
    "commit-highest": [(ProcessQueue, "commit_offset", property(_highest))],
    "commit-not-repeated": [(Assignment, "resume_queue", _resume_quietly)],
    "foreign-commits-behind": [(Commits, "_stale_fault", lambda *about: None)],
    "foreign-not-drained": [(Draining, "holds_back", lambda self, connection, header: False)],
    "foreign-told-at-once": [
        (Notices, "is_kept_back", lambda self, group, connection: False),
        (Notices, "given", _given_at_once),
    ],
    "connection-loss-ignored": [(Membership, "_lost_connection", lambda self, address: None)],
    "drained-together": [(Notices, "bridge", lambda self, name, drain: None)],
    "drain-one-early": [(ProcessQueue, "idle", _idle_but_one)],
    "epoch-kept": [(Locks, "expiring", _expiring_with_epoch), (Locks, "_lock_one", _with_kept_epoch)],
    "grants-written-later": [(Ledger, "write", _write_later)],
    "hand-over-gives-up": [(Leases, "_commit_while_ours", _gives_up)],
    "lease-from-answer": [(MemberLocks, "_ask", _from_the_answer)],
    "leave-stops-renewing": [(Membership, "leave", _leave_at_once)],
    "lock-forgotten": [(Leases, "_give_back", _keep_doubtful), (MemberLocks, "abandon", lambda self, held: None)],
    "lock-for-everybody": [(Locks, "_lock_one", _for_everybody)],
    "lost-goes-on": [(Leases, "_lose", _lost_goes_on)],
    "last-reader-not-drained": [(Claims, "_last_reader", _no_last_reader)],
    "late-lists-ignored": [(Notices, "take", _late_lists_ignored)],
    "list-of-all": [(ConsumerGroup, "list_for", _list_of_all)],
    "moved-not-found": [(Cluster, "_doubt_routes", lambda self: None)],
    "no-deadline": [(Lease, "is_over", property(lambda self: False))],
    "no-drain": [(Assignment, "give_queue", _no_drain)],
    "never-read-is-dropped": [(Drain, "dropped", _dropped_if_never_read)],
    "no-epoch": [(Locks, "commit_fault", _no_epoch)],
    "no-standstill": [(Locks, "_now_s", lambda self: time.monotonic())],
    "peers-not-asked": [(Agreement, "finding_others", _no_peers)],
    "place-of-any-queues": [(Shares, "of", _of_any_queues)],
    "pull-commits-ahead": [(Puller, "_offset_to_commit", _commit_ahead)],
    "reclaim-any-epoch": [(MemberLocks, "_ask", _lock_anew), (Leases, "_renewed", _renewed_with_any_epoch)],
    "releasing-not-renewed": [(Leases, "_held", _releasing_is_not_held)],
    "retake-at-once": [(Assignment, "is_running", lambda self, queue: False)],
    "route-forgets": [(Cluster, "_with_living", lambda self, topic, route: route)],
    "settled-too-soon": [(Leases, "are_releasing", property(lambda self: False))],
    "short-reclaim": [(Locks, "__init__", _short_reclaim)],
    "sorted-differently": [(Shares, "_members", _mirrored)],
    "stale-list": [(Shares, "_members", _stale_list)],
    "start-over": [(GroupOffsets, "begin", _start_over), (group_bodies, "decode_committed", lambda body: {})],
    "suspended-goes-on": [(ProcessQueue, "may_begin", property(_goes_on_suspended))],
    "gate-stays-shut": [(Drain, "let_on", lambda self, places: None)],
    "halfway-is-told": [(Allotment, "is_halfway", lambda self, group, connection: False)],
    "not-told-again": [(Allotment, "late", lambda self, group, losing, reading: [])],
    "told-already": [(Notifications, "changed", _told_already)],
    "unlock-overtakes": [(MemberLocks, "_asked", _overtake)],
    "table-overwritten": [
        (Member, "update", _table_overwritten),
        (ConsumerGroup, "subscription", _last_table),
        (ConsumerGroup, "client_ids", _everyone),
    ],
}

# In which situation to look for those that events by chance would need many seeds for.
SCENARIO_OF = {
    "allotted-to-everybody": "foreign-of-different-topics",
    "last-reader-not-drained": "foreign-roll",
    "late-lists-ignored": "foreign-of-slow-peers",
    "drained-together": "foreign-roll",
    "list-of-all": "foreign-of-different-topics",
    "gate-stays-shut": "foreign-roll",
    "halfway-is-told": "foreign-not-reached",
    "not-told-again": "foreign-not-reached",
    "blind-newcomer": "broker-away",
    "commit-highest": "handled-out-of-order",
    "commit-not-repeated": "broker-killed",
    "epoch-kept": "member-away",
    "grants-written-later": "killed-at-hand-over",
    "foreign-commits-behind": "foreign-members",
    "foreign-not-drained": "foreign-members",
    "foreign-told-at-once": "foreign-members",
    "hand-over-gives-up": "away-in-hand-overs",
    "lease-from-answer": "frozen-at-a-request",
    "lock-forgotten": "hasty-members",
    "never-read-is-dropped": "foreign-members-of-two",
    "settled-too-soon": "long-hand-over",
    "told-already": "told-in-turns",
    "leave-stops-renewing": "long-hand-over",
    "lost-goes-on": "member-away",
    "moved-not-found": "broker-away",
    "no-deadline": "member-away",
    "no-epoch": "member-away",
    "no-standstill": "only-a-broker-stands",
    "peers-not-asked": "foreign-members-of-two",
    "place-of-any-queues": "broker-away",
    "reclaim-any-epoch": "member-away",
    "releasing-not-renewed": "long-hand-over",
    "retake-at-once": "lost-while-handled",
    "route-forgets": "broker-away",
    "short-reclaim": "unheard-restart",
    "suspended-goes-on": "member-away",
    "unlock-overtakes": "hasty-members",
}

# The seeds by which they were found last, where that was not 0. The search begins there.
FOUND_AT = {
    "allotted-to-everybody": 3,
    "blind-newcomer": 1,
    "commit-ahead": 24,
    "epoch-kept": 2,
    "foreign-commits-behind": 2,
    "foreign-not-drained": 6,
    "foreign-told-at-once": 6,
    "grants-written-later": 10,
    "halfway-is-told": 413,
    "hand-over-gives-up": 14,
    "late-lists-ignored": 79,
    "lease-from-answer": 1,
    "leave-stops-renewing": 3,
    "list-of-all": 3,
    "lost-goes-on": 6,
    "never-read-is-dropped": 9,
    "no-deadline": 1,
    "no-epoch": 2,
    "no-standstill": 5,
    "not-told-again": 10,
    "peers-not-asked": 34,
    "reclaim-any-epoch": 10,
    "route-forgets": 1,
    "stale-list": 3,
    "suspended-goes-on": 1,
    "table-overwritten": 8,
    "told-already": 18,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The fault is there while the block runs; None plants none."""
    changes = (FAULTS | POP_FAULTS)[name] if name else []
    before = [(kind, attribute, kind.__dict__[attribute]) for kind, attribute, _ in changes]
    for kind, attribute, fault in changes:
        setattr(kind, attribute, fault)
    try:
        yield
    finally:
        for kind, attribute, real in before:
            setattr(kind, attribute, real)
