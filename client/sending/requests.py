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
from ...protocol.headers import CheckTransaction, EndTransaction, HeaderError, PushReply, read, write
from ...protocol.message import MessageError, Record, decode_record
from ...protocol.names import Queue
from ..config import FAILURE_CHARS, MAX_INT, OFFSET_TIMEOUT_S
from ..errors import ConfigError, MessageIllegal, RequestFailed, RocketletError, get_logger
from ..message import Message, Outgoing, SendResult
from ..wire.cluster import ClusterView
from ..wire.connection import Connection, finished
from .accumulator import encoded

log = get_logger("rocketlet.producer")
transactions_log = get_logger("rocketlet.transactions")


# ------------------------------------------------------------------------------
# Request and reply, as Apache's clients do it: a request names its client and a correlation id; its consumer sends a
# reply to the broker of the request, which pushes it to that client.


CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
REPLY: Final = "reply"
FAILURE: Final = "ROCKETLET_FAILURE"  # a property of replies: the consumer failed, and why


def request_properties(text: str, correlation_id: str, client_id: str, timeout_s: float) -> str:
    text = props.appended(text, CORRELATION_ID, correlation_id)
    text = props.appended(text, REPLY_TO_CLIENT, client_id)
    return props.appended(text, TTL, str(int(min(timeout_s * 1000, MAX_INT))))


def reply_properties(request: Message, properties: Mapping[str, str] | None) -> tuple[str, str]:
    """The topic of a reply and its properties (MessageUtil.createReplyMessage). Raises ConfigError, MessageIllegal."""
    found = request.properties
    if CORRELATION_ID not in found or REPLY_TO_CLIENT not in found or props.CLUSTER not in found:
        raise ConfigError(f"{request!r} was not sent as a request: it does not say who waits for a reply")
    fault = props.reserved_fault(properties or {})
    if fault:
        raise MessageIllegal(fault)
    system: dict[str, str] = {name: found[name] for name in (CORRELATION_ID, REPLY_TO_CLIENT, TTL) if name in found}
    text = props.encode({MESSAGE_TYPE: REPLY, **system, **(properties or {})})
    encoded("properties' text", text)
    return names.reply_topic(found[props.CLUSTER]), text


def is_awaited(message: Message) -> bool:
    """Whether somebody waits for a reply to this message, and for nobody else's: it is delivered for the first time."""
    text = message.record.properties
    return not message.reconsume_times and props.find(text, REPLY_TO_CLIENT) is not None


async def reply_failure(cluster: ClusterView, group: str, request: Message, reason: str) -> None:
    """Tells the caller that waits for a reply that there will be none. Raises nothing."""
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
    """The reason as a property may hold it: without the separators of properties, or half of a surrogate pair."""
    text = " ".join(reason.split()).encode(errors="replace").decode()
    return "".join(char for char in text if char.isprintable())[:FAILURE_CHARS]


class Requests:
    """The requests of one producer that wait for their replies."""

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
    """The reply as if it had been pulled; brokers do not say where it is stored."""
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
# Transactional sends: a half message, then its outcome; and answers to brokers that ask for a missing outcome.


Check = Callable[[Message], "bool | Awaitable[bool | None] | None"]
"""Says what became of a transaction: True commits its message, False rolls it back, None is not known yet."""

_UNKNOWN: Final = 0


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """An outcome that this process has told a broker. `commits` is None if it is not known yet; `is_check`: the broker had
    asked."""

    message_id: str
    topic: str
    tag: str | None
    keys: str
    broker: str
    commits: bool | None
    is_check: bool


@runtime_checkable
class TransactionWatch(Protocol):
    """Middleware of a producer that is told outcomes."""

    def transaction_ended(self, end: TransactionEnd) -> None: ...


def half_properties(text: str, group: str) -> str:
    """The properties of a half message."""
    return props.appended(props.appended(text, props.TRANSACTION, "true"), props.PRODUCER_GROUP, group)


class ProducerTransactions:
    """The transactions of one producer group in this process. Middleware that is a TransactionWatch hears of each outcome."""

    def __init__(self, cluster: ClusterView, group: str, check: Check, middleware: Sequence[object] = ()) -> None:
        self._watches = [layer for layer in middleware if isinstance(layer, TransactionWatch)]
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._check = check
        self._tasks: set[asyncio.Task[None]] = set()
        self._checked_bytes = 0
        self._is_closed = False
        cluster.answer(RequestCode.CHECK_TRANSACTION_STATE, self._asked)

    async def end(self, half: SendResult, message: Outgoing, *, commits: bool) -> None:
        """Tells the broker the outcome. If it cannot be told, the broker asks for it later."""
        key, position = half.message_id, int(half.offset_id[-16:], 16)
        outcome = SYS_TRANSACTION_COMMIT if commits else SYS_TRANSACTION_ROLLBACK
        header = EndTransaction(self._group, half.queue_offset, position, outcome, False, key, key)
        try:
            connection = await self._cluster.broker(half.queue.broker_name)
            await connection.request(RequestCode.END_TRANSACTION, write(header), timeout_s=OFFSET_TIMEOUT_S)
        except RocketletError as error:
            transactions_log.warning(
                "transaction_outcome_not_sent",
                message=key,
                commits=commits,
                reason=str(error),
                hint="the broker will ask for it",
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
        if self._checked_bytes + len(frame.body) > self._limits.max_checked_bytes:
            return  # the broker asks again
        self._checked_bytes += len(frame.body)
        message = Message(record, Queue(record.topic, "", record.queue_id), record.topic)
        task = asyncio.create_task(self._answer(connection, header, message))
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
                raise TypeError(f"the check returned {outcome!r}; allowed are True, False and None")
        except KeyboardInterrupt:
            raise
        except BaseException:
            transactions_log.exception(
                "transaction_check_failed", message=message.message_id, hint="the broker will ask again"
            )
            outcome = None
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
            transactions_log.info("transaction_check_not_answered", reason=str(error), hint="the broker will ask again")
            return
        self._tell(
            TransactionEnd(
                message.message_id, message.topic, message.tag, " ".join(message.keys), connection.address, outcome,
                is_check=True,
            )
        )  # fmt: skip

    async def close(self, timeout_s: float) -> None:
        """Waits for the checks that run, but not for one that calls this. None begins from now on: the broker asks again,
        another producer of the group or one that comes later."""
        self._is_closed = True
        await finished(self._tasks, timeout_s)
