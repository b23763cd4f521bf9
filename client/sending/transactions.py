"""Transactional sends: a half message, then its outcome; and answers to brokers that ask for a missing outcome."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

from ...protocol import properties as props
from ...protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK, RequestCode
from ...protocol.frame import Frame
from ...protocol.headers import CheckTransaction, EndTransaction, HeaderError, read, write
from ...protocol.message import MessageError, decode_record
from ...protocol.queue import Queue
from ..config import OFFSET_TIMEOUT_S
from ..errors import RocketletError
from ..log import get_logger
from ..message import Message, Outgoing, SendResult
from ..tasks import finished
from ..wire.cluster import Cluster
from ..wire.connection import Connection

log = get_logger("rocketlet.transactions")

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


class Transactions:
    """The transactions of one producer group in this process. Middleware that is a TransactionWatch hears of each outcome."""

    def __init__(self, cluster: Cluster, group: str, check: Check, middleware: Sequence[object] = ()) -> None:
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
            log.warning(
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
            log.error("transaction_check_unreadable", broker=connection.address, reason=str(error))
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
            log.exception("transaction_check_failed", message=message.message_id, hint="the broker will ask again")
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
            log.info("transaction_check_not_answered", reason=str(error), hint="the broker will ask again")
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
