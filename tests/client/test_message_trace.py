"""The message trace: what is written to its topic, and what goes wrong beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from rocketlet import AdminClient, Consumer, Message, MessageTrace, Outgoing, Producer, Reject
from rocketlet.client.config import ClientLimits
from rocketlet.protocol import admin_bodies as trace
from rocketlet.protocol.admin_bodies import TOPIC, Kind

from ..conftest import Node, Nodes, eventually


async def records(node: Node) -> list[list[str]]:
    """All of the trace topic, each as its fields."""
    found: list[list[str]] = []
    async with AdminClient(node.address) as admin:
        for queue, extent in (await admin.topic(TOPIC)).ranges.items():
            async for messages in admin.read(queue, extent.begin, extent.end):
                for message in messages:
                    found += [text.split("\x01") for text in message.body.decode().split("\x02") if text]
    return found


async def test_a_message_is_followed_from_its_send_to_its_handler(node: Node) -> None:
    """Fields as TraceDataEncoder of Apache's client 4.9.7 prints them."""
    seen: list[Message] = []
    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address, "shop", middleware=[trace.sends("shop")]) as producer,
        Consumer(node.address, "g", "t", seen.append, start="first", middleware=[trace.handlers("g")]),
    ):
        sent = await producer.send("t", b"12345", tag="A", keys=["k1", "k2"])
        await eventually(lambda: len(seen) == 1)
    by_kind = {record[0]: record for record in await records(node)}
    region, message_id = "DefaultRegion", sent.message_id
    time_ms, took_ms = by_kind["Pub"][1], by_kind["Pub"][10]
    assert by_kind["Pub"] == [
        "Pub", time_ms, region, "shop", "t", message_id, "A", "k1 k2", node.address, "5", took_ms, "0", sent.offset_id,
        "true",
    ]  # fmt: skip
    handling = by_kind["SubBefore"][4]
    assert by_kind["SubBefore"][2:] == [region, "g", handling, message_id, "0", "k1 k2"]
    assert by_kind["SubAfter"][1:3] == [handling, message_id]
    assert by_kind["SubAfter"][4:7] == ["true", "k1 k2", "0"]
    assert by_kind["SubAfter"][8] == "g"
    async with AdminClient(node.address) as admin:
        for key in ("k1", "k2", message_id):
            assert await admin.messages_with_key(TOPIC, key), key


async def test_what_is_being_written_when_the_trace_is_closed_is_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_closing = asyncio.Event(), asyncio.Event()
    traced = MessageTrace(node.address)

    send = Producer.send

    async def send_later(producer: Producer, topic: str, *arguments: Any, **options: Any) -> Any:
        if topic != "t":  # a trace
            begun.set()
            await is_closing.wait()
        return await send(producer, topic, *arguments, **options)

    monkeypatch.setattr(Producer, "send", send_later)
    async with Producer(node.address, middleware=[traced.sends("shop")]) as producer, traced:
        await producer.send("t", b"x")
        await begun.wait()
        asyncio.get_running_loop().call_soon(is_closing.set)
    assert [record[0] for record in await records(node)] == ["Pub"]


def test_javas_split_finds_all_fields_of_a_message_without_keys_or_tag() -> None:
    """It drops empty fields at the end, and Apache's decoder asks for them by number."""
    about, outcome = trace.About("id"), trace.ConsumeReturnType.SUCCESS
    for record, fields in (
        (trace.before_handling(about, time_ms=1, group="g", handling_id="h", retries=0), 8),
        (trace.after_handling(about, time_ms=1, group="g", handling_id="h", took_ms=2, outcome=outcome), 9),
        (trace.sent(about, time_ms=1, group="g", topic="t", tag="", store_host="h", size=0, took_ms=0, kind=Kind.NORMAL,
                    offset_id=""), 14),
        (trace.transaction_ended(about, time_ms=1, group="g", topic="t", tag="", store_host="h", commits=None,
                                 is_check=False), 13),
    ):  # fmt: skip
        assert len(record.removesuffix("\x02").rstrip("\x01").split("\x01")) == fields


