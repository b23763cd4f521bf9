"""Marks that say where records begin, and that no client can make.

The first record of each append ends its properties with a mark: a keyed hash of the record's position. The key is made by
chance at each start, kept in `marks.json`, and told to nobody. A client may read the mark of any record. It learns no mark
of a place where no record begins, so it can put none into a body. Records that are written in the place of a lost end of
the log have another key.

Records from before the first key have no marks: `begin` is where they begin.
"""

from __future__ import annotations

import secrets
from binascii import b2a_base64
from bisect import bisect_right
from hashlib import blake2s
from pathlib import Path
from typing import Any, Final

from ...protocol.message import BEGIN_BYTES, BEGIN_MARK
from .files import write_state

FILE: Final = "marks.json"
NOWHERE: Final = 1 << 63
_HASH_BYTES: Final = 9  # 12 characters: chance, for a disk of 1 TB full of guesses, is 1 in 10^11
_KEY_BYTES: Final = 16
_MODE: Final = 0o600


class Marks:
    """state: what `marks.json` has, None for nothing. Anything else than what was written there counts as nothing."""

    def __init__(self, state: Any = None) -> None:
        try:
            epochs = [(int(begin), bytes.fromhex(key)) for begin, key in state["epochs"]]
        except (TypeError, KeyError, ValueError):
            epochs = []
        self._epochs = sorted(epochs)
        self._key = self._epochs[-1][1] if self._epochs else b""

    @property
    def begin(self) -> int:
        """The position from which on appends begin with a mark."""
        return self._epochs[0][0] if self._epochs else NOWHERE

    def mark(self, position: int) -> bytes:
        """The mark of a record that is appended there; none while there is no key."""
        return _mark(self._key, position) if self._key else b""

    def is_mark(self, data: bytes, position: int) -> bool:
        """Whether these bytes mark the record at a position."""
        number = bisect_right(self._epochs, position, key=_begin) - 1
        return number >= 0 and len(data) == BEGIN_BYTES and data == _mark(self._epochs[number][1], position)

    def renew(self, folder: Path, begin: int, end: int, *, sync: bool) -> None:
        """Another key from the log's end on; those of what lies before its beginning are forgotten. Raises StoreFull; the
        keys are then as before."""
        first = max(bisect_right(self._epochs, begin, key=_begin) - 1, 0)
        key = secrets.token_bytes(_KEY_BYTES)
        epochs = [(at, former) for at, former in self._epochs[first:] if at < end] + [(end, key)]
        state = {"epochs": [(at, kept.hex()) for at, kept in epochs]}
        write_state(folder / FILE, state, sync=sync, mode=_MODE)
        self._epochs, self._key = epochs, key


def _begin(epoch: tuple[int, bytes]) -> int:
    return epoch[0]


def _mark(key: bytes, position: int) -> bytes:
    found = blake2s(b"%b%d" % (key, position), digest_size=_HASH_BYTES).digest()
    return BEGIN_MARK + b2a_base64(found, newline=False)
