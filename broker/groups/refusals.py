"""Heartbeats that were refused: the client reads nothing, and most clients say nothing of it.

A client says who it is every 30 s, so a refusal that has not come again for longer is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from ..clock import Clock
from ..config import MAX_NAMED_CHARS, MAX_NAMED_MEMBERS
from ..sessions.recent import Recent

log = structlog.get_logger("rocketlet.groups")


class Refusals:
    """`count`: of all heartbeats that were refused."""

    def __init__(self, clock: Clock) -> None:
        self._recent = Recent(clock.monotonic_s)
        self.recent = self._recent.texts
        self.count = 0

    def note(self, peer: str, client_id: str, groups: Sequence[str], reason: str, *, is_news: bool) -> None:
        """`is_news`: whether the log does not have it of this client's address already."""
        self.count += 1
        named = " ".join(groups[:MAX_NAMED_MEMBERS])[:MAX_NAMED_CHARS]
        text = f"{client_id[:MAX_NAMED_CHARS]} ({peer}) of {named or 'a group'}: {reason[:MAX_NAMED_CHARS]}"
        self._recent.note((peer, named), text)
        if is_news:
            log.warning("heartbeat_refused", client=client_id, peer=peer, groups=named, reason=reason)
