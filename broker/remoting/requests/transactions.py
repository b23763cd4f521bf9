"""END_TRANSACTION: the outcome of a half message."""

from __future__ import annotations

import structlog

from ....protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK, ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import EndTransaction, read
from ...broker import Broker
from ..answers import Buffers, answer
from ..connection import Connection

log = structlog.get_logger("rocketlet.transactions")


def end_transaction(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    header = read(EndTransaction, frame.ext)
    if header.commit_or_rollback == 0:  # not known yet: asked for later; Apache's broker is silent, too
        return None
    if header.commit_or_rollback not in (SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK):
        remark = f"commitOrRollback is {header.commit_or_rollback}; 8 commits, 12 rolls back, 0 waits"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    fault = broker.transactions.end(header)
    if fault:
        if connection.is_news("transaction_not_ended"):
            log.warning("transaction_not_ended", peer=connection.peer, reason=fault)
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    return answer(frame)
