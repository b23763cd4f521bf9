"""Java push consumers (4.9.8) in one group with Python members that pop."""

from __future__ import annotations

from collections import Counter

import pytest
from rocketlet.client import Producer, SharedConsumer

from ..conftest import Connect, Nodes, create_topic
from ..support.handlers import Inbox
from ..support.pacing import pace
from .conftest import Run, missing
from .features import area

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
feature = area("Push consumers")
QUEUES = 6
PACE_S = 0.01


def handled(java: list[str], *inboxes: Inbox) -> Counter[str]:
    """How often each body was handled."""
    return Counter([*java, *(body.decode() for inbox in inboxes for body in inbox.bodies)])


@feature("a restart of the broker under a group in which others pop")
async def test_nobody_gets_what_java_reads_over_a_restart(nodes: Nodes, connect: Connect, java: Run) -> None:
    """Its heartbeat may come 30 s after the restart, and its pulls say neither who it is nor what it subscribes to."""
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", QUEUES)
    first, newcomer = Inbox(), Inbox()
    async with (
        java("consume", ns=node.address, group="g", topic="t") as peer,
        SharedConsumer(node.address, "g", "t", first, start="first"),
        Producer(node.address) as producer,
    ):
        sent = 0

        async def until_java_has(count: int) -> None:
            nonlocal sent
            wanted = len(peer.bodies) + count
            while len(peer.bodies) < wanted:
                await producer.send("t", b"%d" % sent)
                sent += 1
                await pace(PACE_S)

        await until_java_has(50)
        await peer.until(lambda: len(handled(peer.bodies, first)) == sent)
        await node.stop()
        await nodes.start(port=int(node.address.split(":")[1]))
        async with SharedConsumer(node.address, "g", "t", newcomer):
            await until_java_has(50)
            await peer.until(lambda: len(handled(peer.bodies, first, newcomer)) == sent)
    assert newcomer.messages
    assert set(handled(peer.bodies, first, newcomer).values()) == {1}
