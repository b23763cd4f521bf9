"""Messages with priorities, of clients of 5.x: a queue for each level, urgent messages first."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from rocketlet.broker.config import LEVEL_WAIT_S, MAX_PRIORITY
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import GroupConfig

from ...conftest import Node, Nodes
from ...support.grpc_client import GrpcClient, message, route, sending
from ...support.topics import put, stored
from .conftest import Dial
from .receives import OK, ack, change, handles, joined, receive

PRIORITY = "PRIORITY"


async def send(client: GrpcClient, *levels: int, topic: str = "t") -> None:
    for level in levels:
        sent = message(topic, b"%d" % level, message_id=f"ID-{level}", priority=level)
        assert (await client.call("SendMessage", sending(sent))).status.code == OK


async def test_priority_decides_the_queue_and_is_delivered(node: Node, client: GrpcClient) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, 0, 3, 2, 4, MAX_PRIORITY)
    found = [(record.queue_id, record.body) for record in stored(node)]
    assert found == [(0, b"0"), (2, b"2"), (3, b"3"), (3, b"4"), (3, b"%d" % MAX_PRIORITY)]
    shown = (await receive(client))[0].system_properties
    assert (shown.priority, shown.message_type, shown.queue_id) == (3, 6, 3)
    answer = await client.call("QueryRoute", route("t"))
    assert {tuple(queue.accept_message_types) for queue in answer.message_queues} == {(6,)}


async def test_urgent_messages_are_received_first(node: Node, client: GrpcClient) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, 0, 1, 2, 0, 3, 1, 2)
    assert [item.body for item in await receive(client, count=1)] == [b"3"]
    await send(client, 3)
    assert [item.body for item in await receive(client)] == [b"3", b"2", b"2", b"1", b"1", b"0", b"0"]


async def test_returned_message_comes_after_all_waiting_ones_unless_the_topic_says_otherwise(
    node: Node, client: GrpcClient
) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, 3, 2, 0)
    first, second = handles(await receive(client, count=2))
    for handle in (second, first):
        assert (await change(client, handle, 0)).status.code == OK
    await send(client, 3, 0)
    assert [item.body for item in await receive(client, count=1)] == [b"3"]
    found = await receive(client, count=4)
    attempts = [(item.body, item.system_properties.delivery_attempt) for item in found]
    assert attempts == [(b"0", 1), (b"0", 1), (b"3", 2), (b"2", 2)], "retried ones last, by their level"
    put(node, message_type=PRIORITY, retried_first=True)
    assert (await change(client, handles(found)[2], 0)).status.code == OK
    await send(client, 1)
    assert [item.body for item in await receive(client)] == [b"3", b"1"]


@pytest.mark.still
async def test_retried_message_does_not_starve_while_new_messages_keep_coming(node: Node, client: GrpcClient) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, 0)
    (handle,) = handles(await receive(client))
    assert (await change(client, handle, 0)).status.code == OK
    await send(client, *[3] * 5)
    assert [item.body for item in await receive(client, count=1)] == [b"3"]
    node.clock.advance(LEVEL_WAIT_S)
    assert [item.body for _ in range(2) for item in await receive(client, count=1)] == [b"0", b"3"]


@pytest.mark.still
async def test_urgent_message_whose_visibility_timeout_expires_comes_before_waiting_ones_if_the_topic_says_so(
    node: Node, client: GrpcClient
) -> None:
    put(node, message_type=PRIORITY, retried_first=True)
    await joined(client)
    await send(client, 3, 2, *[0] * 5)
    late, returned = handles(await receive(client, count=2, invisible_ms=20_000))
    assert (await change(client, returned, 10_000)).status.code == OK
    assert [item.body for item in await receive(client, count=1)] == [b"0"]
    node.clock.advance(10.001)
    assert [item.body for item in await receive(client, count=2)] == [b"2", b"0"]
    node.clock.advance(10)
    assert [item.body for item in await receive(client, count=2)] == [b"3", b"0"]
    assert (await ack(client, late)).status.code != OK, "it belongs to the second receive now"


async def test_urgent_messages_are_received_first_after_a_restart(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start()
    client = await dial(node.address)
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, 0, 2, 3, 1, 2)
    assert (await ack(client, *handles(await receive(client, count=1)))).status.code == OK
    await client.close()
    await node.stop()
    node = await nodes.start(data_dir=node.broker.config.data_dir)
    client = await dial(node.address)
    assert [item.body for item in await receive(client)] == [b"2", b"2", b"1", b"0"]


@pytest.mark.still
async def test_low_level_does_not_starve_while_urgent_messages_keep_coming(node: Node, client: GrpcClient) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, *[0] * 3, *[1] * 2, *[3] * 20)

    async def pop() -> bytes:
        (found,) = await receive(client, count=1)
        assert (await ack(client, *handles([found]))).status.code == OK
        return bytes(found.body)

    assert [await pop() for _ in range(3)] == [b"3"] * 3
    node.clock.advance(LEVEL_WAIT_S - 1)
    assert await pop() == b"3", "no level has been passed over for long enough"
    node.clock.advance(1)
    assert [await pop() for _ in range(3)] == [b"0", b"3", b"3"], "one receive, then urgent messages again"
    node.clock.advance(LEVEL_WAIT_S)
    assert [await pop() for _ in range(2)] == [b"1", b"3"], "now another level has waited longest"
    node.clock.advance(LEVEL_WAIT_S)
    assert [await pop() for _ in range(2)] == [b"0", b"3"]


@pytest.mark.still
async def test_level_that_is_served_does_not_precede_an_urgent_message_later(node: Node, client: GrpcClient) -> None:
    put(node, message_type=PRIORITY)
    await joined(client)
    await send(client, *[0] * 10)
    for _ in range(3):
        (found,) = await receive(client, count=1)
        assert (found.body, (await ack(client, *handles([found]))).status.code) == (b"0", OK)
        node.clock.advance(LEVEL_WAIT_S)
    await send(client, 3)
    assert [item.body for item in await receive(client, count=1)] == [b"3"]


@pytest.mark.parametrize(
    ("factor", "bodies"),
    [
        ("100", [3] * 10),
        ("80", [3, 3, 3, 3, 0, 3, 3, 3, 3, 1]),
        ("50", [3, 0, 3, 1, 3, 0, 3, 1, 3, 0]),
        ("0", [0, 1, 3] * 3 + [0]),
    ],
)
async def test_priority_factor_is_the_part_of_receives_that_begin_with_the_highest_level(
    node: Node, client: GrpcClient, factor: str, bodies: list[int]
) -> None:
    put(node, message_type=PRIORITY)
    node.broker.group_configs.put(GroupConfig("g", attributes={"priority.factor": factor}))
    await joined(client)
    await send(client, *[0] * 10, *[1] * 10, *[3] * 10)
    found = [int(item.body) for _ in bodies for item in await receive(client, count=1)]
    assert found == bodies


async def test_group_in_order_ignores_priorities(node: Node, client: GrpcClient) -> None:
    put(node, queues=1, message_type=PRIORITY)
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    await joined(client)
    await send(client, 0, 3, 1)
    assert [item.body for item in await receive(client)] == [b"0", b"3", b"1"]


async def test_topic_without_a_type_takes_priorities_and_announces_the_other_types(
    node: Node, client: GrpcClient
) -> None:
    put(node)
    await joined(client)
    await send(client, 2)
    (found,) = await receive(client)
    assert (found.system_properties.priority, found.system_properties.queue_id) == (2, 2)
    answer = await client.call("QueryRoute", route("t"))
    assert list(answer.message_queues[0].accept_message_types) == [1, 2, 3, 4]


async def test_message_without_priority_has_none_when_it_is_received(node: Node, client: GrpcClient) -> None:
    put(node)
    await joined(client)
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    (found,) = await receive(client)
    assert not found.system_properties.HasField("priority")


CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, str], int]] = [
    (PRIORITY, {}, {}, 40014),
    (PRIORITY, {"priority": 1, "message_group": "g"}, {}, 40014),
    ("", {"priority": 1, "message_group": "g"}, {}, 40014),
    ("NORMAL", {"priority": 1}, {}, 40014),
    (PRIORITY, {"priority": -1}, {}, 40000),
    (PRIORITY, {"priority": 1}, {props.PRIORITY: "2"}, 40007),
    (PRIORITY, {"priority": 1}, {"__LITE_TOPIC": "x"}, 40007),
]


async def test_message_that_contradicts_priorities_is_refused(node: Node, client: GrpcClient) -> None:
    for topic_type, system, properties, code in CONTRADICTIONS:
        put(node, message_type=topic_type)
        sent = message("t", **system)
        sent.user_properties.update(properties)
        assert (await client.call("SendMessage", sending(sent))).status.code == code
        assert stored(node) == []


@pytest.mark.still
async def test_delayed_message_keeps_its_priority(node: Node, client: GrpcClient) -> None:
    put(node)
    due = timestamp_pb2.Timestamp()
    due.FromMilliseconds(node.clock.time_ms() + 5000)
    sent = message("t", priority=2, delivery_timestamp=due)
    assert (await client.call("SendMessage", sending(sent))).status.code == OK
    node.clock.advance(5.001)
    (record,) = stored(node)
    assert (record.queue_id, props.find(record.properties, props.PRIORITY)) == (2, "2")
