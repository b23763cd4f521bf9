"""Topics and groups move to another cluster: in order, complete, once, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rocketlet.broker.config import PULL_BYTES
from rocketlet.client import (
    AdminClient,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    Producer,
    Reject,
    RetryLater,
    RocketletError,
    Topic,
    TopicNotFound,
)
from rocketlet.client.admin.messages import ORIGIN
from rocketlet.client.config import ClientLimits
from rocketlet.migration import mirror as mirror_module
from rocketlet.migration.mirror import Begin, Mirror, MirrorProgress, Waiting
from rocketlet.migration.move import Move
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.config import SENT_PROPERTY_BYTES
from rocketlet.protocol.message import BatchEntry, compressed
from rocketlet.protocol.names import Queue, dlq_topic, retry_topic
from rocketlet.testing import Broker, Cluster, Fault

from ..conftest import PATIENCE_S, eventually
from ..support.handlers import Inbox


@pytest.fixture
async def there() -> AsyncIterator[Broker]:
    async with Broker() as broker:
        yield broker


async def mirrored(here: Any, there: Any, **options: Any) -> Mirror:
    """A mirror that has run once."""
    async with Mirror(here.address, there.address, **options) as mirror:
        await mirror.run()
    return mirror


@asynccontextmanager
async def following(here: Any, there: Any, **options: Any) -> AsyncIterator[Mirror]:
    async with Mirror(here.address, there.address, **options) as mirror:
        task = asyncio.create_task(mirror.run(follow=True))
        try:
            yield mirror
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def by_queue(broker: Broker, topic: str) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for message in sorted(broker.messages(topic), key=lambda message: (message.queue.queue_id, message.queue_offset)):
        found.setdefault(message.queue.queue_id, []).append(message.body)
    return found


async def test_messages_are_copied_with_all_they_have_queue_by_queue(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=3)
    async with Producer(rocketlet.address) as producer:
        for number in range(30):
            await producer.send(
                "orders",
                b"%d" % number,
                tag="new",
                keys=[f"k{number}", "all"],
                properties={"colour": "red"},
                queue_key=str(number % 5),
            )
        await producer.send("orders", b"z" * 100_000, queue_key="large")
    mirror = await mirrored(rocketlet, there, topics=["orders"])
    assert by_queue(there, "orders") == by_queue(rocketlet, "orders")
    assert sum(copy.copied for copy in mirror.copies.values()) == 31
    originals = {message.message_id: message for message in rocketlet.messages("orders")}
    copies = there.messages("orders")
    assert {message.message_id for message in copies} == originals.keys()
    for message in copies:
        original = originals[message.message_id]
        assert (message.tag, message.keys) == (original.tag, original.keys)
        origin = f"{original.queue.broker_name}:{original.queue.queue_id}:{original.queue_offset}"
        assert message.user_properties == original.user_properties | {ORIGIN: origin}
    async with AdminClient(there.address) as admin:
        assert len((await admin.topic("orders")).ranges) == 3


async def test_nothing_that_a_broker_took_stops_a_mirror_and_no_body_is_inflated(
    rocketlet: Broker, there: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that inflate to more than a message may have, that cannot be inflated, or are empty; blank tags and ids, odd
    properties, and as many as fit."""
    rocketlet.create_topic("orders", queues=1)
    queue = Queue("orders", "broker-a", 0)
    bomb, sys_flag = compressed(bytes(20 << 20))
    full = "x" * (SENT_PROPERTY_BYTES - 100)
    sent = [
        (bomb, sys_flag, "TAGS\x01bomb"),
        (b"no zlib", sys_flag, "TAGS\x01garbled"),
        (b"", 0, "KEYS\x01 \x02UNIQ_KEY\x01 \x02TAGS\x01 \x02a\x01 "),
        (b"full", 0, f"TAGS\x01full\x02long\x01{full}"),
        (b"plain", 0, ""),
    ]
    async with Producer(rocketlet.address) as producer:
        for body, flag, text in sent:
            await producer.send_stored(queue, [BatchEntry(7, body, text)], flag)
    monkeypatch.setattr("rocketlet.client.message.decompressed", lambda body, flag: pytest.fail("inflated"))
    await mirrored(rocketlet, there, topics=["orders"])
    async with AdminClient(there.address) as admin:
        copies = [message async for messages in admin.read(queue, 0, len(sent)) for message in messages]
    assert [(copy.record.body, copy.record.sys_flag, copy.record.flag) for copy in copies] == [
        (body, flag, 7) for body, flag, _ in sent
    ]
    assert [copy.tag for copy in copies] == ["bomb", "garbled", " ", "full", None]
    assert [copy.properties[ORIGIN] for copy in copies] == [f"broker-a:0:{number}" for number in range(len(sent))]
    assert copies[3].properties["DROPPED_PROPERTIES"] == "long"


