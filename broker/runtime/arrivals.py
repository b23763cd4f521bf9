"""Deferred work for clients that wait for messages, which is started when messages arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ...protocol.bodies import Work
from .runtime import Runtime

K = TypeVar("K")
Item = TypeVar("Item")


class Arrivals(Generic[K, Item]):
    """Work for arriving messages. At most one work per key waits, so that the deferred work does not grow with each
    message. Work in progress is repeated for messages that arrive meanwhile.

    Args:
        work: is done for a key, with the queues or lite topics that have new messages.
    """

    def __init__(self, runtime: Runtime, work: Callable[[K, Iterable[Item]], Work[None]]) -> None:
        self._turns = runtime.turns
        self._work = work
        self._new: dict[K, dict[Item, None]] = {}  # by key of the work in progress: items that it has not taken yet

    def add(self, arrived: Iterable[tuple[K, Item]]) -> None:
        """Do the work, some pieces of it immediately."""
        keys: deque[K] = deque()
        for key, item in arrived:
            if key not in self._new:
                self._new[key] = {}
                keys.append(key)
            self._new[key][item] = None
        if keys:
            self._turns.do_some(self._doing(keys))

    def _doing(self, keys: deque[K]) -> Work[None]:
        """Do a piece of each key's work in turn, so that no key waits for all of another's."""
        works: dict[K, Work[None]] = {}
        try:
            while keys:
                key = keys[0]
                if key not in works:
                    items, self._new[key] = self._new[key], {}
                    if not items:
                        del self._new[keys.popleft()]
                        continue
                    works[key] = self._work(key, items)
                keys.rotate(-1)
                for _ in works[key]:
                    yield
                    break
                else:
                    del works[key]
        finally:
            for key in keys:  # after an error
                del self._new[key]
