"""Recalls of messages by their producer before their time, with the handles that doors give out and take."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...protocol import properties as props
from ...protocol.names import RETRY_PREFIX
from ...protocol.recall_handle import HandleError, RecallHandle, decode_handle
from ...protocol.work import Work
from .timers import Timers


class Fault(Enum):
    ILLEGAL_HANDLE = "illegal handle"
    """The handle is none, or another topic's or broker's."""
    NOT_WAITING = "not waiting"
    """The message was delivered, or recalled before, or never was there."""


class Recall(NamedTuple):
    """The outcome of a recall. `fault` is None for a message that was taken back; `reason` says it in words."""

    unique_key: str
    fault: Fault | None = None
    reason: str = ""


def handle_of(text: str, topic: str, broker_name: str, due_ms: int) -> str:
    """The handle of a message with these properties that waits for a time; empty if it can have none: it needs a unique key,
    and Apache gives none for retries."""
    unique_key = props.find(text, props.UNIQUE_KEY)
    if not unique_key or " " in unique_key or topic.startswith(RETRY_PREFIX):
        return ""
    return RecallHandle(topic, broker_name, due_ms, unique_key).encoded()


def recalling(timers: Timers, broker_name: str, topic: str, text: str) -> Work[Recall]:
    """Takes back the message that a handle names. On disk when this is done, as an acknowledged message is. Raises StoreFull,
    LimitExceeded."""
    try:
        handle = decode_handle(text)
    except HandleError as fault:
        return Recall("", Fault.ILLEGAL_HANDLE, str(fault))
    if handle.topic != topic:
        return Recall("", Fault.ILLEGAL_HANDLE, f"recall failed, topic not match: the handle is of {handle.topic}")
    if handle.broker_name != broker_name:
        reason = f"recall failed, broker service not available: the handle is of {handle.broker_name}"
        return Recall("", Fault.ILLEGAL_HANDLE, reason)
    found = yield from timers.recalling(topic, handle.due_ms, handle.unique_key)
    if not found:
        reason = "recall failed, no such message waits: it was delivered, or recalled already"
        return Recall(handle.unique_key, Fault.NOT_WAITING, reason)
    return Recall(handle.unique_key)
