"""Spark's planners see brokers, ours and Apache's: topics recreated, starts, resets. Without Spark."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import Outgoing, Producer
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, ResetOffset, TopicName, write
from rocketlet.protocol.names import Queue

from ..conftest import eventually

pytest.importorskip("pyspark")
import pyarrow as pa
from rocketlet.spark.batch import to_partitions, to_read
from rocketlet.spark.checkpoint import EMPTY, MicroBatch
from rocketlet.spark.options import stream_options, write_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.reading import read_task
from rocketlet.spark.sink import send_all
from rocketlet.spark.worker import DataLossError

from bench.peers import Apache

from .systems import CALM, HEAP, Ours, System, feature

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
BOTH = pytest.mark.parametrize("membership", ["true", "false"], ids=["member", "standalone"])


@contextmanager
def opened(address: str, topic: str, group: str, resumed: MicroBatch = EMPTY, **given: str) -> Iterator[Planner]:
    """A planner as a query has it that continues from a checkpoint."""
    options = stream_options({"nameServer": address, "topic": topic, "group": group, **given})
    planner = Planner(options, resumed)
    try:
        planner.finish(resumed)
        yield planner
    finally:
        planner.close()


def rows_of(batch: MicroBatch | None) -> int:
    return sum(end - begin for begin, end in batch.ranges.values()) if batch else 0


def read(planner: Planner, rows: int) -> MicroBatch:
    """Finishes batches until this many rows were planned: an Apache broker shows messages a little later. The last batch."""
    planned = 0
    while planned < rows:
        batch = planner.plan()
        if batch is not None:
            planner.finish(batch)
            planned += rows_of(batch)
    assert planned == rows
    assert batch is not None
    return batch


async def fill(address: str, topic: str, count: int) -> None:
    async with Producer(address, retries=5) as producer:
        for begin in range(0, count, 50):
            await producer.send_batch(topic, [Outgoing(b"%d" % number) for number in range(begin, begin + 50)])


async def ask(system: System, code: int, header: Any) -> None:
    cluster = ClusterView(system.address)
    connection = await cluster.connection(system._system.broker_address)
    await connection.request(code, write(header))
    await cluster.close()


async def remake(system: System, topic: str) -> None:
    """Deletes a topic and creates it again."""
    await ask(system, RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(topic))
    await ask(system, RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopic(topic, 4, 4, 6))


@feature("Spark's source: a topic that was recreated is named, however far it has grown")
@BOTH
async def test_a_topic_that_was_recreated_is_recognised(system: System, membership: str) -> None:
    topic, group = await system.topic(), await system.group()
    await fill(system.address, topic, 400)

    def first() -> MicroBatch:
        with opened(system.address, topic, group, membership=membership) as planner:
            return read(planner, 400)

    batch = await asyncio.to_thread(first)
    await remake(system, topic)
    await fill(system.address, topic, 1200)

    def refused() -> None:
        with opened(system.address, topic, group, batch, membership=membership) as planner:
            while True:
                planner.plan()

    with pytest.raises(DataLossError, match=rf"{topic}@apache:\d: the query wants offset \d+, .*recreated"):
        await asyncio.to_thread(refused)

    def goes_on() -> None:
        given = {"membership": membership, "failOnDataLoss": "false"}
        with opened(system.address, topic, group, batch, **given) as planner:
            read(planner, 1200)

    await asyncio.to_thread(goes_on)


@contextmanager
def another_cluster(system: System, folder: Path) -> Iterator[System]:
    """A cluster whose broker has the same name."""
    running = system._system
    found = System(Apache(folder, running.version, HEAP, **CALM) if isinstance(running, Apache) else Ours(folder))
    try:
        yield found
    finally:
        found.stop()


@feature("Spark's source: a cluster whose broker has the same name and older messages is named")
async def test_another_cluster_is_recognised_by_its_messages(system: System, tmp_path: Path) -> None:
    topic = await system.topic()
    queries = {membership: await system.group() for membership in ("true", "false")}

    def run() -> None:
        with another_cluster(system, tmp_path) as other:
            other.run(ask(other, RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopic(topic, 4, 4, 6)))
            other.run(fill(other.address, topic, 1200))
            system.run(fill(system.address, topic, 400))
            for membership, group in queries.items():
                with opened(system.address, topic, group, membership=membership) as planner:
                    batch = read(planner, 400)
                with (
                    opened(other.address, topic, group, batch, membership=membership) as planner,
                    pytest.raises(DataLossError, match="this is another cluster"),
                ):
                    read(planner, 1)

    await asyncio.to_thread(run)


@feature("Spark's source: the start of a new group is kept before a message came")
async def test_the_latest_of_an_empty_topic_is_kept(system: System) -> None:
    topic, group = await system.topic(), await system.group()

    def latest(rows: int) -> None:
        with opened(system.address, topic, group, startingOffsets="latest") as planner:
            if rows:
                assert read(planner, rows)
            else:
                assert sum(end - begin for begin, end in planned(planner).ranges.values()) == 0, (
                    "the start, without a row"
                )

    await asyncio.to_thread(latest, 0)
    await fill(system.address, topic, 100)
    await asyncio.to_thread(latest, 100)


@feature("Spark's source: an administrator's reset of a running query")
async def test_a_reset_of_a_running_query_is_served(system: System) -> None:
    if getattr(system._system, "version", "").startswith("5."):
        pytest.skip("a 5.x broker reports a reset to whoever pulls next for the group, not to its members")
    topic, group = await system.topic(), await system.group()
    await fill(system.address, topic, 400)

    def run() -> None:
        with opened(system.address, topic, group) as planner:
            read(planner, 400)
            system.run(ask(system, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffset(topic, group, 0, True)))
            read(planner, 400)

    await asyncio.to_thread(run)
    assert sum(await system.committed(group, topic)) == 400


def planned(planner: Planner) -> MicroBatch:
    """The next batch, which is not finished. It may have few rows: an Apache broker shows messages a little later."""
    while (batch := planner.plan()) is None:
        pass
    return batch


def offsets_of(planner: Planner, address: str, topic: str, group: str, batch: MicroBatch, between: Any) -> Counter[int]:
    """The rows that the tasks of a batch read. between: called after they were made."""
    options = stream_options({"nameServer": address, "topic": topic, "group": group})
    ranges = planner.readable(batch)
    tasks = to_partitions(
        planner.addresses(to_read(ranges)), options.read, ranges, batch.marks, batch.messages, ("queueId",)
    )
    between()
    found: Counter[int] = Counter()
    for task in tasks:
        for rows in read_task(task):
            found.update(rows.column("queueId").to_pylist())
    return found


@feature("Spark's source: a reset while a batch is read does not change what it reads")
async def test_a_reset_while_a_batch_is_read_does_not_change_it(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    await fill(system.address, topic, 400)

    def run() -> None:
        with opened(system.address, topic, group) as planner:
            read(planner, 400)  # an Apache broker resets only queues that the group has committed
            system.run(fill(system.address, topic, 400))
            batch = planned(planner)
            reset = ask(system, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffset(topic, group, 0, True))
            found = offsets_of(planner, system.address, topic, group, batch, lambda: system.run(reset))
            assert found == {queue.queue_id: end - begin for queue, (begin, end) in batch.ranges.items() if end > begin}

    await asyncio.to_thread(run)


@feature("Spark's source: a topic that is recreated between planning and reading is not read")
async def test_a_topic_that_is_recreated_while_a_batch_is_read_is_named(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    await fill(system.address, topic, 400)

    def anew() -> None:
        system.run(remake(system, topic))
        system.run(fill(system.address, topic, 400))

    def run() -> None:
        with opened(system.address, topic, group) as planner:
            batch = planned(planner)
            with pytest.raises(DataLossError, match=r"recreated|gone from the broker"):
                offsets_of(planner, system.address, topic, group, batch, anew)

    await asyncio.to_thread(run)


@feature("Spark's source and sink: a broker that restarts is waited for")
async def test_a_broker_that_restarts_is_waited_for(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    await fill(system.address, topic, 400)
    patient = {"nameServer": system.address, "topic": topic, "deliveryTimeoutMs": "600000"}

    def run() -> None:
        with opened(system.address, topic, group, pollTimeoutMs="600000") as planner:
            read(planner, 400)
            seen = 0

            def look() -> None:
                nonlocal seen
                batch = planner.plan()
                if batch is not None:
                    planner.finish(batch)
                    seen += rows_of(batch)

            def rows() -> Iterator[pa.RecordBatch]:
                """Some before, while and after the broker is away. Meanwhile the planner asks it, too."""
                restart = asyncio.run_coroutine_threadsafe(system.restart_broker(), system._loop)
                while not restart.done():
                    yield pa.record_batch({"body": ["x"] * 50})
                    look()
                restart.result()
                yield pa.record_batch({"body": ["x"] * 50})

            sent = send_all(write_options(patient), rows())
            while seen < sent.messages:
                look()

    await asyncio.to_thread(run)


@contextmanager
def another_broker(system: System, folder: Path) -> Iterator[System]:
    """One more broker of the system's cluster, `retiring`; at the end it stops in order."""
    running = system._system
    if isinstance(running, Apache):
        found = System(Apache(folder, running.version, HEAP, name_server=system.address, brokerName="retiring", **CALM))
    else:
        found = System(Ours(folder, "retiring", system.address))
    try:
        yield found
    finally:
        found.stop()


