"""A handler as something that can be awaited, whatever it is, with its middleware around it.

A handler that is a plain function runs in a thread, so that it cannot stop the heartbeats.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, cast

Called = Callable[[Any], Awaitable[Any]]
Inner = Callable[[Callable[..., Awaitable[Any]]], Called]


class Calling:
    """Calls a handler that is called `at_once` times at the same time, at most. Raises its exceptions. `inner` is around
    the handler, inside of all middleware."""

    def __init__(
        self,
        handler: Callable[..., Any],
        at_once: int,
        middleware: Sequence[Callable[[Any, Called], Awaitable[Any]]],
        inner: Inner | None = None,
    ) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()
        coroutine = self._as_coroutine(handler, at_once)
        self.call: Called = coroutine if inner is None else inner(coroutine)
        for layer in reversed(middleware):
            self.call = _around(layer, self.call)

    def _as_coroutine(self, handler: Callable[..., Any], at_once: int) -> Callable[..., Awaitable[Any]]:
        is_async = inspect.iscoroutinefunction(handler)
        if is_async or inspect.iscoroutinefunction(type(handler).__call__):
            return cast("Callable[..., Awaitable[Any]]", handler)
        # As many threads as workers: a handler never waits for a thread, and the loop's own pool stays free for
        # others.
        self._executor = executor = ThreadPoolExecutor(
            at_once, "rocketlet-handler", initializer=lambda: self._threads.add(threading.get_ident())
        )
        loop = asyncio.get_running_loop()

        async def in_thread(*arguments: Any) -> Any:
            outcome, error = await loop.run_in_executor(executor, copy_context().run, caught, handler, *arguments)
            if error is not None:
                raise error
            if inspect.isawaitable(outcome):
                raise TypeError(f"{handler!r} returned an awaitable; make it an `async def` function")
            return outcome

        return in_thread

    def is_here(self) -> bool:
        """Whether this thread is one of the handler's."""
        return threading.get_ident() in self._threads

    def stop(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _around(layer: Callable[[Any, Called], Awaitable[Any]], call: Called) -> Called:
    return lambda argument: layer(argument, call)


def caught(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """A handler's result, or its exception, in its thread. A future cannot hold every exception: StopIteration leaves it
    without an end. Nobody has pressed Ctrl-C here: Python tells that the main thread alone."""
    try:
        return handler(*arguments), None
    except (StopIteration, KeyboardInterrupt) as error:
        failed = RuntimeError(f"the handler raised {type(error).__name__}")
        failed.__cause__ = error
        return None, failed
    except BaseException as error:
        return None, error
