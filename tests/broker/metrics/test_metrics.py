"""A monitoring system gets conventional names, the names of Apache's exporter, and whether the broker lives."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import sys
import urllib.request
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.config import (
    MAX_METRIC_LEVELS,
    MAX_METRICS_CONNECTIONS,
    MAX_ORPHANED_TOPICS,
    REGISTER_INTERVAL_S,
    ROOM_BYTES,
    Limits,
)
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import Rebalances, SubscribedTopic
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.runtime.histogram import Histogram
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.store import disk
from rocketlet.client import AdminClient, Consumer, LiteConsumer, Producer, RocketletError, SharedConsumer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.protocol.bodies import GroupConfig, encode_group
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.fast import MODULE
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from bench.peers import listening, process

from ...conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.handlers import Inbox
from ...support.metrics import fetched, samples
from ...support.requests import commit, join, pull, send, value
from ...support.topics import put


async def test_of_connections_that_ask_nothing_the_oldest_make_room(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.broker.metrics._Quiet.timeout", None)  # it is not time that ends them
    node = await nodes.start(metrics_port=0)
    async with AsyncExitStack() as stack:
        idle = []
        for _ in range(MAX_METRICS_CONNECTIONS + 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", node.server.metrics_port)
            stack.callback(writer.close)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: ")
            idle.append(reader)
        async with asyncio.timeout(PATIENCE_S):
            assert [await reader.read() for reader in idle[:3]] == [b""] * 3
        assert await fetched(node, "/healthz") == (200, "ok\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await idle[3].read() == b""
        assert not any(reader.at_eof() for reader in idle[4:])


async def test_a_wish_that_nobody_understands_is_answered_all_the_same(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    status, text = await fetched(node, "/metrics", accept="application/openmetrics-text; version=x; escaping=y")
    assert (status, "rocketlet_" in text) == (200, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:5557", 200),
        ("evil.example", 403),
        ("evil.example:5557", 403),
        ("[", 403),
    ],
)
async def test_on_loopback_the_port_knows_no_name_that_somebody_else_can_make_point_here(
    nodes: Nodes, host: str, status: int
) -> None:
    node = await nodes.start(metrics_port=0)
    for path in ("/metrics", "/readyz"):
        assert (await fetched(node, path, host=host))[0] == status


async def test_on_other_addresses_the_port_answers_to_any_name(nodes: Nodes) -> None:
    """As in a container, whose monitoring knows it by the name of a service."""
    node = await nodes.start(metrics_port=0, metrics_host="0.0.0.0")
    assert (await fetched(node, "/metrics", host="rocketlet:5557"))[0] == 200


async def test_info_metric_shows_the_version_and_the_module(nodes: Nodes) -> None:
    found = await samples(await nodes.start(metrics_port=0))
    assert found["rocketlet_info", frozenset({("version", version("rocketlet")), ("module", MODULE)})] == 1


async def test_what_was_sent_and_read_is_counted_by_topic_and_group(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", inbox, start="first") as consumer:
        await producer.send_batch("t", [b"x"] * 3)
        await eventually(lambda: len(inbox.messages) == 3)
        await consumer.commit()
        found = await samples(node)
    topic, both = frozenset({("topic", "t")}), frozenset({("topic", "t"), ("group", "g")})
    assert found["rocketlet_messages_put_total", topic] == found["rocketmq_producer_offset", topic] == 3
    assert found["rocketlet_messages_got_total", both] == found["rocketmq_consumer_offset", both] == 3
    assert found["rocketmq_messages_out_total", frozenset({("topic", "t"), ("consumer_group", "g")})] == 3
    assert found["rocketlet_group_lag", both] == found["rocketmq_message_accumulation", both] == 0
    assert found["rocketmq_group_get_latency_by_storetime", both] == 0
    for name in ("rocketmq_producer_tps", "rocketmq_consumer_tps"):
        assert {key for key in found if key[0] == name and ("topic", "t") in key[1]}, name
    assert ("rocketmq_broker_tps", frozenset()) in found
    assert found["rocketlet_connections", frozenset()] >= 1
    assert found["process_open_fds", frozenset()] > 0


async def test_messages_that_are_popped_are_counted_by_topic_and_group(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    inbox = Inbox()
    async with Producer(node.address) as producer, SharedConsumer(node.address, "g", "t", inbox, start="first"):
        await producer.send_batch("t", [b"x"] * 3)
        await eventually(lambda: len(inbox.messages) == 3)
        found = await samples(node)
    assert found["rocketmq_messages_out_total", frozenset({("topic", "t"), ("consumer_group", "g")})] == 3
    assert found["rocketlet_messages_got_total", frozenset({("topic", "t"), ("group", "g")})] == 3
    assert node.broker.statistics.got_bytes["t@g"] > 3


async def test_lag_of_a_lite_group_is_that_of_the_lite_topics_that_it_reads(nodes: Nodes) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(metrics_port=0, clock=clock)
    put(node, message_type="LITE", lite_expiration_min=1)
    inbox = Inbox()
    async with Producer(node.address) as producer:
        async with LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"]):
            for name in ("a", "unread"):
                await producer.send("t", b"x", lite_topic=name)
            await eventually(lambda: node.broker.lite_offsets.of("g", "t") == {"a": 1})
        await producer.send("t", b"x", lite_topic="a")
        clock.advance(2)
        both = frozenset({("topic", "t"), ("group", "g")})
        found = await samples(node)
        assert found["rocketlet_group_lag", both] == found["rocketmq_message_accumulation", both] == 1
        assert (found["rocketmq_consumer_offset", both], found["rocketlet_group_oldest_seconds", both]) == (1, 2)
        assert ("rocketlet_messages_expired_unread_total", both) not in found
        clock.advance(300)  # after the time in which clients may come back
        await eventually(lambda: node.broker.lites.count == 0)
    found = await samples(node)
    assert found["rocketlet_group_lag", both] == 0
    assert found["rocketlet_messages_expired_unread_total", both] == 1


async def test_requests_are_timed_by_their_name(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    async with Producer(node.address) as producer:
        for _ in range(3):
            await producer.send("t", b"x")
    found = await samples(node)
    count = {
        dict(labels)["request"]: value
        for (name, labels), value in found.items()
        if name == "rocketlet_request_seconds_count"
    }
    assert sum(value for request, value in count.items() if request.startswith("SEND_")) == 3
    assert count["GET_ROUTEINFO_BY_TOPIC"] >= 1
    assert "PULL_MESSAGE" not in count, "what nobody asked has no series"
    assert all(dict(labels)["request"] in count for (_, labels) in found if any(key == "request" for key, _ in labels))


def owned(consumer: Consumer) -> int:
    return sum(queue.topic == "t" for queue in consumer.assignment())


async def test_a_handover_and_a_rebalance_are_timed(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    async with Producer(node.address) as producer:
        await producer.send("t", b"x")
    async with Consumer(node.address, "g", "t", Inbox()) as one:
        await eventually(lambda: owned(one) == 4)
        async with Consumer(node.address, "g", "t", Inbox()) as two:
            await eventually(lambda: owned(two) == 2)
            node.clock.advance(10)
            await eventually(lambda: sum(node.broker.history.rebalances.settling.counts) >= 1)
            found = await samples(node)
    assert found["rocketlet_handover_seconds_count", frozenset()] >= 2
    assert found["rocketlet_settle_seconds_count", frozenset()] >= 1


def test_queues_that_are_never_locked_again_are_forgotten() -> None:
    clock = MovableClock(stands=True)
    rebalances, group = Rebalances(Runtime(clock, Limits(max_free_queues=2))), ConsumerGroup("g")
    for queue in range(3):
        rebalances.changed_hands(group, ("g", "t", queue), is_free=True)
    for queue in range(3):
        rebalances.changed_hands(group, ("g", "t", queue), is_free=False)
    assert sum(rebalances.handovers.counts) == 2


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for duration_s in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(duration_s)
    assert histogram.buckets() == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert histogram.sum_s == 7.65


async def test_health_is_distinguished_from_readiness(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    assert await fetched(node, "/healthz") == await fetched(node, "/readyz") == (200, "ok\n")
    node.broker.store.fail(os.strerror(errno.EIO))
    assert (await fetched(node, "/healthz"))[0] == 200
    status, text = await fetched(node, "/readyz")
    assert (status, "check the disk" in text) == (503, True)
    assert (await fetched(node, "/"))[0] == 404


async def test_a_full_disk_is_said_by_readiness_metric_log_and_doctor_until_there_is_room(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(metrics_port=0)
    free_bytes = 1_000

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rocketlet.broker.store.disk.free_bytes", lambda folder: free_bytes)
    async with AdminClient(node.address) as admin, Producer(node.address, retries=0) as producer:
        await producer.send("t", b"x")
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr("rocketlet.broker.store.disk.write", full)
            for _ in range(3):
                with pytest.raises(RocketletError):
                    await producer.send("t", b"x")
            status, text = await fetched(node, "/readyz")
            assert (status, "No space left on device" in text) == (503, True)
            assert (await samples(node))["rocketlet_store_full", frozenset()] == 1
            (finding,) = [
                found for found in await diagnose(admin, ObservationTimes(0, 0, 0)) if found.kind == "writes_refused"
            ]
            assert "free space" in finding.cure
        assert [line["event"] for line in logs].count("writes_refused") == 1
        free_bytes += ROOM_BYTES
        assert (await fetched(node, "/readyz"))[0] == 200, "space was freed, and nobody sends to who is not ready"
        assert (await samples(node))["rocketlet_store_full", frozenset()] == 0


async def test_a_broker_that_no_name_server_knows_is_not_ready(nodes: Nodes) -> None:
    port = free_port()
    node = await nodes.start(metrics_port=0, name_servers=(f"127.0.0.1:{port}",))
    assert await fetched(node, "/readyz") == (503, "the broker is not registered with a name server\n")
    async with Server(Listening("127.0.0.1", port), broker=None, routes=Routes()):
        node.clock.advance(REGISTER_INTERVAL_S)
        await eventually(lambda: node.broker.registration.is_registered)
        assert (await fetched(node, "/readyz"))[0] == 200
    node.clock.advance(REGISTER_INTERVAL_S)
    await eventually(lambda: not node.broker.registration.is_registered)


def test_a_disk_is_as_full_as_df_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage("/")._replace(total=1_000, used=110, free=240)  # 650 are reserved for root
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert disk.used_ratio(tmp_path) == 110 / 350


@pytest.mark.limits(metrics_answer_s=0.01)
async def test_a_scrape_that_takes_too_long_says_so_and_does_not_continue(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    node = await nodes.start(metrics_port=0)
    ended = asyncio.Event()

    async def endless(_: object) -> list[object]:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        return []

    monkeypatch.setattr("rocketlet.broker.metrics.Collector.snapshot", endless)
    status, text = await fetched(node, "/metrics")
    assert (status, text) == (503, "the event loop has not responded for 0.01 s\n")
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
    assert "Traceback" not in capfd.readouterr().err


async def test_queues_that_nobody_reads_are_reported_by_group_and_topic_up_to_a_limit(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    group = node.broker.groups.obtain("g")
    group.topics = {f"t{number}": SubscribedTopic(orphaned=1) for number in range(MAX_ORPHANED_TOPICS + 1)}
    group.topics["most"] = SubscribedTopic(orphaned=3)
    _, text = await fetched(node, "/metrics")
    told = [line for line in text.splitlines() if line.startswith("rocketlet_group_orphaned_queues{")]
    assert len(told) == MAX_ORPHANED_TOPICS
    assert [line.partition("} ")[2] for line in told if 'topic="most"' in line and 'group="g"' in line] == ["3.0"]
    (total,) = [line for line in text.splitlines() if line.startswith("rocketlet_orphaned_queues{")]
    assert total.endswith(f" {MAX_ORPHANED_TOPICS + 4}.0")


async def test_a_broadcasting_group_has_no_lag_whatever_it_committed_before(nodes: Nodes) -> None:
    """Its members keep their own offsets. The one that the broker has is of a time before."""
    node = await nodes.start(metrics_port=0)
    inbox = Inbox()
    async with Producer(node.address) as producer:
        await producer.send("t", b"before")
        async with Consumer(node.address, "g", "t", inbox, start="first"):
            await eventually(lambda: len(inbox.messages) == 1)
        await producer.send("t", b"now")
        async with Consumer(node.address, "g", "t", inbox, start="first", broadcasting=True) as consumer:
            await consumer.assigned()
            await eventually(lambda: len(inbox.messages) == 3)
            found = await samples(node)
            async with AdminClient(node.address) as admin:
                assert (await admin.group("g")).lag == 0
                (report,) = await admin.history("g")
                assert report["lag"] == []
                findings = await diagnose(admin, ObservationTimes(0.0, 0.0, 0.0))
    by_offsets = {
        "rocketlet_group_lag", "rocketlet_group_oldest_seconds", "rocketmq_message_accumulation", "rocketmq_consumer_offset",
        "rocketmq_group_get_latency_by_storetime",
    }  # fmt: skip
    assert not [(name, labels) for name, labels in found if name in by_offsets and ("group", "g") in labels]
    assert not [finding for finding in findings if finding.subject == "g"]


async def test_metrics_of_5_1_have_its_names_and_labels(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    async with (
        Producer(node.address) as producer,
        SharedConsumer(node.address, "g", "t", start="first", concurrency=1) as consumer,
    ):
        for _ in range(3):
            await producer.send("t", b"x")
        await consumer.receive()
        found = await samples(node)
    topic, both = frozenset({("topic", "t")}), frozenset({("topic", "t"), ("consumer_group", "g")})
    assert found["rocketmq_messages_in_total", topic] == 3
    assert found["rocketmq_consumer_lag_messages", both] == 3
    assert found["rocketmq_consumer_inflight_messages", both] == 1
    assert found["rocketmq_consumer_ready_messages", both] == 2
    assert found["rocketmq_consumer_lag_latency", both] >= 0


async def test_lag_of_topics_with_priorities_is_reported_by_level(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    async with AdminClient(node.address) as admin, Producer(node.address) as producer:
        await admin.create_topic("t", queues=4, message_type="PRIORITY")
        await admin.create_topic("wide", queues=MAX_METRIC_LEVELS + 1, message_type="PRIORITY")
        await admin.create_topic("plain", queues=4)
        for priority in (0, 0, 1, 3, 3, 3):
            await producer.send("t", b"%d" % priority, priority=priority)
        for priority in (0, MAX_METRIC_LEVELS - 1, MAX_METRIC_LEVELS):
            await producer.send("wide", b"%d" % priority, priority=priority)
        await producer.send("plain", b"x")
        async with (
            SharedConsumer(node.address, "g", "t", start="first") as consumer,
            SharedConsumer(node.address, "g2", {"plain": "*", "wide": "*"}, start="first") as other,
        ):
            await other.receive()
            message = await consumer.receive()
            assert message.body == b"3"
            await consumer.ack(message)
            lags = await level_lags(node)
            assert {topic for _, topic, _ in lags} == {"t", "wide"}
            assert [lags["g", "t", str(level)] for level in range(4)] == [2, 1, 0, 2]
            wide = [lags["g2", "wide", str(level)] for level in range(MAX_METRIC_LEVELS)]
            assert wide == [1, *[0] * (MAX_METRIC_LEVELS - 2), 2], "the last level includes the higher ones"
            assert len(lags) == 4 + MAX_METRIC_LEVELS


async def level_lags(node: Node) -> dict[tuple[str, str, str], float]:
    found = {name_labels: lag for name_labels, lag in (await samples(node)).items() if "level_lag" in name_labels[0]}
    names = ("group", "topic", "level")
    return {tuple(dict(labels)[name] for name in names): lag for (_, labels), lag in found.items()}  # type: ignore[misc]


async def test_a_search_is_not_counted_as_consumption(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)
    async with Producer(node.address) as producer, AdminClient(node.address) as admin:
        await producer.send_batch("t", [b"x"] * 3)
        for queue, span in (await admin.topic("t")).ranges.items():
            for _ in range(3):  # the first pull is checked, the others are like it
                found = [message async for part in admin.read(queue, span.begin, span.end) for message in part]
                assert len(found) == span.end - span.begin
        read = [key for key in await samples(node) if key[0] == "rocketlet_messages_got_total"]
    assert read == []


# Apache's exporter for Prometheus and its dashboard (2.1) ask and read, request by request.


# The answer of Apache's 4.9.7, asked a minute after its start.
APACHE = """
EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity bootTimestamp brokerVersion brokerVersionDesc
commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset commitLogMinOffset consumeQueueDiskRatio
dispatchBehindBytes dispatchMaxBuffer earliestMessageTimeStamp getFoundTps getMessageEntireTimeMax getMissTps
getTotalTps getTransferedTps msgGetTotalTodayMorning msgGetTotalTodayNow msgGetTotalYesterdayMorning
msgPutTotalTodayMorning msgPutTotalTodayNow msgPutTotalYesterdayMorning pageCacheLockTimeMills
pullThreadPoolQueueCapacity pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putLatency99
putLatency999 putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax putMessageFailedTimes
putMessageSizeTotal putMessageTimesTotal putTps queryThreadPoolQueueCapacity
queryThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize remainHowManyDataToFlush
remainTransientStoreBufferNumbs runtime sendThreadPoolQueueCapacity sendThreadPoolQueueHeadWaitTimeMills
sendThreadPoolQueueSize startAcceptSendRequestTimeStamp
""".split()
TEXTS = {"brokerVersionDesc", "commitLogDirCapacity", "putMessageDistributeTime", "remainHowManyDataToFlush", "runtime"}
RATES = {name for name in APACHE if name.endswith("Tps")}
SEND = {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0, "j": 0, "k": "false", "m": "false"}


async def test_the_runtime_has_all_that_the_exporter_reads_in_the_forms_that_it_reads(wire: Wire) -> None:
    await create_topic(wire, "t")
    for properties in ("", "", "", "DELAY\x013\x02"):
        assert (await wire.call(Code.SEND_MESSAGE_V2, {**SEND, "i": properties}, b"x")).code == 0
    table = value(await wire.call(Code.GET_BROKER_RUNTIME_INFO))["table"]
    assert sorted(set(APACHE) - set(table)) == []
    for name in set(APACHE) - TEXTS - RATES:
        float(table[name])
    for name in RATES:
        assert [float(rate) for rate in table[name].split()], name
    assert re.fullmatch(r"Total : [\d.]+ GiB, Free : [\d.]+ GiB\.", table["commitLogDirCapacity"])
    levels = dict(level.split(":") for level in table["putMessageDistributeTime"].split())
    assert (len(levels), sum(map(int, levels.values()))) == (13, 4)
    assert table["remainHowManyDataToFlush"].split()[1][0] not in "KMGTPE"
    assert table["scheduleMessageOffset_3"] == "0,1"
    assert int(table["putMessageTimesTotal"]) == 4
    assert float(table["putMessageAverageSize"]) == int(table["putMessageSizeTotal"]) / 4 > 100


async def test_the_statistics_that_the_exporter_asks_for_count_messages_and_bytes(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await send(wire)
    pulled = await wire.call(Code.PULL_MESSAGE, pull())
    back = {"offset": 0, "group": "g", "delayLevel": 3, "originTopic": "t", "unitMode": "false"}
    assert (await wire.call(Code.CONSUMER_SEND_MSG_BACK, back)).code == 0
    for name, key, total in (
        ("TOPIC_PUT_NUMS", "t", 5),
        ("TOPIC_PUT_SIZE", "t", len(pulled.body)),
        ("GROUP_GET_NUMS", "t@g", 5),
        ("GROUP_GET_SIZE", "t@g", len(pulled.body)),
        ("SNDBCK_PUT_NUMS", "t@g", 1),
        ("BROKER_PUT_NUMS", "DefaultCluster", 6),
        ("BROKER_GET_NUMS", "DefaultCluster", 5),
    ):
        found = value(await wire.call(Code.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key}))
        assert {found[part]["sum"] for part in ("statsMinute", "statsHour", "statsDay")} == {total}, name
        assert found["statsMinute"]["tps"] > 0


TOPIC = {"topic": "t"}
GROUP = {"consumerGroup": "g"}
BOTH = {"topic": "t", "group": "g"}
QUEUE = {"topic": "t", "queueId": 0}
KV = {"namespace": "ORDER_TOPIC_CONFIG", "key": "t"}
NEW_TOPIC = {
    "topic": "new", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "order": "false",
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
}  # fmt: skip
ASKED: list[tuple[str, int, dict[str, Any], bytes]] = [
    ("examineBrokerClusterInfo", Code.GET_BROKER_CLUSTER_INFO, {}, b""),
    ("fetchAllTopicList", Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, b""),
    ("fetchTopicsByCLuster", Code.GET_TOPICS_BY_CLUSTER, {"cluster": "DefaultCluster"}, b""),
    ("examineTopicRouteInfo", Code.GET_ROUTEINFO_BY_TOPIC, TOPIC, b""),
    ("examineTopicStats", Code.GET_TOPIC_STATS_INFO, TOPIC, b""),
    ("examineTopicConfig", Code.GET_TOPIC_CONFIG, TOPIC, b""),
    ("getAllTopicConfig", Code.GET_ALL_TOPIC_CONFIG, {}, b""),
    ("createAndUpdateTopicConfig", Code.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC, b""),
    ("queryTopicConsumeByWho", Code.QUERY_TOPIC_CONSUME_BY_WHO, TOPIC, b""),
    ("examineConsumeStats", Code.GET_CONSUME_STATS, GROUP, b""),
    ("examineConsumeStats of a topic", Code.GET_CONSUME_STATS, {**GROUP, **TOPIC}, b""),
    ("fetchConsumeStatsInBroker", Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}, b""),
    ("examineConsumerConnectionInfo", Code.GET_CONSUMER_CONNECTION_LIST, GROUP, b""),
    ("examineProducerConnectionInfo", Code.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "p"}, b""),
    ("getAllProducerInfo", Code.GET_ALL_PRODUCER_INFO, {}, b""),
    ("fetchBrokerRuntimeStats", Code.GET_BROKER_RUNTIME_INFO, {}, b""),
    ("viewBrokerStatsData", Code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "t"}, b""),
    ("getBrokerConfig", Code.GET_BROKER_CONFIG, {}, b""),
    ("updateBrokerConfig", Code.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=72\n"),
    ("getAllSubscriptionGroup", Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, b""),
    ("examineSubscriptionGroupConfig", Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"}, b""),
    ("createAndUpdateSubscriptionGroupConfig", Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, encode_group(GroupConfig("h"))),
    ("queryConsumeTimeSpan", Code.QUERY_CONSUME_TIME_SPAN, BOTH, b""),
    ("cloneGroupOffset", Code.CLONE_GROUP_OFFSET, {"srcGroup": "g", "destGroup": "h", **TOPIC, "offline": "false"}, b""),
    ("maxOffset", Code.GET_MAX_OFFSET, QUEUE, b""),
    ("minOffset", Code.GET_MIN_OFFSET, QUEUE, b""),
    ("searchOffset", Code.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 0}, b""),
    ("earliestMsgStoreTime", Code.GET_EARLIEST_MSG_STORETIME, QUEUE, b""),
    ("updateConsumeOffset", Code.UPDATE_CONSUMER_OFFSET, {**GROUP, **QUEUE, "commitOffset": 1}, b""),
    ("resetOffsetByTimestamp", Code.INVOKE_BROKER_TO_RESET_OFFSET, {**BOTH, "timestamp": 0, "isForce": "true"}, b""),
    ("viewMessage", Code.VIEW_MESSAGE_BY_ID, {"offset": 0}, b""),
    ("createAndUpdateKvConfig", Code.PUT_KV_CONFIG, {**KV, "value": "broker-a:4"}, b""),
    ("getKVConfig", Code.GET_KV_CONFIG, KV, b""),
    ("getKVListByNamespace", Code.GET_KVLIST_BY_NAMESPACE, {"namespace": KV["namespace"]}, b""),
    ("deleteKvConfig", Code.DELETE_KV_CONFIG, KV, b""),
    ("wipeWritePermOfBroker", Code.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b""),
    ("addWritePermOfBroker", Code.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b""),
    ("cleanExpiredConsumerQueue", Code.CLEAN_EXPIRED_CONSUMEQUEUE, {}, b""),
    ("cleanUnusedTopic", Code.CLEAN_UNUSED_TOPIC, {}, b""),
    ("getNamesrvConfig", Code.GET_NAMESRV_CONFIG, {}, b""),
    ("deleteSubscriptionGroup", Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "h"}, b""),
    ("deleteTopicInBroker", Code.DELETE_TOPIC_IN_BROKER, {"topic": "new"}, b""),
    ("deleteTopicInNameServer", Code.DELETE_TOPIC_IN_NAMESRV, {"topic": "new"}, b""),
]  # fmt: skip
# Only 5.x's brokers have it; the dashboard says that the broker does not support it.
OF_5 = {"getColdDataFlowCtrInfo": 2004}


async def test_each_of_their_requests_is_answered(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire)
    await join(wire, "c1", producers=("p",))
    for queue in range(4):
        await commit(wire, 0, queue)
    answers = {name: await wire.call(code, ext, body) for name, code, ext, body in ASKED}
    assert {name: answer.remark for name, answer in answers.items() if answer.code} == {}
    query = {**TOPIC, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
    assert (await wire.call(Code.QUERY_MESSAGE, query)).code == ResponseCode.QUERY_NOT_FOUND
    for code in (Code.GET_CONSUMER_RUNNING_INFO, Code.CONSUME_MESSAGE_DIRECTLY):  # asked of a member
        answer = await wire.call(code, {**GROUP, "clientId": "nobody", "msgId": "0" * 32, "brokerName": "broker-a"})
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "nobody" in (answer.remark or "")


async def test_what_5_has_is_refused_immediately_and_by_name(wire: Wire) -> None:
    for name, code in OF_5.items():
        assert (await wire.call(code, {})).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED, name


# A name server that runs alone measures itself.


async def test_a_name_server_reports_its_brokers_and_of_those_that_are_gone(
    nodes: Nodes, connect: Connect, tmp_path: Path
) -> None:
    port, metrics_port = free_port(), free_port()
    command = (
        sys.executable, "-m", "rocketlet.command.cli", "nameserver", "--port", str(port), "--metrics-port", str(metrics_port),
    )  # fmt: skip
    async with process(command, tmp_path / "log") as pid:
        await listening(metrics_port, pid=pid)
        node = await nodes.start(name_servers=(f"127.0.0.1:{port}",))
        await create_topic(await connect(node.address), "t")

        async def metrics() -> list[str]:
            return (await asyncio.to_thread(get, f"http://127.0.0.1:{metrics_port}/metrics")).splitlines()

        assert "rocketlet_name_server_brokers 1.0" in await metrics()
        await node.stop()
        gone = 'rocketlet_name_server_departed_broker{broker="broker-a",cluster="DefaultCluster"} 1.0'
        assert gone in await metrics()
        assert await asyncio.to_thread(get, f"http://127.0.0.1:{metrics_port}/readyz") == "ok\n"


def get(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())
