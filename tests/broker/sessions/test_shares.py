"""What all clients have together, of which one address may not take all."""

from __future__ import annotations

import pytest
from rocketlet.broker.sessions import AddressShares
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, encode

from campaigns.peers import Peer

from ...conftest import Node, Wire, create_topic
from ...support.requests import pull


def test_one_address_has_half_and_the_machine_itself_may_have_all() -> None:
    shares = AddressShares(4)

    def take(address: str) -> bool:
        has_room = shares.has_room(address)
        if has_room:
            shares.take(address)
        return has_room

    assert [take("10.0.0.1") for _ in range(3)] == [True, True, False]
    assert [take("127.0.0.1") for _ in range(3)] == [True, True, False]
    shares.give_back("10.0.0.1")
    assert (shares.count, shares.has_room("10.0.0.1"), shares.has_room("::1")) == (3, True, True)


@pytest.mark.limits(max_held_pulls=4)
async def test_pulls_of_one_address_leave_others_theirs(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    greedy, other = Peer(node.server, 1, "10.0.0.1"), Peer(node.server, 1, "10.0.0.2")
    for peer in (greedy, greedy, greedy, other):
        peer.send(encode(Frame(RequestCode.PULL_MESSAGE, 1, pull(flags=6))))
    assert (greedy.connection.held_pulls, other.connection.held_pulls) == (2, 1)
    assert [frame.code for frame in greedy.received()] == [19], "the third is answered immediately"
    for peer in (greedy, other):
        peer.hang_up()
