"""Brokers that answer what none should: tasks and planners fail by an error of ours, and take no memory for it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from rocketlet.client import AnswerUnreadable
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.group_bodies import TopicExtent, encode_extents
from rocketlet.protocol.headers import BrokerTimes, write
from rocketlet.protocol.message import MessageError, decode_record, encode_host, encode_record
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from collections.abc import Sequence

import pytest
from rocketlet.client import AdminClient, Outgoing, Producer
from rocketlet.spark import columns
from rocketlet.spark.batch import RocketletReader, to_partitions, to_read
from rocketlet.spark.checkpoint import EMPTY, TopicSnapshot
from rocketlet.spark.extents import BrokerOffsets, Extent, Extents
from rocketlet.spark.options import batch_options, stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.reading import QueueRange, Task
from rocketlet.spark.worker import DataLossError
from rocketlet.testing import Broker, Fault

from .tasks import QUEUE, batches_of, queue_range

HOST = encode_host("127.0.0.1", 1)
MOVED = {"nextBeginOffset": "5", "minOffset": "0", "maxOffset": "5", "suggestWhichBrokerId": "0"}


@asynccontextmanager
async def answering(*answers: Frame) -> AsyncIterator[str]:
    """The address of something that gives these answers, one after the other, and the last one again and again."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65_536):
            for frame in frames.feed(data):
                answer = left.pop(0) if len(left) > 1 else left[0]
                writer.write(encode(answer._replace(opaque=frame.opaque, flag=1)))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


def records(bodies: Iterable[bytes], first: int = 0) -> bytes:
    flags = SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
    return b"".join(
        encode_record(0, 0, first + number, 0, flags, 0, HOST, 0, HOST, 0, 0, zlib.compress(body), b"\x01t", b"")
        for number, body in enumerate(bodies)
    )


def span_of(address: str) -> QueueRange:
    return replace(queue_range(address, 5, TopicSnapshot()), columns=("queueOffset", "body"))


@pytest.mark.parametrize(
    ("ext", "error"),
    [
        ({}, AnswerUnreadable),
        (MOVED | {"nextBeginOffset": "many"}, AnswerUnreadable),
        (MOVED | {"nextBeginOffset": str(2**63)}, AnswerUnreadable),
        (MOVED | {"nextBeginOffset": "0"}, DataLossError),
        (MOVED | {"nextBeginOffset": str(-(2**63))}, DataLossError),
    ],
)
@pytest.mark.parametrize("code", [0, 20, 21])
async def test_a_pull_whose_answer_leads_nowhere_ends_the_task(
    ext: dict[str, Any], error: type[Exception], code: int
) -> None:
    async with answering(Frame(code, ext=ext)) as address:
        with pytest.raises(error):
            await batches_of([Task((span_of(address),))])


async def test_bodies_that_are_much_larger_than_they_are_stored_come_in_several_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "PLAIN_BYTES", 2500)
    answer = Frame(0, ext=MOVED, body=records([bytes(1000)] * 5))
    async with answering(answer) as address:
        assert await batches_of([Task((span_of(address),))]) == [[0, 1], [2, 3], [4]]


async def test_large_bodies_that_do_not_come_in_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "PLAIN_BYTES", 1500)
    bodies = [bytes(1000)]
    answer = Frame(0, ext=MOVED, body=records(bodies, 4) + records(bodies, 0) + records(bodies, 0))
    async with answering(answer) as address:
        with pytest.raises(MessageError, match="has more than"):
            await batches_of([Task((span_of(address),))])


NAMES = ("properties", "tags", "body", "messageId")
NOT_UTF_8 = b"k\x01\xd6\xd0\x02TAGS\x01T"


@pytest.mark.parametrize("flags", [0, SYS_COMPRESSED | SYS_COMPRESSION_ZLIB])
async def test_properties_that_are_not_utf_8_are_read_with_replaced_characters(flags: int) -> None:
    body = zlib.compress(b"x") if flags else b"x"
    record = encode_record(0, 0, 0, 0, flags, 0, HOST, 0, HOST, 0, 0, body, b"\x01t", NOT_UTF_8)
    rows = columns.rows_of(record, Queue("t", "b", 0), 0, 9, NAMES).batch(NAMES)
    (found,) = rows.to_pylist()
    assert dict(found.pop("properties")) == {"k": "\ufffd\ufffd", "TAGS": "T"}
    assert found == {"tags": "T", "body": b"x", "messageId": decode_record(record, 0, "replace").offset_id}


async def test_unreadable_record_ends_the_task_or_is_left_out_when_losses_are_accepted() -> None:
    first, middle, last = (records([b"x"], number) for number in range(3))
    size_at = middle.rindex(b"\x01t") + 2
    middle = middle[:size_at] + b"\x7f\xff" + middle[size_at + 2 :]  # properties larger than the record has room for
    answer = Frame(0, ext=MOVED, body=first + middle + last)
    async with answering(answer) as address:
        with pytest.raises(DataLossError, match=r"offsets \[1\] cannot be read"):
            await batches_of([Task((span_of(address),))])
        assert await batches_of([Task((replace(span_of(address), fail_on_data_loss=False),))]) == [[0, 2]]


async def seen_in(extents: bytes) -> BrokerOffsets:
    async with answering(Frame(0, ext=write(BrokerTimes(1, 1)), body=extents)) as address:
        cluster = ClusterView(address)
        cluster._masters["b"] = address
        try:
            return await Extents(cluster, "g").of([Queue("t", "b", 0), Queue("t", "b", 9)])
        finally:
            await cluster.close()


async def test_of_what_a_broker_returns_only_what_was_requested_is_kept() -> None:
    many = TopicExtent("id", 0, (1,) * 9, (2,) * 9)
    seen = await seen_in(encode_extents({"t": many, "u": many}))
    assert seen.extents == {Queue("t", "b", 0): Extent(1, 2)}
    assert seen.absent == {Queue("t", "b", 9)}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"t": 1}', b'{"t": ["id", 0, [1], []]}', b'{"t": ["id", 0, ["x"], [1]]}']
)
async def test_extents_that_cannot_be_read_are_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(AnswerUnreadable):
        await seen_in(body)


# A task's pulls, against a broker in the same process: no Spark session.


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
            planner = Planner(options, EMPTY)
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
