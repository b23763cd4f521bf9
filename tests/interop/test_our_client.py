"""Our client and Spark source on Apache's brokers, 4.9 and 5.3, and on our own: the same tests, the same code, and nothing
shows the client which broker it faces."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    Consumer,
    Message,
    MessageIllegal,
    MessageTrace,
    Outgoing,
    Producer,
    Reject,
    RetryLater,
    Sql,
)
from rocketlet.client.member.offsets import GroupOffsets
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.migration.mirror import Mirror
from rocketlet.protocol.names import Queue, dlq_topic
from rocketlet.testing import Broker as KitBroker

from ..conftest import eventually
from ..support.handlers import Inbox
from .conftest import JAVA_NEWEST, START_S, Program, Run, missing, own
from .systems import System, feature, numbers, restarted

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]


@feature("sends, batches, one-way sends, compressed bodies, keys, tags, properties; consumption and commits")
async def test_messages_are_sent_and_consumed(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    inbox = Inbox()
    async with Producer(system.address) as producer, Consumer(system.address, group, topic, inbox, start="first"):
        for number in range(20):
            body = b"%d" % number + b"x" * 5000 * (number % 2)
            result = await producer.send(topic, body, tag="A", keys=["k1", f"k{number}"], properties={"farbe": "grün"})
            assert result.queue.topic == topic
        batch = await producer.send_batch(topic, [Outgoing(b"b%d" % number, tag="B") for number in range(40)])
        assert len(batch.offset_id.split(",")) == 40
        await producer.send_oneway(topic, b"oneway")
        await eventually(lambda: len(inbox.messages) == 61)
    assert Counter(message.tag for message in inbox.messages) == {"A": 20, "B": 40, None: 1}
    message = next(message for message in inbox.messages if "k7" in message.keys)
    assert (message.body, message.properties["farbe"]) == (b"7" + b"x" * 5000, "grün")
    assert sum(await system.committed(group, topic)) == 61


@feature("single sends that travel together in batches")
async def test_sends_of_one_turn_are_one_batch(system: System) -> None:
    topic, group, inbox = await system.topic(), await system.group(), Inbox()
    async with Producer(system.address) as producer, Consumer(system.address, group, topic, inbox, start="first"):
        await producer.send(topic, b"first")
        sends = [producer.send(topic, b"%d" % n, tag=f"T{n}", keys=f"k{n}", queue_key=f"q{n % 3}") for n in range(300)]
        results = await asyncio.gather(*sends)
        await eventually(lambda: len(inbox.messages) == 301)
    by_id = {message.message_id: message for message in inbox.messages}
    for number, result in enumerate(results):
        message = by_id[result.message_id]
        assert (message.body, message.tag, message.keys) == (b"%d" % number, f"T{number}", [f"k{number}"])
        assert (message.queue, message.queue_offset) == (result.queue, result.queue_offset)
        assert message.offset_id == result.offset_id
    for key in range(3):
        offsets = [result.queue_offset for result in results[key::3]]
        assert offsets == sorted(offsets)


@feature("a group's first commits, of several queues together")
async def test_first_commits_are_not_lost(system: System) -> None:
    topic = await system.topic()
    async with Producer(system.address) as producer:
        for _ in range(4 * 4):
            await producer.send(topic, b"x")
    cluster = ClusterView(system.address)
    await cluster.find_route(topic)
    await cluster.broker("apache")  # a commit waits for no connection
    for _ in range(30):
        group = await system.group()
        offsets = GroupOffsets(cluster, group)
        await asyncio.gather(*(offsets.store(Queue(topic, "apache", number), number + 1, 0) for number in range(4)))
        assert await system.committed(group, topic) == [1, 2, 3, 4]
    await cluster.close()


@feature("administration: topics, groups, members, owners, lag, offsets, messages by id, key and place")
async def test_a_cluster_is_administered(system: System) -> None:
    topic, group, inbox = await system.topic(), await system.group(), Inbox()
    async with AdminClient(system.address) as admin, Producer(system.address) as producer:
        sent = [await producer.send(topic, b"%d" % number, keys=f"k{number}") for number in range(8)]
        assert topic in await admin.topics()

        # Apache's broker makes its indexes a moment after it has stored a message
        async def has_all() -> bool:
            return (await admin.topic(topic)).messages == 8

        await eventually(has_all)
        async with Consumer(system.address, group, topic, inbox, start="first") as consumer:
            await eventually(lambda: len(inbox.messages) == 8)
            found = await admin.group(group)
            assert [member.client_id for member in found.members] == [consumer.client_id]
            assert {owner for queue, owner in found.owners.items() if queue.topic == topic} == {consumer.client_id}
            assert found.connections["apache"].subscriptions[topic] == "*"
        assert group in await admin.groups()
        assert group in await admin.consumed_by(topic)  # 5.3 lists the topic's own name, too
        before = await admin.progress(group, topic)
        assert sum(item.consumer_offset for item in before.values()) == 8
        changes = await admin.reset(group, topic, "first")
        assert sum(change.repeated for change in changes.values()) == 8
        assert (await admin.group(group)).lag == 8
        message = await admin.message(sent[5].offset_id)
        assert message is not None
        assert message.body == b"5"

        async def has_key() -> bool:
            return [item.body for item in await admin.messages_with_key(topic, "k3")] == [b"3"]

        await eventually(has_key)
        queue = sent[0].queue
        stored = [item.queue_offset async for part in admin.read(queue, 0, 99) for item in part]
        assert stored == list(range((await admin.topic(topic)).ranges[queue].end))
        await admin.delete_topic(topic)
        await admin.delete_group(group)


@feature("orderly consumption")
async def test_messages_come_in_order(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    inbox = Inbox()
    async with (
        Producer(system.address) as producer,
        Consumer(system.address, group, topic, inbox, start="first", orderly=True),
    ):
        for number in range(60):
            await producer.send(topic, b"%d" % number, queue_key=f"key-{number % 3}")
        await eventually(lambda: len(inbox.messages) == 60)
    for key in range(3):
        assert [int(body) for body in inbox.bodies if int(body) % 3 == key] == list(range(key, 60, 3))


@feature("broadcasting")
async def test_every_member_gets_what_is_broadcast(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    one, two = Inbox(), Inbox()
    options: dict[str, Any] = {"broadcasting": True, "start": "first"}
    async with (
        Consumer(system.address, group, topic, one, **options),
        Consumer(system.address, group, topic, two, **options),
        Producer(system.address) as producer,
    ):
        for number in range(20):
            await producer.send(topic, b"%d" % number)
        await eventually(lambda: len(one.messages) == len(two.messages) == 20)
    assert Counter(one.bodies) == Counter(two.bodies)


@feature("retries and dead letters")
async def test_failed_messages_are_redelivered_and_rejected_ones_are_kept(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    seen: list[tuple[bytes, int, str]] = []

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append((message.body, message.reconsume_times, message.topic))
        if message.body == b"bad":
            return Reject()
        return RetryLater(delay_level=1) if message.reconsume_times == 0 else None

    dead = Inbox()
    async with (
        Consumer(system.address, group, topic, handle, start="first"),
        Producer(system.address) as producer,
    ):
        await producer.send(topic, b"hard")
        await producer.send(topic, b"bad")
        await eventually(lambda: len(seen) == 3)
    assert sorted(seen) == [(b"bad", 0, topic), (b"hard", 0, topic), (b"hard", 1, topic)]
    async with Consumer(system.address, await system.group(), dlq_topic(group), dead, start="first"):
        await eventually(lambda: dead.bodies == [b"bad"])


@feature("delayed messages")
async def test_messages_are_delayed(system: System) -> None:
    topic, group = await system.topic(), await system.group()
    arrived: list[float] = []

    async def handle(message: Message) -> None:
        arrived.append(time.time() * 1000 - message.born_ms)

    async with Consumer(system.address, group, topic, handle, start="first"), Producer(system.address) as producer:
        await producer.send(topic, b"later", delay_level=4)
        await eventually(lambda: len(arrived) == 1)
    assert arrived[0] >= 1950


@feature("messages sent to a time, and recall: 5.x; refused by our client on 4.9, which would deliver immediately")
async def test_messages_are_sent_to_times(system: System, version: str) -> None:
    topic, group = await system.topic(), await system.group()
    arrived: list[tuple[bytes, float]] = []

    async def handle(message: Message) -> None:
        arrived.append((message.body, time.time() * 1000 - message.born_ms))

    async with Consumer(system.address, group, topic, handle, start="first"), Producer(system.address) as producer:
        if version.startswith("4"):
            with pytest.raises(MessageIllegal, match=r"4\.9"):
                await producer.send(topic, b"never", delay=3)
            return
        back = await producer.send(topic, b"taken back", delay=4)
        assert await producer.recall(back)
        await producer.send(topic, b"delay", delay=3)
        await producer.send(topic, b"at", at=datetime.now(UTC) + timedelta(seconds=5))
        await eventually(lambda: len(arrived) == 2)
    assert [body for body, _ in arrived] == [b"delay", b"at"]
    assert arrived[0][1] >= 1950  # Apache's cuts times to the second


@feature("transactions: commit, rollback, and an outcome that the broker asks for")
async def test_transactions_end_as_their_block_does(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, group = await system.topic(), await system.group()
    inbox = Inbox()
    asked: list[bytes] = []

    async def check(message: Message) -> bool:
        asked.append(message.body)
        return message.body != b"no"

    async with (
        Consumer(system.address, group, topic, inbox, start="first"),
        Producer(system.address, f"p{group}", check=check) as producer,
    ):
        async with producer.transaction(topic, b"yes", tag="A"):
            await producer.send(topic, b"plain", tag="A")
            await eventually(lambda: bool(inbox.messages))
            assert inbox.bodies == [b"plain"], "the transaction has not ended"
        with pytest.raises(ValueError, match="changed my mind"):
            async with producer.transaction(topic, b"no"):
                raise ValueError("changed my mind")
        await eventually(lambda: inbox.bodies == [b"plain", b"yes"])

        async def silent(*arguments: object, **options: object) -> None:
            """As if the process had died before it sent the outcome."""

        monkeypatch.setattr(ProducerTransactions, "end", silent)
        async with producer.transaction(topic, b"asked"):
            pass
        await eventually(lambda: Counter(inbox.bodies)[b"asked"] == 1)
    assert b"asked" in asked
    assert Counter(inbox.bodies) == {b"plain": 1, b"yes": 1, b"asked": 1}


@feature("filters by tags and by SQL92")
async def test_filters_choose_messages(system: System) -> None:
    topic = await system.topic()
    tagged, filtered = Inbox(), Inbox()
    sql = Sql("price > 5 AND (kind = 'a' OR kind IS NULL)")
    async with (
        Consumer(system.address, await system.group(), {topic: "A || B"}, tagged, start="first"),
        Consumer(system.address, await system.group(), {topic: sql}, filtered, start="first"),
        Producer(system.address) as producer,
    ):
        for number in range(12):
            properties = {"price": str(number)} | ({"kind": "ab"[number % 2]} if number < 10 else {})
            await producer.send(topic, b"%d" % number, tag="ABC"[number % 3], properties=properties)
        await eventually(lambda: len(tagged.messages) == 8 and len(filtered.messages) == 4)
    assert sorted(map(int, tagged.bodies)) == [number for number in range(12) if number % 3 < 2]
    assert sorted(map(int, filtered.bodies)) == [6, 8, 10, 11]


@feature("a wrong filter is refused at start")
async def test_a_wrong_filter_is_refused_at_start(system: System) -> None:
    topic = await system.topic()
    with pytest.raises(BrokerRefused, match=r"CHECK_CLIENT_CONFIG.*SUBSCRIPTION_PARSE_FAILED"):
        async with Consumer(system.address, await system.group(), {topic: Sql("price >")}, Inbox()):
            pass


@feature("rebalance among our members: no message twice, none lost")
async def test_members_hand_queues_over(system: System) -> None:
    topic, group = await system.topic(8), await system.group()
    inboxes = [Inbox() for _ in range(3)]
    sent = 0
    async with Producer(system.address) as producer, AsyncExitStack() as stack:
        first = await stack.enter_async_context(Consumer(system.address, group, topic, inboxes[0], start="first"))
        await first.assigned()
        members = [first]
        for inbox in inboxes[1:]:
            for _ in range(30):
                await producer.send(topic, b"%d" % sent)
                sent += 1
            members.append(
                await stack.enter_async_context(Consumer(system.address, group, topic, inbox, start="first"))
            )
            for member in members:
                await eventually(lambda member=member: 2 <= own(member, topic) <= 8)  # type: ignore[misc]
        await eventually(lambda: sorted(own(member, topic) for member in members) == [2, 3, 3])
        for _ in range(60):
            await producer.send(topic, b"%d" % sent)
            sent += 1
        await eventually(lambda: sum(len(inbox.messages) for inbox in inboxes) >= sent)
    counted = Counter(body for inbox in inboxes for body in inbox.bodies)
    assert counted == Counter({b"%d" % number: 1 for number in range(sent)})


@feature("groups of our members and Java's")
async def test_members_share_a_group_with_java(system: System, java: Run) -> None:
    topic, group = await system.topic(6), await system.group()
    inbox = Inbox()
    async with java("consume", ns=system.address, group=group, topic=topic) as peer:
        await peer.started()
        async with (
            Consumer(system.address, group, topic, inbox, start="first") as consumer,
            Producer(system.address) as producer,
        ):
            await eventually(lambda: own(consumer, topic) == 3)
            for number in range(60):
                await producer.send(topic, b"%d" % number)
            everything = {str(number) for number in range(60)}
            await peer.until(lambda: {body.decode() for body in inbox.bodies} | set(peer.bodies) == everything)
        assert inbox.bodies
        assert peer.bodies


@pytest.mark.parametrize("version", ["4.9.7"], indirect=True)  # others beside members that share messages
@feature("a broker that restarts")
async def test_a_broker_that_restarts_is_found_again(system: System) -> None:
    async with restarted(system):
        await system.restart_broker()


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", ["4.9.7", JAVA_NEWEST], indirect=True)  # test_secured runs it on our broker
@feature("the Spark source and sink: stream, batch reads, positions, filters")
async def test_spark_reads_and_writes_topics(system: System, tmp_path: Path) -> None:
    topic, group = await system.topic(), await system.group()
    async with Producer(system.address) as producer:
        for number in range(50):
            await producer.send(topic, b"%d" % number, properties={"number": str(number)})
    program = Path(__file__).parent / "spark_job.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), system.address, topic, group, str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert output.decode().split()[-4:] == [str(sum(range(50))), "50", "50", "9"]
    assert sum(await system.committed(group, topic)) == 50


@feature("`rocketlet mirror`, to it and from it, with the progress of groups")
async def test_a_topic_moves_there_and_back(system: System) -> None:
    topic, group = f"t{next(numbers)}", f"g{next(numbers)}"
    inbox, moved = Inbox(), Inbox()
    async with KitBroker() as source, KitBroker() as back:
        source.create_topic(topic, queues=2)
        async with Producer(source.address) as producer:
            for number in range(40):
                await producer.send(topic, b"%d" % number, tag="A", keys=f"k{number}", queue_key=str(number % 7))
            async with Consumer(source.address, group, topic, inbox, start="first") as consumer:
                await eventually(lambda: len(inbox.messages) == 40)
                await consumer.commit()
            for number in range(40, 60):
                await producer.send(topic, b"%d" % number, queue_key=str(number % 7))
        async with Mirror(source.address, system.address, topics=[topic], groups=[group]) as mirror:
            await mirror.run()
        async with Consumer(system.address, group, topic, moved):
            await eventually(lambda: len(moved.messages) >= 20)
        assert {message.body for message in moved.messages} == {b"%d" % number for number in range(40, 60)}
        async with Mirror(system.address, back.address, topics=[topic], groups=[]) as mirror:
            await mirror.run()
        wanted = sorted((m.queue.queue_id, m.queue_offset, m.body, m.message_id) for m in source.messages(topic))
        found = sorted((m.queue.queue_id, m.queue_offset, m.body, m.message_id) for m in back.messages(topic))
    assert found == wanted


# The message trace, read by Apache's own decoder: `mqadmin queryMsgTraceById`.


TRIES = 100
SENT = re.compile(r"^Pub +shop +.*ms +success", re.MULTILINE)
HANDLED = re.compile(r"^Sub +(\S+) +.*ms +success", re.MULTILINE)


async def told(peer: Program, name_server: str, message_id: str, groups: set[str]) -> None:
    """Returns when mqadmin says of the message who sent it, and that these groups have handled it."""
    words, text = ("queryMsgTraceById", "-n", name_server, "-i", message_id), ""
    for _ in range(TRIES):  # the broker's index is a moment behind its log
        before = len(peer.lines)
        await peer.write("\t".join(words))
        await peer.until(lambda before=before: "== done" in peer.lines[before:], 60)  # type: ignore[misc]
        text = "\n".join(peer.lines[before:])
        if SENT.search(text) and set(HANDLED.findall(text)) == groups:
            return
    pytest.fail(f"the trace is not there: {text}")


@pytest.mark.feature("Our client", "the message trace, read by mqadmin", client="mqadmin 4.9.8")
@pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn"))
@pytest.mark.parametrize("version", ["rocketlet", "4.9.7"], indirect=True)
async def test_apaches_tool_reads_our_trace(system: System, java: Run) -> None:
    topic, packers, readers = await system.topic(), await system.group(), await system.group()
    inbox, sends = Inbox(), []
    async with MessageTrace(system.address) as trace:
        layers = [trace.sends("shop")]
        async with (
            Producer(system.address, "shop", timeout_s=30, check=bool, middleware=layers) as producer,
            Consumer(system.address, packers, topic, inbox, start="first", middleware=[trace.handlers(packers)]),
            Consumer(system.address, readers, topic, start="first", middleware=[trace.handlers(readers)]) as reader,
        ):
            await producer.send(topic, b"order 4711", tag="A", keys=["k1", "k2"])
            async with producer.transaction(topic, b"paid", keys="k3"):
                pass
            await producer.send_oneway(topic, b"oneway")
            for _ in range(3):
                message = await reader.receive(timeout_s=START_S)
                await reader.ack(message)
                sends.append(message.message_id)
            await eventually(lambda: len(inbox.messages) == 3)
    async with java("mqadmin") as peer:
        for message_id in sends:
            await told(peer, system.address, message_id, {packers, readers})
