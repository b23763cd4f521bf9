"""Lite consumers of 5.5: their settings, subscriptions, receives and acknowledgements."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.conversion import NORMAL
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_SYNCED_LITE_TOPICS
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, eventually
from ...support.grpc_client import GrpcClient, apply_settings, resource
from ...support.topics import put, stored
from .conftest import Dial
from .lite import PARENT, send
from .receives import ILLEGAL_HANDLE, NOTHING, OK, begin, received, request
from .receives import ack as ack_plain
from .receives import receive as receive_plain

ADD, REMOVE, ALL, NONE = range(4)
LAST, MIN, MAX = range(3)
BAD_REQUEST, ILLEGAL_TOPIC, ILLEGAL_GROUP, ILLEGAL_OFFSET, ILLEGAL_NAME = 40000, 40002, 40003, 40019, 40020
OVER_QUOTA, NO_TOPIC, FORBIDDEN = 42902, 40402, 40300
QUOTA, MODEL, WILDCARD = "lite.sub.client.quota", "lite.sub.model", "lite.sub.wildcard"


def ready(node: Node, *, minutes: int = -1, **attributes: str) -> None:
    """A parent topic, and the lite group g. Underscores in names of attributes stand for dots."""
    put(node, PARENT, message_type="LITE", lite_expiration_min=minutes)
    named = {name.replace("_", "."): value for name, value in attributes.items()}
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": PARENT, **named}))


async def sync(
    client: GrpcClient,
    *names: str,
    action: int = ADD,
    group: str = "g",
    topic: str = PARENT,
    code: int = OK,
    **option: int,
) -> str:
    asked = schema.SyncLiteSubscriptionRequest(
        action=action, topic=resource(topic), group=resource(group), lite_topic_set=names
    )
    for name, value in option.items():
        setattr(asked.offset_option, name, value)
    status = (await client.call("SyncLiteSubscription", asked)).status
    assert status.code == code, status
    return str(status.message)


def wanted(**options: Any) -> Any:
    found = request(**options)
    found.message_queue.topic.name = PARENT
    return found


async def receive(client: GrpcClient, **options: Any) -> list[Any]:
    code, messages = await received(begin(client, wanted(**options)))
    assert code == (OK if messages else NOTHING)
    return messages


def bodies(messages: list[Any]) -> list[bytes]:
    return [item.body for item in messages]


def attempts(messages: list[Any]) -> list[tuple[bytes, int]]:
    return [(item.body, item.system_properties.delivery_attempt) for item in messages]


async def ack(client: GrpcClient, *messages: Any, group: str = "g", name: str | None = None) -> list[int]:
    asked = schema.AckMessageRequest(group=resource(group), topic=resource(PARENT))
    for item in messages:
        system = item.system_properties
        asked.entries.add(
            message_id=system.message_id,
            receipt_handle=system.receipt_handle,
            lite_topic=system.lite_topic if name is None else name,
        )
    answer = await client.call("AckMessage", asked)
    return [entry.status.code for entry in answer.entries]


async def change(client: GrpcClient, item: Any, invisible_ms: int, **fields: Any) -> int:
    system = item.system_properties
    asked = schema.ChangeInvisibleDurationRequest(
        group=resource("g"),
        topic=resource(PARENT),
        receipt_handle=system.receipt_handle,
        lite_topic=system.lite_topic,
        **fields,
    )
    asked.invisible_duration.FromMilliseconds(invisible_ms)
    return int((await client.call("ChangeInvisibleDuration", asked)).status.code)


def settings(kind: int = 5, group: str = "g", *topics: str) -> Any:
    found = schema.Settings(client_type=kind)
    found.subscription.group.name = group
    for topic in topics or (PARENT,):
        entry = found.subscription.subscriptions.add()
        entry.topic.name = topic
        entry.expression.expression = "*"
    return found


# Settings


@pytest.mark.parametrize("kind", [5, 6])
async def test_settings_of_a_lite_client_are_answered_with_its_quota(node: Node, client: GrpcClient, kind: int) -> None:
    ready(node, lite_sub_client_quota="7")
    _, answer = await apply_settings(client, settings(kind))
    found = answer.settings.subscription
    assert (found.lite_subscription_quota, found.max_lite_topic_size, found.fifo) == (7, 64, False)
    beat = schema.HeartbeatRequest(group=resource("g"), client_type=kind)
    assert (await client.call("Heartbeat", beat)).status.code == OK


@pytest.mark.parametrize(
    ("kind", "group", "topics", "code"),
    [
        (5, "plain", (PARENT,), ILLEGAL_TOPIC),
        (5, "g", ("other",), ILLEGAL_TOPIC),
        (5, "g", ("normal",), ILLEGAL_TOPIC),
        (5, "g", ("missing",), NO_TOPIC),
        (5, "g", (PARENT, "other"), BAD_REQUEST),
        (6, "plain", (PARENT,), ILLEGAL_TOPIC),
        (2, "g", (PARENT,), ILLEGAL_GROUP),
        (3, "g", (PARENT,), ILLEGAL_GROUP),
    ],
)
async def test_settings_that_do_not_fit_the_group_end_the_stream(
    nodes: Nodes, dial: Dial, kind: int, group: str, topics: tuple[str, ...], code: int
) -> None:
    node = await nodes.start(auto_create_groups=False)
    client = await dial(node.address)
    ready(node)
    put(node, "other", message_type="LITE")
    put(node, "normal")
    node.broker.group_configs.put(GroupConfig("plain"))
    call, answer = await apply_settings(client, settings(kind, group, *topics))
    assert answer.status.code == code
    assert await call.next() is None
    assert call.status == 3


async def test_group_that_is_new_is_bound_to_the_topic_of_its_first_lite_client(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    await sync(client, "a", group="new")
    found = node.broker.group_configs.get("new")
    assert found is not None
    assert found.lite_topic == PARENT


async def test_assignment_of_a_lite_group_is_any_queue_though_it_is_in_order(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    bound = GroupConfig("g", attributes={"lite.bind.topic": PARENT}, consume_orderly=True)
    node.broker.group_configs.put(bound)
    asked = schema.QueryAssignmentRequest(topic=resource(PARENT), group=resource("g"))
    answer = await client.call("QueryAssignment", asked)
    assert [item.message_queue.id for item in answer.assignments] == [-1]


# Subscriptions


async def test_subscribed_lite_topics_are_received_with_messages_from_before(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"a1", b"a2")
    await send(client, "b", b"b1")
    await sync(client, "a")
    found = await receive(client)
    assert bodies(found) == [b"a1", b"a2"]
    system = found[1].system_properties
    assert (system.lite_topic, system.message_type, system.queue_offset) == ("a", 5, 1)
    assert not {props.LITE_TOPIC, props.LITE_QUEUE, props.LITE_OFFSET} & set(found[1].user_properties)
    assert found[1].topic.name == PARENT


async def test_send_and_subscription_wake_a_receive_that_waits(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a")
    waiting = begin(client, wanted(wait_ms=30_000))
    await eventually(lambda: node.broker.pops.pools.waits("g", PARENT) == 1)
    await send(client, "b", b"b1")
    await send(client, "a", b"a1")
    assert bodies((await received(waiting))[1]) == [b"a1"]
    waiting = begin(client, wanted(wait_ms=30_000))
    await eventually(lambda: node.broker.pops.pools.waits("g", PARENT) == 1)
    await sync(client, "b")
    assert bodies((await received(waiting))[1]) == [b"b1"]


async def test_removed_lite_topic_is_not_received(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a", "b")
    await sync(client, "a", "not a name", action=REMOVE)
    await send(client, "a", b"a1")
    await send(client, "b", b"b1")
    assert bodies(await receive(client)) == [b"b1"]


@pytest.mark.parametrize("action", [REMOVE, NONE])
async def test_client_that_unsubscribes_does_not_recreate_its_deleted_group(
    node: Node, client: GrpcClient, connect: Connect, action: int
) -> None:
    ready(node)
    await sync(client, "a")
    admin = await connect(node.address)
    assert (
        await admin.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "removeOffset": "true"})
    ).code == 0
    await sync(client, *("a",) * (action == REMOVE), action=action)
    assert node.broker.group_configs.get("g") is None
    assert not node.broker.pops.pools.all


async def test_whole_set_replaces_the_one_before(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a", "b")
    await sync(client, "b", "c", action=ALL)
    for name in ("a", "b", "c"):
        await send(client, name, name.encode())
    assert sorted(bodies(await receive(client))) == [b"b", b"c"]
    await sync(client, action=ALL)
    await send(client, "b", b"2")
    assert await receive(client) == []


async def test_client_that_is_forgotten_receives_nothing(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a")
    await sync(client, action=NONE)
    await send(client, "a", b"1")
    assert await receive(client) == []


ILLEGAL_SYNCS: list[tuple[tuple[str, ...], dict[str, Any], int]] = [
    (("a b",), {}, ILLEGAL_NAME),
    (("x" * 65,), {"action": ALL}, ILLEGAL_NAME),
    (("",), {}, ILLEGAL_NAME),
    (("a",), {"topic": "a b"}, ILLEGAL_TOPIC),
    (("a",), {"group": "a b"}, ILLEGAL_GROUP),
    (("a",), {"topic": "missing"}, NO_TOPIC),
    (("a",), {"topic": "other"}, ILLEGAL_TOPIC),
    (("a",), {"action": 9}, BAD_REQUEST),
    (("a",), {"offset": -1}, ILLEGAL_OFFSET),
    (("a",), {"tail_n": -1}, ILLEGAL_OFFSET),
    (("a",), {"timestamp": -1}, ILLEGAL_OFFSET),
]


async def test_subscription_is_refused_when_its_names_or_offset_are_illegal(node: Node, client: GrpcClient) -> None:
    ready(node)
    put(node, "other", message_type="LITE")
    for names, more, code in ILLEGAL_SYNCS:
        await sync(client, *names, **more, code=code)


async def test_quota_counts_the_lite_topics_that_a_client_has(node: Node, client: GrpcClient) -> None:
    ready(node, lite_sub_client_quota="3")
    await sync(client, "a", "b", "c")
    await sync(client, "a")
    await sync(client, "d", code=OVER_QUOTA)
    await sync(client, "a", "b", "c", "d", action=ALL, code=OVER_QUOTA)
    await sync(client, "a", action=REMOVE)
    await sync(client, "d")
    await sync(client, "b", "c", "d", action=ALL)


@pytest.mark.limits(max_lite_subscriptions=3)
async def test_subscriptions_over_the_limit_of_the_broker_are_refused(node: Node, dial: Dial) -> None:
    ready(node)
    one, two = await dial(node.address, client_id="one"), await dial(node.address, client_id="two")
    await sync(one, "a", "b")
    await sync(two, "a")
    await sync(two, "b", code=OVER_QUOTA)
    await sync(one, action=NONE)
    await sync(two, "b")


@pytest.mark.still
async def test_subscriptions_end_180_s_after_the_last_synchronization(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a")
    for _ in range(2):
        node.clock.advance(60)
        await receive(client)
    await sync(client, "a", action=ALL)
    for _ in range(2):
        node.clock.advance(80)
        await receive(client)
    assert node.broker.pops.lite.count == 1
    node.clock.advance(60)
    await eventually(lambda: node.broker.pops.lite.count == 0)


async def test_subscriptions_end_with_the_telemetry_stream_and_with_a_termination(
    node: Node, client: GrpcClient
) -> None:
    ready(node)
    call, _ = await apply_settings(client, settings())
    await sync(client, "a")
    call.cancel()
    await eventually(lambda: node.broker.pops.lite.count == 0)
    await sync(client, "a", action=ALL)
    assert node.broker.pops.lite.count == 1
    await client.call("NotifyClientTermination", schema.NotifyClientTerminationRequest(group=resource("g")))
    assert node.broker.pops.lite.count == 0


# Offsets


@pytest.mark.parametrize(
    ("option", "left"),
    [
        ({"policy": LAST}, [b"2", b"3", b"4"]),
        ({"policy": MIN}, [b"0", b"1", b"2", b"3", b"4"]),
        ({"policy": MAX}, []),
        ({"offset": 3}, [b"3", b"4"]),
        ({"offset": 99}, []),
        ({"tail_n": 1}, [b"1", b"2", b"3", b"4"]),
        ({"tail_n": 99}, [b"0", b"1", b"2", b"3", b"4"]),
        ({"timestamp": 0}, [b"0", b"1", b"2", b"3", b"4"]),
    ],
)
async def test_offset_option_sets_the_offset_of_the_group(
    node: Node, client: GrpcClient, option: dict[str, Any], left: list[bytes]
) -> None:
    ready(node)
    await send(client, "a", *(b"%d" % number for number in range(5)))
    await sync(client, "a")
    assert await ack(client, *await receive(client, count=2)) == [OK, OK]
    await sync(client, "a", action=REMOVE)
    await sync(client, "a", **option)
    assert bodies(await receive(client)) == left


@pytest.mark.still
async def test_offset_option_finds_messages_by_time(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"0")
    node.clock.advance(10)
    await send(client, "a", b"1", b"2")
    await sync(client, "a", timestamp=node.clock.time_ms() - 5000)
    assert bodies(await receive(client)) == [b"1", b"2"]


async def test_handles_from_before_a_reset_acknowledge_nothing(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"0", b"1")
    await sync(client, "a")
    old = await receive(client)
    await sync(client, "a", policy=MIN)
    new = await receive(client)
    assert bodies(new) == [b"0", b"1"]
    assert await ack(client, *old) == [ILLEGAL_HANDLE, ILLEGAL_HANDLE]
    assert await ack(client, *new) == [OK, OK]


# Deliveries


async def test_new_messages_wait_until_the_batch_before_is_acknowledged(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"1", b"2", b"3")
    await send(client, "b", b"b")
    await sync(client, "a", "b")
    found = await receive(client, count=2)
    assert bodies(found) == [b"1", b"2"]
    assert bodies(await receive(client)) == [b"b"]
    assert await ack(client, found[1]) == [OK]
    assert await receive(client) == []
    assert await ack(client, found[0], found[0]) == [OK, OK]
    assert await ack(client, found[1]) == [OK]
    assert bodies(await receive(client)) == [b"3"]


async def test_batch_of_many_lite_topics_keeps_the_order_of_each(node: Node, client: GrpcClient) -> None:
    ready(node)
    names = [f"s{number}" for number in range(150)]
    await sync(client, *names)
    for name in names:
        await send(client, name, b"1", b"2")
    found: dict[str, list[bytes]] = {}
    while messages := await receive(client):
        for item in messages:
            found.setdefault(item.system_properties.lite_topic, []).append(item.body)
        assert set(await ack(client, *messages)) == {OK}
    assert found == {name: [b"1", b"2"] for name in names}


@pytest.mark.still
async def test_only_messages_that_were_not_acknowledged_are_redelivered_in_order(
    node: Node, client: GrpcClient
) -> None:
    ready(node)
    await send(client, "a", b"1", b"2", b"3", b"4")
    await sync(client, "a")
    found = await receive(client, count=3, invisible_ms=30_000)
    assert await ack(client, found[1]) == [OK]
    node.clock.advance(30.001)
    assert attempts(await receive(client)) == [(b"1", 2), (b"3", 2)]


@pytest.mark.still
async def test_message_that_was_returned_is_redelivered_at_its_time_before_later_ones(
    node: Node, client: GrpcClient
) -> None:
    ready(node)
    await send(client, "a", b"1", b"2")
    await sync(client, "a")
    (first,) = await receive(client, count=1)
    assert await change(client, first, 2000) == OK
    node.clock.advance(1.999)
    assert await receive(client) == []
    node.clock.advance(0.002)
    (again,) = await receive(client)
    assert attempts([again]) == [(b"1", 2)]
    assert await change(client, again, 0) == OK
    assert attempts(await receive(client)) == [(b"1", 3)]


@pytest.mark.still
async def test_suspended_batch_counts_no_attempt(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"1", b"2")
    await sync(client, "a")
    found = await receive(client)
    assert await change(client, found[0], 5000, suspend=True) == OK
    node.clock.advance(5.001)
    assert attempts(await receive(client)) == [(b"1", 1), (b"2", 1)]


@pytest.mark.limits(max_unfinished_of_lite_client=2)
@pytest.mark.parametrize("suspend", [False, True])
async def test_delayed_messages_do_not_count_for_the_limit_of_unacknowledged_ones(
    node: Node, client: GrpcClient, suspend: bool
) -> None:
    ready(node)
    await sync(client, "a", "b", "c")
    for name in ("a", "b"):
        await send(client, name, name.encode())
    for item in await receive(client):
        assert await change(client, item, 3_600_000, suspend=suspend) == OK
    await send(client, "c", b"c1", b"c2", b"c3")
    assert bodies(await receive(client)) == [b"c1", b"c2"]
    code, messages = await received(begin(client, wanted()))
    assert (code, messages) == (FORBIDDEN, [])


@pytest.mark.limits(max_unfinished_of_lite_client=2)
async def test_limit_of_unacknowledged_messages_does_not_count_those_that_another_client_has_now(
    node: Node, dial: Dial
) -> None:
    ready(node)
    first, second = [await dial(node.address, client_id=name) for name in ("one", "two")]
    await sync(first, "a", "b", "c", "d")
    await sync(second, "a", "b")
    await send(first, "a", b"1")
    await send(first, "b", b"2")
    assert len(await receive(first, invisible_ms=10_000)) == 2
    node.clock.advance(11)
    assert len(await receive(second, invisible_ms=100_000)) == 2
    await send(first, "c", b"3")
    await send(first, "d", b"4")
    assert sorted(bodies(await receive(first))) == [b"3", b"4"]
    for client in (first, second):
        code, messages = await received(begin(client, wanted()))
        assert (code, messages) == (FORBIDDEN, [])


async def test_group_that_becomes_a_wildcard_group_again_gets_older_messages(node: Node, client: GrpcClient) -> None:
    ready(node, lite_sub_wildcard="true")
    await sync(client, action=ALL)
    await send(client, "a", b"1")
    assert await ack(client, *(await receive(client))) == [OK]
    ready(node)
    await sync(client, "other")
    await send(client, "b", b"2")
    assert await receive(client) == []
    ready(node, lite_sub_wildcard="true")
    await sync(client, action=ALL)
    assert bodies(await receive(client)) == [b"2"]


async def test_same_attempt_gets_the_same_batch(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"1", b"2", b"3")
    await sync(client, "a")
    first = await receive(client, count=2, attempt_id="one")
    again = await receive(client, count=2, attempt_id="one")
    assert bodies(first) == bodies(again) == [b"1", b"2"]
    assert await receive(client, attempt_id="two") == []
    assert await ack(client, *again) == [OK, OK]


async def test_acknowledgement_needs_the_right_lite_topic_and_group(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"1")
    await sync(client, "a")
    found = await receive(client)
    assert await ack(client, *found, name="b") == [ILLEGAL_HANDLE]
    assert await ack(client, *found, group="other") == [ILLEGAL_HANDLE]
    handle = found[0].system_properties.receipt_handle
    found[0].system_properties.receipt_handle = "garbage"
    assert await ack(client, *found) == [ILLEGAL_HANDLE]
    found[0].system_properties.receipt_handle = handle.removesuffix("a") + "missing"
    assert await ack(client, *found, name="") == [ILLEGAL_HANDLE]
    assert await receive(client) == []


async def test_messages_are_settled_by_the_handle_when_a_client_leaves_out_the_lite_topic(
    node: Node, client: GrpcClient
) -> None:
    """Java's client 5.2 leaves it out when a handler fails."""
    ready(node)
    await send(client, "a", b"1", b"2")
    await send(client, "b", b"3")
    await sync(client, "a", "b")
    one, two, _ = await receive(client)
    assert await ack(client, two, name="") == [OK]
    one.system_properties.lite_topic = ""
    assert await change(client, one, 0) == OK
    assert attempts(await receive(client)) == [(b"1", 2)]


