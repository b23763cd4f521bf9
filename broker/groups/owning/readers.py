"""The queues that foreign members read, as a restarted broker has to know them.

Apache's clients take no lease. A broker that restarts knows of them with their next heartbeat, up to 30 s later (Java's
heartbeatBrokerInterval), while they still handle what they have. Until then each queue is its former reader's: a lock for
that client id keeps everybody else out, and ends

- when that client is heard from as a member: it reads the queue, and is drained of it before the next one reads
- when its connection closes, or nothing has pulled or committed the queue for as long as a lease lasts

A connection that pulls or commits such a queue, and is no member yet, is its reader. So is one that pulls a queue whose
reader has lost its connection, as long as nobody else has read the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from ...config import LIMITS, Limits
from ...store.ledger import Change, Former, LeaseKey, Ledger


class Readers:
    """`awaited`: how many queues of each group wait for their readers from before a restart. `next_epoch()`: each reader has
    one, by which its line in the ledger is told from others."""

    def __init__(self, ledger: Ledger, next_epoch: Callable[[], int], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._ledger = ledger
        self._next_epoch = next_epoch
        self._readers: dict[LeaseKey, Former] = {}
        self._lost: dict[LeaseKey, str] = {}  # clients whose connections have closed
        self._lost_of: Counter[str] = Counter()  # how many queues of each group
        self.awaited: Counter[str] = Counter()

    def note(self, key: LeaseKey, client_id: str) -> None:
        """A foreign member reads a queue. It is on the disk before the member gets messages."""
        self._is_back(key)
        former = self._readers.get(key)
        if former is None and len(self._readers) >= self._limits.max_locks:
            return
        if former is None or former.client_id != client_id:
            self._readers[key] = Former(client_id, self._next_epoch(), is_reader=True)
            self._ledger.read_by(key, client_id, self._readers[key].epoch)
            self._ledger.write()

    def forget(self, key: LeaseKey) -> None:
        """Nobody reads the queue."""
        self._is_back(key)
        former = self._readers.pop(key, None)
        if former is not None:
            self._ledger.freed(key, former.epoch)

    def lose(self, key: LeaseKey) -> None:
        """The reader's connection has closed. It may come back by another one."""
        former = self._readers.get(key)
        self.forget(key)
        if former is not None and len(self._lost) < self._limits.max_locks:
            self._lost[key] = former.client_id
            self._lost_of[key[0]] += 1

    def _is_back(self, key: LeaseKey) -> None:
        """The queue's reader, or another one, is known."""
        if self._lost.pop(key, None) is not None:
            _count_down(self._lost_of, key[0])

    def back(self, group: str, client_id: str) -> list[LeaseKey]:
        """A client whose connection has closed is a member again: the queues that nobody else has read meanwhile."""
        if group not in self._lost_of:
            return []
        keys = [key for key, lost in self._lost.items() if key[0] == group and lost == client_id]
        for key in keys:
            self._is_back(key)
        return keys

    def misses(self, group: str) -> bool:
        """Whether readers of the group are not known again yet."""
        return group in self.awaited or group in self._lost_of

    def last(self, key: LeaseKey) -> str | None:
        """The client that has read the queue last; None if it has let go of it, or has taken a lease."""
        former = self._readers.get(key)
        return former.client_id if former is not None else self._lost.get(key)

    def leased(self, key: LeaseKey) -> None:
        """The queue has the lease of one of our members: the line of that stands for it now."""
        if key in self._readers:
            del self._readers[key]
        if key in self._lost:
            self._is_back(key)

    def awaits(self, key: LeaseKey) -> None:
        self.awaited[key[0]] += 1

    def came(self, key: LeaseKey, client_id: str, epoch: int, *, is_back: bool) -> None:
        """A queue waits no more. is_back: its reader has come; else the queue is free."""
        _count_down(self.awaited, key[0])
        if is_back:
            self._readers[key] = Former(client_id, epoch, is_reader=True)
        else:
            self._ledger.freed(key, epoch)

    def lines(self) -> Iterator[Change]:
        """The lines in which the ledger keeps them."""
        return (reader_line(key, former.client_id, former.epoch) for key, former in list(self._readers.items()))


def _count_down(counts: Counter[str], group: str) -> None:
    counts[group] -= 1
    if not counts[group]:
        del counts[group]


def reader_line(key: LeaseKey, client_id: str, epoch: int) -> Change:
    return *key, client_id, epoch, True
