"""A producer's sends, as its middleware sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from ...protocol.queue import Queue
from ..message import Outgoing, SendResult


@dataclass(frozen=True, slots=True)
class Sending:
    """A send, as a producer's middleware sees it. Unless `is_batch` it has one message. A `half` is the message of a
    transaction before its outcome; a `oneway` send gets no answer."""

    topic: str
    messages: tuple[Outgoing, ...]
    is_batch: bool
    queue_key: str | None
    queue: Queue | None
    kind: Literal["plain", "half", "oneway"] = "plain"


SendMiddleware = Callable[[Sending, Callable[[Sending], Awaitable[SendResult]]], Awaitable[SendResult]]
