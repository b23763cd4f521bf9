"""Our consumers, which pull, and clients that pop in one group: every message is handled once, whoever comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from rocketlet.client import Consumer, Producer
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.admin.diagnosis import diagnose
from rocketlet.protocol.codes import ONEWAY_FLAG, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode
from rocketlet.protocol.message import Record

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.handlers import Inbox
from ...support.requests import ack, commit, join, popped, pull
from ...support.requests import send as send_to


@contextlib.asynccontextmanager
async def popper(wire: Wire, got: list[bytes]) -> AsyncIterator[None]:
    """A client that pops until it is closed."""

    async def pop() -> None:
        while True:
            for record in await popped(wire, pollTime=200, initMode=0):
                await handled(wire, record, got)

    task = asyncio.create_task(pop())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await wire.close()


async def handled(wire: Wire, record: Record, got: list[bytes]) -> None:
    got.append(record.body)
    await asyncio.shield(wire.call(RequestCode.ACK_MESSAGE, ack(record)))


async def send(node: Node, bodies: Iterable[bytes]) -> list[bytes]:
    sent = list(bodies)
    async with Producer(node.address) as producer:
        for body in sent:
            await producer.send("t", body)
    return sent


def owners(node: Node) -> Counter[str]:
    return Counter(node.broker.groups.owners("g").values())


async def test_who_pulls_and_who_pops_share_a_topic_and_hand_queues_over(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", queues=8)
    inbox, got, sent = Inbox(), list[bytes](), list[bytes]()

    async def until_all() -> None:
        await eventually(lambda: len(inbox.messages) + len(got) >= len(sent))

    async with popper(await connect(node.address), got):
        sent += await send(node, (b"apart-%d" % number for number in range(20)))
        await until_all()
        async with Consumer(node.address, "g", "t", inbox, start="first"):
            sent += await send(node, (b"joined-%d" % number for number in range(40)))
            await eventually(lambda: owners(node)["(shared)"] == 4 and len(owners(node)) == 2)
            sent += await send(node, (b"both-%d" % number for number in range(40)))
            await until_all()
            assert {body[:4] for body in inbox.bodies} & {body[:4] for body in got} >= {b"both"}
            async with AdminClient(node.address) as admin:
                assert not [finding for finding in await diagnose(admin) if finding.subject == "g"]
        sent += await send(node, (b"alone-%d" % number for number in range(20)))
        await until_all()
        assert owners(node) == Counter()
    async with Consumer(node.address, "g", "t", inbox, start="first"):
        sent += await send(node, (b"pulled-%d" % number for number in range(20)))
        await until_all()
    assert Counter(inbox.bodies + got) == Counter(sent)


async def test_the_broker_restarts_with_queues_of_both_kinds(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    (record,) = [await pop_one(node, wire)]
    await join(await connect(node.address), "c1")
    before = owners(node)
    assert before["(shared)"] >= 2
    await node.stop()
    node = await nodes.start()
    wire = await connect(node.address)
    assert owners(node) == before
    await join(await connect(node.address), "c1")
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    while owners(node)["(shared)"] > 2:
        await popped(wire)


async def pop_one(node: Node, wire: Wire) -> Record:
    await send(node, [b"a"])
    (record,) = await popped(wire, initMode=0)
    return record


async def test_a_stranger_that_pulled_before_a_restart_does_not_set_back_what_is_popped(
    node: Node, connect: Connect
) -> None:
    """Until its next heartbeat nobody knows it for a member; its commits are one-way, unlike an administrator's."""
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t", queues=1)
    await send(node, [b"one"])
    (record,) = await popped(wire, initMode=0)
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    ext = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 0}
    stranger.send(RequestCode.UPDATE_CONSUMER_OFFSET, ext, flag=ONEWAY_FLAG)
    await stranger.call(RequestCode.QUERY_CONSUMER_OFFSET, ext)
    assert node.broker.offsets.get("g", "t", 0) == 1
    assert await popped(wire) == []
    await commit(stranger, 0)
    assert [record.body for record in await popped(wire)] == [b"one"]


async def test_a_strangers_pull_that_waits_gets_nothing_of_what_is_popped(node: Node, connect: Connect) -> None:
    """After a restart a member pulls before its heartbeat makes it known, and meanwhile others begin to pop."""
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t", queues=1)
    await send(node, [b"one"])
    waiting = stranger.send(RequestCode.PULL_MESSAGE, pull(offset=1, flags=PULL_SUSPEND | PULL_SUBSCRIPTION))
    await stranger.call(RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "g", "topic": "t", "queueId": 0})
    assert [record.body for record in await popped(wire, initMode=0)] == [b"one"]
    await send(node, [b"two"])
    assert (await stranger.answer(waiting)).code == ResponseCode.PULL_NOT_FOUND
    assert [record.body for record in await popped(wire)] == [b"two"]


async def test_client_without_a_heartbeat_gets_nothing_from_a_queue_of_the_pool(node: Node, connect: Connect) -> None:
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t")
    await popped(wire, initMode=0)
    await join(wire, "c1", strategy="AVG")
    queues = [queue for (_, queue), owner in node.broker.groups.owners("g").items() if owner == "(shared)"]
    assert queues
    for queue in queues:
        await send_to(wire, queue=queue)
        for flags, code in (
            (PULL_SUSPEND, ResponseCode.SUBSCRIPTION_NOT_EXIST),
            (PULL_SUSPEND | PULL_SUBSCRIPTION, ResponseCode.PULL_NOT_FOUND),
        ):
            answer = await stranger.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=flags, sub_version=1))
            assert answer.code == code
    assert len(await popped(wire)) == len(queues)
