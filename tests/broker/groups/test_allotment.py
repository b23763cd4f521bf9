"""Each queue of each topic has one reader, whoever subscribes to what, by the lists that foreign members get."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.broker.config import LIMITS, RELOOK_S, Limits
from rocketlet.broker.groups.drains import Allotment, Claims, claims_by_list, owners_of
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import ALONE, History, Member, MemberList, StickyShares, SubscribedTopic
from rocketlet.broker.groups.reading import Read, ReadKind, Refuse, may_read
from rocketlet.broker.groups.stages import Drain
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.sessions.session import Session
from rocketlet.protocol import names
from rocketlet.protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, Averagely, Strategy, TopicQueues
from rocketlet.protocol.bodies import SLICE, BrokerData, ConsumerData, QueueData, Route, finish
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.names import Queue, Subscription, parse_subscription, retry_topic, sorted_ids
from rocketlet.testing.clock import MovableClock

from ...conftest import Node, peer
from ...support.locks import Changes, Routes, make_groups, make_locks
from ...support.peers import Peer
from ...support.topics import put
from ...support.turns import heartbeat_of, pieces

TOPICS = ("t0", "t1", "t2", "t3")
RETRIES = retry_topic("g")
BROKERS = ("broker-a", "broker-b")


@dataclass(frozen=True)
class Someone:
    """A member: of ours, or a foreign one with a strategy of its own."""

    client_id: str
    topics: frozenset[str]
    is_ours: bool
    strategy: Strategy


SOMEONE = st.builds(
    Someone,
    st.text("abcdefgh", min_size=1, max_size=4),
    st.frozensets(st.sampled_from(TOPICS), min_size=1),
    st.booleans(),
    st.sampled_from((AVG, AVG, AVG_BY_CIRCLE, CONSISTENT_HASH)),
)
COUNTS = st.fixed_dictionaries({topic: st.tuples(st.integers(0, 9), st.integers(0, 9)) for topic in TOPICS})


def route_of(counts: tuple[int, int]) -> Route:
    queues = tuple(QueueData(name, count, count, 6) for name, count in zip(BROKERS, counts, strict=True) if count)
    return Route(queues, tuple(BrokerData(name, {0: "127.0.0.1:1"}, "c") for name in BROKERS))


def joined(people: list[Someone]) -> tuple[ConsumerGroup, dict[Someone, RemotingConnection]]:
    group, connections = ConsumerGroup("g"), {}
    group.begin_membership()
    for someone in people:
        connection = connections[someone] = peer()
        subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in sorted((*someone.topics, RETRIES)))
        data = ConsumerData("g", subscriptions=subscriptions, strategy="AVG" if someone.is_ours else "")
        member = Member(someone.client_id, connection, data, 0, 0, 0.0)
        member.subscriptions = {item.topic: item for item in subscriptions}
        member.topics = someone.topics
        group.members[connection] = member
        group.topics |= {topic: SubscribedTopic(1) for topic in member.subscriptions}
        if not someone.is_ours:
            group.foreign[connection] = member
    return group, connections


def readers_of(
    group: ConsumerGroup, connections: dict[Someone, RemotingConnection], topic: str, queues: TopicQueues
) -> Iterator[tuple[Queue, list[str]]]:
    """The readers of each queue: one of ours reads its share; a foreign member reads its claim by the list that it gets,
    unless it is bound to its share and the queue is another's."""
    owners = {name: owners_of(group.order(topic), queues, name) for name in BROKERS}
    for queue in queues:
        found: list[str] = []
        for someone, connection in connections.items():
            if topic not in group.members[connection].subscriptions:
                continue
            members = group.list_for(connection)
            if someone.is_ours:
                index, count = group.place(someone.client_id, topic)
                share = AVG.allocate_at(index, count, queues)
            else:
                share = someone.strategy.allocate(
                    someone.client_id, list(queues), sorted_ids(members.ids_for(someone.client_id))
                )
            is_bound = not someone.is_ours and (members is ALONE or (group.is_uneven and topic == RETRIES))
            is_owned_by_other = is_bound and owners[queue.broker_name][queue.queue_id] != someone.client_id
            if queue in share and not is_owned_by_other:
                found.append(someone.client_id)
        yield queue, found


