"""Messages of foreign members that may be handled again: each cause is counted, and named by `rocketlet doctor`."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import LIMITS, REPEATS_S
from rocketlet.broker.metrics import Collector
from rocketlet.client import AdminClient
from rocketlet.client.admin import diagnosis
from rocketlet.protocol.codes import RequestCode

from ...conftest import Connect, Node, Wire, eventually
from ...support.draining import FLAGS, drain_of, members_of, reading
from ...support.requests import join, members, pull
from ...support.two_brokers import at_work, told


async def found(node: Node, kind: str) -> list[str]:
    """`diagnose` would wait for the running information of members that answer nothing here."""
    async with AdminClient(node.address) as admin:
        status = await admin.broker_status(node.address)
    return [item.text for item in diagnosis._repeats("broker-a", status) if item.kind == kind]


async def measured(node: Node, name: str) -> float:
    families = await Collector(node.broker, node.server.memory, ()).snapshot()
    (sample,) = next(family for family in families if family.name == name).samples
    return float(sample.value)


async def test_a_queue_that_moves_while_its_messages_are_handled(node: Node, wire: Wire, connect: Connect) -> None:
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    await join(await connect(node.address), "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for _ in range(2):
        node.clock.advance(LIMITS.drain_limit_s / 2)
    assert await measured(node, "rocketlet_undrained_queues") == 1
    (text,) = await found(node, "moved_undrained")
    assert "g: t:1" in text
    node.clock.advance(REPEATS_S + 1)
    assert await found(node, "moved_undrained") == []


@pytest.mark.parametrize("committed", [0, 1])
async def test_a_member_that_leaves_with_messages_in_its_handlers(node: Node, wire: Wire, committed: int) -> None:
    await reading(node, wire)
    for queue in range(2):
        header = pull(queue=queue, offset=1, flags=FLAGS | 0x1, commit_offset=committed, suspend_timeout_millis=1)
        await wire.call(RequestCode.PULL_MESSAGE, header)
    await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})
    assert await measured(node, "rocketlet_left_uncommitted") == (0 if committed else 2)
    texts = await found(node, "left_uncommitted")
    assert ["g (c1) with 2 messages" in text for text in texts] == ([] if committed else [True])


async def test_a_broker_that_cannot_be_asked(node: Node, wire: Wire) -> None:
    async with at_work(node, wire, None):
        pass
    await join(wire, "c1")
    await told(wire, "c1")
    assert await measured(node, "rocketlet_peers_away") == 1
    (text,) = await found(node, "peer_away")
    assert "broker-b at 127.0.0.1:" in text