@pytest.mark.still
async def test_broker_extends_the_time_of_a_lite_message_while_its_client_has_contact(
    node: Node, client: GrpcClient
) -> None:
    ready(node)
    await send(client, "a", b"1")
    await sync(client, "a")
    found = await receive(client, auto_renew=True)
    for _ in range(5):
        node.clock.advance(15)
        await sync(client, "a", action=ALL)
        assert await receive(client) == []
    assert await ack(client, *found) == [OK]


async def test_dead_letter_is_a_plain_copy_and_unblocks_the_lite_topic(node: Node, client: GrpcClient) -> None:
    ready(node)
    await send(client, "a", b"1", b"2")
    await sync(client, "a")
    (first,) = await receive(client, count=1)
    system = first.system_properties
    asked = schema.ForwardMessageToDeadLetterQueueRequest(
        group=resource("g"), topic=resource(PARENT), receipt_handle=system.receipt_handle, lite_topic="a"
    )
    assert (await client.call("ForwardMessageToDeadLetterQueue", asked)).status.code == OK
    (dead,) = stored(node, "%DLQ%g")
    kept = [props.find(dead.properties, name) for name in (props.LITE_TOPIC, props.LITE_QUEUE, props.LITE_OFFSET)]
    assert kept == ["a", None, None]
    assert bodies(await receive(client)) == [b"2"]


