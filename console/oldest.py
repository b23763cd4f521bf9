"""The store times of the first messages of queues, cached by queue and offset."""

from __future__ import annotations

from collections import OrderedDict

from ..client.admin.admin_client import AdminClient
from ..protocol.names import Queue
from .config import MAX_OLDEST


class Oldest:
    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._known: OrderedDict[tuple[Queue, int], int] = OrderedDict()

    async def of(self, queue: Queue, begin: int) -> int | None:
        """Return the store time (ms) of the message at `begin`, the queue's first offset; None if it was deleted since."""
        found = self._known.get((queue, begin))
        if found is not None:
            return found
        async for messages in self._admin.read(queue, begin, begin + 1):
            for message in messages:
                self._known[queue, begin] = message.store_ms
                if len(self._known) > MAX_OLDEST:
                    self._known.popitem(last=False)
                return message.store_ms
        return None
