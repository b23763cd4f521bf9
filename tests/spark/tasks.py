"""Tasks of the source, read without Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rocketlet.client import Access
from rocketlet.protocol.names import Queue, parse_subscription
from rocketlet.spark.checkpoint import TopicSnapshot
from rocketlet.spark.reading import QueueRange, read_task


def queue_range(
    address: str, end: int, mark: TopicSnapshot, *, fail: bool = True, batch_rows: int = 1000
) -> QueueRange:
    everything = parse_subscription("t", "*", version=1)
    access = Access(encoding="json")  # as with Apache's brokers
    return QueueRange(QUEUE, 0, end, address, access, "g", everything, fail, batch_rows, 5.0, ("queueOffset",), mark)


async def batches_of(tasks: Sequence[object]) -> list[list[int]]:
    def read() -> list[list[int]]:
        return [batch.column("queueOffset").to_pylist() for task in tasks for batch in read_task(task)]  # type: ignore[arg-type]

    return await asyncio.to_thread(read)


QUEUE = Queue("t", "broker-a", 0)
