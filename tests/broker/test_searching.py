"""Messages by their ids, by key and by time."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.requests import searches
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import QueryMessage, write
from rocketlet.protocol.message import decode_record, decode_records

from ..conftest import Node, Wire, create_topic
from ..requests import send

FOREVER = 2**62


def query(key: str, topic: str = "t", max_num: int = 64, begin: int = 0, end: int = FOREVER) -> dict[str, Any]:
    return write(QueryMessage(topic, key, max_num, begin, end))


async def bodies_of(wire: Wire, ext: dict[str, Any]) -> list[bytes]:
    answer = await wire.call(RequestCode.QUERY_MESSAGE, ext)
    assert answer.code in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND), answer.remark
    assert {"indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"} <= answer.ext.keys()
    return [record.body for record in decode_records(answer.body)]


async def test_a_message_is_found_by_its_place(wire: Wire) -> None:
    await create_topic(wire, "t")
    sent = await send(wire, b"here")
    position = int(str(sent.ext["msgId"])[-16:], 16)
    answer = await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": position})
    assert decode_record(answer.body).body == b"here"
    for wrong in (position + 1, 10**9, -1):
        assert (await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": wrong})).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("chunk", [1024 * 1024, 300])
async def test_messages_are_found_by_any_of_their_keys(wire: Wire, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(searches, "SEARCH_CHUNK_BYTES", chunk)
    for topic in ("t", "u"):
        await create_topic(wire, topic)
        for number in range(30):
            text = f"KEYS\x01k{number % 10} order-{number}\x02UNIQ_KEY\x01U{number}"
            await send(wire, b"%s-%d" % (topic.encode(), number), topic=topic, queue=number % 4, properties=text)
    await send(wire, b"k3 only in the body", properties="TAGS\x01k3")
    await send(wire, b"x" * 5000, properties="KEYS\x01large")
    assert await bodies_of(wire, query("k3")) == [b"t-3", b"t-13", b"t-23"]
    assert await bodies_of(wire, query("order-7", "u")) == [b"u-7"]
    assert await bodies_of(wire, query("large")) == [b"x" * 5000]
    assert await bodies_of(wire, query("order")) == []
    assert await bodies_of(wire, query("k3", "nowhere")) == []
    assert await bodies_of(wire, query("k3", max_num=2)) == [b"t-13", b"t-23"]
    assert await bodies_of(wire, query("U12") | {"_UNIQUE_KEY_QUERY": "true"}) == [b"t-12"]


async def test_only_the_times_asked_for_are_looked_at(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    for number in range(3):
        await send(wire, b"%d" % number, properties="KEYS\x01k")
    queue = node.broker.store.queue("t", 0)
    times = [node.broker.store.store_time_ms(queue, offset) for offset in range(3)]
    assert await bodies_of(wire, query("k", begin=times[0], end=times[2])) == [b"0", b"1", b"2"]
    assert await bodies_of(wire, query("k", begin=times[2] + 1)) == []
    assert await bodies_of(wire, query("k", end=times[0] - 1)) == []


async def test_a_record_inside_a_body_is_not_taken_for_one(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"inner", properties="KEYS\x01k")
    inner = node.broker.store.record_bytes_at(0)
    assert inner is not None
    await send(wire, b"<" + inner + b">", properties="KEYS\x01outer")
    assert await bodies_of(wire, query("k")) == [b"inner"]
