"""The clients behind the sessions: producers by group, sessions by client id, and the broker's questions to clients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from ...protocol.admin_bodies import ConnectedClient
from ..clock import Clock, Timer
from ..config import ASKED_BYTES, CLIENT_ANSWER_S, LIMITS, MEMBER_BYTES, LimitExceeded, Limits
from .events import Answer, Question
from .session import Session

_NONE: frozenset[str] = frozenset()
MAX_NUMBER = 0x7FFF_FFFF  # a question's number: as the remoting protocol numbers its requests
Answered = Callable[[Answer | None], None]


class Clients:
    def __init__(
        self,
        clock: Clock,
        may_publish: Callable[[Session, str], bool] | None = None,
        limits: Limits = LIMITS,
        account_of: Callable[[Session], str] = lambda session: "",
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._may_publish = may_publish
        self._account_of = account_of
        self._producers: dict[str, dict[Session, ConnectedClient]] = {}
        self._by_id: dict[str, Session] = {}
        self._ids: dict[Session, frozenset[str]] = {}
        self._groups: dict[Session, frozenset[str]] = {}
        self._asked: dict[Session, set[int]] = {}
        self._turn = itertools.count()
        self._numbers = itertools.count(1)
        self._asking: Counter[Session] = Counter()
        self._waiting: dict[tuple[Session, int], tuple[Answered, Timer, Session]] = {}

    def heartbeat(
        self,
        session: Session,
        client_id: str,
        groups: tuple[str, ...],
        language: int,
        version: int,
        *,
        is_asked: bool = True,
    ) -> None:
        """Record a client and its producer groups. Unless `is_asked` is False, replies to that id go to the session from now
        on, unless a session of another account has the id. Raises LimitExceeded beyond 16 client ids or 256 producer groups
        of one session."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        if client_id not in ids or not known.issuperset(groups):
            self._take(session, client_id, groups)
        if is_asked and self._may_have(session, client_id):
            self._by_id[client_id] = session
        if groups:
            info = ConnectedClient(client_id, session.peer, language, version, self._clock.time_ms())
            for group in groups:
                self._producers.setdefault(group, {})[session] = info

    def _may_have(self, session: Session, client_id: str) -> bool:
        """A client that reconnects has another session. One of another account would get replies that are not its own."""
        former = self._by_id.get(client_id, session)
        return former is session or former.is_closed or self._account_of(former) == self._account_of(session)

    def _take(self, session: Session, client_id: str, groups: tuple[str, ...]) -> None:
        """A client id or a producer group that the session has not named before."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        fresh = known.union(groups)
        if client_id not in ids and len(ids) >= self._limits.max_client_ids:
            raise LimitExceeded(f"a connection goes by {self._limits.max_client_ids} client ids at most")
        if len(fresh) > max(self._limits.max_producer_groups, len(known)):
            raise LimitExceeded(f"a connection is in {self._limits.max_producer_groups} producer groups at most")
        session.charge(MEMBER_BYTES * (len(fresh) - len(known) + (client_id not in ids)))
        self._ids[session] = ids | {client_id}
        self._groups[session] = fresh

    def forget_producer(self, group: str, session: Session) -> None:
        """Forgets a producer group that a client has left."""
        known = self._groups.get(session, _NONE)
        if group in known:
            self._groups[session] = known - {group}
            session.charge(-MEMBER_BYTES)
        self._drop_producer(group, session)

    def _drop_producer(self, group: str, session: Session) -> None:
        members = self._producers.get(group, {})
        members.pop(session, None)
        if not members:
            self._producers.pop(group, None)

    def drop(self, session: Session) -> None:
        """The session is gone; callers that wait for its answer get None."""
        for group in self._groups.pop(session, ()):
            self._drop_producer(group, session)
        for client_id in self._ids.pop(session, ()):
            # A client that has reconnected is known by its new session already.
            if self._by_id.get(client_id) is session:
                del self._by_id[client_id]
        for number in list(self._asked.get(session, ())):
            self._settle((session, number), None)

    def producers(self, group: str) -> list[ConnectedClient]:
        return list(self._producers.get(group, {}).values())

    def all_producers(self) -> Mapping[str, list[ConnectedClient]]:
        return {group: list(members.values()) for group, members in self._producers.items()}

    def any_producer(self, group: str, topic: str) -> Session | None:
        """A session of the group that may send to the topic, each in turn; None without one. Any client that knows a
        group's name can join it, and would otherwise see the messages of others."""
        may_publish = self._may_publish
        sessions = [
            session for session in self._producers.get(group, ()) if may_publish is None or may_publish(session, topic)
        ]
        return sessions[next(self._turn) % len(sessions)] if sessions else None

    def only_id(self, session: Session) -> str | None:
        """The id of the client at that session, if there is one alone."""
        ids = self._ids.get(session, _NONE)
        return next(iter(ids)) if len(ids) == 1 else None

    def session_of(self, client_id: str) -> Session | None:
        return self._by_id.get(client_id)

    # Questions to clients

    def ask(self, session: Session, question: Question, answered: Answered, *, by: Session) -> None:
        """Asks a client; `answered` gets the answer, or None after 10 s or when the client hangs up. by: the client because
        of which it is asked. Raises LimitExceeded if one of the two has too many questions: clients that never answer take
        nobody else's places."""
        if len(self._asked.get(session, ())) >= self._limits.max_asked:
            raise LimitExceeded(f"the client has not answered {self._limits.max_asked} requests yet; try again later")
        if self._asking[by] >= self._limits.max_asked:
            raise LimitExceeded(
                f"{self._limits.max_asked} requests of this client are waiting for others; try again later"
            )
        number = next(self._numbers) & MAX_NUMBER
        key = (session, number)
        timer = self._clock.call_later(CLIENT_ANSWER_S, self._settle, key, None)
        self._waiting[key] = (answered, timer, by)
        self._asking[by] += 1
        by.charge(ASKED_BYTES)
        self._asked.setdefault(session, set()).add(number)
        session.ask(number, question)

    def is_asked(self, session: Session) -> bool:
        """Whether the client has an unanswered question."""
        return session in self._asked

    def answer(self, session: Session, number: int, answer: Answer) -> None:
        """A client's answer to the question of this number; one that nobody waits for is dropped."""
        self._settle((session, number), answer)

    def _settle(self, key: tuple[Session, int], answer: Answer | None) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            asked = self._asked[key[0]]
            asked.discard(key[1])
            if not asked:
                del self._asked[key[0]]
            answered, timer, by = waiting
            self._asking[by] -= 1
            if not self._asking[by]:
                del self._asking[by]
            by.charge(-ASKED_BYTES)
            timer.cancel()
            answered(answer)
