"""AdminClient on a real broker: topics, groups, offsets, messages."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import orjson
import pytest
from rocketlet.broker.config import Limits
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import (
    AnswerUnreadable,
    BrokerRefused,
    ChangeIncomplete,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Producer,
    Reject,
    RetryLater,
    TopicNotFound,
    rebalanced,
)
from rocketlet.client.admin import messages as admin_messages
from rocketlet.client.admin.admin_client import AdminClient, OffsetChange
from rocketlet.client.admin.dead_letters import Replay, dead_letters
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.config import LOCKS_MEAN_ORDER_VERSION
from rocketlet.client.message import Message
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.headers import ResetOffset
from rocketlet.protocol.message import encode_host
from rocketlet.protocol.names import Queue
from rocketlet.protocol.settings import encode_group_change
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.ports import free_port

from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill
from ..support.metrics import samples
from ..support.requests import commit, send, value

LAG = "rocketlet_group_lag"


@pytest.fixture
async def admin(node: Node) -> AsyncIterator[AdminClient]:
    async with AdminClient(node.address) as client:
        yield client


async def consume_all(node: Node, group: str, topic: str, count: int) -> None:
    seen: list[Message] = []
    async with Consumer(node.address, group, topic, seen.append, start="first"):
        await eventually(lambda: len(seen) == count)


async def test_a_topic_is_made_described_changed_and_deleted(node: Node, admin: AdminClient) -> None:
    await admin.create_topic("orders", queues=3)
    assert await admin.topics() == ["orders"]
    assert "TBW102" in await admin.topics(system=True)
    await fill(node, 10, "orders")
    found = await admin.topic("orders")
    assert found.messages == 10
    assert sorted(found.ranges) == [Queue("orders", "broker-a", number) for number in range(3)]
    await admin.change_topic("orders", queues=5)
    assert len((await admin.topic("orders")).ranges) == 5
    await admin.delete_topic("orders")
    assert await admin.topics() == []
    with pytest.raises(TopicNotFound, match="no name server knows the topic orders"):
        await admin.topic("orders")


async def test_created_topic_keeps_its_settings_and_gets_its_queue_count_on_new_brokers(nodes: Nodes) -> None:
    node = await nodes.start()
    async with AdminClient(node.address) as admin:
        assert list(await admin.create_topic("orders", queues=8, perm=4)) == ["broker-a"]
        assert await admin.create_topic("orders", queues=2, perm=6) == {}
        other = await nodes.start(name="broker-b", name_servers=(node.address,))
        created = await admin.create_topic("orders")
    kept, copied = node.broker.topics.get("orders"), other.broker.topics.get("orders")
    assert kept is not None
    assert (kept.read_queues, kept.write_queues, kept.perm) == (8, 8, 4)
    assert created == {"broker-b": copied}
    assert copied == kept


async def test_topic_may_have_the_further_permission_of_apaches_brokers(node: Node, admin: AdminClient) -> None:
    created = await admin.create_topic("orders", perm=7, message_type="", retried_first=False)
    assert created == {"broker-a": TopicConfig("orders", 4, 4, 7)}
    await admin.change_topic("orders", perm=5)
    assert node.broker.topics.get("orders") == TopicConfig("orders", 4, 4, 5)
    for perm in (8, -1):
        with pytest.raises(ConfigError, match=rf"perm: got '{perm}'; expected 0 to 7"):
            await admin.change_topic("orders", perm=perm)


async def test_change_of_a_topic_leaves_the_settings_that_are_not_named(node: Node, admin: AdminClient) -> None:
    before = TopicConfig("orders", 4, 4, 6, "MULTI_TAG", 2, message_type="FIFO")
    node.broker.topics.put(before, node.broker.store.end)
    await admin.change_topic("orders", perm=4)
    assert node.broker.topics.get("orders") == replace(before, perm=4)
    await admin.change_topic("orders", queues=6)
    assert node.broker.topics.get("orders") == replace(before, perm=4, read_queues=6, write_queues=6)
    await admin.change_topic("orders", queues=2, read_queues=6)
    assert node.broker.topics.get("orders") == replace(before, perm=4, read_queues=6, write_queues=2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"queues": 0}, "queues: got '0'; expected 1 to 65536"),
        ({"read_queues": 65537}, "read_queues: got '65537'; expected 1 to 65536"),
        ({"message_type": ""}, "message_type: got ''; expected"),
        ({"read_queues": 3}, "read_queues is 3 and producers send to 4 queues"),
        ({"queues": 4, "brokers": ["broker-z"]}, "no broker is named broker-z"),
    ],
)
async def test_invalid_change_of_a_topic_is_refused_and_changes_nothing(
    node: Node, admin: AdminClient, settings: dict[str, Any], reason: str
) -> None:
    await admin.create_topic("orders")
    before = node.broker.topics.get("orders")
    with pytest.raises(ConfigError, match=reason):
        await admin.change_topic("orders", **settings)
    assert node.broker.topics.get("orders") == before


async def test_change_that_one_of_two_brokers_refuses_names_the_broker_that_made_it(nodes: Nodes) -> None:
    node = await nodes.start()
    await nodes.start(name="broker-b", name_servers=(node.address,), limits=Limits(max_queues=500))
    async with AdminClient(node.address) as admin:
        with pytest.raises(ChangeIncomplete, match=r"made at broker-a, but .* broker-b: .* maximum 500") as caught:
            await admin.create_topic("orders", queues=1000)
        assert (caught.value.done, set(caught.value.failed)) == (["broker-a"], {"broker-b"})
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert sorted((await admin.topic("orders")).config) == ["broker-a"]
        with pytest.raises(BrokerRefused):
            await admin.create_topic("bills", queues=1000, brokers=["broker-b"])


async def test_topic_with_fewer_queues_counts_the_messages_that_are_not_readable_as_lag(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start(metrics_port=0)
    wire = await connect(node.address)
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t", queues=4)
        for queue in range(4):
            await commit(wire, 0, queue, group="reads")
            await send(wire, queue_id=queue)
        await commit(wire, 1, 3, group="reads")
        with pytest.raises(ConfigError, match=r"2 messages in t@broker-a:2, t@broker-a:3 would become unreadable"):
            await admin.change_topic("t", queues=2)
        await admin.change_topic("t", queues=2, allow_unreadable=True)
        await commit(wire, 0, 0, group="began-later")
        wanted = {Queue("t", "broker-a", number): 1 for number in (0, 1, 2)}
        assert {queue: item.lag for queue, item in (await admin.progress("reads")).items()} == wanted
        table = value(await wire.call(Code.GET_CONSUME_STATS, {"consumerGroup": "reads", "topic": "t"}))["offsetTable"]
        assert sum(item["brokerOffset"] - item["consumerOffset"] for item in table.values()) == 3
        lag = {labels: count for (name, labels), count in (await samples(node)).items() if name == LAG}
        assert lag == {
            frozenset({("group", group), ("topic", "t")}): count for group, count in (("reads", 3), ("began-later", 2))
        }
        await admin.create_group(GroupConfig("reads"))
        await admin.create_group(GroupConfig("began-later"))
        findings = [
            one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "unreadable_messages"
        ]
        assert [(one.subject, one.cure) for one in findings] == [
            ("reads", "rocketlet topics set t --read-queues 3, until the group has read them")
        ]
        await admin.change_topic("t", read_queues=3)
        assert (await admin.topic("t")).messages == 3
        assert not [
            one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "unreadable_messages"
        ]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("a b", {}, "topic"),
        ("t", {"queues": 0}, "queues: got '0'; expected 1 to"),
        ("t", {"brokers": ["broker-z"]}, "no broker is named broker-z; known: broker-a"),
    ],
)
async def test_a_topic_that_cannot_be_made_is_refused_with_the_reason(
    admin: AdminClient, name: str, settings: dict[str, int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await admin.create_topic(name, **settings)  # type: ignore[arg-type]


async def test_what_is_asked_of_all_brokers_fails_where_none_has_registered_yet() -> None:
    """Else a topic that a script makes too early would seem to be there."""
    port = free_port()
    async with (
        Server(Listening("127.0.0.1", port), broker=None, routes=Routes()),
        AdminClient(f"127.0.0.1:{port}") as admin,
    ):
        assert await admin.brokers() == []
        for asked in (
            admin.create_topic("orders"),
            admin.create_group(GroupConfig("g")),
            admin.delete_group("g"),
            admin.put_white_addresses(["127.0.0.1"]),
            admin.groups(),
            admin.group("g"),
            rebalanced(f"127.0.0.1:{port}", "g"),
        ):
            with pytest.raises(ConnectionFailed, match="the name servers know no broker; start one, or wait"):
                await asked


async def test_a_group_shows_its_members_owners_and_lag_and_keeps_lag_without_members(
    node: Node, admin: AdminClient
) -> None:
    await admin.create_topic("orders", queues=4)
    await fill(node, 8, "orders")
    seen: list[Message] = []
    async with Consumer(node.address, "shipping", "orders", seen.append, start="first") as consumer:
        await rebalanced(node.address, "shipping", members=1)
        await eventually(lambda: len(seen) == 8)
        group = await admin.group("shipping")
        assert [member.client_id for member in group.members] == [consumer.client_id]
        assert group.connections["broker-a"].subscriptions["orders"] == "*"
        mine = {queue: owner for queue, owner in group.owners.items() if queue.topic == "orders"}
        assert set(mine) == {queue for queue in consumer.assignment() if queue.topic == "orders"}
        assert set(mine.values()) == {consumer.client_id}
    await fill(node, 5, "orders")
    group = await admin.group("shipping")
    assert group.members == ()
    assert group.lag == 5
    assert await admin.groups() == ["shipping"]
    assert await admin.consumed_by("orders") == ["shipping"]


async def test_offsets_are_previewed_and_set_with_and_without_members(node: Node, admin: AdminClient) -> None:
    await admin.create_topic("orders", queues=2)
    await fill(node, 10, "orders")
    await consume_all(node, "shipping", "orders", 10)
    ends = {queue: span.end for queue, span in (await admin.topic("orders")).ranges.items()}
    wanted = {queue: OffsetChange(end, 0) for queue, end in ends.items()}
    assert await admin.preview_reset("shipping", "orders", "first") == wanted
    assert (await admin.group("shipping")).lag == 0, "a preview changes nothing"
    assert await admin.reset("shipping", "orders", "first") == wanted
    assert sum(change.repeated for change in wanted.values()) == 10
    assert (await admin.group("shipping")).lag == 10
    one = Queue("orders", "broker-a", 0)
    with pytest.raises(ConfigError, match="outside of 0 to"):
        await admin.reset("shipping", "orders", {one: 999})
    await admin.reset("shipping", "orders", {one: ends[one]})
    assert (await admin.group("shipping")).lag == 10 - ends[one]
    seen: list[Message] = []
    async with Consumer(node.address, "shipping", "orders", seen.append):
        await eventually(lambda: len(seen) == 10 - ends[one])
        await admin.reset("shipping", "orders", "first")
        await eventually(lambda: len(seen) == 20 - ends[one])
        with pytest.raises(ConfigError, match="has members; stop them"):
            await admin.reset("shipping", "orders", {one: 0})


@pytest.mark.parametrize("is_ours", [True, False])
async def test_reset_to_a_time_goes_to_the_first_message_stored_then_or_later(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """is_ours: else the broker sends its members the nearest message, as Apache's. Those without members are corrected."""
    if not is_ours:
        as_apaches = lambda topic, group, time_ms, force, exact: ResetOffset(topic, group, time_ms, force)
        monkeypatch.setattr("rocketlet.client.admin.admin_client.ResetOffset", as_apaches)
    node = await nodes.start(clock=MovableClock(stands=True))
    queue = Queue("orders", "broker-a", 0)
    times: list[int] = []
    async with AdminClient(node.address) as admin, Producer(node.address) as producer:
        await admin.create_topic("orders", queues=1)
        for number in range(3):
            node.clock.advance(10)
            times.append(node.clock.time_ms())
            await producer.send("orders", b"%d" % number)
        await consume_all(node, "shipping", "orders", 3)
        for to, offset in ((times[1], 1), (times[1] + 1, 2), (times[2] - 1, 2), (times[2] + 1, 3)):
            assert await admin.offset_at(queue, to) == offset
            assert await admin.reset("shipping", "orders", to) == {queue: OffsetChange(ANY, offset)}
            assert (await admin.group("shipping")).progress[queue].consumer_offset == offset
        seen: list[Message] = []
        async with Consumer(node.address, "shipping", "orders", seen.append) as consumer:
            await consumer.assigned()
            await admin.reset("shipping", "orders", times[2] + 1)
            await producer.send("orders", b"after")
            await eventually(lambda: bool(seen))
            assert [message.body for message in seen] == [b"after"]
            if is_ours:
                await admin.reset("shipping", "orders", times[1] + 1)
                await eventually(lambda: len(seen) == 3)
                assert [message.body for message in seen[1:]] == [b"2", b"after"]


