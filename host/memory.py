"""Keeps freed memory in the process for the next allocation.

GNU's C library returns large blocks to the system as soon as they are freed, and the system clears every page when it is
allocated again. A process that allocates and frees megabytes continuously, such as a broker that stores batches, spends
a tenth of its CPU time on that.
"""

from __future__ import annotations

from typing import Final

KEPT_BYTES: Final = 16 * 1024 * 1024  # maximum size of freed memory that is kept at the end of the heap
PIECE_BYTES: Final = 4 * 1024 * 1024  # larger blocks are returned to the system when they are freed
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of the GNU C library


def keep_freed() -> bool:
    """Set both limits for the whole process. Return False if the C library does not support them, as only GNU's does."""
    try:
        from ctypes import CDLL

        mallopt = CDLL(None).mallopt
    except (ImportError, OSError, TypeError, AttributeError):  # TypeError: Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, PIECE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
