"""Single sends that travel together: each has its own result and error, and order holds."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    Outgoing,
    Producer,
    RequestTimeout,
    SendResult,
)
from rocketlet.client.config import BATCH_BYTES, BATCH_MESSAGES
from rocketlet.client.sending.accumulator import Batch, UniqueKeys
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import RequestCode
from rocketlet.testing import Broker, Fault

from ..client.conftest import only_connection, tasks_named
from ..conftest import PATIENCE_S, Node, Nodes, Wire, create_topic, eventually
from .conftest import Requests, stored


async def test_messages_of_one_turn_travel_together_and_each_knows_its_place(
    node: Node, wire: Wire, requests: Requests
) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        requests.taken()
        results = await asyncio.gather(
            *(producer.send("t", b"%d" % number, tag=f"T{number}", keys=f"k{number}") for number in range(50))
        )
        assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE]
        assert len({result.queue for result in results}) == 1, "those that may go anywhere go together"
        await producer.send("t", b"alone")
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2]
    by_offset_id = {record.offset_id: record for record in await stored(node)}
    assert len(by_offset_id) == 52
    for number, result in enumerate(results):
        record = by_offset_id[result.offset_id]
        assert (record.body, record.queue_id, record.queue_offset) == (
            b"%d" % number,
            result.queue.queue_id,
            result.queue_offset,
        )
        assert (record.tag, record.keys, record.message_id) == (f"T{number}", [f"k{number}"], result.message_id)


async def test_order_by_key_holds_though_some_messages_must_travel_alone(node: Node, wire: Wire) -> None:
    """Large bodies are compressed, and delayed ones wait: neither may be in a batch."""
    await create_topic(wire, "t")
    async with Producer(node.address, compress_over_bytes=1000) as producer:
        await producer.send("t", b"first")
        sends = [
            producer.send("t", b"%d " % number + b"x" * (2000 if number % 7 == 3 else 1), queue_key=f"k{number % 5}")
            for number in range(200)
        ]
        results = await asyncio.gather(*sends)
    for key in range(5):
        mine = [result for number, result in enumerate(results) if number % 5 == key]
        assert len({result.queue for result in mine}) == 1
        offsets = [result.queue_offset for result in mine]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
async def test_the_first_messages_of_a_producer_keep_their_order(
    rocketlet: Broker, batching: bool, is_there: bool
) -> None:
    """None of them overtakes the one that makes the connection."""
    if is_there:
        rocketlet.create_topic("t")
    async with Producer(rocketlet.address, batching=batching) as producer:
        sends = (producer.send("t", b"%d" % number, queue_key="k") for number in range(20))
        results = await asyncio.gather(*sends)
    assert [result.queue_offset for result in results] == list(range(20))
    assert [request.name for request in rocketlet.requests].count("HEART_BEAT") == 1


async def test_a_heartbeat_that_was_refused_is_said_again_by_the_next_send(rocketlet: Broker) -> None:
    rocketlet.create_topic("t")
    rocketlet.faults.add(Fault.answer("HEART_BEAT", response="SYSTEM_ERROR"))
    async with Producer(rocketlet.address, retries=0) as producer:
        sends = (producer.send("t", b"%d" % number) for number in range(3))
        failed = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(error) for error in failed] == [BrokerRefused] * 3
        await producer.send("t", b"x")
    assert [request.name for request in rocketlet.requests].count("HEART_BEAT") == 2


async def test_a_batch_ends_at_its_limits(node: Node, wire: Wire, requests: Requests) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, compress_over_bytes=1 << 20) as producer:
        await producer.send("t", b"first")
        requests.taken()
        await asyncio.gather(*(producer.send("t", b"x") for _ in range(BATCH_MESSAGES + 1)))
        assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2]
        half = os.urandom(BATCH_BYTES // 2)
        results = await asyncio.gather(*(producer.send("t", half) for _ in range(3)))
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2] * 3, "two halves and their properties are too much"
        assert len({result.queue for result in results}) > 1, "a full batch passes the turn on"
        whole = os.urandom(BATCH_BYTES)
        await asyncio.gather(producer.send("t", whole), producer.send("t", b"x"))
    assert len(await stored(node)) == 1 + BATCH_MESSAGES + 1 + 3 + 2


def test_no_id_comes_twice_when_the_counter_starts_over() -> None:
    keys = UniqueKeys()
    keys.stamp(0)
    assert len({keys.next() for _ in range(3 * 65_536 + 5)}) == 3 * 65_536 + 5
    keys.stamp(0)
    taken = [key for count in (1, 255, 256, 257, 65_536, 70_000, 3) for key in (*keys.take(count), keys.next())]
    assert len(set(taken)) == len(taken) == 136_308 + 7
    assert {len(key) for key in taken} == {UniqueKeys.CHARS}


async def test_a_message_that_is_refused_takes_no_other_with_it(nodes: Nodes) -> None:
    """The broker adds its cluster to the properties: with a long name they get too long for it, and only for it."""
    node = await nodes.start(cluster="c" * 115)
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        results = await asyncio.gather(
            *(producer.send("t", b"%d" % number, keys="k" * (32_100 if number == 3 else 1)) for number in range(8)),
            return_exceptions=True,
        )
        with pytest.raises(MessageIllegal, match=r"the properties have 32\d+ bytes; 32155 are allowed"):
            await producer.send("t", b"x", keys="k" * 32_660)
    assert [number for number, result in enumerate(results) if isinstance(result, BrokerRefused)] == [3]
    bodies = [record.body for record in await stored(node)]
    assert sorted(bodies) == sorted([b"first", *(b"%d" % number for number in range(8) if number != 3)])


async def test_a_sender_that_gives_up_takes_no_other_with_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        sends = [asyncio.ensure_future(producer.send("t", b"%d" % number)) for number in range(6)]
        sends[2].cancel()  # before it was taken
        await asyncio.sleep(0)
        sends[4].cancel()  # it may be on its way
        results = await asyncio.gather(*sends, return_exceptions=True)
    assert [number for number, item in enumerate(results) if isinstance(item, asyncio.CancelledError)] == [2, 4]
    bodies = {record.body for record in await stored(node)}
    assert bodies >= {b"first", b"0", b"1", b"3", b"5"}
    assert b"2" not in bodies


async def test_a_message_that_is_refused_alone_in_its_turn_stops_nothing(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        for odd in ({"tag": " "}, {"properties": {"a": "x" * 40_000}}, {"message_id": "\x01"}, {"queue_key": "\udc00"}):
            with pytest.raises(MessageIllegal):
                await producer.send("t", b"odd", **odd)
            await asyncio.sleep(0)  # the turn ends with nothing to send
            await producer.send("t", b"second")
    assert len(await stored(node)) == 5


@pytest.mark.parametrize("odd", [{"properties": {"a": "\ud800"}}, {"tag": "\udfff"}, {"keys": ["a", "\udbff"]}])
async def test_what_utf_8_cannot_hold_is_refused_and_takes_no_other_with_it(
    node: Node, wire: Wire, odd: dict[str, Any]
) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        sends = [producer.send("t", b"1"), producer.send("t", b"2", **odd), producer.send("t", b"3")]
        before, refused, after = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(refused, MessageIllegal)
        assert "half a surrogate pair" in str(refused)
        assert isinstance(before, SendResult)
        assert isinstance(after, SendResult)
        with pytest.raises(MessageIllegal, match="half a surrogate pair"):
            await producer.send_batch("t", [Outgoing(b"x", **odd)])


async def test_who_gives_up_is_not_sent_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    failed = asyncio.Event()
    async with Producer(node.address, timeout_s=PATIENCE_S) as producer:
        await producer.send("t", b"first")
        await producer.send("t", b"second")

        async def look_again(topic: str) -> None:
            failed.set()
            await asyncio.Event().wait()

        async def again(*arguments: object) -> object:
            tried.append(arguments)
            raise AssertionError

        monkeypatch.setattr(producer, "_refresh_route", look_again)
        monkeypatch.setattr(producer, "_send", again)
        sends = [asyncio.ensure_future(producer.send("t", body)) for body in (b"given up", b"waits")]
        await asyncio.sleep(0)
        only_connection(producer).abort()
        await failed.wait()
        sends[0].cancel()
        await asyncio.wait(sends[:1])
        await eventually(lambda: len(tasks_named("resend")) == 1)
    assert not tried
    with pytest.raises(ConfigError, match="has been stopped"):  # a producer that stops reports it to who waits
        await sends[1]


async def test_an_attempt_that_is_cancelled_before_it_begins_fails_for_who_waits(node: Node) -> None:
    async with Producer(node.address) as producer:
        queue = (await producer.send("t", b"first")).queue
        connection = only_connection(producer)
        accumulator = producer._accumulator
        assert accumulator is not None
        batch = Batch(accumulator, connection, queue, 0, connection.running_s() + PATIENCE_S, limit=1)
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        batch.messages.append((future, "", b"x", "", None, None))
        batch.close(producer._keys)
        producer._failed(batch, ConnectionFailed("gone"))
        for task in producer._resending:
            task.cancel()
        with pytest.raises(ConfigError, match="cancelled while it sent"):
            await asyncio.wait_for(future, PATIENCE_S)


async def test_a_lost_broker_fails_each_and_another_takes_them(nodes: Nodes, wire: Wire, node: Node) -> None:
    other = await nodes.start(name="broker-b", name_servers=(node.address,))
    await create_topic(wire, "t")
    async with Producer(node.address, retries=3) as producer:
        await producer.send("t", b"first")
        await other.stop()
        results = await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(20)))
        assert {result.queue.broker_name for result in results} == {"broker-a"}
        await node.stop()
        failed = await asyncio.gather(
            *(producer.send("t", b"late", queue_key=f"k{number}") for number in range(20)), return_exceptions=True
        )
    assert all(isinstance(error, ConnectionFailed | RequestTimeout) for error in failed)
    assert len(failed) == 20


async def test_batching_can_be_switched_off(node: Node, wire: Wire, requests: Requests) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, batching=False) as producer:
        await producer.send("t", b"first")
        requests.taken()
        results: list[SendResult] = await asyncio.gather(*(producer.send("t", b"x") for _ in range(8)))
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2] * 8
        assert len({result.queue for result in results}) == 4


async def test_queues_of_brokers_that_are_met_for_the_first_time_take_their_turn(nodes: Nodes, node: Node) -> None:
    await nodes.start(name="broker-b", name_servers=(node.address,))
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t", queues=4)

        async def is_on_both() -> bool:
            return len((await admin.topic("t")).ranges) == 8

        await eventually(is_on_both)
    for _ in range(8):  # each begins at another queue
        async with Producer(node.address) as producer:
            assert len({(await producer.send("t", b"x")).queue for _ in range(8)}) == 8


@pytest.mark.parametrize(
    "ext",
    [{}, {"msgId": "A", "queueId": 0, "queueOffset": 1}, {"msgId": "A,B", "queueId": "x", "queueOffset": 1}],
    ids=["nothing", "one id for two", "no number"],
)
async def test_an_answer_that_does_not_say_where_fails_each_sender_immediately(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, ext: dict[str, str | int]
) -> None:
    """And nothing is sent again: the messages are stored."""
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        call = Connection.call

        def garbled(connection: Connection, code: int, header: Any, body: bytes, answered: Any, *rest: Any) -> None:
            def answer(found: Any) -> None:
                answered(found._replace(ext=ext) if code == RequestCode.SEND_BATCH_MESSAGE else found)

            call(connection, code, header, body, answer, *rest)

        monkeypatch.setattr(Connection, "call", garbled)
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(producer.send("t", b"a"), producer.send("t", b"b"), return_exceptions=True)
        assert all("stored the messages and does not say where" in str(error) for error in found)
    assert len(await stored(node)) == 3
