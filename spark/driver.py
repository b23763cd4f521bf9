"""What the driver knows and the planner's process needs: finished batches, the parent process, lag of a query."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from ..client.errors import RocketletError, get_logger
from ..protocol.names import Queue
from .checkpoint import from_offset
from .config import HOLD_S, LEDGER_POLL_INTERVAL_S

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# The batches that Spark has finished, reported by the driver to the planner.
#
# Spark notifies a Python source that a batch is finished only when it asks for the next one: not when the query is
# stopped before that. A listener in the driver's own Python process is notified immediately, and records it here, in a folder
# that the driver makes and the planner reads. Its name has the JVM's id and start time: a container may start again
# with the same ids and the same /tmp. The planner of a stopped query looks here before it leaves the group. There is
# one file for each source of each run of a query: several queries of a driver, or several sources of one, may be
# members of one group.


PREFIX: Final = "rocketlet-spark-"
ENDED: Final = "ended"
HOLD: Final = "hold"


class Ledger:
    """`folder` must be the driver's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def made(cls, jvm: int) -> Ledger:
        """A new one for the queries of a driver's JVM, in a folder that only this user can read."""
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{jvm}-{_started(jvm)}-")))

    @classmethod
    def found(cls) -> Ledger | None:
        """The ledger of the JVM which this process works for, an ancestor; None if its driver makes none."""
        for process in _ancestors():
            for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{process}-{_started(process)}-*"):
                if folder.stat().st_uid == os.getuid():
                    return cls(folder)
        return None

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def note(self, group: str, run: str, source: int, offset: dict[str, Any], *, has_ended: bool = False) -> None:
        """The newest offset that a run of a query has finished of one of its sources, by their order in the query;
        `has_ended`: there will be none after it."""
        path = self._folder / f"{_prefix(group)}{run}-{source}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([offset, has_ended]))
        os.replace(new, path)

    def hold(self, group: str) -> None:
        """Keep the queries of a group in this driver from beginning a batch for 10 s, or until `release`."""
        (self._folder / f"{_prefix(group)}{HOLD}").touch()

    def hold_all(self) -> None:
        """Like `hold`, for the queries of all groups."""
        (self._folder / HOLD).touch()

    def release(self, group: str) -> None:
        (self._folder / f"{_prefix(group)}{HOLD}").unlink(missing_ok=True)

    def release_all(self) -> None:
        (self._folder / HOLD).unlink(missing_ok=True)

    def is_held(self, group: str) -> bool:
        """Return True while a hold is in force. Remove one that its driver has not renewed, and log it."""
        return any(self._is_in_force(self._folder / name) for name in (f"{_prefix(group)}{HOLD}", HOLD))

    def _is_in_force(self, path: Path) -> bool:
        try:
            age_s = abs(time.time() - path.stat().st_mtime)  # the clock may have been set back
        except OSError:
            return False
        if age_s <= HOLD_S:
            return True
        path.unlink(missing_ok=True)
        log.warning("hold_expired", hint="rocketlet.spark.stop ended without releasing its query, which continues")
        return False

    def note_end(self) -> None:
        """A query has ended that has finished nothing."""
        (self._folder / ENDED).write_text(str(time.time_ns()))

    def finished(self, group: str, planned: dict[str, Any], before: dict[str, Any], patience_s: float) -> bool:
        """Whether Spark has finished a query's last planned batch. Waits until that, or the end of the query, is noted.

        before: the batch before the last one, by which the notes of this query are known from those of others.
        """
        end_s = time.monotonic() + patience_s
        ended = self._read(ENDED)
        while time.monotonic() < end_s and self._folder.exists():
            if self.has_noted(group, planned):
                return True
            own = [has_ended for _, (offset, has_ended) in self._notes(group) if offset == before]
            if any(own) or (not own and self._read(ENDED) != ended):
                return False
            time.sleep(LEDGER_POLL_INTERVAL_S)
        return False

    def has_noted(self, group: str, planned: dict[str, Any]) -> bool:
        """Return True if Spark has finished a batch."""
        return any(offset == planned for _, (offset, _) in self._notes(group))

    def forget(self, group: str) -> None:
        """Removes the notes of earlier queries of the group."""
        for path, (_, has_ended) in self._notes(group):
            if has_ended:
                path.unlink(missing_ok=True)

    def _notes(self, group: str) -> list[tuple[Path, tuple[dict[str, Any], bool]]]:
        """The offset that each source of each run has finished last, and whether the run has ended."""
        found = [(path, self._read(path.name)) for path in self._folder.glob(f"{_prefix(group)}*.json")]
        return [(path, json.loads(text)) for path, text in found if text]

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text()
        except OSError:
            return ""


def _prefix(group: str) -> str:
    return f"{quote(group, safe='')}@"


def _started(process: int) -> str:
    """Return the start time of a process, in ticks of the kernel: a later process with the same id has another one. Empty
    where there is no /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _ancestors() -> Iterator[int]:
    """The ids of the processes above this one, nearest first; where there is no /proc, the parent alone. In a container the
    driver's JVM may be process 1."""
    process = os.getppid()
    while process > 0:
        yield process
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return


# ------------------------------------------------------------------------------
# The planner's process in the driver.
#
# `query.stop()` kills the process that Spark has made for the reader (SIGKILL, by its id): nothing there can clean
# up. So the planner lives in a child of it. The child sees that its socket to Spark is closed, and Spark's loop
# around the reader calls `stop`. If the child is killed, for example because memory is short, its parent reports to Spark
# why the query ends.


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
            "ran out of memory. Nothing is lost: start the query again, and it resumes from its checkpoint"
        )
    os._exit(os.WEXITSTATUS(status))


# ------------------------------------------------------------------------------
# How far a query is behind, per queue, from what Spark reports to a StreamingQueryListener.


def lag(progress: StreamingQueryProgress) -> dict[Queue, int]:
    """How many messages of each queue were not planned yet; empty for a query of other sources. `progress` is a listener's
    `event.progress`. Spark gives a Python source no place for metrics of its own but the text `latestOffset`."""
    found: dict[Queue, int] = {}
    for source in progress.sources:
        try:
            latest = json.loads(source.latestOffset or "null")
            ranges = from_offset(latest["offsets"]).ranges
        except (KeyError, TypeError, ValueError):
            continue  # from another source
        found |= {queue: end - planned for queue, (planned, end) in ranges.items()}
    return found
