"""Recalls of messages by their producer before their delivery time, by handles that the protocol servers return."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...protocol import properties as props
from ...protocol.bodies import Work
from ...protocol.message import HandleError, RecallHandle, decode_handle
from ...protocol.names import RETRY_PREFIX
from .timers import Timers


class RecallFault(Enum):
    ILLEGAL_HANDLE = "illegal handle"
    """The handle is invalid, or belongs to another topic or broker."""
    NOT_WAITING = "not waiting"
    """The message was delivered or recalled already, or never existed."""


class Recall(NamedTuple):
    """Result of a recall. `fault` is None for a recalled message; otherwise `reason` describes the error."""

    unique_key: str
    fault: RecallFault | None = None
    reason: str = ""


def handle_of(text: str, topic: str, broker_name: str, due_ms: int) -> str:
    """Return the handle of a message with a delivery time; empty if the message has no unique key or is a retry, as in
    Apache's brokers."""
    unique_key = props.find(text, props.UNIQUE_KEY)
    if not unique_key or " " in unique_key or topic.startswith(RETRY_PREFIX):
        return ""
    return RecallHandle(topic, broker_name, due_ms, unique_key).encoded()


def recalling(timers: Timers, broker_name: str, topic: str, text: str) -> Work[Recall]:
    """Recall the message of a handle. The recall is written when this returns; with `--flush sync`, the caller waits until it
    is on the device. Raises StoreFull, LimitExceeded."""
    try:
        handle = decode_handle(text)
    except HandleError as fault:
        return Recall("", RecallFault.ILLEGAL_HANDLE, str(fault))
    if handle.topic != topic:
        return Recall(
            "", RecallFault.ILLEGAL_HANDLE, f"recall failed, topic not match: the handle is of {handle.topic}"
        )
    if handle.broker_name != broker_name:
        reason = f"recall failed, broker service not available: the handle is of {handle.broker_name}"
        return Recall("", RecallFault.ILLEGAL_HANDLE, reason)
    found = yield from timers.recalling(topic, handle.due_ms, handle.unique_key)
    if not found:
        reason = "recall failed, no such message is waiting: it was delivered or recalled already"
        return Recall(handle.unique_key, RecallFault.NOT_WAITING, reason)
    return Recall(handle.unique_key)
