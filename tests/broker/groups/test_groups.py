"""Membership at the broker: heartbeats, notifications, offsets, topics, routes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import IDLE_LIMIT_S, LIMITS, MAX_REFUSED, REFUSED_S, SWEEP_INTERVAL_S
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Harm
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import (
    SLICE,
    ConsumerData,
    DataVersion,
    GroupConfig,
    Heartbeat,
    TopicConfig,
    encode_registration,
)
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET as COMMITS
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_EXPRESSION_TAGS
from rocketlet.protocol.group_bodies import (
    LockRequest,
    TopicExtent,
    decode_extents,
    decode_locked,
    encode_lock_request,
    encode_topics,
)
from rocketlet.protocol.headers import UnregisterClient, write
from rocketlet.protocol.names import Queue, parse_subscription, retry_topic
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.metrics import samples
from ...support.requests import SUBSCRIBED, SUSPEND, beat, commit, join, lock, members, pull, send, value


async def test_members_come_and_go_and_each_change_is_reported(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    assert (await beat(one, "c1")).version == 409
    notice = await one.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert (notice.ext["consumerGroup"], notice.is_oneway) == ("g", True)
    await beat(two, "c2")
    await one.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(one) == ["c1", "c2"]
    await two.call(RequestCode.UNREGISTER_CLIENT, write(UnregisterClient("c2", consumer_group="g")))
    await one.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(one) == ["c1"]


async def test_a_closed_socket_ends_a_membership_immediately(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await beat(one, "c1")
    await beat(two, "c2")
    await two.close()
    await eventually(lambda: len(node.broker.groups.get("g").members) == 1)  # type: ignore[union-attr]
    assert await members(one) == ["c1"]


async def test_a_heartbeat_that_equals_the_last_one_does_all_that_it_did(node: Node, wire: Wire) -> None:
    retry = retry_topic("g")
    for _ in range(2):
        await beat(wire, "c1")
    assert await members(wire) == ["c1"]
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": retry})
    await beat(wire, "c1")
    assert node.broker.topics.get(retry) is not None
    await wire.call(RequestCode.UNREGISTER_CLIENT, write(UnregisterClient("c1", consumer_group="g")))
    await beat(wire, "c1")
    assert await members(wire) == ["c1"]
    await beat(wire, "c2", group="h")
    await beat(wire, "c1")
    assert node.broker.clients.session_of("c1") is node.broker.clients.session_of("c2")


async def test_a_group_without_members_is_an_error_with_an_empty_body(wire: Wire) -> None:
    answer = await wire.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "nobody"})
    assert (answer.code, answer.body) == (ResponseCode.SYSTEM_ERROR, b"")


async def test_unregistering_succeeds_when_the_group_has_an_offset_but_no_members(wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire)
    await commit(wire, 1)
    answer = await wire.call(RequestCode.UNREGISTER_CLIENT, write(UnregisterClient("c1", consumer_group="g")))
    assert answer.code == 0, answer.remark


async def test_changes_close_together_make_one_notification(node: Node, connect: Connect) -> None:
    wires = [await connect(node.address) for _ in range(5)]
    opaques = []
    for number, wire in enumerate(wires):
        consumer = ConsumerData("g", subscriptions=(parse_subscription("t", "*"),))
        body = bodies.encode_heartbeat(Heartbeat(f"c{number}", (consumer,)))
        opaques.append(wire.send(RequestCode.HEART_BEAT, body=body))
    for wire, opaque in zip(wires, opaques, strict=True):
        await wire.answer(opaque)
        await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    notified = [event for event in node.broker.history.of("g") if event["event"] == "notified"]
    assert len(notified) < 5


async def test_notifications_can_be_switched_off(node: Node, wire: Wire) -> None:
    group = bodies.encode_group(GroupConfig("g", notify_enable=False))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    await beat(wire, "c1")
    changed = node.broker.groups.obtain("g")
    node.broker.notifications.notify(changed, list(changed.members))
    await node.broker.turns.done()
    assert await members(wire) == ["c1"]
    assert wire.requests == [], "a notification would precede the response"
    assert "notified" not in {event["event"] for event in node.broker.history.of("g")}


async def test_a_heartbeat_makes_the_retry_topic_and_its_route(wire: Wire) -> None:
    await beat(wire, "c1")
    answer = await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%g"})
    (queues,) = bodies.decode_route(answer.body).queues
    assert queues.read_queues == 1


async def test_members_do_not_erase_each_others_subscriptions(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    await create_topic(one, "u")
    await beat(one, "c1", {"t": "*"})
    await beat(two, "c2", {"u": "A"})
    await beat(one, "c1", {"t": "*"})
    assert (await one.call(RequestCode.PULL_MESSAGE, pull("t", flags=0))).code == ResponseCode.PULL_NOT_FOUND
    assert (await two.call(RequestCode.PULL_MESSAGE, pull("u", flags=0))).code == ResponseCode.PULL_NOT_FOUND
    assert await members(one, topic="t") == ["c1"]
    assert await members(one, topic="u") == ["c2"]
    assert await members(one) == ["c1"], "a foreign client is notified of those that share a topic with it"
    assert await members(two) == ["c2"]
    faults = node.broker.groups.get("g").reported  # type: ignore[union-attr]
    assert "c2 not subscribed to t, while c1 are" in faults


async def test_retries_have_one_reader_where_members_know_only_of_some(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    for topic in ("t", "u"):
        await create_topic(one, topic)
    retry = retry_topic("g")
    await beat(one, "c1", {"t": "*", retry: "*"})
    await beat(two, "c2", {"u": "*", retry: "*"})
    await eventually(lambda: not node.broker.draining.is_pending("g"))
    await send(one, b"again", topic=retry)
    flags = SUBSCRIBED | SUSPEND
    none = pull(retry, flags=flags, suspend_timeout_millis=1)
    assert (await two.call(RequestCode.PULL_MESSAGE, none)).code == ResponseCode.PULL_NOT_FOUND
    assert (await one.call(RequestCode.PULL_MESSAGE, pull(retry, flags=flags))).code == 0
    await one.close()
    await eventually(lambda: len(node.broker.groups.get("g").members) == 1)  # type: ignore[union-attr]
    assert (await two.call(RequestCode.PULL_MESSAGE, pull(retry, flags=flags))).code == 0


async def test_a_foreign_member_gets_nothing_of_a_queue_that_one_of_ours_owns(node: Node, connect: Connect) -> None:
    ours, foreign = await connect(node.address), await connect(node.address)
    await create_topic(ours, "t", 1)
    data = ConsumerData("g", subscriptions=(parse_subscription("t", "*", version=1),), strategy="AVG")
    await ours.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("c1", (data,))))
    await beat(foreign, "c2")
    await send(ours)
    await lock(ours, "c1")
    flags = SUBSCRIBED | SUSPEND
    answer = await foreign.call(RequestCode.PULL_MESSAGE, pull(flags=flags))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (19, "0")
    assert (await ours.call(RequestCode.PULL_MESSAGE, pull(flags=flags))).code == 0
    await lock(ours, "c1", code=RequestCode.UNLOCK_BATCH_MQ)
    assert (await foreign.call(RequestCode.PULL_MESSAGE, pull(flags=flags))).code == 0


@pytest.mark.limits(max_answering=0)
async def test_locks_of_many_queues_are_not_refused_while_other_responses_are_made(node: Node, wire: Wire) -> None:
    """Members would lose their leases. Other requests are refused when too many responses take long."""
    queues = tuple(Queue("t", "broker-a", number) for number in range(SLICE + 1))
    await create_topic(wire, "t", len(queues))
    body = encode_lock_request(LockRequest("c1", "g", queues))
    assert len(decode_locked((await wire.call(RequestCode.LOCK_BATCH_MQ, body=body)).body)) == len(queues)
    assert (await wire.call(RequestCode.UNLOCK_BATCH_MQ, body=body)).code == 0
    assert not node.broker.locks


async def owned_by_one_of_ours(node: Node, connect: Connect) -> tuple[Wire, Wire]:
    """Queue 0 of t has a message, and c1 its lease. Returns c1's connection, and that of a client without a heartbeat."""
    ours, stranger = await connect(node.address), await connect(node.address)
    await create_topic(ours, "t", 1)
    await join(ours, "c1", strategy="AVG")
    await send(ours, b"first")
    await lock(ours, "c1")
    return ours, stranger


