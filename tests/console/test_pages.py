"""The pages of topics, messages, dead letters and brokers, and what can be changed there."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgpack
import pytest
from rocketlet.broker.config import MAX_QUEUES_PER_TOPIC
from rocketlet.client import AdminClient, BrokerRefused, Consumer, Message, Producer, Reject, RetryLater, SendResult
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_TOPIC_QUEUES
from rocketlet.protocol.names import Queue

from ..conftest import Node, eventually
from ..support.handlers import Inbox
from .conftest import Site, plain, token_of

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
    assert "broker-a 4 4 send and read" in one
    assert "no name server knows the topic nothing" in await site.text("/topics/nothing", 404)


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
        "/groups/g/settings", "/new/group", group="g", retries="3", retry_queues="1", consume="off", strict="off"
    )
    assert "Its members get no more messages" in asked
    asked, done = await site.change("/groups/g/settings", "/groups/g/delete")
    assert "Its offsets of" in asked
    assert done == "The group g and its offsets are deleted."
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
    ):
        sent = await producer.send("orders", b"x", tag="A", queue_key="k")
        await eventually(lambda: bool(done.messages and retried.messages and rejected.messages))
        wanted = {"done": "consumed", "tries": "retry", "gave-up": "dead", "picky": "filtered"}
        page = ""
        for group, state in wanted.items():
            while f"{group} {state}" not in page:
                page = await site.text(place(sent))
        assert "it was retried 1 times" in page
    async with Producer(node.address) as producer:
        late = await producer.send("orders", b"y", tag="A", queue_key="k")
    assert "done waiting 0 messages of the queue come first" in await site.text(place(late))


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
        html = ""
        while "poison" not in html:
            html = await site.get("/groups/g/dead")
        assert "1 message was given up; 1 of them is new" in plain(html)
        assert "no such customer" in plain(html)
        is_broken = False
        fields = {"which": "all"} if which == "all" else {"which": "some", "place": "broker-a:0:0"}
        asked, done = await site.change("/groups/g/dead", "/groups/g/replay", to="group", **fields)
        assert "Send 1 message again to the retry topic of g?" in asked
        assert "nothing has been sent yet" in asked
        assert "1 message was sent again to the retry topic of g." in done
        await eventually(lambda: mended.bodies == [b"poison"])
        await eventually(lambda: others.bodies == [b"poison"])
        assert "0 of them are new" in await site.text("/groups/g/dead")
        if which == "all":
            token = token_of(await site.get("/groups/g/dead"))
            for path in ("replay", "discard"):
                answer = await site.post(f"/groups/g/{path}", {"token": token, "which": "all"})
                assert "none is new" in plain(answer.text)
            return
        _, done = await site.change("/groups/g/dead", "/groups/g/discard", **fields)
        assert "1 dead letter is discarded" in done
        _, done = await site.change("/groups/g/dead", "/groups/g/replay", to="topic", **fields)
        assert "to orders" in done
        await eventually(lambda: len(mended.messages) == 2 and len(others.messages) == 2)
    token = token_of(await site.get("/groups/g/dead"))
    nothing = await site.post("/groups/g/replay", {"token": token, "which": "some", "confirmed": "yes"})
    assert "none is chosen" in plain(nothing.text)
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
        ({"to": "time"}, "say when"),
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
    assert "is called so" in await site.text("/brokers/broker-z", 404)
    found = await site.text("/doctor?look=yes")
    assert "Nothing is wrong" in found


async def test_a_broker_that_refuses_is_not_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(admin: AdminClient, address: str) -> dict[str, str]:
        raise BrokerRefused(RequestCode.GET_BROKER_RUNTIME_INFO, 1, "no admin", address)

    monkeypatch.setattr(AdminClient, "broker_status", refused)
    page = await site.text("/brokers")
    assert "broker-a unknown" in page
    assert "no admin" in page
