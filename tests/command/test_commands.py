"""`rocketlet NOUN VERB` on a real broker: what is printed, as text and as JSON, and the exit status."""

from __future__ import annotations

import asyncio
import gc
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    ConfigError,
    Consumer,
    LiteConsumer,
    Message,
    Producer,
    Reject,
    SharedConsumer,
    rebalanced,
)
from rocketlet.client.admin.diagnosis import Examiner
from rocketlet.client.wire.connection import Access
from rocketlet.command import config
from rocketlet.command.cli import main
from rocketlet.command.plumbing import logs
from rocketlet.command.plumbing.bar import WIDTH, bar
from rocketlet.command.tools import load
from rocketlet.command.tools.load import Load, LoadSide
from rocketlet.command.tools.top import _sample, caught_up_s, shown_duration
from rocketlet.migration.mirror import MirrorProgress
from rocketlet.protocol.bodies import BodyError, GroupConfig, finish
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.testing import Broker, Fault

from ..conftest import Node, Nodes, Wire, create_topic, eventually
from ..support.accounts import ACCOUNTS, ADMIN, SECRETS, AccountsFile
from ..support.handlers import Inbox, fill
from ..support.requests import send
from ..support.topics import put
from .conftest import Ran, Run


async def test_an_empty_cluster_says_that_it_is_empty(run: Run) -> None:
    assert "there is no topic yet" in (await run("topics", "list")).out
    assert "there is no group yet" in (await run("groups", "list")).out
    assert (await run("topics", "list", "--json")).out == (await run("groups", "list", "--json")).out == ""


async def test_a_topic_is_created_listed_shown_and_deleted(run: Run) -> None:
    assert (
        "is created: queues 3, read queues 3, perm 6" in (await run("topics", "create", "orders", "--queues", "3")).out
    )
    (record,) = (await run("topics", "list", "--json")).records
    assert record == {
        "topic": "orders",
        "brokers": ["broker-a"],
        "queues": 3,
        "messages": 0,
        "last_message": None,
    }
    assert (await run("messages", "send", "orders", "hello", "--tag", "new", "--key", "k1")).status == 0
    shown = await run("topics", "show", "orders")
    assert "read by: no group" in shown.out
    assert shown.out.count("broker-a") == 4
    assert "settings at broker-a: queues 3, read queues 3, perm 6\n" in shown.out
    assert (await run("topics", "delete", "orders", "--yes")).out == "the topic orders is deleted, with 1 message\n"
    gone = await run("topics", "show", "orders")
    assert (gone.status, gone.out) == (1, "")
    assert gone.err.startswith("rocketlet: no name server knows the topic orders")


async def test_topic_gets_fewer_queues_only_with_a_flag_that_allows_unreadable_messages(run: Run, node: Node) -> None:
    await run("topics", "create", "orders", "--queues", "8")
    await fill(node, 16, "orders")
    await run("groups", "create", "shop")
    await run("offsets", "reset", "shop", "orders", "--to", "first", "--yes")
    existing = await run("topics", "create", "orders", "--json")
    of_topic = {"broker": "broker-a", "topic": "orders", "perm": 6}
    assert existing.records == [{**of_topic, "created": False, "queues": 8, "read_queues": 8}]
    refused = await run("topics", "set", "orders", "--queues", "2", "--json")
    assert (refused.status, "12 messages would become unreadable: add --read-queues" in refused.err) == (1, True)
    assert refused.records == [
        {"topic": "orders", "broker": "broker-a", "queue": number, "messages": 2, "unread": {"shop": 2}}
        for number in range(2, 8)
    ]
    drained = await run("topics", "set", "orders", "--queues", "2", "--read-queues", "8", "--json")
    assert drained.records == [{**of_topic, "queues": 2, "read_queues": 8}]
    allowed = await run("topics", "set", "orders", "--queues", "2", "--allow-unreadable")
    assert allowed.out == "broker-a: the topic orders is changed: queues 2, read queues 2, perm 6\n"
    assert [record["lag"] for record in (await run("groups", "list", "--json")).records] == [16]
    nothing = await run("topics", "set", "orders")
    assert (nothing.status, "give one of --queues, --read-queues, --perm" in nothing.err) == (1, True)


async def test_levels_of_a_topic_with_priorities_are_shown_with_what_waits(run: Run, node: Node) -> None:
    put(node, "jobs", queues=3, message_type="PRIORITY")
    async with Producer(node.address) as producer:
        for priority in (0, 2, 2, 1):
            await producer.send("jobs", b"x", priority=priority)
    async with SharedConsumer(node.address, "workers", "jobs", start="first") as consumer:
        await consumer.ack(await consumer.receive())
        await eventually(lambda: finish(node.broker.progress.lag("workers", "jobs")).messages == 3)
        rows = [row for row in (await run("topics", "show", "jobs", "--json")).records if "level" in row]
        assert [(row["group"], row["level"]) for row in rows] == [("workers", 2), ("workers", 1), ("workers", 0)]
        assert [row["waiting"] for row in rows] == [1, 1, 1]
        shown = (await run("topics", "show", "jobs")).out
    assert [line.split() for line in shown.splitlines() if line.startswith("workers")] == [
        ["workers", "2", "1"],
        ["workers", "1", "1"],
        ["workers", "0", "1"],
    ]


def test_command_without_arguments_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: rocketlet" in capsys.readouterr().out