async def test_client_without_a_heartbeat_gets_nothing_from_a_leased_queue(node: Node, connect: Connect) -> None:
    ours, stranger = await owned_by_one_of_ours(node, connect)
    refused = await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=SUSPEND, sub_version=1))
    assert refused.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "send a heartbeat of g first" in (refused.remark or "")
    waits = stranger.send(RequestCode.PULL_MESSAGE, pull(flags=SUSPEND, sub_version=1))
    await stranger.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    await beat(stranger, "c2")
    answer = await stranger.answer(waits)
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "0"), "it is a member now"
    assert (await ours.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND))).code == 0


async def test_blocking_pull_with_its_own_subscription_gets_nothing_from_a_leased_queue(
    node: Node, connect: Connect
) -> None:
    """As Java's pullBlockIfNotFound, and its push consumers with postSubscriptionWhenPull."""
    ours, stranger = await owned_by_one_of_ours(node, connect)
    flags = SUBSCRIBED | SUSPEND
    answer = await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=flags))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "0")
    assert (await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED))).code == 0, "as tools and Spark read"
    await lock(ours, "c1", code=RequestCode.UNLOCK_BATCH_MQ)
    assert (await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=flags))).code == 0


@pytest.mark.parametrize("flags", [SUSPEND, SUBSCRIBED | SUSPEND])
@pytest.mark.still
async def test_held_pull_gets_nothing_when_the_queue_is_leased_meanwhile(
    node: Node, connect: Connect, flags: int
) -> None:
    ours, stranger = await connect(node.address), await connect(node.address)
    await create_topic(ours, "t", 1)
    await join(ours, "c1", strategy="AVG")
    waits = stranger.send(RequestCode.PULL_MESSAGE, pull(flags=flags, sub_version=1))
    await eventually(lambda: any(connection.held_pulls for connection in node.server.connections))
    await lock(ours, "c1")
    await send(ours, b"first")
    assert (await stranger.answer(waits)).code == ResponseCode.PULL_NOT_FOUND


