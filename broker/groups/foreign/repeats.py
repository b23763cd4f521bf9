"""Why messages of foreign members may be handled again: what draining cannot avoid, for metrics and administrators."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from ...clock import Clock
from ...config import MAX_NAMED_CHARS, MAX_NAMED_MEMBERS, REPEATS_S
from ...sessions.recent import Recent
from .drain import QueueKey

log = structlog.get_logger("rocketlet.groups")


class Repeats:
    """undrained: queues that moved while a reader handled messages of them. left: messages that members had been given and
    had not committed when they left."""

    def __init__(self, clock: Clock) -> None:
        self._undrained = Recent(clock.monotonic_s, REPEATS_S)
        self._left = Recent(clock.monotonic_s, REPEATS_S)
        self.undrained = 0
        self.left = 0

    def note_undrained(self, group: str, places: Sequence[QueueKey]) -> None:
        """To wait longer would keep the next readers out for one handler."""
        self.undrained += len(places)
        queues = ", ".join(f"{topic}:{queue_id}" for topic, queue_id in places[:3])
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        self._undrained.note(group, f"{group}: {queues}{more}"[:MAX_NAMED_CHARS])
        hint = "their handlers were still running"
        log.warning(
            "queues_moved_undrained", group=group, queues=places[:MAX_NAMED_MEMBERS], count=len(places), hint=hint
        )

    def note_left(self, group: str, client_id: str, messages: int) -> None:
        self.left += messages
        self._left.note(group, f"{group} ({client_id}) with {messages} messages"[:MAX_NAMED_CHARS])

    def recent(self) -> dict[str, list[str]]:
        """The latest of each group, by kind."""
        return {"undrained": self._undrained.texts(), "left": self._left.texts()}
