"""PULL_MESSAGE: every check in its order, every status, and long polling."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.config import (
    BULK_PULL_BYTES,
    BULK_PULL_MESSAGES,
    MAX_RUNNING_INFO_BYTES,
    PULL_BYTES,
    PULL_MESSAGES,
)
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.store.files import Unreadable
from rocketlet.protocol import bodies
from rocketlet.protocol.admin_bodies import encode_running_info
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import Language, RequestCode, ResponseCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ
from rocketlet.protocol.group_bodies import MADE_ANEW, decode_extents, encode_topics
from rocketlet.protocol.message import decode_records, encode_batch

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.requests import SUBSCRIBED, SUSPEND, bodies_of, heartbeat, pull, send


@pytest.fixture
async def still(nodes: Nodes) -> Node:
    """A broker whose clock stands: no held pull ends because its time is up."""
    return await nodes.start(clock=MovableClock(stands=True))


async def test_a_broker_that_may_not_be_read_refuses_first(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(permission=2)
    answer = await (await connect(node.address)).call(RequestCode.PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.NO_PERMISSION


async def test_an_unknown_group_comes_before_an_unknown_topic(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(auto_create_groups=False)
    answer = await (await connect(node.address)).call(RequestCode.PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "subscription group [g] does not exist" in (answer.remark or "")


async def test_a_group_that_may_not_consume_is_refused(wire: Wire) -> None:
    group = bodies.encode_group(GroupConfig("g", consume_enable=False))
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)).code == 0
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("nowhere"))).code == ResponseCode.NO_PERMISSION


async def test_an_unknown_topic_a_closed_one_and_a_wrong_queue_are_refused(wire: Wire) -> None:
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("nowhere"))).code == ResponseCode.TOPIC_NOT_EXIST
    await create_topic(wire, "closed", perm=2)
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("closed", queue=99))).code == ResponseCode.NO_PERMISSION
    await create_topic(wire, "t")
    for queue in (-1, 4):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue))
        assert (answer.code, "illegal" in (answer.remark or "")) == (1, True)


async def test_a_bad_expression_in_the_request_is_23(wire: Wire) -> None:
    await create_topic(wire, "t")
    assert (
        await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="||"))
    ).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


async def test_without_the_subscription_bit_the_heartbeat_decides(wire: Wire) -> None:
    await create_topic(wire, "t")
    await create_topic(wire, "other")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))
    assert (answer.code, "group info not exist" in (answer.remark or "")) == (24, True)
    await heartbeat(wire, topic="other")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))
    assert (answer.code, "subscription not exist" in (answer.remark or "")) == (24, True)
    await heartbeat(wire)
    assert (
        await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    ).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=9))).code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("version", "expression", "size", "code"),
    [
        (11, "*", MAX_RUNNING_INFO_BYTES, ResponseCode.SUCCESS),
        (11, "*", MAX_RUNNING_INFO_BYTES + 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        (10, "*", 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        (11, "A", 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
    ],
)
async def test_a_member_whose_heartbeat_was_lost_is_asked_what_it_subscribes_to(
    wire: Wire, version: int, expression: str, size: int, code: int
) -> None:
    """Java's client gives a heartbeat up that is due while another is under way, and sends none for the next 30 s. Its pulls
    name the version that the lost one had. Another expression must come by a heartbeat: messages would be skipped."""
    await create_topic(wire, "t")
    await send(wire)
    await heartbeat(wire)
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    asked = await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert (asked.ext["consumerGroup"], asked.ext["clientId"]) == ("g", "c1")
    said = {"topic": "t", "subString": expression, "expressionType": "TAG", "subVersion": version}
    wire.write_answer(asked, encode_running_info({}, [{**said, "topic": "other"}, said], {}).ljust(size))
    assert (await wire.answer(waits)).code == code


async def test_broadcasting_can_be_forbidden(wire: Wire) -> None:
    await create_topic(wire, "t")
    group = bodies.encode_group(GroupConfig("g", consume_broadcast_enable=False))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    await heartbeat(wire, message_model="BROADCASTING")
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))).code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize(("kind", "expression", "code"), [("SQL92", "a +", 23), ("CLASS", "a", 1)])
async def test_a_filter_that_the_broker_does_not_understand_is_refused(
    wire: Wire, kind: str, expression: str, code: int
) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription=expression, expression_type=kind))
    assert answer.code == code
    assert expression in (answer.remark or "") or kind in (answer.remark or "")


async def test_a_sql_filter_lets_through_what_matches_and_moves_past_the_rest(wire: Wire) -> None:
    await create_topic(wire, "t")
    for number in range(1000):
        await send(wire, b"%d" % number, properties=f"a\x01{number}\x02TAGS\x01x")
    filtered: dict[str, Any] = {"subscription": "a >= 990 AND TAGS = 'x'", "expression_type": "SQL92"}
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(**filtered))
    assert (answer.code, answer.remark, answer.ext["nextBeginOffset"]) == (20, "NO_MATCHED_MESSAGE", "800")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=800, **filtered))
    assert [record.body for record in decode_records(answer.body)] == [b"%d" % number for number in range(990, 1000)]
    assert answer.ext["nextBeginOffset"] == "1000"


async def test_a_held_pull_with_a_sql_filter_is_answered_by_a_match(still: Node, connect: Connect) -> None:
    wire = await connect(still.address)
    await create_topic(wire, "t")
    opaque = wire.send(
        RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, subscription="a = 1", expression_type="SQL92")
    )
    await send(await connect(still.address), b"yes", properties="a\x011")
    answer = await wire.answer(opaque)
    assert [record.body for record in decode_records(answer.body)] == [b"yes"]


async def test_offsets_are_answered_as_apache_answers_them(wire: Wire) -> None:
    await create_topic(wire, "t")

    async def status(offset: int) -> tuple[int, str | None, int]:
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset))
        assert {"suggestWhichBrokerId", "minOffset", "maxOffset"} < answer.ext.keys()
        return answer.code, answer.remark, int(answer.ext["nextBeginOffset"])

    assert await status(0) == (19, "NO_MESSAGE_IN_QUEUE", 0)
    assert await status(7) == (21, "NO_MESSAGE_IN_QUEUE", 0)
    for _ in range(3):
        await send(wire)
    assert await status(1) == (0, "FOUND", 3)
    assert await status(3) == (19, "OFFSET_OVERFLOW_ONE", 3)
    assert await status(4) == (21, "OFFSET_OVERFLOW_BADLY", 3)
    assert await status(-1) == (21, "OFFSET_TOO_SMALL", 0)


async def test_tags_are_filtered_by_hash_and_the_offset_moves_on(wire: Wire) -> None:
    await create_topic(wire, "t")
    for tag in ("A", "B", "", "A"):
        await send(wire, tag.encode() or b"-", tag=tag)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="A || C"))
    assert [record.body for record in decode_records(answer.body)] == [b"A", b"A"]
    assert int(answer.ext["nextBeginOffset"]) == 4
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="C"))
    assert (answer.code, answer.remark, int(answer.ext["nextBeginOffset"])) == (20, "NO_MATCHED_MESSAGE", 4)


async def test_a_pull_takes_as_many_as_asked_and_256_kib_at_most(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(6):
        await send(wire, b"x" * 100_000)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull())
    assert int(answer.ext["nextBeginOffset"]) == 2
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(max_msg_nums=1))
    assert int(answer.ext["nextBeginOffset"]) == 1
    await send(wire, b"x" * 4_000_000)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=6))
    assert len(answer.body) > 4_000_000


@pytest.mark.parametrize("serialize_type", [JSON, ROCKETMQ, MSGPACK])
async def test_a_held_pull_is_answered_by_the_arriving_message_in_its_encoding(
    still: Node, connect: Connect, serialize_type: int
) -> None:
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    opaque = waiting.send(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND), serialize_type=serialize_type)
    assert (await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    await send(wire, b"here")
    answer = await waiting.answer(opaque)
    assert (answer.code, answer.serialize_type) == (0, serialize_type)
    assert [record.body for record in decode_records(answer.body)] == [b"here"]


async def test_a_held_pull_sleeps_through_messages_of_other_tags(still: Node, connect: Connect) -> None:
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    opaque = waiting.send(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, subscription="A"))
    await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    await send(wire, b"not this", tag="B")
    await send(wire, b"this", tag="A")
    answer = await waiting.answer(opaque)
    assert [record.body for record in decode_records(answer.body)] == [b"this"]
    assert int(answer.ext["nextBeginOffset"]) == 2


async def test_a_held_pull_ends_when_its_time_is_up(wire: Wire) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, suspend_timeout_millis=30))
    assert answer.code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize("expression", ["*", "B"])
async def test_a_held_pull_of_a_topic_that_is_deleted_returns_immediately(
    still: Node, connect: Connect, expression: str
) -> None:
    """Held on, it would sleep through the messages of a topic that is recreated."""
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    await send(wire, b"seen", tag="A", queue=0)
    held = pull(flags=SUBSCRIBED | SUSPEND, offset=1, subscription=expression)
    opaque = waiting.send(RequestCode.PULL_MESSAGE, held)
    await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert (await waiting.answer(opaque)).code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_commits_its_offset_if_the_bit_says_so(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(3):
        await send(wire)
    for offset in (2, 9):  # the second is beyond the end
        await wire.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | 0x1, commit_offset=offset))
    query = {"consumerGroup": "g", "topic": "t", "queueId": "0"}
    assert int((await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext["offset"]) == 2


async def test_foreign_clients_get_32_messages_at_most_as_from_apache(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    for _ in range(50):
        await send(wire)
    for language, count in ((Language.JAVA, 32), (Language.GO, 32), (Language.PYTHON, 50)):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(max_msg_nums=50), language=language)
        assert len(list(decode_records(answer.body))) == count


async def batch(wire: Wire, count: int, body: bytes) -> None:
    fields = {"a": "g", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0, "i": "", "j": 0, "m": "true"}
    answer = await wire.call(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch([(0, body, "")] * count))
    assert answer.code == 0


async def test_a_pull_gives_more_to_whoever_says_how_much_it_takes(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await batch(wire, 1000, b"-")

    async def got(**fields: Any) -> tuple[int, int]:
        answer = await wire.call(
            RequestCode.PULL_MESSAGE, pull(max_msg_nums=100_000, **fields), language=Language.PYTHON
        )
        return sum(1 for _ in decode_records(answer.body)), len(answer.body)

    assert (await got())[0] == PULL_MESSAGES
    assert (await got(max_msg_bytes=1 << 40))[0] == BULK_PULL_MESSAGES
    assert (await got(max_msg_bytes=1))[0] == 1
    for _ in range(3):
        await batch(wire, 1000, b"x" * 1000)
    for limit, given in (
        (PULL_BYTES, {}),
        (BULK_PULL_BYTES, {"max_msg_bytes": 1 << 40}),
        (5000, {"max_msg_bytes": 5000}),
    ):
        count, size = await got(offset=5000, **given)
        assert size <= limit < size + size // count


async def test_a_lite_pull_is_a_pull(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    held = wire.send(RequestCode.LITE_PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND))
    await send(wire, b"first")
    answer = await wire.answer(held)
    assert [record.body for record in decode_records(answer.body)] == [b"first"]
    answer = await wire.call(RequestCode.LITE_PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_that_names_an_identity_reads_no_other_topic(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire)
    extents = await wire.call(RequestCode.GET_QUEUE_OFFSETS, body=encode_topics(["t"]))
    identity = decode_extents(extents.body)["t"].identity
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(topic_identity=identity))).code == ResponseCode.SUCCESS
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic_identity="another"))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, MADE_ANEW)


async def test_a_pull_that_had_to_wait_for_its_subscription_gets_an_error_if_that_cannot_be_read(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    await send(wire)
    await heartbeat(wire)

    def unreadable(*_: object) -> None:
        raise Unreadable("the disk does not answer")

    monkeypatch.setattr(node.broker.store, "fetch", unreadable)
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    await heartbeat(wire, version=11)
    answer = await wire.answer(waits)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "the disk does not answer")


async def test_nothing_is_kept_for_who_hung_up_while_a_pull_waited(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))
    member, gone = await connect(node.address), await connect(node.address)
    await create_topic(member, "t")
    await heartbeat(member)
    gone.send(RequestCode.PULL_MESSAGE, pull(flags=SUSPEND, sub_version=11))
    await bodies_of(gone)  # so the pull before it is waiting
    await gone.close()
    await eventually(lambda: len(node.server.connections) == 1 and not node.broker.turns.waiting)
    await heartbeat(member, version=11)
    node.clock.advance(1)
    assert node.broker.groups.queue("g", "t", 0).reader is None
    assert node.broker.held_pulls.count == 0
