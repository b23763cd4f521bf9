"""A lease is true at the member: nothing begins after it, what is given up is renewed, and nothing runs twice at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rocketlet.broker.groups.group import QueueLease as BrokerLease
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import ClientLimits, PullLimits
from rocketlet.client.member.leases import MemberLocks
from rocketlet.client.member.membership import Share, Shares
from rocketlet.client.message import Lease
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually, peer

QUEUE = Queue("t", "broker-a", 0)
PLACE = ("t", 0)


def lease_of(node: Node, queue_id: int = 0) -> BrokerLease:
    lease = node.broker.groups.queue("g", "t", queue_id).lease
    assert lease is not None
    return lease


def drop_lease(node: Node) -> None:
    """As if the owner's connection was gone, of which it knows nothing."""
    connection = lease_of(node).connection
    assert connection is not None
    node.broker.locks.connection_gone(connection)


class Gate:
    """A handler that counts what begins, and ends nothing until it is opened."""

    def __init__(self) -> None:
        self.begun: list[Message] = []
        self.at_once = 0
        self.most_at_once = 0
        self.open = asyncio.Event()

    async def handle(self, message: Message) -> None:
        self.begun.append(message)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.open.wait()
        self.at_once -= 1


QUICK = ClientLimits(lease_tick_s=0.01, lock_interval_s=0.01)
"""Leases are renewed all the time."""


async def send(node: Node, count: int) -> None:
    async with Producer(node.address) as producer:
        for number in range(count):
            await producer.send("t", b"%d" % number)


def of_topic(consumer: Consumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "t"}


def renewed_s(node: Node, queue_id: int = 0) -> float:
    return lease_of(node, queue_id).renewed_s


async def seen_renewals(node: Node, count: int, queue_id: int = 0) -> None:
    for _ in range(count):
        before = renewed_s(node, queue_id)
        await eventually(lambda before=before: renewed_s(node, queue_id) > before)  # type: ignore[misc]


async def test_a_member_that_leaves_renews_its_leases_while_its_handlers_run(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(node, 1)
    gate = Gate()
    other = Gate()
    other.open.set()
    leaver = await Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK).__aenter__()
    await eventually(lambda: bool(gate.begun))
    async with Consumer(node.address, "g", "t", other.handle, start="first", limits=QUICK) as stays:
        leaving = asyncio.create_task(leaver.__aexit__())
        await eventually(lambda: QUEUE not in leaver.assignment())
        await seen_renewals(node, 3)
        assert node.broker.groups.owners("g")[PLACE] == leaver.client_id
        gate.open.set()
        await leaving
        await eventually(lambda: QUEUE in stays.assignment())
        assert other.begun == []
    assert node.broker.offsets.get("g", "t", 0) == 1


async def test_what_stays_is_renewed_while_another_queue_is_handed_over_and_asked_for_all_the_time(
    node: Node, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pass of the rebalance renews what is handed over. That is no renewal of what stays."""
    await create_topic(wire, "t", 2)
    async with Producer(node.address) as producer:
        for queue_id in range(2):
            await producer.send("t", b"x", queue=Queue("t", "broker-a", queue_id))
    gate = Gate()
    limits = ClientLimits(lease_tick_s=0.01, lock_interval_s=0.5, rebalance_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits) as gives:
        await eventually(lambda: len(gate.begun) == 2)
        async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits):
            await eventually(lambda: len(of_topic(gives)) == 1)
            (stays,) = of_topic(gives)
            await seen_renewals(node, 2, stays.queue_id)
            gate.open.set()
    assert "lease_over" not in caplog.text


async def test_a_renewal_names_nothing_whose_unlock_is_under_way(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has unlocked it, and the answer is on its way: a renewal would get the answer that the lease had ended."""
    await create_topic(wire, "t", 2)
    send_batch = MemberLocks._send_hand_over
    is_done, is_heard = asyncio.Event(), asyncio.Event()

    async def heard_later(self: MemberLocks, broker_name: str, batch: Any) -> set[Queue]:
        done = await send_batch(self, broker_name, batch)
        is_done.set()
        await is_heard.wait()
        return done

    monkeypatch.setattr(MemberLocks, "_send_hand_over", heard_later)
    caplog.set_level("INFO", "rocketlet.membership")
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK) as stays:
        await eventually(lambda: len(stays.assignment()) > 1)
        async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK):
            await is_done.wait()
            await seen_renewals(node, 3)
            is_heard.set()
            await stays.assigned()
    assert "queue_lost_in_hand_over" not in caplog.text


