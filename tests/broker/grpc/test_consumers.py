"""Receives, acknowledgements and changes, as official clients ask for them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rocketlet.broker.config import (
    CLIENT_GONE_S,
    DEAD_LETTER_RETRY_S,
    MAX_ACKS,
    MAX_INVISIBLE_MS,
    MAX_POLL_S,
    MIN_INVISIBLE_MS,
    RECEIVE_AGAIN_S,
    RENEWED_INVISIBLE_MS,
    LimitExceeded,
)
from rocketlet.broker.grpc import consuming, schema
from rocketlet.broker.grpc.conversion import filling
from rocketlet.client import AdminClient, Producer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, Work
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.http2 import encode_reset
from rocketlet.protocol.message import Record, decode_record, decode_records
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, eventually
from ...support.grpc_client import CLIENT, GrpcClient, message, resource, sending
from ...support.metrics import samples
from ...support.requests import beat, pop, popped, pull, send_v2
from ...support.topics import put, stored
from .conftest import Dial
from .lite import PARENT
from .lite import send as send_lite
from .receives import ILLEGAL_HANDLE, NOTHING, OK, ack, begin, change, handles, joined, receive, received, request, send


@pytest.fixture
async def node(nodes: Nodes) -> Node:
    node = await nodes.start(clock=MovableClock(stands=True))
    node.broker.topics.put(TopicConfig("t", 2, 2), node.broker.store.end)
    return node


# Receiving


async def test_a_message_comes_as_it_was_sent(client: GrpcClient) -> None:
    await joined(client)
    sent = message("t", b"hello", message_id="01AB", tag="blue", keys=["k1", "k2"], message_group="mg")
    sent.user_properties["color"] = "grün"
    await client.call("SendMessage", sending(sent))
    (found,) = await receive(client)
    system = found.system_properties
    properties = {"color": "grün", "__SHARDINGKEY": "mg"}
    assert (found.topic.name, found.body, dict(found.user_properties)) == ("t", b"hello", properties)
    assert (system.message_id, system.tag, list(system.keys)) == ("01AB", "blue", ["k1", "k2"])
    assert (system.message_group, system.message_type) == ("mg", 2)
    assert (system.body_encoding, system.body_digest.type) == (1, 2)
    assert system.body_digest.checksum == "5D41402ABC4B2A76B9719D911017C592"
    assert (system.delivery_attempt, system.queue_offset) == (1, 0)
    assert system.receipt_handle
    assert system.born_host.startswith("127.0.0.1:")


async def test_what_the_other_protocol_server_takes_comes_without_its_compression(
    node: Node, client: GrpcClient
) -> None:
    await joined(client)
    body = b"x" * 10_000
    async with Producer(node.address) as producer:
        await producer.send("t", body, tag="a", keys="k")
    (found,) = await receive(client)
    assert (found.body, found.system_properties.body_encoding) == (body, 1)
    assert (found.system_properties.tag, list(found.system_properties.keys)) == ("a", ["k"])


async def test_digest_and_crc_are_those_of_the_body_in_each_form(
    node: Node, client: GrpcClient, connect: Connect
) -> None:
    """Clients of 5.x drop a message whose digest is not that of the body as they get it; BODYCRC is that of the stored body,
    without the sign bit."""
    plain, long, broken = b"body 1", b"x" * 10_000, zlib.compress(b"y")[:-2]
    assert zlib.crc32(plain) >> 31, "a checksum with the sign bit"
    node.broker.group_configs.put(GroupConfig("lites", attributes={"lite.bind.topic": PARENT}))
    put(node, PARENT, message_type="LITE")
    await joined(client)
    await send(client, plain)
    await send(client, gzip.compress(b"gzip"), broken, body_encoding=2)
    async with Producer(node.address) as producer:
        await producer.send("t", long)
        await producer.send(PARENT, long, lite_topic="s1")
    await send_lite(client, "s1", plain)
    subscribed = schema.SyncLiteSubscriptionRequest(
        topic=resource(PARENT), group=resource("lites"), lite_topic_set=["s1"]
    )
    assert (await client.call("SyncLiteSubscription", subscribed)).status.code == OK
    wanted = request(group=resource("lites"))
    wanted.message_queue.topic.name = PARENT
    found, (_, lites) = await receive(client), await received(begin(client, wanted))
    for handle in handles(found):
        await change(client, handle, 0)
    again = await receive(client)
    for items, bodies in (
        (found, [plain, b"gzip", broken, long]),
        (again, [plain, b"gzip", broken, long]),
        (lites, [plain, long]),
    ):
        assert sorted(item.body for item in items) == sorted(bodies)
        for item in items:
            digest = item.system_properties.body_digest
            md5 = hashlib.md5(item.body, usedforsecurity=False).hexdigest().upper()
            assert (digest.type, digest.checksum) == (2, md5), item.body[:10]
    forwarded = schema.ForwardMessageToDeadLetterQueueRequest(
        group=resource("g"), topic=resource("t"), receipt_handle=handles(again)[0], message_id="1"
    )
    assert (await client.call("ForwardMessageToDeadLetterQueue", forwarded)).status.code == OK
    wire = await connect(node.address)
    records: list[Record] = []
    for topic, queues in (("t", 2), (PARENT, 4), ("%DLQ%g", 1)):
        for queue in range(queues):
            asked = pull(topic, queue=queue) | {"consumerGroup": "readers"}
            records += decode_records((await wire.call(RequestCode.PULL_MESSAGE, asked)).body)
    assert len(records) == 7
    assert {bool(record.sys_flag & 1) for record in records} == {True, False}
    assert [record.crc for record in records] == [zlib.crc32(record.body) & 0x7FFFFFFF for record in records]


async def test_a_body_that_cannot_be_read_is_handed_on(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, zlib.compress(b"y")[:-2], body_encoding=2)
    (found,) = await receive(client)
    assert found.system_properties.body_encoding == 2


async def test_a_message_that_its_client_cannot_take_is_a_dead_letter_and_ends_no_call(
    node: Node, client: GrpcClient
) -> None:
    """Four bytes in the frame of gRPC, and its properties, are too much beside a body of 4 MiB."""
    await joined(client)
    await send(client, b"x" * MAX_BODY_BYTES, b"small")
    assert await received(begin(client, request(), **{"x-mq-language": "HTTP"})) == (OK, [])
    (small,) = await receive(client)
    assert small.body == b"small"
    letter = decode_record(b"".join(node.broker.store.fetch(node.broker.store.queue("%DLQ%g", 0), 0, 1).pieces))
    assert "receives at most 4194304 bytes" in letter.properties
    assert node.broker.pops.pools.unfinished("g") == 1
    await send(client, b"x" * MAX_BODY_BYTES)
    (large,) = await receive(client)  # Java's
    assert len(large.body) == MAX_BODY_BYTES


async def test_a_receive_waits_for_the_next_message(node: Node, client: GrpcClient) -> None:
    call = begin(client, request(wait_ms=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    await send(client, b"late")
    code, (found,) = await received(call)
    assert (code, found.body) == (OK, b"late")


@pytest.mark.parametrize(
    ("wait_ms", "timeout", "expected_s"),
    [
        (5000, "30S", 5.0),
        (60_000, "90S", MAX_POLL_S),
        (20_000, "8S", 7.9),
        (None, "8S", 6.5),  # half of the request timeout, which is 3 s without settings, stays
        (None, "", MAX_POLL_S),
    ],
)
async def test_how_long_a_receive_waits(
    node: Node, client: GrpcClient, wait_ms: int | None, timeout: str, expected_s: float
) -> None:
    """Never longer than its client waits for the answer: Go's simple consumer says only how long that is."""
    asked = request(wait_ms=wait_ms or 0)
    if wait_ms is None:
        asked.ClearField("long_polling_timeout")
    call = begin(client, asked, grpc_timeout=timeout)
    await eventually(lambda: node.broker.pops.waiting == 1)
    node.clock.advance(expected_s - 0.01)
    assert node.broker.pops.waiting == 1
    node.clock.advance(0.02)  # sums of clock times are rounded: not to the last digit
    assert await received(call) == (NOTHING, [])