async def test_client_without_a_heartbeat_gets_nothing_that_an_owner_has_committed(
    node: Node, connect: Connect
) -> None:
    """Its offset is from before its connection was lost. A pull that brings its subscription may read from anywhere."""
    ours, stranger = await owned_by_one_of_ours(node, connect)
    await send(ours, b"second")
    await ours.call(RequestCode.PULL_MESSAGE, pull(offset=1, flags=SUBSCRIBED | SUSPEND | COMMITS, commit_offset=1))
    await lock(ours, "c1", code=RequestCode.UNLOCK_BATCH_MQ)
    answer = await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=SUSPEND, sub_version=1))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "1")
    answer = await stranger.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (0, "2")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"clientID":1}', b'{"consumerDataSet":5,"clientID":"c"}', b"\xff\xfe"])
async def test_a_bad_heartbeat_is_refused_and_registers_nothing(node: Node, wire: Wire, body: bytes) -> None:
    answer = await wire.call(RequestCode.HEART_BEAT, body=body)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert not any(group.members for group in node.broker.groups)


async def test_an_illegal_group_name_is_refused(node: Node, wire: Wire) -> None:
    answer = await beat(wire, "c1", group="a b")
    assert (answer.code, "characters" in (answer.remark or "")) == (1, True)


async def test_offsets_of_unknown_queues_are_0_and_of_new_groups_what_the_client_asks(wire: Wire) -> None:
    query = {"consumerGroup": "g", "topic": "t", "queueId": "0"}
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext["offset"] == "0"
    assert (
        await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, {**query, "unknown": "error"})
    ).code == ResponseCode.QUERY_NOT_FOUND
    await create_topic(wire, "t")
    await send(wire)
    await send(wire, queue=1)
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, {**query, "unknown": "latest"})).ext["offset"] == "1"
    await send(wire, queue=1)
    other = {**query, "queueId": "1", "unknown": "latest"}
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, other)).ext["offset"] == "1", "fixed with the first"


