"""Messages that are sent in one turn of the event loop to one queue travel as one SEND_BATCH_MESSAGE.

Nothing waits: the batch leaves when the turn ends, which is when a single message would have left. A message that is alone in
its turn is a SEND_MESSAGE_V2. Each message has its own future, and so its own result and error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from ..protocol.batch import encode_batch
from ..protocol.bodies import Queue
from ..protocol.codes import RequestCode
from ..protocol.frame import ExtValue, Frame
from .connection import Connection
from .message import SendResult

Pending = tuple["asyncio.Future[SendResult]", str, bytes, str, str | None, Queue | None]
"""A message on its way: its future, its id, body and properties; the queue key and the queue that its sender asked for. A
plain tuple, because one is made per message."""


class Batch:
    """What goes to one queue in this turn. `new_future` makes the future of a message."""

    __slots__ = ("connection", "messages", "new_future", "queue", "sent_s", "size_bytes")

    def __init__(self, connection: Connection, queue: Queue) -> None:
        self.connection = connection
        self.queue = queue
        self.messages: list[Pending] = []
        self.size_bytes = 0
        self.sent_s = 0.0
        self.new_future: Callable[[], asyncio.Future[SendResult]] = asyncio.get_running_loop().create_future


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
        # by topic: where this turn's messages go that may go anywhere, so that they travel together
        self.queue_of_turn: dict[str, Queue] = {}
        self.batch_of_turn: dict[str, Batch] = {}

    def batch(self, connection: Connection, queue: Queue) -> Batch:
        """The batch to a queue; it leaves when the turn ends."""
        batch = self._batches.get(queue)
        if batch is None:
            if not self._batches:
                connection.before_flush(self.flush)
            batch = self._batches[queue] = Batch(connection, queue)
        return batch

    def close(self, batch: Batch) -> None:
        """Sends a full batch now: the broker can begin with it while others are still being filled."""
        topic = batch.queue.topic
        self._batches.pop(batch.queue, None)
        self.queue_of_turn.pop(topic, None)
        self.batch_of_turn.pop(topic, None)
        self._send(batch)
        batch.connection.write_now()

    def flush(self) -> None:
        """Sends what was taken, in order. Whoever sends something else first calls this, so that order holds."""
        batches, self._batches = self._batches, {}
        self.queue_of_turn.clear()
        self.batch_of_turn.clear()
        for batch in batches.values():
            self._send(batch)

    def _send(self, batch: Batch) -> None:
        messages = batch.messages = [item for item in batch.messages if not item[0].done()]  # some senders gave up
        if not messages:
            return
        batch.sent_s = time.monotonic()
        try:
            self._call(batch)
        except Exception as error:  # nobody else would hear of it: this is a callback of the loop
            self._answered(batch, error)

    def _call(self, batch: Batch) -> None:
        queue, messages = batch.queue, batch.messages
        if len(messages) == 1:
            code, body, text = RequestCode.SEND_MESSAGE_V2, messages[0][2], messages[0][3]
        else:
            code, text = RequestCode.SEND_BATCH_MESSAGE, ""
            body = encode_batch([(0, item[2], item[3]) for item in messages])
        ext = self._header(queue.topic, text, int(time.time() * 1000))
        ext["e"], ext["m"] = queue.queue_id, len(messages) > 1
        batch.connection.call(code, ext, body, partial(self._answered, batch), self._timeout_s)
