"""The handle by which a producer takes back a message that waits for its time: Apache's `RecallMessageHandle`, version 1.

URL-safe base64, with padding, of `v1 topic broker time key`: the time in ms, the key that the producer gave the message.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, urlsafe_b64encode
from typing import NamedTuple

from .config import MAX_ID_CHARS

_VERSION = "v1"


class HandleError(ValueError):
    """The text is no handle."""


class RecallHandle(NamedTuple):
    """`due_ms`: when the message is delivered. Apache's brokers, which cut times to seconds, give another one."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str

    def encoded(self) -> str:
        text = f"{_VERSION} {self.topic} {self.broker_name} {self.due_ms} {self.unique_key}"
        return urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises HandleError."""
    try:
        if len(text) > 8 * MAX_ID_CHARS:
            raise ValueError(text)
        version, topic, broker_name, due_ms, unique_key = (
            b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode().split(" ")
        )
        if version != _VERSION or not (due_ms.isascii() and due_ms.isdecimal() and len(due_ms) <= 18):
            raise ValueError(text)
    except (ValueError, binascii.Error):
        raise HandleError("recall handle is invalid; give the one that the answer to the send had") from None
    return RecallHandle(topic, broker_name, int(due_ms), unique_key)
