"""Sends, times and transactions: what a producer asks, and how each of it may fail."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import duration_pb2
from rocketlet.broker.config import (
    MAX_CONTEXT_CHARS,
    MAX_GROUP_KEY_BYTES,
    MAX_MESSAGE_ID_CHARS,
    MAX_RECOVERY_S,
    MAX_SEND_MESSAGES,
    MAX_TIMER_DELAY_MS,
    MAX_USER_PROPERTIES,
    TRANSACTION_CHECK_INTERVAL_S,
)
from rocketlet.broker.grpc import schema
from rocketlet.protocol import properties as props
from rocketlet.protocol.codes import PERM_READ
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.testing.clock import MovableClock

from ...conftest import Node, Nodes
from ...support.grpc_client import GrpcClient, apply_settings, message, resource, sending
from ...support.topics import put, stored
from .conftest import Dial
from .receives import NOTHING, begin, received, request

OK = 20000


# Sends


async def test_a_message_is_stored_as_the_other_protocol_server_stores_it(node: Node, client: GrpcClient) -> None:
    put(node)
    sent = message("t", b"hello", message_id="01AB", tag="blue", keys=["k1", "k2"])
    sent.user_properties["color"] = "grün"
    sent.system_properties.born_timestamp.FromMilliseconds(1_700_000_000_123)
    answer = await client.call("SendMessage", sending(sent))
    (entry,) = answer.entries
    assert (answer.status.code, entry.status.code) == (OK, OK)
    assert (entry.message_id, entry.transaction_id, entry.offset) == ("01AB", "01AB", 0)
    (record,) = stored(node)
    found = props.decode(record.properties)
    assert (record.body, record.born_ms, record.sys_flag) == (b"hello", 1_700_000_000_123, 0)
    expected = {"color": "grün", "TAGS": "blue", "KEYS": "k1 k2", "UNIQ_KEY": "01AB", "PGROUP": "t"}
    assert {name: found.get(name) for name in expected} == expected


async def test_messages_of_a_call_are_stored_and_answered_one_by_one(node: Node, client: GrpcClient) -> None:
    put(node, queues=1)
    messages = [message("t", b"%d" % number, message_id=f"ID{number}") for number in range(3)]
    answer = await client.call("SendMessage", sending(*messages))
    assert [(entry.message_id, entry.offset) for entry in answer.entries] == [("ID0", 0), ("ID1", 1), ("ID2", 2)]
    assert [record.body for record in stored(node)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("count", [MAX_SEND_MESSAGES, MAX_SEND_MESSAGES + 1])
async def test_a_call_sends_this_many_messages(node: Node, client: GrpcClient, count: int) -> None:
    put(node)
    answer = await client.call("SendMessage", sending(*[message("t")] * count))
    is_legal = count <= MAX_SEND_MESSAGES
    assert (answer.status.code, len(stored(node))) == ((OK, count) if is_legal else (40016, 0))


@pytest.mark.parametrize(
    ("permission", "sends", "receives"), [(0, 40300, 40300), (2, OK, 40300), (4, 40300, OK), (6, OK, OK)]
)
async def test_permission_of_the_broker_holds_for_calls_as_that_of_the_topic(
    node: Node, client: GrpcClient, permission: int, sends: int, receives: int
) -> None:
    put(node)
    node.broker.change_config(replace(node.broker.config, permission=permission))
    assert (await client.call("SendMessage", sending(message("t")))).status.code == sends
    code, _ = await received(begin(client, request()))
    assert (OK if code == NOTHING else code) == receives


async def test_of_a_call_with_one_bad_message_nothing_is_stored(node: Node, client: GrpcClient) -> None:
    put(node, message_type="NORMAL")
    answer = await client.call("SendMessage", sending(message("t"), message("t", message_group="g")))
    assert answer.status.code == 40014
    assert stored(node) == []
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    assert len(stored(node)) == 1


async def test_messages_of_a_group_lie_in_one_queue_in_their_order(node: Node, client: GrpcClient) -> None:
    put(node, queues=8)
    for number in range(10):
        await client.call("SendMessage", sending(message("t", b"%d" % number, message_group="order-7")))
    records = stored(node)
    assert len({record.queue_id for record in records}) == 1
    assert [record.body for record in records] == [b"%d" % number for number in range(10)]
    assert props.find(records[0].properties, "__SHARDINGKEY") == "order-7"


def _with(**system: Any) -> Any:
    return message("t", **system)


def _properties(**properties: str) -> Any:
    found = message("t")
    found.user_properties.update(properties)
    return found


HALF = {"message_type": 4}


REFUSED_SENDS: list[tuple[Any, int]] = [
    (message("t", b"x" * (MAX_BODY_BYTES + 1)), 41301),
    (message("t", b""), 41302),
    (_properties(**{f"p{number}": "v" for number in range(MAX_USER_PROPERTIES + 1)}), 43101),
    (_properties(TAGS="x"), 40007),
    (_properties(POP_CK="x"), 40007),
    (_properties(a="b\x02TAGS\x01c"), 40007),
    (_properties(**{"a\x01b": "c"}), 40007),
    (_with(tag=" "), 40004),
    (_with(tag="a|b"), 40004),
    (_with(tag="a\x02b"), 40004),
    (_with(keys=[" "]), 40005),
    (_with(keys=["a", "b\x01"]), 40005),
    (_properties(a="x" * 16_384), 43101),
    (_with(tag="x" * 16_385), 43101),
    (_with(keys=["x" * 8192, "x" * 8192]), 43101),
    (_with(message_id=" "), 40009),
    (_with(message_id="x" * (MAX_MESSAGE_ID_CHARS + 1)), 40009),
    (_with(message_id="x\x02TRAN_MSG\x01true"), 40009),
    (
        _with(**HALF, orphaned_transaction_recovery_duration=duration_pb2.Duration(seconds=MAX_RECOVERY_S + 1)),
        40000,
    ),
    (_with(message_group=" "), 40006),
    (_with(message_group="x" * (MAX_GROUP_KEY_BYTES + 1)), 40006),
    (message("no-such-topic"), 40402),
    (message("read-only"), 40300),
    (message("SCHEDULE_TOPIC_XXXX"), 40002),
    (message("normal", message_group="g"), 40014),
]


async def test_what_may_not_be_sent(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(auto_create_topics=False)
    client = await dial(node.address)
    put(node)
    put(node, "read-only", perm=PERM_READ)
    put(node, "normal", message_type="NORMAL")
    for sent, code in REFUSED_SENDS:
        end = node.broker.store.end
        answer = await client.call("SendMessage", sending(sent))
        assert (answer.status.code, len(answer.entries)) == (code, 0)
        assert node.broker.store.end == end


ACCEPTED_SENDS: list[Any] = [
    message("t", b"x" * MAX_BODY_BYTES),
    _properties(**{f"p{number}": "v" for number in range(MAX_USER_PROPERTIES)}),
    _properties(a="x" * 16_383),
    _with(tag="x" * 16_384),
    _with(keys=["x" * 16_384]),
    _with(keys=["a b"]),
    _with(message_id="x" * MAX_MESSAGE_ID_CHARS),
    _with(message_group="x" * MAX_GROUP_KEY_BYTES),
]


async def test_what_may_just_be_sent(node: Node, client: GrpcClient) -> None:
    put(node)
    for sent in ACCEPTED_SENDS:
        assert (await client.call("SendMessage", sending(sent))).status.code == OK


async def test_nothing_to_send_and_several_topics_are_refused(node: Node, client: GrpcClient) -> None:
    put(node)
    assert (await client.call("SendMessage", sending())).status.code == 40016
    assert (await client.call("SendMessage", sending(message("t"), message("u")))).status.code == 40016


@pytest.mark.parametrize(
    ("hours", "allowed_ms"), [(24.0, 86_400_000), (960.0, MAX_TIMER_DELAY_MS), (9999.0, MAX_TIMER_DELAY_MS)]
)
async def test_delivery_time_is_refused_when_it_is_too_far_ahead(
    nodes: Nodes, dial: Dial, hours: float, allowed_ms: int
) -> None:
    node = await nodes.start(clock=MovableClock(stands=True), grpc_max_delay_hours=hours)
    put(node)
    client = await dial(node.address)
    codes = []
    for more_ms in (0, 1):
        sent = message("t")
        sent.system_properties.delivery_timestamp.FromMilliseconds(node.clock.time_ms() + allowed_ms + more_ms)
        codes.append((await client.call("SendMessage", sending(sent))).status.code)
    assert codes == [OK, 40012]


@pytest.mark.parametrize("size", [MAX_CONTEXT_CHARS, MAX_CONTEXT_CHARS + 1])
async def test_a_trace_context_that_is_too_long_is_left_out(node: Node, client: GrpcClient, size: int) -> None:
    put(node)
    sent = message("t", trace_context="x" * size, born_host="h\x02TAGS\x01a")
    assert (await client.call("SendMessage", sending(sent))).status.code == OK
    (record,) = stored(node)
    assert ("TRACE_CONTEXT" in record.properties) is (size == MAX_CONTEXT_CHARS)
    assert props.find(record.properties, "TAGS") is None


async def test_gzip_is_taken_out_for_those_who_cannot_read_it(node: Node, client: GrpcClient) -> None:
    put(node, queues=1)
    members = gzip.compress(b"one") + gzip.compress(b"two")
    for body in (gzip.compress(b"plain"), b"neither", members, members + b"x"):
        await client.call("SendMessage", sending(message("t", body, body_encoding=2)))
    found = [(record.body, record.sys_flag & 1) for record in stored(node)]
    assert found == [(b"plain", 0), (b"neither", 1), (b"onetwo", 0), (members + b"x", 1)]


async def test_a_full_disk_is_reported(node: Node, client: GrpcClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from rocketlet.broker.store.files import StoreFull

    put(node)

    def refuse() -> None:
        raise StoreFull("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node.broker.appender, "commit", refuse)
        answer = await client.call("SendMessage", sending(message("t")))
    assert answer.status.code == 50001
    assert "no space left" in answer.status.message
    node.broker.store.roll_back()
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    assert len(stored(node)) == 1


async def test_with_flush_sync_a_send_is_answered_when_it_is_on_the_device(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(flush="sync")
    put(node)
    client = await dial(node.address)
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    assert len(stored(node)) == 1


# Times


async def timed(node: Node, client: GrpcClient, after_ms: int) -> Any:
    sent = message("t", b"later", message_id="LATER")
    sent.system_properties.delivery_timestamp.FromMilliseconds(node.clock.time_ms() + after_ms)
    answer = await client.call("SendMessage", sending(sent))
    assert answer.status.code == OK
    return answer.entries[0]


@pytest.mark.still
async def test_a_message_is_delivered_at_its_time_to_the_millisecond(node: Node, dial: Dial) -> None:
    put(node)
    await timed(node, await dial(node.address), 5500)
    node.clock.advance(5.499)
    assert stored(node) == []
    node.clock.advance(0.001)
    assert [record.body for record in stored(node)] == [b"later"]


async def test_a_message_is_taken_back_before_its_time_and_once(node: Node, client: GrpcClient) -> None:
    put(node)
    put(node, "u")
    entry = await timed(node, client, 3_600_000)

    async def recall(topic: str, handle: str) -> Any:
        request = schema.RecallMessageRequest(topic=resource(topic), recall_handle=handle)
        return await client.call("RecallMessage", request)

    assert (await recall("u", entry.recall_handle)).status.code == 40000
    assert (await recall("none", entry.recall_handle)).status.code == 40402
    assert (await recall("t", "rubbish")).status.code == 40000
    answer = await recall("t", entry.recall_handle)
    assert (answer.status.code, answer.message_id) == (OK, "LATER")
    assert (await recall("t", entry.recall_handle)).status.code == 40401
    node.clock.advance(3601)
    assert stored(node) == []


async def test_a_message_without_a_time_has_no_handle(node: Node, client: GrpcClient) -> None:
    put(node)
    answer = await client.call("SendMessage", sending(message("t")))
    assert answer.entries[0].recall_handle == ""


# Transactions


async def half(client: GrpcClient) -> str:
    answer = await client.call("SendMessage", sending(message("t", b"half", message_id="HALF", **HALF)))
    assert answer.status.code == OK
    return str(answer.entries[0].transaction_id)


def outcome(transaction_id: str, resolution: int, topic: str = "t") -> Any:
    return schema.EndTransactionRequest(
        topic=resource(topic), message_id="HALF", transaction_id=transaction_id, resolution=resolution
    )


async def test_a_transaction_is_committed_once(node: Node, client: GrpcClient) -> None:
    put(node)
    transaction_id = await half(client)
    assert stored(node) == []
    for _ in range(2):
        assert (await client.call("EndTransaction", outcome(transaction_id, 1))).status.code == OK
    (record,) = stored(node)
    assert (record.body, props.find(record.properties, "__transactionId__")) == (b"half", transaction_id)
    assert node.broker.transactions.waiting == 0


async def test_a_transaction_is_rolled_back(node: Node, client: GrpcClient) -> None:
    put(node)
    transaction_id = await half(client)
    assert (await client.call("EndTransaction", outcome(transaction_id, 2))).status.code == OK
    assert (await client.call("EndTransaction", outcome(transaction_id, 1))).status.code == 40008
    assert (stored(node), node.broker.transactions.waiting) == ([], 0)


@pytest.mark.still
async def test_a_producer_is_asked_for_an_outcome_that_does_not_come(node: Node, dial: Dial) -> None:
    put(node)
    client = await dial(node.address)
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    call, _ = await apply_settings(client, settings)
    transaction_id = await half(client)
    node.clock.advance(TRANSACTION_CHECK_INTERVAL_S + 7)
    asked = (await call.next()).recover_orphaned_transaction_command
    assert (asked.transaction_id, asked.message.body, asked.message.topic.name) == (transaction_id, b"half", "t")
    assert asked.message.system_properties.message_id == "HALF"
    assert dict(asked.message.user_properties) == {"__transactionId__": "HALF"}
    assert (await client.call("EndTransaction", outcome(asked.transaction_id, 1))).status.code == OK
    assert [record.body for record in stored(node)] == [b"half"]


async def test_an_outcome_that_is_not_known_yet_changes_nothing(node: Node, client: GrpcClient) -> None:
    put(node)
    assert (await client.call("EndTransaction", outcome(await half(client), 0))).status.code == OK
    assert node.broker.transactions.waiting == 1


WRONG_IDS: list[str] = [
    "",
    " ",
    "x" * 32,
    "F" * 32,
    "0" * 31 + "1",
    "0" * 31,
    "+" + "0" * 31,
    " " + "0" * 31,
    "0_" + "0" * 30,
]


async def test_ids_of_no_transaction_are_refused(node: Node, client: GrpcClient) -> None:
    put(node)
    await half(client)
    for wrong in WRONG_IDS:
        assert (await client.call("EndTransaction", outcome(wrong, 1))).status.code == 40008
        assert node.broker.transactions.waiting == 1


async def test_a_transaction_is_not_ended_by_who_names_another_topic(node: Node, client: GrpcClient) -> None:
    put(node)
    put(node, "u")
    transaction_id = await half(client)
    assert (await client.call("EndTransaction", outcome(transaction_id, 1, "u"))).status.code == 40008
    assert node.broker.transactions.waiting == 1
