"""Drains of foreign members that take long, as plain frames: each queue moves on its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rocketlet.broker.config import LIMITS
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, Route, encode_heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import parse_subscription

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.draining import FLAGS, drain_of, members_of, reading
from ...support.requests import join, members, pull, send

TOLD = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


async def moved_between_busy_members(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c1 read queues 0 and 1, c2 queues 2 and 3, with a message of each in a handler; c0 has joined. c1 loses its queues to
    c0, and gets queue 2 of c2, which keeps queue 3. Returns c2's connection."""
    await create_topic(wire, "t", 4)
    two = await connect(node.address)
    await join(wire, "c1")
    await join(two, "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for member, queues in ((wire, (0, 1)), (two, (2, 3))):
        assert await members(member) == ["c1", "c2"]
        for queue in queues:
            await send(wire, queue=queue)
            assert (await member.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    await join(await connect(node.address), "c0")
    await eventually(lambda: members_of(node) == 3 and not drain_of(node.broker).is_finding)
    return two


async def handled(wire: Wire, queue: int, offset: int) -> None:
    """A pull that waits for nothing."""
    header = pull(queue=queue, offset=offset, flags=FLAGS | 0x1, commit_offset=offset, suspend_timeout_millis=1)
    await wire.call(RequestCode.PULL_MESSAGE, header)


async def told_of_itself(node: Node, wire: Wire) -> None:
    node.clock.advance(LIMITS.bridged_after_s)
    async with asyncio.timeout(60):
        while await members(wire) != ["c1"]:
            await wire.request(TOLD)


async def test_a_queue_moves_though_its_next_reader_is_drained_of_others(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await moved_between_busy_members(node, wire, connect)
    assert await members(wire) == ["c1", "c2"], "what it had"
    await told_of_itself(node, wire)
    await handled(two, 2, 1)
    await send(two, b"later", queue=2)
    fresh = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=2, offset=1, flags=FLAGS))
    assert [record.body for record in decode_records(fresh.body)] == [b"later"]
    late = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=0, offset=1, flags=FLAGS))
    assert late.code == ResponseCode.PULL_NOT_FOUND
    for queue in (0, 1):
        assert node.broker.groups.obtain("g").is_drained("t", queue), "its handlers run"
        await handled(wire, queue, 1)
    assert sorted(await members(wire)) == ["c0", "c1", "c2"], "it is notified of all when it has handled what it loses"
    parked = pull(queue=3, flags=FLAGS, suspend_timeout_millis=1)
    assert (await wire.call(RequestCode.PULL_MESSAGE, parked)).code == ResponseCode.PULL_NOT_FOUND, "until it drops it"


async def test_a_reader_that_progresses_for_very_long_holds_up_its_own_queue_only(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    draining = node.broker.draining
    node.clock.advance(1.5)
    await join(await connect(node.address), "c9")  # 1 is c1's own again, 2 is c2's, and 3 is not
    await eventually(lambda: members_of(node) == 4 and not drain_of(node.broker).is_finding)
    began_s = node.clock.monotonic_s()
    drain = drain_of(node.broker)
    assert sorted(place for places in drain.waiting.values() for place in places) == [("t", 0), ("t", 3)]
    while node.clock.monotonic_s() < began_s + LIMITS.drain_max_s - 1.0:
        for session in list(drain.waiting):
            draining.record_progress(node.broker.groups.obtain("g"), session)
        node.clock.advance(LIMITS.drain_limit_s / 4)
    assert sorted(place for places in drain.waiting.values() for place in places) == [("t", 3)]
    await handled(two, 3, 1)
    assert not node.broker.groups.obtain("g").is_drained("t", 3)


async def test_a_reader_that_is_busy_with_a_queue_that_it_keeps_is_waited_for(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Java's handlers take messages in the order in which they were pulled, of whichever queue."""
    two = await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    for queue in (0, 1):
        await handled(wire, queue, 1)
    held = two.send(RequestCode.PULL_MESSAGE, pull(queue=3, offset=1, flags=FLAGS))
    await eventually(lambda: node.broker.held_pulls.count == 1)
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert (await two.answer(held)).code == ResponseCode.PULL_NOT_FOUND, "it is asked how far it is"
    await handled(two, 3, 1)
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert node.broker.groups.obtain("g").is_drained("t", 2), "its handlers run"
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert not node.broker.groups.obtain("g").is_drained("t", 2)


async def test_a_reader_that_stands_is_not_waited_for_because_another_one_continues(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    draining = node.broker.draining
    (one,) = [session for session, places in drain_of(node.broker).waiting.items() if ("t", 0) in places]
    for _ in range(9):
        draining.record_progress(node.broker.groups.obtain("g"), one)
        node.clock.advance(LIMITS.drain_limit_s / 4)
    assert node.broker.groups.obtain("g").is_drained("t", 0)
    assert not node.broker.groups.obtain("g").is_drained("t", 2)


async def test_routes_that_take_long_to_find_are_waited_for(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reading(node, wire)
    find, looked = node.broker.name_servers.find_route, []

    async def far(topic: str) -> Route | None:
        node.clock.advance(0.3 * LIMITS.drain_limit_s)
        looked.append(drain_of(node.broker).is_finding)
        return await find(topic)

    monkeypatch.setattr(node.broker.draining.allotment, "routes", SimpleNamespace(find_route=far))
    for topic in ("u", "v", "w"):
        await create_topic(wire, topic, 1)
    two = await connect(node.address)
    subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in ("t", "u", "v", "w"))
    body = encode_heartbeat(Heartbeat("c2", (ConsumerData("g", subscriptions=subscriptions),)))
    assert (await two.call(RequestCode.HEART_BEAT, body=body)).code == 0
    await eventually(lambda: len(looked) == 4)
    assert all(looked), "nobody is notified before it is known what moves"


async def test_a_pull_of_who_has_left_does_not_count_as_the_next_readers(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    gated = two.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=0, flags=FLAGS))
    await eventually(lambda: bool(drain_of(node.broker).gated))
    await two.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "g"})
    assert (await two.answer(gated)).code == ResponseCode.PULL_NOT_FOUND
    group = node.broker.groups.get("g")
    assert group is not None
    assert node.broker.groups.queue("g", "t", 1).reader in group.members
