"""SEND_MESSAGE in its forms: the checks with their codes, batches, delays, retries, dead letters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rocketlet.broker.config import (
    ASKED_BYTES,
    BATCH_TURN_BYTES,
    BATCH_TURN_MESSAGES,
    CLIENT_ANSWER_S,
    MAX_CHECKED_SENDS,
)
from rocketlet.broker.messages.sending import LongBatch, _pieces_of_short
from rocketlet.broker.sessions.refusal import Refusal
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import GroupConfig, Heartbeat, TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES, MAX_PROPERTY_BYTES, SENT_PROPERTY_BYTES
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame
from rocketlet.protocol.headers import SendBack, SendMessage, write
from rocketlet.protocol.message import BatchEntry, Record, decode_records, encode_batch
from rocketlet.protocol.properties import decode, shortened
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.requests import heartbeat, pull, reply, send


async def records(wire: Wire, topic: str = "t", queue: int = 0) -> list[Record]:
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic, queue=queue))
    return list(decode_records(answer.body))


@pytest.mark.parametrize("serialize_type", [JSON, ROCKETMQ, MSGPACK])
async def test_an_answer_says_where_the_message_is_in_the_requests_encoding(wire: Wire, serialize_type: int) -> None:
    await create_topic(wire, "t")
    ext = {
        "producerGroup": "p", "topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 2,
        "sysFlag": 0, "bornTimestamp": 1, "flag": 9, "properties": "TAGS\x01A\x02KEYS\x01k",
    }  # fmt: skip
    answer = await wire.call(RequestCode.SEND_MESSAGE, ext, b"hello", serialize_type=serialize_type)
    assert (answer.code, answer.serialize_type) == (0, serialize_type)
    assert (int(answer.ext["queueId"]), int(answer.ext["queueOffset"])) == (2, 0)
    if serialize_type != MSGPACK:  # only Apache's clients need it
        assert answer.ext["TRACE_ON"] == "true"
    (record,) = await records(wire, queue=2)
    assert record.offset_id == answer.ext["msgId"]
    assert (record.body, record.flag, record.born_ms) == (b"hello", 9, 1)
    assert decode(record.properties) == {"TAGS": "A", "KEYS": "k", "CLUSTER": "DefaultCluster"}


BAD_SENDS: list[tuple[dict[str, Any], int, str]] = [
    ({"topic": "a b"}, 1, "characters other than"),
    ({"topic": "x" * 128}, 1, "128 characters"),
    ({"topic": "SCHEDULE_TOPIC_XXXX"}, 16, "forbidden"),
    ({"topic": "new", "default_topic": "nothing"}, 17, "not exist"),
    ({"queue": 4}, 1, "queueId[4] is illegal"),
    ({"properties": "DELAY\x01soon"}, 13, "not a number"),
    ({"properties": "a\x01" + "x" * 32_750}, 13, "maximum 32255"),
    ({"flag": 2**40}, 1, ""),
]


async def test_a_bad_send_gets_its_code_and_a_reason(wire: Wire) -> None:
    await create_topic(wire, "t")
    for fields, code, remark in BAD_SENDS:
        answer = await send(wire, **fields)
        assert answer.code == code
        assert remark in (answer.remark or "")
        assert (await send(wire)).code == 0, "the connection continues"


async def test_a_missing_field_is_named(wire: Wire) -> None:
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, {"a": "p", "b": "t"}, b"x")
    assert (answer.code, "'c'" in (answer.remark or "")) == (1, True)


async def test_a_body_may_have_four_mib_and_not_a_byte_more(wire: Wire) -> None:
    await create_topic(wire, "t")
    assert (await send(wire, b"x" * 4_194_304)).code == 0
    assert (await send(wire, b"x" * 4_194_305)).code == ResponseCode.MESSAGE_ILLEGAL
    assert (await send(wire, b"")).code == 0


async def test_an_unknown_topic_is_made_with_the_smaller_number_of_queues(wire: Wire) -> None:
    assert (await send(wire, topic="new")).code == 0
    answer = await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "new"})
    (queues,) = bodies.decode_route(answer.body).queues
    assert (queues.write_queues, queues.read_queues, queues.perm) == (4, 4, 6)


async def test_a_negative_queue_means_any(wire: Wire) -> None:
    await create_topic(wire, "t")
    answer = await send(wire, queue=-1)
    assert 0 <= int(answer.ext["queueId"]) < 4


async def test_wait_is_taken_off_and_cluster_put_on(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, properties="WAIT\x01true\x02a\x01b\x02")
    (record,) = await records(wire)
    assert decode(record.properties) == {"a": "b", "CLUSTER": "DefaultCluster"}


async def test_sends_and_other_requests_of_one_read_are_answered_in_order(wire: Wire) -> None:
    await create_topic(wire, "t")
    query = {"topic": "t", "queueId": "0"}
    for expected in range(3):
        await_send = wire.send(RequestCode.SEND_MESSAGE_V2, _v2(), b"x")
        await_query = wire.send(RequestCode.GET_MAX_OFFSET, query)
        assert int((await wire.answer(await_query)).ext["offset"]) == expected + 1
        assert (await wire.answer(await_send)).code == 0


def _v2(**fields: Any) -> dict[str, Any]:
    return {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", **fields}


async def test_a_batch_is_stored_whole_and_in_a_row(wire: Wire) -> None:
    await create_topic(wire, "t")
    batch = encode_batch([BatchEntry(1, b"one", "TAGS\x01A"), BatchEntry(2, b"two", "")])
    answer = await wire.call(RequestCode.SEND_BATCH_MESSAGE, _v2(m=True), batch)
    assert answer.code == 0
    found = await records(wire)
    assert [record.body for record in found] == [b"one", b"two"]
    assert answer.ext["msgId"] == ",".join(record.offset_id for record in found)
    assert decode(found[0].properties)["TAGS"] == "A"


BAD_BATCHES: list[tuple[dict[str, Any], bytes]] = [
    ({}, b"garbage"),
    ({}, b""),
    ({"i": "DELAY\x013"}, encode_batch([BatchEntry(0, b"x", "")])),
    ({"f": 4}, encode_batch([BatchEntry(0, b"x", "")])),
    ({}, encode_batch([BatchEntry(0, b"x" * 4_194_304, "")])),
    ({}, encode_batch([BatchEntry(0, b"ok", ""), BatchEntry(0, b"x", "a\x01" + "y" * 32_760)])),
]


async def test_a_bad_batch_stores_nothing(wire: Wire) -> None:
    await create_topic(wire, "t")
    for fields, body in BAD_BATCHES:
        assert (
            await wire.call(RequestCode.SEND_BATCH_MESSAGE, _v2(m=True, **fields), body)
        ).code == ResponseCode.MESSAGE_ILLEGAL
        assert await records(wire) == []


async def test_a_batch_code_without_the_flag_is_one_message(wire: Wire) -> None:
    await create_topic(wire, "t")
    await wire.call(RequestCode.SEND_BATCH_MESSAGE, _v2(m=False), b"just bytes")
    assert [record.body for record in await records(wire)] == [b"just bytes"]


async def test_a_oneway_send_is_stored_and_not_answered(wire: Wire) -> None:
    await create_topic(wire, "t")
    silent = wire.send(RequestCode.SEND_MESSAGE_V2, _v2(), b"quiet", flag=2)
    assert [record.body for record in await records(wire)] == [b"quiet"]
    assert silent not in wire._answers


async def test_delayed_messages_come_when_due_and_in_their_topic(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(clock=MovableClock(stands=True), delay_levels_ms=(20, 60))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    for body, level in ((b"later", 2), (b"sooner", 1), (b"beyond the last level", 99)):
        answer = await send(wire, body, queue=3, properties=f"DELAY\x01{level}")
        assert (answer.code, int(answer.ext["queueId"])) == (0, 3)
    assert await records(wire, queue=3) == []
    node.clock.advance(0.06)
    await eventually(lambda: node.broker.store.queue("t", 3).next == 3)
    found = await records(wire, queue=3)
    assert [record.body for record in found] == [b"sooner", b"later", b"beyond the last level"]
    assert decode(found[0].properties)["REAL_TOPIC"] == "t"


async def test_a_message_sent_back_is_redelivered_and_ends_among_the_dead(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await heartbeat(wire)
    await wire.call(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        body=bodies.encode_group(GroupConfig("g", retry_max_times=2)),
    )
    await send(wire, b"hard", properties="TAGS\x01A\x02UNIQ_KEY\x01u")
    (record,) = await records(wire)
    origin = record.offset_id
    for tries in (1, 2):
        answer = await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, write(SendBack(record.physical_offset, "g", 0)))
        assert answer.code == 0
        queue = node.broker.store.queue("%RETRY%g", 0)
        await eventually(lambda queue=queue, tries=tries: queue.next == tries)  # type: ignore[misc]
        record = (await records(wire, "%RETRY%g"))[-1]
        properties = decode(record.properties)
        assert (record.body, record.reconsume_times) == (b"hard", tries)
        assert (properties["RETRY_TOPIC"], properties["ORIGIN_MESSAGE_ID"]) == ("t", origin)
        assert properties["DELAY"] == str(2 + tries)
    await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, write(SendBack(record.physical_offset, "g", 0)))
    (dead,) = await records(wire, "%DLQ%g")
    assert (dead.body, decode(dead.properties)["RETRY_TOPIC"]) == (b"hard", "t")


async def test_a_message_with_all_properties_it_may_have_can_be_retried_and_given_up(
    nodes: Nodes, connect: Connect
) -> None:
    """With 32,702 bytes it could be neither, and its queue stood for ever."""
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    wire = await connect(node.address)
    topic, group = "t" * 127, "g" * 120
    await create_topic(wire, topic)
    settings = bodies.encode_group(GroupConfig(group, retry_max_times=2))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=settings)
    own = len("\x02CLUSTER\x01DefaultCluster")
    text = "UNIQ_KEY\x01u\x02A\x01"
    text += "x" * (SENT_PROPERTY_BYTES - own - len(text))
    for more in ("x", "\x02DELAY\x011"):
        refused = await send(wire, b"hard", topic=topic, properties=text + more)
        assert (refused.code, "maximum" in (refused.remark or "")) == (ResponseCode.MESSAGE_ILLEGAL, True)
    assert (await send(wire, b"hard", topic=topic, properties=text)).code == 0
    (record,) = await records(wire, topic)
    for tries in (1, 2):
        back = write(SendBack(record.physical_offset, group, 0))
        assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        queue = node.broker.store.queue(f"%RETRY%{group}", 0)
        await eventually(lambda queue=queue, tries=tries: queue.next == tries)  # type: ignore[misc]
        record = (await records(wire, f"%RETRY%{group}"))[-1]
    back = write(SendBack(record.physical_offset, group, 0))
    assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
    (dead,) = await records(wire, f"%DLQ%{group}")
    found = decode(dead.properties)
    assert (found["A"], found["RETRY_TOPIC"]) == (decode(text)["A"], topic)
    assert "DROPPED_PROPERTIES" not in found


async def test_message_without_room_for_a_retry_is_a_dead_letter_that_names_what_it_lost(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t")
    await heartbeat(wire)
    text = f"UNIQ_KEY\x01u\x02A\x01{'x' * 500}\x02B\x01{'y' * 100}\x02KEYS\x01{'k' * 40}\x02C\x01"
    text += "z" * (MAX_PROPERTY_BYTES - len(text))
    broker = node.broker
    with broker.appender.batch() as now_ms:
        broker.appender.stage(broker.store.queue("t", 0), b"old", text.encode(), 0, 0, 0, now_ms, b"\x7f\0\0\1\0\0\0\1")
    (record,) = await records(wire)
    with capture_logs() as logs:
        back = write(SendBack(record.physical_offset, "g", 3))
        assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
    assert {"retry_has_no_room", "dead_letter_shortened"} <= {entry["event"] for entry in logs}
    (dead,) = await records(wire, "%DLQ%g")
    found = decode(dead.properties)
    assert (dead.body, found["DROPPED_PROPERTIES"], found["RETRY_TOPIC"], found["KEYS"]) == (b"old", "C", "t", "k" * 40)
    assert {"A", "B", "UNIQ_KEY"} < found.keys()


async def test_message_with_very_many_properties_is_shortened_immediately() -> None:
    text = "\x02".join(f"n{number}\x01{number % 10}" for number in range(5000))
    found, dropped = shortened(text, 20_000)
    assert len(found.encode()) <= 20_000
    assert len(decode(found)) == 5000 - len(dropped) + 1


@pytest.mark.parametrize("topic", ["%RETRY%nobody", "%DLQ%nobody"])
async def test_no_send_makes_a_topic_or_group_for_the_retries_of_nobody(node: Node, wire: Wire, topic: str) -> None:
    """Apache's broker makes both: a mistyped name succeeded, and nobody ever read the message."""
    for level in ("", "DELAY\x013"):
        refused = await send(wire, b"x", topic=topic, properties=level)
        said = f"the topic {topic} belongs to the group nobody, which this broker does not know; check the name"
        assert (refused.code, said in (refused.remark or "")) == (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, True)
    assert topic not in [item.name for item in node.broker.topics]
    assert "nobody" not in node.broker.group_configs
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=bodies.encode_group(GroupConfig("nobody")))
    assert (await send(wire, b"x", topic=topic)).code == 0, "as a consumer sends whose broker did not take it back"


