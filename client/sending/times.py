"""When a message is to be delivered: as a level, after a time, or at one."""

from __future__ import annotations

from datetime import datetime, timedelta
from math import isfinite

from ...protocol import properties as props
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.headers import TopicName, write
from ...protocol.recall_handle import HandleError, RecallHandle, decode_handle
from ..config import MAX_INT
from ..errors import BrokerRefused, MessageIllegal
from ..wire.connection import Connection

Delay = timedelta | float
"""A time from now, or so many seconds."""


def later_text(delay_level: int, delay: Delay | None, at: datetime | None) -> str:
    """The property that keeps a message back; empty if nothing does. Raises MessageIllegal."""
    if (delay_level != 0) + (delay is not None) + (at is not None) > 1:
        raise MessageIllegal("give one of delay_level, delay and at: each says when the message is delivered")
    if delay is not None:
        delay_ms = _milliseconds(delay)
        return f"{props.TIMER_DELAY_MS}\x01{delay_ms}" if delay_ms else ""
    if at is not None:
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise MessageIllegal(f"at is {at!r}; give a datetime with a time zone, such as datetime.now(UTC) + ...")
        return f"{props.TIMER_DELIVER_MS}\x01{int(at.timestamp() * 1000)}"
    if type(delay_level) is not int or not 0 <= delay_level <= MAX_INT:
        raise MessageIllegal(f"the delay level is {delay_level!r}; 1 to 18 delay, 0 does not")
    return f"{props.DELAY}\x01{delay_level}" if delay_level else ""


def _milliseconds(delay: Delay) -> int:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds) or seconds < 0:
        raise MessageIllegal(f"delay is {delay!r}; give a timedelta or seconds, 0 or more")
    return round(seconds * 1000)


def checked_handle(text: object) -> RecallHandle:
    """Raises MessageIllegal."""
    try:
        if not isinstance(text, str):
            raise HandleError("no text")
        return decode_handle(text)
    except HandleError:
        raise MessageIllegal(
            f"{text!r:.100} is no recall handle; only what was sent with delay or at has one"
        ) from None


def is_over(error: BrokerRefused) -> bool:
    """Whether a message is not recalled because its time has come, or it was recalled before."""
    is_late = error.code == ResponseCode.ILLEGAL_OPERATION and "timestamp invalid" in (error.remark or "")
    return error.code == ResponseCode.NO_MESSAGE or is_late  # Rocketlet's answer, and Apache's


def needs_time(later: str) -> bool:
    """Whether only brokers of 5.x and Rocketlet's keep a message back so."""
    return later.startswith("TIMER")


async def check_keeps_time(connection: Connection, topic: str, timeout_s: float) -> None:
    """Raises MessageIllegal for a broker that would deliver such a message at once: Apache's of 4.9. It does not know this
    request either; one that refuses it for another reason knows it."""
    answer = await connection.ask(RequestCode.GET_TOPIC_CONFIG, write(TopicName(topic)), b"", timeout_s)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise MessageIllegal(
            f"{connection.address} is a broker of 4.9, which would deliver the message at once; it knows delay_level only. "
            "Rocketlet's brokers and Apache's of 5.x deliver at any time"
        )