async def test_many_messages_full_of_properties_are_copied_in_requests_that_brokers_take(
    rocketlet: Broker, there: Broker
) -> None:
    rocketlet.create_topic("orders", queues=1)
    queue = Queue("orders", "broker-a", 0)
    async with Producer(rocketlet.address) as producer:
        for _ in range(200):
            await producer.send_stored(queue, [BatchEntry(0, b"x", "a\x01" + "x" * 30_000)], 0)
    mirror = await mirrored(rocketlet, there, topics=["orders"])
    assert sum(copy.copied for copy in mirror.copies.values()) == 200


async def test_a_mirror_continues_behind_the_newest_copy(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer, Producer(there.address) as stranger:
        await producer.send_batch("orders", [b"1", b"2"])
        await mirrored(rocketlet, there)
        await stranger.send_batch("orders", [b"not ours"] * 300)
        await producer.send_batch("orders", [b"3", b"4"])
        second = await mirrored(rocketlet, there)
        third = await mirrored(rocketlet, there)
    assert [body for body in by_queue(there, "orders")[0] if body != b"not ours"] == [b"1", b"2", b"3", b"4"]
    assert sum(copy.copied for copy in second.copies.values()) == 2
    assert sum(copy.copied for copy in third.copies.values()) == 0


@pytest.mark.parametrize(
    "origin", ["orders", "::", "a:b:c", "broker-a:0:", "broker-a:0:-1", "broker-a:0:٣", f"a:0:{10**19}"]
)
async def test_a_stranger_who_uses_a_mirrors_property_is_a_stranger(
    rocketlet: Broker, there: Broker, origin: str
) -> None:
    for broker in (rocketlet, there):
        broker.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"1", properties={ORIGIN: origin})
        await mirrored(rocketlet, there, topics=["orders"])
        async with Producer(there.address) as stranger:
            await stranger.send("orders", b"a stranger's", properties={ORIGIN: origin})
        await producer.send("orders", b"2")
        await mirrored(rocketlet, there, topics=["orders"])
    assert by_queue(there, "orders") == {0: [b"1", b"a stranger's", b"2"]}


async def test_a_mirror_continues_behind_copies_that_take_several_answers_to_read(
    rocketlet: Broker, there: Broker
) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [bytes(PULL_BYTES // 8)] * 20)
    await mirrored(rocketlet, there)
    again = await mirrored(rocketlet, there)
    assert sum(copy.copied for copy in again.copies.values()) == 0


@pytest.mark.parametrize(("begin", "wanted"), [(Begin(last=2), 2), (Begin(last=0), 0), (Begin(since_ms=0), 5)])
async def test_it_begins_where_it_is_configured(rocketlet: Broker, there: Broker, begin: Begin, wanted: int) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"%d" % number for number in range(5)])
    await mirrored(rocketlet, there, begin=begin)
    assert len(there.messages("orders")) == wanted


async def test_a_group_continues_at_the_same_message(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=2)
    inbox = Inbox()
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_group(GroupConfig("shop", retry_max_times=3))
    async with Producer(rocketlet.address) as producer, Producer(there.address) as stranger:
        await producer.send_batch("orders", [b"%d" % number for number in range(20)], queue_key="a")
        async with Consumer(rocketlet.address, "shop", "orders", inbox, start="first") as consumer:
            await eventually(lambda: len(inbox.messages) == 20)
            await consumer.commit()
        await stranger.send("orders", b"before the first copy")
        await producer.send_batch("orders", [b"%d" % number for number in range(20, 30)], queue_key="a")
    mirror = await mirrored(rocketlet, there, groups=["shop"])
    assert mirror.offsets
    async with AdminClient(there.address) as admin:
        assert {config.retry_max_times for config in (await admin.group_configs("shop")).values()} == {3}
    moved = Inbox()
    async with Consumer(there.address, "shop", "orders", moved):
        await eventually(lambda: len(moved.messages) >= 10)
    assert [m.body for m in moved.messages if ORIGIN in m.properties] == [b"%d" % number for number in range(20, 30)]


