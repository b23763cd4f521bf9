"""Single sends that travel together: each has its own result and error, and order holds."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from rocketlet.client import (
    Access,
    AdminClient,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    Message,
    MessageIllegal,
    Outgoing,
    Producer,
    RequestTimeout,
    SendResult,
)
from rocketlet.client.access import Encoding
from rocketlet.client.accumulator import Batch, Overlap
from rocketlet.client.config import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    MAX_OVERLAP_PAUSE,
    OVERLAP_BATCHES,
    OVERLAP_MESSAGES,
)
from rocketlet.client.connection import Connection
from rocketlet.client.message import UniqueKeys
from rocketlet.protocol.codes import RequestCode

from ..conftest import PATIENCE_S, Node, Nodes, Wire, create_topic, eventually


class Requests:
    """The sends of a producer, by request code. Heartbeats and routes come when they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        call = Connection.call

        def counted(connection: Connection, code: int, *rest: object) -> None:
            if code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
                self.codes.append(code)
            call(connection, code, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Connection, "call", counted)

    def taken(self) -> list[int]:
        codes, self.codes = self.codes, []
        return codes


async def stored(node: Node, topic: str = "t") -> list[Message]:
    async with AdminClient(node.address) as admin:
        ranges = (await admin.topic(topic)).ranges
        return [
            message
            for queue, span in ranges.items()
            async for part in admin.read(queue, span.begin, span.end)
            for message in part
        ]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


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


async def test_a_full_batch_leaves_before_the_turn_ends(node: Node, wire: Wire, requests: Requests) -> None:
    """So that the broker has something to do while the next one is made."""
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        requests.taken()
        seen: list[list[int]] = []

        async def send(number: int) -> SendResult:
            seen.append(list(requests.codes))
            return await producer.send("t", b"%d" % number)

        results = await asyncio.gather(*(send(number) for number in range(BATCH_MESSAGES + 2)))
    assert seen[BATCH_MESSAGES] == []
    assert seen[BATCH_MESSAGES + 1] == [RequestCode.SEND_BATCH_MESSAGE]
    assert len({result.message_id for result in results}) == len(results)


async def test_after_a_complete_answer_the_first_half_leaves_before_the_turn_ends(
    node: Node, wire: Wire, requests: Requests
) -> None:
    """So that client and broker work at once instead of waiting for each other."""
    await create_topic(wire, "t")
    batch = RequestCode.SEND_BATCH_MESSAGE
    seen: list[list[int]] = []

    async def send(number: int) -> SendResult:
        seen.append(list(requests.codes))
        return await producer.send("t", b"%d" % number, queue_key="same")

    async with Producer(node.address) as producer:
        await producer.send("t", b"first")

        async def taken(count: int) -> list[int]:
            seen.clear()
            requests.taken()
            results = await asyncio.gather(*map(send, range(count)))
            offsets = [result.queue_offset for result in results]
            assert offsets == list(range(offsets[0], offsets[0] + count)), "order holds"
            return requests.taken()

        assert await taken(OVERLAP_MESSAGES) == [batch], "nothing was answered before"
        assert await taken(OVERLAP_MESSAGES) == [batch, batch]
        half = OVERLAP_MESSAGES // 2
        assert seen[half] == []
        assert seen[half + 1] == [batch]
        for _ in range(OVERLAP_BATCHES):
            assert await taken(OVERLAP_MESSAGES) == [batch], "nothing was gained: both answers were waited for"
        assert await taken(OVERLAP_MESSAGES - 1) == [batch, batch], "it is tried again"


@pytest.mark.parametrize(("encoding", "count"), [("auto", OVERLAP_MESSAGES - 1), ("json", OVERLAP_MESSAGES)])
async def test_few_messages_and_those_for_apaches_brokers_go_in_one_piece(
    node: Node, wire: Wire, requests: Requests, encoding: Encoding, count: int
) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, access=Access(encoding=encoding)) as producer:
        await producer.send("t", b"first")
        requests.taken()
        for _ in range(3):
            await asyncio.gather(*(producer.send("t", b"x") for _ in range(count)))
            assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE]


def test_halves_that_come_back_together_are_tried_ever_more_seldom() -> None:
    overlap, sent, pauses = Overlap(), 0, []
    assert overlap.limit(20, sent) == 10
    for _ in range(10):
        together = sent = sent + 2
        while overlap.limit(20, sent) == BATCH_MESSAGES:
            sent += 1
        pauses.append(sent - together)
    assert pauses == [min(OVERLAP_BATCHES << number, MAX_OVERLAP_PAUSE) for number in range(10)]


def test_halves_that_stay_apart_are_halved_again_at_once() -> None:
    overlap = Overlap()
    assert overlap.limit(20, 0) == 10
    assert overlap.limit(20, 2) == BATCH_MESSAGES
    assert overlap.limit(20, 2 + OVERLAP_BATCHES) == 10
    assert overlap.limit(20, 2 + OVERLAP_BATCHES * 2) == 10
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 2) == BATCH_MESSAGES
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 3) == 10, "it waits no longer than at first"


def test_no_id_comes_twice_when_the_counter_begins_anew() -> None:
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
            *(producer.send("t", b"%d" % number, keys="k" * (32_600 if number == 3 else 1)) for number in range(8)),
            return_exceptions=True,
        )
        with pytest.raises(MessageIllegal, match=r"the properties have 32\d+ bytes; 32667 are allowed"):
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

        monkeypatch.setattr(producer, "_look_again", look_again)
        monkeypatch.setattr(producer, "_send", again)
        sends = [asyncio.ensure_future(producer.send("t", body)) for body in (b"given up", b"waits")]
        await asyncio.sleep(0)
        (connection,) = producer._brokers()
        connection.abort()
        await failed.wait()
        sends[0].cancel()
        await asyncio.wait(sends[:1])
        await eventually(lambda: len(producer._resending) == 1)
    assert not tried
    with pytest.raises(ConfigError, match="has been stopped"):  # a producer that stops tells who waits for it
        await sends[1]


