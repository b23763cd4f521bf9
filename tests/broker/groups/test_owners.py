"""Owners of queues by the last change: kept for as many queues as a broker may keep them for."""

from __future__ import annotations

from rocketlet.broker.config import Limits
from rocketlet.broker.groups.claims import Owners, owners_of
from rocketlet.protocol.allocation import TopicQueues
from rocketlet.protocol.bodies import BrokerData, QueueData, Route


def test_owners_are_known_by_group_topic_and_queue() -> None:
    owners = Owners()
    owners.put("g", {"t": ["c1", "c2"]})
    assert [owners.of("g", "t", number) for number in range(3)] == ["c1", "c2", None]
    assert (owners.of("g", "u", 0), owners.of("h", "t", 0), owners.of_group("h")) == (None, None, {})
    owners.put("g", {"u": ["c3"]})
    assert owners.of_group("g") == {"u": ["c3"]}
    assert owners.count == 1
    owners.put("g", {})
    assert (owners.of_group("g"), owners.count) == ({}, 0)


def test_so_many_owners_are_kept_with_those_that_are_being_found() -> None:
    owners = Owners(Limits(max_drained_queues=3))
    assert owners.takes(2)
    assert not owners.takes(2)
    assert owners.takes(1)
    owners.give_back(3)
    owners.put("g", {"t": ["c1", "c1"]})
    assert owners.takes(1)
    assert not owners.takes(1)


def route(**queues: int) -> TopicQueues:
    of_brokers = tuple(QueueData(name, count, count, 6) for name, count in queues.items())
    return TopicQueues("t", Route(of_brokers, tuple(BrokerData(name, {0: "127.0.0.1:1"}, "c") for name in queues)))


def test_members_share_the_queues_of_all_brokers_and_one_of_them_knows_its_own() -> None:
    members = {"c1": 0, "c2": 1}
    assert owners_of(members, route(a=2, b=1), "a") == ["c1", "c1"]
    assert owners_of(members, route(a=2, b=1), "b") == ["c2"]
    assert owners_of({"c1": 0, "c2": 1, "c3": 2}, route(a=2), "a") == ["c1", "c2"]
    assert owners_of({}, route(a=2), "a") == []
