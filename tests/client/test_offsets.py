"""Commits at Apache's brokers, which refuse none: a later one must not be followed by an earlier one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rocketlet.broker.runtime import MovableClock
from rocketlet.client.config import At
from rocketlet.client.member.offsets import GroupOffsets, Position, begin_offset
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.bodies import Work
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from ..conftest import Connect, Node, Nodes, Wire, create_topic
from ..support.requests import send
from ..support.turns import passed

QUEUES = [Queue("t", "broker-a", number) for number in range(3)]


class Line:
    """A connection to a broker that answers when the test allows it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # queue id, offset
        self.unanswered: list[asyncio.Future[None]] = []

    def request(self, code: int, ext: dict[str, Any], *, timeout_s: float) -> asyncio.Future[None]:
        self.sent.append((int(ext["queueId"]), int(ext["commitOffset"])))
        answer = asyncio.get_running_loop().create_future()
        self.unanswered.append(answer)
        return answer

    async def answer(self) -> None:
        for answer in self.unanswered:
            answer.set_result(None)
        self.unanswered.clear()
        await passed()


async def test_the_first_commit_goes_alone_and_a_later_one_overtakes_none_that_waits() -> None:
    line = Line()
    offsets = GroupOffsets(cast("ClusterView", SimpleNamespace(connected=lambda name: line)), "g")
    storing = [asyncio.create_task(offsets.store(queue, 1, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1)]
    await line.answer()
    storing += [asyncio.create_task(offsets.store(queue, 2, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2)], "a commit waits for the one before it of the same queue"
    await line.answer()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    await line.answer()
    assert all(task.done() and task.exception() is None for task in storing)
    assert (len(offsets._turns), len(offsets._first)) == (0, 0), "nothing is kept of queues that nobody commits"


async def test_one_pull_shows_that_those_before_it_are_begun_with() -> None:
    asked: list[tuple[int, int]] = []

    async def ask(code: int, ext: dict[str, Any], *, timeout_s: float) -> None:
        asked.append((code, int(ext["sysFlag"])))

    offsets = GroupOffsets(cast("ClusterView", SimpleNamespace(connected=lambda name: SimpleNamespace(ask=ask))), "g")
    await asyncio.gather(*(offsets.pulls_stored(queue, 1) for queue in QUEUES))
    assert asked == [(RequestCode.PULL_MESSAGE, PULL_SUBSCRIPTION)], "it neither commits nor waits"
    await offsets.pulls_stored(QUEUES[0], 1)
    assert len(asked) == 2, "pulls may have come between"


def test_queues_that_come_later_are_read_from_their_start_and_single_ones_from_where_was_said() -> None:
    starts = {QUEUES[1]: At(7)}
    offsets = GroupOffsets(cast("ClusterView", SimpleNamespace()), "g", "last", starts)
    assert offsets.late is not None
    offsets.late._brokers = frozenset(["broker-a"])
    retries = Queue("%RETRY%g", "broker-a", 0)
    offsets.saw("t", QUEUES[:2])
    offsets.saw("t", QUEUES)
    offsets.saw("%RETRY%g", [retries])
    assert [offsets._start_of(queue) for queue in (*QUEUES, retries)] == ["last", At(7), "first", "first"]
    offsets._latest[QUEUES[0]] = 9
    assert offsets._start_of(QUEUES[0]) == At(9)


STORED_S = (0, 0, 1, 1, 1, 3, 3, 3, 3, 3)
"""When each message of a queue is stored."""


@pytest.mark.parametrize("expired", [0, 3])
async def test_a_time_is_the_first_message_stored_then_or_later_whichever_the_broker_names(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch, expired: int
) -> None:
    """Brokers name the nearest message: the one before, or any of those with the same time."""
    node = await nodes.start(clock=MovableClock(stands=True))
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    began_ms = node.clock.time_ms()
    for number, stored_s in enumerate(STORED_S):
        node.clock.advance(stored_s - (node.clock.time_ms() - began_ms) / 1000)
        await send(wire, b"%d" % number)
    node.broker.store.queues["t", 0].begin = expired
    named = expired

    def name(queue: Any, time_ms: int) -> Work[int]:
        yield
        return named

    monkeypatch.setattr(node.broker.store, "offset_by_time", name)
    cluster = ClusterView(node.address)
    connection = await cluster.connection(node.address)
    for time_s in (-1, 0, 0.5, 1, 2, 3, 4):
        later = (number for number, stored_s in enumerate(STORED_S) if stored_s >= time_s and number >= expired)
        wanted = next(later, len(STORED_S))
        for named in range(expired, len(STORED_S)):
            time_ms = began_ms + round(1000 * time_s)
            assert await begin_offset(connection, Queue("t", "broker-a", 0), time_ms) == wanted, (time_s, named)
    await cluster.close()


async def test_a_time_in_an_empty_queue_is_its_end(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    cluster = ClusterView(node.address)
    connection = await cluster.connection(node.address)
    assert await begin_offset(connection, Queue("t", "broker-a", 0), 1) == 0
    await cluster.close()


async def test_the_start_of_a_group_is_asked_for() -> None:
    asked: list[int] = []

    class Broker:
        async def request(self, code: int, ext: dict[str, Any], *, timeout_s: float) -> Frame:
            asked.append(code)
            return Frame(0, 0, {"offset": "5"})

    connection = cast("Connection", Broker())
    assert await begin_offset(connection, QUEUES[0], At(3)) == 3
    assert [await begin_offset(connection, QUEUES[0], start) for start in ("first", "last")] == [5, 5]
    assert asked == [RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET]


def test_a_lag_is_never_below_zero() -> None:
    assert [Position(None, 5, end).lag for end in (4, 5, 7)] == [0, 0, 2]