async def test_a_send_back_of_what_is_not_there_is_refused(wire: Wire) -> None:
    answer = await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, write(SendBack(12345, "g", 0)))
    assert (answer.code, "look message by offset failed" in (answer.remark or "")) == (1, True)


async def test_unknown_requests_are_3_and_the_connection_continues(wire: Wire) -> None:
    answer = await wire.call(999)
    assert (answer.code, answer.remark) == (
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        " request type 999 not supported",
    )
    assert (await wire.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).ext["offset"] == "0"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0",
        b"\x7f\xff\xff\xff",
        b"\0\0\0\x0c\0\0\0\x08nonsense",
    ],
)
async def test_hostile_bytes_close_only_their_own_connection(
    node: Node, connect: Connect, wire: Wire, data: bytes
) -> None:
    hostile = await connect(node.address)
    hostile.write(data)
    assert await hostile.closed()
    assert (await send(wire, topic="new")).code == 0


async def test_half_a_frame_disturbs_nobody(node: Node, connect: Connect, wire: Wire) -> None:
    half = await connect(node.address)
    half.write(b"\0\xff\xff\xff" + b"x" * 1000)
    assert (await send(wire, topic="new")).code == 0
    await half.close()
    assert (await send(wire, topic="new")).code == 0


async def test_a_client_that_asks_and_does_not_read_costs_bounded_memory(
    node: Node, connect: Connect, wire: Wire
) -> None:
    await create_topic(wire, "t")
    for _ in range(2):
        await send(wire, b"x" * 200_000)
    greedy = await connect(node.address)
    greedy._writer.transport.pause_reading()  # type: ignore[attr-defined]
    asked = [greedy.send(RequestCode.PULL_MESSAGE, pull("t", max_msg_nums=1)) for _ in range(500)]  # 100 MB of answers
    await eventually(lambda: any(connection.is_paused for connection in node.server.connections))
    (slow,) = [connection for connection in node.server.connections if connection.is_paused]
    assert slow.unsent_bytes < 10_000_000
    assert (await send(wire)).code == 0, "others are served meanwhile"
    greedy._writer.transport.resume_reading()  # type: ignore[attr-defined]
    for opaque in asked:
        assert len((await greedy.answer(opaque)).body) > 200_000


