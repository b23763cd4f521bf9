"""A client's home: the process that made it, and the event loop that it was started in.

Its sockets, timers and futures belong to both. Used from elsewhere it would wait for ever, or lose answers; and members
that were made before a fork would all have one client id, by which brokers tell who owns a queue.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident

from ..errors import ConfigError

_process = object()
"""Another one in each process: to compare it asks nobody, and before Python 3.12 `get_running_loop` asks the kernel."""


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_forked)


class Home:
    """`begin` says that the client lives here from now on, `check` that it is used where it lives, if it has begun; `enter`
    is the one or the other. All raise ConfigError."""

    __slots__ = ("_loop", "_pid", "_process", "_thread")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process = _process
        self._thread = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        if os.getpid() != self._pid:
            raise self._elsewhere()
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()

    def enter(self) -> None:
        if self._loop is None:
            self.begin()
        else:
            self.check()

    def check(self) -> None:
        loop = self._loop
        if loop is None or (loop.is_running() and get_ident() == self._thread and self._process is _process):
            return  # a thread runs one loop at a time
        if asyncio.get_running_loop() is not loop:
            raise self._elsewhere()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Calls from any thread. Does nothing once the loop is closed, or in a fork."""
        if self._loop is not None and self._process is _process:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(action)

    def _elsewhere(self) -> ConfigError:
        if os.getpid() != self._pid:
            return ConfigError(
                f"this client was made in process {self._pid} and is used in {os.getpid()}; "
                "make one in each process, after the fork"
            )
        return ConfigError(
            "this client was started in another event loop; make one in each loop, or reach the other by "
            "asyncio.run_coroutine_threadsafe"
        )
