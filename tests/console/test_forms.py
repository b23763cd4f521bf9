"""Forms: a fault stands beside its field with what was typed, and messages are sent and copied."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

import pytest
from markupsafe import escape
from rocketlet.client import AdminClient, Message, Producer
from rocketlet.console.config import TYPED_BODY_BYTES
from rocketlet.console.samples import GroupSample, group_sample
from rocketlet.protocol.admin_bodies import QueueProgress
from rocketlet.protocol.names import Queue

from ..conftest import Node
from .conftest import Site, plain, token_of


def beside(page: str, name: str) -> str:
    """The fault that a page shows beside a field, whose field says that it is wrong."""
    found = re.search(rf'id="fault-{name}" role="alert">(.*?)</span>', page)
    assert re.search(rf'name="{name}"[^>]* aria-invalid="true" aria-describedby="fault-{name}"', page), name
    return html.unescape(found[1]) if found else ""


GROUP = {"group": "g", "retries": "3", "retry_queues": "2", "consume": "off", "strict": "on"}
TOPIC = {"topic": "orders", "queues": "9", "perm": "4"}
MESSAGE = {"topic": "orders", "tag": "a", "keys": "k1 k2", "queue_key": "o", "properties": "p=q", "body": "two\nlines"}


@pytest.mark.parametrize(
    ("page", "typed", "field", "fault"),
    [
        ("/new/group", GROUP | {"group": "a b"}, "group", "characters other than letters"),
        ("/new/group", GROUP | {"retries": "-1"}, "retries", "'-1' is not a whole number from 0 to 1000"),
        ("/new/group", GROUP | {"retry_queues": "65"}, "retry_queues", "is not a whole number from 1 to 64"),
        ("/groups/g/settings", GROUP | {"retries": "x"}, "retries", "'x' is not a whole number"),
        ("/new/topic", TOPIC | {"topic": "ä"}, "topic", "characters other than letters"),
        ("/new/topic", TOPIC | {"queues": "0"}, "queues", "'0' is not a whole number"),
        ("/topics/orders/settings", TOPIC | {"queues": "no"}, "queues", "'no' is not a whole number"),
        ("/groups/g/reset", {"topic": "order", "to": "last"}, "topic", "order"),
        ("/groups/g/reset", {"topic": "orders", "to": "time", "time": "noon"}, "time", "'noon' is not a time"),
        ("/groups/g/reset", {"topic": "orders", "to": "time"}, "time", "say when"),
        ("/groups/g/reset", {"topic": "orders", "to": "offsets", "offsets": "a\nb=1"}, "offsets", "'a' is not BROKER"),
        ("/new/message", MESSAGE | {"topic": "order"}, "topic", "no broker has the topic 'order'; create it first"),
        ("/new/message", MESSAGE | {"tag": "a || b"}, "tag", "a message has one"),
        ("/new/message", MESSAGE | {"properties": "p=q\nno"}, "properties", "'no' is not NAME=VALUE"),
        ("/new/message", MESSAGE | {"properties": "p=q\np=r"}, "properties", "'p' is there twice"),
        ("/new/message", MESSAGE | {"properties": "TAGS=x"}, "properties", "TAGS"),
        ("/new/message", MESSAGE | {"body": ""}, "body", "it is empty"),
    ],
)
async def test_a_fault_stands_beside_its_field_with_what_was_typed(
    site: Site, node: Node, page: str, typed: Mapping[str, str], field: str, fault: str
) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
    await site.change("/new/group", "/new/group", group="g", retries="3", retry_queues="1")
    answer = await site.post(page, {"token": token_of(await site.get(page)), **typed})
    assert answer.status_code in (400, 404)
    assert fault in beside(answer.text, field)
    assert answer.text.count("aria-invalid") == 1
    shown = answer.text.replace("\r\n", "\n")
    for name, value in typed.items():
        is_there = re.search(rf'name="{name}"[^>]* value="{re.escape(str(escape(value)))}"', shown)
        is_there = is_there or re.search(rf'<option value="{re.escape(value)}" selected>', shown)
        assert is_there or f">\n{escape(value)}</textarea>" in shown or value == "last", name
    assert token_of(answer.text) == token_of(await site.get(page)), "it can be sent again"


async def test_no_fault_is_lost(site: Site) -> None:
    """A field that the page shows no fault beside, a token of before a restart, and what a broker refuses."""
    token = token_of(await site.get("/new/group"))
    odd = await site.post("/new/group", {"token": token, **GROUP, "consume": "perhaps"})
    assert "consume: 'perhaps' is not one of on, off" in plain(odd.text)
    stale = await site.post("/new/group", {"token": "0" * 64, **GROUP, "retries": "77"})
    assert (stale.status_code, "another session of the console; submit it a second time" in plain(stale.text)) == (
        400,
        True,
    )
    assert 'value="77"' in stale.text
    assert token_of(stale.text) == token
    refused = await site.post("/new/topic", {"token": token, **TOPIC, "queues": "60000", "confirmed": "yes"})
    assert "not between 0 and" in plain(refused.text)
    assert 'value="60000"' in refused.text
    searched = await site.get("/messages?topic=nothing&limit=7", 404)
    assert "no name server knows the topic nothing" in beside(searched, "topic")
    assert 'name="limit" type="number" min="1" max="200" value="7"' in searched


async def test_a_question_that_is_denied_leads_back_to_what_was_typed(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
        back = await site.post(
            "/new/message", {"token": token_of(await site.get("/new/message")), **MESSAGE, "back": "yes"}
        )
        assert back.status_code == 200
        assert ">\ntwo\nlines</textarea>" in back.text
        assert (await admin.topic("orders")).messages == 0


async def test_a_message_is_sent_and_copied(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
        await admin.create_topic("copies")
    body = '\n {"dish": "π <b>"}\n'
    typed = {**MESSAGE, "body": body.replace("\n", "\r\n"), "properties": "shop=a=b\r\nnote= x"}
    asked, done = await site.change("/new/message?topic=orders", "/new/message", **typed)
    assert "Send this message to orders? 21 B, tag a, keys k1 k2. No group reads the topic now." in asked
    sent = re.search(r"was sent to orders@broker-a:(\d), offset 0\.", done)
    assert sent, done
    place = f"orders/broker-a/{sent[1]}/0"
    assert f'href="/new/message?copy={place.replace("/", "%2F")}"' in await site.get(f"/messages/{place}")
    form = await site.get(f"/new/message?copy={place}")
    assert f">\n{escape(body)}</textarea>" in form
    fields = {name: html.unescape(value) for name, value in re.findall(r'<input name="(\w+)"[^>]* value="(.*?)"', form)}
    fields |= {
        name: html.unescape(value)
        for name, value in re.findall(r'<textarea name="(\w+)"[^>]*>\n(.*?)</text', form, re.S)
    }
    _, done = await site.change(
        f"/new/message?copy={place}", "/new/message", **{**fields, "copy": place, "topic": "copies"}
    )
    found = await everything(node, "copies")
    assert [(item.body.decode(), item.tag, item.keys, item.user_properties) for item in found] == [
        (body, "a", ["k1", "k2"], {"shop": "a=b", "note": " x"})
    ]


@pytest.mark.parametrize("body", [b"\xff\x00", b"a\rb", b"x" * (TYPED_BODY_BYTES + 1)])
async def test_a_body_that_no_form_can_hold_is_copied_as_it_is(site: Site, node: Node, body: bytes) -> None:
    async with Producer(node.address) as producer:
        sent = await producer.send("orders", body, properties={"lines": "a\nb", "p": "q"}, queue_key="k")
    place = f"orders/broker-a/{sent.queue.queue_id}/0"
    form = await site.get(f"/new/message?copy={place}")
    assert 'name="body"' not in form
    assert "is copied as it is" in form
    assert "Not copied, because their values have several lines: lines." in plain(form)
    again = await site.post("/new/message", {"token": token_of(form), "copy": place, "topic": "order"})
    assert "is copied as it is" in again.text
    await site.change(f"/new/message?copy={place}", "/new/message", copy=place, topic="orders", properties="p=q")
    found = await everything(node, "orders")
    assert [(item.body, item.user_properties) for item in found if item.user_properties == {"p": "q"}] == [
        (body, {"p": "q"})
    ]
    assert "is not TOPIC/BROKER/QUEUE/OFFSET" in await site.text("/new/message?copy=orders", 400)
    assert "there is no message at" in await site.text("/new/message?copy=orders/broker-a/0/999", 404)


def test_the_rate_of_a_group_is_that_of_its_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr("rocketlet.console.samples.now_ms", lambda: clock[0])
    sample: GroupSample | None = None
    seen = []
    for clock[0], offsets in (
        (0, [5, 0]),
        (5_000, [55, 0]),
        (10_000, [105, 0]),
        (60_000, [605, 0]),
        (65_000, [605, 9000]),
    ):
        queues = {
            Queue("orders", "a", number): QueueProgress(10_000, offset, 0) for number, offset in enumerate(offsets)
        }
        sample = group_sample("g", queues, {}, sample)
        seen.append(sample.rate)
    assert seen == [None, 10, 10, None, None], "the last: the first offset of a queue is nothing that was read"
    sample = group_sample("g", {Queue("orders", "a", 0): QueueProgress(9, 9, 0)}, {}, None)
    clock[0] = 70_000
    assert group_sample("g", {Queue("orders", "a", 0): QueueProgress(9, 2, 0)}, {}, sample).rate is None, "it was reset"


async def everything(node: Node, topic: str) -> list[Message]:
    async with AdminClient(node.address) as admin:
        ranges = (await admin.topic(topic)).ranges
        return [
            message
            for queue, span in ranges.items()
            if span.begin < span.end
            async for messages in admin.read(queue, span.begin, span.end)
            for message in messages
        ]
