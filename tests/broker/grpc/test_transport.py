"""gRPC on the broker's port, beside the other protocol server."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from rocketlet.broker import server as broker_server
from rocketlet.broker.config import CALL_WORK, FIELD_FACTOR, STREAM_BYTES
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS, GrpcServer
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.tls import Tls
from rocketlet.protocol import config as limits
from rocketlet.protocol import http2
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_HEADER_LIST_BYTES
from rocketlet.protocol.grpc import Status
from rocketlet.testing.ports import free_port

from ...conftest import PATIENCE_S, Connect, Node, Nodes, create_topic, eventually
from ...support.certificates import Certificates
from ...support.grpc_client import GrpcClient, route
from ...support.metrics import samples
from ...support.peers import GrpcPeer, head_block
from .conftest import Dial
from .receives import OK, ack, handles, joined, receive, request, send


async def test_one_port_serves_both_protocol_servers(node: Node, client: GrpcClient, connect: Connect) -> None:
    wire = await connect(node.address)
    assert (await client.call("QueryRoute", route("t"))).status.code == 20000
    assert (await wire.call(RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0
    assert len(node.server.connections) == 2


async def test_the_preface_may_come_byte_by_byte(node: Node) -> None:
    host, _, port = node.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0":
        writer.write(bytes((byte,)))
        await writer.drain()
        await asyncio.sleep(0)
    assert (await reader.readexactly(9))[3] == 4  # SETTINGS
    writer.close()


@pytest.mark.parametrize("with_alpn", [True, False])
async def test_tls_is_looked_into(nodes: Nodes, dial: Dial, certificates: Certificates, with_alpn: bool) -> None:
    node = await nodes.start(tls=Tls("enforcing", certificates.files))
    context = certificates.client_context()
    if with_alpn:
        context.set_alpn_protocols(["h2"])
    client = await dial(node.address, tls=context)
    tls: ssl.SSLObject = client.transport.get_extra_info("ssl_object")
    assert tls.selected_alpn_protocol() == ("h2" if with_alpn else None)
    assert (await client.call("QueryRoute", route("t"))).status.code == 20000


async def test_plain_call_is_refused_when_tls_is_enforced(nodes: Nodes, dial: Dial, certificates: Certificates) -> None:
    node = await nodes.start(tls=Tls("enforcing", certificates.files))
    client = await dial(node.address)
    call = client.begin("QueryRoute")
    call.send(route("t"), end=True)
    assert await call.all() == []
    await asyncio.wait_for(client.is_lost.wait(), PATIENCE_S)
    assert (call.http_status, node.broker.tls.refused) == ("", 1)


def trusting() -> ssl.SSLContext:
    """Java's and Go's clients begin with TLS, and check nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def test_without_a_certificate_the_broker_makes_one(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(tls=Tls(signs_itself=True))
    assert node.broker.tls.context is None, "when the first client comes"
    clients = [await dial(node.address, tls=trusting(), client_id=f"client-{number}") for number in range(3)]
    for client in clients:
        assert client.transport.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        assert (await client.call("QueryRoute", route("t"))).status.code == 20000


async def test_a_broker_that_has_tls_disabled_makes_none(nodes: Nodes, dial: Dial) -> None:
    node = await nodes.start(tls=Tls("disabled", signs_itself=True))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await dial(node.address, tls=trusting())


async def test_grpc_may_have_a_port_of_its_own(node: Node, dial: Dial) -> None:
    async with Server(Listening("127.0.0.1", free_port(), grpc_port=0), broker=None, routes=Routes()) as server:
        assert server.grpc_port not in (None, server.port)
        client = await dial(f"127.0.0.1:{server.grpc_port}")
        call = client.begin("QueryRoute")
        call.send(route("t"), end=True)
        assert await call.all() == []
        assert call.status == Status.UNAVAILABLE
        assert "name server" in call.reason
    assert node.server.grpc_port is None


async def test_an_unknown_method_is_not_served(client: GrpcClient) -> None:
    call = client.begin("PullMessage")
    assert await call.all() == []
    assert call.status == Status.UNIMPLEMENTED
    assert "PullMessage" in call.reason


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_who_comes_with_another_kind_of_http_gets_an_error(client: GrpcClient, method: str) -> None:
    stream_id = client.h2.get_next_available_stream_id()
    head = [(":method", method), (":scheme", "http"), (":path", "/"), (":authority", "a")]
    call = client.begin("QueryRoute", end=True, content_type="text/html")
    del client.calls[call.stream_id]
    stream_id = client.h2.get_next_available_stream_id()
    client.h2.send_headers(stream_id, head, end_stream=True)
    call.stream_id = stream_id
    client.calls[stream_id] = call
    client.flush()
    assert await call.all() == []
    assert call.http_status == "415"
    assert (b"speaks gRPC" in call.body) is (method == "GET")


async def test_a_call_without_a_message_or_with_two_is_refused(client: GrpcClient) -> None:
    call = client.begin("QueryRoute", end=True)
    assert await call.all() == []
    assert (call.status, call.reason) == (Status.INTERNAL, "the call has no message")
    call = client.begin("QueryRoute")
    call.send(route("t"))
    call.send(route("t"))
    assert (await call.all())[1:] == []
    assert call.status in (Status.OK, Status.INTERNAL)


async def test_a_message_that_is_none_is_refused(client: GrpcClient) -> None:
    call = client.begin("QueryRoute")
    client.h2.send_data(call.stream_id, b"\0\0\0\0\2\xff\xff", end_stream=True)
    client.flush()
    assert await call.all() == []
    assert call.status == Status.INTERNAL


async def test_a_deadline_that_is_none_is_refused(client: GrpcClient) -> None:
    call = client.begin("QueryRoute", grpc_timeout="soon")
    assert await call.all() == []
    assert call.status == Status.INVALID_ARGUMENT


async def test_a_call_without_a_client_id_is_refused_with_a_code(client: GrpcClient) -> None:
    answer = await client.call("QueryRoute", route("t"), x_mq_client_id="")
    assert answer.status.code == 40017


async def test_what_a_client_has_not_finished_counts_as_its_memory(node: Node, client: GrpcClient) -> None:
    (connection,) = node.server.connections
    before = connection.held_bytes()
    call = client.begin("SendMessage")
    client.h2.send_data(call.stream_id, b"\0\0\1\0\0" + b"x" * 10_000)
    client.flush()
    await eventually(lambda: connection.held_bytes() > before + 10_005 + STREAM_BYTES)
    assert connection.held_bytes() < before + 10_005 + STREAM_BYTES + FIELD_FACTOR * MAX_HEADER_LIST_BYTES
    call.cancel()
    await eventually(lambda: connection.held_bytes() == before)


async def test_unfinished_messages_have_a_limit(
    node: Node, client: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.broker.grpc.server.MAX_UNFINISHED_BYTES", 1000)
    calls = [client.begin("SendMessage") for _ in range(2)]
    for call, size in zip(calls, (500, 501), strict=True):
        client.h2.send_data(call.stream_id, (b"\0\0\1\0\0" + b"x" * size)[:size])
    client.flush()
    assert await calls[1].all() == []
    assert calls[1].status == Status.RESOURCE_EXHAUSTED
    assert calls[0].status is None


async def test_an_answer_that_nobody_reads_counts_until_it_is_taken(node: Node, client: GrpcClient) -> None:
    client.is_reading = False
    node.broker.topics.put(TopicConfig("t", 1000, 1000), node.broker.store.end)
    for _ in range(4):
        client.begin("QueryRoute").send(route("t", "a-broker.example", 1), end=True)
    (connection,) = node.server.connections
    await eventually(lambda: connection.held_bytes() > 100_000)
    await client.close()
    await eventually(lambda: not node.server.connections)
    assert node.server.memory.used_bytes == 0


async def test_a_client_that_breaks_the_protocol_gets_the_reason(node: Node, client: GrpcClient) -> None:
    client.transport.write(b"\0\0\0\6\0\0\0\0\0")  # PING without its 8 bytes
    await asyncio.wait_for(client.is_lost.wait(), 60)
    assert client.goaway == 6


async def test_a_broker_that_stops_sends_goaway(node: Node, client: GrpcClient) -> None:
    await client.call("QueryRoute", route("t"))
    await node.stop()
    await asyncio.wait_for(client.is_lost.wait(), 60)
    assert client.goaway == 0


@pytest.mark.parametrize("kind", ["data of 2 bytes", "headers of 400 fields"])
async def test_frames_of_one_read_are_read_in_pieces_with_requests_of_others_between(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """256 KiB of them were read in one piece, which took 80 ms and more."""
    others = await connect(node.address)
    flood = GrpcPeer(node.server, 1)
    monkeypatch.setattr("rocketlet.broker.grpc.server.PIECE_S", -1)
    monkeypatch.setattr(node.broker.turns, "turn_s", -1)  # nobody has a turn
    opened = http2.encode(http2.HEADERS, http2.END_HEADERS, 1, head_block("Heartbeat"))
    if kind == "data of 2 bytes":
        sent, most = opened + 20_000 * http2.encode(http2.DATA, 0, 1, b"\0\0"), CALL_WORK
    else:
        block = head_block("Heartbeat") + b"\xbc" * 400  # a field of the static table, without a value
        heads = (http2.encode(http2.HEADERS, http2.END_HEADERS, item, block) for item in range(1, 1000, 2))
        sent, most = b"".join(heads), 2
    flood.send(sent)
    left = flood.protocol.http2.waiting_bytes
    assert len(sent) - left <= most * len(sent) / (20_000 if most == CALL_WORK else 500) + len(opened)
    await create_topic(others, "t")
    assert flood.protocol.http2.waiting_bytes == left
    monkeypatch.undo()
    await node.broker.turns.done()
    assert flood.protocol.http2.waiting_bytes == 0
    flood.hang_up()


@pytest.mark.parametrize("topic", ["t", "empty"])
@pytest.mark.parametrize("calls", [1, limits.MAX_STREAMS, 2 * limits.MAX_STREAMS])
async def test_receives_behind_closed_windows_leave_nothing_when_their_client_disconnects(
    nodes: Nodes, dial: Dial, topic: str, calls: int
) -> None:
    node = await nodes.start(metrics_port=0)
    for name in ("t", "empty"):
        node.broker.topics.put(TopicConfig(name, 4, 4), node.broker.store.end)
    honest = await dial(node.address)
    await joined(honest)
    sent = [b"%d" % number * 1000 for number in range(50)]
    await send(honest, *sent)

    async def figures() -> list[float]:
        """Memory of connections, receives that wait, messages in flight."""
        found = await samples(node)
        names = ("rocketlet_connections_held_bytes", "rocketlet_receives_waiting", "rocketlet_group_unfinished")
        return [sum(value for (of, _), value in found.items() if of == name) for name in names]

    async def is_flooded() -> bool:
        held_bytes, waiting, in_flight = await figures()
        return held_bytes > 0 and (in_flight > 0 if topic == "t" else waiting > 0)

    flood = GrpcPeer(node.server, 1)
    flood.send(http2.encode_settings({http2.Setting.INITIAL_WINDOW_SIZE: 0}))
    asked = request(wait_ms=60_000, auto_renew=True, message_queue={"topic": {"name": topic}})
    flood.send(b"".join(flood.call("ReceiveMessage", asked, "flood", b"60S") for _ in range(calls)))
    await eventually(is_flooded)
    await send(honest, b"meanwhile")
    flood.hang_up()
    found: list[Any] = []
    while len(found) <= len(sent):
        found += await receive(honest)
    assert sorted(item.body for item in found) == sorted([*sent, b"meanwhile"])
    assert (await ack(honest, *handles(found))).status.code == OK
    assert (await figures())[1:] == [0, 0]
    await honest.close()
    await eventually(lambda: not node.server.connections)
    assert await figures() == [0, 0, 0]


async def test_more_calls_than_a_turn_has_time_for_are_all_answered(
    client: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.broker.grpc.server.PIECE_S", 0.0)
    calls = [client.begin("Heartbeat") for _ in range(50)]
    for call in calls:
        call.send(schema.HeartbeatRequest(client_type=1), end=True)
    assert [(await call.all())[0].status.code for call in calls] == [20000] * 50


@pytest.mark.parametrize("more", [0, 1])
async def test_the_largest_message_is_taken(client: GrpcClient, more: int) -> None:
    request = schema.HeartbeatRequest(client_type=1)
    request.group.resource_namespace = "n" * (limits.MAX_CALL_BYTES - 12 + more)
    assert request.ByteSize() == limits.MAX_CALL_BYTES + more
    call = client.begin("Heartbeat")
    call.send(request, end=True)
    assert len(await call.all()) == (0 if more else 1)
    assert call.status == (Status.RESOURCE_EXHAUSTED if more else Status.OK)


async def test_a_client_that_comes_before_its_protocol_server_is_loaded_holds_up_nobody(
    nodes: Nodes, dial: Dial, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    real = broker_server.load_grpc

    def load() -> type[GrpcServer] | None:
        assert may_load.wait(PATIENCE_S)
        return real()

    monkeypatch.setattr(broker_server, "load_grpc", load)
    try:
        node = await nodes.start()
        early = await dial(node.address)
        asked = early.begin("QueryRoute")
        asked.send(route("t"), end=True)
        await eventually(lambda: node.server.memory.used_bytes > 0)
        wire = await connect(node.address)
        assert (await wire.call(RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0
    finally:
        may_load.set()
    assert [answer.status.code for answer in await asked.all()] == [20000]
    assert (await early.call("QueryRoute", route("t"))).status.code == 20000
    await early.close()
    await eventually(lambda: node.server.memory.used_bytes == 0)


async def test_a_server_that_stops_before_its_protocol_server_is_loaded_closes_those_who_wait(
    nodes: Nodes, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    monkeypatch.setattr(broker_server, "load_grpc", may_load.wait)
    try:
        node = await nodes.start()
        client = await dial(node.address)
        await eventually(lambda: node.server.memory.used_bytes > 0)
        await node.stop()
        async with asyncio.timeout(PATIENCE_S):
            await client.is_lost.wait()
    finally:
        may_load.set()


# The descriptors that are checked in, and the pool that they live in.


FOLDER = Path(schema.__file__).parent


def test_the_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    """Written by `python -m grpc_tools.protoc` with these arguments, in broker/grpc."""
    made = tmp_path / "service.binpb"
    arguments = ["-I", str(FOLDER), "--include_imports", f"--descriptor_set_out={made}", "service.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    found, checked_in = (
        {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file}
        for path in (made, FOLDER / "service.binpb")
    )
    assert found["service.proto"] == checked_in["service.proto"]
    assert sorted(found) == sorted(checked_in)


def test_every_method_has_the_messages_of_the_service() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "service.binpb").read_bytes()).file
    (service,) = files[-1].service
    for method in service.method:
        served = METHODS.get(method.name)
        if served is not None:
            assert served.request.DESCRIPTOR.full_name == method.input_type[1:]
            assert served.response.DESCRIPTOR.full_name == method.output_type[1:]
            assert (served.is_open, served.is_stream) == (method.client_streaming, method.server_streaming)
    assert {method.name for method in service.method} >= METHODS.keys()


def test_the_default_pool_is_left_to_others() -> None:
    """The official Python client registers messages of the same names there."""
    try:
        descriptor_pool.Default().FindMessageTypeByName(f"{schema.PACKAGE}.Message")
    except KeyError:
        pass
    else:
        raise AssertionError("the default pool has our messages")
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool, message_factory\n"
        "from rocketlet.broker.grpc import schema\n"
        "pool = descriptor_pool.Default()\n"
        "file = descriptor_pb2.FileDescriptorProto(name='definition.proto', package=schema.PACKAGE)\n"
        "file.message_type.add(name='Message').field.add(name='other', number=1, type=9, label=1)\n"
        "pool.AddSerializedFile(file.SerializeToString())\n"
        "theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName(schema.PACKAGE + '.Message'))\n"
        "assert theirs(other='x').SerializeToString() != schema.Message(body=b'x').SerializeToString()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