async def raise_error(message: Any) -> None:
    raise ValueError("no")


async def reject(message: Any) -> Reject:
    return Reject()


@pytest.mark.parametrize(("handler", "code"), [(raise_error, "2"), (reject, "4")])
async def test_handlers_that_fail_are_noted_so(node: Node, handler: Callable[[Any], Any], code: str) -> None:
    tried = asyncio.Event()

    async def handle(message: Message) -> Any:
        tried.set()
        return await handler(message)

    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first", middleware=[trace.handlers("g")]),
    ):
        await producer.send("t", b"x")
        await tried.wait()
    (after,) = [record for record in await records(node) if record[0] == "SubAfter"]
    assert (after[4], after[6]) == ("false", code)


async def test_batches_have_a_record_for_each_message(node: Node) -> None:
    batches: list[list[Message]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append(messages)

    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address, middleware=[trace.sends("rocketlet")]) as producer,
    ):
        sent = await producer.send_batch("t", [Outgoing(b"%d" % number, keys=f"k{number}") for number in range(50)])
        async with Consumer(
            node.address, "g", "t", handle, batch_size=50, start="first", middleware=[trace.handlers("g")]
        ):
            await eventually(lambda: sum(map(len, batches)) == 50)
    found = await records(node)
    ids = sent.message_id.split(",")
    assert [record[5] for record in found if record[0] == "Pub"] == ids
    assert [record[12] for record in found if record[0] == "Pub"] == sent.offset_id.split(",")
    assert {record[4] for record in found if record[0] == "SubBefore"} == {
        record[1] for record in found if record[0] == "SubAfter"
    }
    assert sorted(record[2] for record in found if record[0] == "SubAfter") == sorted(ids)


async def test_a_transaction_has_its_half_message_and_its_outcome(node: Node) -> None:
    """Fields as TraceDataEncoder of Apache's client 4.9.7 writes them."""
    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address, "shop", check=bool, middleware=[trace.sends("shop")]) as producer,
    ):
        async with producer.transaction("t", b"paid", tag="A", keys=["k1", "k2"]) as paid:
            pass
        with pytest.raises(ValueError, match="no money"):
            async with producer.transaction("t", b"unpaid") as unpaid:
                raise ValueError("no money")
    found = await records(node)
    halves = {record[5]: record for record in found if record[0] == "Pub"}
    assert {message_id: (record[6], record[7], record[11]) for message_id, record in halves.items()} == {
        paid.message_id: ("A", "k1 k2", "1"),
        unpaid.message_id: ("", "", "1"),
    }
    about = ["DefaultRegion", "shop", "t"]
    assert [record[2:] for record in found if record[0] == "EndTransaction"] == [
        [*about, paid.message_id, "A", "k1 k2", node.address, "2", paid.message_id, "COMMIT_MESSAGE", "false"],
        [*about, unpaid.message_id, "", "", node.address, "2", unpaid.message_id, "ROLLBACK_MESSAGE", "false"],
    ]


async def test_an_outcome_that_the_broker_asked_for_says_so(nodes: Nodes) -> None:
    node = await nodes.start(transaction_sweep_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    answers = iter([None])

    async with (
        MessageTrace(node.address) as trace,
        Producer(
            node.address, "shop", check=lambda message: next(answers, True), middleware=[trace.sends("shop")]
        ) as producer,
        producer.transaction("t", b"maybe", tag="A", keys="k1") as half,
    ):
        await eventually(lambda: node.broker.transactions.waiting == 0)  # asked before the block ends
    asked = [record for record in await records(node) if record[0] == "EndTransaction" and record[12] == "true"]
    assert [record[11] for record in asked[:2]] == ["UNKNOW", "COMMIT_MESSAGE"]
    assert {tuple(record[4:8]) for record in asked} == {("t", half.message_id, "A", "k1")}


async def test_a_oneway_send_is_noted_without_a_place(node: Node) -> None:
    seen: list[Message] = []
    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address, "shop", middleware=[trace.sends("shop")]) as producer,
        Consumer(node.address, "g", "t", seen.append, start="first"),
    ):
        await producer.send_oneway("t", b"12345", tag="A", keys="k1")
        await eventually(lambda: len(seen) == 1)
    (record,) = [record for record in await records(node) if record[0] == "Pub"]
    place = (f"{node.broker.config.name}:0", "5")
    assert record[2:10] == ["DefaultRegion", "shop", "t", seen[0].message_id, "A", "k1", *place]
    assert record[11:] == ["0", "", "true"]


