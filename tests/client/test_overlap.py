"""When the messages of a turn leave: the first ones before the turn ends, so that client and broker work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rocketlet.client import Access, Producer, RequestTimeout, SendResult
from rocketlet.client.config import BATCH_MESSAGES, MAX_OVERLAP_PAUSE, OVERLAP_BATCHES, OVERLAP_MESSAGES
from rocketlet.client.sending.accumulator import Overlap
from rocketlet.client.wire.connection import Encoding
from rocketlet.protocol.codes import RequestCode

from ..client.conftest import set_send_timeout
from ..conftest import PATIENCE_S, Node, Wire, create_topic
from .conftest import Requests, only_connection, stored


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
    """So that client and broker work at the same time instead of waiting for each other."""
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
        assert await taken(OVERLAP_MESSAGES - 1) == [batch, batch], "it is retried"


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


def test_halves_that_stay_apart_are_halved_again_immediately() -> None:
    overlap = Overlap()
    assert overlap.limit(20, 0) == 10
    assert overlap.limit(20, 2) == BATCH_MESSAGES
    assert overlap.limit(20, 2 + OVERLAP_BATCHES) == 10
    assert overlap.limit(20, 2 + OVERLAP_BATCHES * 2) == 10
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 2) == BATCH_MESSAGES
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 3) == 10, "it waits no longer than at first"


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


# Messages that wait for a broker that reads nothing for a while: each leaves in its order, or its sender gets an error in
# time.


@asynccontextmanager
async def unread(node: Node, *, timeout_s: float | None = None, **options: Any) -> AsyncIterator[Producer]:
    """A producer whose broker has read one message and now reads nothing. timeout_s: of the sends from now on."""
    async with Producer(node.address, **options) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        if timeout_s is not None:
            set_send_timeout(producer, timeout_s)
        yield producer


async def test_messages_that_wait_for_a_slow_broker_travel_in_batches_too_in_order(
    node: Node, wire: Wire, requests: Requests
) -> None:
    """Each turn's on its own. When all senders woke together, most did so in vain, and then went alone."""
    await create_topic(wire, "t")
    async with unread(node) as producer:
        connection = only_connection(producer)
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
    async with unread(node, compress_over_bytes=1000) as producer:
        connection = only_connection(producer)
        before = asyncio.create_task(producer.send("t", b"small", queue_key="k"))
        await asyncio.sleep(0)
        behind = asyncio.create_task(producer.send("t", b"x" * 2000, queue_key="k"))
        await asyncio.sleep(0)
        connection.resume_writing()
        first, second = await asyncio.gather(before, behind)
    assert first.queue_offset < second.queue_offset


async def test_who_waits_for_a_broker_that_reads_nothing_is_notified_of_it_in_time(
    node: Node, wire: Wire, requests: Requests
) -> None:
    await create_topic(wire, "t")
    async with unread(node, timeout_s=0.05, compress_over_bytes=1000) as producer:
        requests.taken()
        bodies = (b"a", b"b", b"goes alone" * 200)
        outcomes = await asyncio.gather(*(producer.send("t", body) for body in bodies), return_exceptions=True)
        assert requests.taken() == []
        only_connection(producer).resume_writing()
    assert [type(outcome) for outcome in outcomes] == [RequestTimeout] * 3


async def test_whoever_comes_after_them_is_notified_of_it_in_time_too(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with unread(node, timeout_s=0.02) as producer:
        for body in (b"a", b"b", b"c"):
            with pytest.raises(RequestTimeout, match="did not read the message in time"):
                await asyncio.wait_for(producer.send("t", body), PATIENCE_S)
        only_connection(producer).resume_writing()


async def test_what_waits_for_a_broker_that_hangs_up_is_sent_again(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with unread(node) as producer:
        connection = only_connection(producer)
        sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(3)]
        await asyncio.sleep(0)
        connection.close()
        assert len(await asyncio.gather(*sends)) == 3


async def test_who_gives_up_while_a_broker_reads_nothing_leaves_nothing_behind(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with unread(node) as producer:
        set_send_timeout(producer, 0.05)
        given_up = asyncio.create_task(producer.send("t", b"a"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout):
            await producer.send("t", b"b")
        only_connection(producer).resume_writing()
        await producer.send("t", b"c")
    assert sorted(message.body for message in await stored(node)) == [b"c", b"first"]
