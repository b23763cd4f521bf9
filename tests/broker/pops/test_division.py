"""Groups in which some pull a topic and others pop it: no queue has two owners, and nothing is lost or given twice when one
changes hands."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import cast

import pytest
from rocketlet.broker.config import POOL_IDLE_S, POOL_LEAVE_S, POOL_SENT_BACK
from rocketlet.broker.groups.reading import Read, ReadKind, Refuse, may_read
from rocketlet.broker.pops.requests import AckStatus, PopClient, Why
from rocketlet.client import Consumer, Producer, SharedConsumer
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.admin.diagnosis import diagnose
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import ONEWAY_FLAG, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode
from rocketlet.protocol.message import Record
from rocketlet.protocol.properties import RETRY_TOPIC, find

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.handlers import Inbox
from ...support.requests import ack, commit, join, popped, pull
from ...support.requests import send as send_to
from .world import FakeSession, World, bodies, client_of, handles


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data", queues=4)


def owners(world: World) -> dict[int, str]:
    return {queue_id: client_id for (_, queue_id), client_id in sorted(world.locks.groups.owners("g").items())}


def send_all(world: World) -> None:
    for queue in range(4):
        world.send(f"m{queue}", queue=queue)


def sent_back_to(world: World) -> list[Record]:
    queue = world.store.queues.get(("%RETRY%g", 0))
    return [world.store.message(queue, offset) for offset in range(queue.next)] if queue is not None else []


def test_who_pops_keeps_all_queues_until_a_member_that_pulls_has_its_share(world: World) -> None:
    send_all(world)
    received = world.receive(client="p", invisible_ms=60_000)
    assert len(received.messages) == 4
    assert owners(world) == {}
    puller = world.join("a")
    assert owners(world) == dict.fromkeys(range(4), "(shared)")
    assert world.lock(puller, "a", 0, 1) == set()  # all have messages in flight
    world.ack(*handles(received)[:1])
    assert world.lock(puller, "a", 0, 1) == {0}
    assert world.offsets.get("g", "t", 0) == 1
    world.send("new", queue=1)
    world.send("mine", queue=2)
    assert bodies(world.receive(client="p")) == ["mine"]  # nothing new of a queue that leaves
    world.ack(*handles(received)[1:2])
    assert world.lock(puller, "a", 0, 1) == {0, 1}
    assert owners(world) == {0: "a", 1: "a", 2: "(shared)", 3: "(shared)"}


def test_who_pops_gets_its_share_of_what_members_pull(world: World) -> None:
    send_all(world)
    puller = world.join("a")
    assert world.lock(puller, "a", 0, 1, 2, 3) == {0, 1, 2, 3}
    got = world.wait(client="p")
    assert got == []
    world.offsets.put("g", "t", 3, 1, by_owner=True)
    assert world.unlock(puller, "a", 2, 3) == []
    assert bodies(got[0]) == ["m2"]  # and of the other queue what its owner has not committed
    world.send("n", queue=3)
    assert bodies(world.receive(client="p")) == ["n"]
    assert world.lock(puller, "a", 2) == set()


def test_what_is_popped_of_a_queue_that_leaves_is_waited_for_until_its_time_is_over(world: World) -> None:
    world.send("m", queue=0)
    received = world.receive(client="p", invisible_ms=100_000)
    puller = world.join("a")
    for _ in range(90):
        world.advance(1)
        world.state.expire_clients()
        world.wait(client="p", wait_ms=500)
        assert world.lock(puller, "a", 0, 1) <= {1}
    for _ in range(11):
        world.advance(1)
        world.wait(client="p", wait_ms=500)
    assert 0 in world.lock(puller, "a", 0)
    assert world.offsets.get("g", "t", 0) == 0
    assert world.ack(*handles(received)) == [AckStatus.UNKNOWN]


def test_what_comes_back_of_a_queue_that_leaves_is_redelivered_for_a_while(world: World) -> None:
    world.send("m", queue=0)
    world.send("n", queue=0)
    first, second = handles(world.receive(client="p"))
    puller = world.join("a")
    world.ack(second)
    world.state.change("g", "t", first, 0)
    again = world.receive(client="p")
    assert bodies(again) == ["m"]
    assert world.lock(puller, "a", 0) == set()
    world.ack(*handles(again))
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 2


def test_a_message_that_its_client_wants_hours_later_keeps_no_queue(world: World) -> None:
    world.send("m", queue=0)
    (handle,) = handles(world.receive(client="p"))
    world.state.change("g", "t", handle, 3_600_000)
    puller = world.join("a")
    assert world.lock(puller, "a", 0) == set()
    for _ in range(32):
        world.advance(1)
        world.wait(client="p", wait_ms=500)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 0


def test_a_message_whose_client_has_renewed_it_keeps_its_queue(world: World) -> None:
    """Its handler still runs: a member that pulls would handle the message a second time."""
    world.send("m", queue=0)
    (handle,) = handles(world.receive(client="p"))
    world.state.change("g", "t", handle, 3_600_000, renews=True)
    puller = world.join("a")
    for _ in range(32):
        world.advance(1)
        world.wait(client="p", wait_ms=500)
    assert world.lock(puller, "a", 0) == set()
    world.ack(handle)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 1


def test_the_pool_has_all_again_when_nobody_pulls_any_more(world: World) -> None:
    world.receive(client="p")
    puller = world.join("a")
    assert world.lock(puller, "a", 0, 1) == {0, 1}
    world.leave(puller)
    assert owners(world) == {}
    assert world.members.online("g") is None  # nobody needs a place
    send_all(world)
    assert len(world.receive(client="p").messages) == 4


def test_members_that_pull_get_all_when_nobody_pops_any_more(world: World) -> None:
    puller = world.join("a")
    world.lock(puller, "a", 0, 1, 2, 3)
    world.wait(client="p")
    world.unlock(puller, "a", 2, 3)
    assert owners(world)[2] == "(shared)"
    world.state.client_gone(client_of("p"))
    assert world.lock(puller, "a", 0, 1, 2, 3) == {0, 1, 2, 3}
    found = world.members.get("g")
    assert found is not None
    assert found.client_ids() == ["a"]


def test_members_that_pull_get_all_immediately_when_those_who_popped_have_gone_before(world: World) -> None:
    world.receive(client="p")
    world.state.client_gone(client_of("p"))
    puller = world.join("a")
    assert world.lock(puller, "a", 0, 1, 2, 3) == {0, 1, 2, 3}
    assert world.state.pools.all == {}


def test_shares_are_as_many_as_clients_that_pop(world: World) -> None:
    for client in "pqr":
        world.receive(client=client)
    puller = world.join("a")
    assert world.lock(puller, "a", 0, 1, 2, 3) == {0}


def test_a_restart_keeps_what_the_pool_owns(world: World) -> None:
    send_all(world)
    world.receive(client="p")
    puller = world.join("a")
    taken = world.receive(client="p")
    assert owners(world) == dict.fromkeys(range(4), "(shared)")
    world.save()
    world.kill()
    world.open()
    assert owners(world) == dict.fromkeys(range(4), "(shared)")
    puller = world.join("a")
    assert world.lock(puller, "a", 0, 1) == set()
    assert taken.why is Why.NOTHING_NEW
    world.advance(11)  # messages in flight are redelivered
    again = world.receive(client="p")
    assert sorted(bodies(again)) == ["m0", "m1", "m2", "m3"]
    world.ack(*handles(again))
    assert world.lock(puller, "a", 0, 1) == {0, 1}


def test_members_that_share_with_nobody_are_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    from rocketlet.protocol.bodies import ConsumerData
    from rocketlet.protocol.names import Subscription

    world.receive(client="p")
    session = FakeSession()
    data = ConsumerData("g", message_model="BROADCASTING", subscriptions=(Subscription("t"),))
    world.members.heartbeat(session, "b", data, 0, 0)
    group = world.members.obtain("g")
    for _ in range(2):
        world.state.division.observe_pull(session, group, "t")
        assert isinstance(may_read(Read(session, group, ("t", 0), ReadKind.PULL), world.clock.monotonic_s()), Refuse)
    assert capsys.readouterr().out.count("group_pulls_and_pops") == 1


def test_a_member_that_pops_needs_no_place_and_is_the_last_in_the_list(world: World) -> None:
    from rocketlet.protocol.bodies import ConsumerData
    from rocketlet.protocol.names import Subscription

    session = FakeSession()
    session.peer = "127.0.0.1:1"
    data = ConsumerData("g", "CONSUME_POP", subscriptions=(Subscription("t"),))
    world.members.heartbeat(session, "a", data, 0, 0)
    world.receive(client=PopClient("a", session=session))
    world.join("b")
    found = world.members.get("g")
    assert found is not None
    assert list(found.order("t")) == ["b", "~a"]
    assert owners(world) == {2: "(shared)", 3: "(shared)"}
    assert not found.reported


def test_what_was_acknowledged_behind_an_unfinished_message_comes_to_nobody_who_pulls(world: World) -> None:
    """No offset says both. The unfinished one comes as one that was sent back, as a member that pulls does it."""
    for name in "mnop":
        world.send(name, queue=0)
    first, second, third, fourth = handles(world.receive(client="p"))
    world.ack(second, fourth)
    for handle in (first, third):
        world.state.change("g", "t", handle, 0)
    puller = world.join("a")
    world.state.client_gone(client_of("p"))
    world.advance(POOL_LEAVE_S)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 4
    sent_back = sent_back_to(world)
    assert [(item.body, item.reconsume_times) for item in sent_back] == [(b"m", 1), (b"o", 1)]
    assert {find(item.properties, RETRY_TOPIC) for item in sent_back} == {"t"}


def test_unfinished_messages_with_nothing_finished_behind_them_stay_where_they_are(world: World) -> None:
    for name in "mnop":
        world.send(name, queue=0)
    first, second, *rest = handles(world.receive(client="p"))
    world.ack(second)
    for handle in (first, *rest):
        world.state.change("g", "t", handle, 0)
    puller = world.join("a")
    world.state.client_gone(client_of("p"))
    world.advance(POOL_LEAVE_S)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 2
    assert [item.body for item in sent_back_to(world)] == [b"m"]


def test_messages_are_redelivered_after_a_member_that_waited_long_for_their_queues_has_left(world: World) -> None:
    for queue in range(4):
        world.send(f"m{queue}", queue=queue)
    got = handles(world.receive(client="p", invisible_ms=60_000))
    puller = world.join("a")
    world.advance(POOL_LEAVE_S + 1)
    assert bodies(world.receive(client="p")) == []
    world.leave(puller)
    for handle in got:
        world.state.change("g", "t", handle, 0)
    world.turn()
    assert sorted(bodies(world.receive(client="p"))) == ["m0", "m1", "m2", "m3"]


def restart(world: World, *, saves: bool = False) -> None:
    if saves:
        world.save()
    world.kill()
    world.open()


def ahead_of(world: World) -> list[int] | None:
    """The offsets of finished messages that members which pull queue 0 do not get; None if nothing is kept of them."""
    group = world.members.get("g")
    ahead = group.finished_ahead("t", 0) if group is not None else None
    return None if ahead is None else [offset for offset in range(10) if ahead.has(offset)]


def leaving_with_finished_ahead(world: World) -> FakeSession:
    """A member gets queue 0, of which clients that pop in order have finished b0 and c0, and not a0 and a1 before them."""
    world.group("g", consume_orderly=True)
    for name, key in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("c0", "c")):
        world.send(name, queue=0, __SHARDINGKEY=key)
    first = world.receive(1, client="p")
    assert bodies(first) == ["a0"]
    others = world.receive(client="p")
    assert bodies(others) == ["b0", "c0"]
    world.ack(*handles(others))
    world.state.change("g", "t", handles(first)[0], 60_000)
    puller = world.join("a")
    world.send("a2", queue=0, __SHARDINGKEY="a")
    world.advance(POOL_LEAVE_S)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 0
    assert sent_back_to(world) == []
    return cast("FakeSession", puller)


def test_in_order_what_was_acknowledged_is_left_out_of_what_members_pull(world: World) -> None:
    """Nothing can be sent back in order: 60 of 60 acknowledged messages were delivered again."""
    leaving_with_finished_ahead(world)
    assert ahead_of(world) == [2, 3]


def test_peek_leaves_out_what_is_finished_and_changes_nothing(world: World) -> None:
    puller = leaving_with_finished_ahead(world)
    world.state.client_gone(client_of("p"))
    for _ in range(10):
        world.advance(POOL_IDLE_S)
        world.lock(puller, "a", 0, 1)
        world.state.expire_clients()
        world.turn()
    assert world.state.pools.find("g", "t") is None
    peeked = world.state.pools.peek("g", "t", 0, 10)
    assert [message.offset for message in peeked] == [4], "a0 and a1 were popped before"
    assert world.state.pools.find("g", "t") is None
    assert ahead_of(world) == [2, 3]


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_is_left_out_of_what_members_pull_is_kept_over_a_restart(world: World, is_killed: bool) -> None:
    leaving_with_finished_ahead(world)
    for _ in range(2):  # the second run reads what the first one has written again
        restart(world, saves=not is_killed)
        assert ahead_of(world) == [2, 3]
        assert world.offsets.get("g", "t", 0) == 0


@pytest.mark.parametrize("offset", [4, 5])
def test_nothing_is_kept_of_finished_messages_before_the_offset(world: World, offset: int) -> None:
    leaving_with_finished_ahead(world)
    world.offsets.put("g", "t", 0, 3)
    assert ahead_of(world) == [2, 3]
    world.offsets.put("g", "t", 0, offset)
    assert ahead_of(world) is None
    world.turn()
    restart(world)
    assert ahead_of(world) is None


def test_a_lower_offset_brings_finished_messages_back(world: World) -> None:
    leaving_with_finished_ahead(world)
    world.offsets.put("g", "t", 0, 1)
    assert ahead_of(world) == [2, 3]
    world.offsets.put("g", "t", 0, 0)
    assert ahead_of(world) is None


@pytest.mark.parametrize("is_restarted", [False, True])
def test_clients_that_pop_again_get_what_is_not_finished(world: World, is_restarted: bool) -> None:
    puller = leaving_with_finished_ahead(world)
    assert world.unlock(puller, "a", 0) == []
    world.leave(puller)
    if is_restarted:
        restart(world)
    world.advance(POOL_IDLE_S)
    again = world.receive(client="q", invisible_ms=60_000)
    assert bodies(again) == ["a0", "a1", "a2"]
    assert [message.attempt for message in again.messages] == [2, 1, 1]
    assert ahead_of(world) is None
    world.turn()
    restart(world)
    world.advance(60)
    assert bodies(world.receive(client="q")) == ["a0", "a1", "a2"]


def test_in_order_a_queue_does_not_wait_for_clients_that_are_gone(world: World) -> None:
    world.group("g", consume_orderly=True)
    for name, key in (("a0", "a"), ("b0", "b")):
        world.send(name, queue=0, __SHARDINGKEY=key)
    first, second = handles(world.receive(client="p"))
    world.ack(second)
    world.state.change("g", "t", first, 60_000)
    puller = world.join("a")
    world.state.client_gone(client_of("p"))
    world.advance(POOL_LEAVE_S + 1)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 0
    assert ahead_of(world) == [1]


def test_in_order_a_queue_without_finished_messages_behind_unfinished_ones_does_not_wait(world: World) -> None:
    world.group("g", consume_orderly=True)
    for name in ("a0", "a1"):
        world.send(name, queue=0, __SHARDINGKEY="a")
    (first, *_) = handles(world.receive(client="p"))
    world.state.change("g", "t", first, 0)
    puller = world.join("a")
    world.advance(POOL_LEAVE_S)
    world.receive(client="p")
    world.advance(11)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 0


def test_many_messages_are_sent_back_in_several_pieces(world: World) -> None:
    count = POOL_SENT_BACK + 1
    for number in range(count + 1):
        world.send(f"m{number}", queue=0)
    got = [handle for _ in range(count // 32 + 1) for handle in handles(world.receive(client="p"))]
    assert len(got) == count + 1
    world.ack(got[-1])
    for handle in got[:-1]:
        world.state.change("g", "t", handle, 0)
    puller = world.join("a")
    world.state.client_gone(client_of("p"))
    world.clock.advance(POOL_LEAVE_S)
    assert len(sent_back_to(world)) == POOL_SENT_BACK
    world.turn()
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == count + 1
    assert len(sent_back_to(world)) == count


def test_nothing_is_sent_back_where_nobody_reads_it(world: World) -> None:
    world.group("g", retry_queues=0)
    for name in "mn":
        world.send(name, queue=0)
    first, second = handles(world.receive(client="p"))
    world.ack(second)
    world.state.change("g", "t", first, 0)
    puller = world.join("a")
    world.state.client_gone(client_of("p"))
    world.advance(POOL_LEAVE_S)
    assert world.lock(puller, "a", 0) == {0}
    assert world.offsets.get("g", "t", 0) == 0
    assert sent_back_to(world) == []


# Our consumers, which pull, and clients that pop in one group: every message is handled once, whoever comes and goes.


@contextlib.asynccontextmanager
async def popper(wire: Wire, got: list[bytes]) -> AsyncIterator[None]:
    """A client that pops until it is closed."""

    async def pop() -> None:
        while True:
            for record in await popped(wire, pollTime=200, initMode=0):
                await handled(wire, record, got)

    task = asyncio.create_task(pop())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await wire.close()


async def handled(wire: Wire, record: Record, got: list[bytes]) -> None:
    got.append(record.body)
    await asyncio.shield(wire.call(RequestCode.ACK_MESSAGE, ack(record)))


async def send(node: Node, bodies: Iterable[bytes]) -> list[bytes]:
    sent = list(bodies)
    async with Producer(node.address) as producer:
        for body in sent:
            await producer.send("t", body)
    return sent


def owners_mixed_groups(node: Node) -> Counter[str]:
    return Counter(node.broker.groups.owners("g").values())


async def test_who_pulls_and_who_pops_share_a_topic_and_hand_queues_over(node: Node, connect: Connect) -> None:
    await create_topic(await connect(node.address), "t", queues=8)
    inbox, got, sent = Inbox(), list[bytes](), list[bytes]()

    async def until_all() -> None:
        await eventually(lambda: len(inbox.messages) + len(got) >= len(sent))

    async with popper(await connect(node.address), got):
        sent += await send(node, (b"apart-%d" % number for number in range(20)))
        await until_all()
        async with Consumer(node.address, "g", "t", inbox, start="first"):
            sent += await send(node, (b"joined-%d" % number for number in range(40)))
            await eventually(lambda: owners_mixed_groups(node)["(shared)"] == 4 and len(owners_mixed_groups(node)) == 2)
            sent += await send(node, (b"both-%d" % number for number in range(40)))
            await until_all()
            assert {body[:4] for body in inbox.bodies} & {body[:4] for body in got} >= {b"both"}
            async with AdminClient(node.address) as admin:
                assert not [finding for finding in await diagnose(admin) if finding.subject == "g"]
        sent += await send(node, (b"alone-%d" % number for number in range(20)))
        await until_all()
        assert owners_mixed_groups(node) == Counter()
    async with Consumer(node.address, "g", "t", inbox, start="first"):
        sent += await send(node, (b"pulled-%d" % number for number in range(20)))
        await until_all()
    assert Counter(inbox.bodies + got) == Counter(sent)


async def test_shared_consumer_that_joins_where_a_consumer_pulls_is_one_member(node: Node, connect: Connect) -> None:
    """Its first receive comes before its first heartbeat with the group."""
    await create_topic(await connect(node.address), "t", queues=4)
    pulled, shared = Inbox(), Inbox()
    async with Consumer(node.address, "g", "t", pulled, start="first"):
        await eventually(lambda: len(owners_mixed_groups(node)) == 1)
        async with SharedConsumer(node.address, "g", "t", shared) as consumer:
            await eventually(lambda: owners_mixed_groups(node)["(shared)"] == 2)
            ids = [member.client_id for member in node.broker.groups.members_of("g").values()]
            assert (len(ids), ids.count(consumer.client_id)) == (2, 1)
            await send(node, (b"%d" % number for number in range(20)))
            await eventually(lambda: len(pulled.messages) + len(shared.messages) == 20)
            assert shared.messages
        await eventually(lambda: len(node.broker.groups.members_of("g")) == 1)


async def test_a_member_in_order_gets_nothing_that_clients_which_popped_have_acknowledged(
    node: Node, connect: Connect
) -> None:
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    wire = await connect(node.address)
    await create_topic(wire, "t", queues=1)
    for body in (b"a0", b"b0", b"a1", b"c0"):
        properties = f"__SHARDINGKEY\x01{body[:1].decode()}"
        assert (await send_to(wire, body, queue=0, properties=properties)).code == 0
    records = await popped(wire, order=True, invisibleTime=1)
    assert [record.body for record in records] == [b"a0", b"b0", b"a1", b"c0"]
    for record in (records[1], records[3]):
        assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    await wire.close()
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", orderly=True, concurrency=1):
        node.clock.advance(POOL_LEAVE_S + 1)
        await eventually(lambda: inbox.bodies == [b"a0", b"a1"])
        await send_to(await connect(node.address), b"d0", queue=0)
        await eventually(lambda: inbox.bodies == [b"a0", b"a1", b"d0"])
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 5)
    assert node.broker.groups.obtain("g").finished_ahead("t", 0) is None


async def test_the_broker_restarts_with_queues_of_both_kinds(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    (record,) = [await pop_one(node, wire)]
    await join(await connect(node.address), "c1")
    before = owners_mixed_groups(node)
    assert before["(shared)"] >= 2
    await node.stop()
    node = await nodes.start()
    wire = await connect(node.address)
    assert owners_mixed_groups(node) == before
    await join(await connect(node.address), "c1")
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    while owners_mixed_groups(node)["(shared)"] > 2:
        await popped(wire)


async def pop_one(node: Node, wire: Wire) -> Record:
    await send(node, [b"a"])
    (record,) = await popped(wire, initMode=0)
    return record


async def test_a_stranger_that_pulled_before_a_restart_does_not_set_back_what_is_popped(
    node: Node, connect: Connect
) -> None:
    """Until its next heartbeat nobody knows it for a member; its commits are one-way, unlike an administrator's."""
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t", queues=1)
    await send(node, [b"one"])
    (record,) = await popped(wire, initMode=0)
    assert (await wire.call(RequestCode.ACK_MESSAGE, ack(record))).code == 0
    ext = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 0}
    stranger.send(RequestCode.UPDATE_CONSUMER_OFFSET, ext, flag=ONEWAY_FLAG)
    await stranger.call(RequestCode.QUERY_CONSUMER_OFFSET, ext)
    assert node.broker.offsets.get("g", "t", 0) == 1
    assert await popped(wire) == []
    await commit(stranger, 0)
    assert [record.body for record in await popped(wire)] == [b"one"]


