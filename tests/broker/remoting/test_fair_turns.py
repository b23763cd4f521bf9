"""A client that drains a backlog lets the small requests of others go first."""

from __future__ import annotations

import asyncio

from rocketlet.broker.config import PULL_BYTES
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, ExtValue, Frame, encode
from rocketlet.protocol.headers import SendMessage

from campaigns.frames import Peer

from ...conftest import Node
from ...support.requests import pull, write_send_v2

BODY = bytes(20_000)


def asked(code: int, opaque: int, ext: dict[str, ExtValue], body: bytes = b"") -> bytes:
    return encode(Frame(code, opaque, ext, body, serialize_type=JSON))


def sent(opaque: int, body: bytes = b"x") -> bytes:
    header = SendMessage("p", "t", "TBW102", 4, 0, 0, 1, 0)
    return asked(RequestCode.SEND_MESSAGE_V2, opaque, write_send_v2(header), body)


def pulled(opaque: int) -> bytes:
    return asked(RequestCode.PULL_MESSAGE, opaque, pull(consumer_group=f"g{opaque}"))


def filled(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 1, 1), 0)
    peer = Peer(node.server, 1)
    for number in range(32):
        peer.send(sent(number, BODY))
    assert [frame.code for frame in peer.received()] == [0] * 32
    peer.hang_up()


def drains(node: Node, count: int) -> list[Peer]:
    """Clients that have each got a large answer."""
    found = [Peer(node.server, 10 + number) for number in range(count)]
    for peer in found:
        peer.send(pulled(1))
        (answer,) = peer.received()
        assert PULL_BYTES / 2 < len(answer.body) <= PULL_BYTES
    return found


def opaques(peer: Peer) -> list[int]:
    return [frame.opaque for frame in peer.received()]


async def test_a_drain_goes_on_behind_the_small_requests_of_others(node: Node) -> None:
    filled(node)
    (drain,), other = drains(node, 1), Peer(node.server, 2)
    drain.send(pulled(2))
    other.send(sent(3))
    assert (opaques(drain), opaques(other)) == ([], [3])
    await asyncio.sleep(0)
    assert opaques(drain) == [2]


async def test_drains_take_turns(node: Node) -> None:
    filled(node)
    first, second = drains(node, 2)
    first.send(pulled(2))
    second.send(pulled(2))
    first.send(pulled(3))  # behind its own
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([2, 3], [])
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([], [2])


async def test_a_drain_that_has_got_little_is_one_no_more(node: Node) -> None:
    filled(node)
    (drain,) = drains(node, 1)
    drain.send(sent(2))
    await asyncio.sleep(0)
    assert opaques(drain) == [2]
    drain.send(sent(3))
    assert opaques(drain) == [3]


async def test_a_drain_that_hangs_up_is_forgotten(node: Node) -> None:
    filled(node)
    (first, second), served = drains(node, 2), node.server.behind
    first.send(pulled(2))
    second.send(pulled(2))
    first.hang_up()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([], [2])
    assert not served._waiting