def three(*topics: str) -> list[Someone]:
    """Foreign members, each of one topic."""
    return [Someone(name, frozenset({topic}), False, AVG) for name, topic in zip("abc", topics, strict=True)]


@example(three("t0", "t0", "t2"), dict.fromkeys(TOPICS, (4, 0)), 3)  # by a's and b's list, retries 0 and 1 are a's
@example(three("t0", "t2", "t2"), dict.fromkeys(TOPICS, (4, 4)), 1)
@given(st.lists(SOMEONE, min_size=1, max_size=7, unique_by=lambda item: item.client_id), COUNTS, st.integers(0, 3))
def test_each_queue_has_one_reader_whoever_subscribes_to_what(
    people: list[Someone], counts: dict[str, tuple[int, int]], retry_queues: int
) -> None:
    """Where foreign members share all topics with the same others, as by Apache's broker, all have to use one strategy."""
    group, connections = joined(people)
    routes = {topic: route_of(count) for topic, count in (*counts.items(), (RETRIES, (retry_queues, 0)))}
    retries = len(TopicQueues(RETRIES, routes[RETRIES]))
    finish(group.binding(is_uneven=group.differs(), retry_queues=retries))
    for topic in group.topics:
        told = {someone for someone in people if not someone.is_ours and topic in (*someone.topics, RETRIES)}
        if any(group.list_for(connections[item]) is not ALONE and item.strategy is not AVG for item in told):
            continue
        for queue, readers in readers_of(group, connections, topic, TopicQueues(topic, routes[topic])):
            assert len(readers) == 1, f"{queue} is read by {readers}"


@given(st.lists(SOMEONE, min_size=1, max_size=7, unique_by=lambda item: item.client_id))
def test_members_of_the_same_topics_are_notified_of_each_other(people: list[Someone]) -> None:
    """As by Apache's broker: nobody claims a queue that is not its own."""
    group, connections = joined([Someone(item.client_id, frozenset({"t0"}), item.is_ours, AVG) for item in people])
    finish(group.binding(is_uneven=group.differs(), retry_queues=1))
    assert not group.is_uneven
    for connection in connections.values():
        assert sorted(group.list_for(connection).ids) == sorted(item.client_id for item in people)


# Foreign members that claim more than their own, and which queues of those they get, tested on an allotment alone.


