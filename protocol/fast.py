"""The compiled module's functions, or functions that decline everything where the module is absent.

A function returns None for arguments that it declines. Its caller then does the work in Python, with the same result. So
everything works without a compiler, only slower. `ROCKETLET_PURE=1` in the environment switches the compiled module off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, final

INTERFACE: Final = 6  # of the functions' arguments and results; a module that was built with another number is stale


Buffer = bytes | memoryview


@final
class EncodedSends(NamedTuple):
    """Sends that lie one after the other: their records, and the responses to those that are not one-way."""

    end: int  # where they end in the data
    code: int  # of the first one
    sends: int
    records: bytes
    queues: list[
        tuple[Any, bytes, int, int]
    ]  # the queue, its index entries, their number, and the bytes of their records
    responses: bytes


class Slice(NamedTuple):
    """The buffers of Arrow's columns for some records."""

    rows: int
    offsets: Buffer
    born_ms: Buffer
    stored_ms: Buffer
    reconsume_times: Buffer
    bodies: tuple[Buffer, Buffer]  # offsets and data
    columns: list[tuple[int, Buffer, Buffer, Buffer]]  # of each name: records that have it; validity, offsets and data
    pairs: tuple[int, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer]
    """Properties: their number; validity and offsets of the lists; offsets and data of the names, and of the values."""


def _compiled() -> ModuleType | None:
    """Return the compiled module; None if it was not built, is stale, or is switched off."""
    if os.environ.get("ROCKETLET_PURE") == "1":
        return None
    try:
        from . import _fast
    except ImportError:
        return None
    return _fast if _fast.INTERFACE == INTERFACE else None


def _decline(*_: Any) -> None:
    """Leave the work to Python."""


_module: Final = _compiled()
MODULE: Final[Literal["compiled", "pure"]] = "pure" if _module is None else "compiled"
"""What `rocketlet --version`, the metric `rocketlet_info` and results of benchmarks show."""

IS_COMPILED: Final = _module is not None
"""Checked before calls that each request makes, because to be declined costs more."""

entries: Final[Callable[[list[int], list[bytes], list[str]], bytes | None]] = getattr(_module, "entries", _decline)
"""Return the body of SEND_BATCH_MESSAGE from the messages' flags, bodies and properties."""

records: Final[Callable[..., tuple[bytes, list[int], list[int]] | None]] = getattr(_module, "records", _decline)
"""Return the records of a batch's messages, their positions and their sizes."""

code_at: Final[Callable[[bytes, int], int | None]] = getattr(_module, "code_at", _decline)
"""Return the request code of the frame at a place, if it comes first in the header; otherwise -1."""

_take_sends: Final[Callable[..., Any]] = getattr(_module, "take_sends", _decline)


def take_sends(
    data: bytes,
    at: int,
    account: bytes,
    queues: dict[bytes, tuple[Any, bytes]],
    log_end: int,
    now_ms: int,
    first_mark: bytes,
    mark_at: Callable[[int], bytes],
    born_host: bytes,
    broker_texts: tuple[bytes, bytes, bytes, bytes],
    limits: tuple[int, ...],
) -> EncodedSends | None:
    """Return the records, index entries and responses of the plain sends from a position of the data on; None if the first
    one is declined.

    Args:
        at: Where the first send begins.
        account: The account that the sends are of.
        queues: The queues that passed every check, by account, topic and number, each with its topic as records have it.
        log_end: Where the log ends.
        now_ms: The store time.
        first_mark: The mark of the first record; empty if messages are staged before it.
        mark_at: Returns the mark of a record at a position of the log.
        born_host: The client's address.
        broker_texts: The broker's address, the same in hex, the property that names its cluster, and its region.
        limits: Of a body, of properties, of a batch in bytes and in messages, of a piece of a batch in both, of a header.
    """
    found = _take_sends(
        data, at, account, queues, log_end, now_ms, first_mark, mark_at, born_host, broker_texts, limits
    )
    return None if found is None else EncodedSends._make(found)


PullKey = tuple[int, int, bytes, int, int, int]

pull_key: Final[Callable[[bytes, int, int], PullKey | None]] = getattr(_module, "pull_key", _decline)
"""Return where the pull at a place ends, its encoding, the bytes of its header that stay when a client repeats it, its
number, its queue offset and its commit offset."""

found_head: Final[Callable[[int, int, int, int, int, int], bytes | None]] = getattr(_module, "found_head", _decline)
"""Return the frame of a pull's response without its body, from the encoding, the request's number, the next offset, the
queue's first and last, and the size of the body."""

span: Final[Callable[[bytes, int], tuple[int, int, int, int] | None]] = getattr(_module, "span", _decline)
"""Return the part of the log that has the records of the first index entries, as many as a room takes: its position, its
size, that of the last record, and their number."""

_decode_slice: Final[Callable[..., Any]] = getattr(_module, "decode_slice", _decline)


def decode_slice(
    data: bytes, begin: int, end: int, names: tuple[bytes, ...], skipped: tuple[bytes, ...] | None
) -> Slice | None:
    """Return the columns of the records whose queue offsets are from `begin` up to `end`.

    Args:
        names: The properties that become columns.
        skipped: The properties that are left out of the pairs; None if no pairs are wanted.
    """
    found = _decode_slice(data, begin, end, names, skipped)
    return None if found is None else Slice._make(found)
