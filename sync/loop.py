"""The event loop that all producers and consumers of `rocketlet.sync` share, in a thread of its own.

The loop starts when it is first needed, and separately in a forked process. The loop continues after exceptions that
user code raises in it, including KeyboardInterrupt, because otherwise all threads that wait for a result would hang.
The loop ends with the interpreter. `atexit` calls functions in the reverse order of their registration, so functions
that are registered after `import rocketlet.sync` can still stop producers.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final, TypeVar

from ..client.errors import ConfigError, get_logger

log = get_logger("rocketlet.sync")

T = TypeVar("T")

END_S: Final = 2.0  # timeout for the end of the loop at the interpreter's exit; a user's coroutine may block it
_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


class Loop:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self._parents: list[asyncio.AbstractEventLoop | None] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start afresh in a forked process, which does not have the thread, and in which the lock may never be released.

        The parent's loop is kept unclosed, because closing it would remove the parent's sockets from the epoll object
        that both processes share.
        """
        self._parents.append(self._loop)
        self._loop = self._thread = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. Cancel it if this call is interrupted, for example by Ctrl-C.

        Raises ConfigError if a coroutine calls it, whose loop it would block; if gevent has replaced threads; and while the
        interpreter exits.
        """
        if _has_greenlets_as_threads():
            work.close()
            raise ConfigError(
                "gevent has replaced threads by greenlets, and rocketlet.sync needs a thread of its own; call "
                "monkey.patch_all(thread=False, socket=False, select=False), or use rocketlet.sync in another process"
            )
        if self._is_refused():
            work.close()
            raise ConfigError("rocketlet.sync blocks; in a coroutine use rocketlet.Producer and rocketlet.Consumer")
        loop = self._started()
        if loop is None:
            work.close()
            raise ConfigError("the interpreter is exiting; stop producers and consumers of rocketlet.sync before that")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, action: Callable[[], object]) -> None:
        """Schedule a function in the loop, if it runs, without waiting for it. The loop calls the function before coroutines
        that `run` gets later. The garbage collector may call this in any thread, even while the interpreter exits."""
        if self._loop is not None and not self._has_ended:
            self._loop.call_soon_threadsafe(action)

    def _started(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._loop is None and not self._has_ended:
                self._loop = loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(loop,), name="rocketlet", daemon=True)
                self._thread.start()
            return None if self._has_ended else self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._has_ended:
            try:
                loop.run_forever()
            except BaseException:  # KeyboardInterrupt and SystemExit end `run_forever`
                log.exception("loop_interrupted", hint="middleware or a listener raised it; other tasks continue")

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(END_S)
            if not thread.is_alive() and not asyncio.all_tasks(
                loop
            ):  # asyncio warns about unfinished tasks in a closed loop
                loop.close()

    def _is_refused(self) -> bool:
        """Return True if waiting here would block an event loop that other code needs.

        The cells of a notebook, and modules that are imported, may run within a loop, too, but are allowed to block it.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return False
        return running is self._loop or not _is_at_top(sys._getframe(2))


def _has_greenlets_as_threads() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _is_at_top(frame: FrameType | None) -> bool:
    """Return True if the code of a module or notebook cell has called this, through plain functions only."""
    while frame is not None:
        is_loop = str(frame.f_globals.get("__name__")).partition(".")[0] in ("asyncio", "uvloop")
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the code of a module or cell
            return True
        if is_loop or frame.f_code.co_flags & _ASYNC:
            return False
        frame = frame.f_back
    return False
