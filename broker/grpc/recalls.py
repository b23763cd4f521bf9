"""RecallMessage: a producer takes a message back that waits for its time."""

from __future__ import annotations

from typing import Any, Final

from ...protocol.work import Work
from ..config import LimitExceeded
from ..messages.recalls import Fault as RecallFault
from ..messages.recalls import recalling
from ..store.files import StoreError
from .calls import Call, set_status
from .codes import Code, Fault
from .hall import Hall
from .names import topic_of
from .schema import RecallMessageResponse

_CODES: Final = {RecallFault.ILLEGAL_HANDLE: Code.BAD_REQUEST, RecallFault.NOT_WAITING: Code.MESSAGE_NOT_FOUND}


def recall_message(hall: Hall, call: Call, request: Any) -> None:
    """Answers when it is kept that the message was taken back."""
    topic = topic_of(request.topic)
    if hall.broker.topics.get(topic) is None:
        raise Fault(Code.TOPIC_NOT_FOUND, f"No topic route info of {topic}")
    try:
        hall.broker.recalls.join(call.session, _recall(hall, call, topic, request.recall_handle))
    except LimitExceeded as error:
        raise Fault(Code.TOO_MANY_REQUESTS, str(error)) from None


def _recall(hall: Hall, call: Call, topic: str, handle: str) -> Work[None]:
    broker = hall.broker
    try:
        recall = yield from recalling(broker.timers, broker.config.name, topic, handle)
    except (StoreError, LimitExceeded) as error:
        call.refuse(Code.INTERNAL_SERVER_ERROR, str(error))
        return
    if recall.fault is not None:
        call.refuse(_CODES[recall.fault], recall.reason)
        return
    response = RecallMessageResponse(message_id=recall.unique_key)
    set_status(response.status)
    broker.when_kept(
        lambda: call.answer(response),
        lambda: call.refuse(Code.INTERNAL_SERVER_ERROR, "it is not known whether this is kept"),
    )
