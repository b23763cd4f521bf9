"""Unmodified Java clients of 5.x, over remoting, on our broker: what they ask that 4.9's do not."""

from __future__ import annotations

from collections import Counter

import pytest
from rocketlet.testing.clock import MovableClock

from ..conftest import Connect
from ..support.requests import bodies_of
from .conftest import Cluster, Run, StartCluster, filled, missing
from .mqadmin import admin_of

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
feature = pytest.mark.feature


@feature("Pull consumers", "lite pull by subscription, commit")
async def test_lite_pull_subscribes_and_commits(cluster: Cluster, java_five: Run) -> None:
    bodies = await filled(cluster)
    async with java_five("lite", ns=cluster.address, group="g", topic="t", count=len(bodies)) as peer:
        await peer.until(lambda: bool(peer.found("COMMITTED")), 60)
        queues = [(node.broker.offsets, number) for node in cluster.nodes for number in range(2)]
        await peer.until(lambda: all(offsets.get("g", "t", number) == 5 for offsets, number in queues))
    assert Counter(peer.bodies) == Counter(bodies)


@feature("Producers", "messages sent to a time, exact to the ms; recall")
async def test_java_sends_to_times_and_takes_back(
    start_cluster: StartCluster, connect: Connect, java_five: Run
) -> None:
    cluster = await start_cluster(1, clock=MovableClock())
    await cluster.create_topic("t", 1)
    [node] = cluster.nodes
    async with java_five("timers", ns=cluster.address, topic="t") as peer:
        await peer.until(lambda: bool(peer.found("ENDED")))
    assert peer.found("SENT") == [["SENT", "SEND_OK", "true"]] * 3
    assert peer.found("RECALLED") == [["RECALLED", "true"]]
    assert peer.found("NOT-RECALLED") == [["NOT-RECALLED", "true"]]
    assert peer.found("REFUSED") == [["REFUSED", "true"]]
    assert cluster.stored("t") == 0
    node.clock.advance(100)
    wire = await connect(cluster.address)
    assert await bodies_of(wire) == [b"seconds", b"millis", b"at"]


@feature(
    "Push consumers", "messages shared (POP) by more members than queues, set by mqadmin: acknowledged, and retried"
)
async def test_members_share_messages(cluster: Cluster, java_fives: Run) -> None:
    bodies = await filled(cluster)
    async with admin_of(cluster, java_fives) as admin:
        text = await admin("setConsumeMode", "-c", "DefaultCluster", "-g", "g", "-t", "t", "-m", "POP", "-q", "0")
    assert "success" in text
    options = {"ns": cluster.address, "group": "g", "topic": "t", "mode": "fail-once"}
    async with java_fives("pop", **options) as one, java_fives("pop", **options) as other:
        peers = (one, other)
        for peer in peers:
            await peer.started()
        await one.until(lambda: len(one.bodies) + len(other.bodies) >= len(bodies))
        pools = [node.broker.pops for node in cluster.nodes]

        def lag() -> int:
            return sum(numbers.lag for pops in pools for numbers in pops.pools.numbers("g", "t").values())

        def are_told() -> bool:
            """Each member has said of each message when it is to be retried: Java's first pause is 10 s."""
            return all(
                delivery.deadline_s < delivery.since_s + 50
                for pops in pools
                for deliveries in pops.pools.deliveries()
                for delivery in deliveries.unfinished.values()
            )

        assert lag() == len(bodies)
        await one.until(are_told, 60)
        for node in cluster.nodes:
            node.clock.advance(10)
        await one.until(lambda: lag() == 0, 60)
    got = Counter(one.bodies) + Counter(other.bodies)
    assert got == Counter(dict.fromkeys(bodies, 2))
    tries = [int(line[4]) for peer in peers for line in peer.found("GOT")]
    assert sorted(tries) == [0] * len(bodies) + [1] * len(bodies)
    for node in cluster.nodes:
        assert [node.broker.offsets.get("g", "t", queue) for queue in (0, 1)] == [5, 5]