async def test_a_try_that_is_cancelled_before_it_begins_tells_who_waits(node: Node) -> None:
    async with Producer(node.address) as producer:
        queue = (await producer.send("t", b"first")).queue
        (connection,) = producer._brokers()
        batch = Batch(connection, queue, 0, limit=1)
        future = batch.new_future()
        batch.messages.append((future, "", b"x", "", None, None))
        batch.close(producer._keys)
        producer._answered(batch, ConnectionFailed("gone"))
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
        async with asyncio.timeout(PATIENCE_S):
            while len((await admin.topic("t")).ranges) != 8:
                await asyncio.sleep(0.01)
    for _ in range(8):  # each begins at another queue
        async with Producer(node.address) as producer:
            assert len({(await producer.send("t", b"x")).queue for _ in range(8)}) == 8


@pytest.mark.parametrize(
    "ext",
    [{}, {"msgId": "A", "queueId": 0, "queueOffset": 1}, {"msgId": "A,B", "queueId": "x", "queueOffset": 1}],
    ids=["nothing", "one id for two", "no number"],
)
async def test_an_answer_that_does_not_say_where_fails_each_sender_at_once(
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


def only_connection(producer: Producer) -> Connection:
    (connection,) = producer._greeted.values()
    return connection


async def test_messages_that_wait_for_a_slow_broker_travel_in_batches_too_in_order(
    node: Node, wire: Wire, requests: Requests
) -> None:
    """Each turn's on its own. When all senders woke at once, most did so in vain, and then went alone."""
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        connection = only_connection(producer)
        connection.pause_writing()
        requests.taken()
        sends = []
        for turn in range(5):
            sends += [asyncio.create_task(producer.send("t", b"%d" % turn, queue_key="k")) for _ in range(20)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert requests.taken() == []
        sends[1].cancel()
        await asyncio.sleep(0)
        connection.resume_writing()
        results = await asyncio.gather(*sends[:1], *sends[2:])
        assert set(requests.taken()) == {RequestCode.SEND_BATCH_MESSAGE}
    offsets = [result.queue_offset for result in results]
    assert offsets == sorted(offsets)
    assert len(await stored(node)) == 1 + 99, "whoever gave up meanwhile sent nothing"


async def test_who_sends_alone_sends_what_waits_before(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, compress_over_bytes=1000) as producer:
        await producer.send("t", b"first")
        connection = only_connection(producer)
        connection.pause_writing()
        before = asyncio.create_task(producer.send("t", b"small", queue_key="k"))
        await asyncio.sleep(0)
        behind = asyncio.create_task(producer.send("t", b"x" * 2000, queue_key="k"))
        await asyncio.sleep(0)
        connection.resume_writing()
        first, second = await asyncio.gather(before, behind)
    assert first.queue_offset < second.queue_offset


async def test_who_waits_for_a_broker_that_reads_nothing_hears_of_it_in_time(
    node: Node, wire: Wire, requests: Requests
) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, compress_over_bytes=1000) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        requests.taken()
        assert producer._accumulator is not None
        producer._timeout_s = producer._accumulator._timeout_s = 0.05
        bodies = (b"a", b"b", b"goes alone" * 200)
        outcomes = await asyncio.gather(*(producer.send("t", body) for body in bodies), return_exceptions=True)
        assert requests.taken() == []
        only_connection(producer).resume_writing()
    assert [type(outcome) for outcome in outcomes] == [RequestTimeout] * 3


async def test_whoever_comes_after_them_hears_of_it_in_time_too(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        assert producer._accumulator is not None
        producer._timeout_s = producer._accumulator._timeout_s = 0.02
        for body in (b"a", b"b", b"c"):
            with pytest.raises(RequestTimeout, match="did not take the message in time"):
                await asyncio.wait_for(producer.send("t", body), PATIENCE_S)
        only_connection(producer).resume_writing()


async def test_what_waits_for_a_broker_that_hangs_up_is_sent_again(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        connection = only_connection(producer)
        connection.pause_writing()
        sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(3)]
        await asyncio.sleep(0)
        connection.close()
        assert len(await asyncio.gather(*sends)) == 3


async def test_who_gives_up_while_a_broker_reads_nothing_leaves_nothing_behind(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        assert producer._accumulator is not None
        producer._accumulator._timeout_s = 0.05
        given_up = asyncio.create_task(producer.send("t", b"a"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout):
            await producer.send("t", b"b")
        only_connection(producer).resume_writing()
        await producer.send("t", b"c")
    assert sorted(message.body for message in await stored(node)) == [b"c", b"first"]


async def turns_until_written(producer: Producer) -> int:
    """Turns of the event loop from a `send` to the write of its request."""
    connection, turns = only_connection(producer), 0
    send = asyncio.create_task(producer.send("t", b"x", queue_key="k"))
    while not connection._pending or connection._out:
        await asyncio.sleep(0)
        turns += 1
    await send
    return turns


async def test_a_message_alone_in_its_turn_leaves_as_early_as_without_batches(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as batching, Producer(node.address, batching=False) as plain:
        for producer in (batching, plain):
            await producer.send("t", b"first")
        assert await turns_until_written(batching) == await turns_until_written(plain) <= 2
