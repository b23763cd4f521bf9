"""Knows which messages of a queue wait for an earlier one: in groups in order, those of the same message group
(`__SHARDINGKEY`).

Messages without one count as one message group. A *run* has the unfinished messages of a message group, in the queue's
order. Its first message alone can be popped, and those behind it together with it. So an acknowledgement behind one that is
missing is provisional: if the first one comes again, all of them do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...protocol.message import properties_in
from ...protocol.properties import find
from .states import Delivery, DeliveryState

SHARDING_KEY = "__SHARDINGKEY"


def message_group(record: bytes) -> str | None:
    return find(properties_in(record), SHARDING_KEY)


class Order:
    def __init__(self) -> None:
        self._runs: dict[str | None, deque[Delivery]] = {}

    def has(self, key: str | None) -> bool:
        """Whether something of the message group is not finished."""
        return key in self._runs

    def add(self, delivery: Delivery) -> None:
        run = self._runs.get(delivery.key)
        if run is None:
            self._runs[delivery.key] = deque((delivery,))
        else:
            run.append(delivery)

    def is_first(self, delivery: Delivery) -> bool:
        run = self._runs.get(delivery.key)
        return run is not None and run[0] is delivery

    def run(self, delivery: Delivery) -> list[Delivery]:
        """The run of a delivery, from its first message on."""
        return list(self._runs[delivery.key])

    def done(self, key: str | None) -> Iterator[Delivery]:
        """Takes out the acknowledged messages at the beginning of a run."""
        run = self._runs.get(key, ())
        while run and run[0].state is DeliveryState.ACKNOWLEDGED:
            yield run.popleft()
        if not run:
            self._runs.pop(key, None)

    def remove(self, delivery: Delivery) -> None:
        """Removes a message that can no longer be read."""
        run = self._runs[delivery.key]
        run.remove(delivery)
        if not run:
            del self._runs[delivery.key]

    def first(self, key: str | None) -> Delivery | None:
        run = self._runs.get(key)
        return run[0] if run else None
