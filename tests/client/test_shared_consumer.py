"""Members that share messages: one by one, extended, retried after any time, given up, in order, over restarts."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.tls import Tls
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    ConfigError,
    Consumer,
    Message,
    Producer,
    Reject,
    RetryLater,
    RetryPolicy,
    SharedConsumer,
    Sql,
)
from rocketlet.client.config import ClientLimits
from rocketlet.client.consuming.handling import Outcome, delay_of
from rocketlet.client.message import Lease, clock_s
from rocketlet.client.sharing.receiving import SharedDelivery, SlotDispatcher
from rocketlet.client.sharing.settling import Settling, _by_pop
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import decode_batch_acks, encode_batch_acks
from rocketlet.protocol.message import MessageError, Receipt, receipt_of, starts_of, tried_in
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.accounts import ADMIN, AccountsFile, access
from ..support.certificates import Certificates
from ..support.handlers import Inbox, fill


def unfinished(node: Node, group: str = "g") -> int:
    return node.broker.pops.pools.unfinished(group)


async def test_more_members_than_queues_share_all_messages_and_each_comes_once(node: Node, one_queue: None) -> None:
    inboxes = [Inbox() for _ in range(3)]
    members = [SharedConsumer(node.address, "g", "t", inbox, concurrency=4, start="first") for inbox in inboxes]
    for member in members:
        await member.start()
    await fill(node, 60)
    await eventually(lambda: sum(len(inbox.messages) for inbox in inboxes) >= 60)
    for member in members:
        await member.stop()
    assert Counter(body for inbox in inboxes for body in inbox.bodies) == {b"%d" % number: 1 for number in range(60)}
    assert unfinished(node) == 0
    assert node.broker.offsets.get("g", "t", 0) == 60


async def test_a_slow_handler_holds_up_nothing_but_its_own_message(node: Node, one_queue: None) -> None:
    seen: list[bytes] = []
    gate = asyncio.Event()

    async def work(message: Message) -> None:
        if message.body == b"0":
            await gate.wait()
        seen.append(message.body)

    other = Inbox()
    async with SharedConsumer(node.address, "g", "t", work, concurrency=1) as slow:
        await fill(node, 1)
        await eventually(lambda: unfinished(node) == 1)
        async with SharedConsumer(node.address, "g", "t", other, concurrency=1):
            await fill(node, 5)
            await eventually(lambda: len(other.messages) == 5)
        assert (seen, slow.is_in_hand(other.messages[0])) == ([], False)
        gate.set()
        await eventually(lambda: len(seen) == 1)


async def test_a_message_is_extended_as_long_as_its_handler_runs(node: Node, one_queue: None) -> None:
    gate, inbox = asyncio.Event(), Inbox()

    async def work(message: Message) -> None:
        await inbox(message)
        await gate.wait()
        assert not message.lease_lost

    async with SharedConsumer(node.address, "g", "t", work, invisible_s=1.0):
        await fill(node, 1)
        await eventually(lambda: bool(inbox.messages))
        async with SharedConsumer(node.address, "g", "t", inbox):
            (pool,) = node.broker.pops.pools.all
            (deliveries,) = pool.queues.opened()
            (delivery,) = deliveries.unfinished.values()
            first_s = delivery.deadline_s
            await eventually(lambda: delivery.deadline_s > first_s + 1.0)
            gate.set()
            await eventually(lambda: unfinished(node) == 0)
    assert len(inbox.messages) == 1


async def test_a_message_that_another_member_has_handled_stays_lost(node: Node, one_queue: None) -> None:
    gate, inbox = asyncio.Event(), Inbox()
    found: list[Message] = []

    async def work(message: Message) -> None:
        found.append(message)
        await gate.wait()

    async with SharedConsumer(node.address, "g", "t", work, invisible_s=3.0, concurrency=1):
        await fill(node, 1)
        await eventually(lambda: bool(found))
        node.clock.advance(10)  # the broker's alone: its deadline has passed
        async with SharedConsumer(node.address, "g", "t", inbox):
            await eventually(lambda: len(inbox.messages) == 1 and unfinished(node) == 0)
        await eventually(lambda: found[0].lease_lost)
        gate.set()


async def test_no_handler_begins_with_a_message_whose_lease_is_over(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended when the message had come: it may be another member's by now."""
    take, over = SlotDispatcher.take, list[SharedDelivery]()

    async def taken(dispatcher: SlotDispatcher) -> SharedDelivery | None:
        delivery = await take(dispatcher)
        if delivery is not None and len(over) < 2:
            delivery.lease.ends_s = clock_s()
            over.append(delivery)
        return delivery

    monkeypatch.setattr(SlotDispatcher, "take", taken)
    inbox = Inbox()
    async with SharedConsumer(node.address, "g", "t", inbox, start="first"):
        await fill(node, 3)
        await eventually(lambda: len(inbox.messages) == 3 and unfinished(node) == 0)
    assert len(over) == 2
    assert not {message for message in inbox.messages if message in [item.message for item in over]}
    assert {message.attempt for message in inbox.messages} == {1}