async def test_offsets_by_time_are_apaches(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t")
    search = {"topic": "t", "queueId": "0"}
    assert (await wire.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {**search, "timestamp": "5"})).ext["offset"] == "0"
    assert (await wire.call(RequestCode.GET_EARLIEST_MSG_STORETIME, search)).ext["timestamp"] == "-1"
    for _ in range(3):
        await send(wire)
    stored = node.broker.store.store_time_ms(node.broker.store.queue("t", 0), 0)
    assert (await wire.call(RequestCode.GET_EARLIEST_MSG_STORETIME, search)).ext["timestamp"] == str(stored)
    for timestamp, offset in ((0, "0"), (stored, "0"), (2**62, "2")):
        answer = await wire.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {**search, "timestamp": str(timestamp)})
        assert answer.ext["offset"] == offset


async def test_topics_are_made_altered_listed_and_deleted(wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    await create_topic(wire, "t", 6)
    topics = await wire.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert "t" in bodies.decode_topic_list(topics.body)
    await send(wire, queue=5)
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("t"))).code == ResponseCode.TOPIC_NOT_EXIST
    await create_topic(wire, "t", 6)
    assert (await wire.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "5"})).ext["offset"] == "0"
    for name in ("TBW102", "a b"):
        assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})).code == ResponseCode.SYSTEM_ERROR
        ext = {"topic": name, "readQueueNums": "1", "writeQueueNums": "1", "perm": "6"}
        assert (await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == ResponseCode.SYSTEM_ERROR


async def test_the_name_server_knows_brokers_that_register_and_forgets_those_that_leave(
    nodes: Nodes, connect: Connect
) -> None:
    home = await nodes.start(name="home")
    wire = await connect(home.address)
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    cluster = await wire.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert {broker.name for broker in bodies.decode_cluster(cluster.body)} == {"home", "guest"}
    await create_topic(await connect(guest.address), "t")

    async def routed() -> bool:
        return (await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})).code == 0

    while not await routed():
        pass
    await guest.stop()
    assert (await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})).code == ResponseCode.TOPIC_NOT_EXIST


async def test_an_unknown_topic_has_no_route(wire: Wire) -> None:
    assert (
        await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "nowhere"})
    ).code == ResponseCode.TOPIC_NOT_EXIST
    assert (await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})).code == 0


async def test_a_registration_with_a_wrong_checksum_is_refused(wire: Wire) -> None:
    ext = {
        "brokerName": "b", "brokerAddr": "h:1", "clusterName": "c", "haServerAddr": "h:2", "brokerId": "0",
        "bodyCrc32": "1",
    }  # fmt: skip
    assert (await wire.call(RequestCode.REGISTER_BROKER, ext, b"{}")).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(("kind", "code"), [("TAG", 0), ("SQL92", 0), ("XYZ", 23)])
async def test_a_clients_expression_type_is_checked(wire: Wire, kind: str, code: int) -> None:
    body = (
        b'{"clientId":"c","group":"g","subscriptionData":{"topic":"t","subString":"a IS NULL","expressionType":"%s"}}'
    )
    assert (await wire.call(RequestCode.CHECK_CLIENT_CONFIG, body=body % kind.encode())).code == code


