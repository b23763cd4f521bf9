"""Broken promises of a run, and patches of brokers and clients that notice them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rocketlet.client.wire.connection import Connection

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
    call = Connection.call

    def noted(connection: Connection, code: int, *arguments: Any) -> None:
        if (process := running()) is not None:
            process.asks(code)
        call(connection, code, *arguments)

    with mock.patch.object(Connection, "call", noted):
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
        for log in ("remoting.dispatch.log", "runtime.turns.log", "runtime.timeouts.log", "runtime.tasks.log"):
            stack.enter_context(mock.patch(f"rocketlet.broker.{log}", _Defects()))
        yield
