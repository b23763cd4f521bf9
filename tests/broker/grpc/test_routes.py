"""Routes and settings: what every client asks first."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.config import (
    LIMITS,
    MAX_ENDPOINTS_BYTES,
    MEMBER_BYTES,
    ROUTE_PIECE_BYTES,
    TRANSACTION_CHECK_INTERVAL_S,
    Limits,
)
from rocketlet.broker.grpc import schema, server
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, Work
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, eventually
from ...support.accounts import SECRETS, AccountsFile, account
from ...support.grpc_client import GrpcClient, apply_settings, message, resource, route, sending, signed
from ...support.requests import bodies_of
from ...support.topics import put
from ...support.two_brokers import two_brokers
from .conftest import Dial
from .receives import begin, received, request

OK = 20000


# Routes


async def test_a_route_has_the_address_that_the_client_used(node: Node, client: GrpcClient) -> None:
    put(node, queues=2)
    answer = await client.call("QueryRoute", route("t", "my-broker.example", 18081))
    assert [(queue.id, queue.permission) for queue in answer.message_queues] == [(0, 4), (1, 4)]
    (address,) = answer.message_queues[0].broker.endpoints.addresses
    assert (address.host, address.port, answer.message_queues[0].broker.name) == (
        "my-broker.example",
        18081,
        "broker-a",
    )
    assert list(answer.message_queues[0].accept_message_types) == [1, 2, 3, 4]


async def test_without_an_address_the_route_has_the_one_of_the_call(node: Node, client: GrpcClient) -> None:
    put(node)
    answer = await client.call("QueryRoute", route("t"))
    endpoints = answer.message_queues[0].broker.endpoints
    assert (endpoints.scheme, endpoints.addresses[0].host, endpoints.addresses[0].port) == (1, "127.0.0.1", 1)


async def test_a_topic_is_created_with_its_route_if_it_may(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(auto_create_topics=True, default_queues=3)
    client = await dial(node.address)
    assert len((await client.call("QueryRoute", route("new"))).message_queues) == 3
    for name in ("%RETRY%g", "%DLQ%g"):
        assert (await client.call("QueryRoute", route(name))).status.code == 40402
    strict = await nodes.start(auto_create_topics=False, name="b", port=free_port())
    answer = await (await dial(strict.address)).call("QueryRoute", route("new"))
    assert (answer.status.code, strict.broker.topics.get("new")) == (40402, None)


ILLEGAL_NAMES: list[str] = ["", " ", "a b", "ü", "x" * 128, "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_x", "rmq_sys_x", "TBW102"]


async def test_names_that_no_topic_may_have(client: GrpcClient) -> None:
    for name in ILLEGAL_NAMES:
        assert (await client.call("QueryRoute", route(name))).status.code == 40002


async def test_queues_that_may_only_be_read_or_written_are_shown_so(node: Node, client: GrpcClient) -> None:
    node.broker.topics.put(TopicConfig("t", 1, 3), node.broker.store.end)
    answer = await client.call("QueryRoute", route("t"))
    assert [queue.permission for queue in answer.message_queues] == [4, 3, 3]
    node.broker.topics.put(TopicConfig("t", 1, 1, 0), node.broker.store.end)
    assert [queue.permission for queue in (await client.call("QueryRoute", route("t"))).message_queues] == [1]


@pytest.mark.parametrize("method", ["QueryRoute", "QueryAssignment"])
async def test_what_each_queue_of_a_route_repeats_has_a_limit(node: Node, client: GrpcClient, method: str) -> None:
    put(node, queues=1)

    def asking(host: str) -> Any:
        request = getattr(schema, f"{method}Request")(topic=resource("t"))
        request.endpoints.addresses.add(host=host, port=1)
        if method == "QueryAssignment":
            request.group.name = "g"
        return request

    host = "h" * (MAX_ENDPOINTS_BYTES - 10)
    assert (await client.call(method, asking(host))).status.code == OK
    assert (await client.call(method, asking(host + "h" * 20))).status.code == 40001


@pytest.mark.parametrize("method", ["QueryRoute", "QueryAssignment"])
async def test_an_answer_with_thousands_of_queues_is_made_in_pieces(
    nodes: Nodes, dial: Dial, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """4,096 queues with endpoints of 2 KB took 240 ms in one piece."""
    pieces = 0
    handler = server.METHODS[method].handler

    def counted(*arguments: Any) -> Work[None]:
        nonlocal pieces
        for _ in handler(*arguments):
            pieces += 1
            yield

    monkeypatch.setitem(server.METHODS, method, server.METHODS[method]._replace(handler=counted))
    node = await nodes.start()
    put(node, queues=4096)
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    request = getattr(schema, f"{method}Request")(topic=resource("t"))
    for number in range(30):
        request.endpoints.addresses.add(host=f"host-{number:04}", port=number)
    if method == "QueryAssignment":
        request.group.name = "g"
    answer = await (await dial(node.address)).call(method, request)
    queues = answer.message_queues if method == "QueryRoute" else [item.message_queue for item in answer.assignments]
    assert [queue.id for queue in queues] == list(range(4096))
    assert all(queue.broker.endpoints == request.endpoints for queue in queues)
    assert pieces > answer.ByteSize() // ROUTE_PIECE_BYTES
    assert all(connection.charged_bytes < answer.ByteSize() for connection in node.server.connections)


async def test_a_group_is_given_one_place_for_all_queues(node: Node, client: GrpcClient) -> None:
    put(node)
    request = schema.QueryAssignmentRequest(topic=resource("t"), group=resource("g"))
    answer = await client.call("QueryAssignment", request)
    assert [item.message_queue.id for item in answer.assignments] == [-1]
    put(node, "write-only", perm=2)
    request.topic.name = "write-only"
    assert (await client.call("QueryAssignment", request)).status.code == 40300
    request.group.name = "CID_RMQ_SYS_x"
    assert (await client.call("QueryAssignment", request)).status.code == 40003


async def test_a_route_has_the_queues_of_all_brokers(nodes: Nodes, connect: Connect, dial: Dial) -> None:
    """Asked at either: the name server is in the first one's process."""
    two = await two_brokers(nodes, connect)
    for node in (two.a, two.b):
        client = await dial(node.address)
        answer = await client.call("QueryRoute", route("t", "reached.example", 1))
        found = {queue.broker.name: queue.broker.endpoints.addresses[0] for queue in answer.message_queues}
        assert sorted(found) == ["broker-a", "broker-b"]
        for other in (two.a, two.b):
            address = found[other.config.name]
            expected = "reached.example:1" if other is node else other.address
            assert f"{address.host}:{address.port}" == expected
        request = schema.QueryAssignmentRequest(topic=resource("t"), group=resource("g"))
        places = (await client.call("QueryAssignment", request)).assignments
        assert [(item.message_queue.broker.name, item.message_queue.id) for item in places] == [
            (node.config.name, -1),
            ("broker-b" if node is two.a else "broker-a", -1),
        ]


