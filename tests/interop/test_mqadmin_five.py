"""mqadmin of 5.x, unmodified, on our name server and brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .conftest import Cluster, Run, missing
from .mqadmin import Admin, admin_of, sent

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def admin(cluster: Cluster, java_five: Run) -> AsyncIterator[Admin]:
    async with admin_of(cluster, java_five) as run:
        yield run


@pytest.mark.feature("mqadmin", "updateTopic with attributes, topicRoute, topicStatus, updateTopicPerm, deleteTopic")
async def test_topics_have_a_message_type(cluster: Cluster, admin: Admin) -> None:
    text = await admin(
        "updateTopic", "-c", "DefaultCluster", "-t", "fifo", "-r", "3", "-w", "3", "-a", "+message.type=FIFO"
    )
    assert "success" in text
    found = [node.broker.topics.get("fifo") for node in cluster.nodes]
    assert [topic.message_type for topic in found if topic] == ["FIFO"] * len(cluster.nodes)
    await sent(cluster, "fifo")
    status = await admin("topicStatus", "-t", "fifo")
    assert sum(int(line.split()[3]) for line in status.splitlines() if line.startswith("broker-")) == 10
    assert (await admin("topicRoute", "-t", "fifo")).count('"readQueueNums":3') == len(cluster.nodes)
    assert "success" in await admin("updateTopicPerm", "-c", "DefaultCluster", "-t", "fifo", "-p", "4")
    assert "success" in await admin("deleteTopic", "-c", "DefaultCluster", "-t", "fifo")


@pytest.mark.feature(
    "mqadmin", "clusterList, brokerStatus, topicList, consumerProgress, updateSubGroup, getConsumerConfig"
)
async def test_clusters_and_groups_are_shown(cluster: Cluster, admin: Admin) -> None:
    await cluster.create_topic("t", 2)
    listed = await admin("clusterList")
    assert all(node.address in listed for node in cluster.nodes)
    assert "brokerVersionDesc" in await admin("brokerStatus", "-b", cluster.nodes[0].address)
    assert "t" in (await admin("topicList")).split()
    assert "success" in await admin("updateSubGroup", "-c", "DefaultCluster", "-g", "g", "-r", "5")
    assert "#Group" in await admin("consumerProgress")
    assert "groupName=g\n" in (await admin("getConsumerConfig", "-g", "g")).replace(" ", "")