async def test_a_receive_that_its_client_gives_up_takes_nothing(node: Node, client: GrpcClient) -> None:
    call = begin(client, request(wait_ms=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    call.cancel()
    await eventually(lambda: node.broker.pops.waiting == 0)
    await send(client, b"one")
    (found,) = await receive(client)
    assert found.system_properties.delivery_attempt == 1


async def test_an_answer_that_its_client_does_not_take_goes_back(node: Node, client: GrpcClient, dial: Dial) -> None:
    await joined(client)
    await send(client, b"x" * 200_000)
    other = await dial(node.address, client_id="other")
    other.is_reading = False  # its window is smaller than the message
    call = begin(other, request())
    await eventually(lambda: bool(call.body))
    assert await receive(client) == []
    call.cancel()
    await eventually(lambda: not node.server.connections[1].held_bytes() > 100_000)
    (found,) = await receive(client)
    assert found.system_properties.delivery_attempt == 1


async def test_the_same_with_its_connection(node: Node, client: GrpcClient, dial: Dial) -> None:
    await joined(client)
    await send(client, b"x" * 200_000)
    other = await dial(node.address, client_id="other")
    other.is_reading = False
    call = begin(other, request())
    await eventually(lambda: bool(call.body))
    await other.close()
    await eventually(lambda: len(node.server.connections) == 1)
    assert len(await receive(client)) == 1


async def test_tags_are_compared_by_their_text(client: GrpcClient) -> None:
    """`Aa` and `BB` have the same hash."""
    await joined(client)
    await send(client, b"1", tag="BB")
    await send(client, b"2", tag="Aa")
    await send(client, b"3")
    asked = request()
    asked.filter_expression.type, asked.filter_expression.expression = 1, "Aa || C"
    _, (found,) = await received(begin(client, asked))
    assert found.body == b"2"


async def test_messages_are_filtered_by_their_properties(client: GrpcClient) -> None:
    await joined(client)
    for price in ("5", "20"):
        sent = message("t", price.encode(), message_id=price)
        sent.user_properties["price"] = price
        await client.call("SendMessage", sending(sent))
    asked = request()
    asked.filter_expression.type, asked.filter_expression.expression = 2, "price > 10"
    _, (found,) = await received(begin(client, asked))
    assert found.body == b"20"


@pytest.mark.parametrize(("kind", "expression"), [(1, "||"), (2, "price >")])
async def test_filters_that_cannot_be_read(client: GrpcClient, kind: int, expression: str) -> None:
    asked = request()
    asked.filter_expression.type, asked.filter_expression.expression = kind, expression
    assert await received(begin(client, asked)) == (40010, [])


EMPTY_RECEIVES: list[tuple[dict[str, Any], int]] = [
    ({"invisible_ms": MIN_INVISIBLE_MS - 1}, 40011),
    ({"invisible_ms": MIN_INVISIBLE_MS}, NOTHING),
    ({"invisible_ms": MAX_INVISIBLE_MS}, NOTHING),
    ({"invisible_ms": MAX_INVISIBLE_MS + 1}, 40011),
    ({"wait_ms": -1}, 40018),
    ({"count": 0}, NOTHING),
    ({"count": -1}, NOTHING),
    ({"group": resource("a b")}, 40003),
    ({"message_queue": {"topic": {"name": "a b"}}}, 40002),
]


async def test_how_a_receive_may_be_answered_without_messages(client: GrpcClient) -> None:
    for fields, code in EMPTY_RECEIVES:
        assert await received(begin(client, request(**fields))) == (code, [])


async def test_a_receive_is_refused_for_the_same_reasons_by_both_servers(
    nodes: Nodes, dial: Dial, connect: Connect
) -> None:
    """Each row puts one thing right, and leaves the next reason."""
    node = await nodes.start(auto_create_groups=False, permission=2)
    client, wire = await dial(node.address), await connect(node.address)
    broker, end = node.broker, node.broker.store.end
    forbidden, no_topic = (ResponseCode.NO_PERMISSION, 40300), (ResponseCode.TOPIC_NOT_EXIST, 40402)
    no_group, nothing = (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, 40403), (ResponseCode.POLLING_TIMEOUT, NOTHING)
    group = GroupConfig("g", consume_enable=False)
    rows: list[tuple[Callable[[], object], str, tuple[ResponseCode, int]]] = [
        (lambda: None, "the broker[broker-a] pulling message is forbidden", forbidden),
        (lambda: broker.change_config(replace(broker.config, permission=6)), "topic[t] not exist", no_topic),
        (lambda: broker.topics.put(TopicConfig("t", 1, 1, 2), end), "topic[t] pulling message is forbidden", forbidden),
        (lambda: broker.topics.put(TopicConfig("t", 1, 1), end), "group [g] does not exist", no_group),
        (lambda: broker.group_configs.put(group), "subscription group no permission, g", forbidden),
        (lambda: broker.group_configs.put(GroupConfig("g")), "", nothing),
    ]
    for put_right, text, codes in rows:
        put_right()
        answer = await wire.call(RequestCode.POP_MESSAGE, pop())
        status = (await begin(client, request()).all())[0].status
        assert (answer.code, status.code) == codes, text
        assert text in (answer.remark or "")
        assert text in status.message


@pytest.mark.limits(max_waiting_receives=0)
async def test_who_would_ask_again_immediately_is_refused_late(node: Node, client: GrpcClient) -> None:
    call = begin(client, request(wait_ms=5000))
    await client.call("Heartbeat", schema.HeartbeatRequest(client_type=1))
    assert call.messages.empty()
    node.clock.advance(RECEIVE_AGAIN_S)
    assert await received(call) == (42900, [])


EXTREMES = (0, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63, 253_402_300_800_000)
TEXTS = ("", " ", "x", "-1", "²", "\U0001f600", "a  b", "999999999999999", str(2**63 - 1), "9" * 30)
PROPERTIES = (
    "RECONSUME_TIME UNIQ_KEY KEYS TAGS __SHARDINGKEY TRACE_CONTEXT __BORNHOST CONSUME_START_TIME INNER_NUM 1ST_POP_TIME "
    "POP_CK MAX_RECONSUME_TIMES DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID INSTANCE_ID REAL_TOPIC RETRY_TOPIC PGROUP "
    "TRAN_MSG DELAY TIMER_DELIVER_MS TIMER_OUT_MS BORN_TIMESTAMP CLUSTER MSG_TYPE"
).split()


async def test_no_value_that_a_remoting_client_may_send_keeps_messages_from_others(
    nodes: Nodes, dial: Dial, connect: Connect
) -> None:
    """One that was sent with 2**31 - 1 retries failed each receive that had it in its batch, and lost the rest of the
    batch when it was to become a dead letter. Java's client raises for a time beyond the year 9999."""
    node = await nodes.start(clock=MovableClock(stands=True))
    node.broker.topics.put(TopicConfig("t", 1, 1), node.broker.store.end)
    client, wire = await dial(node.address), await connect(node.address)
    await joined(client)
    assert await popped(wire, consumerGroup="h") == []
    for group in ("g", "h"):
        node.broker.group_configs.put(GroupConfig(group, retry_max_times=0))
    for field in "dfghjkl":
        for value in EXTREMES:
            await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(**{field: value}), b"%s=%d" % (field.encode(), value))
    for name in PROPERTIES:
        for text in TEXTS:
            await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i=f"{name}\x01{text}\x02"), f"{name}={text}".encode())
    count = node.broker.store.queue("t", 0).next
    assert count > 100
    found: list[Any] = []
    while more := await receive(client):
        found += more
    assert len(found) == count
    for item in found:
        system = item.system_properties
        for time in (system.born_timestamp, system.store_timestamp, system.delivery_timestamp):
            time.ToDatetime()
    records = []
    while got := await popped(wire, consumerGroup="h", invisibleTime=30_000):
        records += got
    assert len(records) == count
    assert all(record.reconsume_times >= 0 for record in records)
    node.clock.advance(31)
    await eventually(lambda: node.broker.store.queue("%DLQ%h", 0).next == count)
    await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == count)


