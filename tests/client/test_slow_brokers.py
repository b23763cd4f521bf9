"""Messages that wait for a broker that reads nothing for a while: each leaves in its order, or its sender hears in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rocketlet.client import Producer, RequestTimeout
from rocketlet.protocol.codes import RequestCode

from ..conftest import PATIENCE_S, Node, Wire, create_topic
from .conftest import Requests, only_connection, stored


@asynccontextmanager
async def unread(node: Node, *, timeout_s: float | None = None, **options: Any) -> AsyncIterator[Producer]:
    """A producer whose broker has read one message and now reads nothing. timeout_s: of the sends from now on."""
    async with Producer(node.address, **options) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        if timeout_s is not None:
            assert producer._accumulator is not None
            producer._timeout_s = producer._accumulator._timeout_s = timeout_s
        yield producer


async def test_messages_that_wait_for_a_slow_broker_travel_in_batches_too_in_order(
    node: Node, wire: Wire, requests: Requests
) -> None:
    """Each turn's on its own. When all senders woke at once, most did so in vain, and then went alone."""
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


async def test_who_waits_for_a_broker_that_reads_nothing_hears_of_it_in_time(
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


async def test_whoever_comes_after_them_hears_of_it_in_time_too(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with unread(node, timeout_s=0.02) as producer:
        for body in (b"a", b"b", b"c"):
            with pytest.raises(RequestTimeout, match="did not take the message in time"):
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