async def test_a_topic_of_another_broker_is_not_created_here(nodes: Nodes, connect: Connect, dial: Dial) -> None:
    two = await two_brokers(nodes, connect)
    put(two.b, "theirs", queues=1)
    while await two.b.broker.name_servers.find_route("theirs") is None:
        pass
    answer = await (await dial(two.a.address)).call("QueryRoute", route("theirs"))
    assert [queue.broker.name for queue in answer.message_queues] == ["broker-b"]
    assert two.a.broker.topics.get("theirs") is None


async def test_routes_that_wait_for_a_name_server_have_a_limit(nodes: Nodes, connect: Connect, dial: Dial) -> None:
    two = await two_brokers(nodes, connect, Limits(max_answering=0))
    answer = await (await dial(two.b.address)).call("QueryRoute", route("t"))
    assert (answer.status.code, "retry" in answer.status.message) == (50001, True)


# Settings


async def test_the_settings_of_a_producer_have_every_field(client: GrpcClient) -> None:
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    _, answer = await apply_settings(client, settings)
    found = answer.settings
    assert (answer.status.code, found.client_type, found.publishing.topics[0].name) == (OK, 1, "t")
    assert (found.publishing.max_body_size, found.publishing.validate_message_type) == (MAX_BODY_BYTES, True)
    assert (found.HasField("metric"), found.metric.on) == (True, False)
    policy = found.backoff_policy
    assert (policy.max_attempts, policy.WhichOneof("strategy")) == (3, "exponential_backoff")
    assert (policy.exponential_backoff.max.seconds, policy.exponential_backoff.multiplier) == (1, 2)


async def test_the_settings_of_a_consumer_have_every_field(client: GrpcClient) -> None:
    settings = schema.Settings(client_type=2)
    settings.subscription.group.name = "g"
    settings.subscription.subscriptions.add().topic.name = "t"
    _, answer = await apply_settings(client, settings)
    found = answer.settings
    assert (found.subscription.receive_batch_size, found.subscription.long_polling_timeout.seconds) == (32, 20)
    assert found.subscription.HasField("fifo")
    assert found.HasField("metric")
    assert found.backoff_policy.max_attempts == 17
    assert len(found.backoff_policy.customized_backoff.next) == 18


