"""A client's connections to peers that hang up, stall, or are not reached any more."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.tls import Tls
from rocketlet.client import (
    AdminClient,
    ConnectionFailed,
    Consumer,
    Producer,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
)
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.errors import BrokerRefused
from rocketlet.client.member.leases import Heartbeats
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Access, Connection, Connections
from rocketlet.protocol.bodies import Heartbeat, Route
from rocketlet.protocol.codes import RESPONSE_FLAG, RequestCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.names import Queue
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.accounts import reload
from ..support.certificates import Certificates
from ..support.handlers import Inbox
from ..support.turns import passed


class HangsUp:
    """As a load balancer does it whose server is away: it takes each connection and closes it."""

    def __init__(self) -> None:
        self.taken = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        writer.close()


@pytest.fixture
async def hangs_up() -> AsyncIterator[tuple[HangsUp, str]]:
    """And its address."""
    peer = HangsUp()
    server = await asyncio.start_server(peer.take, "127.0.0.1", 0)
    yield peer, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_peer_that_hangs_up_is_not_called_again_immediately(hangs_up: tuple[HangsUp, str]) -> None:
    peer, address = hangs_up
    lost: list[str] = []
    connections = Connections(
        Access(),
        lambda *_: None,
        lambda connection: lost.append(connection.address),
        limits=ClientLimits(reconnect_s=3600.0),
    )
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        connection = await connections.get(address)
        await connection.request(0, {})
    await eventually(lambda: lost == [address])
    again = asyncio.create_task(connections.get(address))
    for taken in range(2, 7):  # others come and go meanwhile
        reader, writer = await asyncio.open_connection(*address.split(":"))
        assert await reader.read() == b""
        writer.close()
        assert peer.taken == taken
    assert not again.done()
    await connections.close()
    with pytest.raises(asyncio.CancelledError):
        await again


async def test_it_is_called_again_after_a_while(hangs_up: tuple[HangsUp, str]) -> None:
    peer, address = hangs_up
    connections = Connections(Access(), lambda *_: None, lambda _: None, limits=ClientLimits(reconnect_s=0.001))
    for _ in range(3):
        with pytest.raises(ConnectionFailed):
            await (await connections.get(address)).request(0, {})
    assert peer.taken == 3
    await connections.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_peer_that_reads_nothing_more_holds_up_no_close(encrypted: bool, certificates: Certificates) -> None:
    """Its written bytes never leave, and over TLS it sends no close_notify."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.files.certificate, certificates.files.key)
    taken: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        taken.put_nowait(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context if encrypted else None)
    connections = Connections(
        Access(tls=encrypted, verify_tls=False),
        lambda *_: None,
        lambda _: None,
        limits=ClientLimits(close_timeout_s=0.01),
    )
    connection = await connections.get(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    peer = await taken.get()
    failed: list[object] = []
    due_s = connection.running_s() + PATIENCE_S
    connection.call(RequestCode.SEND_MESSAGE_V2, {}, bytes(32 << 20), failed.append, due_s)
    await asyncio.wait_for(connections.close(), PATIENCE_S)
    assert isinstance(failed[0], ConnectionFailed)
    peer.transport.abort()
    server.close()


class Time:
    """A loop whose time a test sets, for a connection without a socket."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_connection_whose_peer_answers_nothing_for_a_minute_is_given_up() -> None:
    connection, socket = Connection("127.0.0.1:1", Access(), lambda *_: None, lambda _: None), Socket()
    time = Time()
    connection.loop = cast("asyncio.AbstractEventLoop", time)
    connection.connection_made(socket)

    async def goes_unanswered(seconds: float) -> None:
        asked = connection.request_unchecked(RequestCode.HEART_BEAT, {}, timeout_s=0.1)
        while not asked.done():
            time.now_s += 0.2
            connection.sweep_deadlines()
        with pytest.raises(RequestTimeout):
            await asked
        time.now_s += seconds - 0.2

    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    answered = connection.request_unchecked(RequestCode.HEART_BEAT, {})
    connection.data_received(encode(Frame(0, connection._opaque, flag=RESPONSE_FLAG)))
    await answered
    connection.sweep_deadlines()
    time.now_s += CLIENT_LIMITS.silent_s * 10  # nothing is asked for
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert not socket.is_aborted, "it has answered, and was not asked for long"
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert not socket.is_aborted
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert socket.is_aborted
    connection.connection_lost(None)


# A broker that comes back at another address is found as soon as the name server knows it, not at the next refresh.


QUEUE = Queue("t", "broker-b", 0)
TOLD = ClientLimits(route_interval_s=10 * PATIENCE_S)
"""No look by the clock comes first."""


@pytest.fixture
async def brokers(nodes: Nodes, connect: Connect) -> tuple[Node, Node]:
    """A name server, and a broker beside it that has the topic t."""
    first = await nodes.start()
    second = await nodes.start(name="broker-b", name_servers=(first.address,))
    await create_topic(await connect(second.address), "t", 1)
    return first, second


async def moved(nodes: Nodes, first: Node, second: Node) -> Node:
    await second.stop()
    return await nodes.start(name="broker-b", name_servers=(first.address,), port=free_port())


async def test_members_continue_at_the_other_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    first, second = brokers
    inbox = Inbox()
    async with Consumer(first.address, "g", "t", inbox, start="first", limits=TOLD) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await moved(nodes, first, second)
        async with Producer(first.address, limits=TOLD) as producer:
            await producer.send("t", b"there")
        await eventually(lambda: inbox.bodies == [b"there"])


async def test_a_member_that_leaves_meanwhile_hands_over_at_the_other_address(
    nodes: Nodes, brokers: tuple[Node, Node]
) -> None:
    first, second = brokers
    inbox = Inbox()
    async with Producer(first.address, limits=TOLD) as producer:
        await producer.send("t", b"here")
    async with Consumer(first.address, "g", "t", inbox, start="first", commit_interval_s=300, limits=TOLD) as consumer:
        await eventually(lambda: inbox.bodies == [b"here"])
        third = await moved(nodes, first, second)
        assert QUEUE in consumer.assignment()
    assert third.broker.groups.owners("g") == {}
    assert third.broker.offsets.get("g", "t", 0) == 1


async def test_a_member_asks_no_more_for_the_former_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    """It would send a heartbeat each second for ever, to all brokers."""
    first, second = brokers
    limits = replace(TOLD, heartbeat_interval_s=1.0)
    async with Consumer(first.address, "g", "t", Inbox(), start="first", limits=limits) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        third = await moved(nodes, first, second)
        heartbeats = consumer._membership._heartbeats
        await eventually(lambda: heartbeats.is_registered(third.address))
        await eventually(lambda: not heartbeats.are_failing)


async def test_producers_find_the_other_address(nodes: Nodes, brokers: tuple[Node, Node]) -> None:
    first, second = brokers
    third: Node | None = None

    async def is_sent() -> bool:
        try:
            await producer.send("t", b"there")
        except RocketletError:
            return False
        return True

    async with Producer(first.address, retries=0, limits=TOLD) as producer:
        await producer.send("t", b"here")
        third = await moved(nodes, first, second)
        async with asyncio.timeout(PATIENCE_S):
            while not await is_sent():
                await asyncio.sleep(0)
    assert third.broker.store.queues["t", 0].next == 2


async def test_a_broadcasting_member_continues_when_its_broker_has_restarted(
    brokers: tuple[Node, Node], nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Counter[str] = Counter()
    find_route = ClusterView.find_route

    async def counted(self: ClusterView, topic: str) -> Route | None:
        route = await find_route(self, topic)
        looked[topic] += 1
        return route

    first, second = brokers
    await create_topic(await connect(first.address), "t", 1)  # so that a route is left
    inbox = Inbox()
    port = int(second.address.rpartition(":")[2])
    async with Consumer(
        first.address,
        "g",
        "t",
        inbox,
        start="first",
        broadcasting=True,
        limits=replace(TOLD, heartbeat_interval_s=10 * PATIENCE_S),
    ) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await second.stop()
        monkeypatch.setattr(ClusterView, "find_route", counted)
        await eventually(lambda: looked["t"] > 1)  # the name server knows the broker no more
        await nodes.start(name="broker-b", name_servers=(first.address,), port=port)
        async with Producer(first.address, limits=TOLD) as producer:
            await producer.send("t", b"there", queue=QUEUE)
        await eventually(lambda: inbox.bodies == [b"there"])


# A name server that has just started


@pytest.fixture
async def restarted(nodes: Nodes) -> str:
    """The address of a name server that knows no broker yet."""
    server = Server(Listening("127.0.0.1", port := free_port()), broker=None, routes=Routes())
    await nodes.stack.enter_async_context(server)
    return f"127.0.0.1:{port}"


async def test_topic_that_one_name_server_does_not_know_is_found_at_another(
    node: Node, wire: Wire, restarted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda addresses: None)
    await create_topic(wire, "t", 1)
    both = f"{restarted};{node.address}"
    inbox = Inbox()
    async with Producer(both) as producer, Consumer(both, "g", "t", inbox, start="first"), AdminClient(both) as admin:
        await producer.send("t", b"x")
        await eventually(lambda: inbox.bodies == [b"x"])
        assert (await admin.topic("t")).messages == 1
        with pytest.raises(TopicNotFound):
            await admin.topic("nowhere")


async def test_broker_finds_a_topic_that_one_name_server_does_not_know_at_another(
    nodes: Nodes, node: Node, one_queue: None, restarted: str
) -> None:
    broker = (await nodes.start(name="broker-b", name_servers=(restarted, node.address))).broker
    route = await broker.name_servers.find_route("t")
    assert route is not None and [data.broker_name for data in route.queues] == ["broker-a"]
    assert await broker.name_servers.find_route("nowhere") is None


async def test_name_server_that_is_away_does_not_hold_up_a_topic_that_does_not_exist(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once, not at each look for the topic."""
    monkeypatch.setattr("random.shuffle", lambda addresses: None)
    cluster, asked = ClusterView(f"{node.address};192.0.2.1:1"), list[str]()
    get = Connections.get

    async def noted(connections: Connections, address: str) -> Connection:
        asked.append(address)
        if address == "192.0.2.1:1":
            raise ConnectionFailed("it is away")
        return await get(connections, address)

    monkeypatch.setattr(Connections, "get", noted)
    for _ in range(3):
        assert await cluster.find_route("nowhere") is None
    assert asked.count("192.0.2.1:1") == 1
    await cluster.close()


# Heartbeats of a member: which brokers have one, which are waited for, and when there is something new to say.


class Brokers:
    """Brokers by their addresses. `faults`: of those that fail; `beats`: who has got a heartbeat, and of whom."""

    limits = ClientLimits(heartbeat_interval_s=3600.0, heartbeat_retry_s=0.001)

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.faults: dict[str, RocketletError] = {}
        self.disagreements: list[str] = []
        self.beats: list[tuple[str, bytes]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.name = "me"
        self.heartbeats = Heartbeats(
            cast("ClusterView", self), lambda: Heartbeat(self.name, (), ()), lambda: self.addresses
        )

    async def connection(self, address: str) -> object:
        async def request(code: int, ext: object, body: bytes) -> Frame:
            assert code == RequestCode.HEART_BEAT
            self.beats.append((address, body))
            await self.goes_on.wait()
            if address in self.faults:
                raise self.faults[address]
            return Frame(0, ext={"disagreements": "\n".join(self.disagreements)} if self.disagreements else {})

        return SimpleNamespace(request=request)

    def heard(self) -> list[str]:
        heard = sorted(address for address, _ in self.beats)
        self.beats.clear()
        return heard


@pytest.fixture
async def brokers_heartbeats() -> Brokers:
    return Brokers("a", "b")


async def test_a_broker_that_fails_is_said_once_and_again_when_it_is_back(
    brokers_heartbeats: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rocketlet.membership")
    heartbeats = brokers_heartbeats.heartbeats
    await heartbeats.beat()
    assert (brokers_heartbeats.heard(), heartbeats.is_registered("a"), heartbeats.are_failing) == (
        ["a", "b"],
        True,
        False,
    )
    brokers_heartbeats.faults["a"] = ConnectionFailed("gone")
    for _ in range(2):
        await heartbeats.beat()
    assert (heartbeats.is_registered("a"), heartbeats.is_registered("b"), heartbeats.are_failing) == (False, True, True)
    assert caplog.text.count("heartbeat_failed") == 1
    assert heartbeats.refusal is None
    brokers_heartbeats.faults.clear()
    for _ in range(2):
        await heartbeats.beat()
    assert (heartbeats.is_registered("a"), heartbeats.are_failing) == (True, False)
    assert caplog.text.count("broker_back") == 1


async def test_member_logs_each_disagreement_once_when_brokers_report_it_in_every_answer(
    brokers_heartbeats: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [text.partition(" hint=")[0] for text in caplog.messages if text.startswith("members_disagree")]

    brokers_heartbeats.disagreements = ["g: different tag expressions for t: c1: a; c2: b"]
    await brokers_heartbeats.heartbeats.beat()
    await brokers_heartbeats.heartbeats.beat()
    assert logged() == ["members_disagree group='g' fault='different tag expressions for t: c1: a; c2: b'"]
    brokers_heartbeats.disagreements.append("g: 2 live connections with the client id c1")
    await brokers_heartbeats.heartbeats.beat()
    assert len(logged()) == 2


async def test_a_refusal_is_kept_for_the_member_that_joins(brokers_heartbeats: Brokers) -> None:
    refusal = BrokerRefused(RequestCode.HEART_BEAT, 1, "no", "a")
    brokers_heartbeats.faults["a"] = refusal
    await brokers_heartbeats.heartbeats.beat()
    assert brokers_heartbeats.heartbeats.refusal is refusal
    brokers_heartbeats.faults["a"] = ConnectionFailed("gone")
    await brokers_heartbeats.heartbeats.beat()
    assert brokers_heartbeats.heartbeats.refusal is None


async def test_a_broker_that_moved_is_not_awaited_where_it_was(brokers_heartbeats: Brokers) -> None:
    brokers_heartbeats.faults["a"] = ConnectionFailed("gone")
    await brokers_heartbeats.heartbeats.beat()
    assert brokers_heartbeats.heartbeats.are_failing
    brokers_heartbeats.addresses = ["b", "c"]
    await brokers_heartbeats.heartbeats.beat()
    assert not brokers_heartbeats.heartbeats.are_failing


async def test_only_brokers_without_a_heartbeat_of_a_member_get_another(brokers_heartbeats: Brokers) -> None:
    heartbeats = brokers_heartbeats.heartbeats
    await heartbeats.register()
    assert brokers_heartbeats.heard() == ["a", "b"]
    await heartbeats.register()
    assert brokers_heartbeats.heard() == []
    heartbeats.forget("a")
    assert (heartbeats.is_registered("a"), heartbeats.is_registered("b")) == (False, True)
    await heartbeats.register(["b"])
    assert brokers_heartbeats.heard() == []
    await heartbeats.register(["a"])
    assert brokers_heartbeats.heard() == ["a"]
    heartbeats.forget()
    await heartbeats.register()
    assert brokers_heartbeats.heard() == ["a", "b"]


async def test_a_broker_that_stalls_is_notified_once_and_waited_for_no_longer_than_was_said(
    brokers_heartbeats: Brokers,
) -> None:
    brokers_heartbeats.goes_on.clear()
    for _ in range(2):
        await brokers_heartbeats.heartbeats.register(timeout_s=0.001)
    assert brokers_heartbeats.heard() == ["a", "b"]
    brokers_heartbeats.goes_on.set()
    await brokers_heartbeats.heartbeats.register()
    assert (brokers_heartbeats.heard(), brokers_heartbeats.heartbeats.is_registered("a")) == ([], True)


async def test_the_end_waits_for_no_broker(brokers_heartbeats: Brokers) -> None:
    brokers_heartbeats.goes_on.clear()
    await brokers_heartbeats.heartbeats.register(timeout_s=0.001)
    async with asyncio.timeout(60):
        await brokers_heartbeats.heartbeats.stop()
    brokers_heartbeats.goes_on.set()
    await brokers_heartbeats.heartbeats.register()
    assert brokers_heartbeats.heard() == ["a", "a", "b", "b"], "nothing is under way any more"


async def test_a_member_reports_what_is_new_and_nothing_twice(brokers_heartbeats: Brokers) -> None:
    heartbeats = brokers_heartbeats.heartbeats
    await heartbeats.beat()
    beating = asyncio.create_task(heartbeats.beat_forever())
    heartbeats.send_if_changed()
    await passed()
    assert brokers_heartbeats.heard() == ["a", "b"], "only the first"
    brokers_heartbeats.name = "you"
    heartbeats.send_if_changed()
    await eventually(lambda: len(brokers_heartbeats.beats) == 2)
    await passed()
    assert brokers_heartbeats.heard() == ["a", "b"]
    beating.cancel()


async def test_a_broker_that_fails_is_retried_soon(brokers_heartbeats: Brokers) -> None:
    brokers_heartbeats.faults["a"] = ConnectionFailed("gone")
    await brokers_heartbeats.heartbeats.beat()
    beating = asyncio.create_task(brokers_heartbeats.heartbeats.beat_forever())
    await eventually(lambda: len(brokers_heartbeats.beats) >= 6)
    brokers_heartbeats.faults.clear()
    await eventually(lambda: not brokers_heartbeats.heartbeats.are_failing)
    beating.cancel()


async def test_a_member_that_has_said_nothing_yet_has_news(brokers_heartbeats: Brokers) -> None:
    beating = asyncio.create_task(brokers_heartbeats.heartbeats.beat_forever())
    brokers_heartbeats.heartbeats.send_if_changed()
    await eventually(lambda: len(brokers_heartbeats.beats) == 2)
    beating.cancel()


# Host names


Resolve = Callable[[Sequence[str]], None]


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Let every host name have these addresses; none: the lookup gets no response."""

    def with_addresses(addresses: Sequence[str]) -> None:
        async def getaddrinfo(host: str, port: int | str, **options: Any) -> list[Any]:
            if not addresses:
                await asyncio.Event().wait()
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in addresses]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)

    return with_addresses


async def test_slow_lookup_of_a_host_name_is_reported_as_such(resolves: Resolve) -> None:
    resolves([])
    with pytest.raises(ConnectionFailed, match=r"the address of brokers.example was not found within 0.1 s; .*DNS"):
        await Producer("brokers.example:9876", limits=ClientLimits(resolve_timeout_s=0.1)).start()


async def test_next_address_of_a_host_name_is_tried_when_one_does_not_accept(node: Node, resolves: Resolve) -> None:
    """The queue of the first address is full, so that its connection is neither accepted nor refused."""
    port = int(node.address.rpartition(":")[2])
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.2", port))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        resolves(["127.0.0.2", "127.0.0.1"])
        async with Producer(f"brokers.example:{port}") as producer:
            assert (await producer.send("t", b"x")).queue_offset == 0


# Renewed certificates


def presenting(certificates: Certificates) -> Access:
    files = {
        name: str(certificates.folder / file) for name, file in (("ca_file", "ca.pem"), ("cert_file", "client.pem"))
    }
    return Access(tls=True, **files)  # type: ignore[arg-type]


async def test_renewed_authority_and_certificate_are_used_by_new_connections_of_running_and_of_new_clients(
    nodes: Nodes, certificates: Certificates
) -> None:
    tls = Tls("enforcing", certificates.mutual)
    node, access = await nodes.start(tls=tls), presenting(certificates)
    async with Producer(node.address, access=access) as running:
        await running.send("t", b"before")
        Certificates.make(certificates.folder)  # another authority, which signs other certificates
        reload(tls)
        node.break_connections()
        await running.send("t", b"after")
        async with Producer(node.address, access=access) as new:
            await new.send("t", b"after")


async def test_renewed_files_that_cannot_be_used_leave_the_previous_ones_in_force(
    nodes: Nodes, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    node, access = await nodes.start(tls=Tls("enforcing", certificates.mutual)), presenting(certificates)
    client = certificates.folder / "client.pem"
    whole = client.read_bytes()
    async with Producer(node.address, access=access) as producer:
        await producer.send("t", b"before")
        for damage in (whole[: len(whole) // 3], b"", None):
            if damage is None:
                client.unlink()
            else:
                client.write_bytes(damage)
            node.break_connections()
            caplog.clear()
            await producer.send("t", b"after")
            assert caplog.text.count("tls_files_not_reloaded") == 1
        client.write_bytes(whole)
        node.break_connections()
        caplog.clear()
        await producer.send("t", b"repaired")
        assert "tls_files_not_reloaded" not in caplog.text


async def test_error_names_the_http_port_when_the_address_is_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(ConnectionFailed, match="it is an HTTP port; give the port of a name server, such as 9876"):
            await Producer(address, retries=0).start()
