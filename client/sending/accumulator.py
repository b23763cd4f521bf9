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
from ...protocol.properties import NAME_END, SHARDING_KEY, UNIQUE_KEY
from ..config import BATCH_MESSAGES, MAX_OVERLAP_PAUSE, OVERLAP_BATCHES, OVERLAP_MESSAGES
from ..errors import AnswerUnreadable, MessageIllegal, RequestTimeout, RocketletError, unencodable
from ..message import Outgoing, SendResult
from ..wire.connection import Connection

# ------------------------------------------------------------------------------
# The message id that a sender generates.


_TWO_DIGITS: Final = tuple(f"{number:02X}" for number in range(256))


class UniqueKeys:
    """Generates message ids: address, pid, a random number, time and counter in hex. A message keeps its id when it is
    resent or copied."""

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
        """Set the time for the next ids."""
        self.stamped_ms = now_ms
        self._stem = f"{self.prefix}{(now_ms - self.month_began_ms) & 0x7FFFFFFF:08X}"

    def next(self) -> str:
        """Return the next id."""
        number = self._counter
        if number == 0xFFFF:
            return self.take(1)[0]
        self._counter = number + 1
        return self._stem + _TWO_DIGITS[number >> 8] + _TWO_DIGITS[number & 0xFF]

    def take(self, count: int) -> list[str]:
        """Return `count` ids. When the counter overflows, the time is updated, so that ids stay unique unless more than
        65,536 are taken in 1 ms."""
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
# Messages that one event-loop iteration sends to one queue are combined into SEND_BATCH_MESSAGE requests.
#
# Batching causes no delay, because a batch is written by the callback that writes single messages, too
# (`Connection.before_flush`). A message that is alone in its batch is a SEND_MESSAGE_V2. Each message has its own
# future, and thus its own result and error.
#
# If no batch is in flight, a Rocketlet broker may get the first half of the messages that are expected in this
# iteration before its end. With a single batch, client and broker would take turns waiting for each other. With two
# batches in flight they can work concurrently (`Overlap`).
#
# While a broker is slower than its senders, batches wait for it in order, and senders are not woken.


Pending = tuple["asyncio.Future[SendResult]", str, bytes, str, str | None, Queue | None]
"""A message that is being sent: its future, id, body, properties, and the queue key and queue that its sender requested.
It is a plain tuple because there is one for each message. Id and properties are empty if the message gets a new id and
no properties."""

PLAIN: Final = f"{UNIQUE_KEY}{NAME_END}"
PLAIN_BYTES: Final = len(PLAIN) + UniqueKeys.CHARS  # size of the properties of a message that has only an id
_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)  # Python 3.11 needs 0.2 us to look up an enum member
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_is_done = methodcaller("done")


class Batch:
    """The messages for one queue in one event-loop iteration.

    Attributes:
        born_ms: the time of the first message, in ms since the epoch.
        due_s: the time of the connection's `running_s` at which the timeout of the first message ends.
        limit: the maximum number of messages.
        ids, texts: the ids and properties of the messages, once the batch is closed.
    """

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
        """The rest of the timeout in seconds, which is counted from the first message."""
        return self.due_s - self.connection.running_s()

    def close(self, keys: UniqueKeys) -> None:
        """Drop messages whose futures were cancelled, and set the ids of the others, which stay the same for all
        retries."""
        if len(self.messages) == 1:  # a faster path for callers that await each result
            future, key, _, text, _, _ = self.messages[0]
            if future.done():
                self.messages, self.ids, self.texts = [], (), ()
            else:
                key = key or keys.next()
                self.ids, self.texts = (key,), (text or PLAIN + key,)
            return
        if not self.messages:  # the only message of the batch was invalid
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
        """Set the results of the messages if the broker has confirmed them; otherwise pass the batch to `failed`."""
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
        except AnswerUnreadable as error:  # not retried, because that would store the messages twice
            reason = f"{self.connection.address} stored the messages, but did not return their offsets: {error}"
            accumulator.failed(self, RocketletError(reason))
            return
        for message, result in zip(messages, results, strict=True):
            if not message[0].done():
                message[0].set_result(result)


