"""The SQL92 filters that clients have asked for, by their expression.

A new one is parsed by a thread. The first has to import its grammar, which takes longer than the start of the broker, and
one of a thousand words takes three turns. Who asked for it waits until it is known, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import structlog

from ...protocol.codes import ResponseCode
from ..config import MAX_FILTERS, MAX_UNPARSED
from ..remoting.answers import Refused
from ..remoting.connection import Connection
from ..running.turns import Turns

if TYPE_CHECKING:
    from .sql_filter import Filter

log = structlog.get_logger("rocketlet.filters")


class Filters:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._thread = ThreadPoolExecutor(1, "filters")
        self._known: dict[str, Filter | str] = {}
        self._asked: dict[str, list[tuple[Connection, Callable[[], None], int]]] = {}
        self._parsing: set[asyncio.Future[Filter | str]] = set()
        self._waiting = 0
        self._is_stopped = False

    def find(self, expression: str) -> Filter | None:
        """None if it has to be parsed first. Raises Refused if it is no filter."""
        found = self._known.pop(expression, None)
        if found is not None:
            self._known[expression] = found  # the last to be forgotten
        if isinstance(found, str):
            raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, found)
        return found

    def when_parsed(self, connection: Connection, expression: str, action: Callable[[], None], size: int) -> None:
        """Calls `action` when `find` knows the expression, unless the connection is gone by then. size: of what waits, in
        bytes. Raises Refused if too much waits."""
        if self._is_stopped:
            raise Refused(ResponseCode.SYSTEM_BUSY, "the broker stops")
        if self._waiting >= MAX_UNPARSED:
            remark = f"{MAX_UNPARSED} requests wait for their SQL92 filter to be parsed; try again later"
            raise Refused(ResponseCode.SYSTEM_BUSY, remark)
        self._waiting += 1
        connection.charge(size)
        if expression in self._asked:
            self._asked[expression].append((connection, action, size))
            return
        self._asked[expression] = [(connection, action, size)]
        parsing = asyncio.get_running_loop().run_in_executor(self._thread, _parse, expression)
        self._parsing.add(parsing)
        parsing.add_done_callback(partial(self._parsed, expression))

    def _parsed(self, expression: str, parsing: asyncio.Future[Filter | str]) -> None:
        self._parsing.discard(parsing)
        if parsing.cancelled():
            return
        self._known[expression] = parsing.result()
        if len(self._known) > MAX_FILTERS:
            del self._known[next(iter(self._known))]
        for connection, action, size in self._asked.pop(expression):
            self._waiting -= 1
            connection.charge(-size)
            if not connection.is_closed:
                self._turns.call(action)

    async def stop(self) -> None:
        """Returns when the thread is done with what it has begun; the rest is not parsed any more."""
        self._is_stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._parsing, return_exceptions=True)


def _parse(expression: str) -> Filter | str:
    """In the thread: the filter, or why it is none."""
    from .sql_filter import FilterError, parse_filter

    try:
        return parse_filter(expression)
    except FilterError as error:
        return str(error)
    except Exception:  # a defect of ours: whoever asked is answered
        log.exception("filter_not_parsed", expression=expression[:200])
        return f"the filter {expression[:200]!r} cannot be read"