async def fill_queues(address: str, *queues: Queue) -> None:
    """50 messages to each."""
    async with Producer(address, retries=5) as producer:
        for queue in queues:
            await producer.send_batch(queue.topic, [b"%d" % number for number in range(50)], queue=queue)


async def route_has(address: str, topic: str, brokers: set[str]) -> None:
    """Return when the name server reports that these brokers have the topic."""
    cluster = ClusterView(address)

    async def has_brokers() -> bool:
        route = await cluster.find_route(topic)
        return route is not None and {data.broker_name for data in route.queues} == brokers

    await eventually(has_brokers)
    await cluster.close()


def addresses(planner: Planner, batch: MicroBatch) -> set[str]:
    """The names of the brokers that a batch's tasks would read from: those with messages in it."""
    found = planner.addresses(queue for queue, (begin, end) in planner.readable(batch).items() if begin < end)
    return {queue.broker_name for queue in found}


@feature("Spark's source: a broker that was retired leaves the checkpoint usable")
async def test_a_retired_broker_leaves_the_checkpoint_usable(system: System, tmp_path: Path) -> None:
    topic, group = await system.topic(), await system.group()
    stays, goes = Queue(topic, "apache", 0), Queue(topic, "retiring", 0)

    def run() -> None:
        with another_broker(system, tmp_path) as other:
            other.run(ask(other, RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopic(topic, 4, 4, 6)))
            system.run(route_has(system.address, topic, {"apache", "retiring"}))
            system.run(fill_queues(system.address, stays, goes))
            with opened(system.address, topic, group, membership="false") as planner:
                done = read(planner, 100)
                system.run(fill_queues(system.address, goes))
                unfinished = planned(planner)
                assert addresses(planner, unfinished) == {"retiring"}
        system.run(route_has(system.address, topic, {"apache"}))
        system.run(fill_queues(system.address, stays))
        with opened(system.address, topic, group, done, membership="false") as planner:
            batch = read(planner, 50)
            assert addresses(planner, batch) <= {"apache"}
            assert batch.ranges[goes] == (50, 50), "its place is kept"
        given = {"membership": "false", "pollTimeoutMs": "1"}
        with (
            opened(system.address, topic, group, done, **given) as planner,
            pytest.raises(DataLossError, match="no name server has a route to retiring"),
        ):
            addresses(planner, unfinished)
        with opened(system.address, topic, group, done, failOnDataLoss="false", **given) as planner:
            assert addresses(planner, unfinished) == set(), "what was lost is logged"

    await asyncio.to_thread(run)