async def test_lite_topic_of_a_dead_letter_is_not_returned_because_clients_acknowledge_with_it(
    node: Node, client: GrpcClient
) -> None:
    ready(node)
    await send(client, "a", b"1")
    await sync(client, "a")
    (first,) = await receive(client, count=1)
    asked = schema.ForwardMessageToDeadLetterQueueRequest(
        group=resource("g"),
        topic=resource(PARENT),
        receipt_handle=first.system_properties.receipt_handle,
        lite_topic="a",
    )
    assert (await client.call("ForwardMessageToDeadLetterQueue", asked)).status.code == OK
    reading = {"group": resource("reader"), "message_queue": schema.MessageQueue(topic=resource("%DLQ%g"), id=-1)}
    (dead,) = await receive_plain(client, **reading)
    system = dead.system_properties
    assert (system.lite_topic, system.message_type, system.queue_offset) == ("", NORMAL, 0)
    assert (await ack_plain(client, system.receipt_handle, group="reader", topic="%DLQ%g")).status.code == OK
    assert node.broker.offsets.get("reader", "%DLQ%g", 0) == 1


async def test_response_that_its_client_gave_up_is_put_back(node: Node, client: GrpcClient) -> None:
    ready(node)
    await sync(client, "a")
    waiting = begin(client, wanted(wait_ms=30_000))
    await eventually(lambda: node.broker.pops.pools.waits("g", PARENT) == 1)
    waiting.cancel()
    await eventually(lambda: node.broker.pops.pools.waits("g", PARENT) == 0)
    await send(client, "a", b"1")
    assert attempts(await receive(client)) == [(b"1", 1)]


