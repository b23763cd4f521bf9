"""Two brokers and foreign members, as plain frames: a member drops queues of both by the list that any one gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from rocketlet.broker.config import LIMITS, PEER_IDLE_S, PROGRESS_S
from rocketlet.protocol.bodies import BodyError
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_AGREED_IDS, MAX_AGREED_LISTS, MAX_ID_CHARS
from rocketlet.protocol.group_bodies import AgreedMembers, decode_agreed_members, encode_agreed_members
from rocketlet.protocol.group_bodies import decode_members as decode_client_ids
from rocketlet.protocol.headers import AgreeOnMembers, read, write

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.accounts import ADMIN, AccountsFile, signed_wire
from ...support.agreement import PeerScript
from ...support.requests import join, members, routes_known_later
from ...support.two_brokers import TOLD, Two, at_work, both_are_known, handles, reading, told, two_brokers

FOR_LONG_S = 3600.0


# No drain ends because the machine is busy.
pytestmark = pytest.mark.limits(drain_limit_s=FOR_LONG_S, drain_max_s=FOR_LONG_S, list_wait_s=FOR_LONG_S)


@pytest.fixture
async def two(nodes: Nodes, connect: Connect) -> Two:
    return await two_brokers(nodes, connect)


async def test_a_member_is_notified_by_no_broker_before_all_have_drained_it(two: Two) -> None:
    """c1 loses the queue of broker-b only. By broker-a's list it would drop it, with its message in a handler."""
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    for wire in (newcomer.a, newcomer.b):
        await told(wire, "c1", "c2")
    assert await members(one.a) == ["c1"]
    assert await members(one.b) == ["c1"]
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(one.b, "c1", "c2")
    assert not two.a.broker.draining.is_pending("g")


async def test_a_member_that_a_broker_does_not_know_yet_is_waited_for(two: Two) -> None:
    """Its heartbeats reach one broker after the other."""
    one, newcomer = await reading(two), await two.member("c2")
    await join(newcomer.a, "c2")
    group = two.a.broker.groups.obtain("g").sync
    await eventually(lambda: group.is_announced and group.peers["broker-b"].knows)
    assert await members(one.a) == ["c1"]
    await join(newcomer.b, "c2")
    await handles(one.b)
    for member in (one, newcomer):
        await told(member.a, "c1", "c2")
        await told(member.b, "c1", "c2")


async def test_what_one_broker_gives_the_other_one_knows(two: Two) -> None:
    """Members ask any broker. The next change moves queues away from those that read them now."""
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(newcomer.a, "c1", "c2")
    group = two.b.broker.groups.obtain("g")
    await eventually(
        lambda: [found.ids for item in group.members if (found := group.issued_to(item))] == [["c1", "c2"]] * 2
    )


