"""Batches: collects the messages that one event-loop iteration sends to a queue, and encodes them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Literal

from ...host.address import local_address
from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.config import MAX_BODY_BYTES, SENT_PROPERTY_BYTES
from ...protocol.frame import ExtValue, Frame
from ...protocol.message import encode_columns
from ...protocol.names import Queue
from ...protocol.properties import NAME_END, UNIQUE_KEY
from ..config import BATCH_MESSAGES, MAX_OVERLAP_PAUSE, OVERLAP_BATCHES, OVERLAP_MESSAGES
from ..errors import AnswerUnreadable, MessageIllegal, RequestTimeout, RocketletError
from ..message import Outgoing, SendResult
from ..wire.connection import Connection

# ------------------------------------------------------------------------------
# The id of a message, which its sender makes.


_TWO_DIGITS: Final = tuple(f"{number:02X}" for number in range(256))


class UniqueKeys:
    """Makes the ids that identify a message from its first send on: address, pid, time, counter, in hex."""

    CHARS: Final = 32

    def __init__(self) -> None:
        prefix = socket.inet_aton(local_address()) + (os.getpid() & 0xFFFF).to_bytes(2, "big") + os.urandom(4)
        self.prefix = prefix.hex().upper()
        self._counter = 0
        month = time.localtime()
        self.month_began_ms = int(time.mktime((month.tm_year, month.tm_mon, 1, 0, 0, 0, 0, 0, -1)) * 1000)
        self._stem = ""
        self.stamped_ms = 0
        self.stamp(int(time.time() * 1000))

    def stamp(self, now_ms: int) -> None:
        """Sets the time in the ids that follow."""
        self.stamped_ms = now_ms
        self._stem = f"{self.prefix}{(now_ms - self.month_began_ms) & 0x7FFFFFFF:08X}"

    def next(self) -> str:
        """Another id."""
        number = self._counter
        if number == 0xFFFF:
            return self.take(1)[0]
        self._counter = number + 1
        return self._stem + _TWO_DIGITS[number >> 8] + _TWO_DIGITS[number & 0xFF]

    def take(self, count: int) -> list[str]:
        """So many ids. With a new time when the counter begins anew, so that no id comes twice."""
        ids: list[str] = []
        while count > 0:
            high, low = self._counter >> 8, self._counter & 0xFF
            stem, ends = self._stem + _TWO_DIGITS[high], _TWO_DIGITS[low : low + count]
            ids += [stem + end for end in ends]
            count -= len(ends)
            self._counter = (self._counter + len(ends)) & 0xFFFF
            if not self._counter:
                self.stamp(int(time.time() * 1000))
        return ids


# ------------------------------------------------------------------------------
# Messages that are sent in one turn of the event loop to one queue travel as one SEND_BATCH_MESSAGE.
#
# Nothing waits: the batch leaves when the turn ends, which is when a single message would have left. A message that
# is alone in its turn is a SEND_MESSAGE_V2. Each message has its own future, and so its own result and error.
#
# When everything was answered, the first half of what probably follows leaves before the turn ends: in one piece,
# client and broker would wait for each other in turn. With two batches on the way both work at once (`Overlap`).
#
# While a broker is slower than its senders, batches wait for it, one behind the other. Senders are not woken
# meanwhile.


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
    return encode_columns([0] * len(batch.messages), [message[2] for message in batch.messages], list(batch.texts))


# ------------------------------------------------------------------------------
# Reads where messages were stored from the answer to a send.


_new_tuple: Final = tuple.__new__  # a NamedTuple's own constructor costs twice as much

# a full success, or stored but not yet flushed or copied: never to be sent again
STORED: Final[Mapping[int, Literal["ok", "flush timeout", "slave timeout", "no slave"]]] = {
    ResponseCode.SUCCESS: "ok",
    ResponseCode.FLUSH_DISK_TIMEOUT: "flush timeout",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "slave timeout",
    ResponseCode.SLAVE_NOT_AVAILABLE: "no slave",
}


def sent_result(answer: Frame, key: str, queue: Queue) -> SendResult:
    """Raises AnswerUnreadable."""
    code, _, ext, _, _, _, _, _, _ = answer
    try:
        queue_id = int(ext["queueId"])
        if queue_id != queue.queue_id:
            queue = queue._replace(queue_id=queue_id)
        return _new_tuple(SendResult, (key, str(ext["msgId"]), queue, int(ext["queueOffset"]), STORED[code], ""))
    except (KeyError, ValueError) as error:
        raise AnswerUnreadable(f"the answer to a send cannot be read: {error!r}") from error


def sent_results(answer: Frame, keys: Sequence[str], queue: Queue) -> Iterable[SendResult]:
    """The results of one request's messages, which lie one behind the other. Raises AnswerUnreadable."""
    first = sent_result(answer, keys[0], queue)
    offset_ids = first.offset_id.split(",")
    if len(offset_ids) != len(keys):
        raise AnswerUnreadable(f"{len(offset_ids)} ids for {len(keys)} messages")
    columns = keys, offset_ids, repeat(first.queue), count(first.queue_offset), repeat(first.status), repeat("")
    return map(_new_tuple, repeat(SendResult), zip(*columns, strict=False))


# ------------------------------------------------------------------------------
# Turns a message into its wire form, and refuses messages that no broker would take. Each function raises
# MessageIllegal.


if TYPE_CHECKING:  # whose stubs every type checker has; it need not be installed
    from typing_extensions import TypeVar

    Body = TypeVar("Body", default=bytes)
else:
    from typing import TypeVar

    Body = TypeVar("Body")

