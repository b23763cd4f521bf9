"""Heartbeats that were refused: the client reads nothing, and most clients say nothing of it.

A client says who it is every 30 s, so a refusal that has not come again for longer is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from ..clock import Clock
from ..config import MAX_NAMED_CHARS, MAX_NAMED_MEMBERS, MAX_REFUSED, REFUSED_S

log = structlog.get_logger("rocketlet.groups")


class Refusals:
    """`count`: of all heartbeats that were refused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: dict[tuple[str, str], tuple[float, str]] = {}
        self.count = 0

    def note(self, peer: str, client_id: str, groups: Sequence[str], reason: str, *, is_news: bool) -> None:
        """`is_news`: whether the log does not have it of this client's address already."""
        self.count += 1
        named = " ".join(groups[:MAX_NAMED_MEMBERS])[:MAX_NAMED_CHARS]
        text = f"{client_id[:MAX_NAMED_CHARS]} ({peer}) of {named or 'a group'}: {reason[:MAX_NAMED_CHARS]}"
        key = (peer, named)
        self._latest.pop(key, None)
        self._latest[key] = (self._clock.monotonic_s(), text)
        if len(self._latest) > MAX_REFUSED:
            del self._latest[next(iter(self._latest))]
        if is_news:
            log.warning("heartbeat_refused", client=client_id, peer=peer, groups=named, reason=reason)

    def recent(self) -> list[str]:
        """The clients that were refused within the last minute and a half, and why, newest last."""
        since_s = self._clock.monotonic_s() - REFUSED_S
        return [text for at_s, text in self._latest.values() if at_s >= since_s]
