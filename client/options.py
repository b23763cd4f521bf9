"""The types of what consumers are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from ..protocol.allocation import Strategy
from ..protocol.bodies import Queue
from .access import Access
from .config import PullLimits, Start
from .handling import Middleware
from .listeners import Assigned, Listener

Place = Literal["first", "last"] | int | Mapping[Queue, int]
"""Where to go on: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


class Options(TypedDict, total=False):
    """What a consumer can be given besides its handler and batch_size; for type checkers."""

    concurrency: int
    orderly: bool
    broadcasting: bool
    offsets_file: Path | None
    start: Start
    strategy: Strategy
    pull: PullLimits | None
    max_reconsume_times: int | None
    commit_interval_s: float
    drain_s: float
    on_assigned: Assigned | None
    on_revoked: Listener | None
    access: Access | None
    middleware: Sequence[Middleware]