async def test_times_of_records_are_iso_with_an_offset_or_null(run: Run, node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    (empty,) = (await run("topics", "list", "--json")).records
    assert empty["last_message"] is None
    await run("messages", "send", "t", "x")
    (found,) = (await run("messages", "find", "t", "--json")).records
    (topic,) = (await run("topics", "list", "--json")).records
    for text in (found["time"], topic["last_message"]):
        at = datetime.fromisoformat(str(text))
        assert at.tzinfo is not None
        assert abs(at.timestamp() - node.clock.time_s()) < 60
    (broker,) = (await run("brokers", "list", "--json")).records
    assert isinstance(broker["disk_used"], float)


async def test_message_is_sent_with_a_delay_a_priority_and_to_a_lite_topic(run: Run, node: Node) -> None:
    await run("topics", "create", "levels", "--type", "PRIORITY", "--queues", "4")
    assert "levels" in (await run("messages", "send", "levels", "urgent", "--priority", "3", "--json")).out
    (found,) = (await run("messages", "find", "levels", "--json")).records
    assert (found["broker"], found["queue"]) == (node.config.name, 3)
    await run("topics", "create", "chats", "--type", "LITE")
    await run("messages", "send", "chats", "hello", "--lite-topic", "anna")
    (found,) = (await run("messages", "find", "chats", "--json")).records
    assert "'__LITE_TOPIC': 'anna'" in str(found["properties"])
    sent = await run("messages", "send", "levels", "later", "--delay", "3600")
    assert "when its time has come" in sent.out


async def test_running_handlers_of_a_group_are_shown_with_their_stacks(run: Run, node: Node) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def charge(message: Message) -> None:
        begun.set()
        await gate.wait()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", charge, start="first") as consumer:
        sent = await producer.send("t", b"x")
        await begun.wait()
        shown = (await run("groups", "show", "g", "--handlers")).out.splitlines()
        (record,) = (await run("groups", "show", "g", "--handlers", "--json")).records
        gate.set()
        await eventually(lambda: not consumer.running_handlers(stacks=False))
        assert "no handler of a Rocketlet member is running" in (await run("groups", "show", "g", "--handlers")).out
    assert shown[0].startswith(
        f"{consumer.client_id}: message {sent.message_id} at offset 0 of {sent.queue}, running for"
    )
    assert shown[-1].endswith("charge")
    assert (record["member"], record["message_id"], record["attempt"]) == (consumer.client_id, sent.message_id, 1)


async def test_members_that_do_not_report_their_running_handlers_are_named(
    run: Run, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(message: Message) -> None: ...

    def refuse(*, stacks: bool) -> NoReturn:
        raise BodyError("it is blocked")

    put(node, "t")
    async with Consumer(node.address, "g", "t", handle) as consumer:
        monkeypatch.setattr(consumer, "running_handlers", refuse)
        shown = (await run("groups", "show", "g", "--handlers")).out
        (record,) = (await run("groups", "show", "g", "--handlers", "--json")).records
    assert shown.startswith(f"{consumer.client_id}: no response")
    assert "no handler" not in shown
    assert record == {"member": consumer.client_id, "error": "no response"}


async def test_lite_topics_are_shown_with_their_parent_and_their_group(run: Run, node: Node) -> None:
    put(node, "CHAT", message_type="LITE", lite_expiration_min=60)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with (
        LiteConsumer(node.address, "chats", "CHAT", inbox, lite_topics=["a", "b"]),
        Producer(node.address) as producer,
    ):
        for name, count in (("a", 3), ("b", 1), ("unread", 2)):
            for number in range(count):
                await producer.send("CHAT", b"%d" % number, lite_topic=name)
        await eventually(lambda: len(inbox.messages) == 2)
        shown = (await run("groups", "show", "chats")).out
        assert shown.startswith("group chats: 1 member, lite topics of CHAT")
        assert "2 lite topics" in shown
        assert re.search(r"CHAT: 4 messages behind, \d of them in flight, the oldest stored \d", shown)
        assert re.search(r"lite topic a: 3 messages.*\n +lite topic b: 1 message behind, 1 of them in flight", shown)
        (record,) = (await run("groups", "show", "chats", "--json")).records
        lite: Any = record["lite"]
        assert (lite["topic"], lite["messages"], list(lite["subscriptions"].values())) == ("CHAT", 4, [2])
        assert [(item["lite_topic"], item["messages"]) for item in lite["longest"]] == [("a", 3), ("b", 1)]
        (listed,) = (await run("groups", "list", "--json")).records
        assert listed == {"group": "chats", "members": 1, "topics": ["CHAT"], "lag": 4}
        topic = (await run("topics", "show", "CHAT")).out
        assert "parent of 3 lite topics, deleted after 60 minutes without a message\nread by: chats\n" in topic
        shown_as_json = (await run("topics", "show", "CHAT", "--json")).records[-1]
        assert shown_as_json == {
            "topic": "CHAT",
            "lite_topics": 3,
            "expiration_min": 60,
            "lite_groups": ["chats"],
        }
        gate.set()
        await eventually(lambda: node.broker.pops.pools.unfinished("chats") == 0)
    idle = (await run("groups", "show", "chats")).out
    assert idle.startswith("group chats: 0 members, lite topics of CHAT\n  settings: retries 16, ")
    assert idle.endswith(", lite.bind.topic CHAT\n  CHAT: 0 messages behind\n")


async def test_a_parent_of_lite_topics_is_created_with_an_expiration(run: Run) -> None:
    await run("topics", "create", "CHAT", "--lite", "--lite-expiration", "60")
    shown = (await run("topics", "show", "CHAT")).out
    assert "parent of 0 lite topics, deleted after 60 minutes without a message" in shown
    changed = await run("topics", "set", "CHAT", "--lite-expiration", "-1", "--json")
    assert changed.records == [
        {"broker": "broker-a", "topic": "CHAT", "queues": 4, "read_queues": 4, "perm": 6, "type": "LITE"}
    ]
    outside = await run("topics", "create", "MORE", "--lite", "--lite-expiration", "43201")
    assert outside.status == 1
    assert "lite_expiration_min" in outside.err
    plain = await run("topics", "create", "MORE", "--lite-expiration", "60")
    assert "lite_expiration_min: expected message_type='LITE', got ''" in plain.err


async def test_members_of_a_wildcard_group_are_shown_without_single_lite_topics(run: Run, node: Node) -> None:
    put(node, "CHAT", message_type="LITE")
    attributes = {"lite.bind.topic": "CHAT", "lite.sub.wildcard": ""}
    node.broker.group_configs.put(GroupConfig("chats", attributes=attributes))
    async with LiteConsumer(node.address, "chats", "CHAT", Inbox()):
        shown = (await run("groups", "show", "chats")).out
    assert "every lite topic of CHAT" in shown
    assert "    every lite topic\n" in shown
    assert "parent of 0 lite topics, which never expire" in (await run("topics", "show", "CHAT")).out


async def test_nothing_is_deleted_without_a_yes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await run("topics", "create", "orders")
    for answer, said in (("n\n", ""), ("", "no answer on stdin; add --yes")):
        monkeypatch.setattr("sys.stdin", StringIO(answer))
        ran = await run("topics", "delete", "orders", "--json")
        assert (ran.status, ran.out, said in ran.err) == (1, "", True)
    assert [record["topic"] for record in (await run("topics", "list", "--json")).records] == ["orders"]


async def test_messages_are_found_followed_and_shown_harmlessly(run: Run, node: Node) -> None:
    await run("topics", "create", "orders", "--queues", "1")
    async with Producer(node.address) as producer:
        first = await producer.send("orders", b"plain", keys="k1", properties={"colour": "red"})
        await producer.send("orders", b"\x1b[31mred\x1b[0m", tag="T")
        await producer.send("orders", b"\xff\x00", tag="T", keys="\x1b[2J")
    for option in (("--key", "k1"), ("--id", first.message_id), ("--id", first.offset_id), ("--at", "broker-a:0:0")):
        record = (await run("messages", "find", "orders", *option, "--json")).records[0]
        assert (record["body"], record["message_id"], record["keys"]) == ("plain", first.message_id, ["k1"])
    newest = await run("messages", "find", "orders")
    assert "\x1b" not in newest.out, "a message cannot colour the terminal"
    assert r"\u001b[31mred" in newest.out
    assert "hex:ff00" in newest.out
    assert r"\x1b[2J" in newest.out
    for option in (
        ("--key", "k2"),
        ("--id", "C00002020B292CB7F2156E6FDD240000"),
        ("--id", "nonsense"),
        ("--at", f"broker-a:0:{1 << 62}"),
    ):
        nothing = await run("messages", "find", "orders", *option)
        assert (nothing.status, nothing.out) == (1, "no message was found\n")
    for place in (f"broker-a:0:{1 << 64}", "broker-a:²:0", "broker-a:0:-1"):
        wrong = await run("messages", "find", "orders", "--at", place)
        assert (wrong.status, wrong.err.count("\n")) == (1, 1), wrong
    tailed = await run("messages", "tail", "orders", "--last", "2", "--tags", "T", "--no-follow")
    assert len(tailed.out.splitlines()) == 2
    assert "\x1b" not in tailed.out


async def test_offsets_are_shown_and_reset_after_a_dry_run(run: Run, node: Node) -> None:
    await run("topics", "create", "orders", "--queues", "2")
    seen: list[Message] = []
    async with Producer(node.address) as producer, Consumer(node.address, "g", "orders", seen.append, start="first"):
        for number in range(6):
            await producer.send("orders", b"%d" % number)
        await eventually(lambda: len(seen) == 6)
    assert "0 messages are not consumed yet" in (await run("offsets", "show", "g", "orders")).out
    dry = await run("offsets", "reset", "g", "orders", "--to", "first", "--dry-run")
    assert "would be: 0 messages skipped, 6 delivered again" in dry.out
    assert "0 messages are not" in (await run("offsets", "show", "g", "orders")).out
    assert (await run("offsets", "reset", "g", "orders", "--to", "broker-a:0=1", "--yes")).status == 0
    committed = {item["queue"]: item["committed"] for item in (await run("offsets", "show", "g", "--json")).records}
    assert committed[0] == 1
    wrong = await run("offsets", "reset", "g", "orders", "--to", "yesterday", "--yes")
    assert wrong.status == 1
    assert "use first, last, a time such as" in wrong.err
    assert (await run("offsets", "show", "nobody")).status == 1
    typo = await run("offsets", "reset", "shoping", "orders", "--to", "first", "--yes")
    assert (typo.status, "no broker knows the group shoping" in typo.err) == (1, True)
    assert "shoping" not in (await run("groups", "list")).out


async def test_dead_letters_are_shown_and_replayed_to_the_group_alone(run: Run, node: Node) -> None:
    await run("topics", "create", "orders", "--queues", "1")
    mended: list[Message] = []
    is_broken = True

    async def handle(message: Message) -> Reject | None:
        if is_broken:
            return Reject("no such customer")
        mended.append(message)
        return None

    others: list[Message] = []
    async with (
        Consumer(node.address, "g", "orders", handle, start="first"),
        Consumer(node.address, "other", "orders", others.append, start="first"),
        Producer(node.address) as producer,
    ):
        sent = await producer.send("orders", b"poison", tag="T", keys="k1", properties={"colour": "red"})
        while "poison" not in (await run("messages", "dead", "g")).out:
            pass
        is_broken = False
        dry = await run("messages", "replay", "g", "--dry-run")
        assert "would be sent again: 1 message, to the group g" in dry.out
        dry = await run("messages", "replay", "g", "--to", "topic", "--dry-run")
        assert "would be sent again: 1 message, to orders (1)" in dry.out
        assert (await run("messages", "replay", "g", "--id", "nothing", "--yes")).status == 1
        replayed = await run("messages", "replay", "g", "--id", sent.message_id, "--yes")
        assert "1 message was sent again; the dead letters stay in %DLQ%g" in replayed.out
        await eventually(lambda: len(mended) == 1)
        assert [message.body for message in others] == [b"poison"], "another group does not get it again"
        again = await run("messages", "replay", "g", "--to", "topic", "--yes")
        assert (again.status, "--again takes 1 that are not new" in again.out) == (1, True)
        assert (await run("messages", "replay", "g", "--to", "topic", "--again", "--yes")).status == 0
        await eventually(lambda: len(mended) == 2 and len(others) == 2)
    for message in mended:
        assert (message.topic, message.body, message.tag, message.keys) == ("orders", b"poison", "T", ["k1"])
        assert (message.properties["colour"], message.message_id) == ("red", sent.message_id)


async def test_dead_letters_are_new_until_somebody_deals_with_them(run: Run, node: Node) -> None:
    async def states() -> list[tuple[Any, Any]]:
        found = (await run("messages", "dead", "g", "--json")).records
        return sorted((item["body"], item["state"]) for item in found)

    async with (
        Consumer(node.address, "g", "orders", lambda message: Reject(f"no {message.body.decode()}"), start="first"),
        Producer(node.address) as producer,
    ):
        sent = [await producer.send("orders", body, queue_key="k") for body in (b"a", b"b", b"c", b"d")]
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 4)
    assert "no a" in (await run("messages", "dead", "g")).out
    assert (await run("messages", "discard", "g", "--id", sent[1].message_id, "--yes")).status == 0
    assert (await run("messages", "replay", "g", "--id", sent[2].message_id, "--yes")).status == 0
    assert await states() == [("a", "new"), ("b", "discarded"), ("c", "replayed"), ("d", "new")]
    assert "2 messages were dead-lettered" in (await run("doctor")).out
    discarded = await run("messages", "discard", "g", "--yes")
    assert "2 dead letters are discarded" in discarded.out
    assert "dead_letters" not in (await run("doctor")).out
    assert "MARKS" not in (await run("topics", "list")).out, "marks are no topic of a user"
    async with AdminClient(node.address) as admin:
        await admin.delete_topic("%DLQ%g")
        node.clock.advance(1)
        async with (
            Consumer(node.address, "g", "orders", lambda message: Reject(), start="first"),
            Producer(node.address) as producer,
        ):
            await producer.send("orders", b"e", queue_key="k")
            await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert {state for _, state in await states()} == {"new"}, "a topic that is recreated begins without marks"


async def test_dead_letters_of_a_deleted_group_are_deleted_only_on_request(run: Run, node: Node, wire: Wire) -> None:
    async with AdminClient(node.address) as admin:
        await create_topic(wire, "%DLQ%g", 1)
        await send(wire, b"poison", topic="%DLQ%g")
        await admin.create_group(GroupConfig("g"))
        assert "1 dead letter stays in %DLQ%g" in (await run("groups", "delete", "g", "--yes")).out
        assert await admin.dead_letter_count("g") == 1
        await admin.create_group(GroupConfig("g"))
        assert "stays" not in (await run("groups", "delete", "g", "--dead-letters", "--yes")).out
        assert await admin.dead_letter_count("g") is None


async def test_replay_stops_after_as_many_failures_as_allowed_and_reports_each_message(
    run: Run, node: Node, wire: Wire
) -> None:
    """Letters of the deleted topic `gone` fail, because its name is not created by a send."""
    await create_topic(wire, "%DLQ%g", 1)
    await create_topic(wire, "orders", 1)
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g"))
    for number, topic in enumerate(("gone", "orders", "gone", "gone", "orders")):
        await send(wire, b"%d" % number, topic="%DLQ%g", properties=f"RETRY_TOPIC\x01{topic}")
    node.broker.change_config(replace(node.broker.config, auto_create_topics=False))
    replay = ("messages", "replay", "g", "--to", "topic", "--topic", "gone", "--topic", "orders", "--yes")
    once = await run(*replay)
    assert (once.status, "1 message could not be sent; the replay has stopped" in once.out) == (1, True)
    assert node.broker.store.queue("orders", 0).next == 0
    twice = await run(*replay, "--stop-after", "2", "--rate", "1000/s", "--json")
    results = [(record["offset"], record["result"]) for record in twice.records if "result" in record]
    assert results == [(0, "failed"), (1, "sent"), (2, "failed")]
    rest = await run(*replay, "--stop-after", "9")
    assert (rest.status, "3 messages could not be sent\n" in rest.out) == (1, True)
    assert node.broker.store.queue("orders", 0).next == 2, "what was sent is not sent again"
    for wrong in ("0/s", "5/x", "x", "inf/s"):
        with pytest.raises(SystemExit, match="2"):
            await run(*replay, "--rate", wrong)


async def test_all_dead_letters_are_exported_with_their_bodies(run: Run, node: Node, wire: Wire) -> None:
    await create_topic(wire, "%DLQ%g", 1)
    for number in range(30):
        await send(wire, b"%d " % number + b"x" * 1000, topic="%DLQ%g")
    exported = (await run("messages", "dead", "g", "--all", "--json")).records
    assert [record["offset"] for record in exported] == list(range(30))
    assert exported[7]["body"] == "7 " + "x" * 1000


async def test_deletion_of_a_group_can_be_repeated_when_a_broker_has_refused_a_part_of_it(
    rocketlet: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda level: None)
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_group(GroupConfig("g"))
    rocketlet.faults.add(Fault.answer("DELETE_TOPIC_IN_BROKER", response="SYSTEM_ERROR", remark="not now", times=1))
    delete = ["groups", "delete", "g", "--yes", "--nameserver", rocketlet.address]
    assert await asyncio.to_thread(main, delete) == 1
    assert "not now" in capsys.readouterr().err
    assert await asyncio.to_thread(main, delete) == 0


FORGED_MARKS = {
    "infinite offset": b'{"group":"g","queue":0,"state":"discarded","ranges":[[0,1e999]]}',
    "deep nesting": b"[" * 200_000,
    "deep nesting in an unknown field": b'{"x":' + b"[" * 200_000,
    "offsets that the queue has not reached": b'{"group":"g","queue":0,"state":"discarded","ranges":[[0,9000000000]]}',
    "negative offset": b'{"group":"g","queue":0,"state":"discarded","ranges":[[-5,1]]}',
    "text as offset": b'{"group":"g","queue":0,"state":"discarded","ranges":[["a",1]]}',
    "fraction as offset": b'{"group":"g","queue":0,"state":"discarded","ranges":[[0,0.5]]}',
    "unknown state": b'{"group":"g","queue":0,"state":"new","ranges":[[0,1]]}',
    "huge queue": b'{"group":"g","queue":99999999999999999999,"state":"discarded","ranges":[[0,1]]}',
    "too many ranges": b'{"group":"g","queue":0,"state":"discarded","ranges":[' + b"[0,1]," * 1000 + b"[0,1]]}",
    "no JSON": b"\xff",
}


@pytest.mark.parametrize("body", FORGED_MARKS.values(), ids=FORGED_MARKS)
async def test_a_forged_mark_neither_hides_dead_letters_nor_ends_doctor(
    run: Run, node: Node, wire: Wire, body: bytes
) -> None:
    await create_topic(wire, "%DLQ%g", 1)
    await create_topic(wire, "ROCKETLET_DEAD_LETTER_MARKS", 1)
    await send(wire, b"poison", topic="%DLQ%g")
    await send(wire, body, topic="ROCKETLET_DEAD_LETTER_MARKS")
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g"))
    found = await run("doctor")
    assert found.err == ""
    assert "1 message was dead-lettered" in found.out
    assert [item["state"] for item in (await run("messages", "dead", "g", "--json")).records] == ["new"]


async def test_a_replay_holds_few_of_many_dead_letters_at_a_time(
    run: Run, node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "%DLQ%g", 1)
    await create_topic(wire, "orders", 1)
    for number in range(20):  # an answer holds 1 MiB
        await send(wire, b"%d " % number + b"x" * 200_000, topic="%DLQ%g", properties="RETRY_TOPIC\x01orders")
    held: list[int] = []
    sent: list[Message] = []
    send_again = AdminClient.send_again

    def alive() -> int:
        return sum(isinstance(item, Message) for item in gc.get_objects())

    async def noted(admin: AdminClient, message: Message, *, group: str | None) -> None:
        if message.queue_offset == 10:
            held.append(alive())
        await send_again(admin, message, group=group)

    monkeypatch.setattr(AdminClient, "send_again", noted)
    monkeypatch.setattr("rocketlet.command.nouns.messages.SHOWN_ROWS", 8)
    before = alive()  # other tests hold some
    await run("groups", "create", "g")
    refused = await run("messages", "replay", "g", "--to", "topic", "--yes")
    assert (refused.status, "add --topic orders" in refused.err) == (1, True), "a dead letter may name any topic"
    replayed = await run("messages", "replay", "g", "--to", "topic", "--topic", "orders", "--yes")
    assert "20 messages were sent again" in replayed.out
    assert len([line for line in replayed.out.splitlines() if line.startswith("time ")]) == 3, "20 rows in tables of 8"
    assert held[0] - before < 15
    async with AdminClient(node.address) as admin:
        (queue,) = (await admin.topic("orders")).ranges
        async for part in admin.read(queue, 0, 20):
            sent += part
    assert [int(message.body.split()[0]) for message in sent] == list(range(20))


async def test_name_may_follow_an_option_that_turns_a_setting_on(run: Run, node: Node) -> None:
    await run("groups", "create", "--orderly", "g")
    assert "orderly on" in (await run("groups", "show", "g")).out


async def test_groups_and_brokers_are_listed_and_set(run: Run, node: Node) -> None:
    await run("groups", "create", "g", "--retries", "3")
    assert (await run("groups", "list", "--json")).records == [{"group": "g", "members": 0, "topics": [], "lag": 0}]
    assert "strict on" in (await run("groups", "set", "g", "--strict", "on", "--orderly", "on")).out
    settings = {"broker": "broker-a", "group": "g", "retries": 3, "retry_queues": 1, "consume": "off", "orderly": "on"}
    settings["strict"], settings["priority_factor"], settings["rate"] = "off", 90, "off"
    options = ("--strict", "off", "--consume", "off", "--priority-factor", "90")
    changed = await run("groups", "set", "g", *options, "--json")
    assert changed.records == [settings]
    (shown,) = (await run("groups", "show", "g", "--json")).records
    report = {name: value for name, value in settings.items() if name not in ("broker", "group")}
    assert shown["settings"] == {"broker-a": report}
    assert "  settings: retries 3, retry queues 1, consume off, orderly on" in (await run("groups", "show", "g")).out
    refused = await run("groups", "set", "g", "--priority-factor", "101")
    assert (refused.status, "priority.factor: got '101'; expected 0 to 100" in refused.err) == (1, True)
    created = await run("groups", "create", "g", "--json")
    assert created.records == [{**settings, "created": False}]
    nothing = await run("groups", "set", "g")
    assert (nothing.status, "give --retries, --retry-queues" in nothing.err) == (1, True)
    deleted = await run("groups", "delete", "g", "--yes", "--json")
    assert deleted.records == [{"group": "g", "change": "deleted", "dead_letters": 0}]
    assert "there is no group" in (await run("groups", "list")).out
    (broker,) = (await run("brokers", "list", "--json")).records
    assert (broker["broker"], broker["address"], broker["state"]) == ("broker-a", node.address, "up")
    assert (await run("brokers", "set", "broker-a", "defaultTopicQueueNums=3")).status == 0
    records = (await run("brokers", "show", "broker-a", "--json")).records
    assert {"name": "defaultTopicQueueNums", "value": 3} in records
    for wrong, reason in ((("broker-a", "x"), "use NAME=VALUE"), (("broker-z", "a=b"), "no broker is named broker-z")):
        ran = await run("brokers", "set", *wrong)
        assert (ran.status, reason in ran.err) == (1, True)


def test_a_name_server_that_is_away_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda level: None)
    assert main(["topics", "list", "--nameserver", "127.0.0.1:1"]) == 1
    assert "no name server can be reached: cannot connect to 127.0.0.1:1" in capsys.readouterr().err


