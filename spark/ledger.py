"""The batches that Spark has finished, told by the driver to the planner.

Spark tells a Python source that a batch is finished only when it asks for the next one: not when the query is stopped
before that. A listener in the driver's own Python process hears it at once, and notes it here, in a folder that the driver
makes and the planner reads. The planner of a stopped query looks here before it leaves the group. There is one file for
each source of each run of a query: several queries of a driver, or several sources of one, may be members of one group.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from .config import LEDGER_LOOK_S

PREFIX: Final = "rocketlet-spark-"
ENDED: Final = "ended"


class Ledger:
    """`folder` must be the driver's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def made(cls, jvm: int) -> Ledger:
        """A new one for the queries of a driver's JVM, in a folder that only this user can read."""
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{jvm}-")))

    @classmethod
    def found(cls) -> Ledger | None:
        """The ledger of the JVM which this process works for, an ancestor; None if its driver makes none."""
        for process in _ancestors():
            for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{process}-*"):
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

    def hold(self, group: str, *, on: bool) -> None:
        """While this is on, no query of the group in this driver begins a batch."""
        path = self._folder / f"{_prefix(group)}hold"
        if on:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def is_held(self, group: str) -> bool:
        return (self._folder / f"{_prefix(group)}hold").exists()

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
            notes = [note for _, note in self._notes(group)]
            if any(offset == planned for offset, _ in notes):
                return True
            own = [has_ended for offset, has_ended in notes if offset == before]
            if any(own) or (not own and self._read(ENDED) != ended):
                return False
            time.sleep(LEDGER_LOOK_S)
        return False

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
