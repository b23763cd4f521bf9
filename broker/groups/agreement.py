"""Several brokers agree on the moment at which a foreign member is notified of a change."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Protocol

from ...protocol.bodies import Route, Work
from ...protocol.config import MAX_AGREED_LISTS
from ...protocol.group_bodies import AgreedMembers, PeerMessage
from ...protocol.headers import AgreeOnMembers
from ...protocol.names import RETRY_PREFIX
from ..config import LIMITS, PROGRESS_S, Limits
from ..runtime.clock import Clock
from .group import ConsumerGroup, GroupChanges
from .members import MemberList
from .stages import NO_PEERS, NOBODY, IssuedByPeer, Lists, Others, PeerBroker, PeerSync, SyncEvent


class PeerLinks(Protocol):
    """Sends messages to peer brokers."""

    def send(
        self, address: str, group: str, make: Callable[[], PeerMessage | None], failed: Callable[[bool], None]
    ) -> None:
        """Send what `make` returns to a broker, and call `failed(is_for_good)` if it is unreachable or refuses
        the message, or if there are too many connections."""
        ...


class Agreement:
    """Synchronizes groups with peer brokers; the progress of the peers with a group is its `sync`.

    Args:
        broker_name: this broker's name.
        clock: the source of time.
        peers: the connections to peers.
        changes: gets the groups of peers that are not waited for any more.
    """

    def __init__(
        self,
        broker_name: str,
        clock: Clock,
        peers: PeerLinks,
        changes: GroupChanges,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self.list_wait_s = limits.list_wait_s
        self._broker_name = broker_name
        self._clock = clock
        self._peers = peers
        self._changes = changes
        self.synced: set[ConsumerGroup] = set()  # groups that have peer brokers
        self._outdated: dict[str, None] = {}  # names of brokers that do not support AGREE_ON_MEMBERS
        self._number = clock.time_ms()  # higher than the numbers of an earlier run, if the clock was not set back
        self._secret = secrets.token_bytes(32)

    # State

    def away(self) -> list[str]:
        """Return the peers that are not waited for because they cannot be reached."""
        peers = (item for group in self.synced for item in group.sync.peers.items())
        return sorted(
            {f"{name} at {peer.address}" for name, peer in peers if peer.is_away and name not in self._outdated}
        )

    def token(self, listener: str) -> str:
        """Return the token with which the broker of that name can request a confirmation of messages from this
        broker."""
        return blake2b(listener.encode(), digest_size=16, key=self._secret).hexdigest()

    # Changes here

    def finding_others(self, group: ConsumerGroup, routes: Mapping[str, Route]) -> Work[Others]:
        """Find the other brokers of the group's topics; none if the group exceeds a limit and is not synchronized."""
        addresses: dict[str, str] = {}
        digests: dict[str, blake2b] = {}
        if len(group.foreign) > self._limits.max_agreeing_members:
            return NOBODY
        for topic, route in routes.items():
            others = [broker for broker in route.brokers if broker.name != self._broker_name and 0 in broker.addresses]
            if topic.startswith(RETRY_PREFIX) or not others:  # its route does not show which brokers share topics
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
        """Find the member list for each set of topics, up to `max_listed_ids` client ids in all lists. One set is one piece
        of work, because each set is compared with those of all members."""
        lists: dict[frozenset[str], MemberList] = {}
        ids = 0
        for session, member in list(group.foreign.items()):
            if member.topics in lists:
                continue
            if lists:
                yield
            found = group.list_for(session)
            ids += len(found.ids)
            if ids > self._limits.max_listed_ids:
                break
            lists[member.topics] = found
        return lists

    def begin_change(self, group: ConsumerGroup) -> None:
        """Record a change of a group. The queues that it moves are not known yet, so peers are sent nothing."""
        if group.sync is not NO_PEERS:
            group.sync.transition(SyncEvent.CHANGE)

    def announce(self, group: ConsumerGroup, others: Others, waiting: Iterable[str]) -> None:
        """Report a change whose moving queues are known to the peers, or end the synchronization if the group has none."""
        if not others.brokers:
            self.end(group)
            return
        if group.sync is NO_PEERS:
            group.sync = PeerSync()
            self.synced.add(group)
        sync = group.sync
        former, sync.peers = sync.peers, {}
        for broker_name, (address, digest) in others.brokers.items():
            if broker_name not in self._outdated:
                peer = sync.peers[broker_name] = PeerBroker(address, digest)
                if broker_name in former:
                    known = former[broker_name]
                    peer.received, peer.waiting, peer.given = known.received, known.waiting, known.given
                    peer.must_send, peer.may_issue_former = known.must_send, known.may_issue_earlier
            sync.lists.pop(digest, None)
            sync.lists[digest] = others.lists
        while len(sync.lists) > self._limits.kept_lists * len(others.brokers):
            del sync.lists[next(iter(sync.lists))]
        sync.waiting = frozenset(waiting)
        sync.transition(SyncEvent.FIND)
        self._send_to_peers(group)

    def set_waiting(self, group: ConsumerGroup, waiting: Iterable[str]) -> None:
        """Record that only these members are still being drained, and report a difference to the peers."""
        sync, left = group.sync, frozenset(waiting)
        if sync.is_announced and left != sync.waiting and sync is not NO_PEERS:
            for peer in sync.peers.values():
                peer.freed |= dict.fromkeys(sync.waiting - left, math.inf)
            sync.waiting = left
            self._send_to_peers(group)

    def report_progress(self, group: ConsumerGroup) -> None:
        """Report to the peers that a drain makes progress, so that they continue to wait; at most every
        PROGRESS_S."""
        sync = group.sync
        if not sync.is_announced or self._clock.monotonic_s() < sync.sent_s + PROGRESS_S:
            return
        for peer in sync.peers.values():
            peer.must_send = True
        self._send_to_peers(group)

    def record_issued(self, group: ConsumerGroup, client_id: str) -> None:
        """Report to the peers that a member got the list of the last change, unless the change is not announced to them."""
        if not group.sync.is_announced:
            return
        for peer in group.sync.peers.values():
            peer.given.setdefault(peer.digest, {})[client_id] = None
            while len(peer.given) > MAX_AGREED_LISTS:
                del peer.given[next(iter(peer.given))]
        self._send_to_peers(group)

    def give_up(self, group: ConsumerGroup) -> None:
        """Stop waiting for peers in this change."""
        if group.sync is not NO_PEERS:
            group.sync.transition(SyncEvent.GIVE_UP)

    def end(self, group: ConsumerGroup) -> None:
        """End the synchronization of a group that has no peers any more."""
        group.sync = NO_PEERS
        self.synced.discard(group)

    # Messages of peers

    def on_message(
        self, group: ConsumerGroup | None, header: AgreeOnMembers, members: AgreedMembers
    ) -> list[IssuedByPeer]:
        """Handle a message of a peer. Return the member lists that it has issued, of those that this broker knows."""
        self._outdated.pop(header.broker_name, None)
        sync = group.sync if group is not None else NO_PEERS
        peer = sync.peers.get(header.broker_name)
        if group is None or peer is None:
            return []
        peer.received, peer.waiting, peer.is_away = header, members.waiting, False
        peer.must_send |= header.asks
        peer.may_issue_former = (
            peer.may_issue_former and not peer.knows
        )  # its message reports the lists that it has issued
        self._send_to_peers(group)
        return [
            IssuedByPeer(sync.lists[digest], client_ids, digest == peer.digest and sync.is_announced)
            for digest, client_ids in members.given.items()
            if digest in sync.lists
        ]

    # Messages to peers

    def _send_to_peers(self, group: ConsumerGroup) -> None:
        for name, peer in group.sync.peers.items():
            if name not in self._outdated:
                self._peers.send(
                    peer.address,
                    group.name,
                    partial(self._message_for, group, name),
                    partial(self._failed, group, name),
                )

    def _message_for(self, group: ConsumerGroup, broker_name: str) -> PeerMessage | None:
        """Return the message for a peer, and record it as sent. Return None if there is no news that the peer lacks or has
        requested, if the change may not be reported yet, or if the broker is no peer of the group."""
        sync = group.sync
        peer = sync.peers.get(broker_name)
        if peer is None or not sync.is_announced:
            return None
        state = sync.waiting, peer.agrees
        is_news = peer.sent != state or bool(peer.given)
        if not is_news and not peer.must_send:
            return None
        if is_news:
            self._number_message(peer)
        given = {digest: tuple(client_ids) for digest, client_ids in peer.given.items()}
        peer.given, peer.sent, peer.must_send = {}, state, False
        sync.sent_s = self._clock.monotonic_s()
        heard = peer.received.number if peer.received is not None else 0
        header = AgreeOnMembers(
            group.name, self._broker_name, peer.number, heard, is_news, peer.digest, self.token(broker_name)
        )
        return PeerMessage(header, AgreedMembers(sync.waiting, given))

    def _number_message(self, peer: PeerBroker) -> None:
        """Number a message with news, so that the peer's next messages show whether it knows them."""
        self._number += 1
        peer.number = self._number
        if peer.sent is None:
            peer.since = self._number
        peer.freed |= {client_id: self._number for client_id, at in peer.freed.items() if at == math.inf}
        if not peer.agrees:
            peer.agreed_at = math.inf
        elif peer.agreed_at == math.inf:
            peer.agreed_at = self._number

    def _failed(self, group: ConsumerGroup, broker_name: str, is_for_good: bool) -> None:
        if is_for_good:
            self._outdated[broker_name] = None
            if len(self._outdated) > self._limits.max_outdated_peers:
                del self._outdated[next(iter(self._outdated))]
        for other in sorted(self.synced, key=lambda item: item.name) if is_for_good else [group]:
            peer = other.sync.peers.get(broker_name)
            if peer is not None and not peer.is_away:
                peer.is_away = True
                self._changes.peer_away(other)
