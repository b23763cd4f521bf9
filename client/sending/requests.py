"""Request-reply messages, and transactional messages with their outcomes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK, RequestCode
from ...protocol.frame import ExtValue, Frame
from ...protocol.headers import OUTCOME, CheckTransaction, EndTransaction, HeaderError, PushReply, read, write
from ...protocol.message import MessageError, Record, decode_record
from ...protocol.names import Queue
from ..config import FAILURE_CHARS, MAX_INT, OFFSET_TIMEOUT_S
from ..errors import (
    BrokerRefused,
    ConfigError,
    MessageIllegal,
    RequestFailed,
    RocketletError,
    TransactionContradicted,
    get_logger,
)
from ..message import Message, Outgoing, SendResult
from ..wire.cluster import ClusterView
from ..wire.connection import Connection, finished
from .accumulator import encoded

log = get_logger("rocketlet.producer")
transactions_log = get_logger("rocketlet.transactions")


# ------------------------------------------------------------------------------
# Request and reply, compatible with Apache's clients. A request contains the id of its client and a correlation id. The
# consumer sends the reply to the broker of the request, which pushes it to that client.


CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
REPLY: Final = "reply"
FAILURE: Final = "ROCKETLET_FAILURE"  # property of a reply: the reason why the consumer failed


def request_properties(text: str, correlation_id: str, client_id: str, timeout_s: float) -> str:
    text = props.appended(text, CORRELATION_ID, correlation_id)
    text = props.appended(text, REPLY_TO_CLIENT, client_id)
    return props.appended(text, TTL, str(int(min(timeout_s * 1000, MAX_INT))))


def reply_properties(request: Message, properties: Mapping[str, str] | None) -> tuple[str, str]:
    """Return the topic and properties of a reply (MessageUtil.createReplyMessage).

    Raises ConfigError if the message is not a request, and MessageIllegal for invalid properties.
    """
    found = request.properties
    if CORRELATION_ID not in found or REPLY_TO_CLIENT not in found or props.CLUSTER not in found:
        raise ConfigError(f"{request!r} is not a request: it does not contain the client to reply to")
    fault = props.reserved_fault(properties or {})
    if fault:
        raise MessageIllegal(fault)
    system: dict[str, str] = {name: found[name] for name in (CORRELATION_ID, REPLY_TO_CLIENT, TTL) if name in found}
    text = props.encode({MESSAGE_TYPE: REPLY, **system, **(properties or {})})
    encoded("properties' text", text)
    return names.reply_topic(found[props.CLUSTER]), text


def is_awaited(message: Message) -> bool:
    """Return True if this message is a request whose sender may still wait for a reply. A reply to an earlier attempt
    may have been sent already, so this is True only for the first attempt."""
    text = message.record.properties
    return not message.reconsume_times and props.find(text, REPLY_TO_CLIENT) is not None


async def reply_failure(cluster: ClusterView, group: str, request: Message, reason: str) -> None:
    """Send a reply that reports the failure of the consumer to the waiting client. Raise nothing."""
    try:
        topic, text = reply_properties(request, {FAILURE: _one_line(reason)})
        ext: dict[str, ExtValue] = {"a": group, "b": topic, "c": names.DEFAULT_TOPIC, "d": 1, "e": 0, "f": 0, "h": 0}
        ext |= {"g": int(time.time() * 1000), "i": text}
        connection = await cluster.broker(request.queue.broker_name)
        body = f"the request failed: {_one_line(reason)}".encode()
        await connection.request(RequestCode.SEND_REPLY_MESSAGE_V2, ext, body)
    except RocketletError as error:
        log.info("failure_not_replied", message=request.message_id, reason=str(error))


def _one_line(reason: str) -> str:
    """Return a reason without characters that a property cannot contain: separators and lone surrogates."""
    text = " ".join(reason.split()).encode(errors="replace").decode()
    return "".join(char for char in text if char.isprintable())[:FAILURE_CHARS]


class Requests:
    """The requests of one producer that are waiting for replies."""

    def __init__(self, cluster: ClusterView) -> None:
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        cluster.answer(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self._replied)

    @contextmanager
    def expected(self, correlation_id: str) -> Iterator[asyncio.Future[Message]]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        try:
            yield future
        finally:
            self._waiting.pop(correlation_id, None)

    def _replied(self, connection: Connection, frame: Frame) -> None:
        try:
            header = read(PushReply, frame.ext)
        except HeaderError as error:
            log.error("reply_unreadable", broker=connection.address, reason=str(error))
            return
        future = self._waiting.get(props.find(header.properties, CORRELATION_ID) or "")
        if future is not None and not future.done():
            failure = props.find(header.properties, FAILURE)
            if failure is not None:
                future.set_exception(RequestFailed(f"the consumer of the request failed: {failure}"))
            else:
                reply = Message(_record(header, frame.body), Queue(header.topic, "", header.queue_id), header.topic)
                future.set_result(reply)
        connection.respond(frame)


def _record(header: PushReply, body: bytes) -> Record:
    """Return a reply as a record. The record's offsets are 0, because brokers do not return those of a reply."""
    return Record(
        0,
        0,
        header.queue_id,
        header.flag,
        0,
        0,
        header.sys_flag,
        header.born_timestamp,
        b"\0" * 8,
        header.store_timestamp,
        b"\0" * 8,
        header.reconsume_times,
        0,
        body,
        header.topic,
        header.properties,
    )


