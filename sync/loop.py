"""The event loop that all producers and consumers of `rocketlet.sync` share, in a thread of its own.

It begins when it is first needed, again in a process that was forked, and it outlives anything that the user's code does in
it: if it ended, everybody who waits for it would wait for ever. It ends with the interpreter. `atexit` calls the first
registered function last, so functions that are registered after `import rocketlet.sync` may still stop their producers.
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

END_S: Final = 2.0  # for the loop to end with the interpreter; a coroutine of the user may block it
_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


class Loop:
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
        """The thread is not in a process that was forked, and its lock may be held for ever. The loop itself is kept as it
        is: closing it would take the parent's sockets out of the epoll that both have."""
        self._parents.append(self._loop)
        self._loop = self._thread = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which is cancelled if this is interrupted, as by Ctrl-C. Raises ConfigError in a
        coroutine, whose loop it would block, where gevent has replaced threads, and when the interpreter ends."""
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
            raise ConfigError("the interpreter ends; stop producers and consumers of rocketlet.sync before")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, action: Callable[[], object]) -> None:
        """Calls a function in the loop, before whatever is run later, and waits for nothing. The garbage collector may call
        this in any thread, and at the interpreter's end."""
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
            except BaseException:  # KeyboardInterrupt and SystemExit leave a loop
                log.exception("loop_interrupted", hint="middleware or a listener raised it; the others continue")

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(END_S)
            if not thread.is_alive() and not asyncio.all_tasks(loop):  # asyncio complains of tasks that nobody stopped
                loop.close()

    def _is_refused(self) -> bool:
        """Whether waiting here would block an event loop that somebody else needs. A notebook's cells, and modules that are
        imported, run within one, too, and may wait."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return False
        return running is self._loop or not _is_at_top(sys._getframe(2))


def _has_greenlets_as_threads() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _is_at_top(frame: FrameType | None) -> bool:
    """Whether the code of a module or cell has called this, by plain functions only."""
    while frame is not None:
        is_loop = str(frame.f_globals.get("__name__")).partition(".")[0] in ("asyncio", "uvloop")
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the code of no function
            return True
        if is_loop or frame.f_code.co_flags & _ASYNC:
            return False
        frame = frame.f_back
    return False
