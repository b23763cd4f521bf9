"""The pages of topics, messages, dead letters and brokers, and what can be changed there."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from markupsafe import escape
from rocketlet.broker.config import MAX_QUEUES_PER_TOPIC
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    Consumer,
    LiteConsumer,
    Message,
    MessageTrace,
    Producer,
    Reject,
    RetryLater,
    SendResult,
    rebalanced,
)
from rocketlet.client.admin import findings as admin_findings
from rocketlet.client.admin.diagnosis import Examiner, ObservationTimes, diagnose
from rocketlet.client.admin.findings import Finding, Harm
from rocketlet.client.config import ADMIN_TIMEOUT_S
from rocketlet.client.wire.connection import Connection
from rocketlet.console import page as console_page
from rocketlet.console.config import COLOURS, OVERVIEW_FINDINGS, TYPED_BODY_BYTES
from rocketlet.console.console import Console
from rocketlet.console.group_watch import GroupSnapshot, GroupWatch, MemberRow
from rocketlet.console.pages.history import NEWEST, PagePosition, page_back
from rocketlet.console.samples import GroupSample, group_sample
from rocketlet.console.server import ConsoleServer
from rocketlet.protocol.admin_bodies import QueueProgress
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_TOPIC_QUEUES
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import SHARED_OWNER
from rocketlet.protocol.names import Queue, Sql
from rocketlet.testing import Broker, Cluster, Fault

from ..conftest import PATIENCE_S, Node, eventually
from ..support.handlers import Inbox
from ..support.topics import put
from .conftest import Site, plain, text_with, token_of

HOSTILE = b'<script>alert(1)</script><img src=x onerror="alert(2)">'


def place(sent: SendResult) -> str:
    return f"/messages/{sent.queue.topic}/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}"


async def test_topics_and_one_of_them(site: Site, node: Node) -> None:
    async with Producer(node.address, "checkout") as producer:
        for _ in range(5):
            await producer.send("orders", b"x", queue_key="k")
        async with Consumer(node.address, "shipping", "orders", Inbox(), start="first"):
            page = await site.text("/topics")
            assert "orders broker-a 4 5" in page
            assert "%RETRY%" not in page
            assert "%RETRY%shipping" in await site.text("/topics?system=1&q=ret&sort=rate")
            one = await site.text("/topics/orders")
    assert "shipping" in one
    assert "72 hours" in one
    assert "checkout: 1" in one
    assert "CLIENT_INNER_PRODUCER" not in one
    assert "broker-a 4 4 send and read" in one
    assert "no name server knows the topic nothing" in await site.text("/topics/nothing", 404)


async def test_pages_of_a_parent_topic_and_a_lite_group_show_lite_topics(site: Site, node: Node) -> None:
    put(node, "CHAT", message_type="LITE", lite_expiration_min=60)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with (
        LiteConsumer(node.address, "chats", "CHAT", inbox, lite_topics=["session-1", "session-2"]),
        Producer(node.address) as producer,
    ):
        for name in ("session-1", "session-1", "unread"):
            await producer.send("CHAT", b"x", lite_topic=name)
        await eventually(lambda: len(inbox.messages) == 1)
        topic = plain(await site.text("/topics/CHAT"))
        assert "lite topics 2" in topic
        assert "minutes until idle ones are deleted 60" in topic
        assert "chats" in topic
        group = plain(await site.text("/groups/chats"))
        assert "messages waiting 2" in group
        assert "session-1 2 1" in group
        assert "unread" not in group
        assert "without an owner" not in group
        gate.set()
        await eventually(lambda: node.broker.pops.pools.unfinished("chats") == 0)


@pytest.mark.parametrize(
    ("path", "reason", "leads_to"),
    [
        ("/no/such/page", "There is no page /no/such/page.", "the overview"),
        ("/groups/g/delete", "There is no page /groups/g/delete.", "the groups or the overview"),
        ("/groups/g", "no broker knows the group g", "the groups or the overview"),
        ("/groups/g/dead", "no broker knows the group g", "the groups or the overview"),
        ("/groups/g/settings", "no broker knows the group g", "the groups or the overview"),
        ("/topics/t/tail", "no name server knows the topic t", "the topics or the overview"),
        ("/brokers/b", "no broker knows the name b", "the brokers or the overview"),
    ],
)
async def test_a_page_of_nothing_is_not_found(site: Site, path: str, reason: str, leads_to: str) -> None:
    page = await site.text(path, 404)
    assert "Not found" in page
    assert reason in page
    assert f"Go to {leads_to}" in page
    assert "Retry" not in page


async def test_topics_of_brokers_and_clusters_are_hidden_unless_asked_for(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
    page = await site.text("/topics")
    assert "1–1 of 1 topic" in page
    assert "DefaultCluster" not in page
    assert "broker-a" not in page.partition("Name Order")[2].partition("orders")[0]
    assert "DefaultCluster" in await site.text("/topics?system=1")


async def test_a_topic_is_created_changed_and_deleted_after_a_question(site: Site, node: Node) -> None:
    asked, done = await site.change("/new/topic", "/new/topic", topic="orders", queues="3", perm="6", broker="broker-a")
    assert "Create the topic orders?" in asked
    assert done == "The topic orders was created with 3 queues on broker-a; clients may send and read."
    async with Producer(node.address) as producer:
        for _ in range(3):
            await producer.send("orders", b"x")
    asked, done = await site.change("/topics/orders/settings", "/new/topic", topic="orders", queues="2", perm="4")
    assert "1 message is in queues beyond 2, which groups will not read" in asked
    assert "was changed to 2 queues" in done
    asked, done = await site.change("/topics/orders/settings", "/topics/orders/delete")
    assert "2 messages are deleted for good" in asked
    assert done == "The topic orders is deleted, with 2 messages."
    async with AdminClient(node.address) as admin:
        assert await admin.topics() == []
    token = token_of(await site.get("/new/topic"))
    wrong = await site.post("/new/topic", {"token": token, "topic": "a b", "confirmed": "yes"})
    assert "characters other than letters" in plain(wrong.text)
    wrong = await site.post("/new/topic", {"token": token, "topic": "t", "type": "FIFO", "lite_expiration": "5"})
    assert "only topics of the type LITE have lite topics" in plain(wrong.text)
    await site.change("/new/topic", "/new/topic", topic="chat", type="LITE", lite_expiration="5")
    async with AdminClient(node.address) as admin:
        parent = await admin.lite_parent("chat")
    assert parent is not None
    assert parent.expiration_min == 5
    assert "is its type of messages LITE" in await site.text("/topics/chat")
    many = await site.post("/new/topic", {"token": token, "topic": "t", "queues": "65537"})
    assert "'65537' is not a whole number from 1 to 65536" in plain(many.text)


async def test_a_topic_may_have_as_many_queues_as_its_broker_allows(site: Site) -> None:
    most = MAX_QUEUES_PER_TOPIC
    _, done = await site.change("/new/topic", "/new/topic", topic="orders", queues=str(most))
    assert f"was created with {most:,} queues" in done
    form = await site.get("/topics/orders/settings")
    assert f'max="{MAX_TOPIC_QUEUES}" value="{most}"' in form
    fields = {"token": token_of(form), "topic": "orders", "queues": str(most + 1), "confirmed": "yes"}
    refused = await site.post("/new/topic", fields)
    assert (refused.status_code, f"not between 0 and {most}" in plain(refused.text)) == (400, True), plain(refused.text)


async def test_a_group_is_created_changed_and_deleted_after_a_question(site: Site, node: Node) -> None:
    await site.change("/new/group", "/new/group", group="g", retries="3", retry_queues="1", consume="on", strict="on")
    async with AdminClient(node.address) as admin:
        config = (await admin.group_configs("g"))["broker-a"]
    assert (config.retry_max_times, config.strict) == (3, True)
    asked, _ = await site.change(
        "/groups/g/settings",
        "/new/group",
        group="g",
        retries="3",
        retry_queues="1",
        consume="off",
        strict="off",
        rate="9/s",
    )
    assert "Its members get no more messages" in asked
    asked, done = await site.change("/groups/g/settings", "/groups/g/delete")
    assert "Its offsets of" in asked
    assert "It has no dead letters." in asked
    assert done == "The group g, its offsets and its retries are deleted."
    assert "no broker knows the group g" in await site.text("/groups/g", 404)


async def test_messages_are_found_by_id_key_time_and_place(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        first = await producer.send("orders", b"one", keys="k1", tag="A")
        second = await producer.send("orders", b"two", keys="k2", tag="B")
    begin, end = ((datetime.now() + timedelta(hours=hours)).isoformat() for hours in (-1, 1))
    queue = first.queue
    for question, bodies in {
        "": {"one", "two"},
        "&tags=B": {"two"},
        f"&by=id&value={first.message_id}": {"one"},
        f"&by=id&value={first.offset_id}": {"one"},
        "&by=key&value=k2": {"two"},
        "&by=key&value=k3": set(),
        f"&by=time&begin={begin}&end={end}": {"one", "two"},
        f"&by=time&begin={end}": set(),
        f"&by=offset&broker=broker-a&queue={queue.queue_id}&offset={first.queue_offset}&limit=1": {"one"},
    }.items():
        html = await site.get(f"/messages?topic=orders{question}")
        found = {body for body in ("one", "two") if f"<code>{body}</code>" in html}
        assert found == bodies, question
    assert place(second) in await site.get(f"/messages?by=id&value={second.offset_id}")
    for question, reason in {
        "by=key&topic=orders": "give the key",
        "by=id": "Name a topic",
        "by=time&topic=orders&begin=yesterday": "is not a time such as",
        "by=offset&topic=orders&broker=broker-z": "the topic has no queue orders@broker-z:0",
        "topic=orders&limit=201": "is not a whole number from 1 to 200",
    }.items():
        status = 200 if question == "by=id" else 400
        assert reason in await site.text(f"/messages?{question}", status)


async def browsed(site: Site, path: str) -> list[list[str]]:
    """The bodies on a page of messages and on all that its links to older or later ones lead to."""
    pages: list[list[str]] = []
    question = path
    while question:
        page = await site.get(f"/messages{question}")
        pages.append(re.findall(r"<code>(.*?)</code>", page))
        found = re.search(r'rel="next" href="([^"]+)"', page)
        question = html.unescape(found[1]) if found else ""
    return pages


async def test_messages_are_browsed_back_to_the_first(site: Site, node: Node) -> None:
    wanted = [f"soup {number}" for number in range(9)]
    async with Producer(node.address) as producer:
        for number, text in enumerate(wanted):
            node.clock.advance(0.01)  # the order of messages of one millisecond in several queues means nothing
            sent = await producer.send("orders", text.encode(), tag="AB"[number % 2])
        await producer.send_batch("bulk", [b"1", b"2", b"3", b"4", b"5"])
    newest_first = wanted[::-1]
    pages = await browsed(site, "?topic=orders&limit=4")
    assert pages == [newest_first[:4], newest_first[4:8], newest_first[8:]]
    bulk = await browsed(site, "?topic=bulk&limit=2")
    assert bulk == [["5", "4"], ["3", "2"], ["1"]], "messages of one millisecond"
    for question, bodies in {
        "&by=content&body=soup": newest_first,
        "&by=content&body=soup+3": ["soup 3"],
        "&tags=A": newest_first[::2],
        "&by=time&tags=B": newest_first[1::2],
    }.items():
        pages = await browsed(site, f"?topic=orders&limit=2{question}")
        assert [body for page in pages for body in page] == bodies, question
    place = f"?topic=orders&by=offset&broker=broker-a&queue={sent.queue.queue_id}&limit=1"
    assert wanted[-1] in (await browsed(site, place))[sent.queue_offset]
    wrong = await site.text("/messages?topic=orders&before=5-x", 400)
    assert "'5-x' is not the position of a page" in wrong
    lines = (await site.get("/messages.jsonl?topic=orders&limit=2&tags=B")).splitlines()
    assert [(item["body"], item["tag"]) for item in map(json.loads, lines)] == [("soup 7", "B"), ("soup 5", "B")]


@pytest.mark.parametrize("searched", [0, 4, 8, 100])
async def test_a_search_that_ends_within_a_page_continues_on_the_next_one(node: Node, searched: int) -> None:
    async with Producer(node.address) as producer, AdminClient(node.address) as admin:
        for number in range(9):
            node.clock.advance(0.01)
            await producer.send("orders", b"soup %d" % number, tag="AB"[number % 2])
        await producer.send_batch("orders", [b"bulk"] * 7)  # of one millisecond
        ranges = (await admin.topic("orders")).ranges
        console = Console(admin, partial(Producer[bytes], node.address), cluster="")
        searches: list[tuple[dict[str, Any], int]] = [
            ({"tags": "A"}, 5),
            ({"is_wanted": lambda message: b"bulk" in message.body}, 7),
            ({}, 16),
        ]
        for options, count in searches:
            position: PagePosition | None = NEWEST
            found = list[tuple[Queue, int]]()
            while position is not None:
                part = await page_back(console, ranges, position, 3, searched=searched, **options)
                found += [(message.queue, message.queue_offset) for message in part.messages]
                position = part.older
            assert (len(found), len(set(found))) == (count, count), options


async def test_the_trace_of_a_message_shows_its_send_and_each_attempt(site: Site, node: Node) -> None:
    inbox = Inbox()

    async def handle(message: Message) -> RetryLater | None:
        await inbox(message)
        return RetryLater(delay_level=1) if len(inbox.messages) == 1 else None

    async with (
        MessageTrace(node.address) as trace,
        Producer(node.address, "shop", middleware=[trace.sends("shop")]) as producer,
        Consumer(node.address, "kitchen", "orders", handle, start="first", middleware=[trace.handlers("kitchen")]),
    ):
        sent = await producer.send("orders", b"soup")
        await eventually(lambda: len(inbox.messages) == 2)
    async with Producer(node.address) as producer:  # any client may write to the topic of traces
        await producer.send("RMQ_SYS_TRACE_TOPIC", b"Pub\x01x\x02\xff", keys=sent.message_id)
    page = await text_with(site, f"/trace?id={sent.message_id}", "kitchen 2 success")
    assert "sent shop – success" in page
    assert "handled kitchen 1 failed" in page
    assert page.index("sent shop") < page.index("kitchen 1 failed") < page.index("kitchen 2 success")
    assert f'href="/trace?id={sent.message_id}"' in await site.get(place(sent))
    assert "No client has traced this message" in await site.text("/trace?id=x")


async def test_a_body_is_downloaded_as_it_was_sent(site: Site, node: Node) -> None:
    async with Producer(node.address, compress_over_bytes=100) as producer:
        sent = await producer.send("orders", bytes(range(256)) * 8)
    answer = await site.http.get(f"{site.url}{place(sent)}/body")
    assert answer.content == bytes(range(256)) * 8
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith('attachment; filename="orders-')
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "Not found" in await site.text(f"{place(sent)}9/body", 404)
    (line,) = (await site.get("/messages.jsonl?topic=orders")).splitlines()
    assert base64.b64decode(json.loads(line)["body_base64"]) == answer.content


async def test_messages_are_found_by_a_text_of_the_body_and_a_property(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        for dish, table in (("pizza", "7"), ("soup", "7"), ("soup", "8")):
            await producer.send("orders", f"{dish} for table {table}".encode(), properties={"table": table})
    for question, bodies in {
        "&body=soup": {"soup for table 7", "soup for table 8"},
        "&property=table%3D7": {"pizza for table 7", "soup for table 7"},
        "&body=soup&property=table%3D7": {"soup for table 7"},
        "&body=wine": set(),
    }.items():
        page = await site.get(f"/messages?topic=orders&by=content{question}")
        assert set(re.findall(r"<code>(\w+ for table \d)</code>", page)) == bodies, question
    assert "give a text of the body" in await site.text("/messages?topic=orders&by=content", 400)
    assert "is not NAME=VALUE" in await site.text("/messages?topic=orders&by=content&property=x", 400)


async def test_a_message_is_sent_with_a_delay_a_priority_and_to_a_lite_topic(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("urgent", queues=4, message_type="PRIORITY")
        await admin.create_topic("chats", message_type="LITE")
    plain_message = {"tag": "", "keys": "", "queue_key": "", "properties": "", "body": "x"}
    asked, done = await site.change("/new/message", "/new/message", **plain_message, topic="urgent", priority="3")
    assert "priority 3" in asked
    assert "was sent to urgent@broker-a:3" in done
    asked, done = await site.change("/new/message", "/new/message", **plain_message, topic="chats", lite_topic="anna")
    assert "lite topic anna" in asked
    assert "was sent to chats@broker-a" in done
    _, done = await site.change("/new/message", "/new/message", **plain_message, topic="urgent", delay="3600")
    assert "consumers get it in 60 min" in done
    token = token_of(await site.get("/new/message"))
    refused = await site.post("/new/message", {**plain_message, "token": token, "topic": "urgent", "delay": "soon"})
    assert "is not a number of seconds" in refused.text


@pytest.mark.parametrize("number", [1 << 63, 1 << 64])
async def test_a_number_beyond_all_messages_is_no_error_of_ours(site: Site, node: Node, number: int) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x", queue_key="k")
    for path in (f"/messages/orders/broker-a/0/{number}", f"/messages/orders/broker-a/{number}/0"):
        answer = await site.http.get(site.url + path)
        assert answer.status_code in (400, 404), answer.text


async def test_a_body_is_shown_in_its_forms_and_nothing_of_it_is_obeyed(site: Site, node: Node) -> None:
    packed = msgpack.packb({"id": 7, "raw": b"\x00\xff", "at": [1, 2]})
    async with Producer(node.address) as producer:
        json_ = await producer.send("orders", b'{"price": 12345678901234567890123, "note": "\\u202e"}')
        pack = await producer.send("orders", packed)
        wild = await producer.send("orders", HOSTILE, tag="T", properties={"<b>": "</dd><script>x</script>"})
        binary = await producer.send("orders", b"\xff\xfe" * 5000)
        turned = await producer.send("orders", "safe\u202egnp.exe\x1b[2J".encode())
    page = await site.get(place(json_))
    assert "12345678901234567890123" in page
    assert r"\u202e" in page
    assert '"raw": "hex 00 ff"' in plain(await site.get(place(pack)))
    for path in (place(wild), "/messages?topic=orders", "/topics/orders/tail"):
        html = await site.get(path)
        assert "&lt;script&gt;alert(1)" in html
        assert "<script>alert" not in html
        assert "<script>x" not in html
        assert "<img src=x" not in html
    assert "000000 ff fe ff fe" in await site.text(place(binary))
    assert "5.8 KiB more are not shown" in await site.text(place(binary))
    assert r"safe\u202egnp.exe\x1b[2J" in await site.text(place(turned) + "?as=text")
    assert "there is no message at" in await site.text("/messages/orders/broker-a/0/999", 404)


async def test_compressed_bodies_are_decompressed(site: Site, node: Node) -> None:
    async with Producer(node.address, compress_over_bytes=100) as producer:
        large = await producer.send("orders", b'{"text": "' + b"long " * 2000 + b'"}')
    page = await site.text(place(large))
    assert "compressed with zlib" in page
    assert "long long long" in page
    assert "9.8 KiB when decompressed" in page


async def test_a_page_says_where_a_message_was_consumed(site: Site, node: Node) -> None:
    retried, rejected = Inbox(RetryLater(delay_level=18)), Inbox(Reject())
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "done", "orders", done := Inbox(), start="first"),
        Consumer(node.address, "tries", "orders", retried, start="first"),
        Consumer(node.address, "gave-up", "orders", rejected, start="first"),
        Consumer(node.address, "picky", {"orders": "B"}, Inbox(), start="first"),
        Consumer(node.address, "priced", {"orders": Sql("price IS NOT NULL")}, priced := Inbox(), start="first"),
    ):
        sent = await producer.send("orders", b"x", tag="A", queue_key="k", properties={"price": "6"})
        await eventually(lambda: bool(done.messages and retried.messages and rejected.messages and priced.messages))
        wanted = {
            "done": "consumed",
            "tries": "retry",
            "gave-up": "dead",
            "picky": "filtered",
            "priced": "consumed",
        }
        page = ""
        for group, state in wanted.items():
            while f"{group} {state}" not in page:
                page = await site.text(place(sent))
        assert "it was retried 1 time and" in page
    async with Producer(node.address) as producer:
        late = await producer.send("orders", b"y", tag="A", queue_key="k")
    assert "done waiting 0 messages of the queue are before it" in await site.text(place(late))


@pytest.mark.parametrize("which", ["some", "all"])
async def test_dead_letters_are_sent_again_after_a_dry_run(site: Site, node: Node, which: str) -> None:
    is_broken = True
    mended = Inbox()
    others = Inbox()

    async def handle(message: Message) -> Reject | None:
        if is_broken:
            return Reject("no such customer")
        await mended(message)
        return None

    async with (
        Consumer(node.address, "g", "orders", handle, start="first"),
        Consumer(node.address, "other", "orders", others, start="first"),
        Producer(node.address) as producer,
    ):
        await producer.send("orders", b"poison", keys="k1")
        await rebalanced(node.address, "g", members=1)  # a group that no broker knows has no page
        html = ""
        while "poison" not in html:
            html = await site.get("/groups/g/dead")
        assert "1 message was dead-lettered; 1 of them is new" in plain(html)
        assert "no such customer 1 k1 poison" in plain(html), "a rejected message had one attempt"
        is_broken = False
        fields = {"which": "all"} if which == "all" else {"which": "some", "place": "broker-a:0:0"}
        asked, done = await site.change("/groups/g/dead", "/groups/g/replay", to="group", **fields)
        assert "Resend 1 message to the retry topic of g?" in asked
        assert "nothing has been sent yet" in asked
        assert "The replay of 1 message to the retry topic of g has started." in done
        await eventually(lambda: mended.bodies == [b"poison"])
        await eventually(lambda: others.bodies == [b"poison"])
        await text_with(site, "/groups/g/dead", "0 of them are new")
        await text_with(site, "/jobs", "g done 1 0 0 immediately")
        if which == "all":
            token = token_of(await site.get("/groups/g/dead"))
            for path in ("replay", "discard"):
                answer = await site.post(f"/groups/g/{path}", {"token": token, "which": "all"})
                assert "no dead letter is new" in plain(answer.text)
            return
        _, done = await site.change("/groups/g/dead", "/groups/g/discard", **fields)
        assert "1 dead letter is discarded" in done
        _, done = await site.change("/groups/g/dead", "/groups/g/replay", to="topic", **fields)
        assert "to orders" in done
        await eventually(lambda: len(mended.messages) == 2 and len(others.messages) == 2)
    token = token_of(await site.get("/groups/g/dead"))
    nothing = await site.post("/groups/g/replay", {"token": token, "which": "some", "confirmed": "yes"})
    assert "no message is selected" in plain(nothing.text)
    for wrong, reason in (({"to": "the moon"}, "not one of group, topic"), ({"place": "b:²:0"}, "BROKER:QUEUE:OFFSET")):
        answer = await site.post("/groups/g/replay", {"token": token, "confirmed": "yes", **wrong})
        assert (answer.status_code, reason in plain(answer.text)) == (400, True)


async def test_offsets_are_reset_after_a_preview(site: Site, node: Node) -> None:
    inbox = Inbox()
    async with AdminClient(node.address) as admin, Producer(node.address) as producer:
        await admin.create_topic("orders", queues=1)
        for number in range(6):
            await producer.send("orders", b"%d" % number)
        async with Consumer(node.address, "g", "orders", inbox, start="first"):
            await eventually(lambda: len(inbox.messages) == 6)
        queue = Queue("orders", "broker-a", 0)
        form, path = "/groups/g/reset", "/groups/g/reset"
        asked, done = await site.change(form, path, topic="orders", to="offsets", offsets="broker-a:0=2")
        assert "broker-a:0 6 2 0 4" in asked
        assert "0 messages are skipped, 4 are delivered again" in done
        assert (await admin.progress("g", "orders"))[queue].consumer_offset == 2
        _, done = await site.change(form, path, topic="orders", to="last")
        assert "4 messages are skipped, 0 are delivered again" in done
        _, done = await site.change(form, path, topic="orders", to="time", time="2020-01-01T00:00")
        assert "0 messages are skipped, 6 are delivered again" in done
        _, done = await site.change(form, path, topic="orders", to="first")
        assert "0 messages are skipped, 0 are delivered again" in done
    token = token_of(await site.get(form))
    for fields, reason in (
        ({"to": "time"}, "give a time such as"),
        ({"to": "offsets", "offsets": "x"}, "is not BROKER:QUEUE=OFFSET"),
        ({"to": "offsets", "offsets": "broker-a:0=99"}, "99 is outside of 0 to 6"),
        ({"to": "offsets", "offsets": "broker-a:²=2"}, "is not BROKER:QUEUE=OFFSET"),
        ({"to": "offsets"}, "give a line"),
        ({"to": "the moon"}, "'the moon' is not one of first, last, time, offsets"),
        ({}, "'' is not one of"),
    ):
        answer = await site.post(path, {"token": token, "topic": "orders", **fields})
        assert reason in plain(answer.text)


async def test_a_tail_shows_what_comes_and_what_its_filter_lets_through(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"before", tag="A")
        is_first = True
        async for name, part in site.stream("/topics/orders/tail?tags=A&text=red"):
            if name == "live_messages" and is_first:
                is_first = False
                assert "before" not in part
                await producer.send("orders", b"red, but B", tag="B")
                await producer.send("orders", b"blue", tag="A")
                await producer.send("orders", b"red", tag="A")
            elif name == "live_messages":
                assert "<code>red</code>" in part
                assert "blue" not in part
                assert "but B" not in part
                break


async def test_brokers_say_how_they_do_and_keep_their_secrets(site: Site, node: Node) -> None:
    page = await site.text("/brokers")
    assert f"broker-a up DefaultCluster {node.address}" in page
    assert "MiB" in page
    one = await site.text("/brokers/broker-a")
    assert "defaultTopicQueueNums" in one
    assert "residentBytes" in one
    assert "has no broker of this name" in await site.text("/brokers/broker-z", 404)
    found = await site.text("/doctor?look=yes")
    assert "There are no findings" in found


async def test_a_broker_that_refuses_is_not_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(admin: AdminClient, address: str) -> dict[str, str]:
        raise BrokerRefused(RequestCode.GET_BROKER_RUNTIME_INFO, 1, "no admin", address)

    monkeypatch.setattr(AdminClient, "broker_status", refused)
    page = await site.text("/brokers")
    assert "broker-a unknown" in page
    assert "no admin" in page


# Forms: a fault stands beside its field with what was typed, and messages are sent and copied.


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
        ("/new/group", GROUP | {"retries": "-2"}, "retries", "'-2' is not a whole number from -1 to 1000000"),
        ("/new/group", GROUP | {"retry_queues": "65"}, "retry_queues", "is not a whole number from 0 to 64"),
        ("/groups/g/settings", GROUP | {"retries": "x"}, "retries", "'x' is not a whole number"),
        ("/new/topic", TOPIC | {"topic": "ä"}, "topic", "characters other than letters"),
        ("/new/topic", TOPIC | {"queues": "0"}, "queues", "'0' is not a whole number"),
        ("/topics/orders/settings", TOPIC | {"queues": "no"}, "queues", "'no' is not a whole number"),
        ("/groups/g/reset", {"topic": "order", "to": "last"}, "topic", "order"),
        ("/groups/g/reset", {"topic": "orders", "to": "time", "time": "noon"}, "time", "'noon' is not a time"),
        ("/groups/g/reset", {"topic": "orders", "to": "time"}, "time", "give a time such as"),
        ("/groups/g/reset", {"topic": "orders", "to": "offsets", "offsets": "a\nb=1"}, "offsets", "'a' is not BROKER"),
        ("/new/message", MESSAGE | {"topic": "order"}, "topic", "no broker has the topic 'order'; create it first"),
        ("/new/message", MESSAGE | {"tag": "a || b"}, "tag", "a message has one"),
        ("/new/message", MESSAGE | {"properties": "p=q\nno"}, "properties", "'no' is not NAME=VALUE"),
        ("/new/message", MESSAGE | {"properties": "p=q\np=r"}, "properties", "'p' has two lines; give one"),
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


# The pages of groups, of a cluster with members and messages.


async def test_groups_are_listed_with_lag_members_and_dead_letters(site: Site, node: Node) -> None:
    inbox = Inbox()
    async with Producer(node.address) as producer:
        for _ in range(3):
            await producer.send("orders", b"x")
        async with Consumer(node.address, "shipping", "orders", inbox, start="first"):
            await eventually(lambda: len(inbox.messages) == 3)
        for _ in range(5):
            await producer.send("orders", b"y")
    page = await site.text("/groups")
    while "shipping checking" in page:  # the page does not wait for the group's state on a busy machine
        page = await site.text("/groups")
    assert "shipping no members 0 orders 5" in page
    assert "shipping" not in await site.text("/groups?q=bill")
    assert "shipping" in await site.text("/groups?q=SHIP&sort=lag")
    assert "CID_RMQ_SYS" not in page


async def test_a_check_of_a_group_costs_four_requests_however_many_queues_it_has(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ours: set[Connection] = set()
    request = Connection.request

    async def noted(self: Connection, code: int, *rest: Any, **named: Any) -> Frame:
        ours.add(self)
        return await request(self, code, *rest, **named)

    async def counted(self: Connection, code: int, *rest: Any, **named: Any) -> Frame:
        if self in ours:  # the consumer has its own
            asked.append(code)
        return await request(self, code, *rest, **named)

    async with AdminClient(node.address) as admin:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "request", noted)
            await admin.create_topic("orders", queues=200)
        async with Consumer(node.address, "shipping", "orders", Inbox()):
            await rebalanced(node.address, "shipping", members=1)
            watch = GroupWatch(admin, "shipping")
            await watch.refresh()
            with monkeypatch.context() as patch:
                patch.setattr(Connection, "request", counted)
                await watch.poll()
    assert sorted(asked) == sorted(
        (
            RequestCode.GET_BROKER_CLUSTER_INFO,
            RequestCode.GET_CONSUME_STATS,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            RequestCode.GET_GROUP_HISTORY,
        )
    )
    assert len([queue for queue in watch.look.owners if queue.topic == "orders"]) == 200


async def test_no_event_is_lost_or_shown_twice_where_the_clocks_of_brokers_differ() -> None:
    async with Cluster(brokers=2) as cluster, AdminClient(cluster.address) as admin:

        async def told() -> set[str]:
            reports = await admin.history("g")
            return {str({"broker": report["broker"], **event}) for report in reports for event in report["events"]}

        await cluster.create_topic("orders")
        cluster.brokers[1].clock.advance(minutes=5)
        watch = GroupWatch(admin, "g")
        async with Consumer(cluster.address, "g", "orders", Inbox()):
            await cluster.rebalanced("g", members=1)
            await watch.poll()
            async with Consumer(cluster.address, "g", "orders", Inbox()):
                await cluster.rebalanced("g", members=2)
                await watch.poll()
        before = await told()
        await watch.poll()
        shown = [str(event) for event in watch.events]
        assert before <= set(shown) <= await told()
    assert len(set(shown)) == len(shown)
    assert {event["broker"] for event in watch.events} == {"broker-a", "broker-b"}
    assert [event["ms"] for event in watch.events] == sorted(event["ms"] for event in watch.events)


async def test_members_of_a_group_are_shown_although_one_does_not_report_its_handlers(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", 1)
    rocketlet.faults.add(Fault.silence("GET_CONSUMER_RUNNING_INFO"))
    async with (
        AdminClient(rocketlet.address) as admin,
        Consumer(rocketlet.address, "g", "orders", Inbox()) as consumer,
    ):
        await consumer.assigned(PATIENCE_S)
        watch = GroupWatch(admin, "g")
        async with asyncio.timeout(ADMIN_TIMEOUT_S):
            await watch.refresh()
    assert [member.client_id for member in watch.look.members] == [consumer.client_id]


async def test_a_group_that_nobody_knows_is_said_so(site: Site) -> None:
    assert "no broker knows the group nobody" in await site.text("/groups/nobody", 404)


async def test_a_group_shows_its_members_owners_and_hand_overs(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
    async with Consumer(node.address, "shipping", "orders", Inbox()) as first:
        await rebalanced(node.address, "shipping", members=1)
        page = await site.text("/groups/shipping")
        assert "orders [*]" in page
        assert f"Rocketlet {version('rocketlet')}" in page
        assert "127.0.0.1:" in page
        async with Consumer(node.address, "shipping", "orders", Inbox()) as second:
            await rebalanced(node.address, "shipping", members=2)
            async for name, part in site.stream("/groups/shipping"):
                if name == "live_hand_overs" and "to finish its messages and release" in part:
                    assert "joined" in part
                    break
        html = await site.get("/groups/shipping")
        assert html.count("<rect") >= len(first.assignment()) + len(second.assignment()) - 2


async def test_older_hand_overs_are_on_pages_of_their_own_when_a_member_took_many_queues(
    site: Site, node: Node
) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders", queues=60)
    async with Consumer(node.address, "shipping", "orders", Inbox()):
        await rebalanced(node.address, "shipping", members=1)
        await site.get("/groups/shipping")  # a group is observed from its first page on
        async with Consumer(node.address, "shipping", "orders", Inbox()) as second:
            await rebalanced(node.address, "shipping", members=2)
            moved = {str(queue) for queue in second.assignment()}
            async for name, part in site.stream("/groups/shipping"):
                if name == "live_hand_overs" and "25 older" in part:
                    break
            first, last = [await site.get(f"/groups/shipping?window=900&handovers={number}") for number in (1, 9)]
    assert len(moved) == 30
    assert "1–20 of 25 hand-overs" in first
    assert "21–25 of 25 hand-overs" in last
    assert '<details id="older-hand-overs">' in first
    assert '<details id="older-hand-overs" open>' in last
    tables = (
        first[first.index('id="h-hand"') : first.index('id="h-events"')]
        + last[last.index("older-hand-overs") : last.index('id="h-events"')]
    )
    assert set(re.findall(r'class="nowrap">(orders@[^<]+)<', tables)) == moved


async def test_the_queues_of_a_group_are_filtered(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
        await producer.send("bills", b"x")
    async with Consumer(node.address, "g", {"orders": "*", "bills": "*"}, Inbox()):
        await rebalanced(node.address, "g", members=1)
        page = await site.get("/groups/g?q=bills")
        assert 'href="/messages?topic=bills&amp;by=offset&amp;broker=broker-a&amp;queue=1' in page
        assert 'href="/messages?topic=orders' not in page


async def test_a_broker_that_is_away_is_reported_on_the_open_page(site: Site, node: Node) -> None:
    async for name, part in site.stream("/groups"):
        if name == "trouble" and not part:
            await node.stop()
        if name == "trouble" and part:
            assert "no name server can be reached" in part
            break
    assert "The request failed" in await site.text("/groups/g", 502)


async def test_the_first_page_shows_what_is_in_trouble_first(site: Site, node: Node) -> None:
    first = await site.http.get(site.url + "/", follow_redirects=True)
    assert (first.url.path, first.status_code) == ("/overview", 200)
    assert "There is no group yet" in first.text
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "a-well", "orders", Inbox(), start="first") as well,
        Consumer(node.address, "b-rejects", "orders", Inbox(Reject("no such dish")), start="first"),
    ):
        await producer.send("orders", b"x", queue_key="k")
        await eventually(lambda: node.broker.store.queue("%DLQ%b-rejects", 0).next == 1)
        await well.commit()
        html = ""
        while "new dead letters 1" not in plain(html):
            html = await site.get("/overview")
    assert html.index('id="g-b-rejects"') < html.index('id="g-a-well"')
    assert "broker-a up" in plain(html)


async def test_the_first_page_shows_the_worst_findings_and_leads_to_the_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding(Harm.SLOW, "growing_lag", f"g{number}", "text", "cure") for number in range(OVERVIEW_FINDINGS + 1)]
    monkeypatch.setattr(Console, "findings", lambda self: found)
    page = await site.get("/overview")
    assert page.count("[growing_lag]") == OVERVIEW_FINDINGS
    assert '<a href="/groups/g0#h-lag">Lag</a>' in page
    assert '<a href="/doctor">1 more finding</a>' in page


def test_each_finding_that_leads_to_a_page_is_one_of_doctors() -> None:
    console, admin = Path(console_page.__file__).parent, Path(admin_findings.__file__).parent
    cures = (console / "templates/parts.html").read_text().partition("{% set cures")[2].partition("%}")[0]
    kinds = re.findall(r'"(\w+)": \("', cures)
    source = (admin / "findings.py").read_text() + (admin / "diagnosis.py").read_text()
    assert len(kinds) > 15
    assert [kind for kind in kinds if f'"{kind}"' not in source] == []


async def test_a_broadcasting_group_shows_no_lag_and_no_queue_without_an_owner(site: Site, node: Node) -> None:
    inbox = Inbox()
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "news", "orders", inbox, start="first", broadcasting=True),
    ):
        await producer.send("orders", b"x")
        await eventually(lambda: len(inbox.messages) == 1)
        page = await site.text("/groups/news")
        assert "messages waiting –" in page
        assert "queues without an owner 0" in page
        assert "every member" in page
        assert "news checking 1 orders –" in await site.text("/groups")


@pytest.fixture
async def quick_site(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A console that finds a queue stuck after a moment."""
    monkeypatch.setattr("rocketlet.console.console.Examiner", partial(Examiner, watch_s=0.3, stuck_s=0.0))
    async with ConsoleServer(node.address) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield Site(server.url, http)


