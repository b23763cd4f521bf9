"""The pulls of a connection that have passed the checks. A client repeats its pull of a queue with other offsets; such a
pull is not checked again until the generation has changed (`Generation` in `runtime`)."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from ...protocol import fast
from ...protocol.config import MAX_REQUEST_HEADER_BYTES
from ...protocol.frame import (
    ExtValue,
    Frame,
)
from ...protocol.headers import (
    SIGNATURE,
)
from ..config import (
    CHECKED_PULL_BYTES,
    MAX_CHECKED_PULLS,
)
from ..groups.pulling import CheckedPull
from ..sessions import (
    Session,
)
from .responses import reply_type

_Place = tuple[ExtValue, ExtValue, ExtValue]  # group, topic, queue id as the client writes them
_VARYING: Final = frozenset(("queueOffset", "commitOffset", SIGNATURE))
_check_offsets = Struct(">qq").pack


class _Kept(NamedTuple):
    """A checked pull that may be repeated: `constant` has its header fields except the offsets and the signature,
    `size` is its charge in bytes."""

    constant: Mapping[str, ExtValue]
    language: int
    serialize_type: int
    checked: CheckedPull
    size: int


class Again(NamedTuple):
    """A pull that repeats a checked pull, with the offsets of the repetition."""

    checked: CheckedPull
    offset: int
    commit_offset: int


class KeptPulls:
    """The last checked pull of each group and queue, up to `MAX_CHECKED_PULLS`; the oldest is dropped first. Pulls are
    charged to their session.

    `named` has those that the compiled module may repeat, by the bytes of the header without the offsets: at most one key
    for each group and queue. Keys are charged, too."""

    __slots__ = ("_is_new", "_names", "_pulls", "named")

    def __init__(self) -> None:
        self._pulls: dict[_Place, _Kept] = {}
        self._is_new = False  # True if a pull was kept since the last call of `name`
        self.named: dict[bytes, CheckedPull] = {}
        self._names: dict[_Place, bytes] = {}

    def name(self, session: Session, data: bytes, at: int, frame: Frame) -> None:
        """Let the compiled module repeat a pull that was just kept, if its response has the encoding of the request, it has
        no filter, and the module can read it (`fast.pull_key`). Do nothing if no pull was kept.

        Args:
            session: the client that is charged
            data: received bytes
            at: position of the pull
            frame: the pull
        """
        if not self._is_new:
            return
        self._is_new = False
        again = self.like(frame) if reply_type(frame) == frame.serialize_type else None
        if again is None or not again.checked.is_unfiltered:
            return
        key = fast.pull_key(data, at, MAX_REQUEST_HEADER_BYTES)
        if key is not None:
            ext = frame.ext
            place = ext["consumerGroup"], ext["topic"], ext["queueId"]
            self._forget_name(session, place)
            self.named[key], self._names[place] = again.checked, key
            session.charge(len(key))

    def like(self, frame: Frame) -> Again | None:
        """Return the checked pull that a pull repeats, with the offsets of the repetition. Return None if no such pull is
        kept, an offset is invalid, or something else than the offsets and the signature differs."""
        ext = dict(frame.ext)
        try:
            kept = self._pulls[ext["consumerGroup"], ext["topic"], ext["queueId"]]
            offset, commit_offset = int(ext.pop("queueOffset")), int(ext.pop("commitOffset"))
            _check_offsets(offset, commit_offset)
        except (KeyError, ValueError, StructError):  # the caller decodes the pull, and refuses an invalid one
            return None
        ext.pop(SIGNATURE, None)  # the signature of this pull was verified before
        if ext != kept.constant or (frame.language, frame.serialize_type) != (kept.language, kept.serialize_type):
            return None
        return Again(kept.checked, offset, commit_offset)

    def keep(self, session: Session, frame: Frame, checked: CheckedPull | None) -> None:
        """Keep a pull in place of the last one of its group and queue. If `checked` is None, only forget the last one."""
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
        self._pulls[place] = _Kept(constant, frame.language, frame.serialize_type, checked, size)
        self._is_new = True
        session.charge(size)

    def _forget(self, session: Session, place: _Place) -> None:
        kept = self._pulls.pop(place, None)
        if kept is not None:
            session.charge(-kept.size)
            self._forget_name(session, place)

    def _forget_name(self, session: Session, place: _Place) -> None:
        key = self._names.pop(place, None)
        if key is not None:
            session.charge(-len(key))
            self.named.pop(key, None)
