"""The consumer on a real broker: what handlers get, what outcomes mean, where a group begins."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import ConfigError, Consumer, Message, Outgoing, Producer, Reject, RetryLater
from rocketlet.client.application import stop_signal
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits, PullLimits
from rocketlet.client.consuming.deliveries import Deliveries, HeldRun
from rocketlet.client.member.membership import heartbeat_queues
from rocketlet.client.member.offsets import Position
from rocketlet.protocol import config, group_bodies
from rocketlet.protocol.bodies import (
    ConsumerData,
    GroupConfig,
    Heartbeat,
    decode_heartbeat,
    encode_group,
    encode_heartbeat,
)
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill
from ..support.requests import send


@pytest.fixture
async def topic_consumer(wire: Wire) -> str:
    await create_topic(wire, "t")
    return "t"


async def test_a_handler_gets_each_message_once(node: Node, topic_consumer: str) -> None:
    await fill(node, 50, tag="A", keys="k", properties={"p": "v"})
    inbox = Inbox()
    async with Consumer(node.address, "g", topic_consumer, inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 50)
    assert sorted(inbox.bodies) == sorted(b"%d" % number for number in range(50))
    message = inbox.messages[0]
    assert (message.topic, message.tag, message.keys, message.properties["p"]) == ("t", "A", ["k"], "v")
    assert message.reconsume_times == 0
    assert message.born_ms <= message.store_ms


async def test_batches_are_of_one_queue_and_as_long_as_asked(node: Node, topic_consumer: str) -> None:
    await fill(node, 40)
    sizes: list[int] = []
    queues: list[set[Queue]] = []

    async def handle(messages: Sequence[Message]) -> None:
        sizes.append(len(messages))
        queues.append({message.queue for message in messages})

    async with Consumer(node.address, "g", topic_consumer, handle, batch_size=4, start="first"):
        await eventually(lambda: sum(sizes) == 40)
    assert max(sizes) <= 4
    assert all(len(found) == 1 for found in queues)


async def test_what_was_acknowledged_is_not_delivered_to_the_next_run(node: Node, topic_consumer: str) -> None:
    await fill(node, 20)
    first, second = Inbox(), Inbox()
    async with Consumer(node.address, "g", topic_consumer, first, start="first"):
        await eventually(lambda: len(first.messages) == 20)
    await fill(node, 5)
    async with Consumer(node.address, "g", topic_consumer, second, start="first"):
        await eventually(lambda: len(second.messages) >= 5)
    assert len(second.messages) == 5


@pytest.mark.parametrize(("start", "expected"), [("first", 6), ("last", 3)])
async def test_a_new_group_begins_where_it_is_configured(
    node: Node, topic_consumer: str, start: Any, expected: int
) -> None:
    await fill(node, 3)
    inbox = Inbox()
    async with Consumer(node.address, "g", topic_consumer, inbox, start=start) as consumer:
        await consumer.assigned()
        await fill(node, 3)
        await eventually(lambda: len(inbox.messages) >= expected)
    assert len(inbox.messages) == expected


async def test_a_new_group_can_begin_at_a_time(node: Node, topic_consumer: str) -> None:
    await fill(node, 4)
    await eventually(lambda: int(time.time() * 1000) > node.broker.store.now_ms + 2)
    moment = int(time.time() * 1000)
    await eventually(lambda: int(time.time() * 1000) > moment + 2)
    await fill(node, 4)
    inbox = Inbox()
    async with Consumer(node.address, "g", topic_consumer, inbox, start=moment):
        await eventually(lambda: sum(message.store_ms > moment for message in inbox.messages) == 4)
    # as on Apache's broker, the message nearest to the moment is the first, which may be just before it
    assert len(inbox.messages) <= 4 + 4


async def test_tags_are_checked_by_text_where_hashes_collide(node: Node, topic_consumer: str) -> None:
    async with Producer(node.address) as producer:
        for tag in ("AaAa", "BBBB", "AaBB", "C"):  # the first three have one hash in Java
            await producer.send(topic_consumer, tag.encode(), tag=tag)
    inbox = Inbox()
    async with Consumer(node.address, "g", {topic_consumer: "BBBB || C"}, inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 2)
    assert sorted(inbox.bodies) == [b"BBBB", b"C"]


async def test_several_topics_are_consumed_together(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    await create_topic(wire, "u")
    await fill(node, 3, "t")
    await fill(node, 4, "u")
    inbox = Inbox()
    async with Consumer(node.address, "g", {"t": "*", "u": "*"}, inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 7)
    assert {message.topic for message in inbox.messages} == {"t", "u"}


async def test_a_failed_message_is_redelivered_later_and_is_dead_at_last(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(message.reconsume_times)
        assert (message.topic, message.body) == ("t", b"0")
        raise RuntimeError("cannot handle this")

    await fill(node, 1)
    async with Consumer(node.address, "g", "t", handle, start="first", max_reconsume_times=2):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert tries == [0, 1, 2]


async def test_outcomes_choose_the_delay_or_the_dead_letters(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    outcomes: list[Any] = [RetryLater(delay_level=7), Reject()]
    seen: list[Message] = []

    async def handle(message: Message) -> Any:
        seen.append(message)
        return outcomes[len(seen) - 1]

    await fill(node, 1)
    async with Consumer(node.address, "g", "t", handle, start="first"):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert seen[1].properties["DELAY"] == "7"
    assert len(seen) == 2


async def test_an_orderly_handler_sees_a_queue_in_order_and_a_failure_holds_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    await fill(node, 30, queue_key="same")
    seen: list[bytes] = []

    async def handle(message: Message) -> RetryLater | None:
        seen.append(message.body)
        await asyncio.sleep(0)
        return RetryLater() if message.body == b"3" and seen.count(b"3") < 4 else None

    async with Consumer(node.address, "g", "t", handle, orderly=True, suspend_queue_s=0.01, start="first"):
        await eventually(lambda: b"29" in seen)
    assert seen == [b"0", b"1", b"2", b"3", b"3", b"3", b"3", *(b"%d" % number for number in range(4, 30))]


async def test_no_more_handlers_run_concurrently_than_allowed(node: Node, topic_consumer: str) -> None:
    await fill(node, 30)
    running, most, handled = 0, 0, 0
    three = asyncio.Barrier(3)

    async def handle(message: Message) -> None:
        nonlocal running, most, handled
        running += 1
        most = max(most, running)
        await three.wait()
        running -= 1
        handled += 1

    async with Consumer(node.address, "g", topic_consumer, handle, concurrency=3, start="first"):
        await eventually(lambda: handled == 30)
    assert most == 3


async def test_a_plain_function_runs_in_a_thread(node: Node, topic_consumer: str) -> None:
    await fill(node, 3)
    threads: set[str] = set()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        threads.add(threading.current_thread().name)
        handled.append(message.body)

    async with Consumer(node.address, "g", topic_consumer, handle, start="first"):
        await eventually(lambda: len(handled) == 3)
    assert threading.main_thread().name not in threads


async def test_messages_can_be_iterated_and_are_acknowledged_by_the_next(node: Node, one_queue: None) -> None:
    await fill(node, 10)
    seen: list[bytes] = []
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        async for message in consumer:
            seen.append(message.body)
            if len(seen) == 4:
                break
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        async for message in consumer:
            seen.append(message.body)
            if message.body == b"9":
                break
    assert seen == [b"0", b"1", b"2", b"3", *(b"%d" % number for number in range(3, 10))]


async def test_batches_can_be_iterated(node: Node, one_queue: None) -> None:
    async with Producer(node.address) as producer:
        await producer.send_batch("t", [b"%d" % number for number in range(10)])
    sizes: list[int] = []
    async with Consumer(node.address, "g", "t", batch_size=4, start="first") as consumer:
        async for messages in consumer.batches():
            sizes.append(len(messages))
            if sum(sizes) == 10:
                break
    assert sizes == [4, 4, 2]


async def test_middleware_is_around_every_handling(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 2)
    trace: list[str] = []

    def layer(name: str) -> Any:
        async def around(message: Message, call: Any) -> Any:
            trace.append(f"{name}>{message.body.decode()}")
            try:
                return await call(message)
            except RuntimeError:
                return Reject()
            finally:
                trace.append(f"<{name}")

        return around

    def handle(message: Message) -> None:
        if message.body == b"1":
            raise RuntimeError("cannot handle this")

    options: dict[str, Any] = {"start": "first", "concurrency": 1, "middleware": [layer("a"), layer("b")]}
    async with Consumer(node.address, "g", "t", handle, **options):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert trace == ["a>0", "b>0", "<b", "<a", "a>1", "b>1", "<b", "<a"]


async def test_a_consumer_is_started_once_and_stopped_at_any_time(node: Node, topic_consumer: str) -> None:
    inbox = Inbox()
    consumer = Consumer(node.address, "g", topic_consumer, inbox)
    await consumer.stop()
    with pytest.raises(ConfigError, match="has a handler"):
        await anext(consumer)
    await consumer.start()
    await fill(node, 3)
    await eventually(lambda: len(inbox.messages) == 3)
    await consumer.stop()
    await consumer.stop()
    assert not node.broker.groups.members_of("g")
    with pytest.raises(ConfigError, match="started before; create a new one"):
        await consumer.start()
    with pytest.raises(ConfigError, match="started before"):
        async with consumer:
            pass


async def test_listeners_are_notified_of_queues_that_come_and_go(node: Node, topic_consumer: str) -> None:
    came: set[Queue] = set()
    went: set[Queue] = set()

    async def on_revoked(queues: set[Queue]) -> None:
        went.update(queues)

    async with Consumer(
        node.address, "g", topic_consumer, Inbox(), on_assigned=came.update, on_revoked=on_revoked
    ) as consumer:
        owned = await consumer.assigned()
        assert came == owned
        assert {queue.queue_id for queue in owned if queue.topic == topic_consumer} == {0, 1, 2, 3}
    assert went == came


async def test_flow_control_bounds_what_is_cached(node: Node, one_queue: None) -> None:
    async with Producer(node.address) as producer:
        for _ in range(20):
            await producer.send_batch("t", [Outgoing(b"x" * 100)] * 100)
    release = asyncio.Event()
    handled = 0

    async def handle(message: Message) -> None:
        nonlocal handled
        await release.wait()
        handled += 1

    limits = PullLimits(batch_size=64, messages=200)
    async with Consumer(node.address, "g", "t", handle, start="first", pull=limits) as consumer:
        (item,) = [consumer.queues[queue] for queue in await consumer.assigned() if queue.topic == "t"]
        await eventually(lambda: item.pull.is_throttled)
        assert 200 < item.messages <= 264
        release.set()
        await eventually(lambda: handled == 2000)


async def test_a_cancelled_handler_is_no_acknowledgement(node: Node, one_queue: None) -> None:
    await fill(node, 1)
    started = asyncio.Event()

    async def handle(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    async with Consumer(node.address, "g", "t", handle, start="first", drain_s=0.01):
        await started.wait()
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first"):
        await eventually(lambda: inbox.bodies == [b"0"])


async def test_a_group_that_may_not_consume_gets_nothing_and_no_error(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 1)
    group = encode_group(GroupConfig("g", consume_enable=False))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first") as consumer:
        await consumer.assigned()
        assert inbox.messages == []


# Where a consumer is in its queues: pause, seek, how far it is, and what is committed or kept in a file.


@pytest.mark.parametrize("place", ["earliest", None, True, -1, 1.5e12, 2**63, {Queue("t", "broker-a", 0): "5"}])
async def test_another_place_is_no_place_to_continue(node: Node, one_queue: None, place: Any) -> None:
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        with pytest.raises(ConfigError, match=r"seek: .* give 'first', 'last', a time in ms since 1970"):
            await consumer.seek(place)
    for state in (Consumer(node.address, "g", "t"), consumer):
        for call in (state.seek("first"), state.assigned()):
            with pytest.raises(ConfigError, match="this consumer has"):
                await call


async def test_nothing_begins_after_pause_until_it_is_resumed(node: Node, wire: Wire) -> None:
    """Not what is cached, nor what a held pull brings, nor what another queue brings that comes later."""
    await create_topic(wire, "t", 2)
    release = asyncio.Event()
    begun: list[bytes] = []

    async def handle(message: Message) -> None:
        begun.append(message.body)
        await release.wait()

    async with Consumer(node.address, "g", "t", handle, start="first", concurrency=3) as consumer:
        await consumer.assigned()
        await fill(node, 10)
        await eventually(lambda: len(begun) == 3)
        await consumer.pause()
        release.set()
        await fill(node, 10)
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 3, 3, 6)))
        await eventually(lambda: Queue("t", "broker-a", 2) in consumer.assignment())
        await fill(node, 10)
        await consumer.commit()
        assert len(begun) == 3
        await consumer.resume()
        await eventually(lambda: len(begun) == 30)
        (one,) = [queue for queue in consumer.assignment() if queue == Queue("t", "broker-a", 0)]
        await consumer.pause([one])
        async with Producer(node.address) as producer:
            await producer.send("t", b"held", queue=one)
            await producer.send("t", b"free", queue=Queue("t", "broker-a", 1))
        await eventually(lambda: b"free" in begun)
        assert b"held" not in begun
        await consumer.resume([one])
        await eventually(lambda: b"held" in begun)
        with pytest.raises(ConfigError, match="does not own"):
            await consumer.pause([Queue("t", "broker-z", 0)])


async def test_seek_goes_back_and_forth(node: Node, one_queue: None) -> None:
    await fill(node, 5)
    inbox = Inbox()
    queue = Queue("t", "broker-a", 0)
    async with Consumer(node.address, "g", "t", inbox, start="first", concurrency=1) as consumer:
        await eventually(lambda: len(inbox.messages) == 5)
        await consumer.seek({queue: 3})
        assert node.broker.offsets.get("g", "t", 0) == 3
        await eventually(lambda: len(inbox.messages) == 7)
        await consumer.seek("first")
        await eventually(lambda: len(inbox.messages) == 12)
        await consumer.pause()
        await fill(node, 3)
        await consumer.seek("last", [queue])
        await consumer.resume()
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 13)
        await consumer.seek(inbox.messages[-1].store_ms)
        await eventually(lambda: len(inbox.messages) >= 14)
        with pytest.raises(ConfigError, match="does not own"):
            await consumer.seek({Queue("t", "broker-z", 0): 0})
    assert inbox.bodies[:13] == [b"0", b"1", b"2", b"3", b"4", b"3", b"4", b"0", b"1", b"2", b"3", b"4", b"0"]
    assert inbox.messages[-1].queue_offset == 8


async def test_a_consumer_knows_how_far_it_is(node: Node, one_queue: None) -> None:
    await fill(node, 4)
    queue = Queue("t", "broker-a", 0)
    async with Consumer(node.address, "g", "t", start="first", commit_interval_s=300) as consumer:
        seen = [await anext(consumer) for _ in range(4)]
        assert [message.body for message in seen] == [b"0", b"1", b"2", b"3"]
        at = (await consumer.positions())[queue]
        assert (at.acknowledged, at.end, at.lag) == (3, 4, 1)
        assert at.committed in (None, *range(4)), "a pull may have carried a commit"
        assert await consumer.lag() == 1
        await consumer.ack(seen[-1])
        await consumer.commit()
        assert (await consumer.positions())[queue] == Position(4, 4, 4)
        assert await consumer.lag() == 0


async def test_lag_does_not_count_messages_that_no_member_wants(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))  # no held pull ends
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", {"t": "a"}, start="first", commit_interval_s=300) as consumer:
        await send(wire, b"0", tag="a")
        message = await anext(consumer)
        for body in (b"1", b"2"):
            await send(wire, body, tag="b")
        assert await consumer.lag() == 3
        await consumer.ack(message)
        await consumer.commit()
        assert await consumer.lag() == 0
        await send(wire, b"3", tag="b")
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 4)
        assert await consumer.lag() == 0
        await consumer.seek({Queue("t", "broker-a", 0): 0})
        message = await anext(consumer)
        assert (message.body, await consumer.lag()) == (b"0", 4)
        await consumer.ack(message)
        await consumer.commit()
        assert await consumer.lag() == 0


async def test_an_expired_offset_is_corrected(node: Node, one_queue: None) -> None:
    await fill(node, 2)
    node.broker.offsets.put("g", "t", 0, 999)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox) as consumer:
        await consumer.assigned()
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 2)
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_commits_happen_on_an_interval(node: Node, one_queue: None) -> None:
    await fill(node, 3)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", commit_interval_s=0.01):
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 3)


async def test_a_queue_continues_though_its_new_offset_cannot_be_kept(
    node: Node, one_queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Consumer(node.address, "g", "t", broadcasting=True, offsets_file=tmp_path / "offsets.json") as consumer:
        (queue,) = await consumer.assigned()
        pulled: list[object] = []

        async def refused(_: object) -> None:
            raise OSError("no room")

        with monkeypatch.context() as patches:
            patches.setattr(consumer._membership, "commit", refused)
            patches.setattr(consumer._puller, "pull", pulled.append)
            with pytest.raises(OSError, match="no room"):
                await consumer._commit_and_pull(consumer.queues[queue], 0)
        assert pulled == [consumer.queues[queue]]


async def test_broadcasting_gives_every_member_every_message(node: Node, four_queues: None, tmp_path: Path) -> None:
    await fill(node, 6)
    one, two = Inbox(), Inbox()
    file = tmp_path / "offsets.json"
    options: dict[str, Any] = {"broadcasting": True, "start": "first"}
    async with (
        Consumer(node.address, "g", "t", one, offsets_file=file, **options),
        Consumer(node.address, "g", "t", two, **options),
    ):
        await eventually(lambda: len(one.messages) == len(two.messages) == 6)
    again = Inbox()
    await fill(node, 1)
    async with Consumer(node.address, "g", "t", again, offsets_file=file, **options):
        await eventually(lambda: len(again.messages) == 1)


async def test_two_members_with_one_file_of_offsets_are_refused(node: Node, four_queues: None, tmp_path: Path) -> None:
    file = tmp_path / "caches" / "offsets.json"
    options: dict[str, Any] = {"broadcasting": True, "offsets_file": file, "start": "first"}
    async with Consumer(node.address, "g", "t", **options) as first:
        second = Consumer(node.address, "g", "t", **options)
        with pytest.raises(ConfigError, match=r"offsets.json is in use by another member"):
            await second.start()
        assert not first.has_ended
    await fill(node, 1)
    again = Inbox()
    async with Consumer(node.address, "g", "t", again, **options):
        await eventually(lambda: len(again.messages) == 1)


async def test_a_member_whose_file_of_offsets_cannot_be_written_does_not_start(
    node: Node, four_queues: None, tmp_path: Path
) -> None:
    (tmp_path / "offsets.json.lock").mkdir()
    with pytest.raises(ConfigError, match=r"offsets_file: .* cannot be written"):
        async with Consumer(node.address, "g", "t", broadcasting=True, offsets_file=tmp_path / "offsets.json"):
            pass


async def test_a_stop_says_that_the_file_of_offsets_cannot_be_written_any_more(
    node: Node, one_queue: None, tmp_path: Path
) -> None:
    inbox, file = Inbox(), tmp_path / "offsets.json"
    consumer = Consumer(node.address, "g", "t", inbox, broadcasting=True, offsets_file=file, start="first")
    await consumer.start()
    await fill(node, 1)
    await eventually(lambda: len(inbox.messages) == 1)
    (tmp_path / "offsets.json.new").mkdir()
    with pytest.raises(ConfigError, match=r"offsets.json cannot be written: .*; messages since its last write are"):
        await consumer.stop()


@pytest.mark.parametrize(
    "kept", ["{", "", "{}", '""', "5", "[[1]]", '[["t","b",0,"5"]]', '[["t","b","0",5]]', '[["t","b",0,-1]]']
)
def test_a_damaged_file_of_offsets_is_named(tmp_path: Path, kept: str) -> None:
    file = tmp_path / "offsets.json"
    file.write_text(kept)
    with pytest.raises(ConfigError, match=r"offsets.json is damaged .*delete it"):
        Consumer("h:1", "g", "t", broadcasting=True, offsets_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        Consumer("h:1", "g", "t", broadcasting=True, offsets_file=tmp_path)


# A member of more queues than one request to the broker may name.


QUEUES = 10


async def test_it_locks_commits_and_hands_over_in_several_requests(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = group_bodies.encode_lock_request

    def counted(request: LockRequest) -> bytes:
        sizes.append(len(request.queues))
        return encode(request)

    monkeypatch.setattr(group_bodies, "encode_lock_request", counted)
    await create_topic(wire, "t", QUEUES)
    seen: list[bytes] = []

    async def handle(message: Message) -> None:
        seen.append(message.body)

    async with Consumer(node.address, "g", "t", handle, start="first", limits=ClientLimits(lock_queues=4)) as consumer:
        await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES)
        async with Producer(node.address) as producer:
            for number in range(4 * QUEUES):
                await producer.send("t", b"%d" % number)
        await eventually(lambda: len(seen) == 4 * QUEUES)
        await consumer.commit()
        assert sum(node.broker.offsets.of("g", "t").values()) == 4 * QUEUES
    assert max(sizes) <= 4
    assert len(sizes) > 3
    assert node.broker.groups.owners("g") == {}, "it released all when it left"


def test_what_is_asked_in_one_request_is_what_brokers_take() -> None:
    queues = tuple(Queue("t" * 127, "b" * 100, number) for number in range(CLIENT_LIMITS.lock_queues))
    numbers = dict.fromkeys(queues, 2**62)
    body = group_bodies.encode_lock_request(LockRequest("c" * 100, "g" * 100, queues, True, numbers, numbers))
    assert len(body) <= config.MAX_JSON_BYTES
    assert len(queues) <= config.MAX_REQUEST_QUEUES


@pytest.mark.parametrize(("topic", "broker", "count"), [("t", "b", 8192), ("t" * 127, "b" * 100, 2000)])
def test_a_heartbeat_names_no_more_queues_than_brokers_take(topic: str, broker: str, count: int) -> None:
    """One that is refused costs its member all of its queues: without a heartbeat no lock is renewed."""
    owned = {Queue(topic, broker, number) for number in range(10_000)}
    told = heartbeat_queues(owned)
    assert count <= len(told) < len(owned)
    beat = Heartbeat("c", (ConsumerData("g", assigned=told),))
    assert decode_heartbeat(encode_heartbeat(beat)) == beat
    few = sorted(owned)[:3]
    assert heartbeat_queues(few) == tuple(few)
    assert heartbeat_queues(()) == ()


async def test_a_member_reports_some_of_its_queues_and_keeps_them_all(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", QUEUES)

    def told() -> list[int]:
        group = node.broker.groups.get("g")
        return [len(member.data.assigned) for member in group.members.values()] if group is not None else []

    async with Consumer(
        node.address, "g", "t", lambda message: None, limits=ClientLimits(heartbeat_queues=4)
    ) as consumer:
        await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES)
        await eventually(lambda: told() == [4])


# Consumers without a handler: iteration that survives timeouts, and messages that are settled by hand.


async def test_a_wait_that_times_out_does_not_end_the_iteration(node: Node, one_queue: None) -> None:
    async with Consumer(node.address, "g", "t", start="first", batch_size=4, drain_s=0) as consumer:
        for waits in (aiter(consumer), consumer, consumer.batches()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(waits), 0.01)
            async with Producer(node.address) as producer:
                await producer.send("t", b"later")
            found: Any = await asyncio.wait_for(anext(waits), PATIENCE_S)
            message: Message = found if isinstance(found, Message) else found[0]
            assert message.body == b"later"
            if isinstance(found, Message):
                await consumer.ack(message)


async def test_received_messages_are_settled_one_by_one_in_any_order(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 5)
    async with Consumer(node.address, "g", "t", start="first", commit_interval_s=300) as consumer:
        held = [await consumer.receive(timeout_s=PATIENCE_S) for _ in range(5)]
        assert [message.body for message in held] == [b"0", b"1", b"2", b"3", b"4"]
        await consumer.ack(held[1])
        await consumer.commit()
        assert node.broker.offsets.get("g", "t", 0) in (None, 0), "the first is not acknowledged yet"
        await consumer.ack(held[0])
        await consumer.commit()
        assert node.broker.offsets.get("g", "t", 0) == 2
        with pytest.raises(ConfigError, match=r"a Consumer does not support 0\.5 s"):
            await consumer.retry(held[2], RetryLater(delay=0.5))
        await consumer.retry(held[2], RetryLater(delay_level=1))
        await consumer.reject(held[3])
        again = await consumer.receive(timeout_s=PATIENCE_S)
        assert (again.body, again.reconsume_times) == (b"2", 1)
        await consumer.ack(again)
        with pytest.raises(ConfigError, match="is not in flight"):
            await consumer.ack(again)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0.01)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    assert node.broker.offsets.get("g", "t", 0) == 4, "the last was not settled"
    async with Consumer(node.address, "g", "t") as consumer:
        assert (await consumer.receive(timeout_s=PATIENCE_S)).body == b"4"


async def test_a_message_that_is_iterated_to_can_be_retried_or_rejected(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 3)
    seen: list[tuple[bytes, int]] = []
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        async for message in consumer:
            seen.append((message.body, message.reconsume_times))
            if message.body == b"0" and not message.reconsume_times:
                await consumer.retry(message)
            elif message.body == b"1":
                await consumer.reject(message)
            elif message.body == b"2":
                await consumer.ack(message)
            if len(seen) == 4:
                break
    assert [body for body, tries in seen if not tries] == [b"0", b"1", b"2"]
    assert [body for body, tries in seen if tries] == [b"0"]  # it comes when it is due
    assert node.broker.offsets.get("g", "t", 0) == 3
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


@pytest.mark.parametrize("batch_size", [1, 2])
async def test_an_iteration_that_another_thread_collects_is_given_back_where_the_consumer_lives(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    await fill(node, 3)
    threads: list[int] = []
    give_back = Deliveries.give_back

    def counted(deliveries: Deliveries, hand: HeldRun) -> None:
        threads.append(threading.get_ident())
        give_back(deliveries, hand)

    monkeypatch.setattr(Deliveries, "give_back", counted)
    async with Consumer(node.address, "g", "t", start="first", batch_size=batch_size) as consumer:
        garbage: list[object] = [aiter(consumer) if batch_size == 1 else consumer.batches()]
        await anext(garbage[0])  # type: ignore[call-overload]
        await asyncio.to_thread(garbage.clear)
        again = await anext(aiter(consumer)) if batch_size == 1 else (await anext(consumer.batches()))[0]
        assert again.body == b"0", "it comes first again"
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("settle", ["retry", "reject"])
async def test_a_message_that_is_settled_twice_in_a_row_takes_no_other_with_it(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    """The loop continues while a task still hands its message back to the broker."""
    await fill(node, 3)
    handed_back, go_on = asyncio.Event(), asyncio.Event()

    async def send_back(*_: object) -> None:
        handed_back.set()
        await go_on.wait()

    async with Consumer(node.address, "g", "t", start="first", batch_size=3) as consumer:
        loop = aiter(consumer)
        first = await anext(loop)
        monkeypatch.setattr("rocketlet.client.consumer.hand_back", send_back)
        settling = asyncio.create_task(getattr(consumer, settle)(first))
        await handed_back.wait()
        second = await anext(loop)
        go_on.set()
        await settling
        assert consumer.is_in_hand(second)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        assert process_queue.commit_offset == second.queue_offset


async def test_a_message_that_waits_for_another_try_in_order_holds_no_hand_over_up(node: Node, one_queue: None) -> None:
    """Nobody works on it."""
    await fill(node, 2)
    async with Consumer(
        node.address, "g", "t", start="first", orderly=True, suspend_queue_s=300, drain_s=3600
    ) as leaves:
        await leaves.retry(await leaves.receive(timeout_s=PATIENCE_S))
        with pytest.raises(TimeoutError):
            await leaves.receive(timeout_s=0.0)
        async with asyncio.timeout(PATIENCE_S):
            await leaves.stop()
    async with Consumer(node.address, "g", "t", start="first", orderly=True) as takes:
        assert (await takes.receive(timeout_s=PATIENCE_S)).body == b"0"


async def test_in_order_a_retry_holds_its_queue(node: Node, one_queue: None) -> None:
    await fill(node, 4)
    seen: list[bytes] = []
    in_order: dict[str, Any] = {"orderly": True, "suspend_queue_s": 0.01, "max_reconsume_times": 2}
    async with Consumer(node.address, "g", "t", start="first", **in_order) as consumer:
        async for message in consumer:
            seen.append(message.body)
            if message.body == b"1":
                await consumer.retry(message)
            if message.body == b"3":
                break
    assert seen == [b"0", b"1", b"1", b"1", b"2", b"3"]
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


async def test_in_order_one_message_of_a_queue_is_in_flight(node: Node, one_queue: None) -> None:
    await fill(node, 2)
    async with Consumer(node.address, "g", "t", start="first", orderly=True) as consumer:
        first = await consumer.receive(timeout_s=PATIENCE_S)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0.05)
        await consumer.ack(first)
        assert (await consumer.receive(timeout_s=PATIENCE_S)).body == b"1"


async def test_what_is_in_flight_of_other_tasks_is_waited_for_when_the_consumer_stops(
    node: Node, one_queue: None
) -> None:
    await fill(node, 5)
    release, handled = asyncio.Event(), Counter[bytes]()
    taken: list[Message] = []
    async with Consumer(node.address, "g", "t", start="first") as consumer:

        async def work() -> None:
            async for message in consumer:
                taken.append(message)
                await release.wait()
                handled[message.body] += 1

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        await eventually(lambda: len(taken) == 2)
        asyncio.get_running_loop().call_later(0.05, release.set)
    await asyncio.gather(*tasks)
    assert handled == {b"0": 1, b"1": 1}
    assert node.broker.offsets.get("g", "t", 0) == 2


async def test_a_consumer_with_a_handler_hands_nothing_out(node: Node, one_queue: None) -> None:
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        with pytest.raises(ConfigError, match="has a handler"):
            await consumer.receive()
    async with Consumer(node.address, "g", "t", batch_size=5) as consumer:
        with pytest.raises(ConfigError, match=r"iterate over batches\(\)"):
            await consumer.receive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_service_gracefully(node: Node, one_queue: None, number: signal.Signals) -> None:
    program = f"""
