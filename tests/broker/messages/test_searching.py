"""Messages by their ids, by key and by time."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.config import LIMITS
from rocketlet.broker.runtime.turns import FairQueue, Turns
from rocketlet.broker.store import index
from rocketlet.protocol.bodies import Work
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import QueryMessage, write
from rocketlet.protocol.message import MAGIC, decode_record, decode_records

from bench.steps import Meter

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.requests import pull, send
from ...support.turns import give_no_turn

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


@pytest.mark.parametrize(("chunk", "entries"), [(1024 * 1024, 1024), (300, 1024), (1024 * 1024, 3)])
async def test_messages_are_found_by_any_of_their_keys(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, chunk: int, entries: int
) -> None:
    monkeypatch.setattr(index, "SEARCH_CHUNK_BYTES", chunk)
    monkeypatch.setattr(index, "SEARCH_ENTRIES", entries)
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


async def test_only_the_requested_times_are_searched(node: Node, wire: Wire) -> None:
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


async def test_a_record_of_another_topic_inside_a_body_is_not_found_in_that_topic(node: Node, wire: Wire) -> None:
    """With the place that it will have, which a client can compute from the last answer."""
    for topic in ("t", "victim"):
        await create_topic(wire, topic)
    await send(wire, b"true", topic="victim", properties="KEYS\x01k")
    true = node.broker.store.record_bytes_at(0)
    assert true is not None
    place = node.broker.store.end + 88
    forged = true[:28] + place.to_bytes(8, "big") + true[36:].replace(b"true", b"lies")
    await send(wire, forged)
    await send(wire, b"true", topic="victim", properties="KEYS\x01k")
    assert await bodies_of(wire, query("k", "victim")) == [b"true", b"true"]


async def test_a_body_full_of_marks_and_keys_costs_a_search_no_more_than_another(wire: Wire) -> None:
    """Each key was searched for its record, back over all marks: a body of 40 KB took 32 s."""
    mark = MAGIC.to_bytes(4, "big")
    bodies = {
        "plain": b"x" * 4000,
        "marks": mark * 500 + b"k" * 2000,
        "heads": (b"\0\0\1\0" + mark) * 250 + b"k" * 2000,
    }
    steps = {}
    for topic, body in bodies.items():
        await create_topic(wire, topic)
        for _ in range(4):
            await send(wire, body, topic=topic)
        await send(wire, b"found", topic=topic, properties="KEYS\x01k")
        meter = Meter()
        meter.start(counts=True)
        assert await bodies_of(wire, query("k", topic)) == [b"found"]
        meter.stop()
        steps[topic] = meter.steps
    assert max(steps.values()) < 2 * steps["plain"]


async def test_a_search_reads_no_more_than_the_newest_messages(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topic(wire, "t")
    for number in range(4):
        await send(wire, b"%d" % number, queue=number % 2, properties=f"KEYS\x01k{number}")
    monkeypatch.setattr(index, "SEARCHED_ENTRIES", 3)
    assert await bodies_of(wire, query("k1")) == [b"1"]
    answer = await wire.call(RequestCode.QUERY_MESSAGE, query("k0"))
    assert (answer.code, "request an earlier or shorter range" in (answer.remark or "")) == (1, True)


async def test_a_client_has_one_search_at_a_time_and_others_wait_in_line(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 searches of one client took a piece each, between two polls of the sockets: 650 ms."""
    await create_topic(wire, "t")
    await send(wire, b"here", properties="KEYS\x01k")
    searches = node.broker.searches
    with monkeypatch.context() as patch:
        give_no_turn(patch, node)
        asked = [wire.send(RequestCode.QUERY_MESSAGE, query("k")) for _ in range(20)]
        await eventually(lambda: searches.waiting == 19)
        (first,) = node.server.connections
        assert (node.broker.turns.waiting, first.charged_bytes > 19 * 1024) == (1, True)
        others = [await connect(node.address) for _ in range(LIMITS.max_searches)]
        also_asked = [other.send(RequestCode.QUERY_MESSAGE, query("k")) for other in others]
        await eventually(lambda: searches.waiting == 20)
        assert node.broker.turns.waiting == LIMITS.max_searches
        assert (await others[0].call(RequestCode.PULL_MESSAGE, pull())).code == 0
        assert (await others[1].call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "none"})).code == 0
    assert [(await wire.answer(opaque)).code for opaque in asked] == [0] * 20
    assert [(await other.answer(opaque)).code for other, opaque in zip(others, also_asked, strict=True)] == [0] * 4
    assert searches.waiting == 0
    assert first.charged_bytes < 1024


async def test_clients_take_turns_with_their_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    line = FairQueue(turns, at_once=1, max_waiting=8)
    done: list[str] = []

    def work(name: str) -> Work[None]:
        yield
        done.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(turns, "turn_s", -1)
        for name in ("a1", "a2", "a3", "b1", "b2"):
            line.join(name[0], work(name))
    await eventually(lambda: len(done) == 5)
    assert done == ["a1", "a2", "b1", "a3", "b2"]


@pytest.mark.limits(max_waiting_searches=2)
async def test_searches_that_wait_are_limited_at_their_edge_for_each_client(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    await send(wire, b"here", properties="KEYS\x01k")
    with monkeypatch.context() as patch:
        give_no_turn(patch, node)
        asked = [wire.send(RequestCode.QUERY_MESSAGE, query("k")) for _ in range(4)]
        refused = await wire.answer(asked.pop())
        assert (refused.code, "wait already" in (refused.remark or "")) == (1, True)
        other = await connect(node.address)
        asked_too = other.send(RequestCode.QUERY_MESSAGE, query("k"))
    assert [(await wire.answer(opaque)).code for opaque in asked] == [0, 0, 0]
    assert (await other.answer(asked_too)).code == 0


async def test_a_broker_that_stops_waits_for_no_search(node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topic(wire, "t")
    await send(wire, b"here", properties="KEYS\x01k")
    looked: list[object] = []
    look = index.Search._examine

    def counting(*given: Any) -> Any:
        looked.append(given)
        return look(*given)

    monkeypatch.setattr(index.Search, "_examine", counting)
    with monkeypatch.context() as patch:
        give_no_turn(patch, node)
        for _ in range(20):
            wire.send(RequestCode.QUERY_MESSAGE, query("k"))
        await eventually(lambda: node.broker.searches.waiting == 19)
    await node.stop()
    assert len(looked) < 19