async def test_a_member_is_not_given_the_list_that_it_had_while_the_other_broker_may_have_given_it_a_newer_one(
    two: Two,
) -> None:
    """It would take queues back that others read by now."""
    one, newcomer, other = await reading(two), await two.member("c2"), await two.member("c0")
    await newcomer.joins()
    await handles(one.b)
    for wire in (one.a, one.b):
        await told(wire, "c1", "c2")
    known = routes_known_later(two.b)
    await other.joins()
    question = one.b.send(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert (await one.b.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    assert question not in one.b._answers, "broker-a has not been notified yet that there is another change"
    known.set()
    found = decode_client_ids((await one.b.answer(question)).body)
    assert found in (["c1", "c2"], ["c0", "c1", "c2"])


async def test_several_changes_in_a_row(two: Two) -> None:
    one, newcomer, other = await reading(two), await two.member("c2"), await two.member("c0")
    await newcomer.joins()
    await other.joins()  # c0 gets the queue of broker-a, c1 that of broker-b
    await other.a.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c0", "consumerGroup": "g"})
    await other.b.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c0", "consumerGroup": "g"})
    await told(newcomer.a, "c1", "c2")
    assert await members(one.a) == ["c1"]
    assert await members(one.b) == ["c1"]
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(one.b, "c1", "c2")


async def test_a_broker_that_restarts_is_waited_for_until_the_reader_from_before_has_handled_all(
    two: Two, nodes: Nodes
) -> None:
    one, newcomer = await reading(two), await two.member("c2")
    await newcomer.joins()
    await told(newcomer.a, "c1", "c2")
    await two.b.stop()
    again = await nodes.start(name="broker-b", name_servers=(two.a.address,), port=int(two.b.address.split(":")[1]))
    await both_are_known(two.a)
    for member in (one, newcomer):
        member.b = await two.connect(again.address)
        await join(member.b, member.client_id)
    await told(newcomer.b, "c1", "c2")
    assert await members(one.a) == ["c1"]
    await handles(one.b)
    await told(one.a, "c1", "c2")
    await told(one.b, "c1", "c2")


async def test_with_accounts_brokers_sign_what_they_say(nodes: Nodes, file: AccountsFile) -> None:
    a = await nodes.start(acl=file.acl, name_server_account=ADMIN)
    b = await nodes.start(name="broker-b", name_servers=(a.address,), acl=file.acl, name_server_account=ADMIN)
    wires = [await signed_wire(node.address, ADMIN) for node in (a, b)]
    for wire in wires:
        await create_topic(wire, "t", 1)
    await both_are_known(a)
    for wire in wires:
        await join(wire, "c1")
    for wire in wires:
        await told(wire, "c1")
    for node in (a, b):
        (peer,) = node.broker.groups.obtain("g").sync.peers.values()
        assert peer.agrees
    for wire in wires:
        await wire.close()


# A broker that does not agree


UNKNOWN = ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_a_broker_that_does_not_know_the_request_is_asked_once(node: Node, wire: Wire, connect: Connect) -> None:
    async with at_work(node, wire, UNKNOWN) as stranger:
        one, two = await connect(node.address), await connect(node.address)
        await join(one, "c1")
        await told(one, "c1")
        await join(two, "c2")
        await told(one, "c1", "c2")
        assert [frame.code for frame in stranger.requests] == [RequestCode.AGREE_ON_MEMBERS]


async def test_a_broker_that_is_away_is_not_waited_for(node: Node, wire: Wire) -> None:
    async with at_work(node, wire, None):
        pass
    await join(wire, "c1")
    await told(wire, "c1")


@pytest.mark.limits(drain_limit_s=60.0)
@pytest.mark.parametrize("words", [0, 3])
async def test_a_broker_that_knows_other_members_is_waited_for_as_long_as_a_drain_however_much_it_says(
    node: Node, wire: Wire, words: int
) -> None:
    async with at_work(node, wire, ResponseCode.SUCCESS) as stranger:
        await join(wire, "c1")
        await eventually(lambda: bool(stranger.requests))
        assert await members(wire) == []
        heard = read(AgreeOnMembers, stranger.requests[0].ext)
        said = heard._replace(broker_name="broker-b", heard=heard.number, digest="other")
        for number in range(words):
            node.clock.advance(20.0)
            body = encode_agreed_members(AgreedMembers(frozenset((f"c{number}",))))
            assert (await wire.call(RequestCode.AGREE_ON_MEMBERS, write(said), body)).code == 0
        node.clock.advance(60.0 - 20.0 * words)
        await told(wire, "c1")


async def test_a_connection_without_anything_to_say_is_closed(node: Node, wire: Wire) -> None:
    async with at_work(node, wire, UNKNOWN) as stranger:
        await join(wire, "c1")
        await told(wire, "c1")
        await eventually(lambda: node.broker.peers.is_idle)
        node.clock.advance(PEER_IDLE_S)
        await stranger.closed.wait()


async def test_members_that_lock_are_no_matter_between_brokers(node: Node, wire: Wire, connect: Connect) -> None:
    async with at_work(node, wire, ResponseCode.SUCCESS) as stranger:
        await join(wire, "c1", strategy="AVG")
        await wire.request(TOLD)
        two = await connect(node.address)
        await join(two, "c2", strategy="AVG")
        await wire.request(TOLD)
        assert await members(wire) == ["c1", "c2"]
        assert not stranger.requests


@pytest.mark.parametrize(("topic", "asked"), [("alone", 0), ("t", 1)])
async def test_a_broker_asks_only_brokers_with_topics_of_the_group(
    node: Node, wire: Wire, topic: str, asked: int
) -> None:
    async with at_work(node, wire, UNKNOWN) as stranger:
        await create_topic(wire, "alone", 1)
        await join(wire, "c1", topic)
        await told(wire, "c1")
        await eventually(lambda: node.broker.peers.is_idle)
        assert len(stranger.requests) == asked
        assert len(node.broker.draining.agreement.synced) == asked


# Limits


@pytest.mark.parametrize("is_beyond", [False, True])
@pytest.mark.parametrize("limit", ["max_agreeing_members", "max_peers"])
async def test_large_groups_and_those_on_many_brokers_do_not_agree(
    nodes: Nodes, connect: Connect, limit: str, is_beyond: bool
) -> None:
    node = await nodes.start(limits=replace(nodes.limits, **{limit: 0 if is_beyond else 1}))
    wire = await connect(node.address)
    async with at_work(node, wire, UNKNOWN) as stranger:
        await join(wire, "c1")
        await told(wire, "c1")
        assert len(stranger.requests) == (0 if is_beyond else 1)
    assert (LIMITS.max_agreeing_members, LIMITS.max_peers) == (1000, 64), "as the document says"


def test_a_member_is_given_a_list_by_what_the_other_broker_says_and_notified_when_that_knows() -> None:
    said = PeerScript()
    said.announce("d", "c1")
    first, members = said.sent()
    assert (first.digest, first.asks, [*members.waiting]) == ("d", True, ["c1"])
    assert said.message() is None, "nothing new"
    said.receives("other", heard=first.number)
    assert not said.group.sync.allows_list("c2"), "it has other members"
    said.receives("d", heard=first.number - 1)
    assert not said.group.sync.allows_list("c2"), "it has not been notified of this change"
    said.receives("d", "c2", heard=first.number)
    assert not said.group.sync.allows_list("c2"), "it waits"
    said.receives("d", heard=first.number)
    assert said.group.sync.allows_list("c2")
    assert not said.group.sync.allows_notification("c2"), "it may not give the list yet"
    second, _ = said.sent()
    said.receives("d", heard=second.number)
    assert said.group.sync.allows_notification("c2")
    said.agreement.set_waiting(said.group, ())
    assert not said.group.sync.reach(), "it does not know that c1 is drained"
    third, members = said.sent()
    assert not members.waiting
    said.receives("d", heard=third.number)
    assert said.group.sync.reach()
    said.receives("d", "c1", heard=third.number)
    assert said.group.sync.allows_notification("c1"), "what is agreed remains so until the next change"


def test_a_broker_that_fails_is_not_waited_for_until_it_says_something() -> None:
    said = PeerScript()
    for is_for_good in (False, True):
        said.announce("d")
        number = said.sent()[0].number
        assert not said.group.sync.allows_list("c1")
        said.failed(is_for_good)
        assert said.group.sync.allows_notification("c1")
        said.receives("d", heard=number)
        assert not said.group.sync.allows_notification("c1")
    assert said.away == ["g", "g"]


def test_a_drain_that_continues_is_logged_now_and_then() -> None:
    said = PeerScript()
    said.announce("d", "c1")
    number = said.sent()[0].number
    said.agreement.report_progress(said.group)
    assert said.message() is None
    said.clock.advance(PROGRESS_S)
    said.agreement.report_progress(said.group)
    again, _ = said.sent()
    assert (again.number, again.asks) == (number, False)
    said.agreement.report_progress(said.group)
    assert said.message() is None


def test_the_lists_of_some_changes_are_kept() -> None:
    said = PeerScript()
    for number in range(LIMITS.kept_lists + 1):
        said.announce(f"d{number}")
        said.sent()
    last = f"d{LIMITS.kept_lists}"
    assert [item.is_current for item in said.receives(last, heard=0, given=last)] == [True]
    assert [item.is_current for item in said.receives(last, heard=0, given="d1")] == [False]
    assert not said.receives(last, heard=0, given="d0")
    for number in range(MAX_AGREED_LISTS + 1):
        said.announce(f"e{number}")
        said.agreement.record_issued(said.group, "c1")
    assert [*said.sent()[1].given] == [f"e{number}" for number in range(1, MAX_AGREED_LISTS + 1)]


def test_what_a_broker_says_is_limited() -> None:
    ids = tuple(f"c{number}" for number in range(MAX_AGREED_IDS))
    given = {f"d{number}": ids for number in range(MAX_AGREED_LISTS)}
    said = AgreedMembers(frozenset(ids), given)
    assert decode_agreed_members(encode_agreed_members(said)) == said
    for beyond in (
        AgreedMembers(frozenset((*ids, "c"))),
        AgreedMembers(given={"d": (*ids, "c")}),
        AgreedMembers(given={**given, "d": ids}),
        AgreedMembers(frozenset(("c" * (MAX_ID_CHARS + 1),))),
    ):
        with pytest.raises(BodyError, match="length <="):
            decode_agreed_members(encode_agreed_members(beyond))
    for junk in (b"", b"[]", b'{"waiting": 1, "given": {}}', b'{"waiting": []}', b'{"waiting": [], "given": []}'):
        with pytest.raises(BodyError):
            decode_agreed_members(junk)


def wrong() -> Iterator[AgreeOnMembers]:
    good = AgreeOnMembers("g", "broker-b", 1, 1, True, "d")
    yield good._replace(consumer_group="")
    yield good._replace(broker_name="b" * (MAX_ID_CHARS + 1))
    yield good._replace(digest="d" * (MAX_ID_CHARS + 1))
    yield good._replace(token="t" * (MAX_ID_CHARS + 1))


async def test_what_cannot_be_is_refused_and_what_nobody_asked_for_changes_nothing(node: Node, wire: Wire) -> None:
    body = encode_agreed_members(AgreedMembers())
    for header in wrong():
        assert (await wire.call(RequestCode.AGREE_ON_MEMBERS, write(header), body)).code == ResponseCode.SYSTEM_ERROR
    stray = write(AgreeOnMembers("g", "broker-b", 1, 1, True, "d"))
    assert (await wire.call(RequestCode.AGREE_ON_MEMBERS, stray, b"junk")).code == ResponseCode.SYSTEM_ERROR
    assert (await wire.call(RequestCode.AGREE_ON_MEMBERS, stray, body)).code == 0
    assert not node.broker.draining.agreement.synced
    assert read(AgreeOnMembers, stray) == AgreeOnMembers("g", "broker-b", 1, 1, True, "d")


async def test_who_was_given_no_list_is_not_in_the_one_of_before(node: Node, wire: Wire, connect: Connect) -> None:
    """It would take queues by it, and nobody would know of that."""
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    await eventually(lambda: "c1" in node.broker.groups.obtain("g").previous_ids)
    known = routes_known_later(node)
    await join(await connect(node.address), "c2")
    assert await members(wire) == []
    wire.requests.clear()
    known.set()
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]
