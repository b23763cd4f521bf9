"""Remembers recent refusals, to report them while they go on: a client that is refused comes again."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ..config import MAX_REFUSED, REFUSED_S


class Recent:
    """A text for each key, for as long as it comes again within `keep_s`."""

    def __init__(self, now_s: Callable[[], float], keep_s: float = REFUSED_S) -> None:
        self._now_s = now_s
        self._keep_s = keep_s
        self._latest: dict[Hashable, tuple[float, str]] = {}

    def note(self, key: Hashable, text: str) -> None:
        self._latest.pop(key, None)
        self._latest[key] = self._now_s(), text
        if len(self._latest) > MAX_REFUSED:
            del self._latest[next(iter(self._latest))]

    def texts(self) -> list[str]:
        """Newest last."""
        since_s = self._now_s() - self._keep_s
        return [text for at_s, text in self._latest.values() if at_s >= since_s]