async def test_every_page_has_the_findings_of_doctor_when_a_handler_hangs(quick_site: Site, node: Node) -> None:
    never = asyncio.Event()

    async def handle(message: Message) -> None:
        await never.wait()

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "hangs", "orders", handle, start="first"),
        Consumer(node.address, "news", "orders", Inbox(), start="first", broadcasting=True),
        Consumer(node.address, "well", "orders", Inbox(), start="first", commit_interval_s=0.05),
        AdminClient(node.address) as admin,
    ):
        sent = await producer.send("orders", b"x", queue_key="k")
        blocked = f"the oldest is message {sent.message_id} at offset 0 of {sent.queue}"
        for group in ("hangs", "well"):
            await rebalanced(node.address, group, members=1)
        page = await text_with(quick_site, "/groups/hangs", blocked)
        assert "[stuck_queue]" in page
        await text_with(quick_site, "/groups/hangs", "Running handlers", sent.message_id[-8:], "handle")
        assert "There are no findings" in await text_with(quick_site, "/groups/well", "up to date")
        assert "There are no findings" in await text_with(quick_site, "/groups/news", "broadcasting")
        assert '<a href="/groups/hangs#h-handlers">Running handlers</a>' in await quick_site.get("/overview")
        for path in ("/overview", "/groups"):
            await text_with(quick_site, path, "hangs stuck queue 1", "news broadcasting 1", "well up to date 1")
        doctor = await text_with(quick_site, "/doctor", blocked)
        assert "Messages wait without progress" in doctor
        assert '<a href="/groups/hangs">hangs</a>' in await quick_site.get("/doctor")
        assert 'title="findings that affect messages now">' in await quick_site.get("/groups")
        by_doctor = [item for item in await diagnose(admin, ObservationTimes(0.0, 0.1, 0.0)) if item.harm < Harm.RISK]
        assert [(item.subject, item.kind) for item in by_doctor if item.kind != "disk"] == [("hangs", "stuck_queue")]
        never.set()


