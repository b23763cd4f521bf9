"""The clients behind the connections: producers by group, connections by client id, and what the broker asks of clients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from ...protocol.admin_bodies import ConnectedClient
from ...protocol.codes import ONEWAY_FLAG, RequestCode
from ...protocol.frame import Ext, Frame, encode
from ...protocol.headers import ConsumerGroup, write
from ..clock import Clock, Timer
from ..config import (
    ASKED_BYTES,
    CLIENT_ANSWER_S,
    MAX_ASKED,
    MAX_CLIENT_IDS,
    MAX_PRODUCER_GROUPS,
    MEMBER_BYTES,
    LimitExceeded,
)
from ..remoting.connection import Connection

_NONE: frozenset[str] = frozenset()
MAX_OPAQUE = 0x7FFF_FFFF  # 32 bits with a sign, as Java clients read it
Answered = Callable[[Frame | None], None]


class Clients:
    """Requests to clients are in JSON, because their receiver may be of any kind."""

    def __init__(self, clock: Clock, may_publish: Callable[[Connection, str], bool] | None = None) -> None:
        self._clock = clock
        self._may_publish = may_publish
        self._producers: dict[str, dict[Connection, ConnectedClient]] = {}
        self._by_id: dict[str, Connection] = {}
        self._ids: dict[Connection, frozenset[str]] = {}
        self._groups: dict[Connection, frozenset[str]] = {}
        self._asked: dict[Connection, set[int]] = {}
        self._turn = itertools.count()
        self._opaque = itertools.count(1)
        self._asking: Counter[Connection] = Counter()
        self._waiting: dict[tuple[Connection, int], tuple[Answered, Timer, Connection]] = {}

    def heartbeat(
        self, connection: Connection, client_id: str, groups: tuple[str, ...], language: int, version: int
    ) -> None:
        """Raises LimitExceeded beyond 16 client ids or 256 producer groups of one connection."""
        ids, known = self._ids.get(connection, _NONE), self._groups.get(connection, _NONE)
        if client_id not in ids or not known.issuperset(groups):
            self._take(connection, client_id, groups)
        self._by_id[client_id] = connection
        if groups:
            info = ConnectedClient(client_id, connection.peer, language, version, self._clock.time_ms())
            for group in groups:
                self._producers.setdefault(group, {})[connection] = info

    def _take(self, connection: Connection, client_id: str, groups: tuple[str, ...]) -> None:
        """A client id or a producer group that the connection has not named before."""
        ids, known = self._ids.get(connection, _NONE), self._groups.get(connection, _NONE)
        fresh = known.union(groups)
        if client_id not in ids and len(ids) >= MAX_CLIENT_IDS:
            raise LimitExceeded(f"a connection goes by {MAX_CLIENT_IDS} client ids at most")
        if len(fresh) > max(MAX_PRODUCER_GROUPS, len(known)):
            raise LimitExceeded(f"a connection is in {MAX_PRODUCER_GROUPS} producer groups at most")
        connection.charge(MEMBER_BYTES * (len(fresh) - len(known) + (client_id not in ids)))
        self._ids[connection] = ids | {client_id}
        self._groups[connection] = fresh

    def forget_producer(self, group: str, connection: Connection) -> None:
        """One that a client has left."""
        known = self._groups.get(connection, _NONE)
        if group in known:
            self._groups[connection] = known - {group}
            connection.charge(-MEMBER_BYTES)
        self._drop_producer(group, connection)

    def _drop_producer(self, group: str, connection: Connection) -> None:
        members = self._producers.get(group, {})
        members.pop(connection, None)
        if not members:
            self._producers.pop(group, None)

    def drop(self, connection: Connection) -> None:
        """The connection is gone; who waits for its answer gets None."""
        for group in self._groups.pop(connection, ()):
            self._drop_producer(group, connection)
        for client_id in self._ids.pop(connection, ()):
            # A client that has reconnected is known by its new connection already.
            if self._by_id.get(client_id) is connection:
                del self._by_id[client_id]
        for opaque in list(self._asked.get(connection, ())):
            self._settle((connection, opaque), None)

    def producers(self, group: str) -> list[ConnectedClient]:
        return list(self._producers.get(group, {}).values())

    def all_producers(self) -> Mapping[str, list[ConnectedClient]]:
        return {group: list(members.values()) for group, members in self._producers.items()}

    def any_producer(self, group: str, topic: str) -> Connection | None:
        """A connection of the group that may send to the topic, each in turn; None without one. Whoever knows a group's
        name can join it, and would be shown the messages of others."""
        may_publish = self._may_publish
        connections = [
            connection
            for connection in self._producers.get(group, ())
            if may_publish is None or may_publish(connection, topic)
        ]
        return connections[next(self._turn) % len(connections)] if connections else None

    def connection_of(self, client_id: str) -> Connection | None:
        return self._by_id.get(client_id)

    # Requests to clients

    def group_changed(
        self, connection: Connection, group: str, topic: str | None = None, detail: Ext | None = None
    ) -> None:
        """The group of a member is another than before. Only Rocketlet clients look at the rest: a topic has other queues,
        and `detail` says which of the members the receiver is, or what its share is, so that it need not ask."""
        ext: Ext = {**write(ConsumerGroup(group, topic)), **(detail or {})}
        self.tell(connection, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext)

    def tell(self, connection: Connection, code: int, ext: Ext, body: bytes = b"") -> None:
        """A one-way request."""
        connection.write([encode(Frame(code, self._next_opaque(), ext, body, ONEWAY_FLAG))])

    def ask(
        self, connection: Connection, code: int, ext: Ext, body: bytes, answered: Answered, *, by: Connection
    ) -> None:
        """A request; `answered` gets the answer, or None after 10 s or when the client hangs up. by: the client because of
        which it is asked. Raises LimitExceeded if one of the two has too many questions: clients that never answer take
        nobody else's places."""
        if len(self._asked.get(connection, ())) >= MAX_ASKED:
            raise LimitExceeded(f"the client has not answered {MAX_ASKED} requests yet; try again later")
        if self._asking[by] >= MAX_ASKED:
            raise LimitExceeded(f"{MAX_ASKED} requests of this client are waiting for others; try again later")
        opaque = self._next_opaque()
        key = (connection, opaque)
        timer = self._clock.call_later(CLIENT_ANSWER_S, self._settle, key, None)
        self._waiting[key] = (answered, timer, by)
        self._asking[by] += 1
        by.charge(ASKED_BYTES)
        self._asked.setdefault(connection, set()).add(opaque)
        connection.write([encode(Frame(code, opaque, ext, body))])

    def is_asked(self, connection: Connection) -> bool:
        """Whether the client has not answered yet what it was asked."""
        return connection in self._asked

    def _next_opaque(self) -> int:
        return next(self._opaque) & MAX_OPAQUE

    def answer(self, connection: Connection, frame: Frame) -> None:
        """A client's answer; one that nobody waits for is dropped."""
        self._settle((connection, frame.opaque), frame)

    def _settle(self, key: tuple[Connection, int], frame: Frame | None) -> None:
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
            answered(frame)
