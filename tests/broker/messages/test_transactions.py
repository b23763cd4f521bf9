"""Half messages: kept from consumers until their producer says what becomes of them, asked for, put aside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import IDLE_LIMIT_S, LIMITS, MAX_TRANSACTION_TIMEOUT_S, BrokerConfig
from rocketlet.client import Message
from rocketlet.protocol import bodies, names
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import Heartbeat, TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.headers import SendMessage
from rocketlet.protocol.message import Record, decode_record, decode_records
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.clocks import WallClock
from ...support.requests import COMMIT, HALF_PROPERTIES, QUEUE, ROLLBACK, UNKNOWN, end, half, pull, send
from ...support.stores import HOST


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
        assert (late.code, late.ext["outcome"]) == (ResponseCode.TRANSACTION_FAILED, "rolled back")
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
    node = await nodes.start(transaction_check_interval_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
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


async def is_asked(wire: Wire) -> bool:
    """Return True if the broker has sent a check since the last call. A response comes after all earlier events."""
    await wire.call(RequestCode.GET_BROKER_CONFIG)
    checks = [frame for frame in wire.requests if frame.code == RequestCode.CHECK_TRANSACTION_STATE]
    wire.requests[:] = [frame for frame in wire.requests if frame not in checks]
    return bool(checks)


async def in_group(wire: Wire, client: str) -> None:
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat(client, producer_groups=("p",))))


@pytest.fixture
async def standing(nodes: Nodes) -> Node:
    return await nodes.start(clock=MovableClock(stands=True))


async def test_half_message_is_checked_when_it_is_old_enough_and_then_every_30_s(
    standing: Node, connect: Connect
) -> None:
    wire = await connect(standing.address)
    await create_topic(wire, "t")
    await in_group(wire, "c")
    await half(wire)
    for wait_s, checked in ((5.9, False), (0.2, True), (29.7, False), (0.4, True), (29.7, False), (0.4, True)):
        standing.clock.advance(wait_s)
        assert await is_asked(wire) == checked


async def test_half_message_is_checked_at_the_time_that_its_producer_asked_for(
    standing: Node, connect: Connect
) -> None:
    wire = await connect(standing.address)
    await create_topic(wire, "t")
    await in_group(wire, "c")
    await half(wire)
    later = HALF_PROPERTIES + "\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x0120"
    sooner = HALF_PROPERTIES + "\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x012"
    for text in (later, sooner):
        assert (await send(wire, queue=1, properties=text, sys_flag=4)).code == 0
    for wait_s, checked in ((1.9, False), (0.2, True), (3.8, False), (0.2, True), (13.8, False), (0.2, True)):
        standing.clock.advance(wait_s)
        assert await is_asked(wire) == checked


async def test_half_message_that_retention_has_deleted_counts_for_a_day_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's other timers, of which some are due each second, are not started."""
    clock = MovableClock(stands=True)
    broker = BrokerController(BrokerConfig(tmp_path, "127.0.0.1:1"), clock=clock)
    broker.topics.put(TopicConfig("t", 1, 1), 0)
    # the first check is scheduled without a read of the log, in which an error would fail a send that is stored
    monkeypatch.setattr(broker.store, "record_at", lambda _: None)
    properties = HALF_PROPERTIES + "\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x01999999999"
    broker.transactions.start()
    broker.sending.stage(SendMessage("p", "t", "TBW102", 4, 0, 4, 1, 0, properties), b"x", HOST)
    broker.sending.commit()
    for wait_s, waiting in ((MAX_TRANSACTION_TIMEOUT_S - 1, 1), (2, 0)):
        clock.advance(wait_s)
        await broker.turns.done()
        assert broker.transactions.waiting == waiting
    broker.store.close()


async def test_only_the_sender_is_asked_while_it_is_connected(standing: Node, connect: Connect) -> None:
    wires = [await connect(standing.address) for _ in range(3)]
    await create_topic(wires[0], "t")
    for number, wire in enumerate(wires):
        await in_group(wire, f"c{number}")
    await half(wires[1])
    for wait_s in (6, 30, 30):
        standing.clock.advance(wait_s)
        assert [await is_asked(wire) for wire in wires] == [False, True, False]
    await wires[1].close()
    await eventually(lambda: len(standing.broker.clients.producers("p")) == 2)
    standing.clock.advance(30)
    assert sorted([await is_asked(wires[0]), await is_asked(wires[2])]) == [False, True]


