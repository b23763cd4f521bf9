"""Namespaces of resources: two of them share no topic, group, transaction or dead letter, and permissions distinguish
them."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.config import TRANSACTION_SWEEP_S
from rocketlet.broker.grpc import schema
from rocketlet.broker.runtime import MovableClock

from ...conftest import Node, Nodes, Wire
from ...support.accounts import SECRETS, AccountsFile, account
from ...support.grpc_client import GrpcClient, message, route, sending, settle, signed
from ...support.requests import bodies_of
from ...support.topics import put
from .conftest import Dial
from .receives import begin, received, request

OK, ILLEGAL_TOPIC, ILLEGAL_GROUP, UNAUTHORIZED, NO_TRANSACTION = 20000, 40002, 40003, 40100, 40008


def named(name: str, namespace: str) -> Any:
    return schema.Resource(name=name, resource_namespace=namespace)


def of(namespace: str, body: bytes = b"body", **system: Any) -> Any:
    found = message("t", body, **system)
    found.topic.resource_namespace = namespace
    return sending(found)


async def receive(client: GrpcClient, namespace: str, topic: str = "t", group: str = "g") -> list[Any]:
    asked = request(message_queue={"topic": named(topic, namespace)}, group=named(group, namespace))
    return (await received(begin(client, asked)))[1]


@pytest.fixture
async def both(node: Node) -> Node:
    put(node, "teamA%t", queues=1)
    put(node, "teamB%t", queues=1)
    return node


async def test_two_namespaces_share_no_topic_and_no_group(both: Node, client: GrpcClient, wire: Wire) -> None:
    for namespace in ("teamA", "teamB"):
        assert await receive(client, namespace) == []
    for namespace, body in (("teamA", b"of A"), ("teamB", b"of B")):
        assert (await client.call("SendMessage", of(namespace, body))).status.code == OK
    for namespace, body in (("teamB", b"of B"), ("teamA", b"of A")):
        (got,) = await receive(client, namespace)
        assert (got.body, got.topic.name, got.topic.resource_namespace) == (body, "t", namespace)
        acked = schema.AckMessageRequest(topic=named("t", namespace), group=named("g", namespace))
        acked.entries.add(message_id="1", receipt_handle=got.system_properties.receipt_handle)
        assert (await client.call("AckMessage", acked)).status.code == OK
        assert await bodies_of(wire, f"{namespace}%t") == [body], "clients of 4.9 name it so"
    assert both.broker.topics.get("t") is None
    assert {group.name for group in both.broker.group_configs} >= {"teamA%g", "teamB%g"}


@pytest.mark.parametrize("method", ["QueryRoute", "QueryAssignment"])
async def test_answers_have_names_as_the_client_gave_them(both: Node, client: GrpcClient, method: str) -> None:
    asked = getattr(schema, f"{method}Request")(topic=named("t", "teamA"))
    if method == "QueryAssignment":
        asked.group.CopyFrom(named("g", "teamA"))
    answer = await client.call(method, asked)
    (queue,) = answer.message_queues if method == "QueryRoute" else [item.message_queue for item in answer.assignments]
    assert (queue.topic.name, queue.topic.resource_namespace) == ("t", "teamA")
    asked.topic.resource_namespace = "teamC"
    assert (await client.call(method, asked)).status.code == OK, "topics are created automatically"
    assert both.broker.topics.get("teamC%t") is not None


async def test_a_transaction_belongs_to_its_namespace(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))
    put(node, "teamA%t", queues=1)
    put(node, "teamB%t", queues=1)
    client = await dial(node.address)
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.append(named("t", "teamA"))
    call, answer = await settle(client, settings)
    assert answer.settings.publishing.topics[0] == named("t", "teamA")
    sent = await client.call("SendMessage", of("teamA", message_type=4))
    transaction_id = sent.entries[0].transaction_id
    node.clock.advance(TRANSACTION_SWEEP_S + 7)
    asked = (await call.next()).recover_orphaned_transaction_command
    assert (asked.transaction_id, asked.message.topic) == (transaction_id, named("t", "teamA"))
    end = schema.EndTransactionRequest(topic=named("t", "teamB"), transaction_id=transaction_id, resolution=1)
    assert (await client.call("EndTransaction", end)).status.code == NO_TRANSACTION
    end.topic.resource_namespace = "teamA"
    assert (await client.call("EndTransaction", end)).status.code == OK
    assert node.broker.store.queues["teamA%t", 0].next == 1


async def test_dead_letters_belong_to_their_namespace(both: Node, client: GrpcClient) -> None:
    await receive(client, "teamA")
    await client.call("SendMessage", of("teamA"))
    (got,) = await receive(client, "teamA")
    asked = schema.ForwardMessageToDeadLetterQueueRequest(
        group=named("g", "teamA"), topic=named("t", "teamA"), delivery_attempt=1
    )
    asked.receipt_handle = got.system_properties.receipt_handle
    assert (await client.call("ForwardMessageToDeadLetterQueue", asked)).status.code == OK
    assert both.broker.store.queues["%DLQ%teamA%g", 0].next == 1
    both.broker.offsets.put("teamA%g", "%DLQ%teamA%g", 0, 0)
    (dead,) = await receive(client, "teamA", "%DLQ%g")
    assert (dead.topic, dead.system_properties.dead_letter_queue.topic) == (named("%DLQ%g", "teamA"), "t")


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("team%A", "t"),
        ("team A", "t"),
        ("n" * 126, "t"),
        ("teamA", "RMQ_SYS_TRACE_TOPIC"),
        ("rmq_sys_", "t"),
        ("%RETRY%", "t"),
    ],
)
async def test_namespaces_that_make_no_name_are_refused(client: GrpcClient, namespace: str, name: str) -> None:
    asked = route(name)
    asked.topic.resource_namespace = namespace
    assert (await client.call("QueryRoute", asked)).status.code == ILLEGAL_TOPIC
    assignment = schema.QueryAssignmentRequest(topic=named("t", ""), group=named("CID_RMQ_SYS_x", "teamA"))
    assert (await client.call("QueryAssignment", assignment)).status.code == ILLEGAL_GROUP


async def test_permissions_are_those_of_the_name_with_its_namespace(
    guarded: Node, dial: Dial, file: AccountsFile
) -> None:
    put(guarded, "orders", queues=1)
    put(guarded, "teamA%orders", queues=1)
    rights = {"defaultTopicPerm": "DENY", "defaultGroupPerm": "DENY"}
    file.rewrite(
        [
            account("orders-key", topicPerms=["orders=PUB|SUB"], groupPerms=["g=SUB"], **rights),
            account("readers-key", topicPerms=["teamA%orders=PUB|SUB"], groupPerms=["teamA%g=SUB"], **rights),
        ]
    )
    for access_key, own, others in (("orders-key", "", "teamA"), ("readers-key", "teamA", "")):
        client = await dial(guarded.address, authorization=signed(access_key, SECRETS[access_key]))
        for namespace, is_allowed in ((own, True), (others, False)):
            sent = message("orders")
            sent.topic.resource_namespace = namespace
            asked = request(message_queue={"topic": named("orders", namespace)}, group=named("g", namespace))
            settings = schema.Settings(client_type=1)
            settings.publishing.topics.append(named("orders", namespace))
            codes = {
                (
                    await client.call("QueryRoute", schema.QueryRouteRequest(topic=asked.message_queue.topic))
                ).status.code,
                (await client.call("SendMessage", sending(sent))).status.code,
                (await begin(client, asked).all())[0].status.code,
                (await settle(client, settings))[1].status.code,
            }
            assert codes == {OK if is_allowed else UNAUTHORIZED}
