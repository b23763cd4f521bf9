"""Tools show the truth about groups whose members pop: members, lag, messages in flight, and why nothing moves."""

from __future__ import annotations

import ssl

import orjson
import pytest
from rocketlet.broker.grpc import schema
from rocketlet.broker.tls import Tls
from rocketlet.client import AdminClient, Producer, SharedConsumer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Harm
from rocketlet.command.nouns.group_report import report
from rocketlet.command.plumbing.output import Output
from rocketlet.console.group_watch import GroupWatch
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import ConsumeStats, write
from rocketlet.protocol.names import SQL92

from ...conftest import Node, Nodes, Wire
from ...support.grpc_client import GrpcClient, message, resource, route, sending
from ...support.metrics import samples
from .conftest import Dial
from .receives import ack, handles, joined, receive, send

AT_ONCE = ObservationTimes(look_s=0.0, watch_s=0.0, stuck_s=0.0)


@pytest.fixture
async def node(node: Node) -> Node:
    node.broker.topics.put(TopicConfig("t", 1, 1), node.broker.store.end)
    return node


async def test_members_lag_and_messages_in_flight_are_shown(
    node: Node, client: GrpcClient, wire: Wire, capsys: pytest.CaptureFixture[str]
) -> None:
    await joined(client)
    await send(client, *(b"%d" % number for number in range(5)))
    found = await receive(client, count=3)
    await ack(client, *handles(found[1:2]))
    async with AdminClient(node.address) as admin:
        (progress,) = (await admin.progress("g")).values()
        assert (progress.lag, progress.in_hand, progress.waiting) == (4, 2, 2)
        await report(admin, "g", Output(as_json=False))
        watch = GroupWatch(admin, "g")
        await watch.refresh()
    text = capsys.readouterr().out
    assert "group g: 1 member, 1 queue shared" in text
    assert "  host@1@0@test  -  -  t [*]\n    shares messages\n" in text
    assert "  t: 4 messages behind, 2 of them in flight" in text
    assert (watch.look.lag, watch.look.in_hand) == (4, 2)
    assert [(member.client_id, member.shares) for member in watch.look.members] == [("host@1@0@test", True)]
    answer = await wire.call(RequestCode.GET_CONSUME_STATS, write(ConsumeStats("g")))
    assert b'"brokerOffset":5,"consumerOffset":1,"pullOffset":3' in answer.body  # Java of 5.x takes their difference


async def test_a_filter_is_shown_as_its_client_has_said_it(node: Node, client: GrpcClient) -> None:
    await joined(client)
    await receive(client, filter_expression={"type": 2, "expression": "a > 1"})
    async with AdminClient(node.address) as admin:
        (found,) = (await admin.connections("g")).values()
        assert found.subscriptions == {"t": "a > 1"}
        (told,) = await admin.history("g")
        assert told["members"][0]["subscriptions"] == {"t": "a > 1"}
    (wanted,) = node.broker.pops.pools.clients_of("g")["host@1@0@test"]
    assert wanted.kind == SQL92


async def test_messages_in_flight_are_no_stuck_queue_and_messages_that_nobody_takes_are(
    node: Node, client: GrpcClient
) -> None:
    await joined(client)
    await send(client, b"1")
    (first,) = await receive(client)
    async with AdminClient(node.address) as admin:
        assert await diagnose(admin, AT_ONCE) == []
        await send(client, b"2")
        (finding,) = await diagnose(admin, AT_ONCE)
        assert (finding.kind, finding.harm) == ("stuck_queue", Harm.SLOW)
        assert "the members that share them, with 1 of these in flight, have acknowledged nothing" in finding.text
        await ack(client, *handles([first, *await receive(client)]))
        assert await diagnose(admin, AT_ONCE) == []


@pytest.mark.limits(max_unfinished=2)
async def test_too_many_messages_in_flight_are_named(
    node: Node, client: GrpcClient, capsys: pytest.CaptureFixture[str]
) -> None:
    await joined(client)
    await send(client, b"1", b"2", b"3")
    assert len(await receive(client)) == 2
    async with AdminClient(node.address) as admin:
        kinds = {finding.kind: finding for finding in await diagnose(admin, AT_ONCE)}
        assert "t:0: brokers return no new messages" in kinds["too_many_in_hand"].text
        await report(admin, "g", Output(as_json=False))
        assert "  t:0: brokers return no new messages" in capsys.readouterr().out
        await report(admin, "g", Output(as_json=True))
        assert orjson.loads(capsys.readouterr().out)["brokers"][0]["full"] == ["t:0"]


async def test_a_member_that_shares_reports_the_group_s_lag(node: Node) -> None:
    async with Producer(node.address) as producer, SharedConsumer(node.address, "g", "t", start="first") as consumer:
        for number in range(4):
            await producer.send("t", b"%d" % number)
        message = await consumer.receive()
        assert await consumer.lag() == 4
        await consumer.ack(message)
        while await consumer.lag() != 3:
            pass


async def test_clients_that_cannot_connect_and_calls_that_fail_are_named(
    nodes: Nodes, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(metrics_port=0, tls=Tls())
    client = await dial(node.address)
    assert (await client.call("QueryRoute", route("gone"))).status.code == 20000
    answer = await client.call("SendMessage", sending(message("t", b"", message_id="ID")))
    assert answer.status.code == 41302
    assert (await samples(node))["rocketlet_grpc_connections", frozenset()] == 1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await dial(node.address, tls=ssl.create_default_context())
    monkeypatch.setattr(node.server, "grpc_server", None)
    refused = (await dial(node.address)).begin("QueryRoute")
    assert await refused.all() == []
    async with AdminClient(node.address) as admin:
        found = [finding for finding in await diagnose(admin, AT_ONCE) if finding.subject == "broker-a"]
    assert sorted({finding.kind for finding in found}) == ["calls_failing", "connections_refused"]
    texts = "\n".join(finding.text for finding in found)
    assert "41302 SendMessage of host@1@0@test (127.0.0.1:" in texts
    assert "127.0.0.1: a TLS client connected to a port without TLS" in texts
    assert "pip install '.[broker]'" in texts
    await client.close()


@pytest.mark.parametrize(
    ("language", "version", "is_old"),
    [
        ("HTTP", "1.0.7", True),
        ("HTTP", "1.0.8", False),
        ("HTTP", "1.1.0", False),
        ("HTTP", "unknown", False),
        ("JAVA", "1.0.7", False),
    ],
)
async def test_doctor_names_consumer_whose_release_cannot_read_its_settings(
    node: Node, client: GrpcClient, language: str, version: str, is_old: bool
) -> None:
    headers = {"x-mq-language": language, "x-mq-client-version": version}
    call = client.begin("Heartbeat", end=False, path="", **headers)
    call.send(schema.HeartbeatRequest(group=resource("g"), client_type=2), end=True)
    assert (await call.all())[0].status.code == 20000
    async with AdminClient(node.address) as admin:
        found = [finding.text for finding in await diagnose(admin, AT_ONCE) if finding.kind == "old_client"]
    assert len(found) == is_old
    assert all("Node's client 1.0.7 cannot read" in text and "use 1.0.8 or later" in text for text in found)
