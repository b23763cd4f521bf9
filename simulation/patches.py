"""Patches of brokers and clients, so that moments happen that are too short for chance."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from rocketlet.broker.runtime import Turns
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.frame import Frame

from .loop import running
from .violations import Violation, raise_later


@contextmanager
def freezing_requests() -> Iterator[None]:
    """A process that is to stand still at a request does so when that is written."""
    request = Connection.request

    def noted(connection: Connection, code: int, *arguments: Any, **options: Any) -> asyncio.Future[Frame]:
        process = running()
        if process is not None:
            process.asks(code)
        return request(connection, code, *arguments, **options)

    with mock.patch.object(Connection, "request", noted):
        yield


class _Defects:
    """Instead of the log of a room that reports defects of the broker there, and lets everything else go on."""

    def exception(self, event: str, **about: Any) -> None:
        raise_later(Violation(f"{event}: {sys.exception()!r}"))

    def error(self, event: str, *, exc_info: BaseException, **about: Any) -> None:
        raise_later(Violation(f"{event}: {exc_info!r}"))

    def warning(self, event: str, **about: Any) -> None:
        """A client's fault."""


@contextmanager
def noting_defects() -> Iterator[None]:
    """A request, a task or a timer of a broker that fails by a defect is a violation."""
    with ExitStack() as stack:
        for log in ("remoting.dispatch.log", "runtime.log", "runtime.tasks_log"):
            stack.enter_context(mock.patch(f"rocketlet.broker.{log}", _Defects()))
        yield


@contextmanager
def pieces() -> Iterator[None]:
    """Brokers do a piece of long work in each turn, and time passes between two."""

    def turn(turns: Turns) -> None:
        go_on(turns)
        turns._is_due = bool(turns._waiting)
        if turns._is_due:
            asyncio.get_running_loop().call_later(0.001, turns._turn)

    def go_on(turns: Turns) -> None:
        if turns._waiting:
            work = turns._waiting.popleft()
            with suppress(StopIteration):
                next(work)
                turns._waiting.append(work)

    told = mock.patch("rocketlet.broker.groups.drains.SLICE", 2)
    with told, mock.patch.object(Turns, "_turn", turn), mock.patch.object(Turns, "_go_on", go_on):
        yield
