"""Foreign members that claim more than their own, and which queues of those they get, tested on an allotment alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.config import LIMITS, RELOOK_S, Limits
from rocketlet.broker.groups.claims import Allotment, Claims
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.history import History
from rocketlet.broker.groups.members import ALONE, MemberList
from rocketlet.broker.groups.offsets import Watch
from rocketlet.broker.groups.stages import Drain
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.broker.sessions import Session
from rocketlet.protocol.allocation import TopicQueues
from rocketlet.protocol.bodies import BrokerData, ConsumerData, QueueData, Route, finish
from rocketlet.protocol.names import Subscription, retry_topic

from ...conftest import peer
from ...support.locks import Changes, Counts, Routes, make_groups, make_locks

RETRIES = retry_topic("g")


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
        locks = make_locks(folder, clock, groups=self.groups)
        self.watch = Watch(runtime, self.groups, locks, history, Counts(4))
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
        group = self.groups.get("g")
        assert group is not None
        return group

    def gives(self, session: RemotingConnection, members: MemberList) -> MemberList:
        self.allotment.issue(self.group, session, self.group.members[session].client_id, members)
        return members

    def is_bound(self, session: RemotingConnection, topic: str = "t") -> bool:
        return self.group.is_bound(session, topic, self.clock.monotonic_s())

    def is_anothers(self, session: RemotingConnection, queue_id: int = 0, topic: str = "t") -> bool:
        return self.allotment.is_anothers(self.group, session, topic, queue_id)


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
    assert not world.is_anothers(one, 1), "it is not bound"
    world.gives(one, ALONE)
    assert [world.is_anothers(one, number) for number in range(3)] == [False, True, False]
    assert not world.is_anothers(ours, 0)
    assert not world.is_anothers(peer(), 1)
    world.group.has_bound_members = False
    assert not world.is_anothers(one, 1)


async def test_a_queue_without_an_owner_is_looked_for_and_nobody_s_meanwhile(world: World) -> None:
    one = world.joins("c1", "t")
    world.joins("c2", "u")
    world.group.is_uneven = True
    world.allotment.put(world.group, {"t": ["c1"] * 2})
    assert world.is_anothers(one, 2)
    assert await world.looked() == 0, "it has just been looked for"
    world.clock.advance(world.limits.owners_refresh_delay_s)
    for _ in range(2):
        assert world.is_anothers(one, 2)
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
    finish(world.allotment._finding(world.group, 1, {"t": world.route("t")}))
    assert world.groups.obtain("g").owners == {}


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
    assert world.group.is_bystander(one, "t", 1, now_s)
    assert world.group.is_new_reader(one, "t", 0, now_s)
    assert not world.group.is_new_reader(two, "t", 0, now_s), "it is not bound"
    assert not world.groups.obtain("h").is_new_reader(one, "t", 0, now_s)
    assert not world.group.is_new_reader(peer(), "t", 0, now_s)
    for number in range(2):
        world.watch.record_pull(one, world.groups.obtain("g"), ("t", number))
    assert not world.group.is_bystander(one, "t", 1, now_s), "it has messages of it in its handlers"
    assert not world.group.is_bystander(one, "t", 0, now_s)
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
    generation = world.groups.generation
    before = generation.number
    members = world.gives(one, MemberList(["c1"]))
    assert generation.number > before
    before = generation.number
    world.gives(one, members)
    assert generation.number == before
    world.allotment.put(world.group, {})
    assert generation.number > before


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
        world.watch.record_pull(session, world.groups.obtain("g"), ("t", number))
    claims, found = claims_of(world)
    assert found == {2: [three], 3: [three]}
    lost = list(claims.losing(world.group, "t", 4, ["c9"] * 4, found))
    assert lost == [(("t", 0), one), (("t", 1), two), (("t", 2), three), (("t", 3), three)]
    world.watch.record_pull(one, world.groups.obtain("g"), ("t", 3))
    world.watch.record_pull(three, world.groups.obtain("g"), ("t", 0))
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
    assert list(claims.letting_go(world.group, drain, "t", 4, found)) == [(("t", 3), one)]
