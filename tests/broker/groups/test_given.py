"""Large groups of foreign members: a change checks what changed, not what each member was given."""

from __future__ import annotations

import asyncio

import pytest
from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.groups.claims import Allotment, claims_by_list
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.history import History
from rocketlet.broker.groups.members import MemberList
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.protocol import names
from rocketlet.protocol.allocation import Averagely
from rocketlet.protocol.bodies import SLICE
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.names import Queue

from campaigns.peers import Peer

from ...conftest import Node, peer
from ...support.locks import Routes, make_groups
from ...support.topics import put
from ...support.turns import heartbeat_of, pieces

QUEUES = [Queue("t", "broker-a", number) for number in range(4)]
MEMBERS = 300


async def joined(node: Node, count: int) -> list[Peer]:
    put(node, "t")
    peers = [Peer(node.server, 100 + number) for number in range(count)]
    for number, member in enumerate(peers):
        member.send(encode(Frame(Code.HEART_BEAT, 1, {}, heartbeat_of(f"c{number}"))))
    await node.broker.turns.done()
    return peers


def is_settled(node: Node) -> bool:
    return not node.broker.turns.waiting and not node.broker.draining.is_pending("g")


async def settle(node: Node) -> None:
    while not is_settled(node):
        await node.broker.turns.done()
        await asyncio.sleep(0)


async def test_a_member_that_joins_does_not_check_what_each_other_was_given(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = await joined(node, MEMBERS)
    await settle(node)
    for member in peers:
        member.send(encode(Frame(Code.GET_CONSUMER_LIST_BY_GROUP, 2, {"consumerGroup": "g"})))
    sorts, shares = 0, 0
    sort, share = names.sorted_ids, Averagely.allocate_at

    def counted_sort(*arguments: object) -> list[str]:
        nonlocal sorts
        sorts += 1
        return sort(*arguments)  # type: ignore[arg-type]

    def counted_share(*arguments: object) -> list[Queue]:
        nonlocal shares
        shares += 1
        return share(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("rocketlet.broker.groups.members.sorted_ids", counted_sort)
    monkeypatch.setattr(Averagely, "allocate_at", counted_share)
    late = Peer(node.server, 99)
    late.send(encode(Frame(Code.HEART_BEAT, 1, {}, heartbeat_of("late"))))
    await settle(node)
    assert shares >= len(QUEUES), "it was counted"
    assert sorts <= 4, "one list for all, and one order for each topic"
    assert shares <= 4 * len(QUEUES)
    for member in (*peers, late):
        member.hang_up()


async def test_members_that_are_notified_later_are_passed_over_in_pieces(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = await joined(node, MEMBERS)
    await settle(node)
    group = node.broker.groups.get("g")
    assert group is not None
    monkeypatch.setattr(node.broker.draining.lists, "keep_back", lambda *_: True)
    assert pieces(node.broker.notifications._notifying_members(group)) > MEMBERS // SLICE
    for member in peers:
        member.hang_up()


class Lists:
    """The lists that members of two groups were given."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        runtime = Runtime(MovableClock(stands=True), limits)
        groups = make_groups(runtime, History(runtime))
        self.g, self.h = groups.obtain("g"), groups.obtain("h")
        self.g.begin_membership()
        self.h.begin_membership()
        self.allotment = Allotment(runtime, groups, Routes())

    def issue(self, group: ConsumerGroup, connection: RemotingConnection, client_id: str, *ids: str) -> None:
        self.allotment.issue(group, connection, client_id, MemberList(list(ids)))


def ids(group: ConsumerGroup, connection: RemotingConnection) -> list[str] | None:
    found = group.issued_to(connection)
    return found.ids if found else None


def test_who_takes_a_queue_for_its_own_follows_from_its_list() -> None:
    lists, one, two = Lists(), peer(), peer()
    group, both = lists.g, MemberList(["b", "a"])
    lists.allotment.issue(group, one, "a", both)
    lists.allotment.issue(group, two, "b", both)
    assert list(claims_by_list(group, QUEUES)) == [[(QUEUES[:2], {one: None}), (QUEUES[2:], {two: None})]]
    lists.issue(group, two, "b", "b")
    assert ids(group, two) == ["b"]
    claims = [claim for of_list in claims_by_list(group, QUEUES) for claim in of_list]
    assert claims == [(QUEUES[:2], {one: None}), (QUEUES, {two: None})]
    lists.allotment.end(group)
    assert (group.issued, list(claims_by_list(group, QUEUES))) == ({}, [])
    assert (lists.allotment._id_count, len(lists.allotment._lists)) == (0, 0)


def test_the_ids_in_all_lists_are_limited() -> None:
    lists, readers = Lists(Limits(max_given_ids=4)), [peer() for _ in range(3)]
    for number, reader in enumerate(readers[:2]):
        lists.issue(lists.g, reader, f"c{number}", f"c{number}", "x")
    assert ids(lists.g, readers[0]) is not None, "4 ids are kept"
    lists.issue(lists.h, readers[2], "c2", "c2", "x")
    assert ids(lists.g, readers[0]) is None, "of 6 the oldest two are dropped"
    assert (ids(lists.g, readers[1]), ids(lists.h, readers[2])) == (["c1", "x"], ["c2", "x"])
    lists.issue(lists.h, readers[2], "c2", *"abcdefgh")
    assert ids(lists.h, readers[2]) is not None, "the last one is kept, however long"
