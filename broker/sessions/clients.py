"""The clients behind the sessions: producers by group, and sessions by client id."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

from ...protocol.admin_bodies import ConnectedClient
from ..config import MEMBER_BYTES, LimitExceeded
from ..runtime.runtime import Runtime
from .session import Session

_NONE: frozenset[str] = frozenset()


class Accounts(Protocol):
    """The accounts of a broker."""

    def account_name(self, session: Session) -> str:
        """Return the access key of a session's account; empty without one."""
        ...

    def may_publish(self, session: Session, topic: str) -> bool:
        """Return True if a session's account may send to a topic."""
        ...


class Clients:
    """The producers and client ids of all sessions. `accounts` is None if the broker has none."""

    def __init__(self, runtime: Runtime, accounts: Accounts | None = None) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._accounts = accounts
        self._producers: dict[str, dict[Session, ConnectedClient]] = {}
        self._by_id: dict[str, Session] = {}
        self._ids: dict[Session, frozenset[str]] = {}
        self._groups: dict[Session, frozenset[str]] = {}
        self._turn = itertools.count()

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
        """Record a client and its producer groups.

        If `is_asked`, replies to the client id are sent to this session from now on, unless an open session of another
        account has the id. Raises LimitExceeded if the session has too many client ids or producer groups
        (`Limits.max_client_ids`, `max_producer_groups`).
        """
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        if client_id not in ids or not known.issuperset(groups):
            self._add_to_session(session, client_id, groups)
        if is_asked and self._by_id.get(client_id) is not session and self._may_have(session, client_id):
            self._by_id[client_id] = session
        if groups:
            info = ConnectedClient(client_id, session.peer, language, version, self._clock.time_ms())
            for group in groups:
                self._producers.setdefault(group, {})[session] = info

    def _may_have(self, session: Session, client_id: str) -> bool:
        """Return True if a session may take over a client id: the id is free, its session is closed, or both sessions are of
        one account. A session of another account would receive the first one's replies."""
        former = self._by_id.get(client_id, session)
        return former is session or former.is_closed or self.account_of(former) == self.account_of(session)

    def account_of(self, session: Session) -> str:
        """Return the access key of a session's account; empty without one, and for each session of a broker without
        accounts."""
        return self._accounts.account_name(session) if self._accounts is not None else ""

    def _add_to_session(self, session: Session, client_id: str, groups: tuple[str, ...]) -> None:
        """Register a client id or producer group that is new to the session. Raises LimitExceeded."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        fresh = known.union(groups)
        if client_id not in ids and len(ids) >= self._limits.max_client_ids:
            raise LimitExceeded(f"the connection has {len(ids)} client ids; maximum {self._limits.max_client_ids}")
        if len(fresh) > max(self._limits.max_producer_groups, len(known)):
            raise LimitExceeded(
                f"the connection would be in {len(fresh)} producer groups; maximum {self._limits.max_producer_groups}"
            )
        session.charge(MEMBER_BYTES * (len(fresh) - len(known) + (client_id not in ids)))
        self._ids[session] = ids | {client_id}
        self._groups[session] = fresh

    def forget_producer(self, group: str, session: Session) -> None:
        """Remove a client from a producer group that it left."""
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
        """Remove a session that is gone."""
        for group in self._groups.pop(session, ()):
            self._drop_producer(group, session)
        for client_id in self._ids.pop(session, ()):
            # A client that has reconnected is already registered with its new session.
            if self._by_id.get(client_id) is session:
                del self._by_id[client_id]

    def producers(self, group: str) -> list[ConnectedClient]:
        return list(self._producers.get(group, {}).values())

    def all_producers(self) -> Mapping[str, list[ConnectedClient]]:
        return {group: list(members.values()) for group, members in self._producers.items()}

    def producer_of(self, group: str, topic: str, born_host: bytes) -> Session | None:
        """Return the session at `born_host`, which sent a half message, if it is still in the producer group, because another
        process may not know a transaction that is running. Otherwise return a session of the group, round-robin; None if
        there is none.

        Sessions that may not publish to the topic are left out, because any client may join any producer group.
        """
        accounts, sessions = self._accounts, list(self._producers.get(group, ()))
        if accounts is not None:
            sessions = [session for session in sessions if accounts.may_publish(session, topic)]
        sender = next((session for session in sessions if session.born_host == born_host), None)
        if sender is not None:
            return sender
        return sessions[next(self._turn) % len(sessions)] if sessions else None

    def only_id(self, session: Session) -> str | None:
        """Return the session's client id; None if it has none or several."""
        ids = self._ids.get(session, _NONE)
        return next(iter(ids)) if len(ids) == 1 else None

    def session_of(self, client_id: str) -> Session | None:
        return self._by_id.get(client_id)