async def test_what_waits_at_the_source_is_counted_until_it_is_handled(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    failing, mended = Inbox(RetryLater(delay_level=5)), Inbox()
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"at once")
        await producer.send("orders", b"in 2 hours", delay_level=18)
        async with Consumer(rocketlet.address, "shop", "orders", failing, start="first") as consumer:
            await eventually(lambda: len(failing.messages) == 1)
            await consumer.commit()
        async with Mirror(rocketlet.address, there.address, topics=["orders"]) as mirror:
            await mirror.run()
            assert await mirror.waiting() == Waiting({"shop": 1}, {"orders": 1})
            rocketlet.clock.advance(minutes=2)
            await eventually(lambda: len(rocketlet.messages(retry_topic("shop"))) == 1)
            assert await mirror.waiting() == Waiting({"shop": 1}, {"orders": 1})  # it lies in the retry topic now
            async with Consumer(rocketlet.address, "shop", "orders", mended):
                await eventually(lambda: mended.bodies == [b"at once"])
            rocketlet.clock.advance(hours=2)
            await eventually(lambda: len(rocketlet.messages("orders")) == 2)
            assert await mirror.waiting() == Waiting({}, {})
            await mirror.run()
    assert by_queue(there, "orders") == {0: [b"at once", b"in 2 hours"]}


async def test_what_is_sent_to_a_time_is_counted_by_its_topic(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"in 2 days", delay=2 * 86_400)
        await producer.send("orders", b"now", delay=0.001)
        await eventually(lambda: [message.body for message in rocketlet.messages("orders")] == [b"now"])
    async with Mirror(rocketlet.address, there.address, topics=["orders"]) as mirror:
        assert await mirror.waiting() == Waiting({}, {"orders": 1})


async def test_what_is_sent_meanwhile_follows_and_so_do_offsets(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=2)
    inbox = Inbox()
    async with (
        Producer(rocketlet.address) as producer,
        Consumer(rocketlet.address, "shop", "orders", inbox),
        following(rocketlet, there, topics=["orders"]) as mirror,
    ):
        for number in range(20):
            await producer.send("orders", b"%d" % number)
        await eventually(lambda: len(there.messages("orders")) == 20)
        await rocketlet.consumed("shop", "orders")
        await eventually(lambda: sum(mirror.offsets.values()) == 20)
    assert by_queue(there, "orders") == by_queue(rocketlet, "orders")


async def test_a_send_whose_answer_is_lost_is_not_sent_again(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"%d" % number for number in range(10)])
    there.faults.add(Fault.close("SEND_BATCH_MESSAGE", after=True, times=1))
    await mirrored(rocketlet, there)
    assert by_queue(there, "orders") == by_queue(rocketlet, "orders")


