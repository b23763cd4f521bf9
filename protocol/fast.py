"""The functions of the compiled module, or functions that decline everything if the module is missing.

A function returns None for arguments that it declines. The caller of the function then does the work in Python, with
the same result. Everything therefore works without a compiler, only slower. `ROCKETLET_PURE=1` in the environment
disables the compiled module.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, final

# version of the functions' arguments and results; a module that was built with another version is ignored
INTERFACE: Final = 9


Buffer = bytes | memoryview


@final
class EncodedSends(NamedTuple):
    """Consecutive sends: their records, and the responses to those that are not one-way."""

    end: int  # position after the last send in the data
    code: int  # request code of the first send
    sends: int
    records: bytes
    queues: list[tuple[Any, bytes, int, int]]  # queue, its index entries, their number, and the size of their records
    responses: bytes


Answered = tuple[list[Buffer], int, int, int, int]
"""The response to a pull with a filter, its size, the number of its messages, their bytes, and the next offset."""


class PullSource(NamedTuple):
    """What a checked pull may read."""

    entries: Callable[[int, int], bytes]  # returns up to a number of packed index entries from an offset on
    answer: Callable[[int, int, int], Answered] | None  # answers a pull with a filter: its encoding, opaque and offset
    begin: int  # first offset of the queue
    next: int  # offset after the last one
    first: int  # lower offsets must be checked
    room: int  # maximum bytes of records
    limit: int  # maximum number of records
    is_admitted: bool  # False if each pull must be admitted, because it commits an offset


@final
class ServedPulls(NamedTuple):
    """Consecutive pulls that repeat checked ones, and their responses."""

    end: int  # position in the data after the last served pull
    served: int  # number of pulls
    responses: list[Buffer]
    size: int  # of the responses
    pulls: list[tuple[Any, int, int, int]]  # checked pull, its messages, their bytes, and the next offset
    shared: tuple[int, int, Buffer]  # position, size and bytes of the last records that were read


class Slice(NamedTuple):
    """Buffers of Arrow columns for records."""

    rows: int
    offsets: Buffer
    born_ms: Buffer
    stored_ms: Buffer
    reconsume_times: Buffer
    sys_flags: Buffer
    bodies: tuple[Buffer, Buffer]  # offsets and data, as stored
    # for each name: number of records that have it; validity, offsets and data
    columns: list[tuple[int, Buffer, Buffer, Buffer]]
    pairs: tuple[int, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer]
    """Properties as pairs: their number; validity and offsets of the lists; offsets and data of names and of values."""


def _compiled() -> ModuleType | None:
    """Return the compiled module; None if it was not built, has another version, or is disabled."""
    if os.environ.get("ROCKETLET_PURE") == "1":
        return None
    try:
        from . import _fast
    except ImportError:
        return None
    return _fast if _fast.INTERFACE == INTERFACE else None


def _decline(*_: Any) -> None:
    """Decline, so that the caller does the work in Python."""


_module: Final = _compiled()
MODULE: Final[Literal["compiled", "pure"]] = "pure" if _module is None else "compiled"
"""Shown by `rocketlet --version`, the metric `rocketlet_info`, and results of benchmarks."""

IS_COMPILED: Final = _module is not None
"""Checked before calls that happen once per request, because a declined call costs more."""

entries: Final[Callable[[list[int], list[bytes], list[str]], bytes | None]] = getattr(_module, "entries", _decline)
"""Return the body of SEND_BATCH_MESSAGE from the messages' flags, bodies and properties."""

records: Final[Callable[..., tuple[bytes, list[int], list[int]] | None]] = getattr(_module, "records", _decline)
"""Return the records of a batch's messages, their positions and their sizes."""

code_at: Final[Callable[[bytes, int], int | None]] = getattr(_module, "code_at", _decline)
"""Return the request code of the frame at a position, if it is the first field of the header; otherwise -1."""

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
    """Return the records, index entries and responses of the plain sends from a position on; None if the first one is
    declined.

    Args:
        data: received bytes
        at: position of the first send
        account: account of the sends
        queues: queues that have passed every check, by account, topic and queue id, each with its topic as in a record
        log_end: end of the log
        now_ms: store time
        first_mark: mark of the first record; empty if messages are staged before it
        mark_at: returns the mark of a record at a position of the log
        born_host: the client's address
        broker_texts: the broker's address, the same in hex, the property with its cluster, and its region
        limits: maximum sizes: of a body, of properties, of a batch in bytes and in messages, of a piece of a batch in
            both, and of a header
    """
    found = _take_sends(
        data, at, account, queues, log_end, now_ms, first_mark, mark_at, born_host, broker_texts, limits
    )
    return None if found is None else EncodedSends._make(found)


pull_key: Final[Callable[[bytes, int, int], bytes | None]] = getattr(_module, "pull_key", _decline)
"""Return the bytes of a pull's header that do not change when a client repeats it. Arguments: received bytes, position
of the pull, maximum header size."""

_take_pulls: Final[Callable[..., Any]] = getattr(_module, "take_pulls", _decline)


def take_pulls(
    data: bytes,
    at: int,
    max_header_bytes: int,
    checked: Mapping[bytes, Any],
    admit: Callable[[Any, int, int], PullSource | None],
    segment_at: Callable[[int], tuple[int, int, int]],
    read_at: Callable[[int, int, int], bytes],
    crc32: Callable[[bytes, int], int],
    sums: tuple[array[int], array[int], int, int],
    shared: tuple[int, int, Buffer],
    limits: tuple[int, int, int, int],
) -> ServedPulls | None:
    """Return the responses to up to 64 repeated pulls from a position on; None if the first one is declined.

    Args:
        data: received bytes
        at: position of the first pull
        max_header_bytes: maximum header size
        checked: pulls that passed every check, by their keys
        admit: returns what a checked pull with these offsets may read; None if it must be checked
        segment_at: returns start, end and file descriptor of the log's segment that contains a position
        read_at: reads bytes of a file descriptor: number of bytes, position
        crc32: continues a CRC-32
        sums: positions of the log, the CRC-32 of everything before each, the log's end, and the CRC-32 there
        shared: position, size and bytes of the last records that were read
        limits: the log's start; maximum sizes of a read, of the responses, and of shared records
    """
    found = _take_pulls(data, at, max_header_bytes, checked, admit, segment_at, read_at, crc32, sums, shared, limits)
    return None if found is None else ServedPulls._make(found)


_decode_slice: Final[Callable[..., Any]] = getattr(_module, "decode_slice", _decline)


def decode_slice(
    data: bytes, begin: int, end: int, names: tuple[bytes, ...], skipped: tuple[bytes, ...] | None
) -> Slice | None:
    """Return the columns of the records with queue offsets from `begin` up to `end` (exclusive).

    Args:
        data: records
        begin: first offset
        end: offset after the last one
        names: properties that become columns
        skipped: properties that are left out of the pairs; None if no pairs are needed
    """
    found = _decode_slice(data, begin, end, names, skipped)
    return None if found is None else Slice._make(found)