class World:
    def __init__(self, folder: Path, **limits: Any) -> None:
        self.clock = clock = MovableClock(stands=True)
        self.limits = Limits(**limits) if limits else LIMITS
        engine: Any = self
        runtime = Runtime(clock, self.limits, tasks=engine, turns=engine)
        history = History(runtime)
        self.queues = {"t": 4, "u": 2}
        self.spawned: list[Any] = []
        self.moved: list[str] = []
        self.groups = make_groups(runtime, history, 4, Changes(moved=lambda group: self.moved.append(group.name)))
        self.locks = make_locks(folder, clock, groups=self.groups)
        self.allotment = Allotment(
            runtime,
            self.groups,
            Routes(lambda topic: self.route(topic) if topic in self.queues else None),
        )

    def spawn(self, work: Any) -> None:
        self.spawned.append(work)

    def do(self, work: Any) -> None:
        finish(work)

    async def looked(self) -> int:
        """How often owners were looked for."""
        count = len(self.spawned)
        while self.spawned:
            await self.spawned.pop()
        return count

    def route(self, topic: str) -> Route:
        queues = (QueueData("a", self.queues[topic], self.queues[topic], 6),)
        return Route(queues, (BrokerData("a", {0: "127.0.0.1:1"}, "c"),))

    def joins(self, client_id: str, *topics: str, strategy: str | None = None) -> RemotingConnection:
        session = peer()
        data = ConsumerData("g", subscriptions=tuple(map(Subscription, (*topics, RETRIES))), strategy=strategy)
        self.groups.heartbeat(session, client_id, data, 0, 0)
        return session

    @property
    def group(self) -> ConsumerGroup:
        return self.groups.obtain("g")

    def gives(self, session: RemotingConnection, members: MemberList) -> MemberList:
        self.allotment.issue(self.group, session, self.group.members[session].client_id, members)
        return members

    def is_bound(self, session: RemotingConnection, topic: str = "t") -> bool:
        return self.group.is_bound(session, topic, self.clock.monotonic_s())

    def is_owned_by_other(self, session: RemotingConnection, queue_id: int = 0, topic: str = "t") -> bool:
        self.allotment.observe_claim(self.group, session, topic, queue_id)
        return self.group.is_owned_by_other(session, topic, queue_id, self.clock.monotonic_s())

    def is_bystander(self, session: RemotingConnection, queue_id: int) -> bool:
        """Whether a commit is refused because another member owns the queue, and this one does not read it."""
        read = Read(session, self.group, ("t", queue_id), ReadKind.MEMBER_COMMIT)
        return isinstance(may_read(read, self.clock.monotonic_s()), Refuse)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_member_that_was_notified_of_itself_alone_is_bound_and_for_a_while_after_that(world: World) -> None:
    one, two = world.joins("c1", "t"), world.joins("c2", "t")
    assert not world.is_bound(one)
    assert not world.group.may_bind(one)
    world.gives(one, ALONE)
    world.allotment.put(world.group, {"t": ["c1"] * 4})
    assert (world.is_bound(one), world.is_bound(two)) == (True, False)
    assert (world.group.is_alone(one), world.group.is_alone(two)) == (True, False)
    assert (
        world.group.may_bind(one),
        world.group.may_bind(two),
    ) == (True, False)
    world.gives(one, MemberList(["c1", "c2"]))
    assert (world.is_bound(one), world.group.may_bind(one)) == (True, True)
    world.clock.advance(world.limits.drained_wait_s - 0.1)
    assert world.is_bound(one)
    world.clock.advance(0.1)
    assert not world.is_bound(one)


def test_a_member_that_has_asked_for_some_topics_only_is_bound_for_longer(world: World) -> None:
    one = world.joins("c1", "t", "u")
    world.allotment.put(world.group, {"t": ["c1"] * 4, "u": ["c1"] * 2})
    world.gives(one, ALONE)
    members = world.gives(one, MemberList(["c1"]))
    assert world.group.is_mid_rebalance(one)
    world.clock.advance(RELOOK_S - 0.1)
    assert world.is_bound(one)
    world.gives(one, members)
    assert not world.group.is_mid_rebalance(one)
    assert not world.is_bound(one)
    assert not world.group.is_mid_rebalance(peer())


def test_members_of_unequal_topics_are_bound_that_may_have_asked_before(world: World) -> None:
    one, two = world.joins("c1", "t"), world.joins("c2", "u")
    world.gives(two, MemberList(["c2"]))
    assert not world.is_bound(one)
    world.group.is_uneven = True
    world.allotment.put(world.group, {"t": ["c1"] * 4})
    assert world.is_bound(one)
    assert not world.is_bound(two)
    assert world.is_bound(two, RETRIES), "members share it that know nothing of each other"
    assert world.group.may_bind(two)
    assert not world.groups.obtain("h").may_bind(two)


def test_a_bound_member_gets_its_own_only(world: World) -> None:
    one, ours = world.joins("c1", "t"), world.joins("c2", "t", strategy="AVG")
    world.allotment.put(world.group, {"t": ["c1", "c2"]})
    assert not world.is_owned_by_other(one, 1), "it is not bound"
    world.gives(one, ALONE)
    assert [world.is_owned_by_other(one, number) for number in range(3)] == [False, True, False]
    assert not world.is_owned_by_other(ours, 0)
    assert not world.is_owned_by_other(peer(), 1)
    world.group.has_bound_members = False
    assert not world.is_owned_by_other(one, 1)