async def test_a_topic_has_four_queues_whoever_makes_it(run: Run, node: Node) -> None:
    await run("topics", "create", "by-command")
    async with AdminClient(node.address) as admin, Producer(node.address) as producer:
        await admin.create_topic("by-admin")
        await producer.send("by-send", b"x")
        made = [await admin.topic(name) for name in ("by-command", "by-admin", "by-send")]
    with Broker() as broker:
        broker.create_topic("by-kit")
        async with AdminClient(broker.address) as admin:
            made.append(await admin.topic("by-kit"))
    assert [len(topic.ranges) for topic in made] == [4, 4, 4, 4]


async def test_a_broker_that_refuses_is_not_away(run: Run, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(admin: AdminClient, address: str) -> dict[str, str]:
        raise BrokerRefused(RequestCode.GET_BROKER_RUNTIME_INFO, 1, "no admin", address)

    monkeypatch.setattr(AdminClient, "broker_status", refused)
    (broker,) = (await run("brokers", "list", "--json")).records
    assert (broker["state"], "no admin" in str(broker["reason"])) == ("unknown", True)


async def test_messages_are_found_by_time_text_and_property(run: Run, node: Node) -> None:
    async with Producer(node.address) as producer:
        # one queue, whose order decides if messages have the same store time
        await producer.send("orders", b"two pizzas", properties={"colour": "red"}, queue_key="a")
        pizza = b"pizza " + b"x" * 8000  # compressed
        await producer.send("orders", pizza, properties={"colour": "blue"}, queue_key="a")
        await producer.send("orders", b"soup", properties={"colour": "red"}, queue_key="a")

    async def found(*options: str) -> list[str]:
        ran = await run("messages", "find", "orders", "--json", *options)
        return sorted(str(item["body"])[:6].strip() for item in ran.records)

    assert await found("--text", "pizza") == ["pizza", "two pi"]
    assert await found("--text", "pizza", "--property", "colour=red") == ["two pi"]
    assert await found("--property", "colour=red", "--limit", "1", "--since", "1h") == ["soup"]
    assert await found("--since", "2000-01-01") == ["pizza", "soup", "two pi"]
    wrong = await run("messages", "find", "orders", "--since", "soon")
    assert (wrong.status, "use 30s, 10m, 2h, 3d, or a time" in wrong.err) == (1, True)


async def test_top_shows_rates_lags_and_members_by_their_names(run: Run, node: Node) -> None:
    inbox: list[Message] = []
    async with (
        Producer(node.address, client_name="shop-1") as producer,
        Consumer(node.address, "g", "orders", inbox.append, start="first", client_name="kitchen-7") as consumer,
    ):
        assert producer.client_id.startswith("shop-1#")
        await producer.send("orders", b"1")
        await eventually(lambda: len(inbox) == 1)

        async def has_caught_up() -> bool:  # the handler has returned, and its worker may not have seen that
            return not await consumer.lag()

        await eventually(has_caught_up)
        await consumer.commit()
        ran = await run("top", "--interval", "0.01", "--count", "2")
        assert "kitchen-7#" in (await run("groups", "show", "g")).out
    assert [line.split()[0] for line in ran.out.splitlines() if line.startswith(("orders", "g "))] == [
        "orders",
        "g",
    ] * 2
    groups = [line.split() for line in ran.out.splitlines() if line.startswith("g ")]
    assert [columns[:5] for columns in groups] == [["g", "1", "0", "0", "now"]] * 2
    assert groups[0][5:] == ["checking"], "one sample confirms no finding"
    with pytest.raises(ConfigError, match="client_name: 'a b' is not a name"):
        Consumer(node.address, "g", "t", client_name="a b")


async def test_brokers_and_members_report_their_own_version(run: Run, node: Node) -> None:
    assert f"Rocketlet {version('rocketlet')} (as 4.9.8)" in (await run("brokers", "list")).out
    await run("topics", "create", "t")
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        await consumer.assigned()
        (line,) = [line for line in (await run("groups", "show", "g")).out.splitlines() if " t [*]" in line]
        assert line.endswith(f"  Rocketlet {version('rocketlet')}")


# `rocketlet acl` and `rocketlet version` on a broker with accounts.


@pytest.fixture
def file(tmp_path: Path) -> AccountsFile:
    return AccountsFile(tmp_path / "plain_acl.yml")


async def test_levels_are_shown_of_the_groups_that_the_account_may_read(
    nodes: Nodes, file: AccountsFile, monkeypatch: pytest.MonkeyPatch, run_on: Callable[[Node], Run]
) -> None:
    node = await nodes.start(acl=file.acl)
    put(node, "orders", queues=2, message_type="PRIORITY")
    for group in ("shipping", "other"):
        node.broker.offsets.put(group, "orders", 0, 0)
    monkeypatch.setenv("ROCKETLET_ACCESS_KEY", "readers-key")
    monkeypatch.setenv("ROCKETLET_SECRET_KEY", SECRETS["readers-key"])
    shown = await run_on(node)("topics", "show", "orders", "--json")
    assert shown.status == 0, shown.err
    assert [(row["group"], row["level"]) for row in shown.records if "level" in row] == [
        ("shipping", 1),
        ("shipping", 0),
    ]


async def test_accounts_are_listed_made_changed_and_deleted(
    nodes: Nodes, file: AccountsFile, monkeypatch: pytest.MonkeyPatch, run_on: Callable[[Node], Run]
) -> None:
    node = await nodes.start(acl=file.acl)
    monkeypatch.setenv("ROCKETLET_SECRET_KEY", SECRETS[ADMIN])

    async def acl(*arguments: str) -> Ran:
        return await run_on(node)("acl", *arguments, "--access-key", ADMIN)

    assert {record["account"] for record in (await acl("list", "--json")).records if "account" in record} == {
        entry["accessKey"] for entry in ACCOUNTS
    }
    shown = (await acl("list")).out
    assert not any(secret in shown for secret in SECRETS.values())
    refused = await acl("put", "new-key", "--new-secret")
    assert (refused.status, "ROCKETLET_NEW_SECRET_KEY" in refused.err) == (1, True)
    monkeypatch.setenv("ROCKETLET_NEW_SECRET_KEY", "a-new-secret")
    assert (await acl("put", "new-key", "--new-secret", "--topics", "orders=PUB|SUB,secrets=DENY")).status == 0
    assert (await acl("put", "new-key", "--default-groups", "SUB")).status == 0
    (stored,) = [
        entry for entry in yaml.safe_load(file.path.read_text())["accounts"] if entry["accessKey"] == "new-key"
    ]
    assert stored["secretKey"] == "a-new-secret"
    assert stored["topicPerms"] == ["orders=PUB|SUB", "secrets=DENY"]
    assert stored["defaultGroupPerm"] == "SUB"
    wrong = await acl("put", "new-key", "--topics", "orders=EVERYTHING")
    assert (wrong.status, "EVERYTHING" in wrong.err) == (1, True)
    assert (await acl("white", "10.0.0.{1,2}", "--yes")).out == "no account is needed from 10.0.0.{1,2}\n"
    assert "10.0.0.{1,2}" in (await acl("list")).out
    assert (await acl("delete", "new-key", "--yes")).status == 0
    assert "new-key" not in (await acl("list")).out


async def test_the_last_administrator_stays_one_unless_that_is_confirmed(
    nodes: Nodes, file: AccountsFile, monkeypatch: pytest.MonkeyPatch, run_on: Callable[[Node], Run]
) -> None:
    node = await nodes.start(acl=file.acl)
    monkeypatch.setenv("ROCKETLET_SECRET_KEY", SECRETS[ADMIN])
    monkeypatch.setattr(sys, "stdin", StringIO())

    async def acl(*arguments: str) -> Ran:
        return await run_on(node)("acl", *arguments, "--access-key", ADMIN)

    def administrators() -> set[str]:
        accounts = yaml.safe_load(file.path.read_text())["accounts"]
        return {entry["accessKey"] for entry in accounts if entry.get("admin")}

    assert (await acl("put", ADMIN, "--default-topics", "PUB|SUB")).status == 0
    assert administrators() == {ADMIN}
    for change in (["put", ADMIN, "--no-admin"], ["delete", ADMIN]):
        refused = await acl(*change)
        assert (refused.status, f"{ADMIN} is the only administrator" in refused.err) == (1, True)
    assert (await acl("put", "nobody-key", "--admin")).status == 0
    assert (await acl("put", "nobody-key", "--default-topics", "SUB")).status == 0
    assert administrators() == {ADMIN, "nobody-key"}
    assert (await acl("put", "nobody-key", "--no-admin")).status == 0
    assert administrators() == {ADMIN}
    assert (await acl("put", ADMIN, "--no-admin", "--yes")).status == 0
    assert administrators() == set()


async def test_the_versions_of_all_parts_are_shown(run: Run) -> None:
    parts = {str(record["part"]): record["version"] for record in (await run("version", "--json")).records}
    assert parts.keys() == {"rocketlet", "module", "python", "broker-a"}
    assert all(parts.values())


# `rocketlet bench` on a real broker: what it measures, what it leaves behind, and its limits.


SHORT = ("--seconds", "0.2", "--rate", "200", "--in-flight", "4", "--size", "100")


async def left_behind(address: str) -> list[str]:
    async with AdminClient(address) as admin:
        names = [*await admin.topics(system=True), *await admin.groups()]
    return [name for name in names if "rocketlet-bench" in name]


async def test_what_is_sent_is_consumed_and_nothing_stays(node: Node, run: Run) -> None:
    ran = await run("bench", *SHORT, "--json")
    assert (ran.status, ran.err) == (0, "")
    sent, consumed = ran.records
    assert (sent["what"], consumed["what"]) == ("sent", "consumed")
    assert sent["messages"] == consumed["messages"]
    assert 0 < int(str(sent["messages"])) <= 40, "the rate holds"
    for record in (sent, consumed):
        waits = [float(str(record[name])) for name in ("p50_ms", "p99_ms", "p999_ms", "max_ms")]
        assert waits[0] > 0
        assert waits == sorted(waits)
        assert float(str(record["per_s"])) > 0
    assert await left_behind(node.address) == []


async def test_people_see_a_table(run: Run) -> None:
    ran = await run("bench", *SHORT, "--queues", "2")
    head, *rows = ran.out.splitlines()
    assert head.split()[:2] == ["what", "messages"]
    assert [row.split()[0] for row in rows] == ["sent", "consumed"]


async def test_sends_that_are_refused_are_counted_and_what_was_made_is_deleted(rocketlet: Broker) -> None:
    for code in ("SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE"):
        rocketlet.faults.add(Fault.answer(code, response="MESSAGE_ILLEGAL", remark="not today", times=100))
    outcome = await load.apply(rocketlet.address, Load(seconds=0.1, rate=100, size=2000, in_flight=2), Access())
    assert (len(outcome.sent.latencies_ms), outcome.missing) == (0, 0)
    assert outcome.failed > 0
    assert "not today" in outcome.fault
    assert await left_behind(rocketlet.address) == []


@pytest.mark.parametrize(
    ("least", "most", "make"),
    [
        (0.1, config.MAX_BENCH_SECONDS, lambda value: Load(seconds=value)),
        (config.MIN_BENCH_BYTES, config.MAX_BENCH_BYTES, lambda value: Load(size=value)),
        (1, config.MAX_BENCH_QUEUES, lambda value: Load(queues=value)),
        (1, config.MAX_BENCH_IN_FLIGHT, lambda value: Load(in_flight=value)),
    ],
)
def test_limits(least: float, most: float, make: Callable[[float], Load]) -> None:
    make(least)
    make(most)
    for value in (least - 0.1, most + 1):
        with pytest.raises(Exception, match="use "):
            make(value)


async def test_what_is_beyond_a_limit_is_refused_with_the_range(run: Run) -> None:
    ran = await run("bench", "--size", "7")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"rocketlet: --size 7: use 8 to {config.MAX_BENCH_BYTES}\n"


def test_percentiles_are_waits_that_were_seen() -> None:
    half = LoadSide()
    assert half.percentiles_ms((0.5, 1.0)) == [0.0, 0.0]
    for wait_ms in range(1000, 0, -1):
        half.record(float(wait_ms))
    assert half.percentiles_ms((0.5, 0.99, 0.999, 1.0)) == [500.0, 990.0, 999.0, 1000.0]


# Texts of others reach a terminal as text, never as something that the terminal obeys.


EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
HARMLESS = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
CODE = 1  # SYSTEM_ERROR

LOGGING = """
import io, logging, sys
from rocketlet.command.plumbing import logs

class Terminal(io.StringIO):
    def isatty(self):
        return True

evil = {evil!r}
real, sys.stderr = sys.stderr, Terminal()
logs.configure()
logs.log.warning("client_lost", client_id=evil, names=[evil])
logging.getLogger("library").warning("of a library: %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    logs.log.exception("failed")
sys.stdout.buffer.write(sys.stderr.getvalue().encode())
"""


def test_a_log_on_a_terminal_has_nothing_that_it_obeys(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOGGING.format(evil=EVIL))
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, check=True).stdout.decode()
    for harm in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
        assert harm not in shown
    assert shown.count(HARMLESS) >= 3
    assert "Traceback" in shown
    assert len(shown.splitlines()) > 5, "a traceback has its lines"


