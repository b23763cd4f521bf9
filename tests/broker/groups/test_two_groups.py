"""A process with two groups has one connection to a broker: what it says in one group is not said in the other."""

from __future__ import annotations

from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.subscription import parse_subscription

from ...conftest import Connect, Node, Wire, eventually
from ...support.requests import join, members, pull, send
from .foreign.test_draining import FLAGS, reading


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
    group = node.broker.groups.get("g")
    assert group is not None
    (connection,) = group.members
    await eventually(lambda: len(node.broker.held_pulls.of(connection)) == 2)
    await join(await connect(node.address), "c2")
    assert (await wire.answer(busy)).code == ResponseCode.PULL_NOT_FOUND
    assert node.broker.draining.is_draining("g", "t", 1), "its handlers run"
    assert await members(wire) == ["c1"]
    await send(wire, b"later", queue=1)
    assert [record.body for record in decode_records((await wire.answer(held)).body)] == [b"later"], "it was held on"