async def test_a_queue_without_an_owner_is_looked_for_and_nobody_s_meanwhile(world: World) -> None:
    one = world.joins("c1", "t")
    world.joins("c2", "u")
    world.group.is_uneven = True
    world.allotment.put(world.group, {"t": ["c1"] * 2})
    assert world.is_owned_by_other(one, 2)
    assert await world.looked() == 0, "it has just been looked for"
    world.clock.advance(world.limits.owners_refresh_delay_s)
    for _ in range(2):
        assert world.is_owned_by_other(one, 2)
    assert await world.looked() == 1
    assert world.moved == ["g"], "its readers are drained of what moves"
    assert world.groups.obtain("g").owners == {"t": ["c1"] * 2}


async def look(world: World) -> None:
    world.clock.advance(world.limits.owners_refresh_delay_s)
    world.allotment.find_owners(world.group)
    assert await world.looked() == 1


async def test_owners_that_are_found_are_kept_where_nobody_is_bound(world: World) -> None:
    world.joins("c1", "t", "v")
    world.allotment.put(world.group, {"v": ["c1"]})
    await look(world)
    assert world.groups.obtain("g").owners == {"t": ["c1"] * 4, "v": ["c1"]}, "v has no route now"
    assert (world.moved, world.allotment.queue_count) == ([], 5)
    world.group.is_uneven = True
    await look(world)
    assert world.moved == [], "they are as before"
    world.allotment.find_owners(world.groups.obtain("h"))
    assert await world.looked() == 0


async def test_owners_of_an_earlier_change_are_dropped(world: World) -> None:
    world.joins("c1", "t")
    world.allotment.put(world.group, {})
    world.clock.advance(world.limits.owners_refresh_delay_s)
    world.allotment.find_owners(world.group)
    world.group.change = 2
    await world.looked()
    assert world.groups.obtain("g").owners == {}
    assert world.allotment.queue_count == 0


async def test_too_many_owners_are_not_looked_for(tmp_path: Path) -> None:
    world = World(tmp_path, max_drained_queues=5)
    world.joins("c1", "t", "u")
    world.allotment.put(world.group, {})
    await look(world)
    assert (world.groups.obtain("g").owners, world.allotment.queue_count) == ({}, 0)


def test_a_reader_is_distinguished_from_a_bystander(world: World) -> None:
    one, two = world.joins("c1", "t"), world.joins("c2", "t")
    world.allotment.put(world.group, {"t": ["c1", "c2"]})
    world.gives(one, ALONE)
    now_s = world.clock.monotonic_s()
    assert world.is_bystander(one, 1)
    assert world.group.is_new_reader(one, "t", 0, now_s)
    assert not world.group.is_new_reader(two, "t", 0, now_s), "it is not bound"
    assert not world.groups.obtain("h").is_new_reader(one, "t", 0, now_s)
    assert not world.group.is_new_reader(peer(), "t", 0, now_s)
    for number in range(2):
        world.locks.record_pull(one, world.groups.obtain("g"), ("t", number))
    assert not world.is_bystander(one, 1), "it has messages of it in its handlers"
    assert not world.is_bystander(one, 0)
    assert not world.group.is_new_reader(one, "t", 0, now_s)
    assert [world.groups.obtain("g").is_read_by_its_owner("t", number) for number in range(3)] == [True, False, False]
    assert not world.groups.obtain("h").is_read_by_its_owner("t", 0)


