"""RECALL_MESSAGE: a producer takes a message back that waits for its time."""

from __future__ import annotations

from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import RecallMessage, read
from ....protocol.work import Work
from ...broker import Broker
from ...messages.recalls import Fault, Recall, recalling
from ..answers import Buffers, answer
from ..connection import Connection

_CODES = {Fault.ILLEGAL_HANDLE: ResponseCode.ILLEGAL_OPERATION, Fault.NOT_WAITING: ResponseCode.NO_MESSAGE}


def recall_message(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """Answers when it is kept that the message was taken back."""
    header = read(RecallMessage, frame.ext)
    if broker.topics.get(header.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{header.topic}] not exist")
    recall = yield from recalling(broker.timers, broker.config.name, header.topic, header.recall_handle)
    return _answer(frame, recall)


def _answer(frame: Frame, recall: Recall) -> Buffers:
    if recall.fault is not None:
        return answer(frame, _CODES[recall.fault], remark=recall.reason)
    return answer(frame, ext={"msgId": recall.unique_key})
