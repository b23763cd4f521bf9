"""A task's pulls, against a broker in the same process: no Spark session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rocketlet.client import AdminClient, Outgoing, Producer
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker, Fault

from .tasks import QUEUE, batches_of, queue_range

pytest.importorskip("pyspark")
from rocketlet.spark.batch import RocketletReader, to_partitions, to_read
from rocketlet.spark.checkpoint import EMPTY, TopicSnapshot
from rocketlet.spark.options import batch_options, stream_options
from rocketlet.spark.reading import Task
from rocketlet.spark.share import Extents
from rocketlet.spark.source import make_planner
from rocketlet.spark.worker import DataLossError


async def fill(address: str, count: int, body: bytes = b"x") -> None:
    async with Producer(address, default_queues=1) as producer:
        await producer.send_batch("t", [Outgoing(body)] * count, queue=QUEUE)


async def remake(address: str, count: int) -> None:
    async with AdminClient(address) as admin:
        await admin.delete_topic("t")
        await admin.create_topic("t", queues=1)
    await fill(address, count)


@pytest.mark.parametrize("fail", [True, False])
@pytest.mark.parametrize("membership", [True, False])
async def test_a_topic_that_is_recreated_between_planning_and_reading_is_not_read(membership: bool, fail: bool) -> None:
    async with Broker(default_queues=1) as broker:
        await fill(broker.address, 10)
        given = {"nameServer": broker.address, "topic": "t", "group": "g", "membership": str(membership).lower()}
        options = stream_options({**given, "failOnDataLoss": str(fail).lower()})

        def planned() -> Sequence[object]:
            planner = make_planner(options, EMPTY)
            try:
                planner.finish(EMPTY)
                batch = None
                while batch is None:
                    batch = planner.plan()
                ranges = planner.readable(batch)
                return to_partitions(
                    planner.addresses(to_read(ranges)),
                    options.read,
                    ranges,
                    batch.marks,
                    batch.messages,
                    ("queueOffset",),
                )
            finally:
                planner.close()

        tasks = await asyncio.to_thread(planned)
        assert await batches_of(tasks) == [list(range(10))]
        await remake(broker.address, 10)
        if fail:
            with pytest.raises(DataLossError, match="the offsets 0 to 10 are gone: the topic was recreated"):
                await batches_of(tasks)
        else:
            assert await batches_of(tasks) == []


@pytest.mark.parametrize("queues", [0, 1], ids=["deleted", "with fewer queues"])
async def test_a_topic_that_is_gone_between_planning_and_reading_is_named(queues: int) -> None:
    async with Broker(default_queues=2) as broker:
        queue = Queue("t", "broker-a", 1)
        async with Producer(broker.address, default_queues=2) as producer:
            await producer.send_batch("t", [Outgoing(b"x")] * 10, queue=queue)
        span = replace(queue_range(broker.address, 10, TopicSnapshot()), queue=queue)
        assert await batches_of([Task((span,))]) == [list(range(10))]
        async with AdminClient(broker.address) as admin:
            await admin.delete_topic("t")
            if queues:
                await admin.create_topic("t", queues=queues)
        with pytest.raises(
            DataLossError, match="the offsets 0 to 10 are gone: the topic, or the queue, is no longer there"
        ):
            await batches_of([Task((span,))])
        assert await batches_of([Task((replace(span, fail_on_data_loss=False),))]) == []


async def test_a_batch_read_does_not_read_another_topic() -> None:
    async with Broker(default_queues=1) as broker:
        await fill(broker.address, 10)
        reader = RocketletReader(batch_options({"nameServer": broker.address, "topic": "t"}), ("queueOffset",))
        tasks = await asyncio.to_thread(reader.partitions)
        await remake(broker.address, 20)
        with pytest.raises(DataLossError, match="the topic was recreated"):
            await batches_of(tasks)


async def test_on_apaches_broker_what_was_stored_after_the_planning_is_of_another_topic() -> None:
    async with Broker(default_queues=1) as broker:
        await fill(broker.address, 10)
        stored_ms = int(broker.messages("t")[0].store_ms)
        same = queue_range(broker.address, 10, TopicSnapshot(newest_ms=stored_ms))
        assert await batches_of([Task((same,))]) == [list(range(10))]
        anew = queue_range(broker.address, 10, TopicSnapshot(newest_ms=stored_ms - 1))
        with pytest.raises(DataLossError, match="stored after the batch was planned: the topic was recreated"):
            await batches_of([Task((anew,))])
        assert await batches_of([Task((replace(anew, fail_on_data_loss=False),))]) == []
        cluster = ClusterView(broker.address)
        await cluster.find_route("t")
        there = await Extents(cluster, "").fingerprint(QUEUE, 9)
        await cluster.close()
        assert there is not None
        set_back = replace(anew, message=(QUEUE, there))
        assert await batches_of([Task((set_back,))]) == [list(range(10))], "a clock was set back"
        with pytest.raises(DataLossError, match="the topic was recreated"):
            await batches_of([Task((replace(anew, message=(QUEUE, there._replace(text="another"))),))])


async def test_a_reset_that_apaches_broker_reports_to_a_task_does_not_change_its_batch() -> None:
    async with Broker(default_queues=1) as broker:
        await fill(broker.address, 10)
        broker.faults.add(Fault.answer("PULL_MESSAGE", response="PULL_OFFSET_MOVED", times=1))
        assert await batches_of([Task((queue_range(broker.address, 10, TopicSnapshot()),))]) == [list(range(10))]


async def test_arrow_batches_have_as_many_rows_as_are_asked_for() -> None:
    async with Broker(default_queues=1) as broker:
        for _ in range(3):
            await fill(broker.address, 1000, b"x" * 1000)
        span = queue_range(broker.address, 2900, TopicSnapshot(), batch_rows=1300)
        assert [len(batch) for batch in await batches_of([Task((span,))])] == [899, 899, 899, 203]
        few = queue_range(broker.address, 2900, TopicSnapshot(), batch_rows=300)
        assert [len(batch) for batch in await batches_of([Task((few,))])] == [300] * 9 + [200]
