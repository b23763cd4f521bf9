"""Several brokers agree on the moment at which a foreign member is notified of a change."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from ...protocol.bodies import Route, Work
from ...protocol.config import MAX_AGREED_LISTS
from ...protocol.group_bodies import Members, Word
from ...protocol.headers import AgreeOnMembers
from ...protocol.names import RETRY_PREFIX
from ..config import LIMITS, PROGRESS_S, Limits
from ..runtime import Clock
from .group import ConsumerGroup
from .members import MemberList
from .stages import NOBODY, GivenElsewhere, Lists, Others, PeerBroker, PeerSync, SyncEvent, SyncStage

Say = Callable[[str, str, Callable[[], Word | None], Callable[[bool], None]], None]


class Agreement:
    """`say(address, group, make, failed)` sends what `make` gives to a broker; `failed(is_for_good)` is called if that broker
    cannot be reached or refuses. `on_away(group)`: a broker that was waited for is not any more."""

    def __init__(
        self, broker_name: str, clock: Clock, say: Say, on_away: Callable[[str], None], limits: Limits = LIMITS
    ) -> None:
        self._limits = limits
        self.list_wait_s = limits.list_wait_s
        self._broker_name = broker_name
        self._clock = clock
        self._say = say
        self._on_away = on_away
        self._groups: dict[str, PeerSync] = {}
        self._strangers: dict[str, None] = {}  # brokers that do not know the request
        self._number = clock.time_ms()  # above those of a run before
        self._secret = secrets.token_bytes(32)

    # State

    def lets_give(self, name: str, client_id: str) -> bool:
        """Whether another broker may give a member the new list when it asks."""
        group = self._groups.get(name)
        return group is None or all(peer.lets_give(client_id) for peer in group.asked)

    def gives_earlier(self, name: str) -> bool:
        """Whether another broker may have given lists of an earlier change, or do so yet, of which it has not told."""
        group = self._groups.get(name)
        if group is None:
            return False
        if group.stage is SyncStage.FINDING:
            return any(peer.may_give_earlier and not peer.is_away for peer in group.peers.values())
        return any(peer.was_let for peer in group.asked)

    def lets_tell(self, name: str, client_id: str) -> bool:
        """Whether it may be told of the change."""
        group = self._groups.get(name)
        return group is None or all(peer.lets_tell(client_id) for peer in group.asked)

    def agrees(self, name: str, broker_name: str) -> bool:
        """Whether another broker has answered the last change, and knows the same members."""
        group = self._groups.get(name)
        return group is not None and broker_name in group.peers and group.peers[broker_name].agrees

    def differs(self, name: str) -> bool:
        """Whether another broker that can be asked has not said yet that it knows the same members."""
        group = self._groups.get(name)
        return group is not None and any(not peer.is_away and not peer.agrees for peer in group.peers.values())

    def is_reached(self, name: str) -> bool:
        """Whether everybody may be told. From then on nothing is waited for until the next change."""
        group = self._groups.get(name)
        if group is None:
            return True
        if group.stage is SyncStage.ASKING and all(peer.lets_tell_all for peer in group.asked):
            group.turn(SyncEvent.AGREE)
        return group.stage in (SyncStage.DONE, SyncStage.SILENT)

    def address(self, name: str, broker_name: str) -> str | None:
        """The address of another broker that has topics of the group; None if it has none."""
        group = self._groups.get(name)
        return group.peers[broker_name].address if group is not None and broker_name in group.peers else None

    def away(self) -> list[str]:
        """The other brokers that are not waited for because they cannot be asked."""
        peers = (item for group in self._groups.values() for item in group.peers.items())
        return sorted(
            {f"{name} at {peer.address}" for name, peer in peers if peer.is_away and name not in self._strangers}
        )

    def token(self, listener: str) -> str:
        """The token by which the broker of that name can ask whether this one said something."""
        return blake2b(listener.encode(), digest_size=16, key=self._secret).hexdigest()

    # Changes here

    def finding_others(self, group: ConsumerGroup, routes: Mapping[str, Route]) -> Work[Others]:
        """Finds the other brokers of the group; none where brokers do not agree."""
        addresses: dict[str, str] = {}
        digests: dict[str, blake2b] = {}
        if len(group.foreign) > self._limits.max_agreeing_members:
            return NOBODY
        for topic, route in routes.items():
            others = [broker for broker in route.brokers if broker.name != self._broker_name and 0 in broker.addresses]
            if topic.startswith(RETRY_PREFIX) or not others:  # every broker that a member knows has the retry topic
                continue
            yield
            text = "\0".join([topic, *group.order(topic)]).encode()
            for broker in others:
                addresses[broker.name] = broker.addresses[0]
                digests.setdefault(broker.name, blake2b(digest_size=16)).update(blake2b(text).digest())
        if not addresses or len(addresses) > self._limits.max_peers:
            return NOBODY
        brokers = {name: (address, digests[name].hexdigest()) for name, address in addresses.items()}
        return Others(brokers, (yield from self._finding_lists(group)))

    def _finding_lists(self, group: ConsumerGroup) -> Work[Lists]:
        """Finds the list for each set of topics, one at a time, because each is compared with those of all members."""
        lists: dict[frozenset[str], MemberList] = {}
        ids = 0
        for connection, member in list(group.foreign.items()):
            if member.topics in lists:
                continue
            if lists:
                yield
            found = group.list_for(connection)
            ids += len(found.ids)
            if ids > self._limits.max_listed_ids:
                break
            lists[member.topics] = found
        return lists

    def opened(self, name: str) -> None:
        """A change has come; the queues that it moves are not known yet."""
        group = self._groups.get(name)
        if group is not None:
            group.turn(SyncEvent.CHANGE)

    def found(self, name: str, others: Others, waiting: Iterable[str]) -> None:
        """The queues that a change moves are known. Without other brokers, asks nobody."""
        if not others.brokers:
            self.forget(name)
            return
        group = self._groups.setdefault(name, PeerSync())
        former, group.peers = group.peers, {}
        for broker_name, (address, digest) in others.brokers.items():
            if broker_name not in self._strangers:
                peer = group.peers[broker_name] = PeerBroker(address, digest)
                if broker_name in former:
                    known = former[broker_name]
                    peer.heard, peer.waiting, peer.given = known.heard, known.waiting, known.given
                    peer.owes, peer.was_let = known.owes, known.may_give_earlier
            group.lists.pop(digest, None)
            group.lists[digest] = others.lists
        while len(group.lists) > self._limits.kept_lists * len(others.brokers):
            del group.lists[next(iter(group.lists))]
        group.waiting = frozenset(waiting)
        group.turn(SyncEvent.FIND)
        self._speak(name, group)

    def waits(self, name: str, waiting: Iterable[str]) -> None:
        """Only these members are still being drained."""
        group = self._groups.get(name)
        if group is not None and group.speaks:
            left = frozenset(waiting)
            if left != group.waiting:
                for peer in group.peers.values():
                    peer.freed |= dict.fromkeys(group.waiting - left, math.inf)
                group.waiting = left
                self._speak(name, group)

    def progressed(self, name: str) -> None:
        """A drain goes on, though no member is done: a peer waits on."""
        group = self._groups.get(name)
        if group is None or not group.speaks or self._clock.monotonic_s() < group.said_s + PROGRESS_S:
            return
        for peer in group.peers.values():
            peer.owes = True
        self._speak(name, group)

    def gave(self, name: str, client_id: str) -> None:
        """A member was given the list of the last change."""
        group = self._groups.get(name)
        if group is None or not group.speaks:
            return
        for peer in group.peers.values():
            peer.given.setdefault(peer.digest, {})[client_id] = None
            while len(peer.given) > MAX_AGREED_LISTS:
                del peer.given[next(iter(peer.given))]
        self._speak(name, group)

    def give_up(self, name: str) -> None:
        """No peer is waited for any more in this change."""
        group = self._groups.get(name)
        if group is not None:
            group.turn(SyncEvent.GIVE_UP)

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)

    # Words of others

    def heard(self, header: AgreeOnMembers, members: Members) -> list[GivenElsewhere]:
        """A peer has said something. Returns whom it has given which lists."""
        self._strangers.pop(header.broker_name, None)
        group = self._groups.get(header.consumer_group)
        peer = group.peers.get(header.broker_name) if group is not None else None
        if group is None or peer is None:
            return []
        peer.heard, peer.waiting, peer.is_away = header, members.waiting, False
        peer.owes |= header.asks
        peer.was_let = peer.was_let and not peer.knows  # by then it has told whom it gave what
        self._speak(header.consumer_group, group)
        return [
            GivenElsewhere(group.lists[digest], client_ids, digest == peer.digest and group.speaks)
            for digest, client_ids in members.given.items()
            if digest in group.lists
        ]

    # Words of ours

    def _speak(self, name: str, group: PeerSync) -> None:
        for broker_name, peer in group.peers.items():
            if broker_name in self._strangers:
                continue
            self._say(peer.address, name, self._maker(name, broker_name), self._failing(name, broker_name))

    def _maker(self, name: str, broker_name: str) -> Callable[[], Word | None]:
        return lambda: self._word(name, broker_name)

    def _failing(self, name: str, broker_name: str) -> Callable[[bool], None]:
        return lambda is_for_good: self._failed(name, broker_name, is_for_good)

    def _word(self, name: str, broker_name: str) -> Word | None:
        """The word for a peer now; None if it knows everything."""
        group = self._groups.get(name)
        peer = group.peers.get(broker_name) if group is not None else None
        if group is None or peer is None or not group.speaks:
            return None
        state = group.waiting, peer.agrees
        is_news = peer.said != state or bool(peer.given)
        if not is_news and not peer.owes:
            return None
        if is_news:
            self._note(peer)
        given = {digest: tuple(client_ids) for digest, client_ids in peer.given.items()}
        peer.given, peer.said, peer.owes = {}, state, False
        group.said_s = self._clock.monotonic_s()
        heard = peer.heard.number if peer.heard is not None else 0
        header = AgreeOnMembers(
            name, self._broker_name, peer.number, heard, is_news, peer.digest, self.token(broker_name)
        )
        return Word(header, Members(group.waiting, given))

    def _note(self, peer: PeerBroker) -> None:
        """A word that says something new: from its number on the peer knows it."""
        self._number += 1
        peer.number = self._number
        if peer.said is None:
            peer.since = self._number
        peer.freed |= {client_id: self._number for client_id, at in peer.freed.items() if at == math.inf}
        if not peer.agrees:
            peer.agreed_at = math.inf
        elif peer.agreed_at == math.inf:
            peer.agreed_at = self._number

    def _failed(self, name: str, broker_name: str, is_for_good: bool) -> None:
        if is_for_good:
            self._strangers[broker_name] = None
            if len(self._strangers) > self._limits.max_strangers:
                del self._strangers[next(iter(self._strangers))]
        for other, group in list(self._groups.items()) if is_for_good else [(name, self._groups.get(name))]:
            peer = group.peers.get(broker_name) if group is not None else None
            if peer is not None and not peer.is_away:
                peer.is_away = True
                self._on_away(other)
