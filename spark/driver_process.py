"""The planner's process in the driver.

`query.stop()` kills the process that Spark has made for the reader (SIGKILL, by its id): nothing there can clean up. So
the planner lives in a child of it. The child sees that its socket to Spark is closed, and Spark's loop around the reader
calls `stop`. If the child is killed, for example because memory is short, its parent tells Spark why the query ends.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from ..client.errors import RocketletError

_SPARKS_LOOP = "python_streaming_source_runner.py"


class PlannerKilled(RocketletError):
    """The planner's process has ended while the query ran."""


def go_on_in_child() -> None:
    """Returns in a child of this process; this one waits for it and ends with it. Does nothing elsewhere than in Spark's own
    process for a reader. Raises PlannerKilled, in the parent, if the child is killed."""
    if hasattr(os, "fork") and _is_sparks():
        child = os.fork()
        if child:
            _wait(child)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by which Spark's daemon ends its children when it ends


def _is_sparks() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.endswith(_SPARKS_LOOP):
            return True
    return False


def _wait(child: int) -> NoReturn:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise PlannerKilled(
            f"the process {child}, which plans the query's batches, was ended by {name}: look whether the driver's machine "
            "ran out of memory. Nothing is lost: start the query again, it goes on from its checkpoint"
        )
    os._exit(os.WEXITSTATUS(status))
