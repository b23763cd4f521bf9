"""Freed memory is kept for the next use.

The C library gives large pieces back to the system as soon as they are free, and each time that it asks for memory again, the
system clears every page of it again. A process that turns megabytes after megabytes, such as a broker that stores batches,
spends a tenth of its processor time on that.
"""

from __future__ import annotations

from typing import Final

KEPT_BYTES: Final = 16 * 1024 * 1024  # freed memory that is kept, at the end of the heap
PIECE_BYTES: Final = 4 * 1024 * 1024  # a larger piece goes back to the system when it is freed
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of the GNU C library


def keep_freed() -> bool:
    """Sets both limits for the whole process. Returns False where the C library has no such setting: only GNU's has."""
    try:
        from ctypes import CDLL

        mallopt = CDLL(None).mallopt
    except (ImportError, OSError, TypeError, AttributeError):  # TypeError: Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, PIECE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
