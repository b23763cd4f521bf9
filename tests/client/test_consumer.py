"""The consumer on a real broker: what handlers get, what outcomes mean, where a group begins."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from rocketlet.client import ConfigError, Consumer, Message, Outgoing, Producer, Reject, RetryLater
from rocketlet.client.config import PullLimits
from rocketlet.protocol.bodies import GroupConfig, encode_group
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill


@pytest.fixture
async def topic(wire: Wire) -> str:
    await create_topic(wire, "t")
    return "t"


async def test_a_handler_gets_each_message_once(node: Node, topic: str) -> None:
    await fill(node, 50, tag="A", keys="k", properties={"p": "v"})
    inbox = Inbox()
    async with Consumer(node.address, "g", topic, inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 50)
    assert sorted(inbox.bodies) == sorted(b"%d" % number for number in range(50))
    message = inbox.messages[0]
    assert (message.topic, message.tag, message.keys, message.properties["p"]) == ("t", "A", ["k"], "v")
    assert message.reconsume_times == 0
    assert message.born_ms <= message.store_ms


async def test_batches_are_of_one_queue_and_as_long_as_asked(node: Node, topic: str) -> None:
    await fill(node, 40)
    sizes: list[int] = []
    queues: list[set[Queue]] = []

    async def handle(messages: Sequence[Message]) -> None:
        sizes.append(len(messages))
        queues.append({message.queue for message in messages})

    async with Consumer(node.address, "g", topic, handle, batch_size=4, start="first"):
        await eventually(lambda: sum(sizes) == 40)
    assert max(sizes) <= 4
    assert all(len(found) == 1 for found in queues)


async def test_what_was_acknowledged_is_not_delivered_to_the_next_run(node: Node, topic: str) -> None:
    await fill(node, 20)
    first, second = Inbox(), Inbox()
    async with Consumer(node.address, "g", topic, first, start="first"):
        await eventually(lambda: len(first.messages) == 20)
    await fill(node, 5)
    async with Consumer(node.address, "g", topic, second, start="first"):
        await eventually(lambda: len(second.messages) >= 5)
    assert len(second.messages) == 5


@pytest.mark.parametrize(("start", "expected"), [("first", 6), ("last", 3)])
async def test_a_new_group_begins_where_it_is_configured(node: Node, topic: str, start: Any, expected: int) -> None:
    await fill(node, 3)
    inbox = Inbox()
    async with Consumer(node.address, "g", topic, inbox, start=start) as consumer:
        await consumer.assigned()
        await fill(node, 3)
        await eventually(lambda: len(inbox.messages) >= expected)
    assert len(inbox.messages) == expected


async def test_a_new_group_can_begin_at_a_time(node: Node, topic: str) -> None:
    await fill(node, 4)
    await eventually(lambda: int(time.time() * 1000) > node.broker.store.now_ms + 2)
    moment = int(time.time() * 1000)
    await eventually(lambda: int(time.time() * 1000) > moment + 2)
    await fill(node, 4)
    inbox = Inbox()
    async with Consumer(node.address, "g", topic, inbox, start=moment):
        await eventually(lambda: sum(message.store_ms > moment for message in inbox.messages) == 4)
    # as on Apache's broker, the message nearest to the moment is the first, which may be just before it
    assert len(inbox.messages) <= 4 + 4


async def test_tags_are_checked_by_text_where_hashes_collide(node: Node, topic: str) -> None:
    async with Producer(node.address) as producer:
        for tag in ("AaAa", "BBBB", "AaBB", "C"):  # the first three have one hash in Java
            await producer.send(topic, tag.encode(), tag=tag)
    inbox = Inbox()
    async with Consumer(node.address, "g", {topic: "BBBB || C"}, inbox, start="first"):
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


async def test_no_more_handlers_run_concurrently_than_allowed(node: Node, topic: str) -> None:
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

    async with Consumer(node.address, "g", topic, handle, concurrency=3, start="first"):
        await eventually(lambda: handled == 30)
    assert most == 3


async def test_a_plain_function_runs_in_a_thread(node: Node, topic: str) -> None:
    await fill(node, 3)
    threads: set[str] = set()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        threads.add(threading.current_thread().name)
        handled.append(message.body)

    async with Consumer(node.address, "g", topic, handle, start="first"):
        await eventually(lambda: len(handled) == 3)
    assert threading.main_thread().name not in threads


async def test_messages_can_be_iterated_and_are_acknowledged_by_the_next(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_batches_can_be_iterated(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_a_consumer_is_started_once_and_stopped_at_any_time(node: Node, topic: str) -> None:
    inbox = Inbox()
    consumer = Consumer(node.address, "g", topic, inbox)
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


async def test_listeners_are_notified_of_queues_that_come_and_go(node: Node, topic: str) -> None:
    came: set[Queue] = set()
    went: set[Queue] = set()

    async def on_revoked(queues: set[Queue]) -> None:
        went.update(queues)

    async with Consumer(node.address, "g", topic, Inbox(), on_assigned=came.update, on_revoked=on_revoked) as consumer:
        owned = await consumer.assigned()
        assert came == owned
        assert {queue.queue_id for queue in owned if queue.topic == topic} == {0, 1, 2, 3}
    assert went == came


async def test_flow_control_bounds_what_is_cached(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_a_cancelled_handler_is_no_acknowledgement(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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
