"""The SQL92 filters that clients have asked for, by their expression.

A new one is parsed in turns with all other long work, and the request that brings it waits until then.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ...protocol.work import Work
from ..config import LIMITS, Limits
from ..running.turns import Turns
from ..sessions.refusal import Reason, Refusal
from ..sessions.session import Session
from ..sessions.shares import Shares
from .sql_filter import Filter, FilterError, parsing

log = structlog.get_logger("rocketlet.filters")

_WORD_CHARS = 64  # so much of a refused expression counts as a word


class Filters:
    """`failed`: messages that a filter could not look at, by a defect of ours."""

    def __init__(self, turns: Turns, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._turns = turns
        self._known: dict[str, Filter | str] = {}
        self._known_words = 0
        self._asked: dict[str, list[tuple[Session, Callable[[], None], int]]] = {}
        self._waiting = Shares(limits.max_unparsed)
        self.failed = 0

    def find(self, expression: str) -> Filter | None:
        """The filter of an expression; None if it must be parsed first. Raises Refusal if it is no filter."""
        found = self._known.pop(expression, None)
        if found is not None:
            self._known[expression] = found  # the last to be forgotten
        if isinstance(found, str):
            raise Refusal(Reason.BAD_EXPRESSION, found)
        return found

    def when_parsed(self, session: Session, expression: str, action: Callable[[], None], size: int) -> None:
        """Calls `action` when `find` knows the expression, unless the session is gone by then. size: bytes of the waiting
        requests. Raises Refusal if too much waits."""
        if not self._waiting.has_room(session.address):
            text = f"{self._limits.max_unparsed} requests wait for their SQL92 filter to be parsed; try again later"
            raise Refusal(Reason.BUSY, text)
        self._waiting.take(session.address)
        session.charge(size)
        if expression in self._asked:
            self._asked[expression].append((session, action, size))
            return
        self._asked[expression] = [(session, action, size)]
        self._turns.do(self._learn(expression))

    def _learn(self, expression: str) -> Work[None]:
        try:
            found: Filter | str = yield from parsing(expression, self._count_fault)
        except FilterError as error:
            found = str(error)
        except Exception:  # a defect of ours: the client is answered
            log.exception("filter_not_parsed", expression=expression[:200])
            found = f"the filter {expression[:200]!r} cannot be read"
        self._keep(expression, found)
        for session, action, size in self._asked.pop(expression):
            self._waiting.give_back(session.address)
            session.charge(-size)
            if not session.is_closed:
                self._turns.call(action)

    def _keep(self, expression: str, found: Filter | str) -> None:
        self._known[expression] = found
        self._known_words += _words(expression, found)
        limits = self._limits
        while len(self._known) > limits.max_filters or (
            self._known_words > limits.known_filter_words and len(self._known) > 1
        ):
            oldest = next(iter(self._known))
            self._known_words -= _words(oldest, self._known.pop(oldest))

    def _count_fault(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            log.error("filter_failed", exc_info=error, hint="the message counts as one that does not match")


def _words(expression: str, found: Filter | str) -> int:
    return found.words if isinstance(found, Filter) else len(expression) // _WORD_CHARS + 1
