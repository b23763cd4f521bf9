"""RECALL_MESSAGE: a producer takes a message back that waits for its time."""

from __future__ import annotations

from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import RecallMessage, read
from ....protocol.work import Work
from ...broker import Broker
from ...config import LimitExceeded
from ...messages.recalls import Fault, Recall, recalling
from ...store.files import StoreError, StoreFull
from ..answers import Buffers, answer, small
from ..connection import Connection

_CODES = {Fault.ILLEGAL_HANDLE: ResponseCode.ILLEGAL_OPERATION, Fault.NOT_WAITING: ResponseCode.NO_MESSAGE}


def recall_message(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    """Answers when it is kept that the message was taken back."""
    header = read(RecallMessage, frame.ext)
    if broker.topics.get(header.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{header.topic}] not exist")
    broker.turns.do(_recall(broker, connection, small(frame), header))
    return None


def _recall(broker: Broker, connection: Connection, frame: Frame, header: RecallMessage) -> Work[None]:
    try:
        recall = yield from recalling(broker.timers, broker.config.name, header.topic, header.recall_handle)
    except StoreFull as error:
        connection.write(answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, remark=str(error)))
    except (StoreError, LimitExceeded) as error:
        connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(error)))
    else:
        refused = answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, remark="it is not known whether this is kept")
        reply = _answer(frame, recall)
        broker.when_kept(lambda: connection.write(reply), lambda: connection.write(refused))


def _answer(frame: Frame, recall: Recall) -> Buffers:
    if recall.fault is not None:
        return answer(frame, _CODES[recall.fault], remark=recall.reason)
    return answer(frame, ext={"msgId": recall.unique_key})