async def test_outcomes_are_carried_out_again_after_any_time_and_given_up_with_a_reason(
    node: Node, one_queue: None
) -> None:
    outcomes: dict[bytes, list[Any]] = {
        b"0": [RetryLater(delay=0.05), RetryLater(delay=timedelta(milliseconds=1)), None],
        b"1": [Reject("no such customer")],
        b"2": [ValueError("again"), None],
        b"3": ["junk", Reject()],
    }
    attempts: list[tuple[bytes, int]] = []

    async def work(message: Message) -> Outcome:
        attempts.append((message.body, message.attempt))
        outcome = outcomes[message.body].pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    async with SharedConsumer(node.address, "g", "t", work):
        await fill(node, 4)
        await eventually(lambda: len(attempts) == 6)
        node.clock.advance(9)
        assert len(attempts) == 6, "without a delay the first retry comes after 10 s"
        node.clock.advance(2)
        await eventually(lambda: not any(outcomes.values()))
        await eventually(lambda: unfinished(node) == 0)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 2)
    assert sorted(attempts) == [(b"0", 1), (b"0", 2), (b"0", 3), (b"1", 1), (b"2", 1), (b"2", 2), (b"3", 1), (b"3", 2)]
    async with AdminClient(node.address) as admin:
        (queue,) = (await admin.topic("%DLQ%g")).ranges
        dead = [message async for part in admin.read(queue, 0, 2) for message in part]
    assert {(message.body, message.failure) for message in dead} == {
        (b"1", "no such customer"),
        (b"3", "its consumer gave it up"),
    }
    sent_back = node.broker.request_times[RequestCode.CONSUMER_SEND_MSG_BACK]
    assert not any(sent_back.counts), "the broker that delivered a message dead-letters and acknowledges it in one step"


async def test_tries_end_where_the_member_or_the_group_says(node: Node, one_queue: None) -> None:
    inbox = Inbox(RetryLater(delay=0))
    async with SharedConsumer(node.address, "g", "t", inbox, max_reconsume_times=2):
        await fill(node, 1)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        await eventually(lambda: unfinished(node) == 0)
    assert [message.attempt for message in inbox.messages] == [1, 2, 3]


