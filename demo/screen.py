"""Shows on the terminal, while the job runs, its progress and which member owns which queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .timeline import COLOURS

PLAIN_EVERY_S = 5.0
PLAIN_WIDTH = 110


class Screen:
    """`with Screen(...)`: live on a terminal; otherwise a line every 5 s, and one per event."""

    def __init__(self, total: int, *, with_spark: bool) -> None:
        self.console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        self._progress = Progress(
            TextColumn("{task.description:<22}"), BarColumn(46), MofNCompleteColumn(), TimeElapsedColumn()
        )
        names = ["sent", "consumed (departures)", *(["Spark rows (delays)"] if with_spark else [])]
        self._tasks: dict[str, TaskID] = {name: self._progress.add_task(name, total=total) for name in names}
        self._owners = Text()
        self._events: list[str] = []
        self._live = Live(self._view(), console=self.console, refresh_per_second=8, transient=True)
        self._plain_s = 0.0

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:
            self._live.stop()
        self.console.print(self._progress)

    def _view(self) -> Group:
        return Group(self._progress, Text(), self._owners, Text(), Text("\n".join(self._events[-6:]), style="dim"))

    def event(self, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')}  {text}")
        if not self.console.is_terminal:
            self.console.print(self._events[-1], highlight=False)

    def update(self, counts: Sequence[int], owners: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
        for (name, task), count in zip(self._tasks.items(), counts, strict=False):
            self._progress.update(task, completed=count, description=name)
        self._owners = _owner_lines(owners, names)
        if self.console.is_terminal:
            self._live.update(self._view())
        elif time.monotonic() - self._plain_s > PLAIN_EVERY_S:
            self._plain_s = time.monotonic()
            parts = [f"{name} {count:,}" for name, count in zip(self._tasks, counts, strict=False)]
            self.console.print("          " + ", ".join(parts), highlight=False)


def _owner_lines(owners: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Text:
    """A line per broker, a coloured cell per queue."""
    text = Text()
    known = list(dict.fromkeys(names.values()))
    for broker in sorted({str(owner["brokerName"]) for owner in owners}):
        text.append(f"{broker:<12}")
        mine = {int(owner["queueId"]): str(owner["clientId"]) for owner in owners if owner["brokerName"] == broker}
        for queue_id, client_id in sorted(mine.items()):
            name = names.get(client_id, "spark")
            colour = COLOURS[known.index(name) % len(COLOURS)] if name in known else COLOURS[5]
            text.append(f" {queue_id}:{name} ", style=f"white on {colour}")
            text.append(" ")
        text.append("\n")
    return text
