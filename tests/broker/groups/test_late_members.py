"""Foreign members that are notified of a change late, as plain frames."""

from __future__ import annotations

from rocketlet.broker.config import DROPPED_AFTER_S, LIMITS, TOLD_AGAIN
from rocketlet.protocol.codes import RequestCode, ResponseCode

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.draining import FLAGS, drain_of, handled, joins, members_of, reading
from ...support.requests import join, members, pull, send

TOLD = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


async def told_of_a_newcomer(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c1 has handled queue 1, which is c2's now, and was notified. Returns c2's connection."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    await handled(wire, 1, 1)
    await wire.request(TOLD)
    return two


async def gets_nothing(wire: Wire) -> bool:
    """Whether a pull of queue 1 gets nothing, though a message is there."""
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    return answer.code == ResponseCode.PULL_NOT_FOUND


async def test_who_has_not_asked_since_it_was_notified_is_notified_again_and_gets_nothing(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """By the list that it has it would read a queue that another member reads."""
    two = await told_of_a_newcomer(node, wire, connect)
    await send(two, b"later", queue=1)
    node.clock.advance(LIMITS.drained_wait_s)
    await wire.request(TOLD)
    assert await gets_nothing(wire)
    assert await members(wire) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)
    assert node.broker.groups.obtain("g").drain is None


async def test_who_is_notified_in_the_midst_of_its_rebalance_gets_nothing_of_what_it_reads_on(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Apache's client asks once for each topic, and drops queues of that topic. This one is given the new list for u and for
    retries only, and has not received the notification."""
    two = await connect(node.address)
    for topic in "tu":
        await create_topic(wire, topic, 2)
    await joins(wire, "c1", "t", "u")
    assert await members(wire) == ["c1"]
    await joins(two, "c2", "t", "u")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for _ in range(2):  # it is asked how far it is, and given up
        node.clock.advance(LIMITS.drain_limit_s / 2)
    for _ in ("u", "retries"):
        assert await members(wire) == ["c1", "c2"]
    await send(two, b"later", queue=1)
    node.clock.advance(DROPPED_AFTER_S)
    assert await gets_nothing(wire)
    wire.requests.clear()
    node.clock.advance(LIMITS.drained_wait_s - DROPPED_AFTER_S)
    await wire.request(TOLD)
    assert await gets_nothing(wire)
    for _ in ("t", "u", "retries"):
        assert await members(wire) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)
    assert node.broker.groups.obtain("g").drain is None


async def test_who_never_asks_is_believed_in_the_end_to_allocate_in_its_own_way(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await told_of_a_newcomer(node, wire, connect)
    await send(two, b"later", queue=1)
    for _ in range(TOLD_AGAIN):
        node.clock.advance(LIMITS.drained_wait_s)
        assert await gets_nothing(wire)
    node.clock.advance(LIMITS.drained_wait_s)
    assert not await gets_nothing(wire)