async def test_a_remark_of_a_name_server_is_shown_harmlessly(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65_536):
            for frame in frames.feed(data):
                writer.write(encode(Frame(CODE, frame.opaque, remark=EVIL, flag=1)))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    capsys.readouterr()
    status = await asyncio.to_thread(main, ["topics", "list", "--nameserver", f"127.0.0.1:{port}"])
    shown = capsys.readouterr().err
    server.close()
    await server.wait_closed()
    assert (status, "\x1b" in shown, HARMLESS in shown) == (1, False, True), shown


# The bar that says how far a copy is.


@pytest.mark.parametrize(
    ("done", "filled", "percent"), [(0, 0, 0), (1, 0, 0), (1250, 15, 50), (2499, 29, 99), (2500, 30, 100)]
)
def test_it_is_full_only_at_the_end(done: int, filled: int, percent: int) -> None:
    drawn = bar(MirrorProgress("orders", done, 2500))
    assert drawn == f"orders [{'#' * filled}{'-' * (WIDTH - filled)}] {percent} %, {done:,} of 2,500"


def test_a_topic_without_messages_is_copied() -> None:
    assert bar(MirrorProgress("orders", 0, 0)).endswith("100 %, 0 of 0")


@pytest.mark.parametrize("command", ["mirror", "move"])
async def test_it_is_drawn_on_a_terminal_alone(command: str, rocketlet: Broker) -> None:
    async with Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"1", b"2", b"3"])
    screen, terminal = pty.openpty()
    async with Broker() as there:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rocketlet.command.cli", command, "--from", rocketlet.address, "--to", there.address,
            stdout=asyncio.subprocess.PIPE, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)
        out, _ = await child.communicate()
    shown = os.read(screen, 65536).decode()
    os.close(screen)
    assert child.returncode == 0
    assert f"orders [{'#' * WIDTH}] 100 %, 3 of 3" in shown
    assert shown.endswith("\r\n"), "the next line is free"
    assert "[#" not in out.decode()


