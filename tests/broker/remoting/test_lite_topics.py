"""Lite topics over remoting: attributes of topics and groups, and the requests of 5.5's clients and tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest
from rocketlet.broker.config import LITE_READS, LITE_SYNC_S, MAX_QUERY_ENTRIES, Limits
from rocketlet.broker.messages.lite import LiteTopic
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.remoting.pops import lite_group_info
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.client import AdminClient, BrokerRefused
from rocketlet.protocol.admin_bodies import decode_consume_stats
from rocketlet.protocol.bodies import LOOKS, SLICE, BodyError, GroupConfig, finish
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_SYNCED_LITE_TOPICS
from rocketlet.protocol.frame import Frame, FrameCursor
from rocketlet.protocol.group_bodies import (
    SHARED_OWNER,
    LiteAction,
    LiteOffset,
    LiteSubscription,
    LockRequest,
    OffsetPolicy,
    decode_lite_subscriptions,
    encode_lite_subscription,
)
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.message import Record, decode_records
from rocketlet.protocol.names import Queue
from rocketlet.protocol.properties import find
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, eventually, peer
from ...support.peers import Peer, request
from ...support.requests import beat, pop, send, send_v2
from ...support.topics import put, stored


async def put_group(wire: Wire, **attributes: str) -> Any:
    body = {"groupName": "g", "attributes": attributes}
    return await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, orjson.dumps(body))


async def put_topic(wire: Wire, attributes: str) -> Any:
    header = write(CreateTopic("t", 4, 4, 6, attributes=attributes))
    return await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def test_attributes_of_a_parent_topic_are_kept_until_they_change(node: Node, wire: Wire) -> None:
    assert (await put_topic(wire, "+message.type=LITE,+lite.topic.expiration=60")).code == 0
    assert (await put_topic(wire, "")).code == 0
    topic = node.broker.topics.get("t")
    assert topic is not None
    assert (topic.message_type, topic.lite_expiration_min) == ("LITE", 60)
    shown = orjson.loads((await wire.call(RequestCode.GET_TOPIC_CONFIG, {"topic": "t"})).body)
    assert shown["attributes"] == {"message.type": "LITE", "lite.topic.expiration": "60"}
    assert (await put_topic(wire, "-lite.topic.expiration")).code == 0
    topic = node.broker.topics.get("t")
    assert topic is not None
    assert topic.lite_expiration_min == -1


@pytest.mark.parametrize(
    ("value", "is_taken"), [("-1", True), ("1", True), ("43200", True), ("0", False), ("43201", False), ("x", False)]
)
async def test_expiration_has_limits(node: Node, wire: Wire, value: str, is_taken: bool) -> None:
    answer = await put_topic(wire, f"+message.type=LITE,+lite.topic.expiration={value}")
    assert (answer.code == 0) == is_taken, answer.remark
    assert is_taken or "expected -1 or 1 to 43200 minutes" in str(answer.remark)


async def test_attributes_of_a_lite_group_are_kept_until_they_change(node: Node, wire: Wire) -> None:
    added = {"+lite.bind.topic": "t", "+lite.sub.model": "Exclusive", "+lite.sub.client.quota": "3"}
    assert (await put_group(wire, **added)).code == 0
    assert (await put_group(wire, **{"-lite.sub.model": "", "+lite.sub.wildcard": ""})).code == 0
    group = node.broker.group_configs.get("g")
    assert group is not None
    assert (group.lite_topic, group.lite_is_exclusive, group.lite_quota, group.lite_is_wildcard) == (
        "t",
        False,
        3,
        True,
    )


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [
        ("lite.bind.topic", "a b", False),
        ("lite.sub.model", "Other", False),
        ("lite.sub.client.quota", "-1", True),
        ("lite.sub.client.quota", "-2", False),
        ("lite.sub.client.max.event.cnt", "9", False),
        ("lite.sub.client.max.event.cnt", "10", True),
        ("lite.sub.reset.offset.exclusive", "yes", False),
        ("priority.factor", "101", False),
        ("priority.factor", "100", True),
        ("other", "1", False),
    ],
)
async def test_group_attribute_is_checked(node: Node, wire: Wire, name: str, value: str, is_taken: bool) -> None:
    answer = await put_group(wire, **{f"+{name}": value})
    assert (answer.code == 0) == is_taken, answer.remark
    group = node.broker.group_configs.get("g")
    assert (group.attributes if group else {}) == ({name: value} if is_taken else {})


async def test_attributes_of_a_group_are_listed_with_its_settings(node: Node, wire: Wire) -> None:
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "t"}))
    shown = await wire.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert orjson.loads(shown.body)["subscriptionGroupTable"]["g"]["attributes"] == {"lite.bind.topic": "t"}


async def test_message_of_a_remoting_client_reaches_its_lite_topic(node: Node, wire: Wire) -> None:
    put(node, message_type="LITE")
    assert (await send(wire, properties="__LITE_TOPIC\x01a")).code == 0
    refused = await send(wire)
    assert (refused.code, "accepts LITE messages only" in str(refused.remark)) == (13, True)
    assert len(stored(node)) == 1
    assert [lite.next for lite in node.broker.lites.of("t").values()] == [1]


# Consumers: LITE_SUBSCRIPTION_CTL, POP_LITE_MESSAGE, and `liteTopic` in the requests that settle messages


def ready(node: Node, **attributes: str) -> None:
    """The parent topic t, and its lite group g. Underscores in names of attributes stand for dots."""
    put(node, message_type="LITE")
    named = {name.replace("_", "."): value for name, value in attributes.items()}
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "t", **named}))


async def sync(wire: Wire, *names: str, **fields: Any) -> Frame:
    change = LiteSubscription(LiteAction.PARTIAL_ADD, "c1", "g", "t", names)._replace(**fields)
    return await wire.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))


async def fill(wire: Wire, name: str, *bodies: bytes) -> None:
    for body in bodies:
        assert (await send(wire, body, properties=f"__LITE_TOPIC\x01{name}")).code == 0


def pop_lite(**fields: Any) -> dict[str, Any]:
    return {
        "clientId": "c1",
        "consumerGroup": "g",
        "topic": "t",
        "maxMsgNum": 32,
        "invisibleTime": 60_000,
        "pollTime": 0,
        "bornTime": 0,
        **fields,
    }


async def popped(wire: Wire, **fields: Any) -> list[Record]:
    answer = await wire.call(RequestCode.POP_LITE_MESSAGE, pop_lite(**fields))
    assert answer.code in (0, ResponseCode.POLLING_TIMEOUT), answer.remark
    return list(decode_records(answer.body)) if answer.code == 0 else []


def place(record: Record, **fields: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "g",
        "topic": "t",
        "queueId": 0,
        "extraInfo": find(record.properties, "POP_CK"),
        "offset": find(record.properties, "INNER_MULTI_QUEUE_OFFSET"),
        "liteTopic": find(record.properties, "__LITE_TOPIC"),
        **fields,
    }


def bodies(records: Sequence[Record]) -> list[bytes]:
    return [record.body for record in records]


async def test_subscribed_lite_topics_are_popped_and_acknowledged(node: Node, wire: Wire) -> None:
    ready(node)
    await fill(wire, "a", b"1", b"2")
    await fill(wire, "other", b"x")
    assert await popped(wire) == []
    assert (await sync(wire, "a")).code == 0
    answer = await wire.call(RequestCode.POP_LITE_MESSAGE, pop_lite())
    assert (answer.ext["reviveQid"], answer.ext["orderCountInfo"]) == ("999", "0;0")
    assert "startOffsetInfo" not in answer.ext
    first, second = decode_records(answer.body)
    assert bodies([first, second]) == [b"1", b"2"]
    handle = str(find(second.properties, "POP_CK")).split(" ")
    assert (handle[1], handle[5:8]) == (answer.ext["popTime"], ["broker-a", "0", "1"])
    assert (await wire.call(RequestCode.ACK_MESSAGE, place(second))).code == 0
    assert node.broker.lite_offsets.of("g", "t").get("a", 0) == 0
    assert (await wire.call(RequestCode.ACK_MESSAGE, place(first))).code == 0
    await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 2)
    assert await popped(wire) == []


async def test_pop_waits_until_a_message_arrives(node: Node, wire: Wire, connect: Connect) -> None:
    ready(node)
    producer = await connect(node.address)
    await sync(wire, "a")
    waiting = wire.send(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=15_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    await fill(producer, "a", b"1")
    assert bodies(list(decode_records((await wire.answer(waiting)).body))) == [b"1"]


@pytest.mark.still
async def test_changed_invisible_time_redelivers_and_counts_unless_suspended(node: Node, wire: Wire) -> None:
    clock = node.clock
    ready(node)
    await fill(wire, "a", b"1")
    await sync(wire, "a")
    for suspend, attempts in ((False, 0), (True, 1), (False, 1), (False, 2)):
        (record,) = await popped(wire)
        assert record.reconsume_times == attempts
        changed = place(record, invisibleTime=5000, suspend=suspend)
        assert (await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)).code == 0
        assert await popped(wire) == []
        clock.advance(5)


@pytest.mark.parametrize(("alone", "left"), [(False, [b"1", b"2"]), (True, [b"1"])])
async def test_suspended_message_suspends_those_popped_with_it_unless_it_is_alone(
    node: Node, wire: Wire, alone: bool, left: list[bytes]
) -> None:
    ready(node)
    await fill(wire, "a", b"1", b"2")
    await sync(wire, "a")
    first, second = await popped(wire)
    suspended = place(first, invisibleTime=1, suspend=True, alone=alone)
    assert (await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, suspended)).code == 0
    if alone:
        assert (await wire.call(RequestCode.ACK_MESSAGE, place(second))).code == 0
    again: list[Record] = []

    async def has_come() -> bool:
        again.extend(await popped(wire))
        return bool(again)

    await eventually(has_come)
    assert [(record.body, record.reconsume_times) for record in again] == [(body, 0) for body in left]


async def test_rejected_message_becomes_a_dead_letter_that_does_not_return(node: Node, wire: Wire) -> None:
    ready(node)
    await fill(wire, "a", b"1", b"2")
    await sync(wire, "a")
    first, second = await popped(wire)
    rejected = place(first, invisibleTime=1000, reject="no such session")
    assert (await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, rejected)).ext["rejected"] == "true"
    await wire.call(RequestCode.ACK_MESSAGE, place(second))
    (dead,) = stored(node, "%DLQ%g")
    assert (dead.body, find(dead.properties, "__LITE_TOPIC")) == (b"1", "a")
    assert node.broker.lites.of("t")["a"].next == 2


REFUSED_POPS: list[tuple[dict[str, Any], int]] = [
    ({"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST),
    ({"topic": "normal"}, ResponseCode.INVALID_PARAMETER),
    ({"consumerGroup": "plain"}, ResponseCode.INVALID_PARAMETER),
    ({"consumerGroup": "missing"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    ({"maxMsgNum": 33}, ResponseCode.INVALID_PARAMETER),
    ({"invisibleTime": 0}, ResponseCode.INVALID_PARAMETER),
    ({"bornTime": 1, "pollTime": 1000}, ResponseCode.POLLING_TIMEOUT),
]


async def test_pop_is_refused_outside_of_lite_groups(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(auto_create_groups=False)
    wire = await connect(node.address)
    ready(node)
    put(node, "normal")
    node.broker.group_configs.put(GroupConfig("plain"))
    for fields, code in REFUSED_POPS:
        assert (await wire.call(RequestCode.POP_LITE_MESSAGE, pop_lite(**fields))).code == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"topic": "normal"}, ResponseCode.INVALID_PARAMETER),
        ({"group": "missing"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"group": "a b"}, ResponseCode.INVALID_PARAMETER),
        ({"names": ("a b",)}, ResponseCode.INVALID_PARAMETER),
        ({"names": ("1", "2", "3")}, ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED),
        ({"offset": LiteOffset(OffsetPolicy.TAIL, -1)}, ResponseCode.INVALID_PARAMETER),
        ({"names": ("a b",), "action": LiteAction.PARTIAL_REMOVE}, 0),
    ],
)
async def test_subscription_is_checked(nodes: Nodes, connect: Connect, fields: dict[str, Any], code: int) -> None:
    node = await nodes.start(auto_create_groups=False)
    wire = await connect(node.address)
    ready(node, lite_sub_client_quota="2")
    put(node, "normal")
    assert (await sync(wire, "a", **fields)).code == code


@pytest.mark.limits(max_lite_syncs_per_s=2)
@pytest.mark.still
async def test_synchronizations_beyond_the_rate_are_refused_until_the_next_second(node: Node, wire: Wire) -> None:
    clock = node.clock
    ready(node)
    assert [(await sync(wire, "a")).code for _ in range(3)] == [0, 0, ResponseCode.SYSTEM_BUSY]
    clock.advance(1)
    assert (await sync(wire, "a")).code == 0


@pytest.mark.limits(max_lite_syncs_per_s=4)
@pytest.mark.still
async def test_one_address_may_use_half_of_the_synchronizations_and_refused_ones_do_not_count(node: Node) -> None:
    ready(node)
    greedy, other = Peer(node.server, 1, "10.0.0.1"), Peer(node.server, 1, "10.0.0.2")

    def code(peer: Peer, name: str) -> int:
        change = LiteSubscription(LiteAction.PARTIAL_ADD, "c1", "g", "t", (name,))
        peer.send(request(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change)))
        (answer,) = peer.received()
        return answer.code

    illegal, busy = ResponseCode.INVALID_PARAMETER, ResponseCode.SYSTEM_BUSY
    assert [code(greedy, "a b") for _ in range(3)] == [illegal] * 3
    assert [code(greedy, "a") for _ in range(4)] == [0, 0, busy, busy]
    assert [code(other, "a") for _ in range(3)] == [0, 0, busy]
    for client in (greedy, other):
        client.hang_up()


async def test_group_that_is_new_is_bound_by_its_first_synchronization(node: Node, wire: Wire) -> None:
    put(node, message_type="LITE")
    assert (await sync(wire, "a")).code == 0
    group = node.broker.group_configs.get("g")
    assert group is not None
    assert group.lite_topic == "t"


@pytest.mark.parametrize("is_created", [False, True], ids=["bound by a client", "created for the parent topic"])
async def test_progress_of_a_lite_group_is_found_by_the_route_of_its_retry_topic(
    node: Node, wire: Wire, is_created: bool
) -> None:
    put(node, message_type="LITE")
    if is_created:
        await put_group(wire, **{"+lite.bind.topic": "t"})
    else:
        await sync(wire, "a")

    async def has_route() -> bool:  # mqadmin's consumerProgress asks its brokers
        return (await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%g"})).code == 0

    await eventually(has_route)
    if is_created:
        await sync(wire, "a")
    await fill(wire, "a", b"1", b"2")
    await fill(wire, "unread", b"x")
    shown = await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    assert sum(item.lag for item in decode_consume_stats(shown.body).values()) == 2
    assert {queue.topic for queue in decode_consume_stats(shown.body)} == {"t"}


async def test_lag_of_a_lite_group_in_all_reports_is_that_of_its_lite_topics(node: Node, wire: Wire) -> None:
    ready(node)
    await sync(wire, "a")
    await fill(wire, "a", b"1", b"2", b"3")
    await fill(wire, "unread", b"x")
    await popped(wire, maxMsgNum=1)
    report = orjson.loads((await wire.call(RequestCode.GET_GROUP_HISTORY, {"consumerGroup": "g"})).body)
    (lag,) = report["lag"]
    assert (lag["topic"], lag["messages"], lag["inHand"]) == ("t", 3, 1)
    assert lag["oldestMs"] == min(record.store_ms for record in stored(node))
    of_all = await wire.call(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
    assert b'"totalDiff":3' in of_all.body
    spans = await wire.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "t", "group": "g"})
    assert len(orjson.loads(spans.body)["consumeTimeSpanSet"]) == 4


async def test_messages_of_a_lite_topic_that_its_last_member_has_left_are_no_lag(
    node: Node, wire: Wire, connect: Connect
) -> None:
    ready(node)
    other = await connect(node.address)
    await fill(wire, "a", b"1")
    lags = []
    for action in (LiteAction.PARTIAL_ADD, LiteAction.PARTIAL_REMOVE):
        for member, client_id in ((wire, "c1"), (other, "c2")):
            assert (await sync(member, "a", client_id=client_id, action=action)).code == 0
            lags.append(finish(node.broker.progress.lag("g", "t")).messages)
    assert lags == [1, 1, 1, 0]


async def test_evicted_client_of_an_exclusive_group_is_notified(node: Node, wire: Wire, connect: Connect) -> None:
    ready(node, lite_sub_model="Exclusive")
    other = await connect(node.address)
    await sync(wire, "a")
    await sync(other, "a", client_id="c2")
    notice = await wire.request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)
    assert notice.ext == {"liteTopic": "a", "consumerGroup": "g", "clientId": "c1"}
    await fill(other, "a", b"1")
    assert (await popped(wire), bodies(await popped(other))) == ([], [b"1"])


@pytest.mark.parametrize("action", [LiteAction.COMPLETE_ADD, LiteAction.PARTIAL_ADD])
async def test_reconnected_client_of_an_exclusive_group_takes_over_from_its_open_earlier_connection(
    node: Node, wire: Wire, connect: Connect, action: LiteAction
) -> None:
    ready(node, lite_sub_model="Exclusive", lite_sub_reset_offset_exclusive="true")
    await fill(wire, "a", b"1", b"2")
    await sync(wire, "a", "b", "c")
    first, _ = await popped(wire)
    await wire.call(RequestCode.ACK_MESSAGE, place(first))
    await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 1)
    again = await connect(node.address)
    assert (await sync(again, "a", "b", action=action)).code == 0
    await fill(wire, "b", b"3")
    assert bodies(await popped(wire)) == [], "the earlier connection has lost the lite topics"
    assert bodies(await popped(again)) == [b"3"]
    assert (wire.requests, again.requests) == ([], []), "neither connection is notified"
    assert node.broker.lite_offsets.of("g", "t")["a"] == 1, "a reconnected client is not another one"
    assert node.broker.pops.lite.count == 3


async def test_whole_set_of_a_client_takes_no_lite_topic_from_another_client(
    node: Node, wire: Wire, connect: Connect
) -> None:
    ready(node, lite_sub_model="Exclusive")
    other = await connect(node.address)
    await sync(wire, "a")
    await sync(other, "a", "b", client_id="c2", action=LiteAction.COMPLETE_ADD)
    notice = await other.request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)
    assert notice.ext == {"liteTopic": "a", "consumerGroup": "g", "clientId": "c2"}
    await fill(wire, "a", b"1")
    assert (bodies(await popped(other)), bodies(await popped(wire))) == ([], [b"1"])


@pytest.mark.still
async def test_messages_of_a_closed_connection_come_back_when_their_time_is_over(node: Node, connect: Connect) -> None:
    clock = node.clock
    wire, other = await connect(node.address), await connect(node.address)
    ready(node)
    await fill(wire, "a", b"1")
    await sync(wire, "a")
    assert bodies(await popped(wire, invisibleTime=30_000)) == [b"1"]
    await wire.close()
    await eventually(lambda: node.broker.pops.lite.count == 0)
    await sync(other, "a", client_id="c2", action=LiteAction.COMPLETE_ADD)
    assert await popped(other) == []
    clock.advance(30)
    assert [(record.body, record.reconsume_times) for record in await popped(other)] == [(b"1", 1)]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"queueId": 1}, ResponseCode.INVALID_PARAMETER),
        ({"consumerGroup": "other"}, ResponseCode.INVALID_PARAMETER),
        ({"offset": 3}, ResponseCode.NO_MESSAGE),
        ({"liteTopic": "missing"}, ResponseCode.NO_MESSAGE),
    ],
)
async def test_settling_is_refused_for_another_place(node: Node, wire: Wire, fields: dict[str, Any], code: int) -> None:
    ready(node)
    await fill(wire, "a", b"1")
    await sync(wire, "a")
    (record,) = await popped(wire)
    assert (await wire.call(RequestCode.ACK_MESSAGE, place(record, **fields))).code == code
    changed = place(record, **{"invisibleTime": 1, **fields})
    assert (await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)).code == code


async def test_lite_topic_that_a_client_leaves_out_is_found_in_the_receipt_handle(node: Node, wire: Wire) -> None:
    ready(node)
    await fill(wire, "a", b"1")
    await sync(wire, "a")
    (record,) = await popped(wire)
    changed = place(record, invisibleTime=60_000)
    settled = place(record)
    del changed["liteTopic"], settled["liteTopic"]
    refused = await wire.call(RequestCode.ACK_MESSAGE, {**settled, "consumerGroup": "other"})
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert (await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)).code == 0
    assert (await wire.call(RequestCode.ACK_MESSAGE, settled)).code == 0
    await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 1)


async def test_messages_of_lite_topics_are_not_acknowledged_in_batches(node: Node, wire: Wire) -> None:
    body = orjson.dumps({"acks": [{"c": "g", "t": "%LMQ%$t$a", "q": 0, "so": 0, "pt": 1, "b": "AQ=="}]})
    assert (await wire.call(RequestCode.BATCH_ACK_MESSAGE, body=body)).code == ResponseCode.ILLEGAL_OPERATION


@pytest.mark.limits(max_unfinished_of_lite_client=3)
async def test_client_with_too_many_unacknowledged_messages_gets_no_more(
    node: Node, wire: Wire, connect: Connect
) -> None:
    ready(node)
    other = await connect(node.address)
    for name in "abcde":
        await fill(wire, name, b"1")
    await sync(wire, *"abcde")
    await sync(other, *"abcde", client_id="c2")
    assert len(await popped(wire, maxMsgNum=2)) == 2
    (third,) = await popped(wire)
    refused = await wire.call(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=15_000))
    assert (refused.code, "unacknowledged" in str(refused.remark)) == (ResponseCode.SYSTEM_BUSY, True)
    assert len(await popped(other)) == 2
    await wire.call(RequestCode.ACK_MESSAGE, place(third))
    await fill(wire, "a2", b"2")
    await sync(wire, "a2")
    assert bodies(await popped(wire)) == [b"2"]


@pytest.mark.limits(max_unfinished_of_lite_client=3)
async def test_client_near_its_limit_gets_no_more_than_it_requests(node: Node, wire: Wire) -> None:
    ready(node)
    for name in "abcdef":
        await fill(wire, name, b"1")
    await sync(wire, *"abcdef")
    for _ in range(4):
        (message,) = await popped(wire, maxMsgNum=1)
        await wire.call(RequestCode.ACK_MESSAGE, place(message))


@pytest.mark.limits(max_unfinished_of_lite_client=1)
async def test_waiting_pop_of_a_client_at_its_limit_blocks_no_other_client(
    node: Node, wire: Wire, connect: Connect
) -> None:
    ready(node)
    other = await connect(node.address)
    await sync(wire, "a", "b")
    await sync(other, "b", client_id="c2")
    first, second = (wire.send(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=15_000)) for _ in range(2))
    await eventually(lambda: node.broker.pops.waiting == 2)
    waiting = other.send(RequestCode.POP_LITE_MESSAGE, pop_lite(clientId="c2", pollTime=15_000))
    await eventually(lambda: node.broker.pops.waiting == 3)
    producer = await connect(node.address)
    await fill(producer, "a", b"1")
    assert (await wire.answer(first)).code == 0
    await fill(producer, "b", b"2")
    assert (await wire.answer(second)).code == ResponseCode.SYSTEM_BUSY
    assert bodies(list(decode_records((await other.answer(waiting)).body))) == [b"2"]


async def test_first_wildcard_client_gets_earlier_messages_of_all_lite_topics(node: Node, wire: Wire) -> None:
    """The scan for them takes several event-loop iterations."""
    ready(node, lite_sub_wildcard="")
    count = 3 * SLICE + 7
    sends = [
        wire.send(RequestCode.SEND_MESSAGE_V2, send_v2(b="t", i=f"__LITE_TOPIC\x01n{number}"), b"%d" % number)
        for number in range(count)
    ]
    for opaque in sends:
        assert (await wire.answer(opaque)).code == 0
    await sync(wire, action=LiteAction.COMPLETE_ADD)
    found: set[bytes] = set()
    while len(found) < count:
        records = await popped(wire, pollTime=15_000)
        assert records
        found.update(bodies(records))
        for record in records:
            wire.send(RequestCode.ACK_MESSAGE, place(record))
    assert found == {b"%d" % number for number in range(count)}


async def test_broker_does_other_work_while_it_synchronizes_many_lite_topics(node: Node, wire: Wire) -> None:
    ready(node, lite_sub_client_quota="-1")
    names = tuple(f"n{number}" for number in range(MAX_SYNCED_LITE_TOPICS))
    change = LiteSubscription(LiteAction.COMPLETE_ADD, "c1", "g", "t", names)
    first = wire.send(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))
    while not node.broker.pops.lite.count:
        await asyncio.sleep(0)
    assert node.broker.pops.lite.count < len(names)
    second = wire.send(
        RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change._replace(names=("a", "n1")))
    )
    assert (await wire.answer(first)).code == (await wire.answer(second)).code == 0
    assert node.broker.pops.lite.count == 2
    pool = node.broker.pops.pools.lite_pool("g", "t")
    assert [set(item.names) for item in pool.queues.subscribers.values()] == [{"a", "n1"}]


@pytest.mark.parametrize("event", ["unsubscribed", "closed", "group deleted"])
async def test_synchronization_in_pieces_ends_with_its_client_or_group(
    node: Node, wire: Wire, connect: Connect, event: str
) -> None:
    ready(node, lite_sub_client_quota="-1")
    other = await connect(node.address)
    names = tuple(f"n{number}" for number in range(MAX_SYNCED_LITE_TOPICS))
    change = LiteSubscription(LiteAction.COMPLETE_ADD, "c1", "g", "t", names)
    wire.send(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))
    while not node.broker.pops.lite.count:
        await asyncio.sleep(0)
    if event == "closed":
        await wire.close()
    elif event == "unsubscribed":
        await sync(wire, action=LiteAction.COMPLETE_REMOVE)
    else:
        asked = {"groupName": "g", "removeOffset": "true"}
        assert (await other.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, asked)).code == 0
    await eventually(lambda: node.broker.pops.lite.count == 0)
    await node.broker.turns.done()
    assert node.broker.pops.lite.count == 0
    assert not any(pool.queues.subscribers for pool in node.broker.pops.pools.lite_pools())


async def test_synchronization_subscribes_nothing_after_its_connection_is_lost(node: Node) -> None:
    ready(node, lite_sub_client_quota="-1")
    names = tuple(f"n{number}" for number in range(LOOKS + 1))  # checked in two pieces of work
    changes = [
        LiteSubscription(LiteAction.COMPLETE_ADD, "c1", "g", "t", names),
        LiteSubscription(LiteAction.COMPLETE_ADD, "c1", "new", "t", ("a",)),
    ]
    items = [orjson.loads(encode_lite_subscription(change))["subscriptionSet"][0] for change in changes]
    peer = Peer(node.server, 1)
    await node.broker.turns.done()
    node.broker.turns.do_later(None for _ in ())  # so that only the first piece of work is done now
    peer.send(request(RequestCode.LITE_SUBSCRIPTION_CTL, body=orjson.dumps({"subscriptionSet": items})))
    assert peer.received() == [], "the request is not finished"
    peer.hang_up()
    await node.broker.turns.done()
    assert node.broker.pops.lite.count == 0
    assert not any(pool.queues.subscribers for pool in node.broker.pops.pools.lite_pools())
    assert node.broker.group_configs.get("new") is None


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "removeOffset": "true"}),
        (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"}),
    ],
)
async def test_synchronization_recreates_nothing_that_is_deleted_while_its_names_are_checked(
    node: Node, code: RequestCode, fields: dict[str, str]
) -> None:
    ready(node, lite_sub_client_quota="-1")
    names = tuple(f"n{number}" for number in range(LOOKS + 1))  # checked in two pieces of work
    change = LiteSubscription(LiteAction.COMPLETE_ADD, "c1", "g", "t", names)
    peer, admin = Peer(node.server, 1), Peer(node.server, 2)
    await node.broker.turns.done()
    node.broker.turns.do_later(None for _ in ())  # so that only the first piece of work is done now
    peer.send(request(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change)))
    assert peer.received() == [], "the request is not finished"
    admin.send(request(code, fields))
    await node.broker.turns.done()
    assert node.broker.pops.lite.count == 0
    assert not node.broker.pops.pools.all
    assert not node.broker.lite_offsets.all
    assert (node.broker.groups.get("g") is None) == (code == RequestCode.DELETE_SUBSCRIPTIONGROUP)


@pytest.mark.parametrize("action", [LiteAction.PARTIAL_REMOVE, LiteAction.COMPLETE_REMOVE])
async def test_client_that_unsubscribes_does_not_recreate_its_deleted_group(
    node: Node, wire: Wire, action: LiteAction
) -> None:
    ready(node)
    await sync(wire, "a")
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "removeOffset": "true"})).code == 0
    assert (await sync(wire, *("a",) * (action is LiteAction.PARTIAL_REMOVE), action=action)).code == 0
    assert node.broker.group_configs.get("g") is None
    assert not node.broker.pops.pools.all


@pytest.mark.parametrize("event", ["unsubscribed", "closed", "expired"])
@pytest.mark.still
async def test_subscriptions_of_a_client_that_left_are_removed_in_pieces(node: Node, event: str) -> None:
    ready(node, lite_sub_model="Exclusive", lite_sub_client_quota="-1")
    names = tuple(f"n{number}" for number in range(2 * SLICE))
    peer = Peer(node.server, 1)

    def change(client_id: str, action: LiteAction, *names: str) -> bytes:
        body = encode_lite_subscription(LiteSubscription(action, client_id, "g", "t", names))
        return request(RequestCode.LITE_SUBSCRIPTION_CTL, body=body)

    peer.send(change("c1", LiteAction.COMPLETE_ADD, *names))
    await node.broker.turns.done()
    assert node.broker.pops.lite.count == len(names)
    node.broker.turns.do_later(None for _ in ())  # so that at most the first piece of work is done now
    if event == "unsubscribed":
        peer.send(change("c1", LiteAction.COMPLETE_REMOVE))
    elif event == "closed":
        peer.hang_up()
    else:
        node.clock.advance(LITE_SYNC_S + 1)
        node.broker.pops.lite.expire()
    assert node.broker.pops.lite.count > 0
    other = Peer(node.server, 2)  # the broker closes connections that were idle while the clock advanced
    other.send(change("c2", LiteAction.COMPLETE_ADD, names[-1]))
    await node.broker.turns.done()
    assert node.broker.pops.lite.count == 1
    pool = node.broker.pops.pools.lite_pool("g", "t")
    assert [(item.client.client_id, set(item.names)) for item in pool.queues.subscribers.values()] == [
        ("c2", {names[-1]})
    ]
    assert [item.client.client_id for item in pool.queues.subscribers_of(names[-1])] == ["c2"]
    assert not pool.queues.subscribers_of(names[0])


async def test_deleted_lite_topic_takes_the_offsets_of_its_groups_with_it(node: Node, wire: Wire) -> None:
    ready(node)
    node.broker.group_configs.put(GroupConfig("other", attributes={"lite.bind.topic": "t"}))
    await fill(wire, "a", b"1")
    await fill(wire, "b", b"1")
    for group in ("g", "other"):
        await sync(wire, "a", "b", group=group)
        for record in await popped(wire, consumerGroup=group):
            await wire.call(RequestCode.ACK_MESSAGE, place(record, consumerGroup=group))
    offsets = node.broker.lite_offsets
    await eventually(lambda: offsets.of("g", "t") == offsets.of("other", "t") == {"a": 1, "b": 1})
    node.broker.pops.expiry.delete(node.broker.lites.of("t")["a"])
    assert offsets.of("g", "t") == offsets.of("other", "t") == {"b": 1}
    await fill(wire, "a", b"2")
    await sync(wire, "a")
    assert bodies(await popped(wire)) == [b"2"]


@pytest.mark.still
async def test_offset_in_a_lite_topic_is_found_by_its_time(node: Node, wire: Wire) -> None:
    clock = node.clock
    ready(node)
    await fill(wire, "a", b"1", b"2")
    clock.advance(10)
    at_ms = clock.time_ms()
    await fill(wire, "a", b"3")
    for name, time_ms, offset in (("a", at_ms, "2"), ("a", 0, "0"), ("a", at_ms + 1, "3"), ("missing", 0, "0")):
        asked = {"topic": "t", "queueId": 0, "timestamp": time_ms, "liteTopic": name}
        assert (await wire.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)).ext["offset"] == offset


def test_subscriptions_are_encoded_as_they_are_read() -> None:
    for policy in OffsetPolicy:
        value = 7 if policy in (OffsetPolicy.OFFSET, OffsetPolicy.TAIL, OffsetPolicy.TIMESTAMP) else 0
        change = LiteSubscription(LiteAction.PARTIAL_ADD, "c", "g", "t", ("a", "b"), LiteOffset(policy, value))
        assert decode_lite_subscriptions(encode_lite_subscription(change)) == [change]
    (item,) = orjson.loads(encode_lite_subscription(change._replace(action=LiteAction.COMPLETE_ADD)))["subscriptionSet"]
    assert (item["action"], item["liteTopicSet"]) == ("COMPLETE_ADD", ["a", "b"])
    assert item["offsetOption"] == {"type": "TIMESTAMP", "value": 7}


@pytest.mark.parametrize(
    "item",
    [{"action": "ADD"}, {"offsetOption": {"type": "NEXT"}}, {"liteTopicSet": [7]}, {"clientId": None}],
)
def test_invalid_subscription_is_refused(item: dict[str, Any]) -> None:
    valid = {"action": "PARTIAL_ADD", "clientId": "c", "group": "g", "topic": "t"}
    with pytest.raises(BodyError):
        decode_lite_subscriptions(orjson.dumps({"subscriptionSet": [{**valid, **item}]}))


@pytest.mark.parametrize("body", [b"{}", b'{"subscriptionSet":[]}', b'{"subscriptionSet":null}'])
def test_synchronization_of_no_subscription_is_refused_because_it_would_need_no_permission(body: bytes) -> None:
    with pytest.raises(BodyError, match="expected at least one"):
        decode_lite_subscriptions(body)


# Reports, for mqadmin of 5.5


async def report(wire: Wire, code: RequestCode, **fields: Any) -> Any:
    found = await wire.call(code, fields)
    assert found.code == 0, found.remark
    return orjson.loads(found.body)


@pytest.mark.still
async def test_reports_describe_lite_topics_with_their_clients_and_groups(node: Node, wire: Wire) -> None:
    clock = node.clock
    ready(node)
    start_ms = clock.time_ms()
    await fill(wire, "a", b"1", b"2", b"3")
    clock.advance(1)
    await fill(wire, "b", b"1")
    await fill(wire, "other", b"x")
    await sync(wire, "a", "b")
    first, *_ = await popped(wire, maxMsgNum=1)
    await wire.call(RequestCode.ACK_MESSAGE, place(first))
    await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 1)
    clock.advance(7)

    of_broker = await report(wire, RequestCode.GET_BROKER_LITE_INFO)
    assert (of_broker["currentLmqNum"], of_broker["liteSubscriptionCount"]) == (3, 2)
    assert (of_broker["topicMeta"], of_broker["groupMeta"]) == ({"t": -1}, {"t": ["g"]})
    of_parent = await report(wire, RequestCode.GET_PARENT_TOPIC_INFO, topic="t")
    assert (of_parent["topic"], of_parent["groups"], of_parent["liteTopicCount"]) == ("t", ["g"], 3)

    of_lite = await report(wire, RequestCode.GET_LITE_TOPIC_INFO, parentTopic="t", liteTopic="a")
    assert [item["group"] for item in of_lite["subscriber"]] == ["g"]
    assert of_lite["topicOffset"] == {"minOffset": 0, "maxOffset": 3, "lastUpdateTimestamp": start_ms}
    assert of_lite["shardingToBroker"] is True
    unknown = await report(wire, RequestCode.GET_LITE_TOPIC_INFO, parentTopic="t", liteTopic="new")
    assert (unknown["subscriber"], unknown["shardingToBroker"]) == ([], False)

    client_id = of_lite["subscriber"][0]["clientId"]
    asked = {"parentTopic": "t", "group": "g", "clientId": client_id}
    of_client = await report(wire, RequestCode.GET_LITE_CLIENT_INFO, **asked)
    assert (of_client["liteTopicCount"], sorted(of_client["liteTopicSet"])) == (2, ["%LMQ%$t$a", "%LMQ%$t$b"])
    assert of_client["lastAccessTime"] == start_ms + 1000
    assert len((await report(wire, RequestCode.GET_LITE_CLIENT_INFO, **asked, maxCount=1))["liteTopicSet"]) == 1
    nobody = await report(wire, RequestCode.GET_LITE_CLIENT_INFO, **{**asked, "clientId": "nobody"})
    assert (nobody["liteTopicCount"], nobody["liteTopicSet"]) == (-1, [])

    of_group = await report(wire, RequestCode.GET_LITE_GROUP_INFO, group="g", topK=1)
    assert (of_group["parentTopic"], of_group["totalLagCount"]) == ("t", 3)
    assert of_group["earliestUnconsumedTimestamp"] == start_ms
    longest = {"liteTopic": "a", "lagCount": 2, "earliestUnconsumedTimestamp": start_ms}
    longest |= {"inFlight": 0, "earliestWaitingTimestamp": start_ms}
    assert of_group["lagCountTopK"] == of_group["lagTimestampTopK"] == [longest]
    of_one = await report(wire, RequestCode.GET_LITE_GROUP_INFO, group="g", liteTopic="b")
    assert (of_one["totalLagCount"], of_one["earliestUnconsumedTimestamp"]) == (1, start_ms + 1000)
    assert (of_one["liteTopicOffsetWrapper"]["brokerOffset"], of_one["liteTopicOffsetWrapper"]["consumerOffset"]) == (
        1,
        0,
    )


async def test_report_on_a_client_lists_up_to_1024_lite_topics(node: Node, wire: Wire) -> None:
    ready(node, lite_sub_client_quota="-1")
    assert (await sync(wire, *(f"n{number}" for number in range(MAX_QUERY_ENTRIES + 1)))).code == 0
    asked = {"parentTopic": "t", "group": "g", "clientId": "c1"}
    for most, listed in ((MAX_QUERY_ENTRIES - 1, MAX_QUERY_ENTRIES - 1), (1 << 30, MAX_QUERY_ENTRIES), (-1, 0)):
        found = await report(wire, RequestCode.GET_LITE_CLIENT_INFO, **asked, maxCount=most)
        assert (found["liteTopicCount"], len(found["liteTopicSet"])) == (MAX_QUERY_ENTRIES + 1, listed)


async def test_report_on_a_group_pauses_between_reads_of_lite_topics(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(node)
    names = [f"n{number}" for number in range(5 * LITE_READS)]
    for name in names:
        await fill(wire, name, b"1", b"2")
    await sync(wire, *names)
    got = 0
    while got < len(names):
        got += len(records := await popped(wire, maxMsgNum=1))
        assert records
    reads, pieces = 0, list[int]()
    stored_ms = node.broker.lites.stored_ms

    def counted(lite: LiteTopic, offset: int) -> int:
        nonlocal reads
        reads += 1
        return stored_ms(lite, offset)

    monkeypatch.setattr(node.broker.lites, "stored_ms", counted)
    frame = Frame(RequestCode.GET_LITE_GROUP_INFO, 1, {"group": "g", "topK": str(len(names))})
    work = lite_group_info(node.broker, cast("RemotingConnection", None), frame)
    with pytest.raises(StopIteration) as ended:
        while True:
            next(work)
            pieces.append(reads)
            reads = 0
    pieces.append(reads)
    cursor = FrameCursor(1 << 20)
    cursor.feed(b"".join(ended.value.value))
    answer = cursor.next()
    assert answer is not None
    found = orjson.loads(answer.body)
    assert {len(found[name]) for name in ("lagCountTopK", "lagTimestampTopK")} == {len(names)}
    assert {item["inFlight"] for item in found["lagCountTopK"]} == {1}
    assert sum(pieces) >= 3 * len(names)
    assert max(pieces) <= 2 * LITE_READS


async def test_lag_of_a_lite_group_reads_one_message_of_each_queue(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(node)
    names = [f"n{number}" for number in range(100)]
    for name in names:
        await fill(wire, name, b"1", b"2")
    await sync(wire, *names)
    first, *_ = await popped(wire, maxMsgNum=1)
    await wire.call(RequestCode.ACK_MESSAGE, place(first))
    reads: list[int] = []
    store_time_ms = node.broker.store.store_time_ms

    def counted(queue: ConsumeQueue, offset: int) -> int:
        reads.append(offset)
        return store_time_ms(queue, offset)

    monkeypatch.setattr(node.broker.store, "store_time_ms", counted)
    lag = finish(node.broker.progress.lag("g", "t"))
    assert (lag.messages, lag.in_flight) == (199, 0)
    assert 1 <= len(reads) <= node.broker.topics.queues_of("t")
    unread = [record for record in stored(node) if record.physical_offset != first.physical_offset]
    assert lag.since_ms == min(record.store_ms for record in unread)


REFUSED_REPORTS: list[tuple[RequestCode, dict[str, str], ResponseCode]] = [
    (RequestCode.GET_PARENT_TOPIC_INFO, {"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST),
    (RequestCode.GET_PARENT_TOPIC_INFO, {"topic": "normal"}, ResponseCode.INVALID_PARAMETER),
    (
        RequestCode.GET_LITE_TOPIC_INFO,
        {"parentTopic": "missing", "liteTopic": "a"},
        ResponseCode.TOPIC_NOT_EXIST,
    ),
    (
        RequestCode.GET_LITE_CLIENT_INFO,
        {"parentTopic": "t", "group": "plain", "clientId": "c"},
        ResponseCode.INVALID_PARAMETER,
    ),
    (RequestCode.GET_LITE_GROUP_INFO, {"group": "missing"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    (RequestCode.GET_LITE_GROUP_INFO, {"group": "plain"}, ResponseCode.INVALID_PARAMETER),
    (RequestCode.TRIGGER_LITE_DISPATCH, {"group": "plain"}, ResponseCode.INVALID_PARAMETER),
]


async def test_reports_are_refused_for_other_topics_and_groups(node: Node, wire: Wire) -> None:
    ready(node)
    put(node, "normal")
    node.broker.group_configs.put(GroupConfig("plain"))
    for code, fields, expected in REFUSED_REPORTS:
        assert (await wire.call(code, fields)).code == expected


async def test_dispatch_is_triggered_for_clients_that_wait(node: Node, wire: Wire, connect: Connect) -> None:
    ready(node)
    other = await connect(node.address)
    await sync(wire, "a")
    waiting = wire.send(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=15_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    assert (await other.call(RequestCode.TRIGGER_LITE_DISPATCH, {"group": "g"})).code == 0
    assert node.broker.pops.waiting == 1
    await fill(other, "a", b"1")
    assert bodies(list(decode_records((await wire.answer(waiting)).body))) == [b"1"]


async def test_broker_keeps_offsets_in_lite_topics_up_to_its_limit(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(limits=Limits(max_lite_offsets=3))
    wire = await connect(node.address)
    ready(node)
    node.broker.group_configs.put(GroupConfig("other", attributes={"lite.bind.topic": "t"}))
    for name in ("a", "b", "c"):
        await fill(wire, name, b"1", b"2")
    end = LiteOffset(OffsetPolicy.MAX)
    for group, name in (("other", "a"), ("other", "b"), ("g", "a")):
        assert (await sync(wire, name, group=group, offset=end)).code == 0
    assert node.broker.lite_offsets.count == 3
    refused = await sync(wire, "b", offset=end)
    assert (refused.code != 0, "keeps 3 offsets" in str(refused.remark)) == (True, True)
    assert (await sync(wire, "a", offset=LiteOffset(OffsetPolicy.MIN))).code == 0, "it has an offset"
    assert (await sync(wire, "c", group="g", offset=LiteOffset(OffsetPolicy.MIN))).code == 0, "it needs none"

    await sync(wire, "c", action=LiteAction.PARTIAL_ADD)
    answers = [await wire.call(RequestCode.POP_LITE_MESSAGE, pop_lite(maxMsgNum=32)) for _ in range(3)]
    records = [record for answer in answers for record in decode_records(answer.body)]
    assert bodies(records) == [b"1", b"2"]
    assert {find(record.properties, "__LITE_TOPIC") for record in records} == {"a"}, "the other one has no place"
    assert any("keeps 3 offsets" in str(answer.remark) for answer in answers)

    deletion = {"groupName": "other", "removeOffset": "true"}
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, deletion)).code == 0
    assert node.broker.lite_offsets.count == 1
    assert bodies(await popped(wire)) == [b"1", b"2"]
    assert node.broker.lite_offsets.count == 2
    node.broker.pops.expiry.delete(node.broker.lites.of("t")["c"])
    assert node.broker.lite_offsets.count == 1


async def test_waiting_receive_ends_with_the_reason_when_a_group_cannot_have_another_offset(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start(limits=Limits(max_lite_offsets=0))
    wire, other = await connect(node.address), await connect(node.address)
    ready(node)
    await sync(wire, "a")
    waiting = wire.send(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=60_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    with capture_logs() as logs:
        await fill(other, "a", b"1")
        answer = await wire.answer(waiting)
    assert "keeps 0 offsets" in str(answer.remark)
    assert [log["event"] for log in logs] == ["receive_failed"]


@pytest.mark.parametrize("columns", ["true", "false"])
async def test_progress_of_a_lite_group_counts_only_what_its_clients_wait_for(
    node: Node, wire: Wire, columns: str
) -> None:
    ready(node)
    await fill(wire, "a", b"1", b"2", b"3")
    await fill(wire, "other", b"x")
    await sync(wire, "a")
    first, *_ = await popped(wire, maxMsgNum=1)
    await wire.call(RequestCode.ACK_MESSAGE, place(first))
    await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 1)
    found = await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g", "columns": columns})
    progress = decode_consume_stats(found.body)
    assert {queue.topic for queue in progress} == {"t"}
    assert sum(item.lag for item in progress.values()) == 2


async def test_reports_on_a_lite_group_without_clients_keep_no_pool(node: Node, wire: Wire) -> None:
    ready(node)
    await fill(wire, "a", b"1", b"2", b"3")
    node.broker.lite_offsets.put("g", "t", "a", 1)
    for columns in ("true", "false"):
        found = await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g", "columns": columns})
        assert sum(item.lag for item in decode_consume_stats(found.body).values()) == 2
    for _ in node.broker.progress.lag("g", "t"):
        pass
    assert node.broker.progress.committed("g", "t") == 1
    await report(wire, RequestCode.GET_LITE_GROUP_INFO, group="g")
    assert not node.broker.pops.pools.all


async def test_reports_on_a_lite_group_that_has_read_nothing_keep_nothing(node: Node, wire: Wire) -> None:
    ready(node)
    await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    await report(wire, RequestCode.GET_LITE_GROUP_INFO, group="g")
    assert finish(node.broker.progress.lag("g", "t")).messages == 0
    assert not node.broker.lite_offsets.all
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "removeOffset": "true"})).code == 0
    assert node.broker.groups.get("g") is None


async def test_report_on_a_group_that_popped_the_parent_topic_before_it_was_bound_changes_nothing(
    node: Node, wire: Wire
) -> None:
    put(node, message_type="LITE")
    assert (await wire.call(RequestCode.POP_MESSAGE, pop())).code == ResponseCode.POLLING_TIMEOUT
    ready(node)
    await fill(wire, "a", b"1")
    assert (await report(wire, RequestCode.GET_LITE_GROUP_INFO, group="g"))["totalLagCount"] == 0
    await sync(wire, "a")
    assert bodies(await popped(wire)) == [b"1"]
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "removeOffset": "true"})).code == 0
    assert not node.broker.pops.pools.all


# Other consumers of a bound group


LEASED = tuple(Queue("t", "broker-a", number) for number in range(4))


@pytest.mark.parametrize("in_flight", [0, 1])
async def test_leases_of_the_pool_of_a_bound_group_end_when_the_broker_starts(
    nodes: Nodes, connect: Connect, in_flight: int
) -> None:
    """Earlier releases divided the pool of a lite group when a member subscribed to its parent topic."""
    node = await nodes.start()
    ready(node)
    lite = await connect(node.address)
    assert (await sync(lite, "a")).code == 0
    for _ in range(in_flight):
        await fill(lite, "a", b"0")
        assert bodies(await popped(lite, invisibleTime=1)) == [b"0"]
    node.broker.locks.lock(LockRequest(SHARED_OWNER, "g", LEASED, handover=True), peer())
    node.broker.locks.lock(LockRequest("c9", "h", LEASED, handover=True), peer())
    await node.stop()
    restarted = await nodes.start(port=int(node.address.rpartition(":")[2]))
    assert restarted.broker.locks.leases_of(SHARED_OWNER) == {}
    assert len(restarted.broker.locks.leases_of("c9")) == 4
    wire = await connect(restarted.address)
    assert (await sync(wire, "a")).code == 0
    await fill(wire, "a", b"1")
    assert bodies(await popped(wire)) == [b"0" if in_flight else b"1"]


async def test_broker_starts_after_an_ordinary_heartbeat_of_a_bound_group(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    ready(node)
    lite, other = await connect(node.address), await connect(node.address)
    assert (await sync(lite, "a")).code == 0
    waiting = asyncio.create_task(lite.call(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=10_000)))
    await eventually(lambda: node.broker.pops.waiting == 1)
    refused = await beat(other, "c2", {"t": "*"})
    assert (refused.code, refused.remark) == (
        ResponseCode.NO_PERMISSION,
        "the group g receives lite topics of t; use a lite consumer or another group, or stop its lite consumers and run "
        "`rocketlet groups set g --no-lite`",
    )
    await lite.close()
    waiting.cancel()
    await eventually(lambda: node.broker.pops.waiting == 0)
    again = await connect(node.address)
    assert (await sync(again, "a", client_id="c3")).code == 0
    await fill(again, "a", b"1")
    assert bodies(await popped(again, clientId="c3", invisibleTime=1)) == [b"1"]
    await node.stop()
    restarted = await nodes.start(port=int(node.address.rpartition(":")[2]))
    wire = await connect(restarted.address)
    assert (await sync(wire, "a", client_id="c3")).code == 0
    assert bodies(await popped(wire, clientId="c3")) == [b"1"]


async def test_lite_group_becomes_a_group_of_topics_once_it_has_no_unfinished_messages(
    node: Node, wire: Wire, connect: Connect
) -> None:
    put(node, message_type="LITE")
    put(node, "plain")
    other = await connect(node.address)
    assert (await sync(wire, "a")).code == 0, "a stray consumer makes the new group a lite group"
    await fill(other, "a", b"1")
    (record,) = await popped(wire)
    async with AdminClient(node.address) as admin:
        with pytest.raises(BrokerRefused, match="unfinished messages of lite topics of t"):
            await admin.change_group("g", lite=False)
        refused = await other.call(RequestCode.POP_MESSAGE, pop("plain"))
        assert "rocketlet groups set g --no-lite" in str(refused.remark)
        await wire.call(RequestCode.ACK_MESSAGE, place(record))
        await eventually(lambda: node.broker.lite_offsets.of("g", "t").get("a") == 1)
        waiting = wire.send(RequestCode.POP_LITE_MESSAGE, pop_lite(pollTime=60_000))
        await eventually(lambda: node.broker.pops.waiting == 1)
        await admin.change_group("g", lite=False)
    assert (await wire.answer(waiting)).code != 0
    assert node.broker.pops.lite.count == 0
    settings = node.broker.group_configs.get("g")
    assert settings is not None
    assert settings.lite_topic == ""
    assert (await other.call(RequestCode.POP_MESSAGE, pop("plain"))).code in (0, ResponseCode.POLLING_TIMEOUT)
    await send(other, b"2", topic="plain")
    assert bodies(list(decode_records((await other.call(RequestCode.POP_MESSAGE, pop("plain"))).body))) == [b"2"]
    assert "not a lite group" in str((await sync(wire, "a")).remark)