def test_members_that_lose_queues_and_have_not_asked_since_are_late(world: World) -> None:
    one, two, three = (world.joins(f"c{number}", "t", "u") for number in range(3))
    world.allotment.put(world.group, {"t": ["c0"] * 4, "u": ["c0"] * 2})
    world.gives(one, MemberList(["c0"]))
    world.gives(two, world.group.list_for(two))
    losing: list[set[Session]] = [{one, two}, {two, three, peer()}]
    assert world.group.late(losing, ()) == [one]
    assert sorted(world.group.late(losing, [one, two, three]), key=lambda item: item.number) == [
        one,
        two,
    ], "the second has asked for one of its topics"
    world.gives(two, world.group.list_for(two))
    assert world.group.late(losing, [one, two, three]) == [one]


def test_of_those_that_are_gone_nothing_is_kept(world: World) -> None:
    one, two, three = (world.joins(f"c{number}", "t") for number in range(3))
    for session in (one, two, three):
        world.gives(session, ALONE)
        world.gives(session, MemberList(["c0"]))
    world.groups.leave(three, "g")
    world.allotment.keep_members(world.group)
    assert list(world.group.bound_since_s) == [one, two]
    assert world.groups.obtain("g").issued_to(three) is None
    world.clock.advance(RELOOK_S)
    world.allotment.keep_members(world.group)
    assert not world.group.bound_since_s
    world.gives(one, ALONE)
    world.gives(one, MemberList(["c0"]))
    group = world.group
    world.allotment.end(group)
    assert (group.has_bound_members, group.bound_since_s) == (False, {})
    assert world.groups.obtain("g").issued_to(one) is None
    world.allotment.put(world.group, {"t": ["c1"]})
    for session in (one, two):
        world.groups.leave(session, "g")
    world.allotment.end(group)
    assert (world.allotment.queue_count, group.owners_found_s) == (0, None)


def test_tools_see_what_a_list_or_new_owners_change(world: World) -> None:
    one = world.joins("c1", "t")
    before = world.group.version
    members = world.gives(one, MemberList(["c1"]))
    assert world.group.version > before
    before = world.group.version
    world.gives(one, members)
    assert world.group.version == before
    world.allotment.put(world.group, {})
    assert world.group.version > before


def claims_of(world: World, max_claims: int = 100) -> tuple[Claims, dict[int, list[Any]] | None]:
    claims = Claims("a", Limits(max_claims=max_claims))
    return claims, finish(claims.finding(world.group, TopicQueues("t", world.route("t"))))


def test_members_claim_queues_by_the_lists_that_they_were_given(world: World) -> None:
    one, two, other = world.joins("c1", "t"), world.joins("c2", "t"), world.joins("c3", "u")
    members = MemberList(["c1", "c2"])
    world.gives(one, members)
    world.gives(two, MemberList(["c2"]))
    world.gives(other, MemberList(["c3"]))
    claims, found = claims_of(world)
    assert found == {0: [one, two], 1: [one, two], 2: [two], 3: [two]}
    assert list(claims.losing(world.group, "t", 2, ["c1", "c2"], found)) == [(("t", 0), two), (("t", 1), one)]
    assert [session for _, session in claims.losing(world.group, "t", 1, [], found)] == [one, two]
    assert [claims_of(world, limit)[1] is None for limit in (5, 6)] == [True, False]


def test_a_reader_without_a_list_claims_what_it_reads(world: World) -> None:
    one, two, three = world.joins("c1", "t"), world.joins("c2", "t"), world.joins("c3", "t")
    world.gives(two, ALONE)
    world.gives(three, MemberList(["c1", "c3"]))  # the last two queues
    for number, session in enumerate((one, two, three)):
        world.locks.record_pull(session, world.groups.obtain("g"), ("t", number))
    claims, found = claims_of(world)
    assert found == {2: [three], 3: [three]}
    lost = list(claims.losing(world.group, "t", 4, ["c9"] * 4, found))
    assert lost == [(("t", 0), one), (("t", 1), two), (("t", 2), three), (("t", 3), three)]
    world.locks.record_pull(one, world.groups.obtain("g"), ("t", 3))
    world.locks.record_pull(three, world.groups.obtain("g"), ("t", 0))
    lost = list(claims.losing(world.group, "t", 4, ["c9"] * 4, found))
    assert lost == [(("t", 1), two), (("t", 2), three), (("t", 3), three), (("t", 3), one)]