async def test_what_a_consumer_without_a_handler_hands_out_is_noted_with_its_end(node: Node) -> None:
    ends = {"acked": "0", "retried": "4", "rejected": "4", "iterated": "0", "given back": "4"}
    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", start="first", middleware=[trace.handlers("g")]) as consumer,
    ):
        settle = {"acked": consumer.ack, "retried": consumer.retry, "rejected": consumer.reject}
        for body in ends:
            await producer.send("t", body.encode(), keys=body.replace(" ", "-"), queue_key="one")
        for body, end in settle.items():
            message = await consumer.receive()
            assert message.body == body.encode()
            await end(message)
        async for message in consumer:
            if message.body == b"given back":
                break
    found = await records(node)
    begun = {record[4]: record[7] for record in found if record[0] == "SubBefore"}
    after = [(begun[record[1]].replace("-", " "), record[6]) for record in found if record[0] == "SubAfter"]
    assert after == list(ends.items())


async def test_batches_that_are_handed_out_are_noted(node: Node) -> None:
    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", start="first", batch_size=2, middleware=[trace.handlers("g")]) as consumer,
    ):
        await producer.send_batch("t", [b"1", b"2", b"3"])
        sizes: list[int] = []
        async for messages in consumer.batches():
            sizes.append(len(messages))
            if sum(sizes) == 3:
                break
    found = await records(node)
    begun = [record[4] for record in found if record[0] == "SubBefore"]
    assert len(set(begun[:2])) == 1
    after = [(record[1], record[6]) for record in found if record[0] == "SubAfter"]
    assert after == [(begun[0], "0"), (begun[0], "0"), (begun[2], "4")]
    assert sizes == [2, 1]


async def test_a_message_of_the_trace_stays_below_the_limits(node: Node) -> None:
    async with (
        MessageTrace(node.address, limits=ClientLimits(trace_bytes=600, trace_keys_bytes=100)) as trace,
        Producer(node.address, middleware=[trace.sends("p")]) as producer,
    ):
        await producer.send_batch("t", [Outgoing(b"x", keys=f"k{number}") for number in range(20)])
        await producer.send("t", b"x", keys="k" * 200)
    async with AdminClient(node.address) as admin:
        extents = (await admin.topic(TOPIC)).ranges
        messages = [
            message
            for queue, extent in extents.items()
            async for found in admin.read(queue, extent.begin, extent.end)
            for message in found
        ]
    assert sum(message.body.count(b"\x02") for message in messages) == 21
    alone = [message for message in messages if message.body.count(b"\x02") == 1]
    assert any("k" * 200 in message.keys for message in alone)
    for message in messages:
        if "k" * 200 not in message.keys:
            assert len(message.body) <= 600
            assert len(" ".join(message.keys)) < 100


async def test_what_cannot_be_written_is_counted_and_hurts_nobody(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    limits = ClientLimits(trace_waiting=5)
    async with (
        MessageTrace(node.address, limits=limits) as trace,
        Producer(node.address, middleware=[trace.sends("p")]) as producer,
    ):
        await producer.send_batch("t", [b"x"] * 8)
    assert "trace_dropped records=3" in caplog.text
    async with AdminClient(node.address) as admin:
        await admin.create_topic("readable", perm=4)
    async with (
        MessageTrace(node.address, topic="readable") as trace,
        Producer(node.address, middleware=[trace.sends("p")]) as producer,
    ):
        assert (await producer.send("t", b"x")).status == "ok"
    assert "trace_not_written" in caplog.text


async def test_without_middleware_there_is_no_trace(node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"x")
    async with AdminClient(node.address) as admin:
        assert (await admin.topic(TOPIC)).messages == 0