async def test_group_page_says_checking_when_the_group_was_checked_once(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
    async with Consumer(node.address, "g", "orders", Inbox()):
        await rebalanced(node.address, "g", members=1)
        page = await site.text("/groups/g")
    assert "Checking: the second observation follows" in page
    assert "There are no findings" not in page


async def test_colours_of_members_differ_when_members_come_and_go(node: Node) -> None:
    def member(name: str) -> MemberRow:
        return MemberRow(name, "", "", 0, "", {}, False, 0)

    async with AdminClient(node.address) as admin:
        watch = GroupWatch(admin, "g")
    for round_ in range(5):
        watch.look = GroupSnapshot(members=tuple(member(f"{round_}-{number}") for number in range(COLOURS)))
        colours = [watch.colour(item.client_id) for item in watch.look.members]
        assert sorted(colours, key=int) == [str(number) for number in range(COLOURS)]
    assert watch.colour("0-0") == "gone"
    assert watch.colour(SHARED_OWNER) == "shared"
    kept = watch.colour("4-3")
    watch.look = GroupSnapshot(members=(member("4-3"), *(member(f"new-{number}") for number in range(COLOURS))))
    assert [watch.colour(item.client_id) for item in watch.look.members].count(kept) == 1
    assert watch.colour(f"new-{COLOURS - 1}") == "more"


async def test_metrics_of_the_console_report_the_findings_of_its_pages(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("idle"))
    async for name, part in site.stream("/doctor"):
        if name == "live_doctor" and "it has no members" in part:
            break
    answer = await site.http.get(
        site.url + "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    found = re.findall(r"rocketlet_finding\{(.*)\} 1\.0", answer.text)
    assert found == ['about="group",harm="risk",kind="no_members",subject="idle"']
    assert "rocketlet_groups_examined 1.0" in answer.text