async def test_no_value_that_a_grpc_client_may_send_keeps_messages_from_others(
    node: Node, client: GrpcClient, connect: Connect
) -> None:
    wire = await connect(node.address)
    assert await popped(wire, consumerGroup="h") == []
    await joined(client)
    for name in ("born_timestamp", "delivery_timestamp", "orphaned_transaction_recovery_duration"):
        for seconds in (0, -1, 2**31, -(2**63), 2**63 - 1, 253_402_300_800):
            for nanos in (0, -1, 2**31 - 1, -(2**31)):
                sent = message("t", name.encode(), message_id=f"{name}-{seconds}-{nanos}")
                field = getattr(sent.system_properties, name)
                field.seconds, field.nanos = seconds, nanos
                await client.call("SendMessage", sending(sent))
    node.clock.advance(1)
    count = sum(node.broker.store.queue("t", number).next for number in range(2))
    assert count > 24
    records: list[Any] = []
    while got := await popped(wire, consumerGroup="h", queueId=0) + await popped(wire, consumerGroup="h", queueId=1):
        records += got
    found: list[Any] = []
    while more := await receive(client):
        found += more
    assert len(found) == len(records) == count
    assert all(0 <= record.born_ms < 253_402_300_800_000 for record in records)
    for item in found:
        item.system_properties.born_timestamp.ToDatetime()