async def test_a_mirror_that_follows_continues_when_either_end_was_killed(rocketlet: Broker, there: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    bodies = [b"%d" % number for number in range(30)]
    async with (
        Producer(rocketlet.address, timeout_s=PATIENCE_S) as producer,
        following(rocketlet, there, topics=["orders"]),
    ):
        kills = (there.akill, lambda: asyncio.to_thread(rocketlet.kill), None)
        for part, kill in enumerate(kills):
            for body in bodies[part * 10 : part * 10 + 10]:
                await producer.send("orders", body)
            await eventually(lambda part=part: len(there.messages("orders")) >= part * 10 + 10)  # type: ignore[misc]
            if kill is not None:
                await kill()
    assert by_queue(there, "orders") == {0: bodies}


async def test_patience_counts_from_a_failure_and_again_when_something_was_copied(
    rocketlet: Broker, there: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may take hours before the first failure, and between two."""
    rocketlet.create_topic("orders", queues=1)
    now_s, rounds = 0.0, 0
    copy = Mirror._copy

    async def failing(mirror: Mirror, topic: Topic) -> None:
        nonlocal now_s, rounds
        now_s, rounds = now_s + 3600, rounds + 1
        await producer.send("orders", b"%d" % rounds)
        await copy(mirror, await mirror._source.topic(topic.name))
        if rounds < 4:
            raise ConnectionFailed("it is away for a moment")

    monkeypatch.setattr(mirror_module, "_now_s", lambda: now_s)
    monkeypatch.setattr(Mirror, "_copy", failing)
    async with Producer(rocketlet.address) as producer:
        await mirrored(rocketlet, there, topics=["orders"], limits=ClientLimits(mirror_backoff_s=0.0))
        monkeypatch.setattr(Mirror, "_copy", copy)
        async with Mirror(
            rocketlet.address,
            there.address,
            topics=["orders"],
            patience_s=10,
            limits=ClientLimits(mirror_backoff_s=0.0),
        ) as mirror:
            failures = 0

            async def away() -> list[Topic]:
                nonlocal now_s, failures
                now_s, failures = now_s + 4, failures + 1
                raise ConnectionFailed("it stays away")

            monkeypatch.setattr(mirror, "_topics", away)
            with pytest.raises(ConnectionFailed, match="stays away"):
                await mirror.run()
    assert rounds == 4
    assert failures == 4, "the first one, and those within 10 s of it, are waited for"


async def test_queues_of_several_brokers_are_spread(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=5)
    async with Producer(rocketlet.address) as producer, Cluster(brokers=2) as cluster:
        for number in range(50):
            await producer.send("orders", b"%d" % number, queue_key=str(number))
        await mirrored(rocketlet, cluster)
        copies = [message for broker in cluster.brokers for message in broker.messages("orders")]
        assert sorted(message.body for message in copies) == sorted(m.body for m in rocketlet.messages("orders"))
        again = await mirrored(rocketlet, cluster)
        assert sum(copy.copied for copy in again.copies.values()) == 0


async def test_a_topic_that_nobody_knows_is_reported_and_not_waited_for(rocketlet: Broker, there: Broker) -> None:
    async with Mirror(rocketlet.address, there.address, topics=["nobody"], patience_s=math.inf) as mirror:
        with pytest.raises(TopicNotFound, match="no name server knows the topic nobody"):
            await mirror.run()


async def test_what_cannot_be_mirrored_is_refused(rocketlet: Broker, there: Broker) -> None:
    with pytest.raises(ConfigError, match="both"):
        Mirror(there.address, there.address)
    with pytest.raises(ConfigError, match="give only one of them"):
        Begin(last=1, since_ms=1)
    rocketlet.create_topic("orders", queues=2)
    async with Producer(rocketlet.address) as producer:
        for number in range(8):
            await producer.send("orders", b"%d" % number)
        async with Producer(there.address) as other:
            await other.send("orders", b"x")
            (message, *_) = there.messages("orders")
            await other.send("orders", b"y", properties={ORIGIN: "another-broker:0:7"}, queue=message.queue)
    if message.queue.queue_id < 2:
        with pytest.raises(ConfigError, match="brokers of one cluster have changed"):
            await mirrored(rocketlet, there)


async def test_it_says_how_far_it_is_also_when_it_continues(
    rocketlet: Broker, there: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocketlet.create_topic("orders", queues=2)
    async with Producer(rocketlet.address) as producer:
        for number in range(10):
            await producer.send("orders", b"%d" % number)
    async with Mirror(rocketlet.address, there.address) as mirror:
        assert mirror.progress is None
        await mirror.run()
        assert mirror.progress == MirrorProgress("orders", 10, 10)
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"more")
    async with Mirror(rocketlet.address, there.address) as mirror:
        store, seen = Producer.send_stored, []

        async def noting(producer: Producer, *arguments: Any) -> Any:
            seen.append(mirror.progress)
            return await store(producer, *arguments)

        monkeypatch.setattr(Producer, "send_stored", noting)
        await mirror.run()
    assert seen == [MirrorProgress("orders", 10, 11)]


# The users of a cluster continue at another one, and back: nothing is lost, nothing is handed out twice.


SOON = ClientLimits(move_poll_interval_s=0.05, move_quiet_s=0.2)


async def handled(address: str, count: int, group: str = "shop") -> list[str]:
    """The bodies that a member gets, which acknowledges this many and stops."""
    inbox = Inbox()
    async with Consumer(address, group, "orders", inbox, start="first") as consumer:
        await eventually(lambda: len(inbox.messages) >= count)
        await consumer.commit()
    return [message.body.decode() for message in inbox.messages]


async def test_a_group_goes_to_another_cluster_and_back(rocketlet: Broker, there: Broker) -> None:
    here = rocketlet
    tries: list[Message] = []

    def fails(message: Message) -> Reject | RetryLater | None:
        tries.append(message)
        return Reject("no") if message.body == b"bad" else RetryLater() if message.body == b"later" else None

    async with AdminClient(here.address) as admin:
        await admin.create_topic("orders", queues=1)
    async with Producer(here.address) as producer:
        for body in (b"bad", b"later", *(b"a%d" % number for number in range(5))):
            await producer.send("orders", body)
        async with Consumer(here.address, "shop", "orders", fails, start="first") as consumer:
            await eventually(lambda: len(tries) >= 7)
            await consumer.commit()
        for number in range(5, 10):
            await producer.send("orders", b"a%d" % number)
    async with Move(here.address, there.address, limits=SOON) as move:
        plan = await move.plan()
        assert plan.topics == {"orders": 12}
        assert [(one.name, one.members, one.lag, one.retries, one.dead) for one in plan.groups] == [
            ("shop", 0, 5, 1, 1)
        ]
        assert plan.blocks == []
        assert await move.copy() == 13, "and the dead letter"
        with pytest.raises(ConfigError, match="--producers"):
            await move.take("shop")
        assert await move.close() == 0
        async with Producer(there.address) as producer:
            await producer.send("orders", b"early")  # before the group has its offsets there
        taking = asyncio.create_task(move.take("shop"))

        def is_taken() -> bool:
            here.clock.advance(0.2)  # the retry is due in 10 s
            return taking.done()

        await eventually(is_taken)
        taken = await taking
    assert (taken.lag, taken.retries, taken.dead) == (6, 1, 1)
    with pytest.raises(RocketletError):
        async with Producer(here.address, retries=0) as producer:
            await producer.send("orders", b"too late")
    async with AdminClient(there.address) as admin:
        assert (await admin.topic(dlq_topic("shop"))).messages == 1
    assert sorted(await handled(there.address, 7)) == sorted(
        ["later", "early", *(f"a{number}" for number in range(5, 10))]
    )
    async with Producer(there.address) as producer:
        for number in range(10, 15):
            await producer.send("orders", b"a%d" % number)
    assert await handled(there.address, 3) == [f"a{number}" for number in range(10, 15)]
    async with Producer(there.address) as producer:
        await producer.send("orders", b"last")
    async with Move(there.address, here.address, returns=True, limits=SOON) as back:
        assert await back.copy() == 7, "without what came from there"
        await back.close()
        assert (await back.take("shop")).lag == 1
        assert await back.copy() == 0
    assert await handled(here.address, 1) == ["last"]
    async with Producer(here.address) as producer:
        await producer.send("orders", b"again here")
    assert await handled(here.address, 1) == ["again here"]


async def test_a_group_with_members_over_there_is_not_taken(rocketlet: Broker, there: Broker) -> None:
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    await handled(rocketlet.address, 1)
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
        async with Consumer(there.address, "shop", "orders", Inbox()) as consumer:
            await consumer.assigned()
            assert "has members at the target already" in (await move.plan()).blocks[0]
            with pytest.raises(ConfigError, match="members at the target"):
                await move.take("shop")


async def test_members_at_the_source_are_waited_for(rocketlet: Broker, there: Broker) -> None:
    said: list[str] = []
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    async with Move(rocketlet.address, there.address, say=said.append, limits=SOON) as move:
        async with Consumer(rocketlet.address, "shop", "orders", Inbox(), start="first") as consumer:
            await consumer.assigned()
            await move.close()
            taking = asyncio.create_task(move.take("shop"))
            await eventually(lambda: said[-1:] == ["shop has 1 member at the source: stop all"])
            assert not taking.done()
        await taking


async def test_a_retry_is_moved_once_though_the_move_ends_before_it_is_noted(
    rocketlet: Broker, there: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Message] = []

    def fails(message: Message) -> RetryLater:
        tries.append(message)
        return RetryLater()

    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    async with Consumer(rocketlet.address, "shop", "orders", fails, start="first") as consumer:
        await eventually(lambda: bool(tries))
        await consumer.commit()
    rocketlet.clock.advance(60)
    reset, ended = AdminClient.reset, False

    async def ends(admin: AdminClient, group: str, topic: str, to: Any) -> Any:
        nonlocal ended
        if topic == retry_topic("shop") and not ended:
            ended = True
            raise ConnectionFailed("killed")
        return await reset(admin, group, topic, to)

    monkeypatch.setattr(AdminClient, "reset", ends)
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
        with pytest.raises(ConnectionFailed):
            await move.take("shop")
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        assert (await move.take("shop")).retries == 1
    async with AdminClient(there.address) as admin:
        assert (await admin.topic(retry_topic("shop"))).messages == 1


async def test_a_dead_letter_of_a_moved_message_comes_back_and_may_be_replayed_over_there(
    rocketlet: Broker, there: Broker
) -> None:
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"bad")
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
    refused: list[Message] = []

    def refuses(message: Message) -> Reject:
        refused.append(message)
        return Reject("no")

    async with Consumer(there.address, "shop", "orders", refuses, start="first"):
        await eventually(lambda: bool(refused))
    async with AdminClient(there.address) as admin:
        ((queue, span),) = (await admin.topic(dlq_topic("shop"))).ranges.items()
        async for (dead,) in admin.read(queue, span.begin, span.end):
            await admin.send_again(dead)
    async with Move(there.address, rocketlet.address, returns=True, limits=SOON) as back:
        assert await back.copy() == 2, "the dead letter, and the message that was sent again"
    assert [message.body for message in rocketlet.messages("orders")] == [b"bad", b"bad"]
    assert len(rocketlet.messages(dlq_topic("shop"))) == 1
