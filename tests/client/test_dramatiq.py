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