async def test_reset_of_a_group_that_no_broker_knows_is_refused(admin: AdminClient) -> None:
    await admin.create_topic("orders", queues=1)
    with pytest.raises(ConfigError, match="no broker knows the group nogroup"):
        await admin.reset("nogroup", "orders", "first")
    assert "nogroup" not in await admin.groups()


async def test_messages_are_found_by_id_key_and_place(node: Node, admin: AdminClient) -> None:
    async with Producer(node.address) as producer:
        await admin.create_topic("orders", queues=1)
        sent = [
            await producer.send("orders", b"%d" % number, keys=f"k{number}", tag="odd" if number % 2 else "even")
            for number in range(6)
        ]
    for found in (await admin.message(sent[3].offset_id), await admin.message(sent[3].message_id, "orders")):
        assert found is not None
        assert found.body == b"3"
    assert await admin.message(sent[3].offset_id[:-4] + "0001") is None
    with pytest.raises(ConfigError, match="is not an offset id"):
        await admin.message("xyz")
    assert [item.body for item in await admin.messages_with_key("orders", "k4")] == [b"4"]
    assert await admin.messages_with_key("orders", "k9") == []
    queue = Queue("orders", "broker-a", 0)
    bodies = [item.body async for part in admin.read(queue, 2, 99) for item in part]
    assert bodies == [b"2", b"3", b"4", b"5"]
    odd = [item.body async for part in admin.read(queue, 0, 5, expression="odd") for item in part]
    assert odd == [b"1", b"3"]