async def test_a_strangers_pull_that_waits_gets_nothing_of_what_is_popped(node: Node, connect: Connect) -> None:
    """After a restart a member pulls before its heartbeat makes it known, and meanwhile others begin to pop."""
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t", queues=1)
    await send(node, [b"one"])
    waiting = stranger.send(RequestCode.PULL_MESSAGE, pull(offset=1, flags=PULL_SUSPEND | PULL_SUBSCRIPTION))
    await stranger.call(RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "g", "topic": "t", "queueId": 0})
    assert [record.body for record in await popped(wire, initMode=0)] == [b"one"]
    await send(node, [b"two"])
    assert (await stranger.answer(waiting)).code == ResponseCode.PULL_NOT_FOUND
    assert [record.body for record in await popped(wire)] == [b"two"]


async def test_client_without_a_heartbeat_gets_nothing_from_a_queue_of_the_pool(node: Node, connect: Connect) -> None:
    wire, stranger = await connect(node.address), await connect(node.address)
    await create_topic(wire, "t")
    await popped(wire, initMode=0)
    await join(wire, "c1", strategy="AVG")
    queues = [queue for (_, queue), owner in node.broker.groups.owners("g").items() if owner == "(shared)"]
    assert queues
    for queue in queues:
        await send_to(wire, queue=queue)
        for flags, code in (
            (PULL_SUSPEND, ResponseCode.SUBSCRIPTION_NOT_EXIST),
            (PULL_SUSPEND | PULL_SUBSCRIPTION, ResponseCode.PULL_NOT_FOUND),
        ):
            answer = await stranger.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=flags, sub_version=1))
            assert answer.code == code
    assert len(await popped(wire)) == len(queues)