async def test_a_delayed_message_survives_a_restart_and_comes_once(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(30, 150))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await send(wire, b"soon", properties="DELAY\x011")
    await eventually(lambda: node.broker.store.queue("t", 0).next == 1)
    await send(wire, b"late", properties="DELAY\x012")
    await node.stop()
    again = await nodes.start(delay_levels_ms=(30, 150))
    await eventually(lambda: again.broker.store.queue("t", 0).next == 2)
    found = await records(await connect(again.address))
    assert [record.body for record in found] == [b"soon", b"late"]


# A queue that takes messages is checked again only when something has changed that its checks depend on.


HOST = bytes(8)
TOPICS = ("t", "u", "%RETRY%g", "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT", "no such name!")


class Checks:
    """Counts the sends whose queue is checked."""

    def __init__(self, node: Node) -> None:
        self.count = 0
        self._check = node.broker.sending._queue_id
        node.broker.sending._queue_id = self._counted  # type: ignore[method-assign]

    def _counted(self, header: SendMessage) -> int:
        self.count += 1
        return self._check(header)


def sent(node: Node, topic: str = "t", queue: int = 0) -> tuple[str, int] | str:
    """Where a message has come, or why it was refused."""
    header = SendMessage("p", topic, "TBW102", 4, queue, 0, 1, 0)
    try:
        placed = node.broker.sending.stage(header, b"x", HOST)
    except Refusal as refusal:
        return str(refusal)
    node.broker.sending.commit()
    return node.broker.store.message(
        node.broker.store.queues[topic, placed.queue_id], placed.queue_offset
    ).topic, placed.queue_id


