"""Makes things happen later: tasks, turns and the clock that all of them read."""

from __future__ import annotations

from typing import NamedTuple

from ..clock import Clock
from .tasks import Tasks
from .turns import Turns


class Engine(NamedTuple):
    tasks: Tasks
    turns: Turns
    clock: Clock