async def test_deletion_of_a_topic_is_sent_to_every_name_server(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_port(), free_port()
    servers = tuple(f"127.0.0.1:{port}" for port in ports)
    asked: set[str] = set()
    request = Connection.request

    def noted(connection: Connection, code: int, *rest: Any, **more: Any) -> Any:
        if code == Code.DELETE_TOPIC_IN_NAMESRV:
            asked.add(connection.address)
        return request(connection, code, *rest, **more)

    monkeypatch.setattr(Connection, "request", noted)
    async with (
        Server(Listening("127.0.0.1", ports[0]), broker=None, routes=Routes()),
        Server(Listening("127.0.0.1", ports[1]), broker=None, routes=Routes()),
    ):
        await nodes.start(name_servers=servers)
        for address in servers:
            async with AdminClient(address) as admin:

                async def has_broker(admin: AdminClient = admin) -> bool:
                    return bool(await admin.brokers())

                await eventually(has_broker)
        async with AdminClient(";".join(servers)) as admin:
            await admin.delete_topic("t")
    assert asked == set(servers)


async def test_deletion_of_a_topic_logs_a_name_server_that_is_away(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    away = f"127.0.0.1:{free_port()}"
    async with AdminClient(f"{node.address};{away}") as admin:
        await admin.create_topic("t")
        await admin.delete_topic("t")
        assert await admin.topics() == []
    (text,) = [record.getMessage() for record in caplog.records if "name_server_failed" in record.getMessage()]
    assert away in text


async def test_groups_are_created_changed_and_deleted(admin: AdminClient) -> None:
    with pytest.raises(ConfigError, match="no broker knows the group g"):
        await admin.change_group("g", strict=True)
    with pytest.raises(ConfigError, match="stricter: no such setting; use retry_max_times"):
        await admin.change_group("g", stricter=True)  # type: ignore[call-arg]
    assert await admin.create_group(GroupConfig("g", retry_max_times=3, consume_orderly=True)) == ["broker-a"]
    assert await admin.change_group("g", strict=True, consume_enable=False) == ["broker-a"]
    wanted = GroupConfig("g", retry_max_times=3, consume_orderly=True, strict=True, consume_enable=False)
    assert await admin.group_configs("g") == {"broker-a": wanted}
    assert await admin.create_group(GroupConfig("g")) == []
    assert await admin.group_configs("g") == {"broker-a": wanted}
    await admin.change_group("g", priority_factor=80)
    await admin.change_group("g", strict=False)
    (changed,) = (await admin.group_configs("g")).values()
    assert (changed.priority_factor, changed.strict) == (80, False), "a change keeps other attributes"
    await admin.delete_group("g")
    with pytest.raises(ConfigError, match="no broker knows the group g"):
        await admin.group("g")


async def test_recreated_group_gets_no_retry_of_the_deleted_group(node: Node, admin: AdminClient) -> None:
    """Neither a retry that waits for its time, nor one that a member has handled."""
    attempts: list[tuple[bytes, int]] = []

    def handle(message: Message) -> RetryLater | None:
        attempts.append((message.body, message.reconsume_times))
        return RetryLater(delay_level=2) if message.body == b"waits" or not message.reconsume_times else None

    async with Producer(node.address) as producer:
        async with Consumer(node.address, "g", "orders", handle, start="first") as old:
            await producer.send("orders", b"handled")
            await eventually(lambda: (b"handled", 0) in attempts)
            while (b"handled", 1) not in attempts:
                node.clock.advance(5)
                await old.lag()
            await producer.send("orders", b"waits")
            await eventually(lambda: (b"waits", 0) in attempts)
        assert await admin.delete_group("g") == 0
        async with Consumer(node.address, "g", "orders", inbox := Inbox(), start="last") as new:
            await rebalanced(node.address, "g", members=1)
            await producer.send("orders", b"same delay", delay_level=2)
            while not inbox.messages:
                node.clock.advance(5)
                await new.lag()
            while await new.lag():
                pass
    assert inbox.bodies == [b"same delay"]


async def test_replay_sends_no_faster_than_its_rate_and_marks_what_it_sent_when_it_is_cancelled(
    node: Node, wire: Wire, admin: AdminClient
) -> None:
    """At one message an hour, the second message is never sent."""
    await create_topic(wire, "%DLQ%g", 1)
    await admin.create_group(GroupConfig("g"))
    for _ in range(3):
        await send(wire, b"x", topic="%DLQ%g", properties="RETRY_TOPIC\x01orders")

    async def letters() -> AsyncIterator[Message]:
        async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 3):
            for message in part:
                yield message

    replay = Replay(admin, "g", to_group=False, rate_per_s=1 / 3600)
    running = asyncio.create_task(replay.run(letters()))
    await eventually(lambda: replay.sent == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (replay.sent, replay.failed) == (1, 0)
    assert (await dead_letters(admin, "g")).new == 2


async def test_existing_group_is_copied_to_new_brokers(nodes: Nodes) -> None:
    node = await nodes.start()
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g", retry_max_times=3, strict=True))
        await nodes.start(name="broker-b", name_servers=(node.address,))
        assert await admin.create_group(GroupConfig("g")) == ["broker-b"]
        configs = await admin.group_configs("g")
    assert configs["broker-b"] == configs["broker-a"] == GroupConfig("g", retry_max_times=3, strict=True)


def test_change_of_a_group_keeps_the_fields_of_other_brokers() -> None:
    table = {
        "groupName": "g",
        "consumeTimeoutMinute": 7,
        "retryMaxTimes": 5,
        "groupRetryPolicy": {"type": "EXPONENTIAL"},
    }
    altered = orjson.loads(encode_group_change(table, {"strict": True}))
    assert altered == {**altered, **table, "strict": True}


async def test_brokers_report_their_state_and_take_settings(node: Node) -> None:
    async with AdminClient(node.address) as admin:
        (broker,) = await admin.brokers()
        assert broker.name == "broker-a"
        assert (await admin.broker_status(broker.addresses[0]))["brokerVersionDesc"] == "V4_9_8"
        await admin.update_broker_config(broker.addresses[0], {"defaultTopicQueueNums": "3"})
        assert (await admin.broker_config(broker.addresses[0]))["defaultTopicQueueNums"] == "3"
        with pytest.raises(BrokerRefused, match="cannot be changed while the broker runs"):
            await admin.update_broker_config(broker.addresses[0], {"listenPort": "1"})


@pytest.mark.parametrize("takes_locks_for_order", [False, True])
async def test_a_dead_letter_is_sent_to_its_group_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, takes_locks_for_order: bool
) -> None:
    """True: the way for Apache's 5.x, which works on each broker."""

    async def newest(connection: object, message: Message) -> int:
        return LOCKS_MEAN_ORDER_VERSION

    node = await nodes.start(delay_levels_ms=(1,) * 18)
    if takes_locks_for_order:
        monkeypatch.setattr(admin_messages, "_version", newest)
    seen: list[Message] = []

    async def handle(message: Message) -> Reject | None:
        seen.append(message)
        return Reject() if len(seen) == 1 else None

    async with (
        AdminClient(node.address) as admin,
        Consumer(node.address, "g", "t", handle, start="first"),
        Producer(node.address) as producer,
    ):
        sent = await producer.send("t", b"x" * 5000, tag="A", keys="k1", properties={"colour": "red"})
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        [[dead]] = [found async for found in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 1)]
        await admin.send_again(dead, group="g")
        await eventually(lambda: len(seen) == 2)
    again = seen[1]
    assert (again.body, again.tag, again.keys, again.message_id) == (b"x" * 5000, "A", ["k1"], sent.message_id)
    assert (again.topic, again.properties["colour"]) == ("t", "red")
    assert (again.reconsume_times > 0) == takes_locks_for_order, "handed back counts as a try"


