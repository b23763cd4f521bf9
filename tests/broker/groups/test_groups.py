"""Membership at the broker: heartbeats, notifications, offsets, topics, routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocketlet.broker.config import IDLE_LIMIT_S, LIMITS, SWEEP_INTERVAL_S
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import (
    ConsumerData,
    DataVersion,
    GroupConfig,
    Heartbeat,
    TopicConfig,
    encode_registration,
)
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET as COMMITS
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import TopicExtent, decode_extents, encode_topics
from rocketlet.protocol.headers import UnregisterClient, write
from rocketlet.protocol.names import parse_subscription, retry_topic
from rocketlet.testing.ports import free_port

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.requests import SUBSCRIBED, SUSPEND, beat, commit, join, lock, members, pull, send


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
    changed = node.broker.groups.get("g")
    assert changed is not None
    node.broker.notifications.schedule(changed)
    node.broker.notifications._notify_waiting()
    assert wire.requests == []
    assert not [
        event for event in node.broker.history.of("g") if event["event"] == "notified" and event["members"] == 0
    ]


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
async def test_held_pull_gets_nothing_when_the_queue_is_leased_meanwhile(
    nodes: Nodes, connect: Connect, flags: int
) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))
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
