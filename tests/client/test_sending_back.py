"""A hand-over and what a handler sends back: the offset says how far everything is handled, so what was handled behind a
message that nobody took back would be redelivered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    ConnectionFailed,
    Consumer,
    Message,
    Reject,
    RequestTimeout,
    RetryLater,
    RocketletError,
)
from rocketlet.client.config import ClientLimits
from rocketlet.client.consuming.handling import shown
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import fill


def refuse_first(monkeypatch: pytest.MonkeyPatch, away: list[RocketletError]) -> None:
    """Each hand-back fails with one of these, the last one first; then it arrives."""
    send_back = Consumer._send_back

    async def sent_back(self: Consumer, message: Message, delay_level: int, reason: str) -> None:
        if away:
            raise away.pop()
        await send_back(self, message, delay_level, reason)

    monkeypatch.setattr(Consumer, "_send_back", sent_back)


@pytest.mark.parametrize("outcome", [RetryLater(delay_level=1), Reject()])
async def test_a_hand_over_waits_for_what_is_sent_back_while_its_broker_is_away(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The offset says how far everything is handled: what was handled behind it would be redelivered."""
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
    async with Consumer(
        node.address, "g", "t", handle, start="first", limits=ClientLimits(reconnect_s=0.001)
    ) as consumer:
        await eventually(lambda: len(seen) == 3)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: process_queue.running == 1)
        leaving = asyncio.create_task(consumer.stop())
        await eventually(lambda: process_queue.is_stopped)
        may_end.set()
        await leaving
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3


@pytest.mark.parametrize("outcome", [RetryLater(delay_level=1), Reject()])
async def test_a_hand_over_sends_back_what_its_broker_had_not_taken(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The handler would be called again after a pause, in which the queue is given up."""
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    seen: list[bytes] = []
    away: list[RocketletError] = [ConnectionFailed("away"), ConnectionFailed("away"), RequestTimeout("away")]

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append(message.body)
        return outcome if message.body == b"0" else None

    refuse_first(monkeypatch, away)
    async with Consumer(
        node.address, "g", "t", handle, start="first", limits=ClientLimits(reconnect_s=0.001, send_back_retry_s=3600.0)
    ) as consumer:
        await eventually(lambda: len(seen) == 3 and len(away) == 2)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: not process_queue.waiting and process_queue.messages == 1)
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_the_reason_travels_with_the_retry_and_the_dead_letter(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 3, keys="k")
    seen: list[tuple[bytes, str]] = []

    async def handle(message: Message) -> Reject | None:
        seen.append((message.body, message.failure))
        if message.body == b"0":
            return Reject("no such customer")
        if message.body == b"1":
            raise ValueError("http://bob:pw@shop/ said\n401")
        raise Unsayable

    async with Consumer(node.address, "g", "t", handle, start="first", max_reconsume_times=1):
        await eventually(lambda: node.broker.store.queue("SCHEDULE_TOPIC_XXXX", 2).next == 2)
        node.clock.advance(11)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 3)
    said = "ValueError: http://***@shop/ said 401"
    assert sorted(seen)[1:] == [(b"1", ""), (b"1", said), (b"2", ""), (b"2", "Unsayable")]
    async with AdminClient(node.address) as admin:
        dead = [message async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 3) for message in part]
    assert {message.body: message.failure for message in dead} == {
        b"0": "no such customer",
        b"1": f"tried 2 times; {said}",
        b"2": "tried 2 times; Unsayable",
    }
    assert all(message.user_properties == {} for message in dead), "what is sent again has no reason of before"


async def test_in_order_the_last_reason_stays_with_the_dead_letter(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 1)
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(1)
        raise KeyError(len(tries))

    options: dict[str, Any] = {"orderly": True, "max_reconsume_times": 1, "suspend_queue_s": 0.001}
    async with Consumer(node.address, "g", "t", handle, start="first", **options):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    async with AdminClient(node.address) as admin:
        (found,) = [part async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 1)]
    assert found[0].failure == "KeyError: 2"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("password=hunter2 for bob", "password=*** for bob"),
        ('{"api_key": "a b", "id": 4}', '{"api_key": ***, "id": 4}'),
        ("Authorization: Bearer abc.def, retry", "Authorization: ***, retry"),
        ("postgresql://u:p@h/db refused\n\tat line 3", "postgresql://***@h/db refused at line 3"),
        ("x" * 400, "x" * 297 + "..."),
        ("a\x01b\x02c", "a b c"),
    ],
)
def test_what_is_kept_of_a_reason_is_short_and_holds_no_secret(text: str, kept: str) -> None:
    assert shown(text) == kept
