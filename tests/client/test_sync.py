"""The facade for code without an event loop, from threads of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from rocketlet.client import ConfigError, Message
from rocketlet.sync import Consumer, Producer

from ..conftest import PATIENCE_S, Node, Wire, create_topic


async def in_thread(work: Any) -> Any:
    """As a script does it: the broker of the test goes on in the loop here."""
    return await asyncio.to_thread(work)


async def test_a_script_sends_and_receives(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)

    def script() -> list[bytes]:
        with Producer(node.address) as producer:
            results = [producer.send("t", b"%d" % number, keys="k") for number in range(5)]
            producer.send_batch("t", [b"5", b"6"])
            assert [result.queue_offset for result in results] == [0, 1, 2, 3, 4]
        seen = []
        with Consumer(node.address, "g", "t", start="first") as consumer:
            for message in consumer.messages(timeout_s=PATIENCE_S):
                seen.append(message.body)
                if message.body == b"2":
                    consumer.reject(message)
                if message.body == b"4":
                    break
            assert consumer.lag() == 3
            assert next(iter(consumer)).body == b"4", "again, because the loop was left"
        with Consumer(node.address, "g", "t") as consumer:
            last = [consumer.receive(timeout_s=PATIENCE_S) for _ in range(3)]
            for message in last:
                consumer.ack(message)
            with pytest.raises(TimeoutError):
                consumer.receive(timeout_s=0.01)
            assert list(consumer.messages(timeout_s=0.01)) == []
        return seen + [message.body for message in last]

    assert await in_thread(script) == [b"0", b"1", b"2", b"3", b"4", b"4", b"5", b"6"]
    assert node.broker.offsets.get("g", "t", 0) == 7
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


async def test_a_handler_is_a_plain_function(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)

    def script() -> set[bytes]:
        seen: set[bytes] = set()
        enough = threading.Event()

        def handle(message: Message) -> None:
            seen.add(message.body)
            if len(seen) == 10:
                enough.set()

        with Consumer(node.address, "g", "t", handle) as consumer, Producer(node.address) as producer:
            for number in range(10):
                producer.send("t", b"%d" % number)
            assert enough.wait(PATIENCE_S)
            assert len(consumer.assigned()) >= 2
        return seen

    assert await in_thread(script) == {b"%d" % number for number in range(10)}


async def test_what_was_received_and_not_settled_does_not_hold_the_end_up(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)

    def script() -> bytes:
        with Producer(node.address) as producer:
            producer.send("t", b"x")
        for _ in range(2):
            with Consumer(node.address, "g", "t", start="first", drain_s=3600) as consumer:
                message = consumer.receive(timeout_s=PATIENCE_S)
        return message.body

    assert await in_thread(script) == b"x"


async def test_transactions_requests_and_errors(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)

    def script() -> None:
        with Producer(node.address, "p", check=lambda message: None) as producer:
            with producer.transaction("t", b"yes"):
                pass
            with pytest.raises(ZeroDivisionError), producer.transaction("t", b"no"):
                raise ZeroDivisionError

            def handle(message: Message) -> None:
                if message.body == b"ping":
                    producer.reply(message, b"pong")

            with Consumer(node.address, "g", "t", handle, start="first"):
                assert producer.request("t", b"ping", timeout_s=PATIENCE_S).body == b"pong"
        with pytest.raises(ConfigError, match="host:port"):
            Producer("nowhere")

    await in_thread(script)
    assert node.broker.store.queue("t", 0).next == 2


async def test_in_a_coroutine_it_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"rocketlet\.Producer"):
        Producer("127.0.0.1:1")


async def test_batches_are_acknowledged_when_the_next_is_asked_for_and_come_again_after_a_break(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", 1)

    def script() -> list[list[bytes]]:
        with Producer(node.address) as producer:
            producer.send_batch("t", [b"%d" % number for number in range(5)])
        seen = []
        with Consumer(node.address, "g", "t", start="first", batch_size=2) as consumer:
            with pytest.raises(ConfigError, match=r"iterate over batches\(\)"):
                consumer.receive()
            for batch in consumer.batches(timeout_s=PATIENCE_S):
                seen.append([message.body for message in batch])
                if len(seen) == 2:
                    break
            again = consumer.batches(timeout_s=PATIENCE_S)
            seen += [[message.body for message in next(again)] for _ in range(2)]
            with Producer(node.address) as producer:
                producer.send("t", b"5")
            next(again)
            assert consumer.lag() == 1, "the last one is in hand"
        return seen

    assert await in_thread(script) == [[b"0", b"1"], [b"2", b"3"], [b"2", b"3"], [b"4"]]
