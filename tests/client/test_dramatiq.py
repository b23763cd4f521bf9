"""The dramatiq broker, with a worker of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from rocketlet.client import AdminClient
from rocketlet.protocol.names import Queue
from rocketlet.sync import Producer
from rocketlet.testing import Broker, Fault

from ..conftest import PATIENCE_S, Node, eventually

dramatiq = pytest.importorskip("dramatiq", reason="needs dramatiq")
pytest.importorskip("rocketlet.dramatiq", reason="needs an installation that knows it: make dev")
from rocketlet.dramatiq import RocketletBroker


@asynccontextmanager
async def working(broker: Any) -> AsyncIterator[None]:
    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=50)
    await asyncio.to_thread(worker.start)
    try:
        yield
    finally:
        await asyncio.to_thread(worker.stop)


async def test_dramatiq_messages_run_are_retried_and_become_dead_letters(node: Node) -> None:
    broker = RocketletBroker(node.address, prefix="x.", invisible_s=5)
    notes: list[object] = []

    @dramatiq.actor(broker=broker)
    def add(one: int, two: int) -> None:
        notes.append(one + two)

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=10, max_backoff=10)
    def charge(card: str) -> None:
        notes.append(card)
        raise ValueError(f"no such card: {card}")

    def send() -> None:
        add.send(1, 2)
        broker.delays.longest = timedelta(seconds=0.3)
        add.send_with_options(args=(10, 20), delay=2000)  # beyond the limit
        charge.send("4711")

    await asyncio.to_thread(send)
    async with working(broker):
        await eventually(lambda: {3, 30} <= set(notes) and notes.count("4711") == 2)
        await eventually(lambda: node.broker.store.queue("%DLQ%x-default", 0).next == 1)
        await asyncio.to_thread(broker.join, "default", timeout=int(1000 * PATIENCE_S))
        async with AdminClient(node.address) as admin:
            queue = Queue("%DLQ%x-default", node.config.name, 0)
            (dead,) = [message async for part in admin.read(queue, 0, 1) for message in part]
        assert dead.failure.startswith("ValueError: no such card: 4711; test_dramatiq.py:")
        assert notes.count(3) == notes.count(30) == 1
    assert node.broker.pops.pools.unfinished("x-default") == 0
    stored = [queue.next for (name, _), queue in node.broker.store.queues.items() if name == "x-default"]
    assert sum(stored) > 4, "what is due late was sent again"
    await asyncio.to_thread(add.send, 5, 5)
    with pytest.raises(dramatiq.errors.QueueJoinTimeout):
        await asyncio.to_thread(broker.join, "default", timeout=1)
    await asyncio.to_thread(broker.flush_all)
    await asyncio.to_thread(broker.join, "default", timeout=int(1000 * PATIENCE_S))
    assert 10 not in notes
    with pytest.raises(dramatiq.QueueNotFound):
        broker.consume("other")
    await asyncio.to_thread(broker.close)


async def test_dramatiq_worker_at_its_prefetch_limit_leaves_messages_to_others(node: Node) -> None:
    def script() -> None:
        broker = RocketletBroker(node.address)
        broker.declare_queue("jobs")
        first = broker.consume("jobs", prefetch=1, timeout=int(1000 * PATIENCE_S))
        for number in range(3):
            broker.enqueue(dramatiq.Message("jobs", "work", (number,), {}, {}))
        held = next(first)
        assert held is not None
        assert next(first) is None, "the limit"
        first.requeue([held])
        first.close()
        second = broker.consume("jobs", prefetch=3, timeout=int(1000 * PATIENCE_S))
        seen = [message for _ in range(3) if (message := next(second)) is not None]
        assert sorted(message.args for message in seen) == [(0,), (1,), (2,)]
        for message in seen:
            second.ack(message)
        second.close()
        broker.close()

    await asyncio.to_thread(script)
    assert node.broker.pops.pools.unfinished("jobs") == 0


@pytest.mark.parametrize("is_failed", [True, False], ids=["retry", "pipeline"])
def test_dramatiq_message_is_redelivered_when_its_successor_cannot_be_sent(is_failed: bool) -> None:
    with Broker() as rocketmq:
        broker = RocketletBroker(rocketmq.address)

        @dramatiq.actor(broker=broker, queue_name="jobs")
        def work(number: int) -> None: ...

        dramatiq.pipeline([work.message(1), work.message(2)], broker=broker).run()
        consumer: Any = broker.consume("jobs", timeout=int(1000 * PATIENCE_S))
        held = next(consumer)
        rocketmq.faults.add(Fault.answer("SEND_MESSAGE_V2", response="MESSAGE_ILLEGAL"))
        outcome = {"exception": ValueError("no")} if is_failed else {"result": None}
        broker.emit_after("process_message", held, **outcome)  # as a worker does
        assert len(rocketmq.faults.injected) == 1
        consumer.ack(held)
        asyncio.run(eventually(lambda: bool(rocketmq.requests_of("CHANGE_MESSAGE_INVISIBLETIME"))))
        rocketmq.clock.advance(60)
        again = next(consumer)
        assert again.message_id == held.message_id
        broker.emit_after("process_message", again, **outcome)
        consumer.ack(again)
        if not is_failed:
            following = next(consumer)
            assert following.args == (2, None)
            consumer.ack(following)
        consumer.close()
        broker.close()


def test_dramatiq_consumer_rejects_messages_that_dramatiq_has_not_sent() -> None:
    with Broker() as rocketmq, Producer(rocketmq.address) as producer:
        broker = RocketletBroker(rocketmq.address)
        broker.declare_queue("jobs")
        consumer: Any = broker.consume("jobs", timeout=int(1000 * PATIENCE_S))
        bodies = [
            b"\xff",
            b"[]",
            b"{}",
            dramatiq.Message("other", "work", (), {}, {}).encode(),
            dramatiq.Message("jobs", ["work"], (), {}, {}).encode(),
            dramatiq.Message("jobs", "work", (), {}, ["eta"]).encode(),
            dramatiq.Message("jobs", "work", (), {}, {"eta": "today"}).encode(),
            dramatiq.Message("jobs", "work", (), {}, {"eta": 1e300}).encode(),
        ]
        for body in bodies:
            producer.send("jobs", body)
            assert next(consumer) is None
        broker.enqueue(dramatiq.Message("jobs", "work", (1,), {}, {}))
        held = next(consumer)
        assert held.args == (1,)
        consumer.ack(held)
        asyncio.run(eventually(lambda: len(rocketmq.messages("%DLQ%jobs")) == len(bodies)))
        consumer.close()
        broker.close()
        dead = rocketmq.messages("%DLQ%jobs")
        assert sorted(message.body for message in dead) == sorted(bodies)
        assert all(message.failure.startswith("not a message of this dramatiq queue: ") for message in dead)