async def test_a_member_that_is_silent_for_two_minutes_is_dropped_and_closed(node: Node, connect: Connect) -> None:
    silent, alive = await connect(node.address), await connect(node.address)
    await beat(silent, "c1")
    await beat(alive, "c2")
    node.clock.advance(LIMITS.heartbeat_limit_s - SWEEP_INTERVAL_S)
    await beat(alive, "c2")
    await members(silent)  # it is not idle
    assert await members(alive) == ["c1", "c2"]
    node.clock.advance(2 * SWEEP_INTERVAL_S)
    assert await silent.closed()
    assert await members(alive) == ["c2"]


async def test_idle_connections_are_closed(node: Node, connect: Connect) -> None:
    idle, busy = await connect(node.address), await connect(node.address)
    await members(idle)
    node.clock.advance(IDLE_LIMIT_S / 2)
    await members(busy)
    node.clock.advance(IDLE_LIMIT_S / 2 + SWEEP_INTERVAL_S)
    assert await idle.closed()
    await members(busy)


async def test_a_name_server_says_whether_a_brokers_topics_have_changed(wire: Wire) -> None:
    broker = {"brokerName": "b", "brokerAddr": "10.0.0.1:1", "clusterName": "c", "haServerAddr": "h:2", "brokerId": "0"}
    version = DataVersion(1, 2)
    body = bodies.encode_data_version(version)
    assert (await wire.call(RequestCode.QUERY_DATA_VERSION, broker, body)).ext["changed"] == "true"
    registration = encode_registration(version, [TopicConfig("t")])
    assert (await wire.call(RequestCode.REGISTER_BROKER, broker, registration)).code == 0
    answer = await wire.call(RequestCode.QUERY_DATA_VERSION, broker, body)
    assert (answer.ext["changed"], bodies.decode_data_version(answer.body)) == ("false", version)
    newer = bodies.encode_data_version(DataVersion(1, 3))
    assert (await wire.call(RequestCode.QUERY_DATA_VERSION, broker, newer)).ext["changed"] == "true"
    await wire.call(RequestCode.UNREGISTER_BROKER, broker)
    assert (await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})).code == ResponseCode.TOPIC_NOT_EXIST


async def test_an_external_port_returns_the_external_addresses(tmp_path: Path, connect: Connect) -> None:
    routes = Routes()
    external = free_port()
    async with Server(
        Listening("127.0.0.1", free_port(), external_port=external), broker=None, routes=routes
    ) as server:
        inside, outside = await connect(f"127.0.0.1:{server.port}"), await connect(f"127.0.0.1:{external}")
        broker = {"brokerName": "b", "brokerAddr": "b:1", "clusterName": "c", "haServerAddr": "h:2", "brokerId": "0"}
        registration = encode_registration(DataVersion(1), [TopicConfig("t")])
        await inside.call(RequestCode.REGISTER_BROKER, {**broker, "externalAddr": "localhost:9"}, registration)
        for wire, address in ((inside, "b:1"), (outside, "localhost:9")):
            route = bodies.decode_route((await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})).body)
            assert route.brokers[0].addresses == {0: address}
            cluster = await wire.call(RequestCode.GET_BROKER_CLUSTER_INFO)
            assert bodies.decode_cluster(cluster.body)[0].addresses == {0: address}
        await inside.close()
        await outside.close()


async def test_one_answer_has_the_first_and_end_offset_of_all_queues(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t", 3)
    ask = (RequestCode.GET_QUEUE_OFFSETS, {"consumerGroup": "g"}, encode_topics(["t", "unknown"]))
    before = decode_extents((await wire.call(*ask)).body)
    assert before.keys() == {"t"}
    assert before["t"]._replace(identity="") == TopicExtent("", 0, (0, 0, 0), (0, 0, 0))
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    for offset in (5, 7, 3, 3, 2):
        node.broker.offsets.put("g", "t", 0, offset)
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, commit)).ext["offset"] == "2"
    assert decode_extents((await wire.call(*ask)).body)["t"].rewinds == 2
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    await create_topic(wire, "t", 3)
    anew = decode_extents((await wire.call(*ask)).body)["t"]
    assert anew.identity != before["t"].identity
    assert anew.rewinds == 0, "the new topic has no offsets yet"