async def test_nothing_begins_when_the_lease_is_over_by_the_members_clock(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process, or the machine, was stopped: nothing has run meanwhile, no timer and no renewal."""
    await create_topic(wire, "t", 1)
    await send(node, 3)
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", concurrency=1) as consumer:
        await eventually(lambda: bool(gate.begun))
        drop_lease(node)
        epoch = node.broker.locks.lock(LockRequest("thief", "g", (QUEUE,), True), peer())[QUEUE]
        (message,) = gate.begun
        assert not message.lease_lost
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 30)
        assert message.lease_lost, "its handler can know before anything else runs"
        assert 0 < message.epoch < epoch
        gate.open.set()
        await eventually(lambda: QUEUE not in consumer.assignment())
        assert len(gate.begun) == 1, "the next one is the new owner's"
    assert node.broker.offsets.get("g", "t", 0) == 0, "where the group began, no more"


async def test_a_member_whose_broker_was_silent_continues_where_it_was(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(node, 3)
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", concurrency=1, limits=QUICK) as consumer:
        await eventually(lambda: bool(gate.begun))
        lease = consumer.queues[QUEUE].lease
        lease.ends_s = 0.0
        assert gate.begun[0].lease_lost
        await eventually(lambda: not lease.is_over)
        gate.open.set()
        await eventually(lambda: len(gate.begun) == 3)
        assert consumer.queues[QUEUE].lease is lease
    assert [message.queue_offset for message in gate.begun] == [0, 1, 2]


@pytest.mark.usefixtures("clock_stands")
async def test_nothing_begins_when_its_connection_is_gone_also_if_the_broker_has_moved(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    gate = Gate()
    limits = ClientLimits(route_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        node.broker.advertise("127.0.0.1:1", None)
        await node.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 10)
        assert consumer.queues[QUEUE].may_begin
        node.break_connections()
        await eventually(lambda: not consumer.queues[QUEUE].may_begin)
        node.broker.advertise(node.address, None)


async def test_a_queue_stays_its_owner_s_when_its_broker_gets_another_address(
    node: Node, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    await create_topic(wire, "t", 1)
    gate = Gate()
    gate.open.set()
    limits = ClientLimits(route_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits):
        await send(node, 1)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 1)
        lock = lease_of(node)
        former, epoch = lock.connection, lock.epoch
        port = node.address.rpartition(":")[2]
        node.broker.advertise(f"localhost:{port}", None)
        await eventually(lambda: lock.connection is not former)
        await send(node, 2)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 3)
        assert former is not None
        former.abort()
        await eventually(lambda: former not in node.server.connections)
        await send(node, 1)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 4)
        assert [message.epoch for message in gate.begun] == [epoch] * 4
        assert "queue_lost" not in caplog.text


async def test_a_queue_is_taken_again_only_when_its_earlier_handlers_have_ended(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    await send(node, 1)
    gate = Gate()
    passes: Counter[str] = Counter()
    share_of = Shares.of

    async def counted(self: Shares, topic: str, queues: list[Queue]) -> Share | None:
        passes[topic] += 1
        return await share_of(self, topic, queues)

    monkeypatch.setattr(Shares, "of", counted)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", orderly=True, limits=QUICK) as consumer:
        await eventually(lambda: bool(gate.begun))
        drop_lease(node)
        await eventually(lambda: QUEUE not in consumer.assignment())
        before = passes["t"]
        await eventually(lambda: passes["t"] > before + 2)
        assert PLACE not in node.broker.groups.owners("g")
        gate.open.set()
        await eventually(lambda: len(gate.begun) == 2)
    assert gate.most_at_once == 1


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts a suspended machine"
)
def test_the_clock_continues_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert [Lease(1, ends_s).is_over for ends_s in (6.9, 7.0, 7.1)] == [True, True, False]


NEVER_S = 300.0  # the longest commit_interval_s


async def test_a_queue_that_falls_idle_is_committed_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    gate = Gate()
    gate.open.set()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", commit_interval_s=NEVER_S):
        await send(node, 5)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 5)


async def test_pulls_carry_how_far_a_queue_is_handled(node: Node, wire: Wire) -> None:
    """So a member that is killed repeats what was in its handlers, and what one pull brought."""
    await create_topic(wire, "t", 1)
    await send(node, 40)
    release = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.queue_offset == 30:
            await release.wait()

    limits = PullLimits(batch_size=4, messages=4)
    member = Consumer(
        node.address, "g", "t", handle, pull=limits, start="first", commit_interval_s=NEVER_S, concurrency=1
    )
    async with member:
        await eventually(lambda: 30 - 8 <= (node.broker.offsets.get("g", "t", 0) or 0) <= 30)
        release.set()
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 40)


async def test_several_queues_are_committed_in_one_request(node: Node, wire: Wire) -> None:
    """One of them is another's by now: it is lost, and the others are committed all the same."""
    await create_topic(wire, "t", 4)
    queues = [Queue("t", "broker-a", number) for number in range(4)]
    async with Producer(node.address) as producer:
        for queue in queues:
            await producer.send("t", b"1", queue=queue)
    handled: list[int] = []
    revoked: list[set[Queue]] = []
    alone = node.broker.request_times[RequestCode.UPDATE_CONSUMER_OFFSET]
    member = Consumer(
        node.address,
        "g",
        "t",
        collect(handled),
        start="first",
        commit_interval_s=NEVER_S,
        on_revoked=revoked.append,
        limits=ClientLimits(idle_commit_s=NEVER_S),
    )
    async with member:
        await eventually(lambda: sorted(handled) == [0, 1, 2, 3])
        before = sum(alone.counts)
        await member.commit()
        assert sum(alone.counts) == before
        assert [node.broker.offsets.get("g", "t", number) for number in range(4)] == [1, 1, 1, 1]
        async with Producer(node.address) as producer:
            for queue in queues:
                await producer.send("t", b"2", queue=queue)
        await eventually(lambda: sorted(handled) == [0, 0, 1, 1, 2, 2, 3, 3])
        node.broker.locks.end("g", "t", 0)
        await member.commit()
        assert revoked == [{queues[0]}]
        assert [node.broker.offsets.get("g", "t", number) for number in range(1, 4)] == [2, 2, 2]
        assert sum(alone.counts) <= before + 1, "only the refused one is tried alone, to get the reason"


def collect(into: list[int]) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        into.append(message.queue_id)

    return handle
