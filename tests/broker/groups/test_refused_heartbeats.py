"""A heartbeat that is refused registers nothing, and is named: its client reads nothing, and most clients say nothing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from rocketlet.broker.config import MAX_REFUSED, REFUSED_S
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.admin.diagnosis import Harm, diagnose
from rocketlet.protocol.bodies import GroupConfig, encode_group
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_EXPRESSION_TAGS
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Wire


def consumer(group: str, topic: str = "t", expression: str = "*") -> dict[str, Any]:
    return {"groupName": group, "subscriptionDataSet": [{"topic": topic, "subString": expression}]}


async def beat(wire: Wire, *consumers: dict[str, Any], producers: tuple[str, ...] = ()) -> int:
    body = {
        "clientID": "c1",
        "consumerDataSet": consumers,
        "producerDataSet": [{"groupName": name} for name in producers],
    }
    return (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(body))).code


@pytest.mark.parametrize(
    "why",
    [
        "strict",
        pytest.param("memberships", marks=pytest.mark.limits(max_memberships=2)),
        pytest.param("members", marks=pytest.mark.limits(max_members=1)),
        pytest.param("ids", marks=pytest.mark.limits(max_client_ids=0)),
        pytest.param("producers", marks=pytest.mark.limits(max_producer_groups=0)),
        "name",
        "expression",
        "tags",
    ],
)
async def test_a_refused_heartbeat_registers_none_of_its_groups(
    node: Node, wire: Wire, connect: Connect, why: str
) -> None:
    refused, producers = consumer("last"), ("p",)
    if why in ("strict", "members"):
        other = await connect(node.address)
        settings = encode_group(GroupConfig("last", strict=why == "strict"))
        await other.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=settings)
        body = {"clientID": "other", "consumerDataSet": [consumer("last", "u")]}
        assert (await other.call(RequestCode.HEART_BEAT, body=orjson.dumps(body))).code == 0
    refused |= {"name": consumer("no/name"), "expression": consumer("last", expression="x" * 65_537)}.get(why, {})
    refused |= {"tags": consumer("last", expression="||".join(map(str, range(10_001))))}.get(why, {})
    with capture_logs() as logs:
        assert await beat(wire, consumer("first"), consumer("second"), refused, producers=producers) != 0
    assert [group.name for group in node.broker.groups if group.members and group.name != "last"] == []
    assert "p" not in node.broker.clients.all_producers()
    (event,) = [entry for entry in logs if entry["event"] == "heartbeat_refused"]
    assert (event["client"], event["groups"].split()[:2]) == ("c1", ["first", "second"])
    assert node.broker.refusals.count == 1
    assert event["reason"][:100] in node.broker.refusals.recent()[0]


async def test_doctor_names_a_client_whose_heartbeat_is_refused_until_it_is_over(node: Node, wire: Wire) -> None:
    assert await beat(wire, consumer("g", expression="||")) == ResponseCode.SYSTEM_ERROR
    for is_there in (True, False):
        async with AdminClient(node.address) as admin:
            found = [item for item in await diagnose(admin) if item.kind == "heartbeat_refused"]
        assert len(found) == is_there
        if found:
            assert found[0].harm == Harm.STANDS
            assert "c1" in found[0].text and "of g: " in found[0].text and "names no tag" in found[0].text
        node.clock.advance(REFUSED_S + 1)


async def test_a_body_that_is_no_heartbeat_is_named_by_its_address(node: Node, wire: Wire) -> None:
    assert (await wire.call(RequestCode.HEART_BEAT, body=b"[1")).code == 1
    assert "127.0.0.1" in node.broker.refusals.recent()[0]


async def test_refusals_that_are_kept_are_limited(node: Node, wire: Wire) -> None:
    for number in range(MAX_REFUSED + 1):
        assert await beat(wire, consumer(f"g{number}", expression="||")) == 1
    named = [text.split(" of ")[1].split(":")[0] for text in node.broker.refusals.recent()]
    assert named == [f"g{number}" for number in range(1, MAX_REFUSED + 1)]
    assert node.broker.refusals.count == MAX_REFUSED + 1


async def test_an_expression_may_have_64_kib_and_1000_tags(wire: Wire) -> None:
    """With 10,240 characters it was refused in silence; Apache's brokers take it."""
    tags = [f"{number:04}" for number in range(MAX_EXPRESSION_TAGS + 1)]
    for expression in ("a" * 65_533 + "||b", "||".join(tags[1:])):
        assert await beat(wire, consumer("g", expression=expression)) == 0
    assert await beat(wire, consumer("g", expression="||".join(tags))) == 1


async def test_all_expressions_of_a_heartbeat_name_4096_tags_at_most(wire: Wire) -> None:
    """64 expressions of 1,000 tags took 120 ms in one piece."""

    def tags(count: int) -> str:
        return "||".join(f"{number:04}" for number in range(count))

    assert await beat(wire, *(consumer(f"g{number}", expression=tags(512)) for number in range(8))) == 0
    assert (
        await beat(
            wire,
            *(consumer(f"g{number}", expression=tags(512)) for number in range(7)),
            consumer("g7", expression=tags(513)),
        )
        == 1
    )
    assert await beat(wire, *(consumer(f"g{number}") for number in range(100))) == 0
