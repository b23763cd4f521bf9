"""Consumers without a handler: iteration that survives timeouts, and messages that are settled by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from typing import Any

import pytest
from rocketlet.client import ConfigError, Consumer, Message, Producer, RetryLater
from rocketlet.client.application import stop_signal
from rocketlet.client.consuming.deliveries import Deliveries, HeldRun

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill


async def test_a_wait_that_times_out_does_not_end_the_iteration(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", start="first", batch_size=4, drain_s=0) as consumer:
        for waits in (aiter(consumer), consumer, consumer.batches()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(waits), 0.01)
            async with Producer(node.address) as producer:
                await producer.send("t", b"later")
            found: Any = await asyncio.wait_for(anext(waits), PATIENCE_S)
            message: Message = found if isinstance(found, Message) else found[0]
            assert message.body == b"later"
            if isinstance(found, Message):
                await consumer.ack(message)


async def test_received_messages_are_settled_one_by_one_in_any_order(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 5)
    async with Consumer(node.address, "g", "t", start="first", commit_interval_s=300) as consumer:
        held = [await consumer.receive(timeout_s=PATIENCE_S) for _ in range(5)]
        assert [message.body for message in held] == [b"0", b"1", b"2", b"3", b"4"]
        await consumer.ack(held[1])
        await consumer.commit()
        assert node.broker.offsets.get("g", "t", 0) in (None, 0), "the first is not acknowledged yet"
        await consumer.ack(held[0])
        await consumer.commit()
        assert node.broker.offsets.get("g", "t", 0) == 2
        with pytest.raises(ConfigError, match="a Consumer supports only delay_level"):
            await consumer.retry(held[2], RetryLater(delay=0.5))
        await consumer.retry(held[2], RetryLater(delay_level=1))
        await consumer.reject(held[3])
        again = await consumer.receive(timeout_s=PATIENCE_S)
        assert (again.body, again.reconsume_times) == (b"2", 1)
        await consumer.ack(again)
        with pytest.raises(ConfigError, match="is not in flight"):
            await consumer.ack(again)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0.01)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert node.broker.offsets.get("g", "t", 0) == 4, "the last was not settled"
    async with Consumer(node.address, "g", "t") as consumer:
        assert (await consumer.receive(timeout_s=PATIENCE_S)).body == b"4"


async def test_a_message_that_is_iterated_to_can_be_retried_or_rejected(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 3)
    seen: list[tuple[bytes, int]] = []
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        async for message in consumer:
            seen.append((message.body, message.reconsume_times))
            if message.body == b"0" and not message.reconsume_times:
                await consumer.retry(message)
            elif message.body == b"1":
                await consumer.reject(message)
            elif message.body == b"2":
                await consumer.ack(message)
            if len(seen) == 4:
                break
    assert [body for body, tries in seen if not tries] == [b"0", b"1", b"2"]
    assert [body for body, tries in seen if tries] == [b"0"]  # it comes when it is due
    assert node.broker.offsets.get("g", "t", 0) == 3
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


@pytest.mark.parametrize("batch_size", [1, 2])
async def test_an_iteration_that_another_thread_collects_is_given_back_where_the_consumer_lives(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    threads: list[int] = []
    give_back = Deliveries.give_back

    def counted(deliveries: Deliveries, hand: HeldRun) -> None:
        threads.append(threading.get_ident())
        give_back(deliveries, hand)

    monkeypatch.setattr(Deliveries, "give_back", counted)
    async with Consumer(node.address, "g", "t", start="first", batch_size=batch_size) as consumer:
        garbage: list[object] = [aiter(consumer) if batch_size == 1 else consumer.batches()]
        await anext(garbage[0])  # type: ignore[call-overload]
        await asyncio.to_thread(garbage.clear)
        again = await anext(aiter(consumer)) if batch_size == 1 else (await anext(consumer.batches()))[0]
        assert again.body == b"0", "it comes first again"
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("settle", ["retry", "reject"])
async def test_a_message_that_is_settled_twice_in_a_row_takes_no_other_with_it(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    """The loop continues while a task still hands its message back to the broker."""
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    handed_back, go_on = asyncio.Event(), asyncio.Event()

    async def send_back(*_: object) -> None:
        handed_back.set()
        await go_on.wait()

    async with Consumer(node.address, "g", "t", start="first", batch_size=3) as consumer:
        loop = aiter(consumer)
        first = await anext(loop)
        assert consumer._deliveries is not None
        monkeypatch.setattr(consumer._deliveries, "_send_back", send_back)
        settling = asyncio.create_task(getattr(consumer, settle)(first))
        await handed_back.wait()
        second = await anext(loop)
        go_on.set()
        await settling
        assert consumer.is_in_hand(second)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        assert process_queue.commit_offset == second.queue_offset


async def test_a_message_that_waits_for_another_try_in_order_holds_no_hand_over_up(node: Node, wire: Wire) -> None:
    """Nobody works on it."""
    await create_topic(wire, "t", 1)
    await fill(node, 2)
    async with Consumer(
        node.address, "g", "t", start="first", orderly=True, suspend_queue_s=300, drain_s=3600
    ) as leaves:
        await leaves.retry(await leaves.receive(timeout_s=PATIENCE_S))
        with pytest.raises(TimeoutError):
            await leaves.receive(timeout_s=0.0)
        async with asyncio.timeout(PATIENCE_S):
            await leaves.stop()
    async with Consumer(node.address, "g", "t", start="first", orderly=True) as takes:
        assert (await takes.receive(timeout_s=PATIENCE_S)).body == b"0"


async def test_in_order_a_retry_holds_its_queue(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 4)
    seen: list[bytes] = []
    in_order: dict[str, Any] = {"orderly": True, "suspend_queue_s": 0.01, "max_reconsume_times": 2}
    async with Consumer(node.address, "g", "t", start="first", **in_order) as consumer:
        async for message in consumer:
            seen.append(message.body)
            if message.body == b"1":
                await consumer.retry(message)
            if message.body == b"3":
                break
    assert seen == [b"0", b"1", b"1", b"1", b"2", b"3"]
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


async def test_in_order_one_message_of_a_queue_is_in_flight(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 2)
    async with Consumer(node.address, "g", "t", start="first", orderly=True) as consumer:
        first = await consumer.receive(timeout_s=PATIENCE_S)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0.05)
        await consumer.ack(first)
        assert (await consumer.receive(timeout_s=PATIENCE_S)).body == b"1"


async def test_what_is_in_flight_of_other_tasks_is_waited_for_when_the_consumer_stops(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 5)
    release, handled = asyncio.Event(), Counter[bytes]()
    taken: list[Message] = []
    async with Consumer(node.address, "g", "t", start="first") as consumer:

        async def work() -> None:
            async for message in consumer:
                taken.append(message)
                await release.wait()
                handled[message.body] += 1

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        await eventually(lambda: len(taken) == 2)
        asyncio.get_running_loop().call_later(0.05, release.set)
    await asyncio.gather(*tasks)
    assert handled == {b"0": 1, b"1": 1}
    assert node.broker.offsets.get("g", "t", 0) == 2


async def test_a_consumer_with_a_handler_hands_nothing_out(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        with pytest.raises(ConfigError, match="has a handler"):
            await consumer.receive()
    async with Consumer(node.address, "g", "t", batch_size=5) as consumer:
        with pytest.raises(ConfigError, match=r"iterate over batches\(\)"):
            await consumer.receive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_service_gracefully(node: Node, wire: Wire, number: signal.Signals) -> None:
    await create_topic(wire, "t", 1)
    program = f"""
