"""POP_MESSAGE and what belongs to it, as 5.x's remoting clients write them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import MAX_NAMED_CHARS, MAX_POP_BYTES
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import GroupConfig, finish
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import decode_locked
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.properties import find
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.requests import ack, heartbeat, join, lock, members, pop, popped, pull, send


async def faults(wire: Wire, **fields: Any) -> int:
    return (await wire.call(RequestCode.POP_MESSAGE, pop(**fields))).code


async def test_the_checks_are_in_apache_s_order(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(auto_create_groups=False)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await create_topic(wire, "closed", perm=2)
    wrong = {"maxMsgNums": 33, "topic": "nowhere"}
    assert await faults(wire, bornTime=1, pollTime=1000, **wrong) == ResponseCode.POLLING_TIMEOUT
    assert await faults(wire, **wrong) == ResponseCode.INVALID_PARAMETER
    assert await faults(wire, topic="nowhere") == ResponseCode.TOPIC_NOT_EXIST
    assert await faults(wire, topic="closed", queueId=99) == ResponseCode.NO_PERMISSION
    assert await faults(wire, queueId=4) == ResponseCode.INVALID_PARAMETER
    assert await faults(wire, exp="||") == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    group = bodies.encode_group(GroupConfig("g", consume_enable=False))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    assert await faults(wire, exp="||") == ResponseCode.NO_PERMISSION
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=bodies.encode_group(GroupConfig("g")))
    assert await faults(wire, exp="||") == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert await faults(wire, exp="a b", expType="SQL92") == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert await faults(wire, invisibleTime=0) == ResponseCode.INVALID_PARAMETER
    assert await faults(wire) == ResponseCode.POLLING_TIMEOUT


@pytest.mark.still
async def test_a_deleted_group_is_not_created_by_what_it_has_in_flight(node: Node, connect: Connect) -> None:
    """It came back with default settings when its messages expired."""
    wire, other = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t", 1)
    await send(wire, b"a")
    assert len(await popped(wire, invisibleTime=10_000)) == 1
    waiting = other.send(RequestCode.POP_MESSAGE, pop(pollTime=20_000))
    await eventually(lambda: node.broker.pops.waiting == 1)
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})).code == 0
    assert (await other.answer(waiting)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    node.clock.advance(10)
    assert "g" not in node.broker.group_configs
    (again,) = await popped(wire)
    assert (again.body, again.reconsume_times) == (b"a", 1), "a group that is created again has its messages"


async def test_a_client_whose_clock_is_behind_is_named_once(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    with capture_logs() as logs:
        for _ in range(2):
            assert await faults(wire, bornTime=1, pollTime=1000) == ResponseCode.POLLING_TIMEOUT
    assert [log["group"] for log in logs if log["event"] == "pop_came_late"] == ["g"]


async def test_a_late_client_cannot_fill_the_log(node: Node, wire: Wire) -> None:
    with capture_logs() as logs:
        await faults(wire, bornTime=1, pollTime=1000, consumerGroup="g" * 10_000)
    assert [len(log["group"]) for log in logs if log["event"] == "pop_came_late"] == [MAX_NAMED_CHARS]


async def test_a_broker_that_may_not_be_read_refuses(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(permission=2)
    wire = await connect(node.address)
    assert await faults(wire, maxMsgNums=33) == ResponseCode.NO_PERMISSION


async def test_messages_carry_their_handles_and_are_gone_when_acknowledged(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"a", queue=0)
    await send(wire, b"b", queue=1, properties="KEYS\x01k")
    answer = await wire.call(RequestCode.POP_MESSAGE, pop())
    records = list(decode_records(answer.body))
    assert sorted(record.body for record in records) == [b"a", b"b"]
    assert sorted(str(answer.ext["startOffsetInfo"]).split(";")) == ["0 0 0", "0 1 0"]
    assert sorted(str(answer.ext["msgOffsetInfo"]).split(";")) == ["0 0 0", "0 1 0"]
    assert (answer.ext["restNum"], answer.ext["reviveQid"], answer.ext["invisibleTime"]) == ("0", "0", "60000")
    for record in records:
        handle = str(find(record.properties, "POP_CK")).split(" ")
        assert handle == ["0", answer.ext["popTime"], "60000", "0", "0", "broker-a", str(record.queue_id), "0"]
        assert record.reconsume_times == 0
        assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
        assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    assert find("\x02".join(record.properties for record in records), "KEYS") == "k"


async def test_a_receive_is_answered_when_a_message_comes_or_its_time_is_up(node: Node, wire: Wire) -> None:
    clock = node.clock
    await create_topic(wire, "t")
    first = wire.send(RequestCode.POP_MESSAGE, pop(pollTime=15_000))
    second = wire.send(RequestCode.POP_MESSAGE, pop(pollTime=15_000))
    info = await wire.call(RequestCode.POLLING_INFO, {"consumerGroup": "g", "topic": "t", "queueId": -1})
    assert info.ext["pollingNum"] == "2"
    await send(wire, b"a")
    assert [record.body for record in decode_records((await wire.answer(first)).body)] == [b"a"]
    clock.advance(15)
    assert (await wire.answer(second)).code == ResponseCode.POLLING_TIMEOUT


async def test_what_fails_is_redelivered_with_its_count_and_the_same_handle_until_then(node: Node, wire: Wire) -> None:
    clock = node.clock
    await create_topic(wire, "t")
    await send(wire, b"a")
    (record,) = await popped(wire)
    changed = await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**ack(record), "invisibleTime": 10_000})
    assert (changed.code, changed.ext["reviveQid"]) == (0, "0")
    assert changed.ext["popTime"] == str(find(record.properties, "POP_CK")).split(" ")[1]
    assert 10_000 <= int(str(changed.ext["invisibleTime"])) < 20_000
    assert not await popped(wire)
    clock.advance(10)
    (again,) = await popped(wire)
    assert (again.reconsume_times, again.body, again.queue_offset) == (1, b"a", 0)
    late = await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**ack(record), "invisibleTime": 10_000})
    assert late.code == ResponseCode.NO_MESSAGE


async def test_a_rejected_message_is_a_dead_letter_and_acknowledged_when_it_is_answered(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire, b"m")
    (record,) = await popped(wire)
    fields = ack(record, invisibleTime=30_000, reject="no such customer")
    for _ in range(2):  # a client repeats what was not answered
        rejected = await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields)
        assert (rejected.code, rejected.ext["rejected"]) == (ResponseCode.SUCCESS, "true")
        assert node.broker.pops.pools.unfinished("g") == 0
    dead = node.broker.store.queue("%DLQ%g", 0)
    assert dead.next == 1
    assert find(node.broker.store.message(dead, 0).properties, "DLQ_REASON") == "no such customer"
    void = await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**fields, "extraInfo": "0 1 2 0 0 b 0 0"})
    assert void.code == ResponseCode.NO_MESSAGE


async def test_acknowledgements_of_what_is_not_there_are_refused_as_apache_s(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"a")
    (record,) = await popped(wire)
    for fields, code in (
        ({"topic": "nowhere"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queueId": 99}, ResponseCode.MESSAGE_ILLEGAL),
        ({"offset": 5}, ResponseCode.NO_MESSAGE),
        ({"extraInfo": "rubbish"}, 0),
    ):
        assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record, **fields))).code == code
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0


async def test_many_are_acknowledged_in_one_request_by_their_bits(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(10):
        await send(wire, b"a", queue=0)
    records = await popped(wire)
    _, pop_ms, invisible_ms, *_ = str(find(records[0].properties, "POP_CK")).split(" ")
    bits = base64.b64encode(bytes((0b1111_1101, 0b11))).decode()
    entry = {
        "c": "g",
        "t": "t",
        "r": "0",
        "so": 0,
        "q": 0,
        "rq": 0,
        "pt": int(pop_ms),
        "it": int(invisible_ms),
        "b": bits,
    }
    other = {**entry, "q": 99}
    body = orjson.dumps({"brokerName": "broker-a", "acks": [entry, other]})
    assert (await wire.call(RequestCode.BATCH_ACK_MESSAGE, body=body)).code == 0
    changed = await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**ack(records[1]), "invisibleTime": 0})
    assert changed.code == 0
    (left,) = await popped(wire)
    assert left.queue_offset == 1
    assert (await wire.call(RequestCode.BATCH_ACK_MESSAGE, body=b"{}")).code == ResponseCode.NO_MESSAGE
    for junk in (b"", b"[]", b'{"acks":[{"b":"%"}]}', b'{"acks":[{"c":"g","t":"t","q":0,"so":0,"pt":1,"b":"*"}]}'):
        assert (await wire.call(RequestCode.BATCH_ACK_MESSAGE, body=junk)).code == ResponseCode.SYSTEM_ERROR


async def test_a_notification_takes_nothing(node: Node, wire: Wire) -> None:
    clock = node.clock
    await create_topic(wire, "t")
    asked = {"consumerGroup": "g", "topic": "t", "queueId": -1, "pollTime": 5000, "bornTime": 0}
    none = wire.send(RequestCode.NOTIFICATION, asked)
    await wire.call(RequestCode.POLLING_INFO, {"consumerGroup": "g", "topic": "t", "queueId": -1})
    clock.advance(5)
    assert (await wire.answer(none)).ext["hasMsg"] == "false"
    some = wire.send(RequestCode.NOTIFICATION, asked)
    await send(wire, b"a")
    assert (await wire.answer(some)).ext["hasMsg"] == "true"
    peeked = await wire.call(
        RequestCode.PEEK_MESSAGE, {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 5}
    )
    assert [record.body for record in decode_records(peeked.body)] == [b"a"]
    assert len(await popped(wire)) == 1


async def test_what_is_peeked_at_fits_into_an_answer(node: Node, wire: Wire) -> None:
    """One large message of each queue: 32 of them have 128 MiB, which no frame takes."""
    await create_topic(wire, "t", 8)
    asked = {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 32}
    await wire.call(RequestCode.PEEK_MESSAGE, asked)  # a group begins at the end
    for queue in range(8):
        await send(wire, bytes(MAX_POP_BYTES // 3), queue=queue)
    peeked = await wire.call(RequestCode.PEEK_MESSAGE, asked)
    assert len(list(decode_records(peeked.body))) == 2


async def test_a_receive_of_a_client_that_is_gone_takes_nothing(node: Node, connect: Connect) -> None:
    wire, other = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t")
    other.send(RequestCode.POP_MESSAGE, pop(pollTime=15_000))
    await other.call(RequestCode.POLLING_INFO, {"consumerGroup": "g", "topic": "t", "queueId": -1})
    await other.close()
    while node.broker.pops.waiting:
        await wire.call(RequestCode.POLLING_INFO, {"consumerGroup": "g", "topic": "t", "queueId": -1})
    await send(wire, b"a")
    assert len(await popped(wire)) == 1


async def test_members_are_ordered_to_pop_where_an_administrator_has_set_it(wire: Wire) -> None:
    await create_topic(wire, "t")
    await heartbeat(wire)
    body = orjson.dumps({"topic": "t", "consumerGroup": "g", "clientId": "c1", "strategyName": "AVG"})

    async def assigned() -> list[Any]:
        answer = await wire.call(RequestCode.QUERY_ASSIGNMENT, body=body)
        found: list[Any] = orjson.loads(answer.body)["messageQueueAssignments"]
        return found

    assert {item["mode"] for item in await assigned()} == {"PULL"}
    mode = {"topic": "t", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0}

    async def set_mode(**fields: Any) -> Frame:
        return await wire.call(RequestCode.SET_MESSAGE_REQUEST_MODE, body=orjson.dumps({**mode, **fields}))

    assert (await set_mode()).code == 0
    assert [(item["mode"], item["messageQueue"]["queueId"]) for item in await assigned()] == [("POP", -1)]
    known = orjson.loads((await wire.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body)
    assert known == {"messageRequestModeMap": {"t": {"g": mode}}}
    assert (await set_mode(topic="%RETRY%g")).code == ResponseCode.NO_PERMISSION
    assert (await set_mode(topic="nowhere")).code == ResponseCode.TOPIC_NOT_EXIST
    assert (await set_mode(mode="PUSH")).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("flush", ["os", "sync"])
async def test_acknowledgements_and_modes_survive_a_restart(nodes: Nodes, connect: Connect, flush: str) -> None:
    node = await nodes.start(flush=flush)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    for body in (b"a", b"b"):
        await send(wire, body, queue=0)
    first, second = await popped(wire)
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(first))).code == 0
    mode = {"topic": "t", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0}
    await wire.call(RequestCode.SET_MESSAGE_REQUEST_MODE, body=orjson.dumps(mode))
    await node.stop()
    node = await nodes.start(flush=flush)
    wire = await connect(node.address)
    assert not await popped(wire)
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(second))).code == 0
    assert node.broker.request_modes.of("g", "t").mode == "POP"
    assert node.broker.offsets.get("g", "t", 0) == 2


async def test_popped_message_stays_invisible_no_longer_than_its_timeout_when_the_clock_is_set_back_over_a_restart(
    nodes: Nodes, connect: Connect
) -> None:
    ahead = MovableClock(stands=True)
    ahead.advance(3600)
    node = await nodes.start(clock=ahead)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await send(wire, b"a", queue=0)
    assert len(await popped(wire, invisibleTime=60_000)) == 1
    await node.stop()
    clock = MovableClock(stands=True)
    with capture_logs() as logs:
        node = await nodes.start(clock=clock)
    assert [log["ahead_s"] for log in logs if log["event"] == "clock_set_back"] == [pytest.approx(3600, abs=60)]
    wire = await connect(node.address)
    clock.advance(58)
    assert not await popped(wire)
    clock.advance(4)
    assert [record.body for record in await popped(wire)] == [b"a"]


async def test_members_that_pull_what_others_pop_get_their_share(node: Node, connect: Connect) -> None:
    popper, puller = await connect(node.address), await connect(node.address)
    await create_topic(popper, "t")
    await send(popper, b"a", queue=0)
    (record,) = await popped(popper)
    await join(puller, "c1")  # a member of Apache's: it waits, and is answered nothing, until the queue is its own
    first = pull(flags=PULL_SUSPEND | PULL_SUBSCRIPTION, suspend_timeout_millis=100)
    assert (await puller.call(RequestCode.PULL_MESSAGE, first)).code != 0
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1}
    assert (await puller.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == ResponseCode.NO_PERMISSION
    assert not decode_locked((await lock(puller, "c2")).body)
    assert await members(puller) == sorted(await members(puller), key=lambda name: name.startswith("~"))
    assert (await popper.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    await send(popper, b"b", queue=0)
    while (answer := await puller.call(RequestCode.PULL_MESSAGE, first)).code != 0:
        await popped(popper)
        first |= {"queueOffset": str(answer.ext.get("nextBeginOffset", 0))}
    assert [record.body for record in decode_records(answer.body)] == [b"b"]
    assert (await puller.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0


async def test_a_member_that_pulled_may_pop_when_it_is_ordered_to(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"a", queue=0)
    await join(wire, "c1")
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull())).code == 0
    assert len(await popped(wire)) == 1


async def test_an_administrator_who_resets_offsets_sends_a_group_that_pops_elsewhere(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"a", queue=0)
    (record,) = await popped(wire)
    await wire.call(RequestCode.ACK_MESSAGE, ack(record))
    assert not await popped(wire)
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 0}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    (again,) = await popped(wire)
    assert again.body == b"a"
    await wire.call(RequestCode.ACK_MESSAGE, ack(again))
    reset = {"topic": "t", "group": "g", "timestamp": 0, "isForce": "true"}
    for queue in (1, 2, 3):
        await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**commit, "queueId": queue})
    assert (await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)).code == 0
    assert [record.body for record in await popped(wire)] == [b"a"]


async def test_a_reset_of_one_queue_gives_what_lies_behind_the_offset_again(wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    for body in (b"0", b"1", b"2"):
        await send(wire, body, queue=0)
    await send(wire, b"other", queue=1)
    for record in await popped(wire, maxMsgNums=32):
        if record.queue_id == 1:
            await wire.call(RequestCode.ACK_MESSAGE, ack(record))
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1}
    await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    reset = {"topic": "t", "group": "g", "timestamp": 0, "isForce": "false", "queueId": 0, "offset": 1}
    assert (await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)).code == 0
    assert [record.body for record in await popped(wire, maxMsgNums=32)] == [b"1", b"2"]


async def test_lag_is_what_is_not_finished_wherever_it_lies(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t")
    for _ in range(10):
        await send(wire, b"a", queue=0)
    records = await popped(wire, maxMsgNums=6)
    for record in records[1:]:
        await wire.call(RequestCode.ACK_MESSAGE, ack(record))
    assert node.broker.offsets.get("g", "t", 0) == 0
    assert finish(node.broker.progress.lag("g", "t"))[0] == 5
    await wire.call(RequestCode.ACK_MESSAGE, ack(records[0]))
    assert finish(node.broker.progress.lag("g", "t"))[0] == 4


async def test_administration_sees_who_shares_the_messages_and_no_queue_without_a_reader(
    node: Node, wire: Wire
) -> None:
    clock = node.clock
    await create_topic(wire, "t")
    await send(wire, b"a")
    (record,) = await popped(wire)
    await wire.call(RequestCode.ACK_MESSAGE, ack(record))
    asked = await wire.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "g"})
    found = orjson.loads(asked.body)
    assert len(found["connectionSet"]) == 1
    assert list(found["subscriptionTable"]) == ["t"]
    history = orjson.loads((await wire.call(RequestCode.GET_GROUP_HISTORY, {"consumerGroup": "g"})).body)
    assert {(item["topic"], item["queueId"], item["clientId"]) for item in history["owners"]} == {
        ("t", queue, "(shared)") for queue in range(4)
    }
    await join(wire, "c1")  # a member that pops need not pull
    await popped(wire, pollTime=1)
    clock.advance(10)
    assert not node.broker.watch.orphaned()
    refusing = asyncio.create_task(wire.refuse())  # doctor asks c1, which would otherwise let it wait for 10 s
    async with AdminClient(node.address) as admin:
        findings = [item for item in await diagnose(admin, ObservationTimes(0, 0, 0)) if item.subject == "g"]
    refusing.cancel()
    assert findings == []


async def test_a_new_group_that_is_asked_for_order_is_made_so(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    assert await faults(wire, order=True) == ResponseCode.POLLING_TIMEOUT
    made = node.broker.group_configs.ensure("g")
    assert made is not None
    assert made.consume_orderly


async def test_a_group_without_order_keeps_it_once_a_client_asks(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire, b"a")
    (first,) = await popped(wire)
    await send(wire, b"b")
    assert await popped(wire, order=True) == []  # it would come before the one in flight
    assert await popped(wire) == []
    await wire.call(RequestCode.ACK_MESSAGE, ack(first))
    assert [record.body for record in await popped(wire)] == [b"b"]


async def test_an_answer_without_messages_has_the_fields_that_java_reads(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    late = await wire.call(RequestCode.POP_MESSAGE, pop(bornTime=1, pollTime=1000))
    none = await wire.call(RequestCode.POP_MESSAGE, pop())
    peeked = await wire.call(
        RequestCode.PEEK_MESSAGE, {"consumerGroup": "g", "topic": "t", "queueId": 0, "maxMsgNums": 1}
    )
    for answer in (late, none, peeked):
        assert {answer.ext[name] for name in ("popTime", "invisibleTime", "reviveQid", "restNum")} == {"0"}


async def test_a_new_group_may_begin_behind_the_newest_message(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire, b"before")
    assert await popped(wire, initMode=2) == []
    await send(wire, b"after")
    assert [record.body for record in await popped(wire, initMode=2)] == [b"after"]


async def test_what_is_given_back_suspended_was_no_try(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire, b"m")
    for suspend, tries in ((True, 0), (False, 1)):
        (record,) = await popped(wire)
        await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ack(record, invisibleTime=0, suspend=suspend))
        (again,) = await popped(wire)
        assert again.reconsume_times == tries
        await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ack(again, invisibleTime=0, suspend=True))


async def test_a_client_unregisters_from_a_group_that_has_offsets_and_no_members(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire, b"m")
    await popped(wire)
    answer = await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "client", "consumerGroup": "g"})
    assert answer.code == ResponseCode.SUCCESS


async def test_a_receive_ends_when_its_client_unregisters(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await heartbeat(wire, "client", "g")
    waiting = wire.send(RequestCode.POP_MESSAGE, pop(pollTime=60_000))
    await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "client", "consumerGroup": "g"})
    assert (await wire.answer(waiting)).code == ResponseCode.POLLING_TIMEOUT


@pytest.mark.still
async def test_attempts_of_members_that_pulled_a_message_count_for_its_limit_when_it_is_popped(
    node: Node, wire: Wire
) -> None:
    node.broker.group_configs.put(GroupConfig("g", retry_max_times=3))
    await create_topic(wire, "%RETRY%g", 1)
    await send(wire, b"a", topic="%RETRY%g", reconsume_times=2)
    for attempt in (2, 3):
        (record,) = await popped(wire, topic="%RETRY%g", invisibleTime=10_000)
        assert record.reconsume_times == attempt
        node.clock.advance(10)
    assert await popped(wire, topic="%RETRY%g") == []
    dead = node.broker.store.message(node.broker.store.queue("%DLQ%g", 0), 0)
    assert (dead.body, dead.reconsume_times) == (b"a", 3)
