"""Known faults of groups that share messages, planted into ours: `python -m simulation 0 100 --shared --plant NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rocketlet.broker.groups.leases import Readers
from rocketlet.broker.groups.pulling import Commits, Pulling
from rocketlet.broker.pops.deliveries import AckStatus, Changed, Deadlines, Delivery, QueueDeliveries, decode_handle
from rocketlet.broker.pops.division import Division
from rocketlet.broker.pops.journal import Book
from rocketlet.broker.pops.pool import Pool, Pools
from rocketlet.broker.pops.pops import Pops
from rocketlet.broker.sessions import Session
from rocketlet.broker.store.journals import LeaseKey
from rocketlet.protocol.headers import PullMessage


def _ack_forgotten(self: Book, deliveries: QueueDeliveries, done: Iterable[Delivery]) -> None:
    """Acknowledgements are not on the disk when they are answered."""


_put = Deadlines.put


def _deadline_lost(self: Deadlines, deliveries: QueueDeliveries, batch: Sequence[Delivery], at_s: float) -> None:
    """Nobody looks after messages that were handed back for later."""
    if not any(delivery.is_delayed for delivery in batch):
        _put(self, deliveries, batch, at_s)


def _any_handle(
    self: Pools, broker_name: str, group: str, topic: str, text: str
) -> tuple[QueueDeliveries, Delivery] | AckStatus:
    """The handle of an earlier delivery is as good as the last one's."""
    handle = decode_handle(text)
    deliveries = self.deliveries_of(group, topic, handle) if handle is not None else None
    if handle is None or deliveries is None:
        return AckStatus.UNKNOWN
    delivery = deliveries.unfinished.get(handle.offset)
    return AckStatus.DONE if delivery is None else (deliveries, delivery)


_change = Pops.change


def _early(self: Pops, group: str, topic: str, handle: str, invisible_ms: int, **options: Any) -> Changed:
    """A message comes again when half of its time is over."""
    return _change(self, group, topic, handle, invisible_ms // 2, **options)


_settle = Division._settle


def _settled_at_once(self: Division, divided: Any, pool: Pool) -> None:
    """A queue goes to a member that pulls while its messages are in other hands."""
    for queue_id in list(pool.leaving):
        pool.leaving[queue_id] = -1000.0
        deliveries = pool.queues.get(queue_id)
        if deliveries is not None:
            for delivery in deliveries.unfinished.values():
                delivery.is_delayed = True
    _settle(self, divided, pool)


_fence = Commits.fence_fault


def _any_commit(self: Commits, *arguments: Any, may_be_tool: bool = True) -> str | None:
    """A member that pulled before a restart of the broker sets back what is popped now."""
    return _fence(self, *arguments)


def _reader_forgotten(self: Readers, key: LeaseKey, client_id: str) -> None:
    """A restarted broker does not know which queues foreign members read."""


def _any_pull(self: Pulling, session: Session, header: PullMessage) -> None:
    """A client without a heartbeat reads by the subscription of any member."""


POP_FAULTS: dict[str, list[tuple[type, str, Any]]] = {
    "pop-ack-forgotten": [(Book, "acknowledged", _ack_forgotten)],
    "pop-any-commit": [(Commits, "fence_fault", _any_commit)],
    "pop-any-handle": [(Pools, "delivery", _any_handle)],
    "pop-deadline-lost": [(Deadlines, "put", _deadline_lost)],
    "pop-early": [(Pops, "change", _early)],
    "pop-not-emptied": [(Division, "_settle", _settled_at_once)],
    "pop-any-pull": [(Pulling, "_check_member", _any_pull)],
    "pop-reader-forgotten": [(Readers, "note", _reader_forgotten)],
}
