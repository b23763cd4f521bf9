"""A member's steps follow from events. None of its timers goes off here, so nothing makes up later for a missing step."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from rocketlet.client import Consumer, Message
from rocketlet.client.config import ClientLimits
from rocketlet.client.member.leases import Leases, MemberLocks
from rocketlet.client.member.membership import Shares
from rocketlet.client.message import Lease
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill

QUEUE = Queue("t", "broker-a", 0)
NEVER_S = 3600.0


BY_EVENTS = ClientLimits(
    rebalance_interval_s=NEVER_S, lock_retry_s=NEVER_S, lease_tick_s=NEVER_S, heartbeat_interval_s=NEVER_S
)
"""Nothing happens by the clock."""


@pytest.fixture
def clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends on its own."""
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    monkeypatch.setattr("rocketlet.client.message.clock_s", lambda: now_s)


def leases_of(consumer: Consumer) -> Leases:
    return consumer._membership._leases  # type: ignore[union-attr]


def epoch_of(consumer: Consumer) -> int:
    lease = leases_of(consumer).owned.get(QUEUE)
    return lease.epoch if lease is not None else 0


def another_has_it(node: Node) -> None:
    """The broker has given the queue to somebody else meanwhile, who has released it since."""
    node.broker.locks.end("g", "t", 0)


async def test_a_lost_queue_is_asked_for_again_immediately_and_the_member_is_not_rebalanced_meanwhile(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", 1)
    rebalanced_at_the_loss: list[bool] = []

    def revoked(queues: set[Queue]) -> None:
        rebalanced_at_the_loss.append(consumer._membership.is_rebalanced)

    async with Consumer(
        node.address, "g", "t", Inbox(), start="first", on_revoked=revoked, limits=BY_EVENTS
    ) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        before = epoch_of(consumer)
        another_has_it(node)
        assert await consumer._membership.commit({QUEUE: 0}) == set()
        assert rebalanced_at_the_loss == [False]
        await eventually(lambda: epoch_of(consumer) > before and consumer._membership.is_rebalanced)


@pytest.mark.usefixtures("clock_stands")
async def test_the_messages_of_a_lost_queue_know_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 1)
    begun: list[Message] = []
    ends = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message)
        await ends.wait()

    async with Consumer(node.address, "g", "t", handle, start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: len(begun) == 1)
        assert not begun[0].lease_lost
        another_has_it(node)
        await consumer._membership.commit({QUEUE: 0})
        assert begun[0].lease_lost
        ends.set()


@pytest.mark.usefixtures("clock_stands")
async def test_the_messages_of_a_queue_that_is_lost_in_its_hand_over_know_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 1)
    begun: list[Message] = []
    ends = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message)
        await ends.wait()

    async with Consumer(node.address, "g", "t", handle, start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: len(begun) == 1)
        leases = leases_of(consumer)
        leases.release(QUEUE)
        another_has_it(node)
        await leases.reclaim()
        assert begun[0].lease_lost
        ends.set()


async def test_a_connection_that_broke_is_opened_again_and_the_queue_continues(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        before = epoch_of(consumer)
        connection = consumer._cluster._connections.find(node.address)
        assert connection is not None
        assert connection._transport is not None
        connection._transport.abort()
        await eventually(lambda: leases_of(consumer).are_suspended or epoch_of(consumer) != before)
        await eventually(lambda: consumer._membership.is_rebalanced and not leases_of(consumer).are_suspended)
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_a_queue_continues_though_the_rebalance_waits_for_another_broker(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    asked = asyncio.Event()

    async def stands(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    limits = replace(BY_EVENTS, lease_tick_s=0.01)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=limits) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        monkeypatch.setattr(Shares, "of", stands)
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await asked.wait()
        connection = consumer._cluster._connections.find(node.address)
        assert connection is not None
        assert connection._transport is not None
        connection._transport.abort()
        await eventually(lambda: leases_of(consumer).are_suspended)
        await eventually(lambda: not leases_of(consumer).are_suspended)


async def test_what_a_member_owns_is_in_no_doubt(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        assert not leases_of(consumer).are_doubtful


async def test_a_topic_that_grows_is_divided_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await eventually(lambda: Queue("t", "broker-a", 1) in consumer.assignment())


async def test_a_refused_commit_costs_the_queue_only_if_it_is_another_s(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        leases = leases_of(consumer)
        mine = leases.owned[QUEUE]
        assert await leases._commit_one(QUEUE, 0, Lease(mine.epoch - 1)) is not None
        assert leases.owned.get(QUEUE) is mine, "an earlier ownership was refused"
        monkeypatch.setattr("rocketlet.broker.groups.pulling.Commits.offset_fault", lambda *about: "it is not there")
        assert await leases._commit_one(QUEUE, 0, mine) is not None
        assert leases.owned.get(QUEUE) is mine, "the offset was refused"


async def test_a_queue_that_was_handed_over_belongs_to_another_member_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as one:
        await eventually(lambda: one._membership.is_rebalanced)
        async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as other:
            await eventually(lambda: all(len(_of_topic(member)) == 1 for member in (one, other)))
            await eventually(lambda: all(member._membership.is_rebalanced for member in (one, other)))
        await eventually(lambda: len(_of_topic(one)) == 2)
        await eventually(lambda: one._membership.is_rebalanced)


async def test_a_hand_over_that_goes_alone_is_renewed_until_it_is_done(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broker has refused the one request for all queues, and refuses this commit for a while."""

    async def refused(*about: object) -> bool:
        return False

    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        leases = leases_of(consumer)
        monkeypatch.setattr(MemberLocks, "hand_over", refused)
        monkeypatch.setattr("rocketlet.broker.groups.group.GroupQueue.commit_fault", lambda *about: "not now")
        lease = leases.owned[QUEUE]
        leases.release(QUEUE)
        before = lease.asked_s
        await eventually(lambda: lease.asked_s > before)
        assert leases._held(QUEUE) is lease
        monkeypatch.undo()
        await eventually(lambda: not leases.releasing)


async def test_nothing_is_a_members_after_its_end(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: consumer._membership.is_rebalanced)
        leases = leases_of(consumer)
        lease = leases.owned[QUEUE]
    assert (leases.owned, lease.is_over) == ({}, True)
    assert node.broker.groups.owners("g") == {}


def _of_topic(consumer: Consumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "t"}