async def test_two_clients_share_a_lite_topic_in_order(node: Node, dial: Dial) -> None:
    ready(node)
    one, two = await dial(node.address, client_id="one"), await dial(node.address, client_id="two")
    for client in (one, two):
        await sync(client, "a")
    await send(one, "a", b"1", b"2")
    found = await receive(one, count=1)
    assert await receive(two) == []
    assert await ack(one, *found) == [OK]
    assert bodies(await receive(two)) == [b"2"]


# Restarts


async def test_state_is_the_same_after_a_restart(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start()
    client = await dial(node.address)
    ready(node)
    await send(client, "a", b"1", b"2", b"3")
    await send(client, "b", b"b1", b"b2")
    await sync(client, "a", "b")
    found = {item.body: item for item in await receive(client, count=5)}
    assert await ack(client, found[b"2"], found[b"b1"], found[b"b2"]) == [OK, OK, OK]
    await client.close()
    await node.stop()
    node = await nodes.start(data_dir=node.broker.config.data_dir)
    client = await dial(node.address)
    await sync(client, "a", "b", action=ALL)
    assert await receive(client) == []
    assert await ack(client, found[b"1"]) == [OK]
    assert await change(client, found[b"3"], 0) == OK
    assert attempts(await receive(client)) == [(b"3", 2)]
    await send(client, "b", b"b3")
    assert bodies(await receive(client)) == [b"b3"]


# Exclusive and wildcard


async def test_client_of_an_exclusive_group_is_notified_when_another_takes_over(node: Node, dial: Dial) -> None:
    ready(node, lite_sub_model="Exclusive")
    one, two = await dial(node.address, client_id="one"), await dial(node.address, client_id="two")
    stream, _ = await apply_settings(one, settings())
    await sync(one, "a", "b")
    await send(one, "a", b"1", b"2")
    held = await receive(one, count=1)
    await sync(two, "a")
    assert (await stream.next()).notify_unsubscribe_lite_command.lite_topic == "a"
    assert await receive(two) == []
    assert await ack(one, *held) == [OK]
    await sync(one, "a", "b", action=ALL)
    assert (await stream.next()).notify_unsubscribe_lite_command.lite_topic == "a"
    assert await receive(one) == []
    await sync(two, "a")
    found = await receive(two)
    assert bodies(found) == [b"2"]
    assert await ack(two, *found) == [OK]
    await sync(one, "a")
    await send(one, "a", b"3")
    assert await receive(two) == []
    assert bodies(await receive(one)) == [b"3"]


async def test_lite_topic_of_a_client_that_left_is_free_for_the_next(node: Node, dial: Dial) -> None:
    ready(node, lite_sub_model="Exclusive")
    one, two = await dial(node.address, client_id="one"), await dial(node.address, client_id="two")
    await sync(one, "a")
    await sync(two, "a", action=ALL)
    await send(one, "a", b"1")
    assert await receive(two) == []
    await sync(one, action=NONE)
    await sync(two, "a", action=ALL)
    assert bodies(await receive(two)) == [b"1"]


@pytest.mark.parametrize(
    ("attribute", "is_evicted"),
    [("lite_sub_reset_offset_exclusive", True), ("lite_sub_reset_offset_unsubscribe", False)],
)
async def test_offset_goes_back_when_the_group_says_so(
    node: Node, dial: Dial, attribute: str, is_evicted: bool
) -> None:
    ready(node, lite_sub_model="Exclusive", **dict[str, Any]({attribute: "true"}))
    one, two = await dial(node.address, client_id="one"), await dial(node.address, client_id="two")
    await send(one, "a", b"1", b"2")
    await sync(one, "a")
    assert await ack(one, *await receive(one)) == [OK, OK]
    if not is_evicted:
        await sync(one, "a", action=REMOVE)
    await sync(two, "a")
    assert bodies(await receive(two)) == [b"1", b"2"]


async def test_synchronization_that_leaves_out_a_lite_topic_keeps_its_offset_when_unsubscribing_resets_it(
    node: Node, client: GrpcClient
) -> None:
    ready(node, lite_sub_reset_offset_unsubscribe="true")
    await send(client, "a", b"1")
    await sync(client, "a")
    assert await ack(client, *await receive(client)) == [OK]
    await sync(client, action=ALL)
    await sync(client, "a")
    assert await receive(client) == []
    await sync(client, "a", action=REMOVE)
    await sync(client, "a")
    assert bodies(await receive(client)) == [b"1"]


async def test_wildcard_group_receives_every_lite_topic(node: Node, client: GrpcClient) -> None:
    ready(node, lite_sub_wildcard="")
    await send(client, "a", b"a1")
    await sync(client, "x", code=BAD_REQUEST)
    await sync(client, action=ALL)
    await send(client, "b", b"b1")
    found = await receive(client)
    assert sorted(bodies(found)) == [b"a1", b"b1"]
    assert set(await ack(client, *found)) == {OK}
    waiting = begin(client, wanted(wait_ms=30_000))
    await eventually(lambda: node.broker.pops.pools.waits("g", PARENT) == 1)
    await send(client, "new", b"c1")
    assert bodies((await received(waiting))[1]) == [b"c1"]


async def test_client_that_leaves_a_group_that_has_become_a_wildcard_group_takes_nothing_from_the_others(
    node: Node, client: GrpcClient, dial: Dial
) -> None:
    other = await dial(node.address, client_id="other")
    ready(node)
    await sync(other, "a")
    ready(node, lite_sub_wildcard="")
    await sync(client, action=ALL)
    await sync(other, action=ALL)
    await send(client, "a", b"1")
    await sync(other, action=NONE)
    assert bodies(await receive(client)) == [b"1"]


async def test_synchronizations_of_a_client_on_two_connections_are_carried_out_one_after_the_other(
    node: Node, client: GrpcClient, dial: Dial
) -> None:
    ready(node, lite_sub_client_quota="-1")
    again = await dial(node.address)
    first = asyncio.create_task(sync(client, *(f"n{number}" for number in range(MAX_SYNCED_LITE_TOPICS)), action=ALL))
    while not node.broker.pops.lite.count:
        await asyncio.sleep(0)
    await sync(again, "a", action=ALL)
    await first
    assert node.broker.pops.lite.count == 1


# Expiration


@pytest.mark.still
async def test_lite_topic_expires_at_its_time_and_starts_at_0_again(node: Node, client: GrpcClient) -> None:
    ready(node, minutes=3)
    await send(client, "a", b"1")
    await send(client, "b", b"1")
    await sync(client, "a")
    old = await receive(client)
    assert await ack(client, *old) == [OK]
    node.clock.advance(90)
    await send(client, "b", b"2")
    node.clock.advance(89.9)
    assert sorted(node.broker.lites.of(PARENT)) == ["a", "b"]
    node.clock.advance(0.2)
    assert list(node.broker.lites.of(PARENT)) == ["b"]
    await sync(client, "a", action=ALL)
    await send(client, "a", b"new")
    (found,) = await receive(client)
    assert (found.body, found.system_properties.queue_offset) == (b"new", 0)
    assert await ack(client, *old) == [ILLEGAL_HANDLE]
    assert await ack(client, found) == [OK]


@pytest.mark.still
async def test_lite_topic_is_kept_while_a_subscribed_group_has_messages_left(node: Node, client: GrpcClient) -> None:
    ready(node, minutes=1)
    await send(client, "a", b"1")
    await sync(client, "a")
    node.clock.advance(100)
    await sync(client, "a", action=ALL)
    node.clock.advance(100)
    found = await receive(client)
    assert bodies(found) == [b"1"]
    assert await ack(client, *found) == [OK]
    assert list(node.broker.lites.of(PARENT)) == []


@pytest.mark.still
async def test_messages_that_expire_unread_are_counted_and_logged(node: Node, dial: Dial) -> None:
    node.clock.advance(180)
    client = await dial(node.address)
    ready(node, minutes=1)
    await send(client, "a", b"1", b"2", b"3")
    await sync(client, "a")
    assert await ack(client, *await receive(client, count=1)) == [OK]
    await sync(client, "a", action=REMOVE)
    with capture_logs() as logs:
        node.clock.advance(61)
    assert [
        (line["lite_topic"], line["messages"]) for line in logs if line["event"] == "lite_topic_expired_unread"
    ] == [("a", 2)]
    assert list(node.broker.progress.lost()) == [("g", PARENT, 2)]


async def test_unread_lite_topic_is_kept_when_its_client_comes_back_after_a_restart(nodes: Nodes, dial: Dial) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock)
    client = await dial(node.address)
    ready(node, minutes=1)
    await send(client, "a", b"1", b"2")
    await send(client, "b", b"1", b"2")
    await send(client, "never-received", b"1")
    await send(client, "no-subscriber", b"1")
    await sync(client, "a", "b", "never-received")
    assert set(await ack(client, *await receive(client, count=1), *await receive(client, count=1))) == {OK}
    await client.close()
    await node.stop()
    clock.advance(400)
    node = await nodes.start(clock=clock, data_dir=node.broker.config.data_dir)
    clock.advance(170)
    assert sorted(node.broker.lites.of(PARENT)) == ["a", "b", "never-received", "no-subscriber"]
    client = await dial(node.address)
    await sync(client, "a", "never-received", action=ALL)
    clock.advance(20)
    assert sorted(node.broker.lites.of(PARENT)) == ["a", "never-received"]
    assert list(node.broker.progress.lost()) == [("g", PARENT, 1)]
    assert sorted(bodies(await receive(client))) == [b"1", b"2"]


