"""Broken promises of a run, and patches of brokers and clients for moments that are too short for chance."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rocketlet.broker.runtime import Turns
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.frame import Frame

from .loop import running


class Violation(AssertionError):
    """An invariant does not hold."""


_raised: list[Violation] = []


def raise_later(text: str) -> None:
    """Note a violation. Callbacks of clients and brokers swallow exceptions, so the world raises it."""
    _raised.append(Violation(text))


def check_raised() -> None:
    """Raise the first violation."""
    if _raised:
        raise _raised[0]


def forget_raised() -> None:
    _raised.clear()


def note_raised(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle what a loop would only log: an exception of a callback. A task's exception reaches whoever awaits it."""
    if "exception" in context and {"future", "task"}.isdisjoint(context):
        raise_later(f"a callback raised {context['exception']!r}")


@contextmanager
def freezing_requests() -> Iterator[None]:
    """Let a process freeze as soon as it has written a certain request."""
    request = Connection.request

    def noted(connection: Connection, code: int, *arguments: Any, **options: Any) -> asyncio.Future[Frame]:
        if (process := running()) is not None:
            process.asks(code)
        return request(connection, code, *arguments, **options)

    with mock.patch.object(Connection, "request", noted):
        yield


class _Defects:
    """The log of a package that reports defects of the broker and continues."""

    def exception(self, event: str, **about: Any) -> None:
        raise_later(f"{event}: {sys.exception()!r}")

    def error(self, event: str, *, exc_info: BaseException, **about: Any) -> None:
        raise_later(f"{event}: {exc_info!r}")

    def warning(self, event: str, **about: Any) -> None:
        """Ignore the error of a client."""


@contextmanager
def noting_defects() -> Iterator[None]:
    """Turn a request, task or timer of a broker that fails by a defect into a violation."""
    with ExitStack() as stack:
        for log in ("remoting.dispatch.log", "runtime.log", "runtime.tasks_log"):
            stack.enter_context(mock.patch(f"rocketlet.broker.{log}", _Defects()))
        yield


@contextmanager
def pieces() -> Iterator[None]:
    """Let brokers do one piece of long work per event-loop iteration, and let time pass between two pieces."""

    def turn(turns: Turns) -> None:
        go_on(turns)
        turns._is_due = bool(turns.waiting)
        if turns._is_due:
            asyncio.get_running_loop().call_later(0.001, turns._turn)

    def go_on(turns: Turns) -> None:
        if turns.waiting:
            turns._do_piece()

    told = mock.patch("rocketlet.broker.groups.drains.SLICE", 2)
    with told, mock.patch.object(Turns, "_turn", turn), mock.patch.object(Turns, "_go_on", go_on):
        yield
