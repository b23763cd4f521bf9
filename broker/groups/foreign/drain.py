"""A change of a group that not all foreign members know yet, and what it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ...clock import Timer
from ...config import DRAIN_ROUNDS, MOVING_BYTES
from ...sessions.session import Session
from ..member import Member

Place = tuple[str, int]  # topic, queue id


@dataclass(slots=True)
class Drain:
    """A change that not all foreign members know yet.

    moving: who gets nothing more of which queue: all whose last list gives it to them. waiting: what each reader has not
    handled yet. drained: what it has, since it was given that list. returning: what a member lets go of by its last list,
    and is its own again by the next one. kept: who is to be told later. gated: pulls of queues whose earlier reader is
    not done. rounds: how often each reader came back to each queue that it loses. is_open: who will move is not known
    yet. is_agreed: no other broker is waited for. is_long: who is drained is told of itself alone until it is done.
    since_s: how long each reader has been drained of each queue. stands_at_s: when it stands if nothing progresses.
    refuses_ours: one of ours may have been refused a lock. charged: for how many queues each connection is charged.
    """

    began_s: float
    moving: dict[Place, set[Session]] = field(default_factory=dict)
    waiting: dict[Session, set[Place]] = field(default_factory=dict)
    drained: dict[Session, set[Place]] = field(default_factory=dict)
    returning: dict[Session, set[Place]] = field(default_factory=dict)
    commits: dict[Place, int] = field(default_factory=dict)
    kept: dict[Session, None] = field(default_factory=dict)
    gated: dict[Place, list[Callable[[], None]]] = field(default_factory=dict)
    rounds: dict[Session, dict[Place, int]] = field(default_factory=dict)
    is_open: bool = True
    is_agreed: bool = True
    is_long: bool = False
    since_s: dict[tuple[Session, Place], float] = field(default_factory=dict)
    stands_at_s: float = 0.0
    refuses_ours: bool = False
    timer: Timer | None = None
    charged: dict[Session, int] = field(default_factory=dict)

    @property
    def is_drained(self) -> bool:
        return not self.is_open and not self.waiting

    @property
    def is_over(self) -> bool:
        return self.is_drained and self.is_agreed

    @property
    def oldest_s(self) -> float:
        """When the drain began that is waited for longest. Each queue moves by itself in a drain that takes long."""
        return min(self.since_s.values(), default=self.began_s) if self.is_long else self.began_s

    def since(self, limit_s: float) -> list[tuple[Session, Place]]:
        """What is drained since then, or for longer."""
        return [item for item, began_s in self.since_s.items() if began_s <= limit_s]

    def give_up(self, given_up: list[tuple[Session, Place]]) -> None:
        """These are not waited for any more."""
        for session, place in given_up:
            del self.since_s[session, place]
            self.waiting[session].discard(place)
            if not self.waiting[session]:
                del self.waiting[session]

    def has(self, place: Place) -> bool:
        """Whether messages of the queue are still handled by who loses it."""
        return any(place in places for places in self.waiting.values())

    def dropped(self, connection: Session, place: Place) -> list[Place]:
        """Notes that a reader has come back to a queue; which others it reads no more, because another broker has told it of
        the change. Pulls of what moves are answered at once, so it comes back to all that it reads equally often."""
        rounds = self.rounds.setdefault(connection, {})
        rounds[place] = count = rounds.get(place, max(rounds.values(), default=0)) + 1
        if count % DRAIN_ROUNDS:
            return []
        return [other for other in self.waiting.get(connection, ()) if rounds.get(other, count) <= count - DRAIN_ROUNDS]

    def keep(self, members: Container[Session]) -> None:
        """Forgets readers that are no members any more."""
        for of_readers in (self.waiting, self.drained, self.rounds):
            for reader in [reader for reader in of_readers if reader not in members]:
                del of_readers[reader]
        self.since_s = {item: began_s for item, began_s in self.since_s.items() if item[0] in members}

    def charge(self) -> None:
        """What moves counts against --memory, for who has it moved."""
        moving = Counter(connection for connections in self.moving.values() for connection in connections)
        for connection in sorted(moving.keys() | self.charged.keys(), key=attrgetter("number")):
            more = moving[connection] - self.charged.get(connection, 0)
            if more:
                connection.charge(MOVING_BYTES * more)
        self.charged = dict(moving)

    def release(self) -> None:
        """It is over, and nothing more is held of it."""
        self.moving = {}
        self.charge()

    def waited_for(self, members: Mapping[Session, Member]) -> Iterator[str]:
        """The client ids of those that are drained."""
        return (members[connection].client_id for connection in self.waiting if connection in members)

    def let_on(self, places: list[Place]) -> None:
        """The pulls of these queues need not wait any more."""
        for place in places:
            for go_on in self.gated.pop(place, ()):
                go_on()


@dataclass(slots=True)
class Found:
    """What a change of a group moves: who loses which queue, who lets go of what it is drained of, and whose the queues are
    then. retry_queues: of the group, on all brokers. taken: how much of it is counted."""

    owners: dict[str, list[str]] = field(default_factory=dict)
    losing: list[tuple[Place, Session]] = field(default_factory=list)
    letting_go: set[tuple[Place, Session]] = field(default_factory=set)
    retry_queues: int = 0
    taken: int = 0

    def clear(self) -> None:
        self.owners, self.losing, self.letting_go = {}, [], set()