async def test_a_topics_identity_and_a_groups_rewinds_survive_a_restart(nodes: Nodes, connect: Connect) -> None:
    first = await nodes.start()
    wire = await connect(first.address)
    await create_topic(wire, "t", 1)
    for offset in (5, 3):
        first.broker.offsets.put("g", "t", 0, offset)
    ask = (RequestCode.GET_QUEUE_OFFSETS, {"consumerGroup": "g"}, encode_topics(["t"]))
    told = decode_extents((await wire.call(*ask)).body)
    await first.stop()
    second = await nodes.start()
    assert decode_extents((await (await connect(second.address)).call(*ask)).body) == told
    assert told["t"].rewinds == 1


async def test_the_latest_of_queues_without_messages_is_kept_too(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    query = {"consumerGroup": "g", "topic": "t", "queueId": 0, "unknown": "latest"}
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext["offset"] == "0"
    assert node.broker.offsets.of("g", "t") == dict.fromkeys(range(4), 0)


# A heartbeat that is refused registers nothing, and is named: its client reads nothing, and most clients say
# nothing.


def consumer(group: str, topic: str = "t", expression: str = "*") -> dict[str, Any]:
    return {"groupName": group, "subscriptionDataSet": [{"topic": topic, "subString": expression}]}


async def beat_refused_heartbeats(wire: Wire, *consumers: dict[str, Any], producers: tuple[str, ...] = ()) -> int:
    body = {
        "clientID": "c1",
        "consumerDataSet": consumers,
        "producerDataSet": [{"groupName": name} for name in producers],
    }
    return (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(body))).code


@pytest.mark.parametrize(
    "why",
    [
        pytest.param("memberships", marks=pytest.mark.limits(max_memberships=2)),
        pytest.param("members", marks=pytest.mark.limits(max_members=1)),
        pytest.param("ids", marks=pytest.mark.limits(max_client_ids=0)),
        pytest.param("producers", marks=pytest.mark.limits(max_producer_groups=0)),
        "name",
        "expression",
        "tags",
    ],
)
async def test_a_refused_heartbeat_registers_none_of_its_groups(
    node: Node, wire: Wire, connect: Connect, why: str
) -> None:
    refused, producers = consumer("last"), ("p",)
    if why == "members":
        other = await connect(node.address)
        body = {"clientID": "other", "consumerDataSet": [consumer("last", "u")]}
        assert (await other.call(RequestCode.HEART_BEAT, body=orjson.dumps(body))).code == 0
    refused |= {"name": consumer("no/name"), "expression": consumer("last", expression="x" * 65_537)}.get(why, {})
    refused |= {"tags": consumer("last", expression="||".join(map(str, range(10_001))))}.get(why, {})
    with capture_logs() as logs:
        assert (
            await beat_refused_heartbeats(wire, consumer("first"), consumer("second"), refused, producers=producers)
            != 0
        )
    assert [group.name for group in node.broker.groups if group.members and group.name != "last"] == []
    assert "p" not in node.broker.clients.all_producers()
    (event,) = [entry for entry in logs if entry["event"] == "heartbeat_refused"]
    assert (event["client"], event["groups"].split()[:2]) == ("c1", ["first", "second"])
    assert node.broker.refused_heartbeats.count == 1
    assert event["reason"][:100] in node.broker.refused_heartbeats.recent()[0]


