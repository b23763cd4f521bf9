"""A restarted broker does not know Apache's members until their next heartbeat. Their queues stay theirs until then."""

from __future__ import annotations

import pytest
from rocketlet.protocol.admin_bodies import RunningQueue, encode_running_info
from rocketlet.protocol.codes import ONEWAY_FLAG, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from ...conftest import Connect, Node, Nodes, Wire, eventually
from ...support.draining import drain_of, handled, joins, locks, reading
from ...support.requests import SUSPEND, join, members, popped, pull, send


@pytest.fixture
async def again(nodes: Nodes, connect: Connect) -> Node:
    """A broker after its restart, of whose topic c1 has read both queues: a message of each is in its handlers."""
    node = await nodes.start()
    await reading(node, await connect(node.address))
    await node.stop()
    return await nodes.start(port=int(node.address.split(":")[1]))


async def one_of_ours(node: Node, connect: Connect) -> Wire:
    ours = await connect(node.address)
    await join(ours, "c2", strategy="AVG")
    return ours


async def test_one_of_ours_gets_the_lock_when_the_reader_from_before_has_handled_all(
    again: Node, connect: Connect
) -> None:
    ours, back = await one_of_ours(again, connect), await connect(again.address)
    assert not await locks(ours, "c2", 1)
    await join(back, "c1")
    assert not await locks(ours, "c2", 1)
    await eventually(lambda: not drain_of(again.broker).is_finding)
    assert not await locks(ours, "c2", 1), "its reader still handles a message"
    await handled(back, 1, 1)
    assert await locks(ours, "c2", 1)


async def test_clients_pop_nothing_of_what_a_reader_from_before_still_handles(again: Node, connect: Connect) -> None:
    assert await popped(await connect(again.address), pollTime=0, initMode=0) == []
    assert again.broker.groups.owners("g") == {("t", 0): "c1", ("t", 1): "c1"}


async def test_another_foreign_member_waits_for_the_reader_from_before(again: Node, connect: Connect) -> None:
    other, back = await connect(again.address), await connect(again.address)
    await joins(other, "c2", "t")
    assert await members(other) == ["c2"]
    answer = await other.call(RequestCode.PULL_MESSAGE, pull(queue=1, flags=SUSPEND))
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert await members(back) == [], "it would drop its queues by a list without itself"
    answer = await back.call(RequestCode.PULL_MESSAGE, pull(queue=1, flags=SUSPEND))
    assert answer.code == ResponseCode.SUBSCRIPTION_NOT_EXIST


async def test_a_reader_that_has_left_before_the_restart_is_not_waited_for(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await reading(node, wire)
    await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})
    await node.stop()
    again = await nodes.start(port=int(node.address.split(":")[1]))
    assert await locks(await one_of_ours(again, connect), "c2", 1)


async def test_a_client_without_a_heartbeat_sets_nothing_back(node: Node, wire: Wire, connect: Connect) -> None:
    """On a new connection, it says the offset that it loaded before others came further."""
    await reading(node, wire)
    await handled(wire, 1, 1)
    unknown = await connect(node.address)
    ext = {"consumerGroup": "g", "topic": "t", "queueId": 1, "commitOffset": 0}
    unknown.send(RequestCode.UPDATE_CONSUMER_OFFSET, ext, flag=ONEWAY_FLAG)
    await members(unknown)
    assert node.broker.offsets.get("g", "t", 1) == 1


# Clients that pull without a heartbeat


def report(wire: Wire, asked: Frame, *queues: int, topic: str = "t") -> None:
    """Answers as Apache's clients do: with subscriptions and queues, without the client id."""
    subscription = {"topic": topic, "subString": "*", "expressionType": "TAG", "subVersion": 1}
    reads = {Queue("t", "broker-a", number): RunningQueue(0, 1, 0, False, False, 0) for number in queues}
    wire.write_answer(asked, encode_running_info({}, [subscription], reads))


async def pulls(wire: Wire, queue: int) -> tuple[int, Frame]:
    """Pulls behind the message that it has, and is asked who it is."""
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(queue=queue, offset=1, flags=SUSPEND, sub_version=1))
    return waits, await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO)


def ids(node: Node) -> list[str]:
    return sorted(member.client_id for member in node.broker.groups.members_of("g").values())


async def test_a_reader_from_before_is_a_member_again_as_soon_as_it_pulls(again: Node, connect: Connect) -> None:
    ours, back = await one_of_ours(again, connect), await connect(again.address)
    _, asked = await pulls(back, 1)
    assert (asked.ext["consumerGroup"], asked.ext["clientId"]) == ("g", "c1")
    report(back, asked, 0, 1)
    await eventually(lambda: ids(again) == ["c1", "c2"])
    await eventually(lambda: not drain_of(again.broker).is_finding)
    assert not await locks(ours, "c2", 1), "its reader still handles a message"
    await handled(back, 1, 1)
    assert await locks(ours, "c2", 1)


async def test_a_reader_with_a_new_connection_is_a_member_again_as_soon_as_it_pulls(
    node: Node, connect: Connect
) -> None:
    first, back = await connect(node.address), await connect(node.address)
    await reading(node, first)
    await first.close()
    await eventually(lambda: ids(node) == [])
    waits, asked = await pulls(back, 1)
    report(back, asked, 0, 1)
    await eventually(lambda: ids(node) == ["c1"])
    await send(back, b"next", queue=1)
    assert b"next" in (await back.answer(waits)).body


@pytest.mark.parametrize(("queues", "topic"), [((0,), "t"), ((0, 1), "other")])
async def test_a_client_whose_report_does_not_fit_has_to_send_a_heartbeat(
    again: Node, connect: Connect, queues: tuple[int, ...], topic: str
) -> None:
    stranger = await connect(again.address)
    waits, asked = await pulls(stranger, 1)
    report(stranger, asked, *queues, topic=topic)
    assert (await stranger.answer(waits)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert ids(again) == []


async def test_a_client_is_not_taken_for_a_reader_that_is_there(node: Node, connect: Connect) -> None:
    await reading(node, await connect(node.address))
    stranger = await connect(node.address)
    waits, asked = await pulls(stranger, 1)
    report(stranger, asked, 0, 1)
    assert (await stranger.answer(waits)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert ids(node) == ["c1"]


async def test_the_heartbeat_says_who_a_member_is(again: Node, connect: Connect) -> None:
    stranger = await connect(again.address)
    _, asked = await pulls(stranger, 1)
    report(stranger, asked, 0, 1)
    await eventually(lambda: ids(again) == ["c1"])
    await join(stranger, "c9")
    assert ids(again) == ["c9"]
