"""Messages that are sent in one turn of the event loop to one queue travel as one SEND_BATCH_MESSAGE.

Nothing waits: the batch leaves when the turn ends, which is when a single message would have left. A message that is alone in
its turn is a SEND_MESSAGE_V2. Each message has its own future, and so its own result and error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..protocol.bodies import Queue
from ..protocol.codes import RequestCode
from ..protocol.frame import ExtValue, Frame
from ..protocol.message import BatchEntry, encode_batch
from .config import BATCH_BYTES, BATCH_MESSAGES
from .connection import Connection
from .message import SendResult


class Pending(NamedTuple):
    """A message on its way. `queue_key` and `queue` are what its sender asked for; `future` gets its SendResult."""

    future: asyncio.Future[SendResult]
    message_id: str
    entry: BatchEntry
    queue_key: str | None
    queue: Queue | None


class Batch:
    """What goes to one queue in this turn."""

    __slots__ = ("connection", "messages", "queue", "sent_s", "size_bytes")

    def __init__(self, connection: Connection, queue: Queue) -> None:
        self.connection = connection
        self.queue = queue
        self.messages: list[Pending] = []
        self.size_bytes = 0
        self.sent_s = 0.0


Answered = Callable[[Batch, Frame | Exception], None]


class Accumulator:
    """`header(topic, properties, now_ms)` makes a request's fields but the queue; `answered` gets each batch's answer."""

    def __init__(
        self, header: Callable[[str, str, int], dict[str, ExtValue]], answered: Answered, timeout_s: float
    ) -> None:
        self._header = header
        self._answered = answered
        self._timeout_s = timeout_s
        self._batches: dict[Queue, Batch] = {}
        self._queues: dict[str, Queue] = {}

    def queue_of_turn(self, topic: str) -> Queue | None:
        """The queue that this turn's messages of a topic go to, if they may go to any; None if none is chosen yet."""
        return self._queues.get(topic)

    def choose(self, topic: str, queue: Queue) -> None:
        self._queues[topic] = queue

    def add(self, connection: Connection, queue: Queue, message: Pending) -> None:
        """Takes a message; it leaves when the turn ends, or now if the batch is full."""
        batch = self._batches.get(queue)
        if batch is None:
            if not self._batches:
                message.future.get_loop().call_soon(self.flush)
            batch = self._batches[queue] = Batch(connection, queue)
        size_bytes = len(message.entry.body) + len(message.entry.properties)
        if batch.messages and (batch.size_bytes + size_bytes > BATCH_BYTES or len(batch.messages) >= BATCH_MESSAGES):
            self._send(batch)
            self._queues.pop(queue.topic, None)
            batch = self._batches[queue] = Batch(connection, queue)
        batch.messages.append(message)
        batch.size_bytes += size_bytes

    def flush(self) -> None:
        """Sends what was taken, in order. Whoever sends something else first calls this, so that order holds."""
        batches, self._batches = self._batches, {}
        self._queues.clear()
        for batch in batches.values():
            self._send(batch)
        for connection in {batch.connection for batch in batches.values()}:
            connection.flush()

    def _send(self, batch: Batch) -> None:
        messages = [message for message in batch.messages if not message.future.done()]  # some callers have given up
        if not messages:
            return
        batch.messages = messages
        batch.sent_s = time.monotonic()
        now_ms, queue = int(time.time() * 1000), batch.queue
        if len(messages) == 1:
            entry = messages[0].entry
            code, body = RequestCode.SEND_MESSAGE_V2, entry.body
            ext = self._header(queue.topic, entry.properties, now_ms)
            ext["h"] = entry.flag
        else:
            code, body = RequestCode.SEND_BATCH_MESSAGE, encode_batch([message.entry for message in messages])
            ext = self._header(queue.topic, "", now_ms)
            ext["m"] = True
        ext["e"] = queue.queue_id
        batch.connection.call(code, ext, body, partial(self._answered, batch), self._timeout_s)
