"""A process with two groups has one connection to a broker: what it says in one group is not said in the other."""

from __future__ import annotations

from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import parse_subscription

from ...conftest import Connect, Node, Wire, eventually
from ...support.draining import FLAGS, reading
from ...support.requests import beat, join, members, pull, send


async def test_a_held_pull_of_another_group_says_nothing_of_this_one(node: Node, wire: Wire, connect: Connect) -> None:
    """A process with two groups has one connection. One group has handled all of queue 1, the other has not."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    of_both = tuple(ConsumerData(name, subscriptions=(parse_subscription("t", "*", version=1),)) for name in ("g", "h"))
    beat = bodies.encode_heartbeat(Heartbeat("c1", of_both))
    assert (await wire.call(RequestCode.HEART_BEAT, body=beat)).code == 0
    assert [item.name for item in node.broker.groups] == ["g", "h"]
    idle = pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1) | {"consumerGroup": "h"}
    held = wire.send(RequestCode.PULL_MESSAGE, idle)
    busy = wire.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    (connection,) = group_of(node).members
    await eventually(lambda: len(node.broker.held_pulls.of(connection)) == 2)
    await join(await connect(node.address), "c2")
    assert (await wire.answer(busy)).code == ResponseCode.PULL_NOT_FOUND
    assert node.broker.groups.obtain("g").is_drained("t", 1), "its handlers run"
    assert await members(wire) == ["c1"]
    await send(wire, b"later", queue=1)
    assert [record.body for record in decode_records((await wire.answer(held)).body)] == [b"later"], "it was held on"


async def test_a_connection_is_one_member_of_a_group(node: Node, wire: Wire) -> None:
    """Pulls carry no client id, so two ids of one group on one connection look the same. A second id needs a connection of
    its own, and the refusal says so."""
    await join(wire, "c1")
    refused = await beat(wire, "c2")
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "this connection is the member c1 of the group g" in (refused.remark or "")
    assert await members(wire) == ["c1"]
    assert (await beat(wire, "c2", group="h")).code == 0, "each group has its own members"
    assert (await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})).code == 0
    assert (await beat(wire, "c2")).code == 0
    assert await members(wire) == ["c2"]


async def test_a_connection_that_replaces_another_reads_on_for_it(node: Node, wire: Wire, connect: Connect) -> None:
    """A network may drop a connection without a word. The client comes back by another one, and its handlers still have
    messages of the first: nobody else gets these queues meanwhile."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    again = await connect(node.address)
    await join(again, "c1")
    assert await members(again) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    await wire.close()
    await eventually(lambda: len(group_of(node).members) == 2)
    assert node.broker.groups.obtain("g").is_drained("t", 1), "its handlers run"
    await send(two, b"later", queue=1)
    busy = await again.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert busy.code == ResponseCode.PULL_NOT_FOUND, "nothing new while its handlers run"
    handled = pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1)
    assert (await again.call(RequestCode.PULL_MESSAGE, handled)).code == ResponseCode.PULL_NOT_FOUND
    await eventually(lambda: not node.broker.groups.obtain("g").is_drained("t", 1))
    assert await members(again) == ["c1", "c2"]


def group_of(node: Node) -> ConsumerGroup:
    group = node.broker.groups.get("g")
    assert group is not None
    return group
