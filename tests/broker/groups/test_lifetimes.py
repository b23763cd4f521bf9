"""What a deleted group or topic leaves to the next one of its name: the table of lifetimes in docs/architecture.md."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import GUARD_QUIET_S, LIMITS
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_records

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.draining import FLAGS
from ...support.requests import SUBSCRIBED, SUSPEND, ack, commit, join, lock, pop, popped, pull, send

pytestmark = pytest.mark.still


async def _held(node: Node, wire: Wire, topic: str = "t", *, offset: int = 0, flags: int = SUSPEND | SUBSCRIBED) -> int:
    """The opaque of a pull that the broker holds."""
    count = node.broker.held_pulls.count
    opaque = wire.send(RequestCode.PULL_MESSAGE, pull(topic, offset=offset, flags=flags, suspend_timeout_millis=60_000))
    await eventually(lambda: node.broker.held_pulls.count > count)
    return opaque


async def _query_offset(wire: Wire, topic: str = "t") -> int:
    """The committed offset of queue 0; -1 if there is none."""
    ext = {"consumerGroup": "g", "topic": topic, "queueId": 0, "unknown": "error"}
    found = await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, ext)
    return int(str(found.ext["offset"])) if found.code == 0 else -1


async def _delete_group(wire: Wire, *, cleans: bool) -> None:
    ext = {"groupName": "g", "removeOffset": cleans}
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, ext)).code == 0


@pytest.mark.parametrize("cleans", [True, False])
async def test_recreated_group_serves_its_clients_after_it_was_deleted_under_pulls_pops_and_timers(
    node: Node, connect: Connect, cleans: bool
) -> None:
    admin, reader, second, popper = [await connect(node.address) for _ in range(4)]
    await create_topic(admin, "t", 1)
    await create_topic(admin, "u", 1)
    await join(reader, "c1")
    await join(second, "c2")
    await eventually(lambda: not node.broker.draining.is_pending("g"))
    node.clock.advance(LIMITS.drained_wait_s)  # the change is over
    await send(admin, b"first")
    found = await reader.call(RequestCode.PULL_MESSAGE, pull(flags=FLAGS))
    assert [record.body for record in decode_records(found.body)] == [b"first"]
    await commit(reader, 1)
    contest = await _held(node, second, offset=1, flags=FLAGS)  # c2 waits for c1, with the guard's timer
    await send(admin, b"popped", topic="u")
    (taken,) = await popped(popper, topic="u", invisibleTime=10_000)
    waiting = popper.send(RequestCode.POP_MESSAGE, pop("u", pollTime=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)

    await _delete_group(admin, cleans=cleans)
    assert (await popper.answer(waiting)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "g" not in node.broker.group_configs
    await join(reader, "c1", version=2)  # its next heartbeat creates the group
    assert "g" in node.broker.group_configs
    assert await _query_offset(admin) == (-1 if cleans else 1)

    for _ in range(3):  # the timers of before the deletion run: invisible time, guard
        node.clock.advance(10.0)
    again = await popped(popper, topic="u", invisibleTime=10_000)
    assert [(record.body, record.reconsume_times) for record in again] == [(b"popped", 0 if cleans else 1)]
    await popper.call(RequestCode.ACK_MESSAGE, ack(taken, topic="u"))
    node.clock.advance(10.0)
    assert len(await popped(popper, topic="u")) == 1, "a handle from before the deletion acknowledges nothing"
    await send(admin, b"second")
    moved = await second.answer(contest)
    assert moved.code in (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND), "the held pull ends"
    node.clock.advance(2 * GUARD_QUIET_S)
    assert node.broker.held_pulls.count == 0


async def test_lease_outlives_the_settings_of_its_group_and_fences_others_when_that_is_recreated(
    node: Node, connect: Connect
) -> None:
    admin, owner, other = [await connect(node.address) for _ in range(3)]
    await create_topic(admin, "t", 1)
    await join(owner, "c1", strategy="AVG")
    await lock(owner, "c1")
    await _delete_group(admin, cleans=True)
    await join(other, "c2", strategy="AVG")
    late = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 0, "epoch": 1}
    refused = await other.call(RequestCode.UPDATE_CONSUMER_OFFSET, late)
    assert (refused.code, "owned by c1" in (refused.remark or "")) == (ResponseCode.NO_PERMISSION, True)


async def test_recreated_topic_has_no_offset_and_no_reader_to_wait_for(node: Node, connect: Connect) -> None:
    admin, reader, second = [await connect(node.address) for _ in range(3)]
    await create_topic(admin, "t", 1)
    await join(reader, "c1")
    await join(second, "c2")
    await eventually(lambda: not node.broker.draining.is_pending("g"))
    node.clock.advance(LIMITS.drained_wait_s)
    for body in (b"first", b"second", b"third"):
        await send(admin, body)
    assert (await reader.call(RequestCode.PULL_MESSAGE, pull(flags=FLAGS))).code == 0
    await commit(reader, 1)
    held = await _held(node, reader, offset=3, flags=FLAGS)

    assert (await admin.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert (await reader.answer(held)).code == ResponseCode.TOPIC_NOT_EXIST
    await create_topic(admin, "t", 1)
    assert await _query_offset(admin) == -1
    await send(admin, b"new")
    waits = await _held(node, second, flags=FLAGS)
    node.clock.advance(3 * GUARD_QUIET_S)
    found = await second.answer(waits)
    assert [record.body for record in decode_records(found.body)] == [b"new"]