async def test_messages_of_one_message_group_come_one_after_the_other(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    running: Counter[str] = Counter()
    done: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    failed: set[tuple[str, int]] = set()

    async def work(message: Message) -> Outcome:
        key, number = message.keys[0], int(message.body)
        running[key] += 1
        assert running[key] == 1
        await asyncio.sleep(0)
        running[key] -= 1
        if number == 3 and (key, number) not in failed:
            failed.add((key, number))
            return RetryLater(delay=0.02)
        done[key].append(number)
        return None

    members = [SharedConsumer(node.address, "g", "t", work, orderly=True) for _ in range(3)]
    for member in members:
        await member.start()
    async with Producer(node.address) as producer:
        for number in range(8):
            for key in done:
                properties = {"__SHARDINGKEY": key}
                await producer.send("t", b"%d" % number, keys=key, queue_key=key, properties=properties)
    await eventually(lambda: sum(map(len, done.values())) == 24)
    for member in members:
        await member.stop()
    assert all(numbers == list(range(8)) for numbers in done.values())


async def test_a_group_without_order_keeps_it_for_a_member_that_asks(node: Node, one_queue: None) -> None:
    async with SharedConsumer(node.address, "g", "t", Inbox()):
        pass
    done: list[bytes] = []

    async def handle(message: Message) -> Outcome:
        if message.attempt == 1 and message.body == b"0":
            return RetryLater(delay=0.01)
        done.append(message.body)
        return None

    async with SharedConsumer(node.address, "g", "t", handle, orderly=True), Producer(node.address) as producer:
        await producer.send_batch("t", [b"0", b"1", b"2"])
        await eventually(lambda: len(done) == 3)
    assert done == [b"0", b"1", b"2"]


async def test_filters_by_tag_and_by_sql(node: Node, one_queue: None) -> None:
    tagged, priced = Inbox(), Inbox()
    async with (
        SharedConsumer(node.address, "g1", {"t": "a || b"}, tagged, start="first"),
        SharedConsumer(node.address, "g2", {"t": Sql("price > 5")}, priced, start="first"),
    ):
        async with Producer(node.address) as producer:
            for number, tag in enumerate("abcab"):
                await producer.send("t", b"%d" % number, tag=tag, properties={"price": str(2 * number)})
        await eventually(lambda: len(tagged.messages) == 4 and len(priced.messages) == 2)
    assert sorted(tagged.bodies) == [b"0", b"1", b"3", b"4"]
    assert sorted(priced.bodies) == [b"3", b"4"]
    with pytest.raises(BrokerRefused, match="subscription"):
        await SharedConsumer(node.address, "g3", {"t": Sql("price >")}, tagged).start()


async def test_a_new_group_begins_behind_what_is_there_or_with_the_first(node: Node, one_queue: None) -> None:
    await fill(node, 2)
    last, first = Inbox(), Inbox()
    async with (
        SharedConsumer(node.address, "g1", "t", last),
        SharedConsumer(node.address, "g2", "t", first, start="first"),
    ):
        async with Producer(node.address) as producer:
            await producer.send("t", b"new")
        await eventually(lambda: bool(last.messages) and len(first.messages) == 3)
    assert last.bodies == [b"new"]


async def test_stop_waits_for_handlers_and_gives_back_what_they_do_not_finish(node: Node, one_queue: None) -> None:
    began, gate = asyncio.Event(), asyncio.Event()
    done: list[bytes] = []

    async def work(message: Message) -> None:
        began.set()
        if message.body == b"1":
            await asyncio.Event().wait()
        await gate.wait()
        done.append(message.body)

    member = SharedConsumer(node.address, "g", "t", work, drain_s=0.2, invisible_s=600)
    await member.start()
    await fill(node, 2)
    await eventually(lambda: unfinished(node) == 2)
    stopping = asyncio.create_task(member.stop())
    await asyncio.sleep(0)
    gate.set()
    await stopping
    assert done == [b"0"]
    inbox = Inbox()
    async with SharedConsumer(node.address, "g", "t", inbox):
        await eventually(lambda: bool(inbox.messages))
    assert [(message.body, message.attempt) for message in inbox.messages] == [(b"1", 1)], "it was no try"


async def test_a_pause_begins_nothing_and_sends_what_comes_to_others(node: Node, one_queue: None) -> None:
    mine, others = Inbox(), Inbox()
    async with SharedConsumer(node.address, "g", "t", mine, invisible_s=600) as member:
        await member.pause()
        async with SharedConsumer(node.address, "g", "t", others, invisible_s=600):
            await fill(node, 3)
            await eventually(lambda: len(others.messages) == 3)
        assert mine.messages == []
        await member.resume()
        await fill(node, 1)
        await eventually(lambda: len(mine.messages) == 1)


async def test_messages_are_received_iterated_and_settled_by_hand(node: Node, one_queue: None) -> None:
    async with SharedConsumer(node.address, "g", "t", start="first", invisible_s=600) as consumer:
        with pytest.raises(TimeoutError, match="no message arrived within"):
            await consumer.receive(timeout_s=0.01)
        await fill(node, 5)
        first, second, third = [await consumer.receive(timeout_s=PATIENCE_S) for _ in range(3)]
        await consumer.ack(second)
        with pytest.raises(ConfigError, match="is not in flight"):
            await consumer.ack(second)
        await consumer.reject(third, reason="bad")
        await consumer.retry(first, RetryLater(delay=0))
        seen = []
        async for message in consumer:
            seen.append((message.body, message.attempt))
            if len(seen) == 3:
                break
        assert sorted(seen) == [(b"0", 2), (b"3", 1), (b"4", 1)]
        del message
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        again = await consumer.receive(timeout_s=PATIENCE_S)
        assert (again.body, again.attempt) == seen[-1], "the last one of an iteration that was left"
        await consumer.ack(again)
        await eventually(lambda: unfinished(node) == 0)


@pytest.mark.parametrize(
    ("factor", "bodies"),
    [(100, [b"2", b"2", b"2", b"1", b"1", b"0", b"0"]), (50, [b"2", b"0", b"2", b"1", b"2", b"0", b"1"])],
)
async def test_urgent_messages_are_handled_first_as_the_groups_priority_factor_says(
    node: Node, factor: int, bodies: list[bytes]
) -> None:
    seen: list[bytes] = []

    async def work(message: Message) -> RetryLater | None:
        seen.append(message.body)
        return RetryLater(delay=0) if len(seen) == 1 else None

    async with AdminClient(node.address) as admin, Producer(node.address) as producer:
        await admin.create_topic("t", queues=3, message_type="PRIORITY", retried_first=True)
        await admin.create_group(GroupConfig("g"))
        await admin.change_group("g", priority_factor=factor)
        for priority in (0, 0, 1, 1, 2, 2):
            await producer.send("t", b"%d" % priority, priority=priority)
        async with SharedConsumer(node.address, "g", "t", work, concurrency=1, start="first"):
            await eventually(lambda: len(seen) == len(bodies))
    assert seen == bodies, "a message that is redelivered precedes those of lower levels"


async def test_what_nobody_asks_for_goes_to_another_member(node: Node, one_queue: None) -> None:
    inbox = Inbox()
    async with SharedConsumer(node.address, "g", "t", invisible_s=1.0) as idle:
        waiting = asyncio.create_task(idle.receive())
        await asyncio.sleep(0)
        await eventually(lambda: node.broker.pops.waiting > 0)
        waiting.cancel()
        await fill(node, 1)
        async with SharedConsumer(node.address, "g", "t", inbox):
            await eventually(lambda: bool(inbox.messages))
    assert inbox.messages[0].attempt == 1


async def test_a_restart_and_lost_connections_lose_nothing(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 2)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with SharedConsumer(node.address, "g", "t", inbox, concurrency=50):
        await fill(node, 30)
        await eventually(lambda: len(inbox.messages) == 30)
        port = int(node.address.rpartition(":")[2])
        await node.stop()
        gate.set()
        node = await nodes.start(port=port)
        await eventually(lambda: unfinished(node) == 0)
        await fill(node, 10)
        await eventually(lambda: len(inbox.messages) == 40)
    assert len({message.message_id for message in inbox.messages}) == 40, "acknowledged once the broker was back"


async def stopped_and_started(nodes: Nodes, node: Node) -> Node:
    await node.stop()
    return await nodes.start(port=int(node.address.rpartition(":")[2]))


ALONE = ClientLimits(heartbeat_interval_s=3600.0)  # no heartbeat falls due in a test


@pytest.mark.parametrize("is_paused", [False, True])
async def test_lost_connection_is_reopened_when_no_receive_is_sent(
    nodes: Nodes, connect: Connect, is_paused: bool
) -> None:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 1)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with SharedConsumer(node.address, "g", "t", inbox, concurrency=1, limits=ALONE) as consumer:
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)
        if is_paused:
            gate.set()
            await eventually(lambda: unfinished(node) == 0)
            await consumer.pause()
        node = await stopped_and_started(nodes, node)
        await eventually(lambda: len(node.broker.groups.members_of("g")) == 1)
        gate.set()