import asyncio
from rocketlet.client import Consumer, Producer
from rocketlet.client.consuming.deliveries import Deliveries, HeldRun
from rocketlet.client.application import stop_signal

async def handle(message):
    print("begun", flush=True)
    await asyncio.sleep(0.5)
    print("handled", flush=True)

async def main():
    stopped = asyncio.create_task(stop_signal())
    await asyncio.sleep(0)  # it waits for signals before a handler begins
    async with Consumer("{node.address}", "g", "t", handle, start="first"):
        number = await stopped
    print("stopped by", number.name, flush=True)

asyncio.run(main())
"""
    await fill(node, 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    out, err = await process.communicate()
    assert out.decode() == f"handled\nstopped by {number.name}\n", err.decode()
    assert (
        b"Traceback" not in err
    )  # a warning may be there: on a busy machine leases are renewed while they are given back
    assert node.broker.offsets.get("g", "t", 0) == 1


async def test_a_signal_is_waited_for_once() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    assert await stop_signal() == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_consumer_that_gives_out_no_messages_says_why(node: Node) -> None:
    with pytest.raises(ConfigError, match="has not been started"):
        await anext(Consumer(node.address, "g", "t"))
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        with pytest.raises(ConfigError, match="has a handler, which gets its messages"):
            await consumer.receive()