async def test_sender_that_has_left_its_producer_group_is_not_asked(standing: Node, connect: Connect) -> None:
    left, other = [await connect(standing.address) for _ in range(2)]
    await create_topic(left, "t")
    for number, wire in enumerate((left, other)):
        await in_group(wire, f"c{number}")
    await half(left)
    await left.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c0", "producerGroup": "p"})
    standing.clock.advance(6)
    assert (await is_asked(left), await is_asked(other)) == (False, True)


async def test_checks_of_ended_transactions_are_dropped_beyond_their_limit(nodes: Nodes, connect: Connect) -> None:
    limits = replace(LIMITS, max_lapsed_checks=3)
    node = await nodes.start(limits=limits, clock=MovableClock(stands=True))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    scheduled = []
    for _ in range(8):
        await wire.call(RequestCode.END_TRANSACTION, end(await half(wire), ROLLBACK))
        scheduled.append(node.broker.transactions.scheduled_checks)
    assert scheduled == [1, 2, 3, 4, 5, 6, 1, 2]


async def test_outcome_of_a_message_that_was_set_aside_is_refused(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(clock=MovableClock(stands=True), transaction_check_max=1)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await in_group(wire, "c")
    sent = await half(wire)
    for wait_s in (6, 30):
        node.clock.advance(wait_s)
        await node.broker.turns.done()
    refused = await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
    assert (refused.code, refused.ext["outcome"]) == (ResponseCode.TRANSACTION_FAILED, "set aside")


async def test_commit_to_a_deleted_topic_is_refused_as_set_aside(wire: Wire) -> None:
    await create_topic(wire, "t")
    sent = await half(wire)
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    refused = await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
    assert (refused.code, refused.ext["outcome"]) == (ResponseCode.TRANSACTION_FAILED, "set aside")


async def test_a_message_nobody_decides_is_put_aside_after_15_questions(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_check_interval_s=0.001, transaction_timeout_s=0.0)
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
    clock.advance(node.broker.config.transaction_check_interval_s)
    await node.broker.turns.done()
    assert node.broker.transactions.waiting == 1
    await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
    assert [item.body for item in await found(wire)] == [b"pay"]


async def test_a_producer_whose_clock_is_far_behind_is_asked(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_check_interval_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    await half(wire, born_timestamp=1)
    assert decode_record((await asked(wire)).body).body == b"pay"


async def test_what_was_decided_and_what_was_not_survives_a_restart(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(transaction_check_interval_s=60.0)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    sent = [await half(wire, b"%d" % number) for number in range(4)]
    await wire.call(RequestCode.END_TRANSACTION, end(sent[1], COMMIT))
    await wire.call(RequestCode.END_TRANSACTION, end(sent[3], ROLLBACK))
    await node.stop()
    node = await nodes.start(transaction_check_interval_s=60.0)
    wire = await connect(node.address)
    assert node.broker.transactions.waiting == 2
    for number in (0, 1, 2):
        await wire.call(RequestCode.END_TRANSACTION, end(sent[number], COMMIT))
    assert [item.body for item in await found(wire)] == [b"1", b"0", b"2"]


async def test_a_half_message_that_is_gone_is_named(
    standing: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await connect(standing.address)
    await create_topic(wire, "t")
    await half(wire)
    monkeypatch.setattr(standing.broker.store, "record_at", lambda _: None)  # as of one that has expired
    with capture_logs() as logs:
        standing.clock.advance(6)
    assert [entry["event"] for entry in logs] == ["half_message_lost"]
    assert standing.broker.transactions.waiting == 0


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
    clock.advance(node.config.transaction_check_interval_s)
    await node.broker.turns.done()
    assert decode_record((await asked(wire)).body).body == b"pay"
    assert node.broker.transactions.waiting == 1
    for _ in range(2):
        await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT, from_transaction_check=True))
    assert not any(frame.code == RequestCode.CHECK_TRANSACTION_STATE for frame in wire.requests), "it was asked once"
    clock.advance(10 * IDLE_LIMIT_S)  # a connection that says nothing for so long is closed
    wire = await connect(node.address)
    await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c", producer_groups=("p",))))
    clock.advance(node.config.transaction_check_interval_s)
    await node.broker.turns.done()
    assert [item.body for item in await found(wire)] == [b"pay"]
    assert not any(frame.code == RequestCode.CHECK_TRANSACTION_STATE for frame in wire.requests)