# ------------------------------------------------------------------------------
# Transactional sends: a half message, then its outcome; and responses to brokers that check a missing outcome.


Check = Callable[[Message], "bool | Awaitable[bool | None] | None"]
"""Returns the outcome of a transaction: True to commit its message, False to roll it back because it cannot be committed any
more, None if it is not known yet, for example because the block may still run in another process."""

_UNKNOWN: Final = 0


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """An outcome that this process has sent to a broker.

    Attributes:
        commits: True for a commit, False for a rollback, None if the outcome is not known yet.
        is_check: True if it is the response to a check by the broker.
    """

    message_id: str
    topic: str
    tag: str | None
    keys: str
    broker: str
    commits: bool | None
    is_check: bool


@runtime_checkable
class TransactionWatch(Protocol):
    """Middleware of a producer that is notified of the outcomes of transactions."""

    def transaction_ended(self, end: TransactionEnd) -> None: ...


def half_properties(text: str, group: str) -> str:
    """Return the properties of a half message."""
    return props.appended(props.appended(text, props.TRANSACTION, "true"), props.PRODUCER_GROUP, group)


class ProducerTransactions:
    """The transactions of one producer. Middleware that is a TransactionWatch is notified of each outcome that was sent to
    a broker."""

    def __init__(self, cluster: ClusterView, group: str, check: Check, middleware: Sequence[object] = ()) -> None:
        self._watches = [layer for layer in middleware if isinstance(layer, TransactionWatch)]
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._check = check
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[str] = set()
        self._checked_bytes = 0
        self._is_closed = False
        cluster.answer(RequestCode.CHECK_TRANSACTION_STATE, self._asked)

    @contextmanager
    def running(self, message_id: str) -> Iterator[None]:
        """Respond to checks of this message that its outcome is not known yet, without calling `check`."""
        self._running.add(message_id)
        try:
            yield
        finally:
            self._running.discard(message_id)

    async def end(self, half: SendResult, message: Outgoing, *, commits: bool) -> None:
        """Send the outcome to the broker. If that fails, the broker checks the outcome later. Raises
        TransactionContradicted if the broker has recorded another outcome."""
        key, position = half.message_id, int(half.offset_id[-16:], 16)
        outcome = SYS_TRANSACTION_COMMIT if commits else SYS_TRANSACTION_ROLLBACK
        header = EndTransaction(self._group, half.queue_offset, position, outcome, False, key, key)
        try:
            connection = await self._cluster.broker(half.queue.broker_name)
            code, fields = RequestCode.END_TRANSACTION, write(header)
            answer = await connection.request_unchecked(code, fields, timeout_s=OFFSET_TIMEOUT_S)
            if OUTCOME in answer.ext:
                raise TransactionContradicted(key, half.queue.topic, commits, str(answer.ext[OUTCOME]))
            if answer.code:
                raise BrokerRefused(code, answer.code, answer.remark, connection.address)
        except TransactionContradicted:
            raise
        except RocketletError as error:
            is_kept = not isinstance(error, BrokerRefused)
            transactions_log.warning(
                "transaction_outcome_not_sent",
                message=key,
                commits=commits,
                reason=str(error),
                hint=f"the broker will check the transaction{'' if is_kept else ', unless it has lost the half message'}",
            )
            return
        keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
        self._tell(
            TransactionEnd(key, half.queue.topic, message.tag, keys, connection.address, commits, is_check=False)
        )

    def _tell(self, end: TransactionEnd) -> None:
        for watch in self._watches:
            watch.transaction_ended(end)

    def _asked(self, connection: Connection, frame: Frame) -> None:
        if self._is_closed:
            return
        try:
            header = read(CheckTransaction, frame.ext)
            record = decode_record(frame.body, errors="replace")
        except (HeaderError, MessageError) as error:
            transactions_log.error("transaction_check_unreadable", broker=connection.address, reason=str(error))
            return
        message = Message(record, Queue(record.topic, "", record.queue_id), record.topic)
        if message.message_id in self._running:
            self._respond(connection, header, message, None)
            return
        if self._checked_bytes + len(frame.body) > self._limits.max_checked_bytes:
            return  # the broker repeats the check
        self._checked_bytes += len(frame.body)
        task = asyncio.create_task(self._answer(connection, header, message), name="transaction check")
        self._tasks.add(task)
        task.add_done_callback(partial(self._answered, len(frame.body)))

    def _answered(self, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._checked_bytes -= size_bytes
        self._tasks.discard(task)

    async def _answer(self, connection: Connection, header: CheckTransaction, message: Message) -> None:
        try:
            found = self._check(message)
            outcome = await found if inspect.isawaitable(found) else found
            if outcome is not None and not isinstance(outcome, bool):
                raise TypeError(f"the check returned {outcome!r}; expected True, False or None")
        except KeyboardInterrupt:
            raise
        except BaseException:
            transactions_log.exception(
                "transaction_check_failed", message=message.message_id, hint="the broker repeats the check"
            )
            outcome = None
        self._respond(connection, header, message, outcome)

    def _respond(
        self, connection: Connection, header: CheckTransaction, message: Message, outcome: bool | None
    ) -> None:
        """Send the outcome of a checked transaction; None if it is not known yet."""
        code = _UNKNOWN if outcome is None else SYS_TRANSACTION_COMMIT if outcome else SYS_TRANSACTION_ROLLBACK
        answer = EndTransaction(
            self._group,
            header.tran_state_table_offset,
            header.commit_log_offset,
            code,
            True,
            message.message_id,
            header.transaction_id,
        )
        try:
            connection.oneway(RequestCode.END_TRANSACTION, write(answer))
        except RocketletError as error:
            transactions_log.info(
                "transaction_check_not_answered", reason=str(error), hint="the broker repeats the check"
            )
            return
        self._tell(
            TransactionEnd(
                message.message_id, message.topic, message.tag, " ".join(message.keys), connection.address, outcome,
                is_check=True,
            )
        )  # fmt: skip

    async def close(self, timeout_s: float) -> None:
        """Start no more checks, and wait up to `timeout_s` for running ones, except one that calls this. The broker repeats
        other checks at another producer of the group, or at one that starts later."""
        self._is_closed = True
        await finished(self._tasks, timeout_s)
