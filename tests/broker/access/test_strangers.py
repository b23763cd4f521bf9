"""Strangers without an account may not do everything: send clients elsewhere, and administrate from afar."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import LIMITS, LimitExceeded, Limits
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, OF_BROKERS
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.tls import Tls
from rocketlet.client import AdminClient, Producer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Harm
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, DataVersion, GroupConfig, Heartbeat, TopicConfig, finish
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.headers import Signer
from rocketlet.protocol.names import TRACE_TOPIC, parse_subscription
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.accounts import (
    ACCOUNTS,
    ADMIN,
    SECRETS,
    SEND,
    AccountsFile,
    SignedWire,
    Wired,
    access,
    account,
    channel_of,
    identified,
    signed_wire,
    tls_wire,
)
from ...support.certificates import Certificates
from ...support.grpc_client import grpc_client, resource, signed
from ...support.peers import BrokerSession, Peer
from ..grpc.receives import begin, request


def registration(name: str, address: str, number: int = 0) -> dict[str, Any]:
    return {
        "brokerName": name,
        "brokerAddr": address,
        "clusterName": "c",
        "haServerAddr": "",
        "brokerId": number,
    }


TOPICS = orjson.dumps(
    {"topicConfigSerializeWrapper": {"topicConfigTable": {"t": {"topicName": "t", "writeQueueNums": 9}}}}
)


async def addresses(wire: Wire, topic: str = "t") -> list[dict[int, str]]:
    answer = await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    return [dict(broker.addresses) for broker in bodies.decode_route(answer.body).brokers]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_stranger_cannot_redirect_the_clients_of_the_broker_in_this_process(
    node: Node, wire: Wire, connect: Connect, number: int
) -> None:
    await create_topic(wire, "t")
    stranger = await connect(node.address)
    for name, address in (("broker-a", "6.6.6.6:1"), ("broker-a", node.address), ("mine", node.address)):
        for code in (RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER):
            answer = await stranger.call(code, registration(name, address, number), TOPICS)
            assert (answer.code, "name server" in (answer.remark or "")) == (16, True), (name, address, code)
    await stranger.close()
    assert await addresses(wire) == [{0: node.address}]
    assert (await wire.call(RequestCode.REGISTER_BROKER, registration("other", "10.0.0.1:1"), TOPICS)).code == 0
    assert await addresses(wire) == [{0: node.address}, {0: "10.0.0.1:1"}]


def routes_with(*brokers: tuple[str, str], connection: Any, limits: Limits = LIMITS) -> Routes:
    routes = Routes(MovableClock(stands=True), limits=limits)
    for name, address in brokers:
        finish(routes.registering("c", name, 0, address, DataVersion(1), [TopicConfig("t")], connection))
    return routes


def names(routes: Routes) -> list[str]:
    """The brokers that are known have one; nothing is kept of others."""
    found = routes.brokers()
    assert sorted(routes.addresses) == sorted(address for broker in found for address in broker.addresses.values())
    routed = [routes.route(topic) for topic in finish(routes.topics())]
    assert routes.entries == sum(len(route.queues) for route in routed if route is not None)
    return [broker.name for broker in found]


@pytest.mark.parametrize("limit", ["max_topics", "max_routes", "max_brokers", "max_broker_addresses"])
def test_a_registration_that_is_refused_leaves_nothing(limit: str) -> None:
    """Brokers that nobody forgets would use up their number, until the name server starts over."""
    stranger: Any = BrokerSession()
    routes = routes_with(("a", "10.0.0.1:1"), connection=stranger, limits=Limits(**{limit: 1}))
    name, number = ("a", 1) if limit == "max_broker_addresses" else ("b", 0)
    topics = [TopicConfig("t"), TopicConfig("u")]
    with pytest.raises(LimitExceeded):
        finish(routes.registering("c", name, number, "10.0.0.2:1", DataVersion(2), topics, stranger))
    assert names(routes) == ["a"]
    assert [dict(broker.addresses) for broker in routes.brokers()] == [{0: "10.0.0.1:1"}]
    finish(routes.registering("c", "mine", 0, "127.0.0.1:1", DataVersion(1), topics, None))
    assert names(routes) == ["a", "mine"], "strangers use up nothing of the broker's in this process"


@pytest.mark.parametrize("limits", [Limits(max_routes=10), Limits(max_route_chars=9)])
def test_one_host_registers_half_of_what_all_brokers_may(limits: Limits) -> None:
    """Otherwise one client makes the list of all topics larger than a frame, and nobody gets it any more."""

    def register(host: Any, name: str, topics: int) -> None:
        table = [TopicConfig(chr(ord("a") + number)) for number in range(topics)]
        finish(routes.registering("c", name, 0, f"{name}:1", DataVersion(topics), table, host))

    routes, one, other = Routes(limits=limits), BrokerSession("10.0.0.1"), BrokerSession("10.0.0.2")
    register(one, "a", 2)
    register(one, "b", 3)
    with pytest.raises(LimitExceeded, match=r"has 5 .*, and the broker c adds 1; maximum (10|9), and half"):
        register(one, "c", 1)
    register(other, "d", 4)
    routes.delete_topic("a")
    register(one, "a", 2)
    routes.drop(one)  # type: ignore[arg-type]
    register(one, "c", 5)


def test_an_address_that_another_broker_registers_is_that_brokers() -> None:
    """As after a restart under another name, before the former connection is seen to end."""
    one, two = BrokerSession(), BrokerSession()
    routes = routes_with(("a", "10.0.0.1:1"), connection=one)
    finish(routes.registering("c", "b", 0, "10.0.0.1:1", DataVersion(1), [TopicConfig("u")], two))  # type: ignore[arg-type]
    routes.drop(one)  # type: ignore[arg-type]
    assert names(routes) == ["b"]
    assert routes.route("t") is None
    routes.drop(two)  # type: ignore[arg-type]
    assert names(routes) == []


def test_a_broker_that_moves_leaves_no_address_behind() -> None:
    """No limit counts it: one connection may register another one with every frame."""
    connection: Any = BrokerSession()
    routes = routes_with(*[("a", f"10.0.0.{number}:1") for number in range(100)], connection=connection)
    assert [dict(broker.addresses) for broker in routes.brokers()] == [{0: "10.0.0.99:1"}]
    assert routes.addresses == ["10.0.0.99:1"]
    routes.drop(connection)
    assert names(routes) == []


def test_who_unregisters_a_broker_at_the_address_of_another_one_changes_nothing() -> None:
    """It was known for ever then: its silence was not noticed any more."""
    connection: Any = BrokerSession()
    routes = routes_with(("a", "10.0.0.1:1"), ("b", "10.0.0.2:1"), connection=connection)
    for name in ("b", "", "c"):
        routes.unregister(name, "10.0.0.1:1")
        assert names(routes) == ["a", "b"]
    assert isinstance(routes.clock, MovableClock)
    routes.clock.advance(LIMITS.heartbeat_limit_s + 1)
    assert routes.expire() == [connection, connection]
    assert names(routes) == []


def test_the_broker_in_this_process_takes_its_name_back() -> None:
    routes = Routes()
    stranger: Any = BrokerSession()
    finish(routes.registering("c", "broker-a", 0, "6.6.6.6:1", DataVersion(1), [TopicConfig("t")], stranger))
    finish(routes.registering("c", "broker-a", 1, "6.6.6.6:2", DataVersion(1), [], stranger))
    finish(routes.registering("c", "broker-a", 0, "127.0.0.1:1", DataVersion(1), [TopicConfig("u")], None))
    assert [dict(broker.addresses) for broker in routes.brokers()] == [{0: "127.0.0.1:1"}]
    assert routes.route("t") is None
    routes.drop(stranger)
    assert routes.route("u") is not None


@pytest.mark.parametrize(
    ("limit", "field"), [("max_brokers", "brokerName"), ("max_broker_addresses", "brokerId"), ("max_topics", "")]
)
async def test_what_brokers_register_is_limited_at_its_edge(
    nodes: Nodes, connect: Connect, limit: str, field: str
) -> None:
    wire = await connect((await nodes.start(limits=Limits(**{limit: 2}))).address)
    codes = []
    for number in range(4):
        ext = registration("b", f"10.0.0.{number}:1") | ({field: number} if field else {})
        table = {f"t{number}": {"topicName": f"t{number}"}} if not field else {}
        version = {"timestamp": number, "counter": number}
        body = {"topicConfigSerializeWrapper": {"topicConfigTable": table, "dataVersion": version}}
        codes.append((await wire.call(RequestCode.REGISTER_BROKER, ext, orjson.dumps(body))).code)
    known = 1 if limit == "max_brokers" else 2  # the broker of this process is one, too
    assert codes == [0] * known + [1] * (4 - known)


async def test_administration_can_be_confined_to_the_brokers_machine(node: Node) -> None:
    server = Server(
        Listening("127.0.0.1", 0, admin_is_local=True), broker=node.broker, routes=node.broker.name_servers.local
    )
    far, near = Peer(server, 1, "10.0.0.1"), Peer(server, 2, "127.0.0.1")
    for code, (_, rule) in (*BROKER_REQUESTS.items(), *NAME_SERVER_REQUESTS.items()):
        for peer in (far, near):
            peer.send(encode(Frame(code, 7, {"topic": "t"})))
        await node.broker.turns.done()
        refused = [
            any(frame.opaque == 7 and "administrative" in (frame.remark or "") for frame in peer.received())
            for peer in (far, near)
        ]
        assert refused == [rule.is_admin and code not in OF_BROKERS, False], code
    for peer in (far, near):
        peer.hang_up()


# A client that has proven its account over TLS need not sign on that connection; the proof counts nowhere else.


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_is_identified_needs_no_signature_on_that_connection(
    nodes: Nodes, file: AccountsFile, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "orders-key", maximum_version=version)
    other = await tls_wire(node, certificates, "orders-key")
    assert await identified(wire) == 0
    wire.access_key = other.access_key = ""
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    assert "No default permission" in ((await wire.call(310, {**SEND, "b": "other"}, b"x")).remark or "")
    assert "No accessKey" in ((await other.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    await wire.close()
    await other.close()


async def test_signed_send_of_another_account_allows_no_sends_to_the_identified_account(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "orders-key")
    assert await identified(wire) == 0
    other = {**SEND, "b": "other"}
    for _ in range(2):
        wire.access_key, wire.secret = ADMIN, SECRETS[ADMIN]
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, other, b"x")).code == 0
        wire.access_key = ""
        refused = await wire.call(RequestCode.SEND_MESSAGE_V2, other, b"x")
        assert "No default permission" in (refused.remark or "")
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    await wire.close()


async def test_a_proof_is_worth_nothing_elsewhere(nodes: Nodes, file: AccountsFile, certificates: Certificates) -> None:
    """Neither on another TLS connection nor on a plain one nor by the signature of another request."""
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    honest, thief = [await tls_wire(node, certificates, "orders-key") for _ in range(2)]
    plain = await signed_wire(node.address, "orders-key")
    stolen = {"channel": channel_of(honest)}
    stolen["Signature"] = Signer(honest.secret).signature({**stolen, "AccessKey": "orders-key"}, b"")
    own = {"channel": channel_of(thief), "Signature": stolen["Signature"]}
    for wire, ext in ((thief, stolen), (thief, own), (thief, {}), (plain, stolen), (plain, {"channel": ""})):
        assert (await wire.call(RequestCode.IDENTIFY, ext)).code != 0
        wire.access_key = ""
        assert "No accessKey" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
        wire.access_key = "orders-key"
    for wire in (honest, thief, plain):
        await wire.close()


async def test_a_white_address_is_no_proof(nodes: Nodes, file: AccountsFile, certificates: Certificates) -> None:
    """An account that passes unsigned today must not be believed tomorrow."""
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "trusted-key")
    wire.secret = "a-wrong-secret"
    assert await identified(wire) != 0
    file.rewrite([*ACCOUNTS[:-1], account("trusted-key", topicPerms=["orders=PUB"])])
    wire.access_key = ""
    assert "No accessKey" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    await wire.close()


async def test_a_changed_secret_ends_what_was_proven_and_a_changed_permission_holds(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "orders-key")
    assert await identified(wire) == 0
    wire.access_key = ""
    file.rewrite([account("orders-key", topicPerms=["orders=SUB"])])
    assert "No default permission" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    file.rewrite([{**account("orders-key"), "secretKey": "another-secret"}])
    with pytest.raises(ConnectionResetError):
        await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")
    assert not any(queue.next for queue in node.broker.store.queues.values())


async def test_our_client_identifies_itself_and_comes_back_after_a_change(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    by_tls = access("orders-key", tls=True, ca_file=str(certificates.folder / "ca.pem"))
    async with Producer(node.address, access=by_tls) as producer:
        await producer.send("orders", b"1")
        known = [connection.authentication for connection in node.server.connections]
        await eventually(lambda: any(getattr(item, "identified", None) for item in known))
        for number in range(3):
            await producer.send("orders", b"%d" % number)
        file.rewrite([account("orders-key", topicPerms=["orders=PUB"], defaultTopicPerm="PUB")])
        await producer.send("orders", b"2")
        await producer.send("other", b"2")


async def test_refusals_and_handshakes_are_metrics(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files), metrics_port=0)
    by_tls, plain = await tls_wire(node, certificates, "nobody-key"), await signed_wire(node.address, "")
    for wire in (by_tls, plain):
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0
        await wire.close()
    url = f"http://127.0.0.1:{node.server.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    for line in (
        'rocketlet_requests_refused_total{broker="broker-a",cluster="DefaultCluster",reason="permission"} 1.0',
        'rocketlet_requests_refused_total{broker="broker-a",cluster="DefaultCluster",reason="no_key"} 1.0',
        'rocketlet_tls_handshakes_total{broker="broker-a",cluster="DefaultCluster",outcome="done"} 1.0',
        'rocketlet_tls_handshakes_total{broker="broker-a",cluster="DefaultCluster",outcome="failed"} 0.0',
    ):
        assert line in text


async def test_an_account_changes_its_secret_while_its_clients_work(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    proven = await tls_wire(node, certificates, "orders-key")
    signing = await signed_wire(node.address, "orders-key")
    assert await identified(proven) == 0
    proven.access_key = ""
    rotated = account("orders-key", topicPerms=["orders=PUB"])
    rotated |= {"secretKey": "a-new-secret", "formerSecretKey": SECRETS["orders-key"]}
    others = [entry for entry in ACCOUNTS if entry["accessKey"] != "orders-key"]
    file.rewrite([*others, rotated])

    async def sends(wire: SignedWire) -> bool:
        return (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0

    assert [await sends(proven), await sends(signing)] == [True, True]
    assert file.acl.former == {"orders-key": 1}, "the other proved itself before"
    renewed = await signed_wire(node.address, "orders-key")
    renewed.secret = "a-new-secret"
    assert await sends(renewed)
    del rotated["formerSecretKey"]
    file.rewrite([*others, rotated])
    assert [await sends(signing), await sends(renewed)] == [False, True]
    with pytest.raises(ConnectionError):
        await sends(proven)
    for wire in (proven, signing, renewed):
        await wire.close()


async def test_a_secret_that_is_set_from_afar_is_the_only_one(file: AccountsFile) -> None:
    file.rewrite([account("orders-key", formerSecretKey="the-one-before")])
    file.acl.file.put_account({"accessKey": "orders-key", "secretKey": "a-new-secret"})
    assert file.acl.file.policy.accounts["orders-key"].former is None
    assert "the-one-before" not in file.path.read_text()


async def test_doctor_names_who_is_refused_and_why(nodes: Nodes, file: AccountsFile) -> None:
    node = await nodes.start(acl=file.acl)
    wire = await signed_wire(node.address, "orders-key")
    wire.secret = "not-its-secret"
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0
    await wire.close()
    async with AdminClient(node.address, access=access(ADMIN)) as admin:
        (finding,) = [one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "requests_refused"]
    assert (finding.harm, finding.subject) == (Harm.STANDS, "broker-a")
    assert "127.0.0.1 requested SEND_MESSAGE_V2 (310): Check signature failed for accessKey=orders-key" in finding.text


# Topics in which brokers keep what is of others: delayed and half messages, replies, dead letters, traces.


PULL: dict[str, Any] = {
    "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
    "subVersion": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "DefaultCluster_REPLY_TOPIC",
        "%DLQ%theirs",
        "%RETRY%theirs",
        TRACE_TOPIC,
    ],
)
async def test_no_request_shows_in_another_topic_what_is_denied(
    guarded: Node, wired: Wired, file: AccountsFile, topic: str
) -> None:
    """An account that may read all topics but one read that one's delayed and half messages, replies and dead letters."""
    curious = account("readers-key", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB")
    curious |= {"topicPerms": ["secret=DENY"], "groupPerms": ["theirs=DENY"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), curious])
    admin, reader = await wired(ADMIN), await wired("readers-key")
    guarded.broker.group_configs.put(GroupConfig("theirs"))
    for text in ("KEYS\1k", "KEYS\1k\2DELAY\x0118", "KEYS\1k\2TRAN_MSG\1true\2PGROUP\1p"):
        assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")).code == 0
    dead = {**SEND, "b": "%RETRY%theirs", "j": 99, "i": "KEYS\1k"}
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, dead, b"hidden")).code == 0
    queue_id = 17 if topic.startswith("SCHEDULE") else 0
    pull = {**PULL, "topic": topic, "queueId": queue_id, "consumerGroup": "ours"}
    query = {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 2**62}
    for code, ext in (
        (RequestCode.PULL_MESSAGE, pull),
        (RequestCode.QUERY_MESSAGE, query),
        (RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id}),
        (RequestCode.GET_TOPIC_STATS_INFO, {"topic": topic}),
        (RequestCode.QUERY_CONSUME_QUEUE, {"topic": topic, "queueId": queue_id, "index": 0, "count": 1}),
    ):
        for asked in (ext, {**ext, "consumerGroup": ""}):
            refused = await reader.call(code, asked)
            assert (refused.code, "No default permission for" in (refused.remark or "")) == (1, True), (code, refused)
        allowed = await admin.call(code, ext)
        assert "AclException" not in (allowed.remark or "")
    subscriptions = (parse_subscription(topic, "*", version=1),)
    beat = bodies.encode_heartbeat(Heartbeat("c", (ConsumerData("ours", subscriptions=subscriptions),)))
    assert "No default permission" in ((await reader.call(RequestCode.HEART_BEAT, body=beat)).remark or "")
    for access_key in ("readers-key", ADMIN):
        client = await grpc_client(guarded.address, authorization=signed(access_key, SECRETS[access_key]))
        receive = request(group=resource("ours"), message_queue={"topic": resource(topic)})
        answer, *_ = await begin(client, receive).all()
        is_refused = answer.status.code == 40100 and "No default permission for" in answer.status.message
        assert is_refused is (access_key != ADMIN), answer
        await client.close()


