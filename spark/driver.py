"""What the driver reports to the planner's process (finished batches), the planner's process itself, and the lag of a
query."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from ..client.errors import RocketletError, get_logger
from ..protocol.names import Queue
from .checkpoint import from_offset
from .config import HOLD_S, LEDGER_AGE_S, LEDGER_POLL_INTERVAL_S
from .worker import UPDATE, is_sparks_process

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# The ledger: batches that Spark has finished, reported by the driver to the planner.
#
# Spark reports the end of a batch to a Python source only when it requests the next batch, and therefore never reports
# the last batch of a query that is stopped. A listener in the driver's own Python process is notified when a batch has
# ended, and records the batch in a folder that the driver creates and the planner reads. The data source that `register`
# registers has the path of the folder. Whoever writes creates a missing folder, because programs that clean the temporary
# folder may delete it. The planner of a stopped query reads the ledger before it leaves the group. There is one file for
# each source of each run of a query, because several queries of a driver, or several sources of one query, may be members
# of the same group.


PREFIX: Final = "rocketlet-spark-"
ENDED: Final = "ended"
HOLD: Final = "hold"


class Ledger:
    """Finished batches of the queries of one driver that are members of groups, and holds of its queries.

    Args:
        folder: a folder that belongs to this driver only
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls) -> Ledger:
        """Create a ledger for the queries of this process, in a folder that only this user can read. Remove the folders of
        drivers that have ended without removing theirs."""
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-")))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        """Return the path of a file to write. Raises OSError if another user may have made the folder."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_own():
            raise PermissionError(
                f"{self.folder}: this is no folder of this user; delete it, or set TMPDIR for the driver"
            )
        return self.folder / name

    def _is_own(self) -> bool:
        """Return True if the folder exists, is no link, and belongs to this user. Any user may create a folder or a link of
        this name in the temporary folder once a cleaner has deleted the folder."""
        try:
            status = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()

    def record(self, group: str, run: str, source: int, offset: dict[str, Any], *, has_ended: bool = False) -> None:
        """Record the newest finished offset of a source, by its index in a run of a query. `has_ended` is True if no further
        offset follows."""
        path = self._path(f"{_prefix(group)}{run}-{source}.json")
        new = path.with_suffix(".new")
        new.write_text(json.dumps([offset, has_ended]))
        os.replace(new, path)

    def hold(self, group: str) -> None:
        """Keep the group's queries in this driver from starting a batch, until `release` or `HOLD_S` after the last call."""
        self._path(f"{_prefix(group)}{HOLD}").touch()

    def hold_all(self) -> None:
        """Keep all queries in this driver from starting a batch, like `hold`, until `release_all`."""
        self._path(HOLD).touch()

    def release(self, group: str) -> None:
        (self.folder / f"{_prefix(group)}{HOLD}").unlink(missing_ok=True)

    def release_all(self) -> None:
        (self.folder / HOLD).unlink(missing_ok=True)

    def is_held(self, group: str) -> bool:
        """Return True while a hold is in force. Remove and log a hold that was not renewed within `HOLD_S`."""
        names = (f"{_prefix(group)}{HOLD}", HOLD) if self._is_own() else ()
        return any(self._is_in_force(self.folder / name) for name in names)

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

    def record_end(self) -> None:
        """Record that a query has ended of which no batch was recorded."""
        self._path(ENDED).write_text(str(time.time_ns()))

    def wait_finished(self, group: str, planned: dict[str, Any], before: dict[str, Any], timeout_s: float) -> bool:
        """Wait until the driver has recorded the last planned batch or the end of the query, up to the timeout, and return
        True if the batch was recorded.

        Args:
            group: group of the query
            planned: offset of the last planned batch
            before: offset of the batch before it, which distinguishes records of this query from those of other queries
            timeout_s: maximum time to wait
        """
        end_s = time.monotonic() + timeout_s
        ended = self._read(ENDED)
        while time.monotonic() < end_s and (self.folder.exists() or _is_running(self.folder)):
            if self.is_finished(group, planned):
                return True
            own = [has_ended for _, (offset, has_ended) in self._records(group) if offset == before]
            if any(own) or (not own and self._read(ENDED) != ended):
                return False
            time.sleep(LEDGER_POLL_INTERVAL_S)
        return False

    def is_finished(self, group: str, planned: dict[str, Any]) -> bool:
        """Return True if the driver has recorded that Spark has finished this batch."""
        return any(offset == planned for _, (offset, _) in self._records(group))

    def has_records(self, group: str) -> bool:
        """Return True if the driver has recorded a batch of a query of the group."""
        return bool(self._records(group))

    def forget(self, group: str) -> None:
        """Remove the records of the group's queries that have ended."""
        for path, (_, has_ended) in self._records(group):
            if has_ended:
                path.unlink(missing_ok=True)

    def _records(self, group: str) -> list[tuple[Path, tuple[dict[str, Any], bool]]]:
        """Return the file, the last finished offset, and the end flag of each source of each run."""
        paths = self.folder.glob(f"{_prefix(group)}*.json") if self._is_own() else ()
        found = [(path, self._read(path.name)) for path in paths]
        return [(path, json.loads(text)) for path, text in found if text]

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text() if self._is_own() else ""
        except OSError:
            return ""


