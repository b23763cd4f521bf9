"""A connection that speaks in a broker's name is believed when that broker, asked at its registered address, says so."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import LIMITS
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import AgreedMembers, encode_agreed_members
from rocketlet.protocol.headers import AgreeOnMembers, write
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, eventually
from ...support.requests import join, members
from ...support.two_brokers import Two, at_work, handles, reading, told, two_brokers

# No drain ends because the machine is busy.
pytestmark = pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)


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
    assert "does not say" in (answer.remark or "")
    assert [(entry["event"], entry["broker"]) for entry in logs] in ([("peer_unverified", "broker-b")], [])


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


async def test_a_stranger_who_speaks_as_a_broker_does_not_hold_a_change_up(two: Two, connect: Connect) -> None:
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    await told(newcomer.a, "c1", "c2")
    await refused_word(two, connect, overheard(two), frozenset(("c1", "c2")))
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(one.b, "c1", "c2")


async def test_a_word_to_one_broker_is_worth_nothing_with_another(two: Two, connect: Connect) -> None:
    """A third broker that has registered gets tokens, too."""
    one = await reading(two)
    said = two.b.broker.draining.agreement
    header = overheard(two)
    await refused_word(two, connect, header._replace(token=said.token("broker-c")), frozenset())
    good = write(header._replace(token=said.token("broker-a")))
    assert (await one.a.call(RequestCode.AGREE_ON_MEMBERS, good, encode_agreed_members(AgreedMembers()))).code == 0


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
