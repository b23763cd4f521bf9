from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.allocation import (
    AVG,
    AveragelyByCircle,
    Configured,
    ConsistentHash,
    MachineRoomNearby,
    Strategy,
)
from rocketlet.protocol.names import Queue, sorted_ids

EIGHT = [Queue("T", "b-a", number) for number in range(8)]
THREE = ["10.0.0.1@1", "10.0.0.1@2", "10.0.0.1@3"]
SHARING: list[Strategy] = [
    AVG,
    AveragelyByCircle(),
    ConsistentHash(),
    MachineRoomNearby(AVG, lambda queue: queue.broker_name[0], lambda client_id: client_id[-1]),
]


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        (AVG, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (AveragelyByCircle(), [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (ConsistentHash(), [[0, 1, 2, 7], [4, 5, 6], [3]]),
    ],
)
def test_shares_are_those_of_apaches_strategies(strategy: Strategy, shares: list[list[int]]) -> None:
    found = [[queue.queue_id for queue in strategy.allocate(client, EIGHT, THREE)] for client in THREE]
    assert found == shares


@given(st.sampled_from(SHARING), st.integers(0, 40), st.integers(1, 12))
def test_every_queue_has_exactly_one_owner(strategy: Strategy, queues: int, members: int) -> None:
    every = sorted(Queue("T", f"b{n % 3}", n) for n in range(queues))
    ids = sorted_ids([f"c{number:02d}" for number in range(members)])
    given_out = [queue for client in ids for queue in strategy.allocate(client, every, ids)]
    assert sorted(given_out) == every


@given(st.integers(0, 100), st.integers(1, 30))
def test_averages_differ_by_one_at_most(queues: int, members: int) -> None:
    every = [Queue("T", "b", number) for number in range(queues)]
    ids = sorted_ids([f"c{number}" for number in range(members)])
    for strategy in (AVG, AveragelyByCircle()):
        sizes = [len(strategy.allocate(client, every, ids)) for client in ids]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("strategy", SHARING)
def test_a_stranger_gets_nothing(strategy: Strategy) -> None:
    assert strategy.allocate("stranger", EIGHT, THREE) == []


def test_configured_queues_are_taken_if_they_exist() -> None:
    other = Queue("T", "b-z", 0)
    assert Configured((EIGHT[2], other)).allocate("c", EIGHT, THREE) == [EIGHT[2]]


def test_a_room_without_members_is_shared_by_all() -> None:
    queues = [Queue("T", "a", 0), Queue("T", "a", 1), Queue("T", "z", 0), Queue("T", "z", 1)]
    near = MachineRoomNearby(AVG, lambda queue: queue.broker_name, lambda client: client[0])
    assert near.allocate("a1", queues, ["a1", "a2"]) == [queues[0], queues[2]]
    with pytest.raises(ValueError, match="has no machine room"):
        MachineRoomNearby(AVG, lambda queue: "", lambda client: "r").allocate("a1", queues, ["a1"])


def test_members_are_sorted_as_java_sorts() -> None:
    assert sorted_ids(["b", "a", "\U0001f600", "\uffff"]) == ["a", "b", "\U0001f600", "\uffff"]
