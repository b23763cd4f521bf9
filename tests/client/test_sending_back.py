"""A hand-over and what a handler sends back: the offset says how far everything is handled, so what was handled behind a
message that nobody took back would come again."""

from __future__ import annotations

import asyncio

import pytest
from rocketlet.client import ConnectionFailed, Consumer, Message, Reject, RequestTimeout, RetryLater, RocketletError

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import fill


def refuse_first(monkeypatch: pytest.MonkeyPatch, away: list[RocketletError]) -> None:
    """What is sent back fails with each of these, the last one first; then it arrives."""
    send_back = Consumer._send_back

    async def sent_back(self: Consumer, message: Message, delay_level: int) -> None:
        if away:
            raise away.pop()
        await send_back(self, message, delay_level)

    monkeypatch.setattr(Consumer, "_send_back", sent_back)


@pytest.mark.parametrize("outcome", [RetryLater(1), Reject()])
async def test_a_hand_over_waits_for_what_is_sent_back_while_its_broker_is_away(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The offset says how far everything is handled: what was handled behind it would come again."""
    monkeypatch.setattr("rocketlet.client.consuming.handling.RECONNECT_S", 0.001)
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    seen: list[bytes] = []
    may_end = asyncio.Event()
    away: list[RocketletError] = [ConnectionFailed("away"), RequestTimeout("away")]

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append(message.body)
        if message.body != b"0":
            return None
        await may_end.wait()
        return outcome

    refuse_first(monkeypatch, away)
    async with Consumer(node.address, "g", "t", handle, start="first") as consumer:
        await eventually(lambda: len(seen) == 3)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: process_queue.running == 1)
        leaving = asyncio.create_task(consumer.stop())
        await eventually(lambda: process_queue.is_stopped)
        may_end.set()
        await leaving
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3


@pytest.mark.parametrize("outcome", [RetryLater(1), Reject()])
async def test_a_hand_over_sends_back_what_its_broker_had_not_taken(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The handler would be called again after a pause, in which the queue is given up."""
    monkeypatch.setattr("rocketlet.client.consuming.handling.RECONNECT_S", 0.001)
    monkeypatch.setattr("rocketlet.client.consuming.handling.SEND_BACK_RETRY_S", 3600)
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    seen: list[bytes] = []
    away: list[RocketletError] = [ConnectionFailed("away"), ConnectionFailed("away"), RequestTimeout("away")]

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append(message.body)
        return outcome if message.body == b"0" else None

    refuse_first(monkeypatch, away)
    async with Consumer(node.address, "g", "t", handle, start="first") as consumer:
        await eventually(lambda: len(seen) == 3 and len(away) == 2)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: not process_queue.waiting and process_queue.messages == 1)
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3
