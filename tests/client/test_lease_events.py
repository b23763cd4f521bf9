"""A member's steps follow from events. None of its timers goes off here, so nothing makes up later for a missing step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rocketlet.client import Consumer, Message
from rocketlet.client.config import ClientLimits
from rocketlet.client.consuming.handling import MessageHandler
from rocketlet.client.member.leases import MemberLocks
from rocketlet.client.member.membership import Shares
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


def another_has_it(node: Node) -> None:
    """The broker has given the queue to another member meanwhile, which has released it since."""
    node.broker.locks.end("g", "t", 0)


async def handle_two(node: Node, begun: list[Message], ends: asyncio.Event) -> MessageHandler:
    """Store two messages. Return a handler that returns for the first message, and waits for `ends` with the second."""
    await fill(node, 2)

    async def handle(message: Message) -> None:
        begun.append(message)
        if message.queue_offset:
            await ends.wait()

    return handle


async def test_a_lost_queue_is_asked_for_again_immediately_and_the_member_is_not_rebalanced_meanwhile(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", 1)
    assigned_after_the_loss: list[asyncio.Task[set[Queue]]] = []

    def revoked(queues: set[Queue]) -> None:
        if not assigned_after_the_loss:
            assigned_after_the_loss.append(asyncio.create_task(consumer.assigned()))

    async with Consumer(
        node.address, "g", "t", Inbox(), start="first", on_revoked=revoked, limits=BY_EVENTS
    ) as consumer:
        await consumer.assigned()
        before = consumer.queues[QUEUE].lease.epoch
        another_has_it(node)
        await consumer.seek("first", [QUEUE])
        (assigned,) = assigned_after_the_loss
        assert QUEUE in await assigned
        assert consumer.queues[QUEUE].lease.epoch > before


@pytest.mark.usefixtures("clock_stands")
async def test_the_messages_of_a_lost_queue_know_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    begun: list[Message] = []
    ends = asyncio.Event()
    handle = await handle_two(node, begun, ends)
    async with Consumer(node.address, "g", "t", handle, start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: len(begun) == 2)
        assert not begun[1].lease_lost
        another_has_it(node)
        await consumer.commit()
        assert begun[1].lease_lost
        ends.set()


async def test_a_connection_that_broke_is_opened_again_and_the_queue_continues(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        former = node.server.connections
        node.break_connections()
        await eventually(lambda: not set(former) & set(node.server.connections))
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

    limits, inbox = replace(BY_EVENTS, lease_tick_s=0.01), Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", limits=limits) as consumer:
        await consumer.assigned()
        monkeypatch.setattr(Shares, "of", stands)
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await asked.wait()
        former = node.server.connections
        node.break_connections()
        await eventually(lambda: not set(former) & set(node.server.connections))
        await fill(node, 1, queue=QUEUE)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_a_topic_that_grows_is_divided_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await eventually(lambda: Queue("t", "broker-a", 1) in consumer.assignment())


async def test_a_queue_stays_its_owners_when_the_broker_rejects_an_offset(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        mine = consumer.queues[QUEUE].lease
        rejected = asyncio.Event()

        def offset_fault(*about: object) -> str:
            rejected.set()
            return "it is not there"

        monkeypatch.setattr("rocketlet.broker.groups.pulling.Commits.offset_fault", offset_fault)
        await consumer.seek("first", [QUEUE])
        await rejected.wait()
        assert consumer.queues[QUEUE].lease is mine
        assert not mine.is_over


async def test_a_queue_that_was_handed_over_belongs_to_another_member_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as one:
        await one.assigned()
        async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as other:
            await eventually(lambda: all(len(_of_topic(member)) == 1 for member in (one, other)))
            await asyncio.gather(one.assigned(), other.assigned())
        await eventually(lambda: len(_of_topic(one)) == 2)
        await one.assigned()


async def test_a_hand_over_that_goes_alone_is_renewed_until_it_is_done(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broker has refused the one request for all queues, and refuses this commit for a while."""

    async def refused(*about: object) -> bool:
        return False

    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as giver:
        await giver.assigned()
        monkeypatch.setattr(MemberLocks, "hand_over", refused)
        monkeypatch.setattr("rocketlet.broker.groups.group.GroupQueue.commit_fault", lambda *about: "not now")
        async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as taker:
            await eventually(lambda: len(_of_topic(giver)) == 1)
            (moves,) = {Queue("t", "broker-a", 0), Queue("t", "broker-a", 1)} - _of_topic(giver)
            lease = node.broker.groups.queue("g", "t", moves.queue_id).lease
            assert lease is not None
            before = lease.renewed_s
            await eventually(lambda: lease.renewed_s > before)
            assert lease.client_id == giver.client_id
            monkeypatch.undo()
            await eventually(lambda: _of_topic(taker) == {moves})


async def test_nothing_is_a_members_after_its_end(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        lease = consumer.queues[QUEUE].lease
    assert (consumer.assignment(), lease.is_over) == (set(), True)
    assert node.broker.groups.owners("g") == {}


def _of_topic(consumer: Consumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "t"}
