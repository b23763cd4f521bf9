"""Lite topics, of clients of 5.5: what they send, subscribe to, receive and settle."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from rocketlet.protocol import properties as props

from ...conftest import Node
from ...support.grpc_client import GrpcClient, message, route, sending
from ...support.topics import put, stored
from .lite import PARENT, send

CONFLICT, RESERVED, ILLEGAL_NAME, FULL = 40014, 40007, 40020, 42901


# Sends


async def test_message_is_stored_in_the_parent_topic_with_its_lite_topic(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    entries = await send(client, "a", b"1", b"2") + await send(client, "b", b"3")
    found = {record.body: record for record in stored(node, PARENT)}
    assert [entry.offset for entry in entries] == [found[body].queue_offset for body in (b"1", b"2", b"3")]
    assert found[b"1"].queue_id == found[b"2"].queue_id
    texts = [
        [props.find(found[body].properties, name) for name in (props.LITE_TOPIC, props.LITE_QUEUE, props.LITE_OFFSET)]
        for body in (b"1", b"2", b"3")
    ]
    assert texts == [["a", "%LMQ%$CHAT$a", "0"], ["a", "%LMQ%$CHAT$a", "1"], ["b", "%LMQ%$CHAT$b", "0"]]


async def test_route_of_a_parent_topic_announces_lite_messages(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    answer = await client.call("QueryRoute", route(PARENT))
    assert {tuple(queue.accept_message_types) for queue in answer.message_queues} == {(5,)}


CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, str], int]] = [
    ("LITE", {}, {}, CONFLICT),
    ("LITE", {"lite_topic": ""}, {}, CONFLICT),
    ("LITE", {"message_group": "g"}, {}, CONFLICT),
    ("LITE", {"lite_topic": "a", "message_group": "g"}, {}, CONFLICT),
    ("LITE", {"lite_topic": "a", "priority": 1}, {}, CONFLICT),
    ("", {"lite_topic": "a", "message_group": "g"}, {}, CONFLICT),
    ("", {"lite_topic": "a"}, {}, CONFLICT),
    ("NORMAL", {"lite_topic": "a"}, {}, CONFLICT),
    ("PRIORITY", {"lite_topic": "a"}, {}, CONFLICT),
    ("LITE", {"lite_topic": "a b"}, {}, ILLEGAL_NAME),
    ("LITE", {"lite_topic": "a%b"}, {}, ILLEGAL_NAME),
    ("LITE", {"lite_topic": "x" * 65}, {}, ILLEGAL_NAME),
    ("LITE", {"lite_topic": "a"}, {props.LITE_TOPIC: "b"}, RESERVED),
    ("LITE", {"lite_topic": "a"}, {props.LITE_OFFSET: "7"}, RESERVED),
]


async def test_message_that_contradicts_lite_topics_is_refused(node: Node, client: GrpcClient) -> None:
    for topic_type, system, properties, code in CONTRADICTIONS:
        put(node, PARENT, message_type=topic_type)
        sent = message(PARENT, **system)
        sent.user_properties.update(properties)
        assert (await client.call("SendMessage", sending(sent))).status.code == code
        assert stored(node, PARENT) == []


async def test_delayed_message_has_no_lite_topic(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    due = timestamp_pb2.Timestamp()
    due.FromMilliseconds(node.clock.time_ms() + 5000)
    sent = message(PARENT, lite_topic="a", delivery_timestamp=due)
    assert (await client.call("SendMessage", sending(sent))).status.code == CONFLICT


async def test_longest_name_of_a_lite_topic_is_accepted(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    await send(client, "x" * 64, b"1")
    assert list(node.broker.lites.of(PARENT)) == ["x" * 64]


@pytest.mark.limits(max_lite_topics=2)
async def test_lite_topics_over_the_limit_are_refused(node: Node, client: GrpcClient) -> None:
    put(node, PARENT, message_type="LITE")
    await send(client, "a", b"1")
    await send(client, "b", b"1")
    answer = await client.call("SendMessage", sending(message(PARENT, lite_topic="c")))
    assert answer.status.code == FULL
    await send(client, "a", b"2")
