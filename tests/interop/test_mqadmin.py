"""mqadmin 4.9.8, unmodified, on our name server and brokers. Each test reads what the tool prints."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from rocketlet.client import Consumer, Producer
from rocketlet.protocol.codes import RequestCode

from ..conftest import Connect, Wire, eventually
from ..support.handlers import Inbox
from .conftest import Cluster, Run, missing, on_one_broker_and_two, own, waiting
from .features import area
from .mqadmin import Admin, admin_of, sent

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
feature = area("mqadmin")


@pytest.fixture
async def admin(cluster: Cluster, java: Run) -> AsyncIterator[Admin]:
    async with admin_of(cluster, java) as run:
        yield run


async def consumed(cluster: Cluster, topic: str, count: int) -> None:
    """A group `g` reads everything and goes."""
    inbox = Inbox()
    async with Consumer(cluster.address, "g", topic, inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == count)


@on_one_broker_and_two
@feature("clusterList, brokerStatus")
async def test_the_cluster_and_its_brokers(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t")
    await sent(cluster, "t")
    text = await admin("clusterList")
    for node in cluster.nodes:
        (line,) = [line for line in text.splitlines() if node.broker.config.name in line]
        assert line.split()[:5] == ["DefaultCluster", node.broker.config.name, "0", node.address, "V4_9_8"]
    status = await admin("brokerStatus", "-b", cluster.nodes[0].address)
    values = dict(re.findall(r"^(\w+)\s*: (.*)$", status, re.MULTILINE))
    assert values["brokerVersionDesc"].strip() == "V4_9_8"
    assert int(values["msgPutTotalTodayNow"]) > 0
    assert len(values["putTps"].split()) == 3


@feature("updateTopic, topicList, topicRoute, topicStatus, deleteTopic; ordered topics")
async def test_topics(cluster: Cluster, admin: Admin, connect: Connect) -> None:
    assert "success" in await admin("updateTopic", "-c", "DefaultCluster", "-t", "fresh", "-r", "3", "-w", "3")
    assert "success" in await admin("updateTopic", "-b", cluster.nodes[0].address, "-t", "single")
    await admin("updateTopic", "-c", "DefaultCluster", "-t", "sorted", "-o", "true")
    kept = await order_of(await connect(cluster.address), "sorted")
    assert sorted(kept.split(";")) == [f"{node.broker.config.name}:8" for node in cluster.nodes]
    names = (await admin("topicList")).split()
    assert {"fresh", "single", "sorted", "TBW102"} <= set(names)
    assert "fresh" in (await admin("topicList", "-c")).split()
    route = await admin("topicRoute", "-t", "fresh")
    assert route.count('"readQueueNums":3') == len(cluster.nodes)
    await sent(cluster, "fresh")
    status = await admin("topicStatus", "-t", "fresh")
    rows = [line.split() for line in status.splitlines() if line.startswith("broker-")]
    assert len(rows) == 3 * len(cluster.nodes)
    assert sum(int(row[3]) for row in rows) == 10
    assert "success" in await admin("deleteTopic", "-c", "DefaultCluster", "-t", "fresh")
    assert "fresh" not in (await admin("topicList")).split()
    assert all(node.broker.topics.get("fresh") is None for node in cluster.nodes)


async def order_of(name_server: Wire, topic: str) -> str:
    """The name server's entry for an ordered topic."""
    answer = await name_server.call(RequestCode.GET_KV_CONFIG, {"namespace": "ORDER_TOPIC_CONFIG", "key": topic})
    return str(answer.ext["value"])


@feature("updateSubGroup, deleteSubGroup")
async def test_groups(cluster: Cluster, admin: Admin) -> None:
    assert "success" in await admin("updateSubGroup", "-c", "DefaultCluster", "-g", "g", "-r", "5", "-s", "false")
    for node in cluster.nodes:
        settings = node.broker.group_configs.ensure("g")
        assert settings is not None
        assert (settings.retry_max_times, settings.consume_enable) == (5, False)
    await admin("updateSubGroup", "-c", "DefaultCluster", "-g", "g")
    await cluster.create_topic("t")
    await sent(cluster, "t")
    await consumed(cluster, "t", 10)
    await admin("deleteSubGroup", "-c", "DefaultCluster", "-g", "g", "-r", "true")
    assert all("g" not in [group.name for group in node.broker.group_configs] for node in cluster.nodes)
    assert all(node.broker.offsets.topics_of("g") == [] for node in cluster.nodes)
    assert "%RETRY%g" not in (await admin("topicList")).split()