# The columns of `rocketlet top`.


@pytest.mark.parametrize(
    ("lag", "out_per_s", "gains_per_s", "told"),
    [
        (0, 0, 0, "now"),
        (50, 10, 0, "now"),  # messages under way
        (51, 10, 0, "never, at this rate"),
        (1, 0, 0, "never, at this rate"),
        (120, 10, 2, "1 min 0 s"),
        (7200, 10, 1, "2 h 0 min"),
    ],
)
def test_a_group_has_caught_up_when_it_reads_what_is_left_in_a_moment(
    lag: int, out_per_s: int, gains_per_s: float, told: str
) -> None:
    assert shown_duration(caught_up_s(lag, out_per_s, gains_per_s)) == told


async def test_groups_have_the_findings_of_doctor(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with (
        Consumer(node.address, "off", "t", Inbox()),
        Consumer(node.address, "well", "t", Inbox()),
        AdminClient(node.address) as admin,
    ):
        for group in ("off", "well"):
            await rebalanced(node.address, group, members=1)
        await admin.change_group("off", consume_enable=False)
        examiner = Examiner(admin, watch_s=0)

        async def findings() -> dict[str, list[str] | None]:
            return {row["group"]: row["findings"] for row in (await _sample(admin, examiner)).groups}

        assert await findings() == {"off": None, "well": None}

        async def is_seen() -> bool:
            return await findings() == {"off": ["consumption_off"], "well": []}

        await eventually(is_seen)
