"""Known faults of other designs, planted into ours, to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rocketlet.broker.groups.locks import Locks
from rocketlet.broker.groups.members import ConsumerGroup, Member
from rocketlet.client.consumer import Consumer
from rocketlet.client.lease import Lease
from rocketlet.client.leases import Leases
from rocketlet.client.shares import Shares
from rocketlet.protocol.bodies import ConsumerData, Queue
from rocketlet.protocol.frame import Frame


async def _no_drain(self: Consumer, queue: Queue) -> int | None:
    """A queue is given up while its handlers run."""
    item = self._queues.get(queue)
    if item is None:
        return None
    item.stop()
    return item.commit_offset


def _no_epoch(self: Locks, group: str, queue: tuple[str, int], connection: Any, epoch: int | None) -> str | None:
    """Whoever commits is believed."""
    return None


async def _commit_after_unlock(self: Leases, queue: Queue, lease: Lease) -> None:
    """The next owner asks for the offset before it is there."""
    offset = await self._user.give_queue(queue)
    await self._unlock(queue)
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


FAULTS: dict[str, list[tuple[type, str, Callable[..., Any]]]] = {
    "no-drain": [(Consumer, "give_queue", _no_drain)],
    "no-epoch": [(Locks, "commit_fault", _no_epoch)],
    "commit-after-unlock": [(Leases, "_hand_over", _commit_after_unlock)],
    "stale-list": [(Shares, "_members", _stale_list)],
    "table-overwritten": [
        (Member, "update", _table_overwritten),
        (ConsumerGroup, "subscription", _last_table),
        (ConsumerGroup, "client_ids", _everyone),
    ],
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The fault is there while the block runs; None plants none."""
    changes = FAULTS[name] if name else []
    before = [(kind, attribute, kind.__dict__[attribute]) for kind, attribute, _ in changes]
    for kind, attribute, fault in changes:
        setattr(kind, attribute, fault)
    try:
        yield
    finally:
        for kind, attribute, real in before:
            setattr(kind, attribute, real)
