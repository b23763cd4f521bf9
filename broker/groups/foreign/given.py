"""Remembers the list of members that each foreign member was given last: by it the member shares the queues out.

All who ask between two changes are given the same list. So memory grows with the changes, not with members times members,
and the members that take a queue for their own are found without a look at most of them: the queues go to the first of a
list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import Final, NamedTuple

from ....protocol.allocation import AVG
from ....protocol.names import sorted_ids
from ....protocol.queue import Queue
from ...config import LIMITS, Limits
from ...sessions.session import Session


class MemberList:
    """Client ids, as members are told them. The same object for all that are told the same."""

    __slots__ = ("_order", "ids")

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        self._order: list[str] | None = None

    @property
    def order(self) -> list[str]:
        """The ids in Java's order, as all members sort them."""
        if self._order is None:
            self._order = sorted_ids(self.ids)
        return self._order

    def told(self, client_id: str) -> list[str]:
        """The list as this member is told it."""
        return self.ids or [client_id]


ALONE: Final = MemberList([])  # each is told of itself only, and claims all queues of its topics (`allotment`)

_Connections = dict[Session, None]
_Readers = dict[str, _Connections]  # the readers of one list, by client id


class _Had(NamedTuple):
    """times: how often the member was given this list, without another one between."""

    members: MemberList
    client_id: str
    times: int


class Given:
    """The lists that were given, in all groups. Beyond 1,000,000 client ids in all lists, the oldest are forgotten: their
    members count as given none."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._lists: dict[str, dict[MemberList, _Readers]] = {}
        self._of: dict[str, dict[Session, _Had]] = {}
        self._age: OrderedDict[MemberList, str] = OrderedDict()
        self._ids = 0

    def give(self, group: str, connection: Session, client_id: str, members: MemberList) -> None:
        times = self.times(group, connection) if self.of(group, connection) is members else 0
        self.forget(group, connection)
        lists = self._lists.setdefault(group, {})
        if members not in lists:
            lists[members] = {}
            if members is not ALONE:  # ALONE is shared by all groups, and has no ids
                self._age[members] = group
            self._ids += len(members.ids)
        lists[members].setdefault(client_id, {})[connection] = None
        self._of.setdefault(group, {})[connection] = _Had(members, client_id, times + 1)
        while self._ids > self._limits.max_given_ids and len(self._age) > 1:
            self._forget_oldest()

    def of(self, group: str, connection: Session) -> MemberList | None:
        """The list that a member was given last; None if it was given none."""
        found = self._of.get(group, {}).get(connection)
        return found.members if found else None

    def times(self, group: str, connection: Session) -> int:
        """How often a member was given the list that it was given last."""
        found = self._of.get(group, {}).get(connection)
        return found.times if found else 0

    def forget(self, group: str, connection: Session) -> None:
        had = self._of.get(group, {}).pop(connection, None)
        if had is None:
            return
        members, client_id, _ = had
        readers = self._lists[group][members]
        del readers[client_id][connection]
        if not readers[client_id]:
            del readers[client_id]
        if not readers:
            self._drop(group, members)

    def forget_group(self, group: str) -> None:
        for members in list(self._lists.get(group, ())):
            self._drop(group, members)
        self._of.pop(group, None)

    def keep(self, group: str, members: Container[Session]) -> None:
        """Forgets those that are no members any more."""
        for connection in [item for item in self._of.get(group, ()) if item not in members]:
            self.forget(group, connection)

    def _forget_oldest(self) -> None:
        members, group = next(iter(self._age.items()))
        for connections in self._lists[group][members].values():
            for connection in connections:
                del self._of[group][connection]
        self._drop(group, members)

    def _drop(self, group: str, members: MemberList) -> None:
        del self._lists[group][members]
        self._age.pop(members, None)
        self._ids -= len(members.ids)
        if not self._lists[group]:
            del self._lists[group]

    def claims(self, group: str, queues: Sequence[Queue]) -> Iterator[list[tuple[list[Queue], _Connections]]]:
        """The queues of a topic that members take for their own, one list after the other. Members with the same id take
        the same. Members that were told of themselves alone are left out: they claim all, and read what the broker lets
        them."""
        for members, readers in list(self._lists.get(group, {}).items()):
            if members is ALONE:
                continue
            count = len(members.ids)
            first = enumerate(members.order[: len(queues)])  # those behind get nothing
            yield [
                (AVG.allocate_at(index, count, queues), readers[client_id])
                for index, client_id in first
                if client_id in readers
            ]
