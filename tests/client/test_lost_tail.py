"""A broker loses the end of a queue, as in a power cut, while a member that keeps its lease has read it. The offsets of what
was lost are given to other messages, which the member must get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject
from rocketlet.client.consuming.queues import ProcessQueue
from rocketlet.client.message import Lease
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(default_queues=1) as broker:
        yield broker


def reader(broker: Broker, handler: Callable[[Message], Any], *, concurrency: int = 20) -> Consumer:
    return Consumer(broker.address, "g", "t", handler, start="first", concurrency=concurrency)


def queue_of(consumer: Consumer) -> ProcessQueue | None:
    return next((queue for key, queue in consumer.queues.items() if key.topic == "t"), None)


async def holds(broker: Broker, consumer: Consumer, messages: int, end: int) -> None:
    """Until the member holds this many messages and will read on from `end`."""
    await broker.until(
        lambda: (queue := queue_of(consumer)) is not None and (queue.messages, queue.next_offset) == (messages, end)
    )


async def back(broker: Broker, consumer: Consumer) -> None:
    """Until the member has its queue again, as before."""
    await broker.until(lambda: (queue := queue_of(consumer)) is not None and not queue.is_suspended)


@asynccontextmanager
async def paused_behind_three(broker: Broker) -> AsyncIterator[tuple[Producer, Consumer, list[bytes]]]:
    """A member that has handled three messages and is paused."""
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: len(seen) == 3)
        await consumer.pause()
        yield producer, consumer, seen


@pytest.mark.parametrize("lost", [1, 3])
async def test_what_takes_the_offset_of_a_lost_message_is_delivered(
    broker: Broker, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with paused_behind_three(broker) as (producer, consumer, seen):
        await broker.akill(lose=lost)
        after = [b"new %d" % number for number in range(lost + 1)]
        for body in after:
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.resume()
        await broker.until(lambda: len(seen) == 3 + lost + 1)
        assert seen[3:] == after
        assert "queue_lost" not in caplog.text, "it has kept its lease: the case is the one of this test"
        assert "offset_moved" in caplog.text
        await consumer.commit()
        assert (await consumer.lag(), len(broker.messages("t"))) == (0, 4)


@pytest.mark.parametrize("lost_again", [0, 1, 2])
async def test_the_broker_restarts_again_before_the_member_has_pulled(
    broker: Broker, lost_again: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with paused_behind_three(broker) as (producer, consumer, seen):
        await broker.akill(lose=1)
        for body in (b"new", b"newer"):
            await producer.send("t", body)
        await back(broker, consumer)
        await broker.akill(lose=lost_again)
        await producer.send("t", b"last")
        await back(broker, consumer)
        await consumer.resume()
        expected = [*[b"new", b"newer"][: 2 - lost_again], b"last"]
        await broker.until(lambda: len(seen) == 3 + len(expected))
        assert seen[3:] == expected
        assert "queue_lost" not in caplog.text, "it has kept its lease: the case is the one of this test"


async def test_a_restart_after_the_member_has_pulled_sets_nothing_back(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: len(seen) == 1)
        await broker.akill()
        await producer.send("t", b"2")
        await broker.until(lambda: len(seen) == 2)
        await consumer.pause()
        await broker.akill()
        await producer.send("t", b"3")
        await back(broker, consumer)
        await consumer.resume()
        await broker.until(lambda: len(seen) == 3)
        await consumer.commit()
        assert await consumer.lag() == 0
        assert "set_back" not in caplog.text and "offset_moved" not in caplog.text


@pytest.mark.parametrize("by", ["the member", "an administrator"])
async def test_a_place_that_is_sought_after_the_loss_counts(broker: Broker, by: str) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
        AdminClient(broker.address) as admin,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: seen == [b"1"])
        await consumer.pause()
        await broker.akill()
        for body in (b"skipped", b"skipped, too"):
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.commit()
        if by == "the member":
            await consumer.seek("last")
        else:
            await admin.reset("g", "t", to="last")
            await broker.until(lambda: (queue := queue_of(consumer)) is not None and queue.next_offset == 3)
        await consumer.commit()
        assert (await consumer.positions())[Queue("t", "broker-a", 0)].committed == 3
        await consumer.resume()
        await producer.send("t", b"2")
        await broker.until(lambda: seen[-1] == b"2")
        assert seen == [b"1", b"2"]


async def test_a_lost_message_that_is_given_up_does_not_take_the_one_in_its_place_along(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Message] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> Reject | None:
        seen.append(message)
        if message.body != b"lost":
            return None
        await may_end.wait()
        return Reject()

    async with Producer(broker.address) as producer, reader(broker, handle) as consumer:
        for body in (b"kept", b"lost"):
            await producer.send("t", body)
        await broker.until(lambda: len(seen) == 2)
        await consumer.pause()
        await broker.akill(lose=1)
        await producer.send("t", b"next")
        await back(broker, consumer)
        may_end.set()
        await broker.until(lambda: "send_back_failed" in caplog.text or bool(broker.messages("%DLQ%g")))
        await consumer.resume()
        await broker.until(lambda: [message.body for message in seen[:3]] == [b"kept", b"lost", b"next"])
    assert seen[1].record.physical_offset == seen[2].record.physical_offset, "the case is the one of this test"
    assert broker.messages("%DLQ%g") == []


async def test_what_was_read_before_the_loss_and_is_still_there_is_handled(broker: Broker) -> None:
    begun: list[bytes] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message.body)
        await may_end.wait()

    async with Producer(broker.address) as producer, reader(broker, handle, concurrency=1) as consumer:
        for body in (b"1", b"2", b"lost", b"lost, too"):
            await producer.send("t", body)
        await broker.until(lambda: begun == [b"1"])
        await holds(broker, consumer, 4, 4)
        await consumer.pause()
        await broker.akill(lose=2)
        for body in (b"3", b"4", b"5"):
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.resume()
        await holds(broker, consumer, 5, 5)
        may_end.set()
        await broker.until(lambda: len(begun) == 5)
        assert begun == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_member_that_is_ahead_does_not_take_its_group_along(broker: Broker) -> None:
    seen: list[bytes] = []
    async with Producer(broker.address) as producer:
        async with reader(broker, lambda message: None) as consumer:
            for body in (b"1", b"2", b"3"):
                await producer.send("t", body)
            await holds(broker, consumer, 0, 3)
            await consumer.pause()
            await broker.akill(lose=1)
            await producer.send("t", b"new")
            await back(broker, consumer)
            await consumer.commit()
            assert (await consumer.positions())[Queue("t", "broker-a", 0)].committed == 2
        async with reader(broker, lambda message: seen.append(message.body)):
            await broker.until(lambda: seen == [b"new"])


async def test_a_member_that_was_not_ahead_continues_where_it_was(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: seen == [b"1"])
        await producer.send("other", b"lost")
        await broker.akill(lose=1)
        for body in (b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: seen == [b"1", b"2", b"3"])
        await consumer.commit()
        assert await consumer.lag() == 0
        assert "offset_moved" not in caplog.text


def test_a_run_of_which_only_the_end_was_lost_is_handled_up_to_there() -> None:
    queue = Queue("t", "b", 0)
    process_queue = ProcessQueue(queue, 0, Lease(1))
    messages = [_Stored(offset) for offset in range(6)]
    first, second, third = process_queue.add(messages, 6, 2)  # type: ignore[arg-type]
    process_queue.acknowledge(second, 1)
    process_queue.move(3)
    assert (process_queue.messages, process_queue.size_bytes) == (2, 20)
    assert (process_queue.next_offset, process_queue.commit_offset) == (3, 0)
    assert (second.is_done, third.is_done, len(third.messages)) == (True, True, 2)
    process_queue.acknowledge(third)
    process_queue.acknowledge(first)
    assert (process_queue.messages, process_queue.size_bytes, process_queue.commit_offset) == (0, 0, 3)
    process_queue.move(9)
    assert process_queue.commit_offset == 9, "retention: nothing is cached that could be lost"


class _Stored:
    """As much of a message as a queue reads."""

    size_bytes = 10

    def __init__(self, queue_offset: int) -> None:
        self.queue_offset = queue_offset