async def test_no_place_in_the_log_shows_what_is_denied(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    curious = account("readers-key", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB")
    curious |= {"topicPerms": ["secret=DENY"], "groupPerms": ["theirs=DENY"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), curious])
    admin, reader = await wired(ADMIN), await wired("readers-key")
    guarded.broker.group_configs.put(GroupConfig("theirs"))
    for text in ("", "DELAY\x0118", "TRAN_MSG\1true\2PGROUP\1p", "REAL_TOPIC\1open\2DELAY\x0118"):
        assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")).code == 0
    dead = {**SEND, "b": "%RETRY%theirs", "j": 99}
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, dead, b"hidden")).code == 0
    reply = {**SEND, "i": "REPLY_TO_CLIENT\1nobody"}
    await admin.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply, b"hidden")
    queues = [queue for queue in guarded.broker.store.queues.values() if queue.next]
    places = [queue.entry(offset)[0] for queue in queues for offset in range(queue.next)]
    assert len(places) == 6
    for place in places:
        sent_back = {"offset": place, "group": "ours", "delayLevel": 1, "originMsgId": "", "originTopic": ""}
        for code, ext in (
            (RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place}),
            (RequestCode.CONSUMER_SEND_MSG_BACK, sent_back),
        ):
            refused = await reader.call(code, ext)
            assert (refused.code, "No default permission for" in (refused.remark or "")) == (1, True), (place, refused)
        assert (await admin.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place})).code == 0


async def test_what_waits_is_shown_to_nobody_who_may_only_read_where_it_goes(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    """A delayed message is not due, a half one may be rolled back: sent back, its group would handle it."""
    reader = account("readers-key", defaultTopicPerm="DENY", defaultGroupPerm="SUB") | {"topicPerms": ["secret=SUB"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), reader])
    admin, reads = await wired(ADMIN), await wired("readers-key")
    due_ms = guarded.broker.clock.time_ms() + 3_600_000
    for text, code in (
        ("", 0),
        ("DELAY\x0118", 1),
        (f"TIMER_DELIVER_MS\x01{due_ms}", 1),
        ("TRAN_MSG\x01true\x02PGROUP\x01p", 1),
    ):
        sent = await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")
        place = int(str(sent.ext["msgId"])[-16:], 16)
        sent_back = {"offset": place, "group": "ours", "delayLevel": 1, "originMsgId": "", "originTopic": ""}
        assert (await reads.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place})).code == code, text
        assert (await reads.call(RequestCode.CONSUMER_SEND_MSG_BACK, sent_back)).code == code, text