PROPERTY_BYTES: Final = SENT_PROPERTY_BYTES - 100  # the broker adds its own


def checked_body(body: bytes) -> bytes:
    if not isinstance(body, bytes):
        raise MessageIllegal(f"the body is {type(body).__name__}; it must be bytes, such as text.encode()")
    if not body:
        raise MessageIllegal("the body is empty")
    if len(body) > MAX_BODY_BYTES:
        raise MessageIllegal(f"the body has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
    return body


def encoded_by(encode: Callable[[Any], bytes | str], value: Any) -> bytes:
    """The bytes that `Producer(encode=...)` makes of a body."""
    try:
        made = encode(value)
    except Exception as error:
        raise MessageIllegal(f"the body {value!r:.200} cannot be encoded: {error!r}") from error
    if isinstance(made, str):
        return encoded("body", made)
    if not isinstance(made, bytes):
        raise MessageIllegal(f"encode returned {type(made).__name__}; it must return bytes or text")
    return made


def properties_text(
    tag: str | None,
    keys: str | Sequence[str],
    properties: Mapping[str, str] | None,
    unique_key: str,
    later: str,
    *,
    is_again: bool = False,
) -> str:
    """The properties' text. `unique_key` is checked already, `later` is the property that keeps the message back.
    is_again: of a message that was sent before, perhaps by a client that takes any tag. Raises MessageIllegal."""
    text = f"UNIQ_KEY\x01{unique_key}"
    if tag:
        if "||" in _plain("tag", tag) and not is_again:
            raise MessageIllegal(
                f"the tag {tag!r} holds '||', which separates tags: a message has one; nobody would get it"
            )
        text = f"TAGS\x01{tag}\x02{text}"
    if keys:
        joined = _one_key(_plain("keys", keys)) if isinstance(keys, str) else _plain("keys", _joined(keys))
        text = f"KEYS\x01{joined}\x02{text}"
    if later:
        text = f"{later}\x02{text}"
    if properties:
        if not isinstance(properties, Mapping):
            raise MessageIllegal(f"the properties {properties!r} are not a mapping of texts")
        fault = props.reserved_fault(properties)
        if fault:
            raise MessageIllegal(fault)
        text = f"{text}\x02{props.encode(properties)}"
    size_bytes = len(text) if text.isascii() else len(encoded("properties' text", text))
    if size_bytes > PROPERTY_BYTES:
        raise MessageIllegal(f"the properties have {size_bytes} bytes; {PROPERTY_BYTES} are allowed")
    return text


def encoded(name: str, text: str) -> bytes:
    """UTF-8, which has no bytes for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise MessageIllegal(f"the {name} holds {half!r}, half a surrogate pair, which UTF-8 cannot hold") from None


def checked_id(message_id: str) -> str:
    if message_id == "":
        raise MessageIllegal("the message id is empty; leave it out for a new one")
    return _plain("message id", message_id)


def check_topic(topic: str) -> None:
    fault = names.topic_fault(topic) if isinstance(topic, str) else f"the topic {topic!r} is not a text"
    if fault:
        raise MessageIllegal(fault)


def check_queue(topic: str, queue: Queue | None) -> None:
    if queue is not None and not (isinstance(queue, Queue) and queue.topic == topic and queue.queue_id >= 0):
        raise MessageIllegal(f"the queue {queue!r} is not a Queue of the topic {topic}")


def check_flag(flag: int) -> None:
    if type(flag) is not int or not -(2**31) <= flag < 2**31:
        raise MessageIllegal(f"the flag {flag!r} is not a number of 32 bits")


def outgoing(messages: Iterable[Any], encode: Callable[[Any], Any]) -> tuple[Outgoing, ...]:
    """The messages of a batch. `encode` makes the body of values that are neither bytes nor an Outgoing."""
    allowed = "a batch takes a list of bytes or Outgoing(...)"
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise MessageIllegal(f"the batch is {type(messages).__name__}; {allowed}")
    bodies = (item if isinstance(item, Outgoing) else encode(item) for item in messages)
    items = tuple(Outgoing(item) if isinstance(item, bytes) else item for item in bodies)
    odd = [item for item in items if not isinstance(item, Outgoing)]
    if odd:
        raise MessageIllegal(f"{odd[0]!r} is {type(odd[0]).__name__}; {allowed}")
    return items


def _joined(keys: Sequence[str]) -> str:
    if not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in keys):
        raise MessageIllegal(f"the keys {keys!r} are neither a text nor texts; use str(...)")
    return " ".join(map(_one_key, keys))


def _one_key(key: str) -> str:
    """Brokers and consumers split keys at blanks."""
    if len(key.split()) > 1:
        raise MessageIllegal(
            f"the key {key!r} holds blanks, at which brokers split it; give {key.split()!r}, or no blanks"
        )
    return key


def _plain(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise MessageIllegal(f"the {name} {text!r} is not a text; use str({text!r})")
    if not text.strip() or "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"the {name} {text!r} may neither be blank nor hold U+0001 or U+0002")
    return text


# ------------------------------------------------------------------------------
# A producer's sends, as its middleware sees them.


@dataclass(frozen=True, slots=True)
class Sending:
    """A send, as a producer's middleware sees it. Unless `is_batch` it has one message. A `half` is the message of a
    transaction before its outcome; a `oneway` send gets no answer."""

    topic: str
    messages: tuple[Outgoing, ...]
    is_batch: bool
    queue_key: str | None
    queue: Queue | None
    kind: Literal["plain", "half", "oneway"] = "plain"


SendMiddleware = Callable[[Sending, Callable[[Sending], Awaitable[SendResult]]], Awaitable[SendResult]]