import asyncio
from rocketlet.client import Consumer, Producer
from rocketlet.client.consuming.deliveries import Deliveries, HeldRun
from rocketlet.client.application import stop_signal

async def handle(message):
    print("begun", flush=True)
    await asyncio.sleep(0.5)
    print("handled", flush=True)

async def main():
    stopped = asyncio.create_task(stop_signal())
    await asyncio.sleep(0)  # it waits for signals before a handler begins
    async with Consumer("{node.address}", "g", "t", handle, start="first"):
        number = await stopped
    print("stopped by", number.name, flush=True)

asyncio.run(main())
"""
    await fill(node, 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    out, err = await process.communicate()
    assert out.decode() == f"handled\nstopped by {number.name}\n", err.decode()
    assert (
        b"Traceback" not in err
    )  # a warning may be there: on a busy machine leases are renewed while they are given back
    assert node.broker.offsets.get("g", "t", 0) == 1


async def test_a_signal_is_waited_for_once() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    assert await stop_signal() == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_consumer_that_gives_out_no_messages_says_why(node: Node) -> None:
    with pytest.raises(ConfigError, match="has not been started"):
        await anext(Consumer(node.address, "g", "t"))
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        with pytest.raises(ConfigError, match="has a handler, which gets its messages"):
            await consumer.receive()
