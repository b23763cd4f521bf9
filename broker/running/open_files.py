"""How many files the operating system lets this process open, and how they are shared out.

Segments take half at most, connections the rest; a few stay free for listening sockets, state files and name servers.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

import structlog

from ..config import MAX_CONNECTIONS, MAX_OPEN_SEGMENTS, MIN_OPEN_FILES, RESERVED_FILES

log = structlog.get_logger("rocketlet.open_files")

_WANTED = MAX_CONNECTIONS + MAX_OPEN_SEGMENTS + RESERVED_FILES


class TooFewOpenFiles(Exception):
    """The broker cannot run with so few."""


class OpenFileShares(NamedTuple):
    """The limit of the process, and the shares of it."""

    allowed: int
    segments: int
    connections: int


def raise_limit() -> None:
    """Raises the soft limit of open files up to the hard one, and logs a shortage."""
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
    """How the open files that are allowed now are shared out. Raises TooFewOpenFiles if they are too few to run."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = _WANTED if soft == resource.RLIM_INFINITY else soft
    if allowed < MIN_OPEN_FILES:
        text = f"{allowed} open files are allowed, {MIN_OPEN_FILES} are needed; run `ulimit -n 1024` before"
        raise TooFewOpenFiles(text)
    free = allowed - RESERVED_FILES
    segments = min(free // 2, MAX_OPEN_SEGMENTS)
    return OpenFileShares(allowed, segments, min(free - segments, MAX_CONNECTIONS))