def _prefix(group: str) -> str:
    return f"{quote(group, safe='')}@"


def _started(process: int) -> str:
    """Return the start time of a process in ticks of the kernel, or an empty string if there is no /proc.

    The start time distinguishes a process from a later one with the same id, such as in a container that is restarted.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_running(folder: Path) -> bool:
    """Return True if the driver runs that has created a ledger's folder, whose name has its process id and start time."""
    found = re.match(f"{PREFIX}([0-9]+)-([0-9]*)-", folder.name)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return _started(int(found[1])) == found[2]


def _is_abandoned(folder: Path) -> bool:
    """Return True if a ledger belongs to a driver of this user that has ended. A driver that has written lately may run in
    another container."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_old = time.time() - status.st_mtime > LEDGER_AGE_S
    return status.st_uid == os.getuid() and is_old and not _is_running(folder)


# ------------------------------------------------------------------------------
# The planner's process in the driver.
#
# `query.stop()` kills Spark's process for the reader with SIGKILL, by its process id, so that this process cannot clean
# up. The planner therefore runs in a child of that process. After the kill, the child's socket to Spark is closed, and
# Spark's loop around the reader, which also runs in the child, calls `stop`. If the child is killed, for example by the
# out-of-memory killer, its parent reports to Spark why the query ends.


class PlannerKilled(RocketletError):
    """The planner's process was killed while the query ran."""


def fork_planner(ledger: Ledger | None) -> None:
    """Fork, and return in the child. The parent waits for the child, and exits with its exit code.

    Do nothing outside of Spark's processes, and without os.fork. Raises PlannerKilled in the parent if the child is killed.
    With a ledger, Spark has started this process: log a warning if that is not recognized.
    """
    if not is_sparks_process():
        if ledger is not None:
            log.warning("process_unknown", effect="a query that is stopped does not commit its last batch", hint=UPDATE)
        return
    if hasattr(os, "fork"):
        child = os.fork()
        if child:
            _wait(child)
        os.setpgid(0, 0)  # Spark's daemon signals its process group when it exits


def _wait(child: int) -> NoReturn:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise PlannerKilled(
            f"the process {child}, which plans the query's batches, was ended by {name}: check whether the driver's machine "
            "ran out of memory. Nothing is lost: start the query again, and it resumes from its checkpoint"
        )
    os._exit(os.WEXITSTATUS(status))


# ------------------------------------------------------------------------------
# The lag of a query per queue, from the progress that Spark reports to a StreamingQueryListener.


def lag(progress: StreamingQueryProgress) -> dict[Queue, int]:
    """Return the number of unplanned messages of each queue whose broker responded to the last poll. The result is
    empty before the first batch, and for a query of other sources.

    Spark has no metrics of Python sources, so the numbers are in the text `latestOffset`.

    Args:
        progress: a listener's `event.progress`
    """
    found: dict[Queue, int] = {}
    for source in progress.sources:
        try:
            ranges = from_offset(json.loads(source.latestOffset or "null")["offsets"]).ranges
        except (KeyError, TypeError, ValueError):
            continue  # from another source
        found |= {queue: end - planned for queue, (planned, end) in ranges.items()}
    return found
