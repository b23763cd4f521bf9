"""mqadmin of 5.x, unmodified, on our name server and brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from rocketlet.broker.access import Acl, AclFile, Permission
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LiteAction, LiteSubscription, encode_lite_subscription

from ..support.requests import send
from .conftest import Cluster, Run, StartCluster, missing, runner
from .mqadmin import Admin, admin_of, sent

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def admin(cluster: Cluster, java_fives: Run) -> AsyncIterator[Admin]:
    async with admin_of(cluster, java_fives) as run:
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


@pytest.mark.feature("mqadmin", "updateTopicList, updateSubGroupList")
async def test_topics_and_groups_are_created_from_a_file(cluster: Cluster, admin: Admin, tmp_path: Path) -> None:
    topics, groups = tmp_path / "topics.json", tmp_path / "groups.json"
    topic = {"readQueueNums": 3, "writeQueueNums": 3, "perm": 6}
    typed = {**topic, "topicName": "two", "attributes": {"+message.type": "FIFO"}}
    topics.write_bytes(orjson.dumps([{**topic, "topicName": "one"}, typed]))
    groups.write_bytes(orjson.dumps([{"groupName": "g1", "retryMaxTimes": 3}, {"groupName": "g2"}]))
    assert "success" in await admin("updateTopicList", "-c", "DefaultCluster", "-f", str(topics))
    assert "success" in await admin("updateSubGroupList", "-c", "DefaultCluster", "-f", str(groups))
    for node in cluster.nodes:
        found = [node.broker.topics.get(name) for name in ("one", "two")]
        assert [(item.write_queues, item.message_type) for item in found if item] == [(3, ""), (3, "FIFO")]
        known = {group.name: group.retry_max_times for group in node.broker.group_configs}
        assert (known["g1"], known["g2"]) == (3, 16)


@pytest.mark.feature(
    "mqadmin", "createUser, updateUser, getUser, listUser, deleteUser, createAcl, getAcl, listAcl, deleteAcl"
)
async def test_users_and_acls_are_accounts(start_cluster: StartCluster, java_fives: Run, tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text("globalWhiteRemoteAddresses: [127.0.0.1]\naccounts: []\n")
    file = AclFile(path)
    cluster = await start_cluster(1, acl=Acl(file))
    at, user, subject = ("-b", cluster.nodes[0].address), ("-u", "orders-user"), ("-s", "User:orders-user")
    async with admin_of(cluster, java_fives) as admin:
        assert "success" in await admin("createUser", *at, *user, "-p", "secret-1", "-t", "Normal")
        assert "success" in await admin("updateUser", *at, *user, "-p", "secret-2")
        assert "Normal" in await admin("getUser", *at, *user)
        permission = "-r", "Topic:orders", "-a", "Pub,Sub", "-d", "Allow"
        assert "success" in await admin("createAcl", *at, *subject, *permission)
        assert "Topic:orders" in await admin("getAcl", *at, *subject)
        assert "Topic:orders" in await admin("listAcl", *at)
        assert file.policy.accounts["orders-user"].may("orders", Permission.PUB)
        assert "success" in await admin("deleteAcl", *at, *subject)
        assert not file.policy.accounts["orders-user"].may("orders", Permission.PUB)
        assert "orders-user" in await admin("listUser", *at)
        assert "success" in await admin("deleteUser", *at, *user)
    assert file.policy.accounts == {}


@pytest.mark.feature(
    "mqadmin",
    "getBrokerLiteInfo, getParentTopicInfo, getLiteTopicInfo, getLiteClientInfo, getLiteGroupInfo, triggerLiteDispatch",
    client="mqadmin 5.5.0",
)
@pytest.mark.feature("mqadmin", "consumerProgress of a lite group", client="mqadmin 5.5.0")
async def test_lite_topics_and_their_groups_are_shown(cluster: Cluster, programs_newest: Path, tmp_path: Path) -> None:
    topic, group = ("-c", "DefaultCluster", "-t", "CHAT"), ("-p", "CHAT", "-g", "g")
    async with admin_of(cluster, runner(programs_newest, tmp_path)) as admin:
        attributes = "+message.type=LITE,+lite.topic.expiration=60"
        assert "success" in await admin("updateTopic", *topic, "-r", "1", "-w", "1", "-a", attributes)
        bound = "+lite.bind.topic=CHAT"
        assert "success" in await admin("updateSubGroup", "-c", "DefaultCluster", "-g", "g", "--attributes", bound)
        for node, wire in zip(cluster.nodes, cluster.wires, strict=True):
            change = LiteSubscription(LiteAction.PARTIAL_ADD, "c1", "g", "CHAT", ("a1",))
            await wire.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))
            for _ in range(2):
                await send(wire, b"x", topic="CHAT", properties="__LITE_TOPIC\x01a1")
            assert node.broker.lites.count == 1
        assert (await admin("getBrokerLiteInfo", "-c", "DefaultCluster")).count("FILE") == len(cluster.nodes)
        assert "60" in await admin("getParentTopicInfo", "-p", "CHAT")
        assert "c1" in await admin("getLiteTopicInfo", "-p", "CHAT", "-l", "a1", "-s")
        assert "a1" in await admin("getLiteClientInfo", *group, "-c", "c1", "-s")
        shown = await admin("getLiteGroupInfo", *group)
        assert f"Total Lag Count: {2 * len(cluster.nodes)}" in shown
        assert "a1" in shown
        assert f"Total Lag Count: {2 * len(cluster.nodes)}" in await admin("getLiteGroupInfo", *group, "-l", "a1")
        assert f"Diff Total: {2 * len(cluster.nodes)}" in await admin("consumerProgress", "-g", "g")
        assert (await admin("triggerLiteDispatch", *group)).count("dispatched") == len(cluster.nodes)