async def test_retry_times_of_a_consumer_in_node_are_exponential(client: GrpcClient) -> None:
    """Its client does not read a list of times."""
    settings = schema.Settings(client_type=2, user_agent={"language": 8})
    settings.subscription.group.name = "g"
    settings.subscription.subscriptions.add().topic.name = "t"
    _, answer = await apply_settings(client, settings)
    policy = answer.settings.backoff_policy
    assert (policy.max_attempts, policy.WhichOneof("strategy")) == (17, "exponential_backoff")
    backoff = policy.exponential_backoff
    assert (backoff.initial.seconds, backoff.max.seconds, backoff.multiplier) == (1, 7200, 2)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (schema.Settings(client_type=1), 40000),
        (schema.Settings(client_type=4, subscription={"group": {"name": "g"}}), 40015),
        (schema.Settings(client_type=2, subscription={"group": {"name": "a b"}}), 40003),
        (schema.Settings(client_type=1, publishing={"topics": [{"name": "a b"}]}), 40002),
    ],
)
async def test_settings_that_cannot_be_are_answered_all_the_same(client: GrpcClient, settings: Any, code: int) -> None:
    """Clients wait for an answer without an end: first the status, then the end of the stream."""
    call, answer = await apply_settings(client, settings)
    assert answer.status.code == code
    assert await call.all() == []
    assert call.status == 3


async def test_a_producer_is_known_by_its_topics_until_it_says_good_bye(node: Node, client: GrpcClient) -> None:
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    await apply_settings(client, settings)
    assert [item.client_id for item in node.broker.clients.producers("t")] == ["host@1@0@test"]
    assert (await client.call("Heartbeat", schema.HeartbeatRequest(client_type=1))).status.code == OK
    answer = await client.call("NotifyClientTermination", schema.NotifyClientTerminationRequest())
    assert answer.status.code == OK
    assert node.broker.clients.producers("t") == []


async def test_a_producer_is_forgotten_with_its_connection(node: Node, client: GrpcClient) -> None:
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    await apply_settings(client, settings)
    await client.close()
    await eventually(lambda: node.broker.clients.producers("t") == [])


async def test_a_heartbeat_needs_no_settings_before(client: GrpcClient) -> None:
    request = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    assert (await client.call("Heartbeat", request)).status.code == OK


@pytest.mark.limits(max_grpc_clients=2)
async def test_a_broker_knows_this_many_clients(node: Node, dial: Dial, client: GrpcClient) -> None:
    beat = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    codes = [(await client.call("Heartbeat", beat, x_mq_client_id=f"c{number}")).status.code for number in range(3)]
    assert codes == [OK, OK, 42900]
    assert (await client.call("Heartbeat", beat, x_mq_client_id="c0")).status.code == OK
    await client.call("NotifyClientTermination", schema.NotifyClientTerminationRequest(), x_mq_client_id="c0")
    assert (await client.call("Heartbeat", beat, x_mq_client_id="c2")).status.code == OK


@pytest.mark.limits(max_grpc_clients=6)
async def test_a_client_with_very_many_ids_takes_nobody_elses_place(node: Node, dial: Dial, client: GrpcClient) -> None:
    """20,000 ids of one client, with or without rights, kept all new clients away."""
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    await apply_settings(client, settings)
    greedy = await dial(node.address)
    beat = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    codes = [(await greedy.call("Heartbeat", beat, x_mq_client_id=f"c{number}")).status.code for number in range(6)]
    assert codes == [OK] * 5 + [42900]
    with capture_logs() as logs:
        for number in range(4):
            other = await dial(node.address)
            assert (await other.call("Heartbeat", beat, x_mq_client_id=f"other-{number}")).status.code == OK
    assert [entry["address"] for entry in logs if entry["event"] == "grpc_clients_forgotten"] == ["127.0.0.1"]
    assert [item.client_id for item in node.broker.clients.producers("t")] == ["host@1@0@test"]
    assert (await greedy.call("Heartbeat", beat, x_mq_client_id="c0")).status.code == 42900


async def test_a_connection_goes_by_this_many_ids(client: GrpcClient) -> None:
    beat = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    ids = [f"c{number}" for number in range(LIMITS.max_grpc_ids + 1)]
    codes = [(await client.call("Heartbeat", beat, x_mq_client_id=client_id)).status.code for client_id in ids]
    assert codes == [OK] * LIMITS.max_grpc_ids + [42900]


async def test_who_takes_the_id_of_another_client_takes_nothing_else(
    node: Node, dial: Dial, client: GrpcClient
) -> None:
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="t")
    await apply_settings(client, settings)
    thief = await dial(node.address)
    beat = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    await thief.call("Heartbeat", beat)
    await thief.call("NotifyClientTermination", schema.NotifyClientTerminationRequest())
    await thief.call("Heartbeat", beat)
    await thief.close()
    await eventually(lambda: len(node.server.connections) == 1)
    assert [item.client_id for item in node.broker.clients.producers("t")] == ["host@1@0@test"]
    await client.close()
    await eventually(lambda: node.broker.clients.producers("t") == [])
    assert node.server.memory.used_bytes == 0


