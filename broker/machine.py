"""The process on its machine: memory limits, file descriptors, the garbage collector, and files that an operator edits."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog

from .config import (
    GARBAGE_GROWTH,
    GARBAGE_MIN_BYTES,
    GARBAGE_SWEEP_S,
    MAX_CONNECTIONS,
    MAX_OPEN_SEGMENTS,
    MEMORY_SHARE,
    MIN_MEMORY_BYTES,
    MIN_OPEN_FILES,
    RESERVED_FILES,
)
from .runtime.clock import MACHINE, Clock
from .runtime.tasks import Tasks

log = structlog.get_logger("rocketlet.open_files")
garbage_log = structlog.get_logger("rocketlet.garbage")


# ------------------------------------------------------------------------------
# The memory that the machine or the container has, and how much of it this process uses.


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def default_budget() -> int:
    """Return the default of --memory: a quarter of the machine's memory, or of the container's limit if that is lower; at
    least MIN_MEMORY_BYTES."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        if text.strip().isdecimal():  # "max" is no limit
            found.append(int(text))
    return max(int(min(found) * MEMORY_SHARE), MIN_MEMORY_BYTES)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 on systems other than Linux, which do not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------
# The number of files that this process may open, and its division: RESERVED_FILES stay free for listening sockets, state
# files and name servers, segments of the store get at most half of the others, and connections get the rest.


_WANTED = MAX_CONNECTIONS + MAX_OPEN_SEGMENTS + RESERVED_FILES


class TooFewOpenFiles(Exception):
    """The process may open fewer files than a server needs."""


class OpenFileShares(NamedTuple):
    """The limit of the process, and how many of these files segments and connections may use."""

    allowed: int
    segments: int
    connections: int


def raise_limit() -> None:
    """Raise the soft limit of open files as far as a server needs and the hard limit allows, and log a shortage. Raises
    TooFewOpenFiles."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has a limit of its own behind an infinite hard one
            log.warning("open_files_limit_unchanged", allowed=soft, reason=str(error))
    found = shares()
    if found.connections < MAX_CONNECTIONS:
        log.warning(
            "few_open_files",
            **found._asdict(),
            hint=f"clients beyond {found.connections} connections will be refused; `ulimit -n {_WANTED}` before the start "
            f"(LimitNOFILE= of systemd) allows {MAX_CONNECTIONS}",
        )


def shares() -> OpenFileShares:
    """Return the division of the files that the process may open now. Raises TooFewOpenFiles if they are too few."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = _WANTED if soft == resource.RLIM_INFINITY else soft
    if allowed < MIN_OPEN_FILES:
        text = f"this process may open {allowed} files; minimum {MIN_OPEN_FILES}; run `ulimit -n 1024` before"
        raise TooFewOpenFiles(text)
    free = allowed - RESERVED_FILES
    segments = min(free // 2, MAX_OPEN_SEGMENTS)
    return OpenFileShares(allowed, segments, min(free - segments, MAX_CONNECTIONS))


# ------------------------------------------------------------------------------
# The collector of circular garbage, in a process that runs servers only.
#
# Python frees an object when nothing refers to it any more. Python's garbage collector is for objects that refer to
# each other in a circle. The collector examines all objects, repeatedly while their number grows. With the 10,000
# members of a large group this takes 130 ms, in which no client is served. A server is built to leave no circles
# behind, however its clients leave. The collector therefore examines new objects only, and every second the survivors
# are set aside (`gc.freeze`), which takes almost no time. Circles that remain are freed when the process's memory has grown
# by `GARBAGE_GROWTH` and `GARBAGE_MIN_BYTES` since the last examination of all objects, because the collector then
# examines all objects again.


_YOUNG: Final = 1  # the oldest of the generations that are still collected
_NEVER: Final = 2**31 - 1


class Garbage:
    """Limits the garbage collector of the process to new objects, while `async with Garbage()` runs. The collector is
    unchanged if the system does not report the memory of the process (only Linux does)."""

    def __init__(self, clock: Clock = MACHINE, memory_bytes: Callable[[], int] = resident_bytes) -> None:
        self._memory_bytes = memory_bytes
        self._tasks = Tasks(clock)
        self._thresholds = gc.get_threshold()
        self._limit_bytes = 0

    async def __aenter__(self) -> Garbage:
        if self._memory_bytes():
            gc.set_threshold(*self._thresholds[:2], _NEVER)
            self._tasks.every(GARBAGE_SWEEP_S, "garbage", self._sweep)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.stop()
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _sweep(self) -> None:
        used_bytes = self._memory_bytes()
        is_grown = 0 < self._limit_bytes < used_bytes
        if is_grown:
            gc.unfreeze()
            found = gc.collect()
            garbage_log.info("garbage_collected", objects=found, used_bytes=used_bytes)
        else:
            gc.collect(_YOUNG)
        gc.freeze()
        if is_grown or not self._limit_bytes:
            self._limit_bytes = int(used_bytes * GARBAGE_GROWTH) + GARBAGE_MIN_BYTES


# ------------------------------------------------------------------------------
# Files that an operator writes, such as certificates and accounts: detection of changes, and atomic replacement.


State = tuple[int, int, int] | None
T = TypeVar("T")


class BeingWritten(Exception):
    """The files have changed since the last two checks, so they may be incomplete because they are being written."""


class Watched:
    """Detects changes of files by their dates, sizes and inodes. A check takes a few microseconds, and follows the
    symlinks that Kubernetes swaps.

    Editors and configuration management write a file in place, and the first half of one can be valid on its own: YAML with
    fewer accounts, or without the permission that denies. (Apache's FileWatchService reads such a half as soon as its
    hash differs.) Changed files are therefore used only if two successive checks found them equal, and if they are
    still equal after they were read. The first read needs no earlier check, because files are written before a server
    is started.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._used = self._seen = self._still = self._states()

    def poll(self) -> bool:
        """Check the files. Return True if they should be read: they have changed, and are equal to those of the
        previous check."""
        now = self._states()
        if now == self._seen:
            self._still = now
        self._seen = now
        return now == self._still and self.has_changed

    @property
    def has_changed(self) -> bool:
        """True if the last two equal checks found other files than those that are in use."""
        return self._still != self._used

    def read_unchanged(self, read: Callable[[], T]) -> T:
        """Return the result of `read`. Raises BeingWritten if the files have changed since the last two checks."""
        still = self._still
        try:
            return read()
        finally:
            if self._states() != still:
                raise BeingWritten
            self._used = still

    def written(self) -> None:
        """Record that this process has replaced the files."""
        self._used = self._seen = self._still = self._states()

    def _states(self) -> list[State]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_readable_by_all(path: Path) -> bool:
    """Return True if every user may read the file. Raises OSError."""
    return bool(path.stat().st_mode & 0o004)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, with its previous permissions. The new content is synced to the device before the file is
    replaced. Raises OSError; the file is then unchanged."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        _write_synced(temporary, data, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