def test_members_that_were_given_another_list_have_released_what_it_does_not_give_them(world: World) -> None:
    one, two, three = world.joins("c1", "t"), world.joins("c2", "t"), world.joins("c3", "t")
    world.gives(one, MemberList(["c1", "c2"]))
    world.gives(two, ALONE)
    drain = Drain(0.0)
    drain.moving = {("t", number): {one, two, three} for number in (1, 3)}
    claims, found = claims_of(world)
    assert found is not None
    assert list(claims.releasing(world.group, drain, "t", 4, found)) == [(("t", 3), one)]


# Large groups of foreign members: a change checks what changed, not what each member was given.


QUEUES = [Queue("t", "broker-a", number) for number in range(4)]
MEMBERS = 300


async def joined_given(node: Node, count: int) -> list[Peer]:
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
    peers = await joined_given(node, MEMBERS)
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
    peers = await joined_given(node, MEMBERS)
    await settle(node)
    group = node.broker.groups.obtain("g")
    monkeypatch.setattr("rocketlet.broker.groups.drains.defer_notification", lambda *_: True)
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
    lists, one, two = Lists(Limits(max_given_ids=3)), peer(), peer()
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
    for number, reader in enumerate((peer(), peer(), peer())):
        lists.issue(lists.h, reader, f"c{number}", f"c{number}")
    assert len(lists.h.issued) == 3, "ids of lists that have ended do not count"


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


# Shares of a topic that the broker divides: what members get one after another are parts of one whole.


SEEN = {"broker-a": 8, "broker-b": 8}
MEMBERS_STICKY = ["c1", "c2", "c3"]


def told(shares: StickyShares, seen: dict[str, int], members: list[str]) -> list[list[Queue]]:
    found = [shares.of(client_id, seen, lambda: members) for client_id in members]
    return [share.of("t") for share in found if share is not None]


def test_what_a_member_still_has_changes_no_share_that_others_got() -> None:
    """A member that is giving queues away still names them in its heartbeat, and who asks may doubt the shares. Shared out
    again, a queue would leave one member and reach nobody: the others have no reason to retry (simulation, seed 79872)."""
    shares = StickyShares("t")
    told(shares, SEEN, MEMBERS_STICKY[:2])
    shares.forget()
    before = told(shares, SEEN, MEMBERS_STICKY)
    for number in range(8):
        shares.claim(Queue("t", "broker-b", number), "c2")
    shares.check_again()
    assert told(shares, dict(SEEN), list(MEMBERS_STICKY)) == before


def test_shares_follow_members_and_queues() -> None:
    shares = StickyShares("t")
    for seen, members in (
        (SEEN, MEMBERS_STICKY),
        (SEEN, MEMBERS_STICKY[1:]),
        ({"broker-a": 8}, MEMBERS_STICKY[1:]),
        (SEEN, MEMBERS_STICKY),
    ):
        shares.forget()
        found = told(shares, seen, members)
        assert sorted(queue for share in found for queue in share) == [
            Queue("t", name, number) for name, count in seen.items() for number in range(count)
        ]
        assert len(found) == len(members)
    assert shares.of("c9", SEEN, lambda: MEMBERS_STICKY) is None


def test_owners_are_kept_for_this_many_queues() -> None:
    shares = StickyShares("t", Limits(max_shared_queues=2))
    one, two, three = (Queue("t", "broker-a", number) for number in range(3))
    for queue in (one, two, three):
        shares.claim(queue, "c1")
    assert shares.owners == {one: "c1", two: "c1"}
    shares.claim(one, "c2")
    assert shares.owners == {one: "c2", two: "c1"}
