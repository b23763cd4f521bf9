"""The pulls of a connection that have passed the checks. A client repeats its pull of a queue with other offsets; the
compiled module serves such a pull without a further check until the generation has changed (`Generation` in `runtime`)."""

from __future__ import annotations

from ...protocol import fast
from ...protocol.codes import RequestCode
from ...protocol.config import MAX_REQUEST_HEADER_BYTES
from ...protocol.frame import ExtValue, Frame
from ..config import CHECKED_PULL_BYTES, MAX_CHECKED_PULLS
from ..groups.pulling import CheckedPull
from ..sessions.session import Session
from .responses import reply_type

_QueueKey = tuple[ExtValue, ExtValue, ExtValue]  # group, topic, queue id as the client writes them


def _key_of(frame: Frame) -> _QueueKey:
    return frame.ext["consumerGroup"], frame.ext["topic"], frame.ext["queueId"]


class KeptPulls:
    """The last checked pull of each group and queue, up to `MAX_CHECKED_PULLS`; the oldest is dropped first. Pulls are
    charged to their session. `named` has them by the bytes of the header without the offsets."""

    __slots__ = ("_names", "_new", "named")

    def __init__(self) -> None:
        self._new: tuple[Frame, CheckedPull] | None = None  # a pull that was kept since the last call of `name`
        self._names: dict[_QueueKey, bytes] = {}
        self.named: dict[bytes, CheckedPull] = {}

    def keep(self, session: Session, frame: Frame, checked: CheckedPull | None) -> None:
        """Forget the last pull of the group and queue. A call of `name` with the same frame keeps this one in its place,
        unless `checked` is None, its response has another encoding, or the module does not repeat such frames: `name` is
        not called for them, and they may be large."""
        self._forget(session, _key_of(frame))
        is_plain = frame.code == RequestCode.PULL_MESSAGE and not frame.body
        is_kept = is_plain and reply_type(frame) == frame.serialize_type
        self._new = (frame, checked) if checked and is_kept else None

    def name(self, session: Session, data: bytes, at: int, frame: Frame) -> None:
        """Let the compiled module repeat the pull of a frame, which is at a position of received bytes, if it was just kept
        and the module can read it (`fast.pull_key`)."""
        if self._new is None:
            return
        (kept, checked), self._new = self._new, None
        if kept is not frame:  # a pull of another kind, or one that was answered in a later turn
            return
        queue = _key_of(frame)
        key = fast.pull_key(data, at, MAX_REQUEST_HEADER_BYTES)
        if key is None:
            return
        if len(self._names) >= MAX_CHECKED_PULLS:
            self._forget(session, next(iter(self._names)))
        self._names[queue], self.named[key] = key, checked
        session.charge(CHECKED_PULL_BYTES + len(key))

    def _forget(self, session: Session, queue: _QueueKey) -> None:
        key = self._names.pop(queue, None)
        if key is not None:
            del self.named[key]
            session.charge(-CHECKED_PULL_BYTES - len(key))