@feature("consumerProgress, consumerConnection, consumerStatus, producerConnection of Python members")
async def test_a_python_group_is_shown(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t", 2)
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", {"t": "*"}, inbox, start="first", commit_interval_s=0.05) as consumer,
        Producer(cluster.address, "python_producers") as producer,
    ):
        for number in range(12):
            await producer.send("t", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 12)
        await consumer.commit()
        text = await admin("consumerProgress", "-g", "g")
        rows = [line.split() for line in text.splitlines() if line.startswith("t ")]
        assert len(rows) == 2 * len(cluster.nodes)
        assert sum(int(row[3]) for row in rows) == sum(int(row[4]) for row in rows) == 12
        assert "Diff Total: 0" in text
        (row,) = [line.split() for line in (await admin("consumerProgress")).splitlines() if line.startswith("g ")]
        assert row[1] == "1"
        text = await admin("consumerConnection", "-g", "g")
        assert consumer.client_id in text
        assert re.search(r"PYTHON\s+V4_9_8", text)
        assert "MessageModel: CLUSTERING" in text
        text = await admin("consumerStatus", "-g", "g", "-i", consumer.client_id)
        assert re.search(r"PROP_CONSUME_TYPE\s+: CONSUME_PASSIVELY", text)
        assert len(re.findall(r"^t\s+broker-", text, re.MULTILINE)) == 2 * own(consumer, "t")  # in two tables
        text = await admin("producerConnection", "-g", "python_producers", "-t", "t")
        assert producer.client_id in text


@feature("consumerConnection, consumerStatus of Java members")
async def test_a_java_member_is_shown(cluster: Cluster, admin: Admin, java: Run) -> None:
    await cluster.create_topic("t", 2)
    async with java("consume", ns=cluster.address, group="g", topic="t") as peer:
        await peer.started()
        await eventually(lambda: waiting(cluster, "g") == 3 * len(cluster.nodes))  # it has its queues, and the retries'
        text = await admin("consumerConnection", "-g", "g")
        assert re.search(r"JAVA\s+V4_9_8", text)
        client_id = re.findall(r"(\S+@\S+)\s", text)[0]
        text = await admin("consumerStatus", "-g", "g", "-i", client_id, "-s")
        assert "PROP_CONSUME_TYPE" in text
        assert len(re.findall(r"^t\s+broker-", text, re.MULTILINE)) == 4 * len(cluster.nodes)  # in two tables


@pytest.mark.parametrize("member", ["none", "python", "java"])
@feature("resetOffsetByTime with the group offline, with Python and with Java members online")
async def test_offsets_are_reset(cluster: Cluster, admin: Admin, java: Run, member: str) -> None:
    await cluster.create_topic("t", 2)
    await sent(cluster, "t", 12)
    await consumed(cluster, "t", 12)
    reset = ("resetOffsetByTime", "-g", "g", "-t", "t", "-s", "0", "-f", "true")
    if member == "none":
        await admin(*reset)
        assert all(node.broker.offsets.get("g", "t", queue) == 0 for node in cluster.nodes for queue in range(2))
    elif member == "python":
        inbox = Inbox()
        async with Consumer(cluster.address, "g", "t", inbox, start="first") as consumer:
            await consumer.assigned()
            text = await admin(*reset)
            assert text.count("broker-") >= 2 * len(cluster.nodes)
            await eventually(lambda: len(inbox.messages) == 12)
    else:
        async with java("consume", ns=cluster.address, group="g", topic="t") as peer:
            await peer.started()
            await eventually(lambda: waiting(cluster, "g") == 3 * len(cluster.nodes))
            await admin(*reset)
            await peer.until(lambda: len(peer.bodies) == 12)  # Java waits 10 s before it goes back


