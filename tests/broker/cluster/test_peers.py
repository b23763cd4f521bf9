"""How much a broker keeps and does for peers, which anybody may register, and its registration at name servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from typing import cast
from unittest import mock

import pytest
from rocketlet.broker.config import LIMITS, REGISTER_INTERVAL_S, REGISTER_POLL_INTERVAL_S, Limits
from rocketlet.broker.groups.agreement import Agreement
from rocketlet.broker.groups.group import ConsumerGroup, GroupChanges
from rocketlet.broker.groups.members import Member, SubscribedTopic
from rocketlet.broker.groups.stages import Others
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol.bodies import BrokerData, ConsumerData, Route, finish
from rocketlet.protocol.codes import PERM_READ, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.group_bodies import AgreedMembers, PeerMessage, encode_agreed_members
from rocketlet.protocol.headers import AgreeOnMembers, write
from rocketlet.protocol.names import Subscription
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Connect, Node, Nodes, Wire, eventually
from ...support.locks import Peers
from ...support.requests import join, members
from ...support.topics import put
from ...support.two_brokers import Two, at_work, handles, reading, told, two_brokers


class Peer:
    """A broker that answers when the test allows it."""

    def __init__(self) -> None:
        self.address = ""
        self.answers = asyncio.Event()
        self.answers.set()
        self.connected = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        frames = FrameReader()
        while data := await reader.read(65_536):
            await self.answers.wait()
            for frame in frames.feed(data):
                writer.write(encode(Frame(0, frame.opaque, flag=1)))
        self.connected -= 1
        writer.close()


@pytest.fixture
async def peers() -> AsyncIterator[list[Peer]]:
    async with AsyncExitStack() as stack:
        peers = [Peer() for _ in range(4)]
        for peer in peers:
            server = await stack.enter_async_context(await asyncio.start_server(peer.serve, "127.0.0.1", 0))
            host, port = server.sockets[0].getsockname()
            peer.address = f"{host}:{port}"
        yield peers
        for peer in peers:
            peer.answers.set()


WORD = PeerMessage(AgreeOnMembers("g", "broker-a", 1, 0, False, "", ""), AgreedMembers())


class Said:
    """The outcome of a word to each peer."""

    def __init__(self, node: Node) -> None:
        self._peers = node.broker.peers
        self.failed: list[str] = []

    async def to(self, *peers: Peer) -> None:
        for peer in peers:
            self._peers.send(peer.address, "g", lambda: WORD, self._failing(peer))
        await eventually(lambda: self._peers.is_idle)

    def _failing(self, peer: Peer) -> Callable[[bool], None]:
        return lambda is_for_good: self.failed.append(peer.address)


@pytest.mark.limits(max_peer_links=2)
async def test_idle_connections_make_room_for_others(node: Node, peers: list[Peer]) -> None:
    said = Said(node)
    for peer in peers:
        await said.to(peer)
    assert not said.failed
    await eventually(lambda: [peer.connected for peer in peers] == [0, 0, 1, 1])
    node.clock.advance(3600.0)
    await eventually(lambda: not any(peer.connected for peer in peers))
    assert LIMITS.max_peer_links == 256, "as the document says"


@pytest.mark.limits(max_peer_links=2)
async def test_while_as_many_are_asked_others_count_as_unreachable(node: Node, peers: list[Peer]) -> None:
    said = Said(node)
    for peer in peers[:2]:
        peer.answers.clear()
    asking = asyncio.create_task(said.to(*peers))
    await eventually(lambda: len(said.failed) == 2)
    assert said.failed == [peer.address for peer in peers[2:]]
    for peer in peers:
        peer.answers.set()
    await asyncio.wait_for(asking, PATIENCE_S)
    assert len(said.failed) == 2
    await said.to(*peers[2:])
    assert len(said.failed) == 2


def agreement(limits: Limits = LIMITS) -> Agreement:
    return Agreement("broker-a", MovableClock(stands=True), Peers(), GroupChanges(), limits)


def test_brokers_that_do_not_know_the_request_are_forgotten_beyond_a_number() -> None:
    of_groups, group = agreement(Limits(max_outdated_peers=2)), ConsumerGroup("g")
    for number in range(3):
        name = f"broker-{number}"
        of_groups.begin_change(group)
        of_groups.announce(group, Others({name: ("host:1", "d")}, {}), ())
        of_groups._failed(group, name, True)
    assert [*of_groups._outdated] == ["broker-1", "broker-2"]
    assert LIMITS.max_outdated_peers == 1000


def group_of(*topics: str) -> ConsumerGroup:
    """A foreign member for each topic, which it subscribes to beside one that all do."""
    group = ConsumerGroup("g")
    group.begin_membership()
    for topic in topics:
        connection = cast("RemotingConnection", object())
        data = ConsumerData("g", subscriptions=(Subscription("t"), Subscription(topic)))
        member = Member(topic, connection, data, 0, 0, 0.0)
        member.update(data, 0.0)
        group.members[connection] = group.foreign[connection] = member
        group.topics |= {item: SubscribedTopic(1) for item in member.topics}
    return group


ROUTES = {"t": Route((), (BrokerData("broker-b", {0: "host:1"}, "DefaultCluster"),))}


def test_the_lists_of_very_different_members_are_made_one_at_a_time() -> None:
    group = group_of(*map(str, range(20)))
    with mock.patch.object(ConsumerGroup, "companions", side_effect=group.companions) as companions:
        work = agreement().finding_others(group, ROUTES)
        made = [companions.call_count for _ in work]
    assert {later - former for former, later in pairwise(made)} == {1}
    assert companions.call_count == 20


def test_the_lists_of_a_change_have_only_this_many_members() -> None:
    group = group_of("a", "b", "c")
    for limit, count in ((9, 3), (8, 2)):
        assert len(finish(agreement(Limits(max_listed_ids=limit)).finding_others(group, ROUTES)).lists) == count
    assert (LIMITS.max_listed_ids, LIMITS.kept_lists) == (10_000, 4)


# A connection that speaks in a broker's name is believed when that broker, asked at its registered address, says
# so.


# No drain ends because the machine is busy.


@pytest.fixture
async def two(nodes: Nodes, connect: Connect) -> Two:
    return await two_brokers(nodes, connect)


def overheard(two: Two) -> AgreeOnMembers:
    """A message that would let broker-a notify its members, in the name of broker-b."""
    peer = two.a.broker.groups.obtain("g").sync.peers["broker-b"]
    return AgreeOnMembers("g", "broker-b", peer.number + 10, peer.number + 10, False, peer.digest)


async def refused_word(two: Two, connect: Connect, header: AgreeOnMembers, waiting: frozenset[str]) -> None:
    stranger = await connect(two.a.address)
    with capture_logs() as logs:
        answer = await stranger.call(
            RequestCode.AGREE_ON_MEMBERS, write(header), encode_agreed_members(AgreedMembers(waiting))
        )
    assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
    assert "has not confirmed" in (answer.remark or "")
    assert [(entry["event"], entry["broker"]) for entry in logs] in ([("peer_unverified", "broker-b")], [])


@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)
async def test_a_stranger_who_speaks_as_a_broker_does_not_have_members_notified_early(
    two: Two, connect: Connect
) -> None:
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    await told(newcomer.a, "c1", "c2")
    for token in ("", "0" * 32, two.a.broker.draining.agreement.token("broker-b")):
        await refused_word(two, connect, overheard(two)._replace(token=token), frozenset())
    assert await members(one.a) == ["c1"]
    await handles(one.b)
    await told(one.a, "c1", "c2")


@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)
async def test_a_stranger_who_speaks_as_a_broker_does_not_hold_a_change_up(two: Two, connect: Connect) -> None:
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    await told(newcomer.a, "c1", "c2")
    await refused_word(two, connect, overheard(two), frozenset(("c1", "c2")))
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(one.b, "c1", "c2")


@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)
async def test_a_word_to_one_broker_is_worth_nothing_with_another(two: Two, connect: Connect) -> None:
    """A third broker that has registered gets tokens, too."""
    one = await reading(two)
    said = two.b.broker.draining.agreement
    header = overheard(two)
    await refused_word(two, connect, header._replace(token=said.token("broker-c")), frozenset())
    good = write(header._replace(token=said.token("broker-a")))
    assert (await one.a.call(RequestCode.AGREE_ON_MEMBERS, good, encode_agreed_members(AgreedMembers()))).code == 0


@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)
async def test_a_broker_is_asked_once_for_each_connection(node: Node, wire: Wire) -> None:
    async with at_work(node, wire, ResponseCode.SUCCESS) as stranger:
        await join(wire, "c1")
        await eventually(lambda: bool(stranger.requests))
        said = write(AgreeOnMembers("g", "broker-b", 1, 1, False, "other", "t"))
        for _ in range(3):
            assert (
                await wire.call(RequestCode.AGREE_ON_MEMBERS, said, encode_agreed_members(AgreedMembers()))
            ).code == 0
        asked = [frame.ext for frame in stranger.requests if frame.code == RequestCode.CONFIRM_WORD]
        assert asked == [{"brokerName": "broker-a", "token": "t"}]


@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)
async def test_only_this_many_brokers_are_queried_at_the_same_time(node: Node, wire: Wire, connect: Connect) -> None:
    said = write(AgreeOnMembers("g", "broker-b", 1, 1, False, "other", "t"))
    body = encode_agreed_members(AgreedMembers())
    async with at_work(node, wire, None) as stranger:
        await join(wire, "c1")
        await eventually(lambda: bool(stranger.requests))
        speaking = [await connect(node.address) for _ in range(LIMITS.max_proofs)]
        for other in speaking:
            other.send(RequestCode.AGREE_ON_MEMBERS, said, body)
        await eventually(lambda: not node.broker.peers.may_ask)
        busy = await wire.call(RequestCode.AGREE_ON_MEMBERS, said, body)
        again = await speaking[0].call(RequestCode.AGREE_ON_MEMBERS, said, body)
        assert {busy.code, again.code} == {ResponseCode.SYSTEM_BUSY}
    await eventually(lambda: node.broker.peers.may_ask)


# Registration at a name server in another process.


async def test_changed_settings_are_registered_for_all_topics_when_a_topic_changes_at_the_same_time(
    nodes: Nodes,
) -> None:
    port, routes = free_port(), Routes()
    async with Server(Listening("127.0.0.1", port), broker=None, routes=routes):
        node = await nodes.start(name_servers=(f"127.0.0.1:{port}",))
        put(node, "old")
        await eventually(lambda: routes.route("old") is not None)
        put(node, "new")
        node.broker.change_config(replace(node.broker.config, permission=PERM_READ))
        await eventually(
            lambda: (
                [queues.perm for name in ("old", "new") if (route := routes.route(name)) for queues in route.queues]
                == [PERM_READ] * 2
            )
        )


async def test_all_topics_are_registered_at_the_interval_when_a_topic_changes_more_often(nodes: Nodes) -> None:
    port, routes = free_port(), Routes()
    async with Server(Listening("127.0.0.1", port), broker=None, routes=routes):
        node = await nodes.start(name_servers=(f"127.0.0.1:{port}",))
        put(node, "old")
        await eventually(lambda: routes.route("old") is not None)
        routes.delete_topic("old")
        for number in range(3):
            node.clock.advance(REGISTER_INTERVAL_S / 2)
            put(node, f"t{number}")
            await eventually(lambda number=number: routes.route(f"t{number}") is not None)  # type: ignore[misc]
        assert routes.route("old") is not None


async def test_a_name_server_that_restarted_gets_all_topics_though_a_route_was_requested_before(nodes: Nodes) -> None:
    """The request opened the connection, which then looked like one over which the topics had been registered."""
    port, routes = free_port(), Routes()
    servers = (f"127.0.0.1:{port}",)
    async with Server(Listening("127.0.0.1", port), broker=None, routes=Routes()):
        node = await nodes.start(clock=MovableClock(stands=True), name_servers=servers)
        other = await nodes.start(clock=MovableClock(stands=True), name="broker-b", name_servers=servers)
        for each in (node, other):
            put(each)
    async with Server(Listening("127.0.0.1", port), broker=None, routes=routes):
        other.clock.advance(REGISTER_POLL_INTERVAL_S)
        await eventually(lambda: routes.route("t") is not None)
        assert await node.broker.name_servers.find_route("t") is None, "members would not see this broker's queues"
        node.clock.advance(REGISTER_POLL_INTERVAL_S)
        await eventually(lambda: len(routes.route("t").brokers) == 2)  # type: ignore[union-attr]
        await eventually(lambda: not node.broker.name_servers.any_is_fresh)
        assert await node.broker.name_servers.find_route("t") == routes.route("t")
