"""A client's word on messages in its hands: done, later, or given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..config import MAX_ACKS, MAX_INVISIBLE_MS
from ..pops.values import AckStatus
from ..store.files import StoreError
from .calls import Call, set_status
from .codes import Code, Fault
from .hall import Hall
from .names import group_of, topic_of
from .receives import duration_ms
from .schema import (
    AckMessageResponse,
    ChangeInvisibleDurationResponse,
    ForwardMessageToDeadLetterQueueResponse,
)

_CODES: Final = {
    AckStatus.DONE: Code.OK,
    AckStatus.LATE: Code.OK,
    AckStatus.UNREADABLE: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.UNKNOWN: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.EXPIRED: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.NOT_KEPT: Code.INTERNAL_SERVER_ERROR,
}


def ack_message(hall: Hall, call: Call, request: Any) -> None:
    """Answers when it is on the disk."""
    group, topic = group_of(request.group), topic_of(request.topic)
    if not 0 < len(request.entries) <= MAX_ACKS:
        raise Fault(Code.BAD_REQUEST, f"a call acknowledges 1 to {MAX_ACKS} messages, not {len(request.entries)}")
    _heard(hall, call)

    def answer(outcomes: Sequence[AckStatus]) -> None:
        response = AckMessageResponse()
        codes = [_CODES[outcome] for outcome in outcomes]
        for entry, outcome, code in zip(request.entries, outcomes, codes, strict=True):
            result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
            set_status(result.status, code, _text(outcome))
        is_same = len(set(codes)) == 1
        set_status(response.status, codes[0] if is_same else Code.MULTIPLE_RESULTS, _text(outcomes[0]))
        call.answer(response)

    hall.broker.pops.ack(group, topic, [entry.receipt_handle for entry in request.entries], answer)


def _heard(hall: Hall, call: Call) -> None:
    if hall.clients.is_heard(call):
        hall.broker.pops.heard(call.client)


def change_invisible_duration(hall: Hall, call: Call, request: Any) -> Any:
    group, topic = group_of(request.group), topic_of(request.topic)
    invisible_ms = duration_ms(request.invisible_duration)
    if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
        reason = f"the invisible time is {invisible_ms} ms; 0 to {MAX_INVISIBLE_MS} are allowed"
        raise Fault(Code.ILLEGAL_INVISIBLE_TIME, reason)
    _heard(hall, call)
    changed = hall.broker.pops.change(
        group, topic, request.receipt_handle, invisible_ms, is_counted=not request.suspend
    )
    response = ChangeInvisibleDurationResponse(receipt_handle=changed.handle)
    set_status(response.status, _CODES[changed.outcome], _text(changed.outcome))
    return response


def forward_to_dead_letters(hall: Hall, call: Call, request: Any) -> None:
    group, topic = group_of(request.group), topic_of(request.topic)
    reason = f"its consumer {call.client_id[:100]} gave it up after {request.delivery_attempt} tries"

    def answer(outcomes: Sequence[AckStatus]) -> None:
        response = ForwardMessageToDeadLetterQueueResponse()
        set_status(response.status, _CODES[outcomes[0]], _text(outcomes[0]))
        call.answer(response)

    try:
        hall.broker.pops.to_dead_letters(group, topic, request.receipt_handle, reason, answer)
    except StoreError as error:
        raise Fault(Code.INTERNAL_SERVER_ERROR, str(error)) from None


def _text(outcome: AckStatus) -> str:
    return "OK" if outcome.is_done else outcome.value
