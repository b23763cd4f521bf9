"""The types of consumers' and producers' options, for code that passes them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

from ..protocol.allocation import Strategy
from ..protocol.queue import Queue
from .config import PullLimits, Start
from .consuming.handling import Middleware
from .consuming.listeners import Assigned, Listener
from .consuming.retrying import RetryPolicy
from .sending.transactions import Check
from .wire.access import Access

SeekPosition = Literal["first", "last"] | int | Mapping[Queue, int]
"""The target of a `seek`: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


class Options(TypedDict, total=False):
    """The options of a consumer besides its handler and batch_size; for type checkers."""

    concurrency: int
    orderly: bool
    broadcasting: bool
    offsets_file: Path | str | None
    start: Start
    strategy: Strategy
    pull: PullLimits | None
    batch_wait_s: float | None
    retry: RetryPolicy | None
    max_reconsume_times: int | None
    commit_interval_s: float
    suspend_queue_s: float
    drain_s: float
    on_assigned: Assigned | None
    on_revoked: Listener | None
    access: Access | None
    client_name: str | None
    middleware: Sequence[Middleware]


class SharedOptions(TypedDict, total=False):
    """The options of a SharedConsumer, besides its handler."""

    concurrency: int
    orderly: bool
    start: Literal["last", "first"]
    invisible_s: float
    max_reconsume_times: int | None
    drain_s: float
    access: Access | None
    client_name: str | None
    middleware: Sequence[Middleware]


class ProducerOptions(TypedDict, total=False):
    """The options of a producer besides its name server and group. `SendMiddleware` stays Any: it is producer.py's."""

    timeout_s: float
    retries: int
    compress_over_bytes: int
    default_queues: int
    batching: bool
    encode: Callable[[Any], bytes | str] | None
    check: Check | None
    access: Access | None
    client_name: str | None
    middleware: Sequence[Any]


class MessageOptions(TypedDict, total=False):
    """The options of any message."""

    tag: str | None
    keys: str | Sequence[str]
    properties: Mapping[str, str] | None
    queue_key: str | None


class SendOptions(MessageOptions, total=False):
    """The further options of a plain send."""

    delay_level: int
    delay: timedelta | float | None
    at: datetime | None
    queue: Queue | None
    message_id: str | None
