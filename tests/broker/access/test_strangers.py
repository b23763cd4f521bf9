"""Strangers without an account may not do everything: send clients elsewhere, and administrate from afar."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from rocketlet.broker.config import LIMITS, LimitExceeded, Limits
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, OF_BROKERS
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import DataVersion, TopicConfig, finish
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, encode

from campaigns.frames import Peer

from ...conftest import Connect, Node, Nodes, Wire, create_topic


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
    found = [broker.name for broker in routes.brokers()]
    assert sorted(set(routes._names.values())) == sorted(found)
    assert routes._names.keys() == routes._addresses.keys()
    assert sum(len(broker.topics) for broker in routes._brokers.values()) == routes._entries
    return found


@pytest.mark.parametrize("limit", ["max_topics", "max_routes", "max_brokers", "max_broker_addresses"])
def test_a_registration_that_is_refused_leaves_nothing(limit: str) -> None:
    """Brokers that nobody forgets would use up their number, until the name server starts anew."""
    stranger: Any = object()
    routes = routes_with(("a", "10.0.0.1:1"), connection=stranger, limits=Limits(**{limit: 1}))
    name, number = ("a", 1) if limit == "max_broker_addresses" else ("b", 0)
    topics = [TopicConfig("t"), TopicConfig("u")]
    with pytest.raises(LimitExceeded):
        finish(routes.registering("c", name, number, "10.0.0.2:1", DataVersion(2), topics, stranger))
    assert names(routes) == ["a"]
    assert [dict(broker.addresses) for broker in routes.brokers()] == [{0: "10.0.0.1:1"}]
    finish(routes.registering("c", "mine", 0, "127.0.0.1:1", DataVersion(1), topics, None))
    assert names(routes) == ["a", "mine"], "strangers use up nothing of the broker's in this process"


def test_an_address_that_another_broker_registers_is_that_brokers() -> None:
    """As after a restart under another name, before the former connection is seen to end."""
    one, two = object(), object()
    routes = routes_with(("a", "10.0.0.1:1"), connection=one)
    finish(routes.registering("c", "b", 0, "10.0.0.1:1", DataVersion(1), [TopicConfig("u")], two))  # type: ignore[arg-type]
    routes.drop(one)  # type: ignore[arg-type]
    assert names(routes) == ["b"]
    assert routes.route("t") is None
    routes.drop(two)  # type: ignore[arg-type]
    assert names(routes) == []


def test_a_broker_that_moves_leaves_no_address_behind() -> None:
    """No limit counts it: one connection may register another one with every frame."""
    connection: Any = object()
    routes = routes_with(*[("a", f"10.0.0.{number}:1") for number in range(100)], connection=connection)
    assert [dict(broker.addresses) for broker in routes.brokers()] == [{0: "10.0.0.99:1"}]
    assert list(routes._addresses) == list(routes._names) == list(routes._of_connection[connection]) == ["10.0.0.99:1"]
    routes.drop(connection)
    assert names(routes) == []


def test_who_unregisters_a_broker_at_the_address_of_another_one_changes_nothing() -> None:
    """It was known for ever then: its silence was not noticed any more."""
    connection: Any = object()
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
    stranger: Any = object()
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


async def test_administration_can_be_confined_to_the_brokers_machine(nodes: Nodes) -> None:
    node = await nodes.start()
    server = Server(
        Listening("127.0.0.1", 0, admin_is_local=True), broker=node.broker, routes=node.broker.name_servers.local
    )
    far, near = Peer(server, 1, "10.0.0.1"), Peer(server, 2, "127.0.0.1")
    for code, (_, rule) in (*BROKER_REQUESTS.items(), *NAME_SERVER_REQUESTS.items()):
        for peer in (far, near):
            peer.send(encode(Frame(code, 7, {"topic": "t"})))
        await node.broker.turns.done()
        refused = [
            any(frame.opaque == 7 and "administration" in (frame.remark or "") for frame in peer.received())
            for peer in (far, near)
        ]
        assert refused == [rule.is_admin and code not in OF_BROKERS, False], code
    for peer in (far, near):
        peer.hang_up()
