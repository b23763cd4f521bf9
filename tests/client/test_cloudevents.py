"""Events of CloudEvents as messages, in both modes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rocketlet.client import CloudEvent, Consumer, Message, MessageIllegal, Producer
from rocketlet.protocol.message import MessageError

from ..conftest import Node, eventually

TIME = datetime(2026, 11, 28, 20, 0, 0, 500_000, tzinfo=UTC)
EVENTS = [
    CloudEvent("order.paid", "/shop", b'{"order":7}', id="1", time=TIME, subject="7", extensions={"tenant": "a"}),
    CloudEvent("picture", "/shop", b"\x89PNG\x00", "image/png", id="2", time=TIME, dataschema="urn:picture"),
    CloudEvent("ended", "/shop", id="3", time=None, datacontenttype=None),
    CloudEvent("text", "/shop", b"text", "text/plain", id="4", time=TIME),
]


async def test_events_arrive_as_they_were_sent_in_both_modes(node: Node) -> None:
    seen: list[CloudEvent] = []
    decoded: list[CloudEvent] = []

    async def take(message: Message) -> None:
        seen.append(CloudEvent.of(message))

    async def take_decoded(event: CloudEvent) -> None:
        decoded.append(event)

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", {"binary": "*", "structured": "*"}, take, start="first"),
        Consumer(node.address, "d", "structured", take_decoded, decode=CloudEvent.from_json, start="first"),
    ):
        for event in EVENTS:
            await producer.send("binary", **event.binary(), tag="event")
            await producer.send("structured", **event.structured())
        await eventually(lambda: len(seen) == 2 * len(EVENTS) and len(decoded) == len(EVENTS))
    for event in EVENTS:
        assert seen.count(event) == 2
        assert decoded.count(event) == 1


def test_event_in_binary_mode_has_the_properties_of_the_java_sdk() -> None:
    event = CloudEvent("order.paid", "/shop", b"{}", id="1", time=TIME, extensions={"count": 3, "paid": True})
    assert event.binary() == {
        "body": b"{}",
        "properties": {
            "CE_specversion": "1.0",
            "CE_id": "1",
            "CE_source": "/shop",
            "CE_type": "order.paid",
            "CE_time": "2026-11-28T20:00:00.500000+00:00",
            "CE_contenttype": "application/json",
            "CE_count": "3",
            "CE_paid": "true",
        },
    }
    assert CloudEvent("t", "s").binary()["body"] == b"\0"


def test_event_in_structured_mode_has_json_as_such_and_other_data_as_base64() -> None:
    paid, picture, ended, _ = (json.loads(event.structured()["body"]) for event in EVENTS)
    assert (paid["data"], paid["tenant"], paid["specversion"]) == ({"order": 7}, "a", "1.0")
    assert (picture["data_base64"], picture["datacontenttype"]) == ("iVBORwA=", "image/png")
    assert "data" not in ended
    assert EVENTS[0].structured()["properties"] == {"CE_contenttype": "application/cloudevents+json"}
    assert CloudEvent.from_json(b'{"specversion":"1.0","id":"1","type":"t","source":"s","data":"x"}').data == b'"x"'


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"type": ""}, "type: '' is not a text"),
        ({"source": None}, "source: None is not a text"),
        ({"id": " "}, "id: ' ' is not a text"),
        ({"subject": ""}, "subject: ''"),
        ({"data": "text"}, "data: expected bytes, got str"),
        ({"time": datetime(2026, 1, 1)}, "is not a datetime with a time zone"),
        ({"extensions": {"Tenant": "a"}}, "extensions: 'Tenant' is not a name"),
        ({"extensions": {"id": "a"}}, "extensions: 'id' is not a name"),
        ({"extensions": {"rate": 1.5}}, "extensions: rate: expected str, int or bool, got float"),
    ],
)
def test_invalid_attribute_of_an_event_is_refused(attributes: dict[str, Any], fault: str) -> None:
    with pytest.raises(MessageIllegal, match=fault):
        CloudEvent(**{"type": "t", "source": "s", **attributes})


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"{", "cannot be decoded"),
        (b"[]", "the event is list"),
        (b"{}", "specversion: expected 1.0, got None"),
        (b'{"specversion":"1.0","id":"1","type":"t"}', "source: None"),
        (b'{"specversion":"1.0","id":"1","type":"t","source":"s","time":"soon"}', "the event is invalid"),
        (b'{"specversion":"1.0","id":"1","type":"t","source":"s","data_base64":"?"}', "cannot be decoded"),
        (b'{"specversion":"1.0","id":"1","type":"t","source":"s","data_base64":7}', "cannot be decoded"),
    ],
)
def test_body_that_is_no_event_is_refused(body: bytes, fault: str) -> None:
    with pytest.raises(MessageError, match=fault):
        CloudEvent.from_json(body)


def test_data_that_is_not_json_is_refused_in_structured_mode() -> None:
    with pytest.raises(MessageIllegal, match="data: not JSON as datacontenttype says"):
        CloudEvent("t", "s", b"<xml/>").structured()
