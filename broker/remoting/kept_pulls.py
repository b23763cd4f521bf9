"""The pulls of a connection that were checked. Its client sends them again with other offsets."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.headers import PullMessage
from ..config import CHECKED_PULL_BYTES, MAX_CHECKED_PULLS
from ..consuming.checked import CheckedPull
from ..consuming.pulling import text_bytes
from ..sessions.session import Session

_Constant = tuple[object, ...]
_Place = tuple[str, str, int]  # group, topic, queue id


class _Kept(NamedTuple):
    """`constant`: all but the offsets. `size`: it counts as so many bytes."""

    constant: _Constant
    checked: CheckedPull
    size: int


class KeptPulls:
    """The last one of each queue, of as many queues as there is room for. They are charged to their session."""

    __slots__ = ("_pulls",)

    def __init__(self) -> None:
        self._pulls: dict[_Place, _Kept] = {}

    def like(self, header: PullMessage, constant: _Constant) -> CheckedPull | None:
        kept = self._pulls.get(header[:3])
        return kept.checked if kept is not None and kept.constant == constant else None

    def keep(self, session: Session, header: PullMessage, constant: _Constant, checked: CheckedPull | None) -> None:
        """The queue's last pull is this one; one that is not to be kept takes its place, too."""
        place = header[:3]
        self._forget(session, place)
        if checked is None:
            return
        if len(self._pulls) >= MAX_CHECKED_PULLS:
            self._forget(session, next(iter(self._pulls)))
        size = CHECKED_PULL_BYTES + text_bytes(header)
        self._pulls[place] = _Kept(constant, checked, size)
        session.charge(size)

    def _forget(self, session: Session, place: _Place) -> None:
        kept = self._pulls.pop(place, None)
        if kept is not None:
            session.charge(-kept.size)