def _topic_shrunk(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 1, 1), 0)


def _topic_deleted(node: Node) -> None:
    node.broker.topics.delete("t", node.broker.store.end)
    node.broker.store.delete_topic("t")


def _another_topic_made(node: Node) -> None:
    node.broker.topics.put(TopicConfig("another", 1, 1), 0)


def _settings_changed(node: Node) -> None:
    node.broker.settings.change(node.broker.settings.now)


CHANGES: dict[str, Callable[[Node], None]] = {
    "a topic has fewer queues": _topic_shrunk,
    "a topic is deleted": _topic_deleted,
    "another topic is made": _another_topic_made,
    "settings change": _settings_changed,
}


async def test_the_next_sends_to_a_queue_are_not_checked_again(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 2, 2), 0)
    checks = Checks(node)
    assert [sent(node, queue=queue) for queue in (0, 1, 0, 1, 0)] == [("t", queue) for queue in (0, 1, 0, 1, 0)]
    assert checks.count == 2


async def test_a_choice_that_is_left_to_the_broker_is_made_each_time(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 8, 8), 0)
    checks = Checks(node)
    assert len({sent(node, queue=-1) for _ in range(50)}) > 1
    assert checks.count == 50


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_raises_the_number_and_the_next_send_is_checked(node: Node, change: str) -> None:
    node.broker.topics.put(TopicConfig("t", 2, 2), 0)
    checks = Checks(node)
    for _ in range(3):
        assert sent(node, queue=1) == ("t", 1)
    generation = node.broker.generation.number
    assert checks.count == 1
    CHANGES[change](node)
    assert node.broker.generation.number > generation
    sent(node, queue=1)
    assert checks.count == 2