QUEUE = Queue("t", "broker-a", 0)


async def _read(admin: AdminClient, address: str) -> None:
    async for _ in admin.read(QUEUE, 0, 1):
        pass


def _offset_id(address: str) -> str:
    host, _, port = address.rpartition(":")
    return (encode_host(host, int(port)) + bytes(8)).hex()


@pytest.mark.parametrize(
    ("code", "ask"),
    [
        (Code.GET_BROKER_CLUSTER_INFO, lambda admin, address: admin.brokers()),
        (Code.GET_BROKER_RUNTIME_INFO, lambda admin, address: admin.broker_status(address)),
        (Code.GET_BROKER_CONFIG, lambda admin, address: admin.broker_config(address)),
        (Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lambda admin, address: admin.topics()),
        (Code.GET_ROUTEINFO_BY_TOPIC, lambda admin, address: admin.topic("t")),
        (Code.GET_TOPIC_STATS_INFO, lambda admin, address: admin.topic("t")),
        (Code.QUERY_TOPIC_CONSUME_BY_WHO, lambda admin, address: admin.consumed_by("t")),
        (Code.GET_ALL_PRODUCER_INFO, lambda admin, address: admin.producers()),
        (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, lambda admin, address: admin.groups()),
        (Code.GET_CONSUMER_CONNECTION_LIST, lambda admin, address: admin.connections("g")),
        (Code.GET_GROUP_HISTORY, lambda admin, address: admin.history("g")),
        (Code.GET_CONSUME_STATS, lambda admin, address: admin.progress("g")),
        (Code.SEARCH_OFFSET_BY_TIMESTAMP, lambda admin, address: admin.offset_at(QUEUE, 0)),
        (Code.GET_ALL_DELAY_OFFSET, lambda admin, address: admin.delay_offsets()),
        (Code.GET_BROKER_CLUSTER_ACL_CONFIG, lambda admin, address: admin.accounts()),
        (Code.QUERY_MESSAGE, lambda admin, address: admin.messages_with_key("t", "k")),
        (Code.VIEW_MESSAGE_BY_ID, lambda admin, address: admin.message(_offset_id(address))),
        (Code.PULL_MESSAGE, _read),
    ],
)
async def test_an_answer_that_cannot_be_read_is_an_error_of_the_client(
    node: Node, admin: AdminClient, monkeypatch: pytest.MonkeyPatch, code: Code, ask: Callable[..., Awaitable[Any]]
) -> None:
    await admin.create_topic("t", queues=1)
    whole = Connection.call

    def call(
        connection: Connection, asked: int, ext: Any, body: bytes, answered: Callable[..., None], *rest: Any
    ) -> None:
        def spoilt(answer: Frame | Exception) -> None:
            if asked == code and isinstance(answer, Frame):
                answer = answer._replace(code=0, ext={}, body=b"\xffjunk")
            answered(answer)

        whole(connection, asked, ext, body, spoilt, *rest)

    monkeypatch.setattr(Connection, "call", call)
    with pytest.raises(AnswerUnreadable):
        await ask(admin, node.address)