@pytest.mark.parametrize("why", ["strict", "bound"])
async def test_a_group_that_refuses_a_member_refuses_none_of_its_other_groups(
    node: Node, wire: Wire, connect: Connect, why: str
) -> None:
    other = await connect(node.address)
    attributes = {"lite.bind.topic": "chat"} if why == "bound" else {}
    node.broker.group_configs.put(GroupConfig("last", strict=why == "strict", attributes=attributes))
    if why == "strict":
        body = {"clientID": "other", "consumerDataSet": [consumer("last", "u")]}
        assert (await other.call(RequestCode.HEART_BEAT, body=orjson.dumps(body))).code == 0
    beat = {
        "clientID": "c1",
        "consumerDataSet": [consumer("first"), consumer("last"), consumer("second")],
        "producerDataSet": [{"groupName": "p"}],
    }
    with capture_logs() as logs:
        answer = await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "the group last" in str(answer.remark)
    members = {group.name: [member.client_id for member in group.members.values()] for group in node.broker.groups}
    assert (members["first"], members["second"]) == (["c1"], ["c1"])
    assert "c1" not in members["last"]
    assert "p" in node.broker.clients.all_producers()
    (event,) = [entry for entry in logs if entry["event"] == "heartbeat_refused"]
    assert (event["client"], event["groups"]) == ("c1", "last")
    node.broker.group_configs.put(GroupConfig("last"))
    assert (await wire.call(RequestCode.HEART_BEAT, body=orjson.dumps(beat))).code == 0
    assert "c1" in [member.client_id for member in node.broker.groups.members_of("last").values()]


async def test_doctor_names_a_client_whose_heartbeat_is_refused_until_it_is_over(node: Node, wire: Wire) -> None:
    assert await beat_refused_heartbeats(wire, consumer("g", expression="||")) == ResponseCode.SYSTEM_ERROR
    for is_there in (True, False):
        async with AdminClient(node.address) as admin:
            found = [item for item in await diagnose(admin) if item.kind == "heartbeat_refused"]
        assert len(found) == is_there
        if found:
            assert found[0].harm == Harm.STANDS
            assert "c1" in found[0].text and "of g: " in found[0].text and "names no tag" in found[0].text
        node.clock.advance(REFUSED_S + 1)


async def test_a_body_that_is_no_heartbeat_is_named_by_its_address(node: Node, wire: Wire) -> None:
    assert (await wire.call(RequestCode.HEART_BEAT, body=b"[1")).code == 1
    assert "127.0.0.1" in node.broker.refused_heartbeats.recent()[0]


async def test_refusals_that_are_kept_are_limited(node: Node, wire: Wire) -> None:
    for number in range(MAX_REFUSED + 1):
        assert await beat_refused_heartbeats(wire, consumer(f"g{number}", expression="||")) == 1
    named = [text.split(" of ")[1].split(":")[0] for text in node.broker.refused_heartbeats.recent()]
    assert named == [f"g{number}" for number in range(1, MAX_REFUSED + 1)]
    assert node.broker.refused_heartbeats.count == MAX_REFUSED + 1


async def test_an_expression_may_have_64_kib_and_1000_tags(wire: Wire) -> None:
    """With 10,240 characters it was refused in silence; Apache's brokers take it."""
    tags = [f"{number:04}" for number in range(MAX_EXPRESSION_TAGS + 1)]
    for expression in ("a" * 65_533 + "||b", "||".join(tags[1:])):
        assert await beat_refused_heartbeats(wire, consumer("g", expression=expression)) == 0
    assert await beat_refused_heartbeats(wire, consumer("g", expression="||".join(tags))) == 1


async def test_all_expressions_of_a_heartbeat_name_4096_tags_at_most(wire: Wire) -> None:
    """64 expressions of 1,000 tags took 120 ms in one piece."""

    def tags(count: int) -> str:
        return "||".join(f"{number:04}" for number in range(count))

    assert (
        await beat_refused_heartbeats(wire, *(consumer(f"g{number}", expression=tags(512)) for number in range(8))) == 0
    )
    assert (
        await beat_refused_heartbeats(
            wire,
            *(consumer(f"g{number}", expression=tags(512)) for number in range(7)),
            consumer("g7", expression=tags(513)),
        )
        == 1
    )
    assert await beat_refused_heartbeats(wire, *(consumer(f"g{number}") for number in range(100))) == 0


# Messages that retention deletes before a group has read them are lost for it, and nobody waits for them any more.


