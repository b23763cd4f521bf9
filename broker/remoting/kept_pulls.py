"""The pulls of a connection that were checked. Its client sends them again with other offsets."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from ...protocol.frame import ExtValue, Frame
from ...protocol.signature import SIGNATURE
from ..config import CHECKED_PULL_BYTES, MAX_CHECKED_PULLS
from ..consuming.checked import CheckedPull
from ..sessions.session import Session

_Place = tuple[ExtValue, ExtValue, ExtValue]  # group, topic, queue id as the client writes them
_VARYING: Final = frozenset(("queueOffset", "commitOffset", SIGNATURE))
_check_offsets = Struct(">qq").pack


class _Kept(NamedTuple):
    """`constant`: all fields but the offsets. `language`: the client's. `size`: it counts as so many bytes."""

    constant: Mapping[str, ExtValue]
    language: int
    checked: CheckedPull
    size: int


class Again(NamedTuple):
    """A pull that is like one that was checked, and its own offsets."""

    checked: CheckedPull
    offset: int
    commit_offset: int


class KeptPulls:
    """The last one of each queue, of as many queues as there is room for. They are charged to their session."""

    __slots__ = ("_pulls",)

    def __init__(self) -> None:
        self._pulls: dict[_Place, _Kept] = {}

    def like(self, frame: Frame) -> Again | None:
        """The pull that this one repeats, without reading its header: all but the offsets is as it was."""
        ext = dict(frame.ext)
        try:
            kept = self._pulls.get((ext["consumerGroup"], ext["topic"], ext["queueId"]))
            if kept is None:
                return None
            offset, commit_offset = int(ext.pop("queueOffset")), int(ext.pop("commitOffset"))
            _check_offsets(offset, commit_offset)
        except (KeyError, ValueError, StructError):  # it is refused with a reason when it is read
            return None
        ext.pop(SIGNATURE, None)  # it was authorized
        if ext != kept.constant or frame.language != kept.language:
            return None
        return Again(kept.checked, offset, commit_offset)

    def keep(self, session: Session, frame: Frame, checked: CheckedPull | None) -> None:
        """The queue's last pull is this one; one that is not to be kept takes its place, too."""
        ext = frame.ext
        place = ext["consumerGroup"], ext["topic"], ext["queueId"]
        self._forget(session, place)
        if checked is None:
            return
        if len(self._pulls) >= MAX_CHECKED_PULLS:
            self._forget(session, next(iter(self._pulls)))
        constant = {name: value for name, value in ext.items() if name not in _VARYING}
        texts = (text for pair in constant.items() for text in pair if isinstance(text, str))
        size = CHECKED_PULL_BYTES + sum(map(len, texts))
        self._pulls[place] = _Kept(constant, frame.language, checked, size)
        session.charge(size)

    def _forget(self, session: Session, place: _Place) -> None:
        kept = self._pulls.pop(place, None)
        if kept is not None:
            session.charge(-kept.size)