async def test_message_is_extended_over_a_restart_while_all_slots_are_busy(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 1)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with SharedConsumer(node.address, "g", "t", inbox, concurrency=1, invisible_s=2.0, limits=ALONE):
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)
        node = await stopped_and_started(nodes, node)
        (deliveries,) = (found for pool in node.broker.pops.pools.all for found in pool.queues.opened())
        (delivery,) = deliveries.unfinished.values()
        first_s = delivery.deadline_s
        await eventually(lambda: delivery.deadline_s > first_s + 2.0)
        gate.set()
        await eventually(lambda: unfinished(node) == 0)
    assert len(inbox.messages) == 1


async def test_message_that_ends_while_a_member_leaves_and_its_broker_is_away_is_acknowledged(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 1)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    consumer = SharedConsumer(node.address, "g", "t", inbox, concurrency=5, limits=ALONE)
    await consumer.start()
    await fill(node, 5)
    await eventually(lambda: len(inbox.messages) == 5)
    leaving = asyncio.create_task(consumer.stop())
    await eventually(lambda: not node.broker.groups.members_of("g"))
    port = int(node.address.rpartition(":")[2])
    await node.stop()
    gate.set()
    node = await nodes.start(port=port)
    await leaving
    assert unfinished(node) == 0


async def test_topics_of_two_brokers_and_one_that_comes_later(nodes: Nodes, connect: Connect) -> None:
    first = await nodes.start(name="broker-a")
    second = await nodes.start(name="broker-b", name_servers=(first.address,))
    for node in (first, second):
        await create_topic(await connect(node.address), "t", 1)
    inbox = Inbox()
    async with SharedConsumer(first.address, "g", {"t": "*", "later": "*"}, inbox, concurrency=1):
        await create_topic(await connect(second.address), "later", 1)
        async with Producer(first.address, batching=False) as producer:
            await eventually_sent(producer, "later")
            for number in range(10):
                await producer.send("t", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 11)
    assert {message.queue.broker_name for message in inbox.messages} == {"broker-a", "broker-b"}


