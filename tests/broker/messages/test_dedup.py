"""Topics with the attribute `dedup`: a repeated send gets the first result."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.messages.dedup import FirstMessage, TopicIds
from rocketlet.broker.store.files import StoreFull
from rocketlet.client import AdminClient, MessageIllegal, Outgoing, Producer
from rocketlet.protocol.bodies import DEDUP_FLAG, BodyError, TopicConfig, duration_s, read_topic, topic_json
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.message import BatchEntry, encode_batch
from rocketlet.protocol.settings import changed_topic
from rocketlet.testing import Broker, Cluster, Fault
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, Wire
from ...support.metrics import samples
from ...support.requests import send
from ...support.topics import put, stored


def result(sent: Frame) -> tuple[object, ...]:
    assert sent.code == 0, sent.remark
    return sent.ext["msgId"], int(sent.ext["queueId"]), int(sent.ext["queueOffset"])


async def send_id(wire: Wire, message_id: str, body: bytes = b"x", **fields: Any) -> Frame:
    return await send(wire, body, **{"properties": f"UNIQ_KEY\x01{message_id}", **fields})


async def send_ids(wire: Wire, *ids: str) -> Frame:
    body = encode_batch([BatchEntry(0, b"x", f"UNIQ_KEY\x01{item}") for item in ids])
    return await send(wire, body, batch=True)


async def test_repeated_send_gets_the_first_result_and_is_not_stored(nodes: Nodes, connect: Connect) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock, metrics_port=0)
    wire = await connect(node.address)
    put(node, dedup="10m")
    put(node, "other")
    first = result(await send_id(wire, "a", b"1"))
    assert result(await send_id(wire, "a", b"again", queue=1)) == first, "whichever queue and body"
    assert result(await send_id(wire, "a", b"of another topic", topic="other")) != first
    longest = "x" * 300
    assert result(await send_id(wire, longest, queue=-1)) == result(await send_id(wire, longest, queue=-1))
    batch = result(await send_ids(wire, "b", "c"))
    assert result(await send_ids(wire, "b", "c")) == batch
    assert result(await send_id(wire, "c")) == (str(batch[0]).split(",")[1], 0, int(str(batch[2])) + 1)
    for ids in (("c", "d"), ("d", "c"), ("c", "b")):
        refused = await send_ids(wire, *ids)
        assert refused.code == ResponseCode.MESSAGE_ILLEGAL
        assert "some messages of the batch are stored in t already" in str(refused.remark)
    assert (await send(wire, b"1")).code == (await send(wire, b"1")).code == 0, "a message without an id is stored"
    assert [record.body for record in stored(node)].count(b"1") == 3
    assert len(stored(node)) == 6
    found = await samples(node)
    assert found["rocketlet_dedup_ids", frozenset({("topic", "t")})] == 4
    assert found["rocketlet_dedup_repeated_total", frozenset({("topic", "t")})] == 5

    await node.stop()
    clock.advance(300)
    node = await nodes.start(clock=clock, port=int(node.address.rpartition(":")[2]))
    wire = await connect(node.address)
    assert result(await send_id(wire, "a")) == first, "ids are kept over a restart"
    assert result(await send_ids(wire, "b", "c")) == batch
    clock.advance(299)
    wire = await connect(node.address)  # the broker has closed the idle connection
    assert result(await send_id(wire, "a")) == first
    clock.advance(77)
    # the time has passed, and the slice of an eighth of it in which the id was stored
    second = result(await send_id(wire, "a"))
    assert second != first
    node.broker.topics.delete("t", node.broker.store.end)
    put(node, dedup="10m")
    assert result(await send_id(wire, "a")) != second, "a recreated topic knows no ids"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"properties": "UNIQ_KEY\x01a\x02DELAY\x011"}, "delayed messages"),
        ({"properties": "UNIQ_KEY\x01a\x02TIMER_DELAY_MS\x015000"}, "delayed messages"),
        ({"properties": "UNIQ_KEY\x01a\x02TRAN_MSG\x01true\x02PGROUP\x01p", "sys_flag": 4}, "transactional messages"),
        (
            {"batch": True, "body": encode_batch([BatchEntry(0, b"x" * 200_000, "UNIQ_KEY\x01a")] * 3)},
            "batches of more",
        ),
    ],
)
async def test_messages_that_are_not_deduplicated_are_refused_by_name(
    node: Node, connect: Connect, fields: dict[str, Any], what: str
) -> None:
    put(node, dedup="10m")
    wire = await connect(node.address)
    refused = await send(wire, **fields)
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert f"the topic t has the attribute dedup, which does not support {what}" in str(refused.remark)
    assert stored(node) == []
    assert (await send_id(wire, "a")).code == 0


async def test_id_of_a_message_that_was_not_stored_is_not_known(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node, dedup="10m")
    wire = await connect(node.address)
    kept = result(await send_id(wire, "kept"))

    def full() -> None:
        node.broker.store.roll_back()
        raise StoreFull("no space")

    with monkeypatch.context() as patched:
        patched.setattr(node.broker.store, "commit", full)
        assert (await send_id(wire, "lost")).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert result(await send_id(wire, "kept")) == kept
    assert result(await send_id(wire, "lost"))[2] == 1, "the first message with this id"


@pytest.mark.limits(max_dedup_ids=16)
@pytest.mark.still
async def test_oldest_ids_of_the_largest_topic_are_forgotten_at_the_limit(node: Node, wire: Wire) -> None:
    clock = node.clock
    put(node, dedup="80s")
    put(node, "small", dedup="80s")
    small = result(await send_id(wire, "small", topic="small"))
    sent = []
    for number in range(15):
        sent.append(result(await send_id(wire, str(number))))
        clock.advance(4)  # the ids of a slice have 10 s
    assert result(await send_id(wire, "0")) == sent[0], "16 ids are kept"
    await send_id(wire, "15")
    (name, ids), _ = sorted(node.broker.dedup, key=lambda item: -item[1].count)
    assert (name, ids.forgotten in (1, 2, 3)) == ("t", True), "a slice has up to three of these ids"
    assert result(await send_id(wire, "0")) != sent[0]
    assert result(await send_id(wire, "14")) == sent[14]
    assert result(await send_id(wire, "small", topic="small")) == small


async def test_attribute_that_is_set_or_changed_holds_for_the_next_sends(node: Node, wire: Wire) -> None:
    put(node)
    assert result(await send_id(wire, "before"))[2] == 0
    put(node, dedup="10m")
    first = result(await send_id(wire, "a"))
    assert result(await send_id(wire, "a")) == first, "the queue had passed the checks before"
    put(node, dedup="20m")
    assert result(await send_id(wire, "a")) == first, "ids are kept for the new time"
    replayed = await send(wire, b"x", properties="UNIQ_KEY\x01a\x02ORIGIN_MESSAGE_ID\x01a")
    assert result(replayed) != first, "a dead letter that is replayed is stored"
    assert len(stored(node)) == 3


def test_oldest_ids_of_a_slice_are_forgotten_first() -> None:
    ids = TopicIds("", 80_000)
    for number in range(100):
        ids.add(str(number), FirstMessage(number, 0, number), 1)
    assert (ids.forget_oldest(), ids.count) == (13, 87)
    assert [number for number in range(100) if ids.find(str(number)) is None] == list(range(13))
    ids.resize(8_000)
    assert ids.count == 87
    ids.expire(17_000)
    assert ids.count == 87
    ids.expire(20_000)
    assert ids.count == 0


def test_id_is_known_for_its_time_and_at_most_an_eighth_longer() -> None:
    ids = TopicIds("", 80_000)
    places = [FirstMessage(2**62 + number, 65_535, 2**40) for number in range(100)]
    for number, place in enumerate(places):
        ids.add(str(number), place, number * 1000)
    ids.expire(99_000)
    known = [number for number, place in enumerate(places) if ids.find(str(number)) == place]
    assert known == list(range(known[0], 100))
    assert 9 <= known[0] <= 19
    assert ids.count == len(known)


def test_attribute_of_a_topic_is_read_and_checked() -> None:
    assert [duration_s(text) for text in ("1s", "10m", "2h", "1d", "x")] == [1, 600, 7200, 86_400, 0]
    topic = changed_topic(TopicConfig("t"), None, "+dedup=10m")
    assert topic.dedup == changed_topic(TopicConfig("t"), topic, "").dedup == "10m"
    assert read_topic(topic_json(topic)) == topic
    for change in ("-dedup", "+dedup=off"):
        assert not changed_topic(topic, topic, change).has_dedup
    for text in ("10", "0s", "25h", "2d", "-1s", "10 m", ""):
        with pytest.raises(BodyError, match="expected 1s to 1d, such as 10m, or off"):
            changed_topic(TopicConfig("t"), None, f"+dedup={text}")
    with pytest.raises(BodyError, match="dedup: not supported for a topic of the type LITE"):
        changed_topic(TopicConfig("t"), topic, "+message.type=LITE")


async def test_client_retries_at_the_broker_that_may_have_stored_the_message() -> None:
    async with Cluster(brokers=2) as cluster, AdminClient(cluster.address) as admin:
        await admin.create_topic("t", queues=2, dedup="10m")
        assert {data.sys_flag for data in (await admin.topic("t")).config.values()} == {DEDUP_FLAG}
        async with Producer(cluster.address, timeout_s=60) as producer:
            for broker in cluster.brokers:
                broker.faults.add(Fault.close("SEND_MESSAGE_V2", after=True, times=1))
            results = [await producer.send("t", b"%d" % number) for number in range(6)]
            again = await producer.send("t", b"0", message_id=results[0].message_id, queue=results[0].queue)
        assert again == results[0]
        counts = [len(broker.messages("t")) for broker in cluster.brokers]
        assert sum(counts) == 6, "no message is stored twice"
        await admin.change_topic("t", queues=3)
        changed = await admin.change_topic("t", dedup="off")
        assert {config.dedup for config in changed.values()} == {"off"}


async def test_batch_with_ids_is_sent_once_by_our_client() -> None:
    async with Broker() as broker, AdminClient(broker.address) as admin, Producer(broker.address) as producer:
        await admin.create_topic("t", queues=1, dedup="10m")
        messages = [Outgoing(b"1", message_id="1"), Outgoing(b"2", message_id="2")]
        first = await producer.send_batch("t", messages)
        assert await producer.send_batch("t", messages) == first
        with pytest.raises(Exception, match="some messages of the batch are stored in t already"):
            await producer.send_batch("t", [*messages, b"3"])
        with pytest.raises(Exception, match="does not support delayed messages"):
            await producer.send("t", b"x", delay=5)
        with pytest.raises(MessageIllegal):
            await producer.send("t", b"")
        assert [message.body for message in broker.messages("t")] == [b"1", b"2"]