class Overlap:
    """Decides whether to send two half batches instead of one.

    Two halves are useful while client and broker work concurrently, so that the responses arrive at different times. If
    the halves soon end up in one batch again, the broker is busy with other clients or shares the CPU core, and two
    requests only cost more than one. In this case the next attempt with two halves is delayed, each time for longer.
    """

    __slots__ = ("_due", "_halved", "_pause")

    def __init__(self) -> None:
        self._due = self._pause = 0
        self._halved: int | None = None

    def limit(self, expected: int, sent: int) -> int:
        """Return the maximum number of messages of the next batch.

        Args:
            expected: the number of messages that are expected in this event-loop iteration.
            sent: the number of batches sent so far, none of which is in flight.
        """
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
    """Collects messages in batches and sends these.

    Args:
        header: `header(topic, properties, now_ms, queue_id)` returns the header fields of a request.
        failed: called with each batch whose request failed, and the response or exception. Its messages may be stored.
    """

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
        self._sent = self.in_flight = 0  # numbers of batches
        self.answered_messages = 0  # number of confirmed messages since the last batch was started
        # By topic: the batch of this event-loop iteration for messages that may go to any queue.
        self.batch_of_turn: dict[str, Batch] = {}

    def batch(self, connection: Connection, queue: Queue) -> Batch:
        """Return the batch of this event-loop iteration for a queue, which is sent with its requests unless it is full
        before."""
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
        # For an Apache broker, two halves are more work than one batch, and do not finish earlier.
        if self.in_flight or not connection.speaks_msgpack:
            return BATCH_MESSAGES
        return self._overlap.limit(self.answered_messages, self._sent)

    def close(self, batch: Batch) -> None:
        """Send a full batch now, so that the broker can start with it while other batches are being filled."""
        self._batches.pop(batch.queue, None)
        self.batch_of_turn.pop(batch.queue.topic, None)
        self._leave(batch)
        batch.connection.write_now()

    def flush(self, connection: Connection) -> None:
        """Send the batches for one broker, in order. Call it before other requests to that broker. Batches that wait
        for other brokers, which may not be reading, keep waiting."""
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
            connection.when_writable(partial(self._send_waiting, connection))
            asyncio.get_running_loop().call_later(self._timeout_s, self._expire, connection)

    def _send_waiting(self, connection: Connection) -> None:
        """Send waiting batches for as long as the connection is writable."""
        waiting = self._waiting.get(connection)
        if waiting is None:
            return
        while waiting and connection.is_writable:
            self._send(waiting.popleft())
            connection.write_now()
        if waiting:
            connection.when_writable(partial(self._send_waiting, connection))
        else:
            del self._waiting[connection]

    def _expire(self, connection: Connection) -> None:
        """Fail the batches whose timeout has passed while the broker did not read from the connection."""
        waiting = self._waiting.get(connection, deque())
        while waiting and waiting[0].left_s() <= 0:
            batch = waiting.popleft()
            batch.close(self._keys)
            self.failed(batch, RequestTimeout(f"{connection.address} did not read the message in time"))
        if waiting:
            asyncio.get_running_loop().call_later(waiting[0].left_s(), self._expire, connection)
        else:
            self._waiting.pop(connection, None)  # the next message starts a new timer

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
        except Exception as error:  # this is a callback of the loop, so there is no caller that gets the exception
            self.failed(batch, error)
        else:
            self._sent += 1
            self.in_flight += 1


def _body(batch: Batch) -> bytes:
    """Return the body of a request with several messages."""
    return encode_columns([0] * len(batch.messages), [message[2] for message in batch.messages], list(batch.texts))


# ------------------------------------------------------------------------------
# Decodes the response to a send.


_new_tuple: Final = tuple.__new__  # a NamedTuple's own constructor costs twice as much

# Response codes of sends whose messages are stored, even if not flushed or replicated yet. Such messages must not be
# resent.
STORED: Final[Mapping[int, Literal["ok", "flush timeout", "slave timeout", "no slave"]]] = {
    ResponseCode.SUCCESS: "ok",
    ResponseCode.FLUSH_DISK_TIMEOUT: "flush timeout",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "slave timeout",
    ResponseCode.SLAVE_NOT_AVAILABLE: "no slave",
}


def sent_result(answer: Frame, key: str, queue: Queue) -> SendResult:
    """Return the result of a send of one message. Raises AnswerUnreadable."""
    code, _, ext, _, _, _, _, _, _ = answer
    try:
        queue_id = int(ext["queueId"])
        if queue_id != queue.queue_id:
            queue = queue._replace(queue_id=queue_id)
        return _new_tuple(SendResult, (key, str(ext["msgId"]), queue, int(ext["queueOffset"]), STORED[code], ""))
    except (KeyError, ValueError) as error:
        raise AnswerUnreadable(f"the response to a send cannot be decoded: {error!r}") from error


