"""EndTransaction, and the broker's question when it does not come."""

from __future__ import annotations

from typing import Any

from ...protocol import properties as props
from ...protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK
from ...protocol.compression import Inflater
from ...protocol.headers import EndTransaction
from ...protocol.message import Record
from ...protocol.work import Work
from ..messages.properties import real_queue
from ..store.files import StoreFull
from .calls import Call, set_status
from .codes import Code, Fault
from .hall import Hall
from .messages import filling
from .names import topic_of
from .schema import EndTransactionResponse, TelemetryCommand

_UNKNOWN, _COMMIT, _ROLLBACK = 0, 1, 2
_OUTCOMES = {_COMMIT: SYS_TRANSACTION_COMMIT, _ROLLBACK: SYS_TRANSACTION_ROLLBACK}
_ID_CHARS = 32


def end_transaction(hall: Hall, call: Call, request: Any) -> Any:
    topic = topic_of(request.topic)
    if not request.transaction_id.strip():
        raise Fault(Code.INVALID_TRANSACTION_ID, "the transaction has no id")
    outcome = _OUTCOMES.get(request.resolution)
    response = EndTransactionResponse()
    set_status(response.status)
    if outcome is None:  # not known yet: it is asked for later
        return response
    position, offset = _place(request.transaction_id)
    half = hall.broker.store.record_at(position)
    if half is not None and real_queue(half)[0] != topic:  # its producers' group may have the name of another topic
        raise Fault(Code.INVALID_TRANSACTION_ID, f"the transaction is not one of the topic {topic}")
    header = EndTransaction(topic, offset, position, outcome, msg_id=request.message_id or None)
    try:
        fault = hall.broker.transactions.end(header)
    except StoreFull as error:
        raise Fault(Code.INTERNAL_SERVER_ERROR, str(error)) from None
    if fault:
        raise Fault(Code.INVALID_TRANSACTION_ID, fault)
    return response


def _place(transaction_id: str) -> tuple[int, int]:
    """Position in the log, and offset in the half queue."""
    try:
        if len(transaction_id) != _ID_CHARS:
            raise ValueError
        position, offset = int(transaction_id[:16], 16), int(transaction_id[16:], 16)
    except ValueError:
        raise Fault(Code.INVALID_TRANSACTION_ID, "the transaction's id was not given by this broker") from None
    if max(position, offset) >= 1 << 63:
        raise Fault(Code.INVALID_TRANSACTION_ID, "the transaction's id was not given by this broker")
    return position, offset


def asking(call: Call, half: Record) -> Work[None]:
    """Ask a producer on its stream for the outcome of a half message."""
    command = TelemetryCommand()
    asked = command.recover_orphaned_transaction_command
    yield from filling(asked.message, half, Inflater(), 1)
    asked.message.topic.name = props.find(half.properties, props.REAL_TOPIC) or ""
    asked.transaction_id = f"{half.physical_offset:016X}{half.queue_offset:016X}"
    if not call.is_over:
        call.send(command)
