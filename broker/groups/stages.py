"""The stages of a change of a group with foreign members: the drain of its queues, and the agreement with peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from ...protocol.headers import AgreeOnMembers
from ..config import DRAIN_ROUNDS, MOVING_BYTES
from ..runtime.clock import Timer
from ..sessions.session import Session
from .members import Member, MemberList

# ------------------------------------------------------------------------------
# Brokers agree on the moment at which a foreign member is notified of a change.
#
# Apache's client requests the member list from any one broker, and allocates the queues of all brokers by it. So a
# broker returns the new list to a member only when no broker waits for the member's handlers. Each broker sends each
# peer broker a digest of its members, and the ids of the members that it still waits for. A member
#
# - may get the new list, and is notified, when the peer has answered this change with the same digest, does not wait
#   for the member, and knows that it may return the new list, too, because the member asks any broker
# - gets its previous list as long as no peer can have returned another one to it. In between, its request waits for
#   the peer's next message.
#
# A broker numbers its messages, and a peer returns the number that it received last. A broker also sends which list
# each member got: by that the peer knows who reads its queues. No broker waits for another broker's notifications,
# only for its drains. The stages of a group's last change:
#
#     FINDING --find--> ASKING --agree, give up--> DONE
#        \--give up--> SILENT --find--> ASKING
#
# A further change takes each of them back to FINDING.


Lists = Mapping[frozenset[str], MemberList]  # member lists by the set of topics that a member subscribes to


class IssuedByPeer(NamedTuple):
    """Member lists that a peer returned. `is_current` is True if they are of the last change on this broker, too."""

    lists: Lists
    client_ids: tuple[str, ...]
    is_current: bool


class Others(NamedTuple):
    """The peers of a group: each with its address and a digest of the members of its topics; and the lists for foreign
    members."""

    brokers: Mapping[str, tuple[str, str]]
    lists: Lists


NOBODY: Final = Others({}, {})


class SyncStage(Enum):
    FINDING = "which queues move is not known yet, so nothing is sent to peers"
    ASKING = "peers were sent the change, and have not agreed yet"
    DONE = "no other broker is waited for"
    SILENT = "like DONE, and nothing is sent to peers: this broker stopped waiting before it knew which queues move"


class SyncEvent(Enum):
    CHANGE = "members or their topics have changed"
    FIND = "the queues that move are known"
    AGREE = "every member may be notified"
    GIVE_UP = "no other broker is waited for any longer"


_TS, _TE = SyncStage, SyncEvent
SYNC_TRANSITIONS: Final = {
    (_TS.FINDING, _TE.FIND): _TS.ASKING,
    (_TS.SILENT, _TE.FIND): _TS.ASKING,
    (_TS.ASKING, _TE.AGREE): _TS.DONE,
    (_TS.FINDING, _TE.GIVE_UP): _TS.SILENT,
    (_TS.ASKING, _TE.GIVE_UP): _TS.DONE,
    (_TS.DONE, _TE.GIVE_UP): _TS.DONE,  # peers had already agreed, so only readers of this broker were still waited for
    **{(stage, _TE.CHANGE): _TS.FINDING for stage in SyncStage},
}


@dataclass(slots=True)
class PeerBroker:
    """The state of a peer in the last change of a group.

    Attributes:
        since: The number of the first message of this change to the peer.
        agreed_at: The number of this broker's first message with news that was sent after the peer had reported the
            same members; infinite before that message, and after a message with news to a peer that reports other members.
        freed: By client id, the number of the message that reported the member as drained; infinite until it is sent.
        may_issue_former: True if the peer may still return member lists of an earlier change.
    """

    address: str
    digest: str
    since: float = math.inf
    agreed_at: float = math.inf
    freed: dict[str, float] = field(default_factory=dict)
    sent: tuple[frozenset[str], bool] | None = None
    number: int = 0
    given: dict[str, dict[str, None]] = field(default_factory=dict)
    received: AgreeOnMembers | None = None
    waiting: frozenset[str] = frozenset()
    must_send: bool = False
    may_issue_former: bool = False
    is_away: bool = False

    @property
    def knows(self) -> bool:
        """True if the peer has received a message of this change."""
        return self._knows(self.since)

    @property
    def agrees(self) -> bool:
        """True if the peer has responded to this change with the same members."""
        return self.knows and self.received is not None and self.received.digest == self.digest

    def allows_list(self, client_id: str) -> bool:
        return self.agrees and client_id not in self.waiting

    def allows_notification(self, client_id: str) -> bool:
        return self.allows_list(client_id) and self._knows(max(self.agreed_at, self.freed.get(client_id, 0)))

    @property
    def may_issue_earlier(self) -> bool:
        """True if the peer may return lists of this change or an earlier one even after a further change."""
        return self.may_issue_former or (self.sent is not None and self.sent[1])

    @property
    def allows_all_notifications(self) -> bool:
        return self.agrees and not self.waiting and self._knows(max([self.agreed_at, *self.freed.values()]))

    def _knows(self, number: float) -> bool:
        return self.received is not None and self.received.heard >= number


@dataclass(slots=True)
class PeerSync:
    """The progress of the brokers with the last change of a group."""

    peers: dict[str, PeerBroker] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    lists: dict[str, Lists] = field(default_factory=dict)  # by digest
    stage: SyncStage = SyncStage.FINDING
    sent_s: float = 0.0

    def transition(self, event: SyncEvent) -> None:
        """Go to the next stage. Raises KeyError for an event that the stage does not allow."""
        self.stage = SYNC_TRANSITIONS[self.stage, event]

    @property
    def is_announced(self) -> bool:
        """True if peers are sent the progress of this broker with the last change."""
        return self.stage in (SyncStage.ASKING, SyncStage.DONE)

    def allows_list(self, client_id: str) -> bool:
        """Return True if every awaited peer may return the new list to a member that requests it."""
        return all(peer.allows_list(client_id) for peer in self.awaited)

    def allows_notification(self, client_id: str) -> bool:
        """Return True if no peer prevents the notification of a member. The caller checks the drain on this broker."""
        return all(peer.allows_notification(client_id) for peer in self.awaited)

    @property
    def may_issue_earlier(self) -> bool:
        """True if a peer may have returned lists of an earlier change, or may still do so, and has not reported it yet."""
        if self.stage is SyncStage.FINDING:
            return any(peer.may_issue_earlier and not peer.is_away for peer in self.peers.values())
        return any(peer.may_issue_former for peer in self.awaited)

    def agrees(self, broker_name: str) -> bool:
        """Return True if a peer has answered the last change, and knows the same members."""
        return broker_name in self.peers and self.peers[broker_name].agrees

    @property
    def differs(self) -> bool:
        """True if a reachable peer has not reported the same members yet."""
        return any(not peer.is_away and not peer.agrees for peer in self.peers.values())

    def reach(self) -> bool:
        """Stop waiting for peers if all of them allow the notification of every member. Return True if no peer is waited
        for. In stage SILENT, peers are waited for again once the moving queues are known."""
        if self.stage is SyncStage.ASKING and all(peer.allows_all_notifications for peer in self.awaited):
            self.transition(SyncEvent.AGREE)
        return self.stage in (SyncStage.DONE, SyncStage.SILENT)

    @property
    def awaited(self) -> Iterable[PeerBroker]:
        """Yield the peers that this broker waits for."""
        if self.stage in (SyncStage.DONE, SyncStage.SILENT):
            return ()
        return (peer for peer in self.peers.values() if not peer.is_away)


NO_PEERS: Final = PeerSync(stage=SyncStage.DONE)  # shared by groups without peers, and not changed


# ------------------------------------------------------------------------------
# A change of a group of which not all foreign members were notified yet, and the queues that the change moves.
#
#     FINDING --find--> DRAINING --finish--> AGREEING --agree--> NOTIFIED --(members have dropped their queues)--> end
#        \--find nobody-----------------------^                   ^
#         FINDING, DRAINING, AGREEING --give up-------------------/
#
# A further change takes a drain of any stage back to FINDING, where FINISH changes nothing. If all members were notified
# before the moving queues are known, FIND restarts from NOTIFIED, with the members' claims at that time.


QueueKey = tuple[str, int]  # topic, queue id


class DrainStage(Enum):
    FINDING = "which queues move is not known yet, so no member may take any"
    DRAINING = "readers still handle messages of what moves"
    AGREEING = "all is handled here; other brokers are waited for"
    NOTIFIED = "every member was notified, and drops its queues now"


class DrainEvent(Enum):
    CHANGE = "members or their topics have changed"
    FIND = "the queues that move are known, and have readers"
    FIND_NOBODY = "they are known, and no reader has messages of them"
    FINISH = "the last reader is done, or is not waited for any more"
    AGREE = "no other broker is waited for"
    GIVE_UP = "no reader and no broker is waited for any longer"


_DS, _DE = DrainStage, DrainEvent
DRAIN_TRANSITIONS: Final = {
    (_DS.FINDING, _DE.FIND): _DS.DRAINING,
    (_DS.FINDING, _DE.FIND_NOBODY): _DS.AGREEING,
    (_DS.FINDING, _DE.FINISH): _DS.FINDING,  # the last change may move more than the earlier one
    (_DS.DRAINING, _DE.FINISH): _DS.AGREEING,
    (_DS.AGREEING, _DE.AGREE): _DS.NOTIFIED,
    (_DS.FINDING, _DE.GIVE_UP): _DS.NOTIFIED,
    (_DS.DRAINING, _DE.GIVE_UP): _DS.NOTIFIED,
    (_DS.AGREEING, _DE.GIVE_UP): _DS.NOTIFIED,
    (_DS.NOTIFIED, _DE.FIND): _DS.DRAINING,
    (_DS.NOTIFIED, _DE.FIND_NOBODY): _DS.AGREEING,
    **{(stage, _DE.CHANGE): _DS.FINDING for stage in DrainStage},
}


@dataclass(slots=True)
class Drain:
    """A change of a group, until its foreign members were notified and have had time to drop the queues that they lose.
    Times are of the monotonic clock, in seconds.

    Attributes:
        moving: By queue, the readers that get no more messages of it: all members that claim it by their last list.
        waiting: The queues that each reader has not handled completely.
        drained: The queues that each reader has handled since it got its list.
        returning: Queues that a member drops by its last list and owns again by the next one.
        kept: The members to notify later.
        gated: Held pulls of queues whose earlier reader is not done.
        asking: Members whose request for the member list waits.
        rounds: How often each reader pulled each queue that it loses.
        pulled_s: When each reader last pulled one of those queues.
        is_long: True if members that may not know of the change yet get a list of themselves alone (`current_list`).
        since_s: When the drain of each queue began, by reader.
        due: For each reader, and for the whole drain (None): until when it may make no progress, and whether its held pulls
            were returned for that.
        refuses_ours: True if a Rocketlet member may have been refused a lock.
        charged: The number of queues that each connection is charged for.
    """

    began_s: float
    moving: dict[QueueKey, set[Session]] = field(default_factory=dict)
    waiting: dict[Session, set[QueueKey]] = field(default_factory=dict)
    drained: dict[Session, set[QueueKey]] = field(default_factory=dict)
    returning: dict[Session, set[QueueKey]] = field(default_factory=dict)
    kept: dict[Session, None] = field(default_factory=dict)
    gated: dict[QueueKey, list[Callable[[], None]]] = field(default_factory=dict)
    asking: dict[Session, Callable[[], None]] = field(default_factory=dict)
    rounds: dict[Session, dict[QueueKey, int]] = field(default_factory=dict)
    pulled_s: dict[Session, float] = field(default_factory=dict)
    stage: DrainStage = DrainStage.FINDING
    is_long: bool = False
    since_s: dict[tuple[Session, QueueKey], float] = field(default_factory=dict)
    due: dict[Session | None, tuple[float, bool]] = field(default_factory=dict)
    refuses_ours: bool = False
    timer: Timer | None = None
    charged: dict[Session, int] = field(default_factory=dict)

    def transition(self, event: DrainEvent) -> None:
        """Go to the next stage. Raises KeyError for an event that the stage does not allow."""
        self.stage = DRAIN_TRANSITIONS[self.stage, event]

    def change(self, members: Container[Session], now_s: float) -> None:
        """Handle a further change, and drop readers that are no longer members."""
        if self.stage is DrainStage.NOTIFIED:
            self.began_s = now_s
        self.transition(DrainEvent.CHANGE)
        for of_readers in (self.waiting, self.drained, self.rounds, self.pulled_s, self.due):
            for reader in [reader for reader in of_readers if reader is not None and reader not in members]:
                del of_readers[reader]
        self.since_s = {item: began_s for item, began_s in self.since_s.items() if item[0] in members}

    def lose(self, losing: Iterable[tuple[QueueKey, Session]], now_s: float, until_s: float) -> None:
        """Start to drain queues from their readers. A reader that was already drained of a queue is not waited for again, and
        gets none of its messages."""
        before, since_s = self.waiting, self.since_s
        held = {key for keys in before.values() for key in keys}
        self.moving, self.waiting, self.since_s, self.returning = {}, {}, {}, {}
        for key, reader in losing:
            self.moving.setdefault(key, set()).add(reader)
            has_nothing = key in held and key not in before.get(
                reader, ()
            )  # True if the queue waits for a member that is drained of it
            if key not in self.drained.get(reader, ()) and not has_nothing:
                self.waiting.setdefault(reader, set()).add(key)
                self.since_s[reader, key] = since_s.get((reader, key), now_s)
        self.due = {reader: self.due[reader] if reader in before else (until_s, False) for reader in self.waiting}
        self.refuses_ours = True
        self.transition(DrainEvent.FIND if self.waiting else DrainEvent.FIND_NOBODY)

    def forget_kept(self) -> None:
        """Drop the counts of queues that readers keep now, because they continue to read those."""
        for reader, keys in self.drained.items():
            keys -= {key for key in keys if reader not in self.moving.get(key, ())}
        for reader, rounds in self.rounds.items():
            for key in [key for key in rounds if reader not in self.moving.get(key, ())]:
                del rounds[key]

    def read_again(self, reader: Session) -> None:
        """Let a reader read released queues again, because of its new member list."""
        self.drained.pop(reader, None)
        self.rounds.pop(reader, None)
        for key in self.returning.pop(reader, ()):
            self.moving[key].discard(reader)

    def finish(self, reader: Session, key: QueueKey) -> None:
        """Record that a reader has handled all messages of a queue."""
        self.drained.setdefault(reader, set()).add(key)
        self._wait_no_more(reader, key)

    def give_up(self, given_up: Iterable[tuple[Session, QueueKey]]) -> None:
        """Stop waiting for these readers and queues."""
        for reader, key in given_up:
            self._wait_no_more(reader, key)

    def _wait_no_more(self, reader: Session, key: QueueKey) -> None:
        self.since_s.pop((reader, key), None)
        self.waiting[reader].discard(key)
        if not self.waiting[reader]:
            del self.waiting[reader]
            self.due.pop(reader, None)
        if not self.waiting:
            self.transition(DrainEvent.FINISH)

    def give_up_all(self) -> None:
        self.waiting.clear()
        self.due.clear()
        self.transition(DrainEvent.GIVE_UP)

    def record_progress(self, until_s: float, reader: Session | None = None) -> None:
        """Record progress of a reader, and extend its time if it is waited for. Without a reader, or if the drain is
        not long, this extends the time of the whole drain."""
        if reader is None or not self.is_long:
            self.due[None] = until_s, False
        elif reader in self.waiting:
            self.due[reader] = until_s, False

    def prolong(self, seconds: float) -> None:
        """Move the deadlines and start times of the drain by this many seconds, because the event loop was blocked and
        the readers' pulls were not read. The caller sets the timer."""
        self.due = {reader: (until_s + seconds, asked) for reader, (until_s, asked) in self.due.items()}
        self.since_s = {item: began_s + seconds for item, began_s in self.since_s.items()}
        self.began_s += seconds

    def stalled(self, now_s: float, *, was_polled: bool) -> list[Session | None]:
        """Return the readers without progress whose held pulls were or were not returned; None stands for the whole drain."""
        due = [(key, *self.due[key]) for key in self._polled]
        return [key for key, until_s, asked in due if asked is was_polled and until_s <= now_s]

    @property
    def due_s(self) -> float:
        """Return when the next reader runs out of time."""
        return min(self.due[key][0] for key in self._polled)

    @property
    def _polled(self) -> Iterable[Session | None]:
        return self.waiting if self.moves_singly else (None,)

    @property
    def moves_singly(self) -> bool:
        """True if a queue moves as soon as its own reader is done."""
        return self.is_long and self.stage is DrainStage.DRAINING

    def reading(self, since_s: float) -> set[Session]:
        """Return the readers that have pulled a queue that they lose since that time."""
        return {reader for reader, pulled_s in self.pulled_s.items() if pulled_s >= since_s}

    def set_timer(self, timer: Timer) -> None:
        """Replace the timer that ends this stage."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer

    def end(self) -> None:
        """End the drain and release everything that it holds."""
        if self.timer is not None:
            self.timer.cancel()
        self.release_all_pulls()
        for session in list(self.asking):
            self.answer(session)
        self.moving = {}
        self.charge()

    @property
    def is_finding(self) -> bool:
        return self.stage is DrainStage.FINDING

    @property
    def is_over(self) -> bool:
        return self.stage is DrainStage.NOTIFIED

    @property
    def oldest_s(self) -> float:
        """Return the start of the oldest drain of a queue; in a long drain, queues move separately."""
        return min(self.since_s.values(), default=self.began_s) if self.is_long else self.began_s

    def since(self, now_s: float, most_s: float) -> list[tuple[Session, QueueKey]]:
        """Return the items that have been drained for `most_s` or longer.

        Start and duration are added, as where the timer is set, because a difference rounds in another way: the timer would
        find nothing and be due immediately again.
        """
        return [item for item, began_s in self.since_s.items() if began_s + most_s <= now_s]

    def has(self, key: QueueKey) -> bool:
        """Return True if a reader that loses the queue still handles its messages."""
        return any(key in keys for keys in self.waiting.values())

    def dropped(self, session: Session, key: QueueKey) -> list[QueueKey]:
        """Record that a reader pulled a queue, and return the queues that it has dropped because a peer notified it.

        Pulls of moving queues return immediately, so a reader pulls all queues that it still reads equally often.
        """
        rounds = self.rounds.setdefault(session, {})
        rounds[key] = count = rounds.get(key, max(rounds.values(), default=0)) + 1
        if count % DRAIN_ROUNDS:
            return []
        return [other for other in self.waiting.get(session, ()) if rounds.get(other, count) <= count - DRAIN_ROUNDS]

    def charge(self) -> None:
        """Charge the moving queues to the sessions that lose them, against --memory."""
        moving = Counter(session for connections in self.moving.values() for session in connections)
        for session in sorted(moving.keys() | self.charged.keys(), key=attrgetter("number")):
            more = moving[session] - self.charged.get(session, 0)
            if more:
                session.charge(MOVING_BYTES * more)
        self.charged = dict(moving)

    def waited_for(self, members: Mapping[Session, Member]) -> Iterator[str]:
        """Yield the client ids of the members that are being drained."""
        return (members[session].client_id for session in self.waiting if session in members)

    def answer(self, session: Session) -> None:
        """Respond to a member's waiting request for the member list."""
        if (go_on := self.asking.pop(session, None)) is not None:
            go_on()

    def release_pulls(self, keys: Iterable[QueueKey]) -> None:
        """Release the held pulls of these queues."""
        for key in keys:
            for go_on in self.gated.pop(key, ()):
                go_on()

    def release_all_pulls(self) -> None:
        self.release_pulls(list(self.gated))
