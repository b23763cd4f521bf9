"""The broker's requests to clients, and their responses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from ..config import ASKED_BYTES, CLIENT_ANSWER_S, LimitExceeded
from ..runtime.clock import Timer
from ..runtime.runtime import Runtime
from .events import Answer, ClientRequest
from .session import Session

MAX_NUMBER = 0x7FFF_FFFF  # greatest number of a request to a client: a signed number of 32 bits
Answered = Callable[[Answer | None], None]


class ClientRequests:
    """The open requests to all sessions, and on whose behalf they were sent."""

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._open: dict[Session, set[int]] = {}
        self._numbers = itertools.count(1)
        self._open_by: Counter[Session] = Counter()
        self._waiting: dict[tuple[Session, int], tuple[Answered, Timer, Session]] = {}

    def send(self, session: Session, request: ClientRequest, answered: Answered, *, by: Session) -> None:
        """Send a request to a client.

        Args:
            answered: Called with the response; with None after CLIENT_ANSWER_S, or if the client disconnects.
            by: The client on whose behalf the request is sent.

        Raises LimitExceeded if either client has too many open requests, so that clients that never respond use up only
        their own limit.
        """
        if len(self._open.get(session, ())) >= self._limits.max_asked:
            raise LimitExceeded(f"the client has not answered {self._limits.max_asked} requests yet; retry later")
        if self._open_by[by] >= self._limits.max_asked:
            raise LimitExceeded(f"{self._limits.max_asked} requests of this client are waiting for others; retry later")
        number = next(self._numbers) & MAX_NUMBER
        key = (session, number)
        timer = self._clock.call_later(CLIENT_ANSWER_S, self._complete, key, None)
        self._waiting[key] = (answered, timer, by)
        self._open_by[by] += 1
        by.charge(ASKED_BYTES)
        self._open.setdefault(session, set()).add(number)
        session.send_request(number, request)

    def has_open(self, session: Session) -> bool:
        """Return True if a request to the client is open."""
        return session in self._open

    def answer(self, session: Session, number: int, answer: Answer) -> None:
        """Pass on a client's response to the request with this number; ignored if the request is not waited for any more."""
        self._complete((session, number), answer)

    def drop(self, session: Session) -> None:
        """Remove a session that is gone. Callers that wait for its response get None."""
        for number in list(self._open.get(session, ())):
            self._complete((session, number), None)

    def _complete(self, key: tuple[Session, int], answer: Answer | None) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            asked = self._open[key[0]]
            asked.discard(key[1])
            if not asked:
                del self._open[key[0]]
            answered, timer, by = waiting
            self._open_by[by] -= 1
            if not self._open_by[by]:
                del self._open_by[by]
            by.charge(-ASKED_BYTES)
            timer.cancel()
            answered(answer)