def sent_results(answer: Frame, keys: Sequence[str], queue: Queue) -> Iterable[SendResult]:
    """Return the results of the messages of one request, which have consecutive offsets. Raises AnswerUnreadable."""
    first = sent_result(answer, keys[0], queue)
    offset_ids = first.offset_id.split(",")
    if len(offset_ids) != len(keys):
        raise AnswerUnreadable(f"{len(offset_ids)} ids for {len(keys)} messages")
    columns = keys, offset_ids, repeat(first.queue), count(first.queue_offset), repeat(first.status), repeat("")
    return map(_new_tuple, repeat(SendResult), zip(*columns, strict=False))


# ------------------------------------------------------------------------------
# Encodes messages, and rejects invalid ones with MessageIllegal.


if TYPE_CHECKING:  # type checkers bundle the stubs of typing_extensions, so the package need not be installed
    from typing_extensions import TypeVar

    Body = TypeVar("Body", default=bytes)
else:
    from typing import TypeVar

    Body = TypeVar("Body")

PROPERTY_BYTES: Final = SENT_PROPERTY_BYTES - 100  # room for the properties that the broker adds


def checked_body(body: bytes) -> bytes:
    if not isinstance(body, bytes):
        raise MessageIllegal(f"the body is {type(body).__name__}; it must be bytes, such as text.encode()")
    if not body:
        raise MessageIllegal("the body is empty")
    if len(body) > MAX_BODY_BYTES:
        raise MessageIllegal(f"the body has {len(body)} bytes; maximum {MAX_BODY_BYTES}")
    return body


def encoded_by(encode: Callable[[Any], bytes | str], value: Any) -> bytes:
    """Return the bytes that `Producer(encode=...)` returns for a value."""
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
    """Return the encoded properties of a message. Raises MessageIllegal.

    Args:
        unique_key: the message id, which is checked already.
        later: the encoded properties for a delay, priority or lite topic; empty without any.
        is_again: True if the message is resent, and may have a tag that only other clients allow.
    """
    text = f"UNIQ_KEY\x01{unique_key}"
    if tag:
        if "||" in _plain("tag", tag) and not is_again:
            raise MessageIllegal(
                f"the tag {tag!r} contains '||', which separates tags in filters; a message has one tag"
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
        raise MessageIllegal(f"the properties have {size_bytes} bytes; maximum {PROPERTY_BYTES}")
    return text


def encoded(name: str, text: str) -> bytes:
    """Return a text as UTF-8. Raises MessageIllegal for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageIllegal(f"the {name} {unencodable(error)}") from None


def checked_id(message_id: str) -> str:
    if message_id == "":
        raise MessageIllegal("the message id is empty; leave it out for a new one")
    return _plain("message id", message_id)


def with_message_group(properties: Mapping[str, str] | None, message_group: str) -> Mapping[str, str]:
    """Return the properties of a message of a message group. Raises MessageIllegal."""
    return {**(properties or {}), SHARDING_KEY: _plain("message group", message_group)}


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
    """Return the messages of a batch as Outgoing. Raises MessageIllegal.

    Args:
        encode: called for each item that is not an Outgoing; it returns bytes unchanged and converts other values to
            bodies.
    """
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
    """Return a key. Raises MessageIllegal if it has blanks, at which brokers and consumers split keys."""
    if len(key.split()) > 1:
        raise MessageIllegal(
            f"the key {key!r} contains blanks, at which brokers split it; give {key.split()!r}, or no blanks"
        )
    return key


def _plain(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise MessageIllegal(f"the {name} {text!r} is not a text; use str({text!r})")
    if not text.strip() or "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"the {name} {text!r} may neither be blank nor contain U+0001 or U+0002")
    return text


# ------------------------------------------------------------------------------
# Middleware of producers.


@dataclass(frozen=True, slots=True)
class Sending:
    """A send, as a producer's middleware gets it.

    Attributes:
        messages: the messages; one unless `is_batch`.
        kind: "half" for the message of a transaction before its outcome, "oneway" for a send without a response.
    """

    topic: str
    messages: tuple[Outgoing, ...]
    is_batch: bool
    queue_key: str | None
    queue: Queue | None
    kind: Literal["plain", "half", "oneway"] = "plain"


SendMiddleware = Callable[[Sending, Callable[[Sending], Awaitable[SendResult]]], Awaitable[SendResult]]