async def test_a_message_that_cannot_be_written_is_a_dead_letter_and_the_others_come(
    node: Node, client: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(client)
    await send(client, b"1", b"odd", b"3")

    def failing(found: Any, record: Record, *rest: Any, is_lite: bool) -> Work[None]:
        if record.body == b"odd":
            raise OverflowError("a value that nobody thought of")
        return filling(found, record, *rest, is_lite=is_lite)

    monkeypatch.setattr(consuming, "filling", failing)
    assert sorted(item.body for item in await receive(client)) == [b"1", b"3"]
    letter = decode_record(b"".join(node.broker.store.fetch(node.broker.store.queue("%DLQ%g", 0), 0, 1).pieces))
    assert (letter.body, "nobody thought of" in letter.properties) == (b"odd", True)


@pytest.mark.limits(max_topics=20)
async def test_messages_stay_in_flight_while_the_table_of_topics_has_no_room_for_dead_letters(
    node: Node, client: GrpcClient
) -> None:
    """They were never redelivered until a restart."""
    node.broker.group_configs.put(GroupConfig("g", retry_max_times=0))
    await joined(client)
    await send(client, *(b"%d" % number for number in range(10)))
    assert len(await receive(client, invisible_ms=10_000)) == 10
    with pytest.raises(LimitExceeded):
        for number in range(21):
            node.broker.topics.put(TopicConfig(f"more-{number}", 1, 1), node.broker.store.end)
    node.clock.advance(11)
    assert node.broker.pops.pools.unfinished("g") == 10
    async with AdminClient(node.address) as admin:
        (finding,) = [
            one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "dead_letters_refused"
        ]
    assert "g: the broker has 20 topics" in finding.text
    node.broker.topics.delete("more-0", node.broker.store.end)
    node.clock.advance(DEAD_LETTER_RETRY_S)
    await eventually(lambda: node.broker.pops.pools.unfinished("g") == 0)
    assert node.broker.store.queue("%DLQ%g", 0).next == 10


# Acknowledging


async def test_what_is_acknowledged_is_not_redelivered(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1", b"2")
    first, second = handles(await receive(client))
    for _ in range(2):  # clients retry
        answer = await ack(client, first)
        assert [answer.status.code, *(entry.status.code for entry in answer.entries)] == [OK, OK]
    node.clock.advance(31)
    (again,) = await receive(client)
    assert (again.system_properties.delivery_attempt, again.system_properties.receipt_handle == second) == (2, False)


async def test_handles_that_are_not_good(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1")
    (handle,) = handles(await receive(client))
    assert (await ack(client, "rubbish")).status.code == ILLEGAL_HANDLE
    assert (await ack(client, handle, group="other")).status.code == ILLEGAL_HANDLE
    answer = await ack(client, "rubbish", handle)
    assert answer.status.code == 30000
    assert [entry.status.code for entry in answer.entries] == [ILLEGAL_HANDLE, OK]
    assert [entry.receipt_handle for entry in answer.entries] == ["rubbish", handle]


async def test_a_handle_of_hands_that_lost_the_message_is_not_good(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1")
    (old,) = handles(await receive(client))
    node.clock.advance(31)
    (new,) = handles(await receive(client))
    assert (await ack(client, old)).status.code == ILLEGAL_HANDLE
    assert (await ack(client, new)).status.code == OK


async def test_acknowledgement_is_refused_when_the_visibility_timeout_has_expired(
    node: Node, client: GrpcClient
) -> None:
    await joined(client)
    await send(client, b"1")
    (handle,) = handles(await receive(client))
    node.clock.advance(31)
    refused = await ack(client, handle)
    assert (refused.status.code, refused.status.message[:22]) == (ILLEGAL_HANDLE, "INVALID_RECEIPT_HANDLE")
    assert (await change(client, handle, 10_000)).status.code == ILLEGAL_HANDLE
    (again,) = await receive(client)
    assert again.system_properties.delivery_attempt == 2


async def test_acknowledged_message_keeps_its_attempt_when_it_is_redelivered_with_an_earlier_one(
    node: Node, client: GrpcClient
) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    await joined(client)
    await send(client, b"1", b"2", b"3", message_group="mg")
    _, middle, _ = handles(await receive(client))
    assert (await ack(client, middle)).status.code == OK
    node.clock.advance(31)
    found = [(item.body, item.system_properties.delivery_attempt) for item in await receive(client)]
    assert found == [(b"1", 2), (b"2", 1), (b"3", 2)]


async def test_a_call_acknowledges_some_and_not_too_many(client: GrpcClient) -> None:
    assert (await ack(client)).status.code == 40000
    assert (await ack(client, *["x"] * MAX_ACKS)).status.code == ILLEGAL_HANDLE
    assert (await ack(client, *["x"] * (MAX_ACKS + 1))).status.code == 40000


# Changing


async def test_a_message_that_is_refused_is_redelivered_in_exactly_that_time(node: Node, client: GrpcClient) -> None:
    """Apache's brokers hand it out when the receive that waits has ended: a second may become 15."""
    await joined(client)
    await send(client, b"1")
    (handle,) = handles(await receive(client))
    answer = await change(client, handle, 3000)
    assert (answer.status.code, answer.receipt_handle) == (OK, handle)
    call = begin(client, request(wait_ms=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    node.clock.advance(2.999)
    assert node.broker.pops.waiting == 1
    node.clock.advance(0.001)
    _, (again,) = await received(call)
    assert again.system_properties.delivery_attempt == 2


async def test_a_message_that_is_only_put_off_does_not_count_as_tried(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1")
    (handle,) = handles(await receive(client))
    await change(client, handle, 0, suspend=True)
    (again,) = await receive(client)
    assert again.system_properties.delivery_attempt == 1


@pytest.mark.parametrize(("invisible_ms", "code"), [(-1, 40011), (MAX_INVISIBLE_MS, OK), (MAX_INVISIBLE_MS + 1, 40011)])
async def test_times_that_a_message_may_be_put_off_by(client: GrpcClient, invisible_ms: int, code: int) -> None:
    await joined(client)
    await send(client, b"1")
    (handle,) = handles(await receive(client))
    assert (await change(client, handle, invisible_ms)).status.code == code


async def test_a_message_is_given_up_once(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1", tag="a")
    (handle,) = handles(await receive(client))
    asked = schema.ForwardMessageToDeadLetterQueueRequest(
        group=resource("g"), topic=resource("t"), receipt_handle=handle, delivery_attempt=1
    )
    for _ in range(2):
        answer = await client.call("ForwardMessageToDeadLetterQueue", asked)
        assert answer.status.code == OK
    assert node.broker.store.queues["%DLQ%g", 0].next == 1
    asked.receipt_handle = "rubbish"
    assert (await client.call("ForwardMessageToDeadLetterQueue", asked)).status.code == ILLEGAL_HANDLE


# Extending


async def test_a_message_is_extended_as_long_as_its_client_has_contact(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await send(client, b"1")
    (held,) = await receive(client, auto_renew=True)
    beat = schema.HeartbeatRequest(client_type=2, group=resource("g"))
    for _ in range(20):
        node.clock.advance(RENEWED_INVISIBLE_MS / 2000)
        assert (await client.call("Heartbeat", beat)).status.code == OK
    assert await receive(client) == []
    assert (await ack(client, *handles([held]))).status.code == OK


async def test_a_stopped_broker_notes_nothing_of_a_client_that_was_connected(nodes: Nodes, dial: Dial) -> None:
    """In a test kit the process lives on, and the next broker writes the same journal."""
    node = await nodes.start(clock=MovableClock(stands=True))
    node.broker.topics.put(TopicConfig("t", 1, 1), 0)
    client = await dial(node.address)
    await client.call("Heartbeat", schema.HeartbeatRequest(client_type=2, group=resource("g")))
    await joined(client)
    await send(client, b"1")
    assert len(await receive(client, auto_renew=True)) == 1
    await node.stop()
    journal = node.config.data_dir / "pops.journal"
    kept = journal.read_bytes()
    node.clock.advance(CLIENT_GONE_S)
    await asyncio.sleep(0)  # an event is written at the end of its event-loop iteration
    assert journal.read_bytes() == kept


async def test_with_a_client_that_terminates_its_messages_are_redelivered(
    node: Node, client: GrpcClient, dial: Dial
) -> None:
    await joined(client)
    await send(client, b"1")
    other = await dial(node.address, client_id="other")
    assert len(await receive(other, auto_renew=True)) == 1
    call = begin(client, request(wait_ms=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    bye = schema.NotifyClientTerminationRequest(group=resource("g"))
    await client.call("NotifyClientTermination", bye, x_mq_client_id="other")
    assert node.broker.pops.waiting == 1, "nobody says it for others"
    await other.call("NotifyClientTermination", bye)
    _, (again,) = await received(call)
    assert again.body == b"1"


async def test_a_client_that_loses_its_connection_may_come_back(node: Node, client: GrpcClient, dial: Dial) -> None:
    await joined(client)
    await send(client, b"1")
    other = await dial(node.address, client_id="other")
    (held,) = await receive(other, auto_renew=True)
    await other.close()
    await eventually(lambda: len(node.server.connections) == 1)
    other = await dial(node.address, client_id="other")
    await other.call("Heartbeat", schema.HeartbeatRequest(client_type=2, group=resource("g")))
    node.clock.advance(CLIENT_GONE_S)
    assert await receive(client) == []
    await other.close()
    await eventually(lambda: len(node.server.connections) == 1)
    node.clock.advance(CLIENT_GONE_S)
    (again,) = await receive(client)
    assert again.body == held.body


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_message_whose_answer_may_be_lost_with_its_connection_is_not_extended(
    node: Node, client: GrpcClient, dial: Dial, is_heard: bool
) -> None:
    """The client comes back, sends heartbeats, and knows nothing of such a message."""
    await joined(client)
    await send(client, b"1")
    other = await dial(node.address, client_id="other")
    await other.call("QueryAssignment", schema.QueryAssignmentRequest(topic=resource("t"), group=resource("g")))
    other.is_reading = False  # a window that it opens counts as contact, too
    assert len(await receive(other, auto_renew=True)) == 1
    node.clock.advance(1)
    beat = schema.HeartbeatRequest(client_type=2, group=resource("g"))
    if is_heard:
        await other.call("Heartbeat", beat)
    await other.close()
    await eventually(lambda: len(node.server.connections) == 1)
    other = await dial(node.address, client_id="other")
    await other.call("Heartbeat", beat)
    node.clock.advance(RENEWED_INVISIBLE_MS / 1000)
    await other.call("Heartbeat", beat)
    assert len(await receive(client)) == (0 if is_heard else 1)


async def test_a_message_is_not_extended_when_its_connection_is_lost_after_the_client_reconnected(
    node: Node, client: GrpcClient, dial: Dial
) -> None:
    """The response may be in the socket of the old connection, of which the client has known for longer that it is lost."""
    await joined(client)
    await send(client, b"1")
    old = await dial(node.address, client_id="other")
    await old.call("QueryAssignment", schema.QueryAssignmentRequest(topic=resource("t"), group=resource("g")))
    old.is_reading = False
    assert len(await receive(old, auto_renew=True)) == 1
    new = await dial(node.address, client_id="other")
    beat = schema.HeartbeatRequest(client_type=2, group=resource("g"))
    await new.call("Heartbeat", beat)
    await old.close()
    await eventually(lambda: len(node.server.connections) == 2)
    node.clock.advance(RENEWED_INVISIBLE_MS / 1000)
    await new.call("Heartbeat", beat)
    assert len(await receive(client)) == 1


@pytest.mark.parametrize("gives_up", [True, False])
async def test_messages_are_not_extended_when_the_client_gives_the_receive_up_after_its_answer(
    node: Node, client: GrpcClient, dial: Dial, gives_up: bool
) -> None:
    """A client that was suspended drops the answer, and the broker extended its messages for as long as it had contact."""
    await joined(client)
    other = await dial(node.address, client_id="other")
    await send(client, b"1")
    lost = begin(other, request(auto_renew=True))
    assert len((await received(lost))[1]) == 1
    node.clock.advance(0.001)
    await send(client, b"2")
    assert len(await receive(other, auto_renew=True)) == 1
    if gives_up:
        other.transport.write(encode_reset(lost.stream_id, 8))
    beat = schema.HeartbeatRequest(client_type=2, group=resource("g"))
    await other.call("Heartbeat", beat)
    assert await receive(client) == []
    node.clock.advance(RENEWED_INVISIBLE_MS / 1000)
    await other.call("Heartbeat", beat)
    assert [item.body for item in await receive(client)] == ([b"1"] if gives_up else [])


async def test_a_remoting_client_with_a_grpc_clients_id_ends_none_of_its_receives(
    node: Node, client: GrpcClient, dial: Dial, connect: Connect
) -> None:
    """An account without rights took messages out of others' in-flight set, and 17 visits made dead letters of them."""
    await joined(client)
    await send(client, b"1")
    (held,) = await receive(client, auto_renew=True)
    call = begin(client, request(wait_ms=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    node.broker.topics.put(TopicConfig("own", 1, 1), node.broker.store.end)
    for _ in range(2):
        wire = await connect(node.address)
        await beat(wire, CLIENT, {"own": "*"}, "own")
        assert (await wire.call(RequestCode.POP_MESSAGE, pop(consumerGroup="own", topic="own"))).code != 0
        fields = {"clientID": CLIENT, "consumerGroup": "own"}
        assert (await wire.call(RequestCode.UNREGISTER_CLIENT, fields)).code == 0
        await wire.close()
    await eventually(lambda: len(node.server.connections) == 1)
    assert node.broker.pops.waiting == 1
    other = await dial(node.address, client_id="other")
    assert await receive(other) == []
    await send(client, b"2")
    _, (found,) = await received(call)
    assert found.body == b"2"
    assert (await ack(client, *handles([held]))).status.code == OK


async def test_a_grpc_client_with_a_remoting_clients_id_ends_none_of_its_receives(
    node: Node, client: GrpcClient, connect: Connect
) -> None:
    wire = await connect(node.address)
    await beat(wire, CLIENT, group="own")
    opaque = wire.send(RequestCode.POP_MESSAGE, pop(consumerGroup="own", pollTime=10_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    await joined(client)
    bye = schema.NotifyClientTerminationRequest(group=resource("g"))
    assert (await client.call("NotifyClientTermination", bye)).status.code == OK
    assert node.broker.pops.waiting == 1
    await send(client, b"1")
    assert (await wire.answer(opaque)).code == 0


# In order


async def test_messages_of_a_group_in_order_wait_for_the_one_before(node: Node, client: GrpcClient) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    await joined(client)
    await send(client, b"1", b"2", message_group="mg")
    (first,) = await receive(client, count=1)
    assert await receive(client) == []
    await ack(client, *handles([first]))
    (second,) = await receive(client)
    assert (first.body, second.body) == (b"1", b"2")


async def test_receive_of_an_ordered_group_returns_messages_of_any_queue(node: Node, client: GrpcClient) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    await joined(client)
    await send(client, *(b"%d" % number for number in range(8)))
    assert all(node.broker.store.queue("t", queue_id).next for queue_id in range(2))
    asked = request()
    asked.message_queue.id = 1
    _, found = await received(begin(client, asked))
    assert len(found) == 8


async def test_illegal_visibility_timeout_is_refused_in_the_words_of_apache_s_proxy(client: GrpcClient) -> None:
    texts = []
    for invisible_ms in (MIN_INVISIBLE_MS - 1, MAX_INVISIBLE_MS + 1):
        call = begin(client, request(invisible_ms=invisible_ms))
        texts.append((await call.messages.get()).status.message)
    assert texts == [
        "the invisibleTime is too small. min is 10000",
        "the invisibleTime is too large. max is 43200000",
    ]


async def test_a_receive_whose_answer_was_lost_gets_it_again(node: Node, client: GrpcClient) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    await joined(client)
    await send(client, b"1", message_group="mg")
    for _ in range(2):
        (found,) = await receive(client, attempt_id="attempt-1")
        assert (found.body, found.system_properties.delivery_attempt) == (b"1", 1)


async def test_a_group_in_order_gets_that_setting(node: Node, client: GrpcClient) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    asked = schema.QueryAssignmentRequest(topic=resource("t"), group=resource("g"))
    answer = await client.call("QueryAssignment", asked)
    assert [item.message_queue.id for item in answer.assignments] == [0, 1]


async def test_calls_and_deliveries_are_counted(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(metrics_port=0)
    node.broker.topics.put(TopicConfig("t", 1, 1), node.broker.store.end)
    client = await dial(node.address)
    await joined(client)
    await send(client, b"a")
    (first,) = await receive(client)
    (handle,) = handles([first])
    await change(client, handle, 0)
    assert len(await receive(client)) == 1
    await ack(client, "no handle")
    found = await samples(node)
    group = frozenset({("group", "g")})

    def calls(method: str, code: int) -> float:
        return found["rocketlet_grpc_calls_total", frozenset({("method", method), ("code", str(code))})]

    assert (calls("ReceiveMessage", OK), calls("ReceiveMessage", NOTHING), calls("SendMessage", OK)) == (2, 1, 1)
    assert calls("AckMessage", ILLEGAL_HANDLE) == 1
    assert found["rocketlet_group_unfinished", group] == found["rocketlet_messages_redelivered_total", group] == 1
    assert found["rocketlet_group_popping_clients", group] == 1


# Retention


async def test_popped_messages_that_retention_deletes_are_reported_as_expired_unread(nodes: Nodes, dial: Dial) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock, metrics_port=0, segment_bytes=2_000, retain_hours=1)
    client = await dial(node.address)
    put(node, queues=1)
    await joined(client)
    await send(client, *(b"%02d" % number for number in range(40)))
    assert len(await receive(client, count=3, invisible_ms=3 * 3600 * 1000)) == 3
    assert (await ack(client, *handles(await receive(client, count=7)))).status.code == OK
    expired = "rocketlet_messages_expired_unread_total", frozenset({("group", "g"), ("topic", "t")})
    with capture_logs() as logs:
        clock.advance(2 * 3600)
        await node.broker.expire_segments()
        await eventually(lambda: any(node.broker.progress.lost()))
    begin = node.broker.store.queues["t", 0].begin
    assert 10 < begin < 40
    lost = 3 + begin - 10
    told = [line for line in logs if line["event"] == "messages_expired_unread"]
    assert [(line["group"], line["topic"], line["messages"]) for line in told] == [("g", "t", lost)]
    assert (await samples(node))[expired] == lost, "seven were acknowledged"
    async with AdminClient(node.address) as admin:
        (progress,) = (await admin.progress("g", "t")).values()
        assert (progress.lost, progress.lag) == (lost, 40 - begin)
        findings = await diagnose(admin, ObservationTimes(0, 0, 0))
    found = [one.text for one in findings if one.kind == "retention"]
    assert found == [f"t@broker-a:0: {lost} messages were deleted before the group read them"]
    await client.close()
    clock.advance(3600)  # the visibility timeout of the three
    client = await dial(node.address)
    with capture_logs() as logs:
        assert [int(item.body) for item in await receive(client)] == list(range(begin, 40))
    assert sum(line["event"] == "popped_message_gone" for line in logs) == 3
    assert (await samples(node))[expired] == lost, "no message is counted twice"
    async with AdminClient(node.address) as admin:
        (progress,) = (await admin.progress("g", "t")).values()
    assert (progress.lost, progress.lag, progress.in_hand) == (0, 40 - begin, 40 - begin)


async def test_last_attempt_of_a_message_that_retention_has_deleted_ends_without_a_dead_letter(
    nodes: Nodes, dial: Dial
) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock, segment_bytes=2_000, retain_hours=1)
    node.broker.group_configs.put(GroupConfig("g", retry_max_times=0))
    client = await dial(node.address)
    put(node, queues=1)
    await joined(client)
    await send(client, *(b"%02d" % number for number in range(40)))
    await receive(client, count=1, invisible_ms=3 * 3600 * 1000)
    clock.advance(2 * 3600)
    await node.broker.expire_segments()
    await client.close()
    with capture_logs() as logs:
        clock.advance(3600)
        client = await dial(node.address)
        found = [int(item.body) for item in await receive(client)]
    assert found[0] == node.broker.store.queues["t", 0].begin
    assert [line["event"] for line in logs if line["event"] in ("popped_message_gone", "dead_letter_failed")] == [
        "popped_message_gone"
    ]
    assert stored(node, "%DLQ%g") == []
