"""Lite topics over remoting: attributes of topics and groups, and the requests of 5.5's clients and tools."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write

from ...conftest import Node, Wire
from ...support.requests import send
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
    assert (refused.code, "takes LITE messages" in str(refused.remark)) == (13, True)
    assert len(stored(node)) == 1
    assert [lite.next for lite in node.broker.lites.of("t").values()] == [1]
