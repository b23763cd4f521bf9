"""Bytes on a socket that were made to hurt: the others must not notice, and nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import struct
import time
import zlib
from typing import Any

import msgpack
import orjson
import pytest
import structlog
from rocketlet.broker.store.files import write_state
from rocketlet.protocol import bodies
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.message import decode_record, decode_records, encode_record
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ...support import forged
from ...support.peers import Peer
from ...support.requests import bodies_of, pull, raw_frame, send, send_v2
from ...support.turns import give_no_turn


def huge_opaque(serialize_type: int) -> bytes:
    """A send that is refused, with a number that no answer can carry."""
    ext = send_v2(b="no topic")
    if serialize_type == MSGPACK:
        header = msgpack.packb((310, 0, 2**63 + 1, 12, 0, None, ext))
    else:
        fields = {"code": 310, "flag": 0, "language": "JAVA", "version": 0, "extFields": ext}
        header = orjson.dumps(fields)[:-1] + b',"opaque":"%d"}' % 10**30
    return raw_frame(header, b"never", serialize_type)


@pytest.mark.parametrize("serialize_type", [JSON, MSGPACK])
async def test_answers_go_only_to_the_connection_that_asked(
    wire: Wire, connect: Connect, node: Node, serialize_type: int
) -> None:
    await create_topic(wire, "t")
    hostile = await connect(node.address)
    valid = encode(Frame(RequestCode.SEND_MESSAGE_V2, 3, send_v2(), b"first"))  # 3: a number of the victim
    hostile.write(valid + huge_opaque(serialize_type))  # in one read
    assert (await hostile.answer(3)).code == 0, "what came before is served"
    assert await hostile.closed()
    for body in (b"a", b"b", b"c"):
        answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), body)
        offset = int(answer.ext["queueOffset"])
        found = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset, max_msg_nums=1))
        assert [record.body for record in decode_records(found.body)] == [body], "the answer is of this message"


@pytest.mark.parametrize("field", ["code", "opaque", "flag", "version"])
@pytest.mark.parametrize("value", [b"2147483648", b"-2147483649", b'"1e3"', b"[]", b"1.5"])
async def test_numbers_of_a_header_have_32_bits(node: Node, connect: Connect, field: str, value: bytes) -> None:
    hostile = await connect(node.address)
    fields = {"code": b"310", "opaque": b"1", "flag": b"0", "version": b"0"} | {field: value}
    hostile.write(raw_frame(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), text) for name, text in fields.items())))
    assert await hostile.closed()


GBK = "\u4e2d".encode("gbk")
UNCLEAN = {  # a property's value in a JSON header, and how it is stored
    "gbk": (GBK, "\ufffd\ufffd"),
    "lone surrogate": (rb"\ud800", "?"),
    "control character": (b"\x01", "\x01"),
}


def json_header(code: int, opaque: int, ext: bytes) -> bytes:
    return raw_frame(b'{"code":%d,"opaque":%d,"language":"JAVA","extFields":{%b}}' % (code, opaque, ext), b"body")


def binary_header(code: int, opaque: int, ext: dict[bytes, bytes]) -> bytes:
    fields = b"".join(
        len(key).to_bytes(2, "big") + key + len(value).to_bytes(4, "big") + value for key, value in ext.items()
    )
    head = struct.pack(">hBhiiii", code, 0, 0, opaque, 0, 0, len(fields))
    return raw_frame(head + fields, b"body", ROCKETMQ)


@pytest.mark.parametrize("kind", UNCLEAN)
async def test_a_json_header_whose_text_is_not_clean_is_read_as_apache_reads_it(wire: Wire, kind: str) -> None:
    await create_topic(wire, "t")
    value, stored = UNCLEAN[kind]
    ext = b",".join(b'"%b":"%b"' % (key.encode(), str(text).encode()) for key, text in send_v2().items() if key != "i")
    wire.write(json_header(RequestCode.SEND_MESSAGE_V2, 70, ext + rb',"i":"a\u0001' + value + b'"'))
    wire.write(encode(Frame(RequestCode.SEND_MESSAGE_V2, 71, send_v2(), b"clean")))
    assert [(await wire.answer(opaque)).code for opaque in (70, 71)] == [0, 0]
    records = decode_records((await wire.call(RequestCode.PULL_MESSAGE, pull())).body)
    first, second = records
    assert (second.body, first.body) == (b"clean", b"body")
    assert f"a\x01{stored}" in first.properties


async def test_a_binary_header_that_is_no_utf8_is_read_as_apache_reads_it(wire: Wire) -> None:
    await create_topic(wire, "t")
    ext = {key.encode(): str(text).encode() for key, text in send_v2().items()}
    for opaque in (70, 71, 72):  # the layout of the first one is known for the others
        properties = b"a\x01" + GBK if opaque < 72 else b"a\x01bc"
        wire.write(binary_header(RequestCode.SEND_MESSAGE_V2, opaque, ext | {b"i": properties, GBK: GBK}))
    assert [(await wire.answer(opaque)).code for opaque in (70, 71, 72)] == [0, 0, 0]
    records = decode_records((await wire.call(RequestCode.PULL_MESSAGE, pull())).body)
    assert [record.properties[:4] for record in records] == ["a\x01\ufffd\ufffd", "a\x01\ufffd\ufffd", "a\x01bc"]


UNREADABLE_FIELDS = {
    "nested": b'"a":' + b"[" * 3000 + b"]" * 3000,
    "nested beside": b'},"x":{"a":' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
    "a list": b'},"extFields":["a"],"x":{',
    "no JSON": b"a",
}


@pytest.mark.parametrize("kind", [*UNREADABLE_FIELDS, "binary"])
async def test_a_request_whose_fields_cannot_be_read_is_refused_and_its_connection_stays(wire: Wire, kind: str) -> None:
    for code in RequestCode:
        if kind == "binary" and code < 2**15:
            data = binary_header(code, 1000 + code, {b"topic": b"t"})
            wire.write(data[:-9] + b"\x7f\xff\xff\xff" + data[-5:])  # the size of the value
        elif kind != "binary":
            wire.write(json_header(code, 1000 + code, UNREADABLE_FIELDS[kind]))
        else:
            continue
        refusal = await wire.answer(1000 + code)
        assert refusal.code == ResponseCode.SYSTEM_ERROR
        assert "the fields of the header cannot be read" in str(refusal.remark)
    await create_topic(wire, "t")


@pytest.mark.parametrize("serialize_type", [JSON, ROCKETMQ])
async def test_unclean_texts_close_no_connection_whatever_is_asked(wire: Wire, serialize_type: int) -> None:
    names = ("topic", "b", "consumerGroup", "group", "clientID", "producerGroup", "brokerName", "groupName", "key")
    codes = [code for code in RequestCode if serialize_type == JSON or code < 2**15]
    for code in codes:
        if serialize_type == JSON:
            ext = b",".join(b'"%b":"%b"' % (name.encode(), b"\\ud800\x01" + GBK) for name in names)
            wire.write(json_header(code, 1000 + code, ext))
        else:
            wire.write(binary_header(code, 1000 + code, {name.encode(): GBK for name in names}))
    for code in codes:
        assert "invalid continuation" not in str((await wire.answer(1000 + code)).remark)
    await create_topic(wire, "t")


async def test_what_a_failed_request_staged_is_not_stored(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    appender = node.broker.appender
    stage_batch = appender.stage_batch

    def failing(*args: Any) -> Any:
        stage_batch(*args)
        raise RuntimeError("planted")

    monkeypatch.setattr(appender, "stage_batch", failing)
    batch = b"".join(raw_batch_entry(body) for body in (b"one", b"two", b"three"))
    assert (await wire.call(RequestCode.SEND_BATCH_MESSAGE, send_v2(m=True), batch)).code == ResponseCode.SYSTEM_ERROR
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"next")
    assert (answer.code, int(answer.ext["queueOffset"])) == (0, 0)
    assert await bodies_of(wire) == [b"next"]


def raw_batch_entry(body: bytes) -> bytes:
    size = 22 + len(body)
    return b"".join(number.to_bytes(4, "big") for number in (size, 0, 0, 0, len(body))) + body + b"\0\0"


async def test_a_defect_in_a_handler_closes_only_its_connection(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    hostile = await connect(node.address)

    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(node.broker.client_requests, "answer", broken)
    send = encode(Frame(RequestCode.SEND_MESSAGE_V2, 1, send_v2(), b"first"))
    hostile.write(send + encode(Frame(0, 7, flag=1)))
    with pytest.raises((ConnectionError, TimeoutError)):
        await hostile.answer(99)
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"mine")
    assert int(answer.ext["queueOffset"]) == 1
    assert await bodies_of(wire) == [b"first", b"mine"]


BAD_NAMES = ["a/../../x", "a\0b", "..", "x" * 121, "a b", "ä"]


async def created_by(wire: Wire, name: str) -> list[Frame]:
    """Answers to every request that could make a group or a topic of this name."""
    await create_topic(wire, "t")
    await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"x")
    config = {"groupName": name, "retryQueueNums": 1}
    beat = {"clientID": "c", "consumerDataSet": [{"groupName": name}]}
    topic = {"topic": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    offset = {"consumerGroup": name, "topic": "t", "queueId": 0, "commitOffset": 0}
    back = {"offset": 0, "group": name, "delayLevel": 1}
    return [
        await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back),
        await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"delayLevel": -1}),
        await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=orjson.dumps(config)),
        await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat)),
        await wire.call(RequestCode.PULL_MESSAGE, pull(consumer_group=name)),
        await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, offset),
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, topic | {"topic": "%RETRY%" + name}),
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(b="%RETRY%" + name), b"x"),
    ]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_no_request_makes_a_topic_or_group_with_a_name_that_no_folder_can_have(
    nodes: Nodes, connect: Connect, name: str
) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    answers = await created_by(await connect(node.address), name)
    assert [answer.code for answer in answers if answer.code == 0] == []
    await node.stop()
    assert sorted(path.name for path in nodes.folder.iterdir()) == ["broker-a"], "nothing is written outside"
    again = await nodes.start(delay_levels_ms=(5,) * 18)
    assert name not in [group.name for group in again.broker.group_configs]


async def test_a_group_whose_retry_topic_is_just_short_enough_works(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    wire = await connect(node.address)
    name = "x" * 120
    answers = await created_by(wire, name)
    assert [answer.code for answer in answers] == [0, 0, 0, 0, 0, 0, 0, 0]
    await eventually(lambda: node.broker.store.queue("%RETRY%" + name, 0).next == 2)
    assert await bodies_of(wire, "%RETRY%" + name) == [b"x", b"x"]


async def test_names_that_are_illegal_in_an_old_folder_are_left_out(nodes: Nodes) -> None:
    node = await nodes.start()
    await node.stop()
    folder = node.config.data_dir
    write_state(folder / "groups.json", [{"groupName": "a\0b"}, {"groupName": "good"}])
    names = ("../../x", "good")
    write_state(folder / "topics.json", {"topics": [{"topicName": name, "since": 0, "identity": ""} for name in names]})
    again = await nodes.start()
    assert [group.name for group in again.broker.group_configs] == ["good"]
    assert again.broker.topics.get("good")
    assert again.broker.topics.get("../../x") is None


async def test_one_delayed_message_that_cannot_be_delivered_does_not_stop_its_level(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(delay_levels_ms=(100, 200))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    read, broken = node.broker.store.message, []

    def failing(queue: Any, offset: int) -> Any:
        if offset == 0:
            broken.append(offset)
            raise ValueError("planted")
        return read(queue, offset)

    monkeypatch.setattr(node.broker.store, "message", failing)
    for body in (b"bad", b"good"):
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i="DELAY\x011"), body)
    await eventually(lambda: node.broker.store.queue("t", 0).next == 1)
    assert await bodies_of(wire) == [b"good"]
    assert (node.broker.delays.set_aside, broken) == (1, [0])


async def test_a_delay_level_continues_after_any_failure(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    commit = node.broker.appender.commit
    failures: list[int] = []

    def failing() -> None:
        if not failures:
            failures.append(1)
            raise RuntimeError("planted")
        commit()

    await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i="DELAY\x011"), b"one")
    monkeypatch.setattr(node.broker.appender, "commit", failing)
    node.clock.advance(1)
    assert failures == [1]
    await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i="DELAY\x011"), b"two")
    node.clock.advance(2)
    assert sorted(await bodies_of(wire)) == [b"one", b"two"]


async def test_a_held_pull_that_fails_hurts_only_its_own_connection(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    reader = await connect(node.address)
    reader.send(RequestCode.PULL_MESSAGE, pull(flags=6))
    await eventually(lambda: any(node.broker.held_pulls.of(item) for item in node.server.connections))

    def broken(*args: Any, **fields: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(node.broker.store, "fetch", broken)
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"x")
    assert (answer.code, int(answer.ext["queueOffset"])) == (0, 0)
    assert await reader.closed()


REGISTER = {
    "brokerName": "b", "brokerAddr": "10.0.0.1:1", "clusterName": "c", "haServerAddr": "", "brokerId": 0,
    "compressed": "true",
}  # fmt: skip


def part(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


PROMISES: list[tuple[bytes, str]] = [
    (part(b"{}") + b"\xff\xff\xff\xff", "4294967295 parts in 0 bytes"),
    (part(b"{}") + b"\0\0\0\2" + part(b"t 1 1 6"), "4 bytes at byte 21 of 21"),
    (b"\xff\xff\xff\xff{}", "4294967295 bytes"),
    (part(b"{}") + b"\0\0\0\1" + part(b"t 1"), "cannot be read"),
    (part(b"[1]") + b"\0\0\0\0", "cannot be read"),
    (part(b"no json") + b"\0\0\0\0", "cannot be read"),
    (bytes(16_777_217), "inflates to more than 16777216"),
    (b"", "0 bytes"),
]


async def test_a_registration_that_promises_more_than_it_has_is_refused(wire: Wire) -> None:
    for plain, remark in PROMISES:
        answer = await wire.call(RequestCode.REGISTER_BROKER, REGISTER, zlib.compress(plain))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        if plain:
            assert remark in (answer.remark or "")
        cut = await wire.call(RequestCode.REGISTER_BROKER, REGISTER, zlib.compress(plain)[:-5])
        assert cut.code == ResponseCode.SYSTEM_ERROR


async def test_a_compressed_registration_may_be_as_large_as_a_frame(wire: Wire) -> None:
    plain = part(b"{}") + b"\0\0\0\1" + part(b"t 1 1 6 ")
    plain = part(b"{" + b" " * (16_777_216 - len(plain)) + b"}") + plain[6:]
    assert len(plain) == 16_777_216
    assert (await wire.call(RequestCode.REGISTER_BROKER, REGISTER, zlib.compress(plain))).code == 0


@pytest.mark.parametrize("text", [b" " * 1_000_000 + b'"', b'"\\' * 500_000, b'{"a":' * 100_000, b"[" * 1_000_000])
def test_text_that_is_no_json_costs_its_length_once(text: bytes) -> None:
    with pytest.raises(bodies.JsonError):  # work that grew with the square took hours
        bodies.loads(text)


async def test_a_position_inside_of_a_message_is_no_message(
    wire: Wire, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    fake = b"\x7f\xff\xff\xff" + b"\xda\xa3\x20\xa7" + bytes(100)
    await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), fake)
    reads: list[int] = []
    position = node.broker.store.read_log(0, 1000).index(fake)
    read_at = os.pread

    def counted(descriptor: int, size: int, position: int) -> bytes:
        reads.append(size)
        return read_at(descriptor, size, position)

    monkeypatch.setattr("rocketlet.broker.store.disk.read_at", counted)
    assert (await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": position})).code == ResponseCode.SYSTEM_ERROR
    back = {"offset": position, "group": "g", "delayLevel": 1}
    assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SYSTEM_ERROR
    assert max(reads) <= 36


async def test_a_half_message_is_ended_only_where_it_lies(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t")
    half = send_v2(i="TRAN_MSG\x01true\x02PGROUP\x01p", f=4)
    found = await wire.call(RequestCode.SEND_MESSAGE_V2, half, b"real")
    position, offset = node.broker.store.queue("RMQ_SYS_TRANS_HALF_TOPIC", 0).entry(0)[0], 0
    forged_at = node.broker.store.end + 88  # where the body of the next record begins
    record = encode_record(
        0, 0, offset, forged_at, 4, 1, bytes(8), 1, bytes(8), 0, 0, b"forged",
        bytes((24,)) + b"RMQ_SYS_TRANS_HALF_TOPIC",
        b"PGROUP\x01p\x02REAL_TOPIC\x01t\x02REAL_QID\x010",
    )  # fmt: skip
    await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(e=1), record)
    assert node.broker.store.record_at(forged_at) is None, "the body is a record, if one believes it"
    end = {
        "producerGroup": "p", "tranStateTableOffset": offset, "commitLogOffset": forged_at, "commitOrRollback": 8,
    }  # fmt: skip
    assert (await wire.call(RequestCode.END_TRANSACTION, end)).code == ResponseCode.SYSTEM_ERROR
    assert (await wire.call(RequestCode.END_TRANSACTION, end | {"commitLogOffset": position})).code == 0
    assert await bodies_of(wire) == [b"real"]
    assert found.code == 0


async def test_queue_counts_of_topics_are_limited_at_their_edge(wire: Wire) -> None:
    ext = {"topic": "t", "readQueueNums": 4096, "writeQueueNums": 4096, "perm": 7}
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0
    for field, value in (
        ("readQueueNums", 4097), ("writeQueueNums", 10**9), ("readQueueNums", -1), ("writeQueueNums", -1), ("perm", 8),
        ("perm", -1), ("topicSysFlag", 2**31), ("topicSysFlag", -1),
    ):  # fmt: skip
        answer = await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext | {field: value})
        assert (answer.code, "is not between 0 and" in (answer.remark or "")) == (1, True), field
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(e=-1), b"x")).code == 0


async def test_settings_of_groups_are_limited_at_their_edge(wire: Wire, node: Node) -> None:
    good = {"groupName": "g", "retryQueueNums": 64, "retryMaxTimes": 1_000_000}
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=orjson.dumps(good))).code == 0
    for field, value in (
        ("retryQueueNums", 65), ("retryQueueNums", 30_000_000), ("retryQueueNums", -1), ("retryMaxTimes", 1_000_001),
        ("retryMaxTimes", -2), ("brokerId", -2), ("whichBrokerWhenConsumeSlowly", -2),
    ):  # fmt: skip
        body = orjson.dumps(good | {field: value})
        answer = await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        assert (answer.code, f"{field}: got '{value}'; expected " in (answer.remark or "")) == (1, True), field
    beat = {"clientID": "c", "consumerDataSet": [{"groupName": "g"}]}
    assert (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat))).code == 0
    assert node.broker.topics.queues_of("%RETRY%g") == 64


EDGES: list[tuple[bytes, bytes]] = [
    (b"defaultTopicQueueNums=4096", b"defaultTopicQueueNums=4097"),
    (b"defaultTopicQueueNums=1", b"defaultTopicQueueNums=0"),
    (b"defaultTopicQueueNums=8", b"defaultTopicQueueNums=" + b"9" * 5000),
    (b"fileReservedTime=876000", b"fileReservedTime=nan"),
    (b"fileReservedTime=0", b"fileReservedTime=-1"),
    (b"fileReservedTime=72", b"fileReservedTime=inf"),
    (b"transactionTimeOut=86400000", b"transactionTimeOut=86400001"),
    (b"transactionTimeOut=0", b"transactionTimeOut=-1"),
    (b"transactionTimeOut=1", b"transactionTimeOut=1" + b"0" * 400),
    (b"brokerPermission=7", b"brokerPermission=8"),
    (b"brokerPermission=0", b"brokerPermission=-1"),
]


async def test_settings_of_the_broker_are_limited_at_their_edge(wire: Wire) -> None:
    for good, bad in EDGES:
        assert (await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=good)).code == 0
        assert (await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=bad)).code == ResponseCode.SYSTEM_ERROR
        assert good in (await wire.call(RequestCode.GET_BROKER_CONFIG)).body
        assert (await wire.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "TBW102"})).code == 0


async def test_settings_that_are_too_large_in_an_old_folder_are_left_out(nodes: Nodes) -> None:
    node = await nodes.start()
    await node.stop()
    folder = node.config.data_dir
    write_state(folder / "groups.json", [{"groupName": "g", "retryQueueNums": 30_000_000}])
    topic = {"topicName": "t", "readQueueNums": 60_000, "since": 0, "identity": ""}
    write_state(folder / "topics.json", {"topics": [topic]})
    again = await nodes.start()
    assert list(again.broker.group_configs) == []
    assert again.broker.topics.get("t") is None


@pytest.mark.parametrize("count", [65_536, 65_537, 10**9, -1])
async def test_a_name_server_believes_no_broker_with_more_queues_than_can_be(wire: Wire, count: int) -> None:
    topic = {"topicName": "far", "readQueueNums": count, "writeQueueNums": 1}
    plain = orjson.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": {"far": topic}}})
    answer = await wire.call(RequestCode.REGISTER_BROKER, REGISTER | {"compressed": "false"}, plain)
    line = part(b"{}") + b"\0\0\0\1" + part(b"far 1 %d 6 SINGLE_TAG" % count)
    compressed = await wire.call(RequestCode.REGISTER_BROKER, REGISTER, zlib.compress(line))
    assert [answer.code == 0, compressed.code == 0] == [count == 65_536] * 2


async def test_a_query_of_an_index_gets_1024_entries_at_most(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(11):
        batch = b"".join(raw_batch_entry(b"x") for _ in range(100))
        assert (await wire.call(RequestCode.SEND_BATCH_MESSAGE, send_v2(m=True), batch)).code == 0
    for index, count, expected in (
        (0, 2**40, 1024),
        (0, 1024, 1024),
        (1090, 100, 10),
        (-5, 10, 5),
        (2**40, 1, 0),
        (0, -1, 0),
    ):
        ext = {"topic": "t", "queueId": 0, "index": index, "count": count}
        found = orjson.loads((await wire.call(RequestCode.QUERY_CONSUME_QUEUE, ext)).body)["queueData"]
        assert len(found) == expected, (index, count)


async def test_one_half_message_with_an_odd_property_does_not_keep_the_others_from_being_checked(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start(transaction_timeout_s=0.0, transaction_check_interval_s=0.01)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    beat = {"clientID": "c", "producerDataSet": [{"groupName": "p"}]}
    assert (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat))).code == 0
    odd = "CHECK_IMMUNITY_TIME_IN_SECONDS\x01" + "9" * 5000 + "\x02TRAN_MSG\x01true\x02PGROUP\x01p"
    for properties, body in ((odd, b"odd"), ("TRAN_MSG\x01true\x02PGROUP\x01p", b"plain")):
        ext = send_v2(i=properties, g=int(time.time() * 1000))
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, ext, body)).code == 0
    async with asyncio.timeout(PATIENCE_S):  # the odd one may be checked several times before the plain one is there
        while b"plain" not in (await wire.request(RequestCode.CHECK_TRANSACTION_STATE)).body:
            pass


@pytest.mark.parametrize(
    "odd",
    [
        {"queueCounts": {"broker-a": [1]}},
        {"queueCounts": {"broker-a": {"t": "x"}}},
        {"queueCounts": [1]},
        {"allocateStrategy": {}},
        {"allocateStrategy": ["AVG"]},
        {"assigned": [["t"]]},
        {"assigned": [["t", "broker-a", 2**63]]},
        {"subscriptionDataSet": [{"topic": ["t"]}]},
        {"subscriptionDataSet": [{"topic": "t", "expressionType": ["SQL92"]}]},
        {"subscriptionDataSet": [{"topic": "t", "subVersion": 2**64 - 1}]},
    ],
)
async def test_an_odd_heartbeat_hurts_no_honest_member(
    wire: Wire, connect: Connect, node: Node, odd: dict[str, Any]
) -> None:
    await create_topic(wire, "t")
    hostile = await connect(node.address)
    body = orjson.dumps({"clientID": "odd", "consumerDataSet": [{"groupName": "g"} | odd]})
    answer = await hostile.call(RequestCode.HEART_BEAT, body=body)
    assert (answer.code, "heartbeat body cannot be read" in (answer.remark or "")) == (1, True)
    good = {"groupName": "g", "subscriptionDataSet": [{"topic": "t"}], "queueCounts": {"broker-a": {"t": 4}}}
    beat = {"clientID": "honest", "consumerDataSet": [good]}
    for _ in range(2):
        assert (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat))).code == 0
    members = orjson.loads((await wire.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})).body)
    assert members["consumerIdList"] == ["honest"]


@pytest.mark.parametrize("code", [RequestCode.GET_MAX_OFFSET, RequestCode.SEND_MESSAGE_V2])
async def test_the_requests_of_one_read_take_turns_with_those_of_others(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    await create_topic(wire, "t")
    give_no_turn(monkeypatch, node)
    monkeypatch.setattr("rocketlet.broker.remoting.dispatch.PIECE_S", 0.0)
    greedy = await connect(node.address)
    await greedy.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
    ext = {"topic": "t", "queueId": 0, **send_v2()}
    first = greedy._opaque + 1
    greedy.write(b"".join(encode(Frame(code, first + number, ext, b"%d" % number)) for number in range(3000)))
    await greedy._writer.drain()
    await eventually(lambda: not all(connection.is_reading for connection in node.server.connections))
    await wire.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
    assert not all(connection.is_reading for connection in node.server.connections), "others did not wait for all of it"
    monkeypatch.undo()
    answers = [await greedy.answer(first + number) for number in range(3000)]
    assert {answer.code for answer in answers} == {0}
    if code == RequestCode.SEND_MESSAGE_V2:
        assert [int(answer.ext["queueOffset"]) for answer in answers] == list(range(3000)), "in their order"


@pytest.mark.parametrize("offset", [2**63, -(2**63) - 1, 10**30])
async def test_numbers_of_a_request_have_64_bits(wire: Wire, offset: int) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset))
    assert (answer.code, "queueOffset" in (answer.remark or "")) == (1, True)


async def test_a_client_that_repeats_what_is_refused_does_not_fill_the_log(node: Node, wire: Wire) -> None:
    """An event is logged once for an address in ten minutes, whatever the request; the answers are the same."""
    odd: list[tuple[int, dict[str, Any]]] = [
        (RequestCode.UPDATE_CONSUMER_OFFSET, {"consumerGroup": "g", "topic": "no", "queueId": 1, "commitOffset": 0}),
        (RequestCode.UNREGISTER_BROKER, registration_ext(node)),
        (RequestCode.END_TRANSACTION, {
            "producerGroup": "p", "tranStateTableOffset": 1, "commitLogOffset": 0, "commitOrRollback": 8, "msgId": "x",
        }),
    ]  # fmt: skip
    with structlog.testing.capture_logs() as logs:
        codes = {(await wire.call(code, ext)).code for code, ext in odd for _ in range(5)}
        for _ in range(5):
            peer = Peer(node.server, 5000)
            peer.send(b"\0\0\0\1no frame")
            peer.hang_up()
    assert 0 not in codes
    events = [item["event"] for item in logs if item["log_level"] in ("warning", "error")]
    assert sorted(events) == sorted(set(events))
    assert {"commit_refused", "registration_refused", "connection_closed_not_a_frame"} <= set(events)


def registration_ext(node: Node) -> dict[str, Any]:
    return {"brokerName": "broker-a", "brokerAddr": node.address, "clusterName": "c", "brokerId": 0}


# A place in the log that a client names is answered only if an index names it: bodies may look like records.


async def test_a_record_in_a_body_has_no_id(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    await create_topic(wire, "u")
    await send(wire, b"real", topic="u")
    at = node.broker.store.end + forged.HEAD_BYTES
    await send(wire, forged.next_body(node.broker.store, b"FORGED"))
    forgery = decode_record(node.broker.store.read_log(at, node.broker.store.end - at))
    assert forgery.physical_offset == at, "the body is a record, if one believes it"
    answer = await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert (answer.code, answer.body) == (ResponseCode.SYSTEM_ERROR, b"")


async def test_a_record_in_a_body_cannot_be_sent_back(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    at = node.broker.store.end + forged.HEAD_BYTES
    await send(wire, forged.next_body(node.broker.store, b"FORGED"))
    back = {"offset": at, "group": "g", "delayLevel": -1, "originMsgId": "", "originTopic": "u", "unitMode": False}
    assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("topic", ["t", "u"])
async def test_a_message_is_found_where_an_index_has_it(node: Node, wire: Wire, topic: str) -> None:
    await create_topic(wire, topic)
    at = node.broker.store.end
    await send(wire, b"real", topic=topic)
    answer = await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert decode_record(answer.body).body == b"real"
    node.broker.store.delete_topic(topic)
    assert (await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})).code == ResponseCode.SYSTEM_ERROR


async def test_a_message_damaged_while_the_broker_runs_is_skipped_and_named(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    for number in range(5):
        await send(wire, b"message-%d" % number)
    (segment,) = (node.broker.config.data_dir / "commitlog").iterdir()
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"message-2", b"massage-2"))
    with capture_logs() as logs:
        assert await bodies_of(wire) == [b"message-0", b"message-1", b"message-3", b"message-4"]
        assert await bodies_of(wire) == [b"message-0", b"message-1", b"message-3", b"message-4"]
    found = [(log["topic"], log["queue"], log["offset"]) for log in logs if log["event"] == "damaged_message_skipped"]
    assert found == [("t", 0, 2)]
    assert node.broker.store.damaged == {("t", 0, 2)}
