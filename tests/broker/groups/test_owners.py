"""Owners of queues by the last change: kept for as many queues as a broker may keep them for."""

from __future__ import annotations

from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.groups.claims import Allotment, owners_of
from rocketlet.broker.groups.history import History
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.protocol.allocation import TopicQueues
from rocketlet.protocol.bodies import BrokerData, QueueData, Route

from ...support.locks import Routes, make_groups


class World:
    def __init__(self, limits: Limits = LIMITS) -> None:
        runtime = Runtime(MovableClock(stands=True), limits)
        groups = make_groups(runtime, History(runtime))
        self.group = groups.obtain("g")
        self.allotment = Allotment(runtime, groups, Routes())


def test_owners_are_known_by_topic_and_queue() -> None:
    world = World()
    world.allotment.put(world.group, {"t": ["c1", "c2"]})
    assert [world.group.owner_of("t", number) for number in range(3)] == ["c1", "c2", None]
    assert world.group.owner_of("u", 0) is None
    world.allotment.put(world.group, {"u": ["c3"]})
    assert (world.group.owners, world.allotment.queue_count) == ({"u": ["c3"]}, 1)
    world.allotment.end(world.group)
    assert (world.group.owners, world.allotment.queue_count) == ({}, 0)


def test_this_many_owners_are_kept_with_those_that_are_being_found() -> None:
    world = World(Limits(max_drained_queues=3))
    allotment = world.allotment
    assert allotment.takes(2)
    assert not allotment.takes(2)
    assert allotment.takes(1)
    allotment.give_back(3)
    allotment.put(world.group, {"t": ["c1", "c1"]})
    assert allotment.takes(1)
    assert not allotment.takes(1)


def route(**queues: int) -> TopicQueues:
    of_brokers = tuple(QueueData(name, count, count, 6) for name, count in queues.items())
    return TopicQueues("t", Route(of_brokers, tuple(BrokerData(name, {0: "127.0.0.1:1"}, "c") for name in queues)))


def test_members_share_the_queues_of_all_brokers_and_one_of_them_knows_its_own() -> None:
    members = {"c1": 0, "c2": 1}
    assert owners_of(members, route(a=2, b=1), "a") == ["c1", "c1"]
    assert owners_of(members, route(a=2, b=1), "b") == ["c2"]
    assert owners_of({"c1": 0, "c2": 1, "c3": 2}, route(a=2), "a") == ["c1", "c2"]
    assert owners_of({}, route(a=2), "a") == []