async def test_expired_messages_are_reported_by_group_and_are_no_lag(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(metrics_port=0, segment_bytes=2_000, retain_hours=1)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for _ in range(40):
        await send(wire)
    await commit(wire, 0, group="at-0")  # where a member that began at the first message has committed
    await commit(wire, 40, group="ready")
    with capture_logs() as logs:
        node.clock.advance(2 * 3600)
        await node.broker.expire_segments()
        await eventually(lambda: any(node.broker.progress.lost()))
    begin = node.broker.store.queues["t", 0].begin
    assert 0 < begin < 40
    expired = [line for line in logs if line["event"] == "messages_expired_unread"]
    assert [(line["group"], line["topic"], line["messages"]) for line in expired] == [("at-0", "t", begin)]
    metric = "rocketlet_messages_expired_unread_total"
    told = {labels: count for (name, labels), count in (await samples(node)).items() if name == metric}
    assert told == {frozenset({("group", "at-0"), ("topic", "t")}): begin}
    wire = await connect(node.address)  # the clock that was moved has closed the first as idle
    table = value(await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "at-0", "topic": "t"}))[
        "offsetTable"
    ]
    assert [item["brokerOffset"] - item["consumerOffset"] for item in table.values()] == [40 - begin]
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("at-0"))
        at = Queue("t", "broker-a", 0)
        found = {group: (await admin.progress(group, "t"))[at] for group in ("at-0", "ready", "never")}
        findings = [one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "retention"]
    assert {group: (item.lag, item.lost) for group, item in found.items()} == {
        "at-0": (40 - begin, begin),
        "ready": (0, 0),
        "never": (40 - begin, 0),  # it has read nothing: where it will begin is its members' affair
    }
    assert [(one.harm, one.subject) for one in findings] == [(Harm.LOSS, "at-0")]
    assert f"{begin:,} message" in findings[0].text


@pytest.mark.parametrize("deleted", ["group", "topic"])
async def test_expired_messages_of_other_groups_are_counted_when_a_group_or_topic_is_deleted_meanwhile(
    nodes: Nodes, connect: Connect, deleted: str
) -> None:
    node = await nodes.start(segment_bytes=2_000, retain_hours=1)
    wire = await connect(node.address)
    for topic in ("t", "u"):
        await create_topic(wire, topic, 1)
        for _ in range(40):
            await send(wire, topic=topic)
    await commit(wire, 0, group="first")
    await commit(wire, 0, group="second", topic="u")
    node.clock.advance(2 * 3600)
    await node.broker.expire_segments()
    await eventually(lambda: len(list(node.broker.progress.lost())) == 2)
    before = {group: count for group, _, count in node.broker.progress.lost()}
    work = node.broker.progress.noting_lost()  # counts the same messages again
    next(work)
    wire = await connect(node.address)  # the clock that was moved has closed the first as idle
    code, fields = {
        "group": (RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "first", "removeOffset": "true"}),
        "topic": (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"}),
    }[deleted]
    assert (await wire.call(code, fields)).code == 0
    for _ in work:
        pass
    after = {group: count for group, _, count in node.broker.progress.lost()}
    assert after == {"second": 2 * before["second"]}
    assert node.broker.groups.get("first") is None


async def test_group_that_lost_messages_is_not_kept_when_it_is_deleted(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(segment_bytes=2_000, retain_hours=1)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for _ in range(40):
        await send(wire)
    await commit(wire, 0, group="lost")
    node.clock.advance(2 * 3600)
    await node.broker.expire_segments()
    await eventually(lambda: bool(list(node.broker.progress.lost())))
    wire = await connect(node.address)  # the clock that was moved has closed the first as idle
    fields = {"groupName": "lost", "removeOffset": "true"}
    assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, fields)).code == 0
    assert list(node.broker.progress.lost()) == []
    gc.collect()
    assert "lost" not in {found.name for found in gc.get_objects() if isinstance(found, ConsumerGroup)}