async def test_clients_of_one_connection_are_charged_to_it_until_they_go(node: Node, client: GrpcClient) -> None:
    (connection,) = node.server.connections
    beat = schema.HeartbeatRequest(client_type=3, group=resource("g"))
    await client.call("Heartbeat", beat)
    before = connection.held_bytes()
    await client.call("Heartbeat", beat, x_mq_client_id="other")
    assert connection.held_bytes() - before == MEMBER_BYTES
    await client.call("NotifyClientTermination", schema.NotifyClientTerminationRequest(), x_mq_client_id="other")
    assert connection.held_bytes() == before


# Namespaces of resources: two of them share no topic, group, transaction or dead letter, and permissions distinguish


OK_NAMESPACES, ILLEGAL_TOPIC, ILLEGAL_GROUP, UNAUTHORIZED, NO_TRANSACTION = 20000, 40002, 40003, 40100, 40008


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
        assert (await client.call("SendMessage", of(namespace, body))).status.code == OK_NAMESPACES
    for namespace, body in (("teamB", b"of B"), ("teamA", b"of A")):
        (got,) = await receive(client, namespace)
        assert (got.body, got.topic.name, got.topic.resource_namespace) == (body, "t", namespace)
        acked = schema.AckMessageRequest(topic=named("t", namespace), group=named("g", namespace))
        acked.entries.add(message_id="1", receipt_handle=got.system_properties.receipt_handle)
        assert (await client.call("AckMessage", acked)).status.code == OK_NAMESPACES
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
    assert (await client.call(method, asked)).status.code == OK_NAMESPACES, "topics are created automatically"
    assert both.broker.topics.get("teamC%t") is not None


@pytest.mark.still
async def test_a_transaction_belongs_to_its_namespace(node: Node, dial: Dial) -> None:
    put(node, "teamA%t", queues=1)
    put(node, "teamB%t", queues=1)
    client = await dial(node.address)
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.append(named("t", "teamA"))
    call, answer = await apply_settings(client, settings)
    assert answer.settings.publishing.topics[0] == named("t", "teamA")
    sent = await client.call("SendMessage", of("teamA", message_type=4))
    transaction_id = sent.entries[0].transaction_id
    node.clock.advance(TRANSACTION_CHECK_INTERVAL_S + 7)
    asked = (await call.next()).recover_orphaned_transaction_command
    assert (asked.transaction_id, asked.message.topic) == (transaction_id, named("t", "teamA"))
    end = schema.EndTransactionRequest(topic=named("t", "teamB"), transaction_id=transaction_id, resolution=1)
    assert (await client.call("EndTransaction", end)).status.code == NO_TRANSACTION
    end.topic.resource_namespace = "teamA"
    assert (await client.call("EndTransaction", end)).status.code == OK_NAMESPACES
    assert node.broker.store.queues["teamA%t", 0].next == 1


async def test_dead_letters_belong_to_their_namespace(both: Node, client: GrpcClient) -> None:
    await receive(client, "teamA")
    await client.call("SendMessage", of("teamA"))
    (got,) = await receive(client, "teamA")
    asked = schema.ForwardMessageToDeadLetterQueueRequest(
        group=named("g", "teamA"), topic=named("t", "teamA"), delivery_attempt=1
    )
    asked.receipt_handle = got.system_properties.receipt_handle
    assert (await client.call("ForwardMessageToDeadLetterQueue", asked)).status.code == OK_NAMESPACES
    assert both.broker.store.queues["%DLQ%teamA%g", 0].next == 1
    both.broker.offsets.put("teamA%g", "%DLQ%teamA%g", 0, 0)
    (dead,) = await receive(client, "teamA", "%DLQ%g")
    assert (dead.topic, dead.system_properties.dead_letter_queue.topic) == (named("%DLQ%g", "teamA"), "t")


ILLEGAL_NAMESPACES: list[tuple[str, str]] = [
    ("team%A", "t"),
    ("team A", "t"),
    ("n" * 126, "t"),
    ("teamA", "RMQ_SYS_TRACE_TOPIC"),
    ("rmq_sys_", "t"),
    ("%RETRY%", "t"),
]


async def test_namespaces_that_make_no_name_are_refused(client: GrpcClient) -> None:
    for namespace, name in ILLEGAL_NAMESPACES:
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
                (await apply_settings(client, settings))[1].status.code,
            }
            assert codes == {OK_NAMESPACES if is_allowed else UNAUTHORIZED}
