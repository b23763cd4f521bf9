"""How the members of a group get a topic's messages: by queues that are theirs (PULL), or any message (POP). An administrator
says it; members ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import structlog

from ...protocol.pop_bodies import PULL, RequestMode, decode_request_modes, encode_request_modes
from ...protocol.schema import BodyError
from ..config import LIMITS, LimitExceeded, Limits
from ..store.files import read_state, write_state

log = structlog.get_logger("rocketlet.groups")


class RequestModes:
    """Kept in a file. Without a word, members pull."""

    def __init__(self, path: Path, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._path = path
        self._modes: dict[tuple[str, str], RequestMode] = {}
        state = read_state(path)
        if state is not None:
            try:
                modes = decode_request_modes(orjson.dumps(state))
            except BodyError as fault:
                log.error(
                    "request_modes_unreadable",
                    file=str(path),
                    reason=str(fault),
                    hint="all groups pull until their modes are set again",
                )
                modes = []
            self._modes = {(mode.group, mode.topic): mode for mode in modes}

    def __iter__(self) -> Iterator[RequestMode]:
        return iter(self._modes.values())

    def of(self, group: str, topic: str) -> RequestMode:
        return self._modes.get((group, topic)) or RequestMode(topic, group, PULL)

    def put(self, mode: RequestMode) -> None:
        """Raises LimitExceeded, StoreFull."""
        key = mode.group, mode.topic
        if key not in self._modes and len(self._modes) >= self._limits.max_request_modes:
            raise LimitExceeded(f"this broker keeps {self._limits.max_request_modes} request modes")
        modes = {**self._modes, key: mode}
        write_state(self._path, orjson.loads(encode_request_modes(modes.values())))
        self._modes = modes
