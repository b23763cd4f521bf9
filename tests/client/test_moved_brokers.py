"""A broker that comes back at another address is found as soon as the name server knows it, not at the next refresh."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import AdminClient, ConnectionFailed, Consumer, Producer, RocketletError, TopicNotFound
from rocketlet.client.config import ClientLimits
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection, Connections
from rocketlet.protocol.bodies import Route
from rocketlet.protocol.names import Queue
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox

QUEUE = Queue("t", "broker-b", 0)
TOLD = ClientLimits(route_interval_s=10 * PATIENCE_S)
"""No look by the clock comes first."""


@pytest.fixture
async def brokers(nodes: Nodes, connect: Connect) -> tuple[Node, Node]:
    """A name server, and a broker beside it that has the topic t."""
    first = await nodes.start()
    second = await nodes.start(name="broker-b", name_servers=(first.address,))
    await create_topic(await connect(second.address), "t", 1)
    return first, second


async def moved(nodes: Nodes, first: Node, second: Node) -> Node:
    await second.stop()
    return await nodes.start(name="broker-b", name_servers=(first.address,), port=free_port())


async def test_members_continue_at_the_other_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    first, second = brokers
    inbox = Inbox()
    async with Consumer(first.address, "g", "t", inbox, start="first", limits=TOLD) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await moved(nodes, first, second)
        async with Producer(first.address, limits=TOLD) as producer:
            await producer.send("t", b"there")
        await eventually(lambda: inbox.bodies == [b"there"])


async def test_a_member_that_leaves_meanwhile_hands_over_at_the_other_address(
    nodes: Nodes, brokers: tuple[Node, Node]
) -> None:
    first, second = brokers
    inbox = Inbox()
    async with Producer(first.address, limits=TOLD) as producer:
        await producer.send("t", b"here")
    async with Consumer(first.address, "g", "t", inbox, start="first", commit_interval_s=300, limits=TOLD) as consumer:
        await eventually(lambda: inbox.bodies == [b"here"])
        third = await moved(nodes, first, second)
        assert QUEUE in consumer.assignment()
    assert third.broker.groups.owners("g") == {}
    assert third.broker.offsets.get("g", "t", 0) == 1


async def test_a_member_asks_no_more_for_the_former_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    """It would send a heartbeat each second for ever, to all brokers."""
    first, second = brokers
    async with Consumer(first.address, "g", "t", Inbox(), start="first", limits=TOLD) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        third = await moved(nodes, first, second)
        heartbeats = consumer._membership._heartbeats
        await eventually(lambda: heartbeats.is_registered(third.address))
        await eventually(lambda: not heartbeats.are_failing)


async def test_producers_find_the_other_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    first, second = brokers
    third: Node | None = None

    async def is_sent() -> bool:
        try:
            await producer.send("t", b"there")
        except RocketletError:
            return False
        return True

    async with Producer(first.address, retries=0, limits=TOLD) as producer:
        await producer.send("t", b"here")
        third = await moved(nodes, first, second)
        async with asyncio.timeout(PATIENCE_S):
            while not await is_sent():
                await asyncio.sleep(0)
    assert third.broker.store.queues["t", 0].next == 2


async def test_a_broadcasting_member_continues_when_its_broker_has_restarted(
    brokers: tuple[Node, Node], nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Counter[str] = Counter()
    find_route = ClusterView.find_route

    async def counted(self: ClusterView, topic: str) -> Route | None:
        route = await find_route(self, topic)
        looked[topic] += 1
        return route

    first, second = brokers
    await create_topic(await connect(first.address), "t", 1)  # so that a route is left
    inbox = Inbox()
    port = int(second.address.rpartition(":")[2])
    async with Consumer(
        first.address,
        "g",
        "t",
        inbox,
        start="first",
        broadcasting=True,
        limits=replace(TOLD, heartbeat_interval_s=10 * PATIENCE_S),
    ) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await second.stop()
        await eventually(lambda: consumer._membership._heartbeats.are_failing)
        monkeypatch.setattr(ClusterView, "find_route", counted)
        await eventually(lambda: looked["t"] > 1)  # the name server knows the broker no more
        await nodes.start(name="broker-b", name_servers=(first.address,), port=port)
        async with Producer(first.address, limits=TOLD) as producer:
            await producer.send("t", b"there", queue=QUEUE)
        await eventually(lambda: inbox.bodies == [b"there"])


# A name server that has just started


@pytest.fixture
async def restarted(nodes: Nodes) -> str:
    """The address of a name server that knows no broker yet."""
    server = Server(Listening("127.0.0.1", port := free_port()), broker=None, routes=Routes())
    await nodes.stack.enter_async_context(server)
    return f"127.0.0.1:{port}"


async def test_topic_that_one_name_server_does_not_know_is_found_at_another(
    node: Node, wire: Wire, restarted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda addresses: None)
    await create_topic(wire, "t", 1)
    both = f"{restarted};{node.address}"
    inbox = Inbox()
    async with Producer(both) as producer, Consumer(both, "g", "t", inbox, start="first"), AdminClient(both) as admin:
        await producer.send("t", b"x")
        await eventually(lambda: inbox.bodies == [b"x"])
        assert (await admin.topic("t")).messages == 1
        with pytest.raises(TopicNotFound):
            await admin.topic("nowhere")


async def test_broker_finds_a_topic_that_one_name_server_does_not_know_at_another(
    nodes: Nodes, node: Node, wire: Wire, restarted: str
) -> None:
    await create_topic(wire, "t", 1)
    broker = (await nodes.start(name="broker-b", name_servers=(restarted, node.address))).broker
    route = await broker.name_servers.find_route("t")
    assert route is not None and [data.broker_name for data in route.queues] == ["broker-a"]
    assert await broker.name_servers.find_route("nowhere") is None


async def test_name_server_that_is_away_does_not_hold_up_a_topic_that_does_not_exist(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once, not at each look for the topic."""
    monkeypatch.setattr("random.shuffle", lambda addresses: None)
    cluster, asked = ClusterView(f"{node.address};192.0.2.1:1"), list[str]()
    get = Connections.get

    async def noted(connections: Connections, address: str) -> Connection:
        asked.append(address)
        if address == "192.0.2.1:1":
            raise ConnectionFailed("it is away")
        return await get(connections, address)

    monkeypatch.setattr(Connections, "get", noted)
    for _ in range(3):
        assert await cluster.find_route("nowhere") is None
    assert asked.count("192.0.2.1:1") == 1
    await cluster.close()
