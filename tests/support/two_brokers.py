"""Two brokers and foreign members, as plain frames; and what is at a broker's address, but is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rocketlet.broker.config import Limits
from rocketlet.protocol.bodies import DataVersion, TopicConfig, encode_registration
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.headers import RegisterBroker, write

from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from .requests import SUBSCRIBED, SUSPEND, join, members, pull, send

FLAGS = SUBSCRIBED | SUSPEND
TOLD = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


@dataclass
class Member:
    """A foreign member, by its connections to both brokers."""

    client_id: str
    a: Wire
    b: Wire

    async def joins(self) -> None:
        await join(self.a, self.client_id)
        await join(self.b, self.client_id)


@dataclass
class Two:
    """Two brokers, with a queue of the topic each, and the name server at the first."""

    a: Node
    b: Node
    connect: Connect

    async def member(self, client_id: str) -> Member:
        return Member(client_id, await self.connect(self.a.address), await self.connect(self.b.address))


async def two_brokers(nodes: Nodes, connect: Connect, limits_of_b: Limits | None = None) -> Two:
    a = await nodes.start()
    b = await nodes.start(name="broker-b", name_servers=(a.address,), limits=limits_of_b)
    for node in (a, b):
        await create_topic(await connect(node.address), "t", 1)
    await both_are_known(a)
    return Two(a, b, connect)


async def both_are_known(node: Node) -> None:
    async def has_both() -> bool:
        route = await node.broker.name_servers.find_route("t")
        return route is not None and len(route.brokers) == 2

    await eventually(has_both)


async def reading(two: Two) -> Member:
    """c1 reads both queues, with a message of broker-b's in its handlers."""
    one = await two.member("c1")
    await one.joins()
    for wire in (one.a, one.b):
        await wire.request(TOLD)
        assert await members(wire) == ["c1"]
    await send(one.b)
    assert (await one.b.call(RequestCode.PULL_MESSAGE, pull(flags=FLAGS))).code == 0
    return one


async def handles(wire: Wire) -> None:
    flags = FLAGS | 0x1
    await wire.call(RequestCode.PULL_MESSAGE, pull(offset=1, flags=flags, commit_offset=1))


async def told(wire: Wire, *client_ids: str) -> None:
    """Returns when a member is notified of a list with these."""
    while await members(wire) != list(client_ids):
        await wire.request(TOLD)


@dataclass
class Stranger:
    """Something at a broker's address. code: what it answers to everything; None if nothing."""

    code: int | None
    requests: list[Frame] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65_536):
            for frame in frames.feed(data):
                self.requests.append(frame)
                if self.code is not None:
                    writer.write(encode(Frame(self.code, frame.opaque, flag=1)))
        self.closed.set()
        writer.close()


async def registered(node: Node, wire: Wire, address: str, *names: str) -> None:
    """The name server knows brokers at an address, with the topic."""
    for name in names:
        header = RegisterBroker(name, address, "DefaultCluster", address, 0)
        body = encode_registration(DataVersion(1, 1), [TopicConfig("t", 1, 1)])
        assert (await wire.call(RequestCode.REGISTER_BROKER, write(header), body)).code == 0


@asynccontextmanager
async def at_work(node: Node, wire: Wire, code: int | None, *names: str) -> AsyncIterator[Stranger]:
    stranger = Stranger(code)
    async with await asyncio.start_server(stranger.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await registered(node, wire, f"{host}:{port}", *(names or ("broker-b",)))
        await create_topic(wire, "t", 1)
        yield stranger