async def test_a_broker_remembers_as_many_queues_as_the_limit_says(node: Node) -> None:
    checks = Checks(node)
    for topic in "tu":
        node.broker.topics.put(TopicConfig(topic, 1, MAX_CHECKED_SENDS), 0)
    for queue in range(MAX_CHECKED_SENDS):
        sent(node, queue=queue)
    assert sent(node, queue=0) == ("t", 0)
    assert checks.count == MAX_CHECKED_SENDS, "the first one is remembered"
    assert sent(node, "u") == ("u", 0)
    assert sent(node, queue=1) == ("t", 1)
    assert checks.count == MAX_CHECKED_SENDS + 2, "those of before are forgotten"


class Anew(set[Any]):
    """Remembers nothing."""

    def add(self, element: Any) -> None: ...


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_remembered_changes_no_answer(nodes: Nodes, seed: int) -> None:
    """The same changes and sends, in any order, on a broker that remembers and on one that checks each send."""
    chance = random.Random(seed)
    both = [await nodes.start(name="broker-a"), await nodes.start(name="broker-a", data_dir=nodes.folder / "other")]
    both[1].broker.sending._checked = Anew()
    checks = [Checks(node) for node in both]
    for _ in range(300):
        topic, queue = chance.choice(TOPICS), chance.choice((0, 0, 1, 2, 7))
        act = chance.randrange(20)
        if act == 0 and topic in "tu":
            config = TopicConfig(topic, chance.randrange(1, 4), chance.randrange(1, 4))
            for node in both:
                node.broker.topics.put(config, node.broker.store.end)
        elif act == 1 and both[0].broker.topics.get(topic) and topic in "tu":
            for node in both:
                node.broker.topics.delete(topic, node.broker.store.end)
                node.broker.store.delete_topic(topic)
        else:
            found = [sent(node, topic, queue) for node in both]
            assert found[0] == found[1]
    assert checks[0].count < checks[1].count


