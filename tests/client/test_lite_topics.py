"""Messages of lite topics, sent by our own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rocketlet import sync
from rocketlet.client import BrokerRefused, Consumer, MessageIllegal, Outgoing, Producer

from ..conftest import Node, eventually
from ..support.handlers import Inbox
from ..support.topics import put, stored


async def test_message_reaches_its_lite_topic_and_shows_it(node: Node) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        for body in (b"1", b"2"):
            await producer.send("t", body, lite_topic="session-42", properties={"color": "blue"})
    assert [(name, lite.next) for name, lite in node.broker.lites.of("t").items()] == [("session-42", 2)]
    inbox = Inbox()
    async with Consumer(node.address, "plain", "t", inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 2)
    message = inbox.messages[0]
    assert (message.lite_topic, message.user_properties) == ("session-42", {"color": "blue"})
    assert message.outgoing().lite_topic == "session-42"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, 7])
async def test_illegal_name_of_a_lite_topic_is_refused(node: Node, name: Any) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="lite topic"):
            await producer.send("t", b"x", lite_topic=name)
    assert stored(node) == []


async def test_lite_topic_excludes_delays_priorities_and_batches(node: Node) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        for other in ({"delay": 5}, {"priority": 1}, {"delay_level": 1}):
            with pytest.raises(MessageIllegal, match="lite_topic"):
                await producer.send("t", b"x", lite_topic="a", **other)  # type: ignore[arg-type]
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", lite_topic="a")])
    assert stored(node) == []


async def test_refusal_says_how_a_topic_of_lite_topics_is_created(node: Node) -> None:
    put(node)
    async with Producer(node.address) as producer:
        with pytest.raises(BrokerRefused, match="rocketlet topics create t --lite"):
            await producer.send("t", b"x", lite_topic="a")


async def test_sync_producer_sends_to_lite_topics(node: Node) -> None:
    put(node, message_type="LITE")

    def run() -> None:
        with sync.Producer(node.address) as producer:
            producer.send("t", b"x", lite_topic="a")

    await asyncio.to_thread(run)
    assert list(node.broker.lites.of("t")) == ["a"]
