"""Messages that are sent in one turn of the event loop to one queue travel as one SEND_BATCH_MESSAGE.

Nothing waits: the batch leaves when the turn ends, which is when a single message would have left. A message that is alone in
its turn is a SEND_MESSAGE_V2. Each message has its own future, and so its own result and error.

When everything was answered, the first half of what probably follows leaves before the turn ends: in one piece, client and
broker would wait for each other in turn. With two batches on the way both work at once (`Overlap`).

While a broker is slower than its senders, batches wait for it, one behind the other. Senders are not woken meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import methodcaller
from typing import Final

from ...protocol.batch import encode_columns
from ...protocol.codes import RequestCode
from ...protocol.frame import ExtValue, Frame
from ...protocol.properties import NAME_END, UNIQUE_KEY
from ...protocol.queue import Queue
from ..config import BATCH_MESSAGES, MAX_OVERLAP_PAUSE, OVERLAP_BATCHES, OVERLAP_MESSAGES
from ..errors import AnswerUnreadable, RequestTimeout, RocketletError
from ..message import SendResult
from ..wire.connection import Connection
from .sent import STORED, sent_result, sent_results
from .unique_keys import UniqueKeys

Pending = tuple["asyncio.Future[SendResult]", str, bytes, str, str | None, Queue | None]
"""A message on its way: its future, its id, body and properties; the queue key and the queue that its sender asked for. A
plain tuple, because one is made per message. Id and properties are empty if the message gets a new id and nothing else."""

PLAIN: Final = f"{UNIQUE_KEY}{NAME_END}"
PLAIN_BYTES: Final = len(PLAIN) + UniqueKeys.CHARS  # properties of a message that gets an id and nothing else
_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)  # Python 3.11 takes 0.2 us to find a member of an enum
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_is_done = methodcaller("done")


class Batch:
    """The messages for one queue in this turn. `born_ms` is when the first message came, `due_s` when its time is up (the
    connection's `running_s`). It may hold `limit` messages. `ids` and `texts`, the properties, are those of the messages
    once the batch is closed."""

    __slots__ = (
        "accumulator",
        "born_ms",
        "connection",
        "due_s",
        "ids",
        "limit",
        "messages",
        "queue",
        "size_bytes",
        "texts",
    )

    ids: Sequence[str]
    texts: Sequence[str]

    def __init__(
        self, accumulator: Accumulator, connection: Connection, queue: Queue, born_ms: int, due_s: float, limit: int
    ) -> None:
        self.accumulator = accumulator
        self.connection = connection
        self.queue = queue
        self.born_ms = born_ms
        self.due_s = due_s
        self.limit = limit
        self.messages: list[Pending] = []
        self.size_bytes = 0

    def left_s(self) -> float:
        """How much of the timeout is left, which counts from the first message on."""
        return self.due_s - self.connection.running_s()

    def close(self, keys: UniqueKeys) -> None:
        """Leaves out the messages whose senders gave up, and gives the others their ids, all at once: they keep them from
        now on, however often they are sent."""
        if len(self.messages) == 1:  # a caller that awaits each result pays for no lists
            future, key, _, text, _, _ = self.messages[0]
            if future.done():
                self.messages, self.ids, self.texts = [], (), ()
            else:
                key = key or keys.next()
                self.ids, self.texts = (key,), (text or PLAIN + key,)
            return
        if not self.messages:  # a refused message left it empty
            self.ids, self.texts = (), ()
            return
        futures, ids, _, texts, _, _ = zip(*self.messages, strict=True)
        if any(map(_is_done, futures)):
            self.messages = [message for message in self.messages if not message[0].done()]
            self.close(keys)
        elif any(ids):
            self.ids = [key or keys.next() for key in ids]
            self.texts = [text or PLAIN + key for key, text in zip(self.ids, texts, strict=True)]
        else:
            self.ids = keys.take(len(ids))
            self.texts = [PLAIN + key for key in self.ids]

    def answered(self, answer: Frame | Exception) -> None:
        """Gives each message its result, if they were stored."""
        accumulator, messages = self.accumulator, self.messages
        accumulator.in_flight -= 1
        accumulator.answered_messages += len(messages)
        if not isinstance(answer, Frame) or answer[0] not in STORED:
            accumulator.failed(self, answer)
            return
        try:
            if len(messages) == 1:
                future, result = messages[0][0], sent_result(answer, self.ids[0], self.queue)
                if not future.done():
                    future.set_result(result)
                return
            results = sent_results(answer, self.ids, self.queue)
        except AnswerUnreadable as error:  # sent again, the messages would be there twice
            reason = f"{self.connection.address} stored the messages and does not say where: {error}"
            accumulator.failed(self, RocketletError(reason))
            return
        for message, result in zip(messages, results, strict=True):
            if not message[0].done():
                message[0].set_result(result)


class Overlap:
    """Whether two halves go where one batch could. They stay apart for long while client and broker work side by side. Where
    they soon come back together, the broker is busy with others or shares our core, and two requests are only more work
    than one: the next try waits, each time longer."""

    __slots__ = ("_due", "_halved", "_pause")

    def __init__(self) -> None:
        self._due = self._pause = 0
        self._halved: int | None = None

    def limit(self, expected: int, sent: int) -> int:
        """How many messages the next batch may hold. expected: messages of this turn, probably. sent: batches so far, none of
        which is in flight."""
        if self._halved is not None:
            stayed_apart = sent - self._halved >= OVERLAP_BATCHES
            self._pause = 0 if stayed_apart else min(max(self._pause * 2, OVERLAP_BATCHES), MAX_OVERLAP_PAUSE)
            self._halved, self._due = None, sent + self._pause
        if sent < self._due:
            return BATCH_MESSAGES
        self._halved = sent
        return expected // 2


Failed = Callable[[Batch, Frame | Exception], None]


class Accumulator:
    """`header(topic, properties, now_ms, queue_id)` makes a request's fields; `failed` gets each batch that was not stored,
    and why."""

    def __init__(
        self,
        header: Callable[[str, str, int, int], dict[str, ExtValue]],
        keys: UniqueKeys,
        failed: Failed,
        timeout_s: float,
    ) -> None:
        self._header = header
        self._keys = keys
        self.failed = failed
        self._timeout_s = timeout_s
        self._batches: dict[Queue, Batch] = {}
        self._waiting: dict[Connection, deque[Batch]] = {}
        self._overlap = Overlap()
        self._sent = self.in_flight = 0  # batches
        self.answered_messages = 0  # since the last batch was begun
        # by topic: this turn's messages that may go anywhere travel together
        self.batch_of_turn: dict[str, Batch] = {}

    def batch(self, connection: Connection, queue: Queue) -> Batch:
        """The batch to a queue; it leaves when the turn ends."""
        batch = self._batches.get(queue)
        if batch is None:
            if not self._batches:
                connection.before_flush(self._end_turn)
            now_ms = int(time.time() * 1000)
            if now_ms != self._keys.stamped_ms:
                self._keys.stamp(now_ms)
            limit = BATCH_MESSAGES if self.answered_messages < OVERLAP_MESSAGES else self._limit(connection)
            due_s = connection.running_s() + self._timeout_s
            batch = self._batches[queue] = Batch(self, connection, queue, now_ms, due_s, limit)
            self.answered_messages = 0
        return batch

    def _limit(self, connection: Connection) -> int:
        # Apache's broker takes two halves for more work than one whole, and is no sooner done.
        if self.in_flight or not connection.speaks_msgpack:
            return BATCH_MESSAGES
        return self._overlap.limit(self.answered_messages, self._sent)

    def close(self, batch: Batch) -> None:
        """Sends a full batch now: the broker can begin with it while others are still being filled."""
        self._batches.pop(batch.queue, None)
        self.batch_of_turn.pop(batch.queue.topic, None)
        self._leave(batch)
        batch.connection.write_now()

    def flush(self, connection: Connection) -> None:
        """Sends the messages taken for a broker, in order. Call it before sending that broker anything else. Messages for
        another broker, which may read nothing, wait on."""
        for batch in self._waiting.pop(connection, ()):
            self._send(batch)
        self._end_turn()

    def _end_turn(self) -> None:
        batches, self._batches = self._batches, {}
        self.batch_of_turn.clear()
        for batch in batches.values():
            self._leave(batch)

    def _leave(self, batch: Batch) -> None:
        connection = batch.connection
        if connection in self._waiting:
            self._waiting[connection].append(batch)
        elif connection.is_writable:
            self._send(batch)
        else:
            self._waiting[connection] = deque((batch,))
            connection.when_writable(partial(self._go_on, connection))
            asyncio.get_running_loop().call_later(self._timeout_s, self._expire, connection)

    def _go_on(self, connection: Connection) -> None:
        """Sends waiting messages for as long as the broker takes them."""
        waiting = self._waiting.get(connection)
        if waiting is None:
            return
        while waiting and connection.is_writable:
            self._send(waiting.popleft())
            connection.write_now()
        if waiting:
            connection.when_writable(partial(self._go_on, connection))
        else:
            del self._waiting[connection]

    def _expire(self, connection: Connection) -> None:
        """The broker reads nothing, and time is up for the messages that have waited longest."""
        waiting = self._waiting.get(connection, deque())
        while waiting and waiting[0].left_s() <= 0:
            batch = waiting.popleft()
            batch.close(self._keys)
            self.failed(batch, RequestTimeout(f"{connection.address} did not take the message in time"))
        if waiting:
            asyncio.get_running_loop().call_later(waiting[0].left_s(), self._expire, connection)
        else:
            self._waiting.pop(connection, None)  # the next message sets a timer again

    def _send(self, batch: Batch) -> None:
        batch.close(self._keys)
        queue, messages = batch.queue, batch.messages
        if not messages:
            return
        try:
            if len(messages) == 1:
                code, body = _SEND, messages[0][2]
                ext = self._header(queue.topic, batch.texts[0], batch.born_ms, queue.queue_id)
            else:
                code, body = _SEND_BATCH, _body(batch)
                ext = self._header(queue.topic, "", batch.born_ms, queue.queue_id)
                ext["m"] = True
            batch.connection.call(code, ext, body, batch.answered, batch.due_s)
        except Exception as error:  # nobody else would hear of it: this is a callback of the loop
            self.failed(batch, error)
        else:
            self._sent += 1
            self.in_flight += 1


def _body(batch: Batch) -> bytes:
    """The body of a request with several messages."""
    return encode_columns(
        repeat(0), [message[2] for message in batch.messages], [text.encode() for text in batch.texts]
    )
