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
from rocketlet.protocol.message import MessageError, decode_record, encode_host, encode_record
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from rocketlet.spark import columns
from rocketlet.spark.checkpoint import TopicSnapshot
from rocketlet.spark.reading import QueueRange, Task
from rocketlet.spark.share import BrokerOffsets, Extent, Extents
from rocketlet.spark.worker import DataLossError

from .tasks import batches_of, queue_range

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


NOT_UTF_8 = b"k\x01\xd6\xd0\x02TAGS\x01T"


@pytest.mark.parametrize("flags", [0, SYS_COMPRESSED | SYS_COMPRESSION_ZLIB])
async def test_properties_that_are_not_utf_8_are_read_with_replaced_characters(flags: int) -> None:
    body = zlib.compress(b"x") if flags else b"x"
    record = encode_record(0, 0, 0, 0, flags, 0, HOST, 0, HOST, 0, 0, body, b"\x01t", NOT_UTF_8)
    rows = columns.Rows(record, Queue("t", "b", 0), 0, 9).batch(("properties", "tags", "body", "messageId"))
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


async def seen_in(answer: Frame) -> BrokerOffsets:
    async with answering(answer) as address:
        cluster = ClusterView(address)
        cluster._masters["b"] = address
        try:
            return await Extents(cluster, "g").of([Queue("t", "b", 0), Queue("t", "b", 9)])
        finally:
            await cluster.close()


async def test_of_what_a_broker_returns_only_what_was_requested_is_kept() -> None:
    many = TopicExtent("id", 0, (1,) * 9, (2,) * 9)
    seen = await seen_in(Frame(0, body=encode_extents({"t": many, "u": many})))
    assert seen.extents == {Queue("t", "b", 0): Extent(1, 2)}
    assert seen.absent == {Queue("t", "b", 9)}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"t": 1}', b'{"t": ["id", 0, [1], []]}', b'{"t": ["id", 0, ["x"], [1]]}']
)
async def test_extents_that_cannot_be_read_are_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(AnswerUnreadable):
        await seen_in(Frame(0, body=body))