async def eventually_sent(producer: Producer, topic: str) -> None:
    queue = await producer.queue_for(topic, "k")
    await producer.send(topic, b"later", queue=queue)


async def test_members_of_both_kinds_divide_a_topic_and_nothing_comes_twice(node: Node, four_queues: None) -> None:
    queues, shared = Inbox(), Inbox()
    async with Consumer(node.address, "g", "t", queues, start="first") as consumer:
        await consumer.assigned(PATIENCE_S)
        async with SharedConsumer(node.address, "g", "t", shared, start="first"):
            await eventually(lambda: len(consumer.assignment()) == 3)  # two of the topic, and the retry topic's
            await fill(node, 80)
            await eventually(lambda: len(queues.messages) + len(shared.messages) >= 80)
        assert shared.messages
        assert queues.messages
        await eventually(lambda: len(consumer.assignment()) == 5)
        await fill(node, 20)
        await eventually(lambda: len(queues.messages) + len(shared.messages) >= 100)
    assert len({message.message_id for message in queues.messages + shared.messages}) == 100


async def test_plain_handlers_run_in_threads(node: Node, one_queue: None) -> None:
    threads: list[str] = []
    async with SharedConsumer(node.address, "g", "t", lambda message: threads.append(threading.current_thread().name)):
        await fill(node, 2)
        await eventually(lambda: len(threads) == 2)
    assert all(name.startswith("rocketlet-handler") for name in threads)


async def test_a_member_is_shown_by_its_name_and_gone_when_it_stops(node: Node, one_queue: None) -> None:
    async with SharedConsumer(node.address, "g", "t", Inbox()) as member, AdminClient(node.address) as admin:
        assert [item.client_id for item in (await admin.group("g")).members] == [member.client_id]
    group = node.broker.groups.get("g")
    assert group is None or not group.members