# A batch that is too long for one turn is known as such before any of its records is made.


def batch(messages: int, body: bytes = b"x") -> bytes:
    return encode_batch([(0, body, "")] * messages)


def test_a_batch_of_the_most_messages_is_short() -> None:
    pieces = _pieces_of_short(batch(BATCH_TURN_MESSAGES), b"")
    assert sum(len(piece.flags) for piece in pieces) == BATCH_TURN_MESSAGES


@pytest.mark.parametrize("body", [batch(BATCH_TURN_MESSAGES + 1), batch(1, bytes(BATCH_TURN_BYTES))])
def test_a_longer_one_is_refused_immediately(body: bytes) -> None:
    with pytest.raises(LongBatch):
        _pieces_of_short(body, b"")


# Request-reply: a reply reaches the client that waits for it, or its sender learns that it did not.


async def test_a_reply_is_pushed_to_who_waits_and_kept(node: Node, wire: Wire, connect: Connect) -> None:
    waiting = await connect(node.address)
    body = bodies.encode_heartbeat(Heartbeat("me", producer_groups=("p",)))
    await waiting.call(RequestCode.HEART_BEAT, body=body)
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    pushed = await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    assert pushed.body == b"pong"
    assert "CORRELATION_ID\x01c1" in str(pushed.ext["properties"])
    assert str(pushed.ext["storeHost"]) == node.address
    waiting.write_answer(pushed)
    answer = await wire.answer(opaque)
    assert (answer.code, len(str(answer.ext["msgId"]))) == (0, 32)
    assert node.broker.store.queue("DefaultCluster_REPLY_TOPIC", 0).next == 1


async def test_the_sender_learns_that_nobody_took_the_reply(node: Node, wire: Wire, connect: Connect) -> None:
    answer = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody"), b"x")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "nobody" in (answer.remark or "")
    waiting = await connect(node.address)
    body = bodies.encode_heartbeat(Heartbeat("me", producer_groups=("p",)))
    await waiting.call(RequestCode.HEART_BEAT, body=body)
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"x")
    await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    await waiting.close()
    gone: Frame = await wire.answer(opaque)
    assert gone.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_reply_is_limited_as_any_message(node: Node, wire: Wire, excess: int) -> None:
    body = bytes(MAX_BODY_BYTES + excess)
    answer = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody"), body)
    assert answer.code == (ResponseCode.MESSAGE_ILLEGAL if excess else ResponseCode.SYSTEM_ERROR)
    assert node.broker.store.end == 0 or not excess
    long = {"i": f"REPLY_TO_CLIENT\x01nobody\x02A\x01{'x' * MAX_PROPERTY_BYTES}"}
    assert (
        await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody") | long)
    ).code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.limits(max_asked=3)
async def test_replies_to_a_client_that_never_answers_take_nobody_elses_places(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """One account without rights took all 10,000 places for 10 s."""
    silent, waiting, hostile = [await connect(node.address) for _ in range(3)]
    for client, name in ((silent, "silent"), (waiting, "me")):
        body = bodies.encode_heartbeat(Heartbeat(name, producer_groups=("p",)))
        await client.call(RequestCode.HEART_BEAT, body=body)
    connections = node.server.connections
    held = {connection: connection.charged_bytes for connection in connections}
    for _ in range(3):
        hostile.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("silent"), b"x")
    refused = await hostile.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"x")
    assert (refused.code, "of this client are waiting" in (refused.remark or "")) == (1, True)
    refused = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("silent"), b"x")
    assert (refused.code, "has not answered" in (refused.remark or "")) == (1, True)
    more = [connection.charged_bytes - held.get(connection, 0) for connection in connections]
    assert sorted(more) == [0, 0, 0, 3 * ASKED_BYTES]
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    assert (await wire.answer(opaque)).code == 0
    node.clock.advance(CLIENT_ANSWER_S)
    await eventually(lambda: {connection: connection.charged_bytes for connection in connections} == held)
    opaque = hostile.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    assert (await hostile.answer(opaque)).code == 0
