"""Half messages: kept from consumers until their producer says what becomes of them, asked for, put aside."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.runtime import MovableClock
from rocketlet.client import Message
from rocketlet.protocol import bodies, names
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import Heartbeat, finish
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.message import Record, decode_record, decode_records
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.clocks import WallClock
from ...support.requests import COMMIT, QUEUE, ROLLBACK, UNKNOWN, end, half, pull, send


async def found(wire: Wire, topic: str = "t", queue: int = 1) -> list[Record]:
    return list(decode_records((await wire.call(RequestCode.PULL_MESSAGE, pull(topic, queue=queue))).body))


async def test_a_committed_message_is_delivered_once(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    sent = await half(wire)
    assert await found(wire) == []
    for _ in range(2):
        assert (await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))).code == 0
    (record,) = await found(wire)
    properties = props.decode(record.properties)
    assert (record.body, record.queue_id, record.sys_flag & 0xC) == (b"pay", 1, 8)
    assert record.prepared_offset == int(str(sent.ext["msgId"])[-16:], 16)
    assert (properties["PGROUP"], properties["REAL_TOPIC"], properties["TAGS"]) == ("p", "t", "a")
    assert node.broker.transactions.waiting == 0


async def test_half_message_has_its_unique_key_as_transaction_id(wire: Wire) -> None:
    await create_topic(wire, "t")
    sent = await half(wire)
    assert sent.ext["transactionId"] == "u1"
    await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
    (record,) = await found(wire)
    assert props.decode(record.properties)["__transactionId__"] == "u1"
    assert "__transactionId__" not in Message(record, QUEUE, "t").user_properties  # so that it may be sent again


async def test_half_message_without_unique_key_is_stored_without_transaction_id(wire: Wire) -> None:
    await create_topic(wire, "t")
    sent = await send(wire, b"pay", queue=1, properties="TRAN_MSG\x01true\x02PGROUP\x01p", sys_flag=4)
    assert (sent.code, "transactionId" in sent.ext) == (0, False)
    await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT, msg_id=None))
    (record,) = await found(wire)
    assert "__transactionId__" not in record.properties


async def test_a_message_rolled_back_is_never_delivered_nor_committed_later(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    sent = await half(wire)
    assert (await wire.call(RequestCode.END_TRANSACTION, end(sent, ROLLBACK))).code == 0
    for _ in range(2):
        late = await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
        assert (late.code, "rolled back" in (late.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
        assert (await wire.call(RequestCode.END_TRANSACTION, end(sent, ROLLBACK))).code == 0
        await node.stop()
        node = await nodes.start()
        wire = await connect(node.address)
    assert await found(wire) == []
    (note,) = decode_records((await wire.call(RequestCode.PULL_MESSAGE, pull(names.OP_HALF_TOPIC))).body)
    assert (note.body, props.find(note.properties, "TAGS")) == (sent.ext["queueOffset"].encode(), "d")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"producer_group": "other"}, "group"),
        ({"tran_state_table_offset": 9}, "no half message"),
        ({"commit_log_offset": 10**9}, "no half message"),
        ({"commit_or_rollback": 4}, "commitOrRollback"),
        ({"msg_id": "lost, and its place taken"}, "no half message"),
    ],
)
async def test_an_outcome_that_does_not_fit_changes_nothing(
    node: Node, wire: Wire, fields: dict[str, Any], words: str
) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.END_TRANSACTION, end(await half(wire), COMMIT, **fields))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert words in (answer.remark or "")
    assert node.broker.transactions.waiting == 1
    assert await found(wire) == []


async def asked(wire: Wire) -> Frame:
    return await wire.request(RequestCode.CHECK_TRANSACTION_STATE)


async def test_a_silent_producer_is_asked_and_then_another_of_its_group(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_sweep_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    for wire, name in ((one, "c1"), (two, "c2")):
        await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat(name, producer_groups=("p",))))
    sent = await half(one)
    question = await asked(one)
    record = decode_record(question.body)
    assert (record.topic, record.queue_id, record.body) == ("t", 1, b"pay")
    assert int(props.decode(record.properties)["TRANSACTION_CHECK_TIMES"]) >= 1
    assert (question.ext["tranStateTableOffset"], question.ext["transactionId"]) == (sent.ext["queueOffset"], "u1")
    one.send(RequestCode.END_TRANSACTION, end(sent, UNKNOWN), flag=2)
    await one.close()
    question = await asked(two)
    await two.call(RequestCode.END_TRANSACTION, end(sent, COMMIT, from_transaction_check=True))
    assert [item.body for item in await found(two)] == [b"pay"]


async def test_a_message_nobody_decides_is_put_aside_after_15_questions(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_sweep_s=0.001, transaction_timeout_s=0.0)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await half(wire)
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    await eventually(lambda: node.broker.transactions.waiting == 0)
    assert [item.body for item in await found(wire, names.CHECK_MAX_TIME_TOPIC, 0)] == [b"pay"]
    assert await found(wire) == []
    assert sum(frame.code == RequestCode.CHECK_TRANSACTION_STATE for frame in wire.requests) == 15


async def test_a_wall_clock_set_ahead_puts_no_half_message_aside(nodes: Nodes, connect: Connect) -> None:
    clock = WallClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    sent = await half(wire)
    clock.set_s = 30 * 86_400
    clock.advance(node.broker.config.transaction_sweep_s)
    finish(node.broker.transactions.checking())
    assert node.broker.transactions.waiting == 1
    await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
    assert [item.body for item in await found(wire)] == [b"pay"]


async def test_a_producer_whose_clock_is_far_behind_is_asked(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_sweep_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    await half(wire, born_timestamp=1)
    assert decode_record((await asked(wire)).body).body == b"pay"


async def test_what_was_decided_and_what_was_not_survives_a_restart(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_sweep_s=60.0)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    sent = [await half(wire, b"%d" % number) for number in range(4)]
    await wire.call(RequestCode.END_TRANSACTION, end(sent[1], COMMIT))
    await wire.call(RequestCode.END_TRANSACTION, end(sent[3], ROLLBACK))
    await node.stop()
    node = await nodes.start(transaction_sweep_s=60.0)
    wire = await connect(node.address)
    assert node.broker.transactions.waiting == 2
    for number in (0, 1, 2):
        await wire.call(RequestCode.END_TRANSACTION, end(sent[number], COMMIT))
    assert [item.body for item in await found(wire)] == [b"1", b"0", b"2"]


async def test_a_half_message_that_is_gone_is_named(wire: Wire, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topic(wire, "t")
    await half(wire)
    monkeypatch.setattr(node.broker.store, "record_at", lambda _: None)  # as of one that has expired
    with capture_logs() as logs:
        finish(node.broker.transactions.checking())
    assert [entry["event"] for entry in logs] == ["half_message_lost"]
    assert node.broker.transactions.waiting == 0


async def test_checks_that_fell_due_while_no_broker_ran_are_one_question(nodes: Nodes, connect: Connect) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    sent = await half(wire)
    await node.stop()
    clock.advance(86_400)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    clock.advance(node.config.transaction_sweep_s)
    await node.broker.turns.done()
    assert decode_record((await asked(wire)).body).body == b"pay"
    assert node.broker.transactions.waiting == 1
    for _ in range(2):
        await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT, from_transaction_check=True))
    assert not any(frame.code == RequestCode.CHECK_TRANSACTION_STATE for frame in wire.requests), "it was asked once"
    clock.advance(86_400)  # a connection that says nothing for so long is closed
    wire = await connect(node.address)
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    clock.advance(node.config.transaction_sweep_s)
    await node.broker.turns.done()
    assert [item.body for item in await found(wire)] == [b"pay"]
    assert not any(frame.code == RequestCode.CHECK_TRANSACTION_STATE for frame in wire.requests)