@feature("queryMsgById, queryMsgByKey, queryMsgByUniqueKey, queryMsgByOffset")
async def test_messages_are_found(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t")
    results = await sent(cluster, "t")
    await consumed(cluster, "t", 10)
    wanted = results[3]
    text = await admin("queryMsgById", "-i", wanted.offset_id)
    assert re.search(r"Keys:\s+\[key-3\]", text)
    assert "consumerGroup=g, trackType=NOT_ONLINE" in text
    text = await admin("queryMsgByKey", "-t", "t", "-k", "key-3")
    assert wanted.message_id in text
    text = await admin("queryMsgByUniqueKey", "-t", "t", "-i", wanted.message_id)
    assert re.search(r"Keys:\s+\[key-3\]", text)
    at = wanted.queue
    text = await admin(
        "queryMsgByOffset", "-t", "t", "-b", at.broker_name, "-i", str(at.queue_id), "-o", str(wanted.queue_offset)
    )
    assert wanted.offset_id in text


@feature("statsAll, brokerConsumeStats, consumeMessage, sendMessage")
async def test_statistics_and_single_messages(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t")
    await sent(cluster, "t")
    await consumed(cluster, "t", 10)
    (line,) = [line for line in (await admin("statsAll", "-t", "t")).splitlines() if line.startswith("t ")]
    assert line.split()[1:3] == ["g", "0"]
    text = await admin("brokerConsumeStats", "-b", cluster.nodes[0].address)
    assert re.search(r"^t\s+g\s+broker-a", text, re.MULTILINE)
    text = await admin("sendMessage", "-t", "t", "-p", "by-mqadmin", "-k", "k1")
    assert "SEND_OK" in text
    text = await admin("consumeMessage", "-t", "t", "-g", "other")
    assert "by-mqadmin" in text or cluster.stored("t") == 11


@on_one_broker_and_two
@feature("wipeWritePerm, addWritePerm")
async def test_a_broker_is_taken_out_of_writing_and_back(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t")
    assert "broker-a" in await admin("wipeWritePerm", "-b", "broker-a")
    async with Producer(cluster.address, retries=0) as producer:
        if len(cluster.nodes) == 1:
            with pytest.raises(Exception, match="has no writable queue"):
                await producer.send("t", b"x")
        else:
            assert {(await producer.send("t", b"x")).queue.broker_name for _ in range(8)} == {"broker-b"}
    assert "broker-a" in await admin("addWritePerm", "-b", "broker-a")
    async with Producer(cluster.address) as producer:
        names = {(await producer.send("t", b"x")).queue.broker_name for _ in range(16)}
    assert names == {node.broker.config.name for node in cluster.nodes}


@feature("getBrokerConfig, updateBrokerConfig of what can be changed")
async def test_settings_are_shown_and_changed(cluster: Cluster, admin: Admin) -> None:
    address = cluster.nodes[0].address
    text = await admin("getBrokerConfig", "-b", address)
    assert re.search(r"brokerName\s+=\s+broker-a", text)
    assert re.search(r"autoCreateTopicEnable\s+=\s+true", text)
    assert "success" in await admin("updateBrokerConfig", "-b", address, "-k", "autoCreateTopicEnable", "-v", "false")
    text = await admin("getBrokerConfig", "-b", address)
    assert re.search(r"autoCreateTopicEnable\s+=\s+false", text)
    assert cluster.nodes[0].broker.topics.get("TBW102") is None


@feature("cloneGroupOffset, cleanExpiredCQ, cleanUnusedTopic, producer, queryCq, allocateMQ")
async def test_the_rest(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t", 2)
    await sent(cluster, "t")
    await consumed(cluster, "t", 10)
    await admin("cloneGroupOffset", "-s", "g", "-d", "copy", "-t", "t", "-o", "true")
    for node in cluster.nodes:
        assert node.broker.offsets.of("copy", "t") == node.broker.offsets.of("g", "t")
    address = cluster.nodes[0].address
    assert "success" in await admin("cleanExpiredCQ", "-b", address)
    assert "success" in await admin("cleanUnusedTopic", "-b", address)
    text = await admin("queryCq", "-t", "t", "-q", "0", "-i", "0", "-c", "3", "-b", address)
    assert text.count("tagsCode") >= 1
    assert "127.0.0.1" in await admin("allocateMQ", "-t", "t", "-i", "127.0.0.1")
