"""The shares of a topic whose readers all use STICKY: the broker shares the queues out, because it costs every member the
list of all owners to do so itself, and that grows with the square of the members.

The members ask the first broker of a topic, so that they are told parts of one whole. It starts from the shares of before,
and from the queues that members say they own: after a restart, or when another broker is asked, that is all there is. Locks
keep owners single whatever members are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...protocol.allocation import STICKY
from ...protocol.group_bodies import BrokerShare
from ...protocol.queue import Queue
from ..config import LIMITS, Limits


class StickyShares:
    """Shares out one topic in one group. owners: the member that was to have each queue last, or that says it does."""

    def __init__(self, topic: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._topic = topic
        self._shares: dict[str, list[Queue]] = {}
        self._of: tuple[dict[str, int], list[str]] | None = None  # the queues and members that these are of
        self._is_doubtful = True
        self._count = 0  # queues
        self.owners: dict[Queue, str] = {}

    def claim(self, queue: Queue, client_id: str) -> None:
        """A member says that it owns a queue. There are no more owners than there may be queues."""
        if queue in self.owners or len(self.owners) < self._limits.max_shared_queues:
            self.owners[queue] = client_id

    def forget(self) -> None:
        """Members are others than before, and will all be told."""
        self._is_doubtful, self._of = True, None

    def doubt(self) -> None:
        """Some member sees other queues than before, all of them perhaps the same."""
        self._is_doubtful = True

    def of(
        self, client_id: str, seen_queues: Mapping[str, int], sorted_ids: Callable[[], list[str]]
    ) -> BrokerShare | None:
        """The member's share, computed for all members when the first of them asks; None for a client that is no member."""
        if self._is_doubtful:
            self._is_doubtful = False
            # For the same queues they stay: some members were told, and claims since then could divide them otherwise.
            now = dict(seen_queues), sorted_ids()
            if now != self._of:
                self._of, self._shares = now, self._share_out(*now)
        share = self._shares.get(client_id)
        return None if share is None else BrokerShare(len(self._shares), self._count, _numbers(share))

    def _share_out(self, seen_queues: dict[str, int], client_ids: list[str]) -> dict[str, list[Queue]]:
        queues = sorted(
            Queue(self._topic, name, number) for name, count in seen_queues.items() for number in range(count)
        )
        shares = STICKY.share_out(queues, client_ids, self.owners) if client_ids else {}
        self.owners = {queue: client_id for client_id, share in shares.items() for queue in share}
        self._count = len(queues)
        return shares


def _numbers(share: list[Queue]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for queue in share:
        numbers.setdefault(queue.broker_name, []).append(queue.queue_id)
    return numbers