@pytest.mark.parametrize("wildcard", ["false", "true"])
@pytest.mark.still
async def test_unread_lite_topic_is_kept_when_its_only_client_reconnects(node: Node, dial: Dial, wildcard: str) -> None:
    node.clock.advance(180)
    ready(node, minutes=1, lite_sub_wildcard=wildcard)
    names = () if wildcard == "true" else ("a",)
    await send(await dial(node.address, client_id="producer"), "a", b"1")
    for _ in range(2):
        client = await dial(node.address)
        await apply_settings(client, settings())
        await sync(client, *names, action=ALL)
        node.clock.advance(70)
        assert list(node.broker.lites.of(PARENT)) == ["a"]
        await client.close()
        await eventually(lambda: not any(pool.queues.subscribers for pool in node.broker.pops.pools.lite_pools(PARENT)))
        node.clock.advance(170)
        assert list(node.broker.lites.of(PARENT)) == ["a"]
    node.clock.advance(20)
    assert list(node.broker.lites.of(PARENT)) == []


async def test_unread_lite_messages_that_retention_deletes_are_counted_once(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(clock=MovableClock(stands=True), segment_bytes=4000, retain_hours=1)
    client = await dial(node.address)
    ready(node)
    await send(client, "a", *(b"%d" % number for number in range(40)))
    await send(client, "b", b"1", b"2")
    await sync(client, "a", "b")
    found = await receive(client, count=3, invisible_ms=4 * 3600 * 1000)
    assert await ack(client, found[1]) == [OK]
    lite, begins = node.broker.lites.of(PARENT)["a"], [3]
    with capture_logs() as logs:
        for _ in range(2):
            await client.close()
            node.clock.advance(2 * 3600)
            await eventually(lambda: lite.begin > begins[-1])
            await eventually(lambda: list(node.broker.progress.lost()) == [("g", PARENT, lite.begin - 1)])
            begins.append(lite.begin)
            client = await dial(node.address)
            await send(client, "a", *(b"%d" % number for number in range(40)))

        def lost() -> int:
            return sum(line["messages"] for line in logs if line["event"] == "messages_expired_unread")

        await eventually(lambda: lost() == lite.begin - 1)
    assert list(node.broker.progress.lost()) == [("g", PARENT, lost())]


async def test_expired_lite_topic_is_gone_after_a_restart_too(nodes: Nodes, dial: Dial) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock)
    client = await dial(node.address)
    ready(node, minutes=2)
    await send(client, "a", b"1")
    await send(client, "unread", b"1")
    await send(client, "stopped", b"1")
    await sync(client, "a", "stopped")
    assert await ack(client, *await receive(client, count=2)) == [OK, OK]
    clock.advance(70)
    await send(client, "stopped", b"2")
    assert await ack(client, *await receive(client)) == [OK]
    clock.advance(51)
    assert list(node.broker.lites.of(PARENT)) == ["stopped"]
    await send(client, "a", b"recreated")
    await client.close()
    await node.stop()
    clock.advance(400)
    node = await nodes.start(clock=clock, data_dir=node.broker.config.data_dir)
    clock.advance(170)
    assert list(node.broker.lites.of(PARENT)) == ["stopped", "a"]
    client = await dial(node.address)
    await sync(client, "a", "unread", "stopped", action=ALL)
    (found,) = await receive(client)
    assert (found.body, found.system_properties.queue_offset) == (b"recreated", 0)
    assert await ack(client, found) == [OK]
    clock.advance(20)
    assert list(node.broker.lites.of(PARENT)) == []
    await send(client, "a", b"2")
    assert bodies(await receive(client)) == [b"2"]


async def test_removal_of_many_subscriptions_ends_when_its_connection_is_lost(node: Node, dial: Dial) -> None:
    count = 20_000
    ready(node, lite_sub_client_quota=str(count))
    client = await dial(node.address)
    for first in range(0, count, 1000):
        await sync(client, *(f"n{number}" for number in range(first, first + 1000)))
    subscriptions = node.broker.pops.lite
    pool = node.broker.pops.pools.find_lite("g", PARENT)
    assert pool is not None
    (subscriber,) = pool.queues.subscribers.values()
    session: Any = subscriber.session
    asked = schema.SyncLiteSubscriptionRequest(action=NONE, topic=resource(PARENT), group=resource("g"))
    client.begin("SyncLiteSubscription").send(asked, end=True)
    while subscriptions.count == count:
        await asyncio.sleep(0)
    assert subscriptions.count > 0
    session.connection.abort()
    await eventually(lambda: subscriptions.count == 0)