async def test_accounts_need_the_topic_and_the_group_over_tls_too(
    nodes: Nodes, certificates: Certificates, tmp_path: Path
) -> None:
    accounts = AccountsFile(tmp_path / "plain_acl.yml")
    node = await nodes.start(acl=accounts.acl, tls=Tls("permissive", certificates.files))
    tls = {"tls": True, "ca_file": str(certificates.folder / "ca.pem")}
    sends, reads = access("orders-key", **tls), access("readers-key", **tls)
    outcomes: dict[bytes, list[Outcome]] = {b"0": [RetryLater(delay=0)], b"1": [Reject("no")]}
    inbox = Inbox()

    async def work(message: Message) -> Outcome:
        await inbox(message)
        return outcomes[message.body].pop() if outcomes.get(message.body) else None

    async with Producer(node.address, access=access(ADMIN, **tls)) as producer:
        await producer.send("orders", b"first")
    async with (
        Producer(node.address, access=sends) as producer,
        SharedConsumer(node.address, "shipping", "orders", work, access=reads),
    ):
        for number in range(5):
            await producer.send("orders", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 6 and unfinished(node, "shipping") == 0)
    assert node.broker.store.queue("%DLQ%shipping", 0).next == 1
    with pytest.raises(BrokerRefused, match="No default permission"):
        await SharedConsumer(node.address, "shipping", "orders", work, access=sends).start()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"start": 5}, "start: 5 is neither 'last' nor 'first'"),
        ({"invisible_s": 0.5}, "invisible_s: 0.5 is less than 1 second"),
        ({"invisible_s": 30_000}, "invisible_s: 30000 is more than 3600 seconds; for milliseconds give 30"),
        ({"retry": RetryPolicy()}, "retry: needs a handler"),
        ({"concurrency": 0}, "concurrency: 0 is not a whole number from 1"),
        ({"handler": 5}, "handler: 5 cannot be called"),
        ({"max_reconsume_times": -1}, "max_reconsume_times: -1"),
        ({"drain_s": -1}, "drain_s: -1"),
        ({"access": "key"}, "access: 'key' is a str"),
    ],
)
async def test_wrong_arguments_are_named(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        SharedConsumer("127.0.0.1:1", "g", "t", **options)
    with pytest.raises(ConfigError, match="delay: -1 is not a time from 0 to 12 hours"):
        RetryLater(delay=-1)


# The parts of a member that shares messages, each alone: who gets the next message, and what one request says of many.


def delivery(offset: int = 0, start: int | None = None, pop_ms: int = 1, **place: Any) -> SharedDelivery:
    receipt = Receipt(offset if start is None else start, pop_ms, 30_000, 0, "0", "b", 0, offset)
    message = Message(b"", Queue("t", "b", 0), "t", Lease(0, 100.0))
    return SharedDelivery(message, receipt._replace(**place))


class Back:
    """A dispatcher whose unwanted messages are kept."""

    def __init__(self) -> None:
        self.unwanted: list[SharedDelivery] = []
        self.dispatcher = SlotDispatcher(self.unwanted.append)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_receive_gets_as_many_places_as_somebody_waits_for() -> None:
    dispatcher = Back().dispatcher
    reserving = asyncio.create_task(dispatcher.reserve(32))
    await turn()
    assert not reserving.done()
    takers = [asyncio.create_task(dispatcher.take()) for _ in range(3)]
    assert await reserving == 1, "the first taker's"
    assert await dispatcher.reserve(32) == 2
    messages = [delivery(number) for number in range(3)]
    dispatcher.put(messages[:1], 1)
    dispatcher.put(messages[1:], 2)
    assert [await taker for taker in takers] == messages


async def test_sources_take_turns_where_there_are_fewer_places() -> None:
    dispatcher = Back().dispatcher
    dispatcher.sources = 2
    taker = asyncio.create_task(dispatcher.take())
    await turn()
    assert await dispatcher.reserve(32) == 1
    assert dispatcher.is_short, "the other source would wait"
    second = asyncio.create_task(dispatcher.reserve(32))
    third = asyncio.create_task(dispatcher.reserve(32))
    await turn()
    dispatcher.put((), 1)
    assert await second == 1
    assert not third.done()
    taker.cancel()
    third.cancel()


async def test_a_cancelled_wait_loses_no_message_and_no_place() -> None:
    dispatcher = Back().dispatcher
    first = asyncio.create_task(dispatcher.take())
    await turn()
    dispatcher.put([came := delivery()], await dispatcher.reserve(1))
    first.cancel()
    second = asyncio.create_task(dispatcher.take())
    await turn()
    assert second.done() and second.result() is came, "not awaited: it would wait for ever"
    reserving = asyncio.create_task(dispatcher.reserve(1))
    await turn()
    waiting = asyncio.create_task(dispatcher.take())
    await asyncio.sleep(0)  # it is granted a place, and has not run yet
    reserving.cancel()
    await turn()
    again = asyncio.create_task(dispatcher.reserve(1))
    await turn()
    assert again.done() and again.result() == 1
    waiting.cancel()


async def test_a_pause_and_the_end_want_nothing() -> None:
    back = Back()
    dispatcher = back.dispatcher
    taker = asyncio.create_task(dispatcher.take())
    await turn()
    places = await dispatcher.reserve(1)
    dispatcher.pause()
    dispatcher.put([first := delivery()], places)
    assert back.unwanted == [first]
    dispatcher.resume()
    dispatcher.put([second := delivery()], await dispatcher.reserve(1))
    dispatcher.pause()  # before the taker runs
    await turn()
    assert back.unwanted == [first, second]
    dispatcher.close()
    assert await taker is None


@given(st.sets(st.integers(0, 20_000), min_size=1, max_size=50), st.booleans())
def test_acknowledgements_of_many_messages_name_each_of_them(offsets: set[int], is_ours: bool) -> None:
    deliveries = [delivery(offset, pop_ms=1 + offset % 2) for offset in offsets]
    body = encode_batch_acks("b", "g", _by_pop(deliveries, is_ours=is_ours))
    found = decode_batch_acks(body)
    assert {(ack.pop_ms, offset) for ack in found for offset in ack.offsets} == {(1 + of % 2, of) for of in offsets}
    assert all((ack.group, ack.topic, ack.mark, ack.queue_id) == ("g", "t", "0", 0) for ack in found)


def test_apache_s_check_points_stay_apart_and_ours_are_one_entry() -> None:
    deliveries = [delivery(7, start=7), delivery(9, start=8), delivery(8, start=8)]
    assert len(_by_pop(deliveries, is_ours=True)) == 1
    (_, first, offsets), (_, second, others) = _by_pop(deliveries, is_ours=False)
    assert (first.start_offset, offsets, second.start_offset, others) == (7, [7], 8, [8, 9])


async def test_messages_of_lite_topics_are_acknowledged_one_by_one() -> None:
    """Apache's brokers accept no batches for them."""
    sent: list[int] = []
    connection = Mock(call=lambda code, *rest: sent.append(code), running_s=lambda: 0.0)
    settling = Settling(Mock(connected_or_open=lambda name: connection), "g", lambda work: None)
    for lite_topic in ("a", "b"):
        plain = delivery()
        settling.ack(SharedDelivery(plain.message, plain.receipt, lite_topic))
    await turn()
    assert sent == [RequestCode.ACK_MESSAGE] * 2


def test_acknowledgements_of_one_receive_that_lie_far_apart_are_entries_of_their_own() -> None:
    """A filter may match one message of thousands, and an entry has a bit for each offset that it spans."""
    offsets = [0, 4095, 4096, 1_000_000]
    entries = _by_pop([delivery(offset) for offset in offsets], is_ours=True)
    assert [found for _, _, found in entries] == [[0, 4095], [4096], [1_000_000]]
    assert len(encode_batch_acks("b", "g", entries)) < 5000


def test_a_lease_that_is_over_is_not_renewed_by_an_answer_that_comes_late() -> None:
    found = delivery()
    assert found.lease.is_over
    assert not found.renewed(found.receipt, clock_s(), 30.0)
    assert found.message.lease_lost


def test_receipts_are_apache_s_text() -> None:
    receipt = receipt_of("5 1795411322073 60000 3 1 broker-a 2 7 4200046")
    assert receipt == Receipt(5, 1795411322073, 60000, 3, "1", "broker-a", 2, 7)
    assert receipt.text == "5 1795411322073 60000 3 1 broker-a 2 7"
    assert [receipt._replace(mark=mark).topic("g", "t") for mark in "012"] == ["t", "%RETRY%g_t", "%RETRY%g+t"]
    assert starts_of("0 2 5;1 0 9") == {2: 5}
    assert tried_in("0 qo2%7 3;0 2 1") == {"qo2%7": 3, "2": 1}
    for read in (receipt_of, starts_of, tried_in):
        with pytest.raises(MessageError):
            read("rubbish")


def test_a_delay_is_any_time_or_a_level_s() -> None:
    class Tried:
        def __init__(self, times: int) -> None:
            self.reconsume_times = times

    def seconds(outcome: RetryLater, times: int = 0) -> float:
        return delay_of(outcome, Tried(times))  # type: ignore[arg-type]

    assert seconds(RetryLater(delay=2.5)) == 2.5
    assert seconds(RetryLater(delay=timedelta(minutes=1))) == 60
    assert [seconds(RetryLater(), times) for times in (0, 1, 2, 16, 99)] == [10, 30, 60, 7200, 7200]
    assert [seconds(RetryLater(delay_level=level)) for level in (1, 18, 99)] == [1, 7200, 7200]
