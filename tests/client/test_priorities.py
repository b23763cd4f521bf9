"""Messages with priorities, sent and handled by our own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rocketlet import sync
from rocketlet.client import AdminClient, ConfigError, MessageIllegal, Outgoing, Producer, SharedConsumer
from rocketlet.client.config import MAX_INT
from rocketlet.protocol import properties as props
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.names import TIMER_TOPIC
from rocketlet.testing import Broker

from ..conftest import Node, Wire, eventually
from ..support.handlers import Inbox
from ..support.requests import send
from ..support.topics import put, stored


async def test_urgent_messages_are_handled_first(node: Node) -> None:
    put(node, message_type="PRIORITY")
    async with Producer(node.address) as producer:
        for level in (0, 2, 1, 3, 0):
            await producer.send("t", b"%d" % level, priority=level, properties={"color": "blue"})
    inbox = Inbox()
    async with SharedConsumer(node.address, "g", "t", inbox, concurrency=1, start="first"):
        await eventually(lambda: len(inbox.messages) == 5)
    assert inbox.bodies == [b"3", b"2", b"1", b"0", b"0"]
    first = inbox.messages[0]
    assert (first.priority, first.user_properties, first.outgoing().priority) == (3, {"color": "blue"}, 3)


async def test_priority_counts_before_the_queue_that_a_sender_chose(node: Node) -> None:
    put(node, message_type="PRIORITY")
    async with Producer(node.address) as producer:
        sent = [await producer.send("t", b"x", priority=level, queue_key="same") for level in (1, 9)]
        plain = await producer.send("t", b"y")
    assert [result.queue.queue_id for result in sent] == [1, 3]
    assert {record.queue_id for record in stored(node)} == {1, 3, plain.queue.queue_id}


async def test_delayed_message_has_a_priority_too(node: Node) -> None:
    put(node)
    async with Producer(node.address) as producer:
        await producer.send("t", b"x", priority=2, delay=60)
    (record,) = stored(node, TIMER_TOPIC)
    assert props.find(record.properties, props.REAL_QUEUE_ID) == "2"


@pytest.mark.parametrize("priority", [-1, MAX_INT + 1, 1.5, True, "1"])
async def test_priority_that_brokers_cannot_take_is_refused(node: Node, priority: Any) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="priority"):
            await producer.send("t", b"x", priority=priority)


async def test_message_of_a_batch_has_no_priority(node: Node) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", priority=1)])


async def test_sync_producer_sends_priorities(node: Node) -> None:
    put(node, message_type="PRIORITY")

    def run() -> int:
        with sync.Producer(node.address) as producer:
            return producer.send("t", b"x", priority=2).queue.queue_id

    assert await asyncio.to_thread(run) == 2


@pytest.mark.parametrize(("value", "code"), [("7", 0), ("-1", 13), ("x", 13), ("2147483647", 0), ("2147483648", 13)])
async def test_broker_checks_the_priority_of_other_clients(node: Node, wire: Wire, value: str, code: int) -> None:
    put(node)
    answer = await send(wire, properties=f"{props.PRIORITY}\x01{value}")
    assert (answer.code, len(stored(node))) == (code, int(code == 0))
    assert code in (0, ResponseCode.MESSAGE_ILLEGAL)


async def test_topic_for_priorities_is_created_with_the_admin_client(node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t", queues=2, message_type="PRIORITY")
        found = node.broker.topics.get("t")
        assert found is not None
        assert (found.write_queues, found.message_type) == (2, "PRIORITY")
        with pytest.raises(ConfigError, match="expected one of DELAY"):
            await admin.create_topic("u", message_type="URGENT")


def test_topic_for_priorities_is_created_with_the_test_kit() -> None:
    with Broker() as broker, sync.Producer(broker.address) as producer:
        broker.create_topic("t", 3, message_type="PRIORITY")
        assert [producer.send("t", b"x", priority=level).queue.queue_id for level in (0, 1, 7)] == [0, 1, 2]
        with pytest.raises(ValueError, match="URGENT"):
            broker.create_topic("u", message_type="URGENT")
