"""Groups with foreign members that subscribe to different topics, as plain frames: every queue is read by one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rocketlet.broker.config import DROPPED_AFTER_S, HANDOVER_LEASE_S, LIMITS, TOLD_AGAIN
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.protocol import bodies, group_bodies
from rocketlet.protocol.admin_bodies import RunningQueue, encode_running_info
from rocketlet.protocol.allocation import AVG
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, Route, encode_heartbeat
from rocketlet.protocol.codes import ONEWAY_FLAG, PULL_COMMIT_OFFSET, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue, parse_subscription, retry_topic, sorted_ids
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.draining import FLAGS, drain_of, handled, joins, locks, members_of, reading
from ...support.requests import SUBSCRIBED, SUSPEND, beat, join, members, popped, pull, send

FLAGS_FOREIGN_MEMBERS = SUBSCRIBED | SUSPEND
QUEUES = 4
RETRIES = retry_topic("g")
COMMITS = FLAGS_FOREIGN_MEMBERS | PULL_COMMIT_OFFSET


def is_settled(node: Node, count: int) -> bool:
    group, drain = node.broker.groups.get("g"), node.broker.groups.obtain("g").drain
    return group is not None and len(group.members) == count and (drain is None or not drain.is_finding)


async def claims(wire: Wire, client_id: str, topic: str, queues: int = QUEUES) -> list[int]:
    """The queues that an Apache client takes by the list that it is given."""
    ids = sorted_ids(await members(wire))
    found = AVG.allocate(client_id, [Queue(topic, "broker-a", number) for number in range(queues)], ids)
    return [queue.queue_id for queue in found]


async def gets(wire: Wire, topic: str, queue: int, offset: int = 0) -> list[bytes]:
    """The answer to a pull that is not held comes immediately: nothing if the queue is another's, and the pull is parked."""
    header = pull(topic, queue=queue, offset=offset, flags=FLAGS_FOREIGN_MEMBERS, suspend_timeout_millis=1)
    answer = await wire.call(RequestCode.PULL_MESSAGE, header)
    return [record.body for record in decode_records(answer.body)] if answer.code == 0 else []


async def grow(wire: Wire, topic: str, queues: int) -> None:
    assert (
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))
    ).code == 0


class Group:
    """A foreign member of t0 and t2, one of t2, and one of ours of t0; a message is in each queue."""

    def __init__(self, node: Node, admin: Wire, both: Wire, one: Wire, ours: Wire) -> None:
        self.node, self.admin, self.both, self.one, self.ours = node, admin, both, one, ours
        self.foreign = {"b": both, "c": one}

    async def readers(self, topic: str, queue: int) -> Iterator[str]:
        """The members that would read a queue: the foreign members that get what is in it, and one of ours by its place."""
        found = [
            client_id
            for client_id, wire in self.foreign.items()
            if topic in self.topics(client_id) and queue in await claims(wire, client_id, topic, self.queues(topic))
            if await gets(wire, topic, queue)
        ]
        group = self.node.broker.groups.obtain("g")
        index, count = group.place("a", topic)
        share = AVG.allocate_at(index, count, range(self.queues(topic))) if index >= 0 else []  # type: ignore[arg-type]
        return iter([*found, *(["a"] if queue in share else [])])  # type: ignore[comparison-overlap]

    def queues(self, topic: str) -> int:
        return self.node.broker.topics.queues_of(topic)

    def topics(self, client_id: str) -> set[str]:
        group = self.node.broker.groups.obtain("g")
        return {
            topic
            for member in group.members.values()
            if member.client_id == client_id
            for topic in member.subscriptions
        }


@pytest.fixture
async def group(node: Node, wire: Wire, connect: Connect) -> Group:
    for topic in ("t0", "t2"):
        await create_topic(wire, topic, QUEUES)
        for queue in range(QUEUES):
            await send(wire, b"m", topic=topic, queue=queue)
    found = Group(node, wire, *[await connect(node.address) for _ in range(3)])
    await joins(found.ours, "a", "t0", strategy="AVG")
    await joins(found.both, "b", "t0", "t2")
    await joins(found.one, "c", "t2")
    await eventually(lambda: is_settled(node, 3))
    return found


async def test_each_queue_is_read_by_one_of_those_that_subscribe_to_its_topic(group: Group) -> None:
    found = {
        (topic, queue): list(await group.readers(topic, queue)) for topic in ("t0", "t2") for queue in range(QUEUES)
    }
    assert found == {
        **{("t0", queue): ["a" if queue < 2 else "b"] for queue in range(QUEUES)},
        **{("t2", queue): ["b" if queue < 2 else "c"] for queue in range(QUEUES)},
    }


async def locked(wire: Wire, client_id: str, *queues: int) -> set[int]:
    """The queues of t2 that a member of Apache's gets or keeps the locks of."""
    request = LockRequest(client_id, "g", tuple(Queue("t2", "broker-a", queue) for queue in queues))
    answer = await wire.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
    return {queue.queue_id for queue in group_bodies.decode_locked(answer.body)}


async def test_lock_of_a_queue_that_moves_from_a_member_with_a_list_of_itself_alone_ends_with_its_drain(
    group: Group, connect: Connect
) -> None:
    """Such a member does not unlock the queue, because it claims all queues, and renews all of its locks."""
    assert await locked(group.both, "b", 0, 1) == {0, 1}
    assert await gets(group.both, "t2", 0)
    assert await gets(group.both, "t2", 1)
    newcomer = await connect(group.node.address)
    await joins(newcomer, "aa", "t2")
    await eventually(lambda: is_settled(group.node, 4))
    assert await locked(group.both, "b", 0, 1) == {0, 1}, "its handlers run while the queue is drained"
    assert await locked(newcomer, "aa", 0, 1) == set()
    for _ in range(2):  # it is asked how far it is, and given up
        group.node.clock.advance(LIMITS.drain_limit_s / 2)
    await eventually(lambda: drain_is_over(group.node))
    assert await locked(group.both, "b", 0, 1) == set()
    assert await locked(newcomer, "aa", 0, 1) == {0, 1}
    assert await locked(group.both, "b", 0, 1) == set()


async def test_lock_of_a_queue_that_moves_without_a_drain_is_not_renewed(group: Group, connect: Connect) -> None:
    assert await locked(group.both, "b", 0, 1) == {0, 1}
    newcomer = await connect(group.node.address)
    await joins(newcomer, "aa", "t2")
    await eventually(lambda: is_settled(group.node, 4) and drain_is_over(group.node))
    assert await locked(group.both, "b", 0, 1) == set()
    assert await locked(newcomer, "aa", 0, 1) == {0, 1}


def drain_is_over(node: Node) -> bool:
    drain = node.broker.groups.obtain("g").drain
    return drain is None or not drain.waiting


async def test_members_that_share_all_topics_with_the_same_others_are_notified_of_those(group: Group) -> None:
    """c's t2 is b's, too, but b's t0 is a's: only b would claim what is not its own by the list of its companions."""
    assert await members(group.both) == ["b"]
    assert sorted(await members(group.one)) == ["b", "c"]


async def test_retries_have_one_reader(group: Group) -> None:
    await send(group.admin, b"again", topic=RETRIES)
    assert [client_id for client_id, wire in group.foreign.items() if await gets(wire, RETRIES, 0)] == []
    await group.ours.close()  # the first of them
    await eventually(lambda: is_settled(group.node, 2))
    assert [client_id for client_id, wire in group.foreign.items() if await gets(wire, RETRIES, 0)] == ["b"]


async def parked(group: Group, wire: Wire, topic: str, queue: int) -> int:
    held = group.node.broker.held_pulls
    before = held.count
    opaque = wire.send(RequestCode.PULL_MESSAGE, pull(topic, queue=queue, flags=FLAGS_FOREIGN_MEMBERS))
    await eventually(lambda: held.count > before)
    return opaque


async def test_a_pull_of_another_members_queue_waits_until_the_queue_is_its_own(group: Group) -> None:
    """It continues where the one before has come, though it loaded its offset before: also if that one was killed."""
    await members(group.both)
    waits = await parked(group, group.both, "t2", 2)
    await send(group.admin, b"more", topic="t2", queue=2)
    handled = await group.one.call(
        RequestCode.PULL_MESSAGE, pull("t2", queue=2, offset=1, flags=COMMITS, commit_offset=1)
    )
    assert handled.code == 0
    await group.one.close()
    answer = await group.both.answer(waits)
    assert (answer.code, answer.body) == (ResponseCode.PULL_NOT_FOUND, b"")
    behind = await group.both.call(RequestCode.PULL_MESSAGE, pull("t2", queue=2, flags=COMMITS))
    assert (behind.code, behind.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "1")
    assert await gets(group.both, "t2", 2, offset=1) == [b"more"]


async def test_a_reader_ends_before_the_next_one_gets_anything(group: Group) -> None:
    """b and c continue claiming what they claim: nobody has to be notified of the change."""
    assert await gets(group.both, "t2", 1) == [b"m"]
    await joins(group.ours, "a", "t0", "t2", strategy="AVG")  # t2: 0 and 1 to a, 2 to b, 3 to c
    await eventually(lambda: group.node.broker.groups.obtain("g").is_drained("t2", 1))
    await send(group.admin, b"later", topic="t2", queue=1)
    assert await gets(group.both, "t2", 1, offset=1) == []
    await group.both.call(RequestCode.PULL_MESSAGE, pull("t2", queue=1, offset=1, flags=COMMITS, commit_offset=1))
    assert not group.node.broker.groups.obtain("g").is_drained("t2", 1)
    assert await gets(group.both, "t2", 1, offset=1) == []
    assert group.node.broker.offsets.get("g", "t2", 1) == 1


async def test_who_claims_a_queue_and_does_not_read_it_says_nothing_of_its_offset(group: Group) -> None:
    """A group without an offset begins where its reader has begun, not where somebody else has loaded one."""
    await members(group.both)
    commit = {"consumerGroup": "g", "topic": "t2", "queueId": 3, "commitOffset": 1}
    refused = await group.both.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert (refused.code, group.node.broker.offsets.get("g", "t2", 3)) == (ResponseCode.NO_PERMISSION, None)
    group.both.send(RequestCode.PULL_MESSAGE, pull("t2", queue=3, offset=1, flags=COMMITS, commit_offset=1))
    assert await gets(group.one, "t2", 3) == [b"m"]
    assert group.node.broker.offsets.get("g", "t2", 3) is None
    assert (await group.one.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0


async def lock_of(wire: Wire, client_id: str, *queues: int) -> list[int]:
    request = LockRequest(client_id, "g", tuple(Queue("t2", "broker-a", queue) for queue in queues), False)
    answer: Frame = await wire.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
    return sorted(queue.queue_id for queue in group_bodies.decode_locked(answer.body))


async def test_a_member_that_consumes_in_order_locks_its_share_only(group: Group) -> None:
    assert sorted(await members(group.both)) == ["b"]
    assert await lock_of(group.both, "b", 0, 1, 2, 3) == [0, 1]
    assert await lock_of(group.one, "c", 2, 3) == [2, 3]


@pytest.mark.limits(owners_refresh_delay_s=0.0)
async def test_queues_that_a_topic_gets_are_read_by_one(group: Group) -> None:
    assert await members(group.both) == ["b"]
    await grow(group.admin, "t2", 6)
    await gets(group.both, "t2", 5)  # nobody's yet: the broker looks
    owners = group.node.broker.groups.obtain("g")
    await eventually(lambda: [owners.owner_of("t2", queue) for queue in range(6)] == ["b"] * 3 + ["c"] * 3)
    for queue in (4, 5):
        await send(group.admin, b"m", topic="t2", queue=queue)
    assert [
        [client_id for client_id in "bc" if await gets(group.foreign[client_id], "t2", queue)] for queue in (4, 5)
    ] == [
        ["c"],
        ["c"],
    ]


async def test_members_that_subscribe_to_the_same_again_are_notified_of_each_other(group: Group) -> None:
    """b is bound to its share until it has dropped the rest."""
    assert await members(group.both) == ["b"]
    await joins(group.ours, "a", "t0", "t2", strategy="AVG")
    await joins(group.one, "c", "t0", "t2")
    await eventually(lambda: group.node.broker.groups.get("g").is_uneven is False)  # type: ignore[union-attr]
    await eventually(lambda: is_settled(group.node, 3))
    assert sorted(await members(group.both)) == ["a", "b", "c"]
    await send(group.admin, b"m", topic="t2", queue=3)
    assert await gets(group.both, "t2", 3) == []
    assert await gets(group.one, "t2", 3) == [b"m", b"m"]


async def test_who_asks_for_one_topic_only_is_bound_until_it_looks_again_on_its_own(group: Group) -> None:
    """b claims all queues of the topics for which it has not asked since."""
    assert await members(group.both) == ["b"]
    await joins(group.ours, "a", "t0", "t2", strategy="AVG")
    await joins(group.one, "c", "t0", "t2")
    await eventually(lambda: group.node.broker.groups.get("g").is_uneven is False)  # type: ignore[union-attr]
    await eventually(lambda: is_settled(group.node, 3))
    assert sorted(await members(group.both)) == ["a", "b", "c"]
    await send(group.admin, b"m", topic="t2", queue=3)
    group.node.clock.advance(LIMITS.drained_wait_s)
    assert await gets(group.both, "t2", 3) == []
    for _ in ("t2", "retries"):
        await members(group.both)
    assert await gets(group.both, "t2", 3) == [b"m", b"m"], "it shares out in another way"


async def test_nobody_is_drained_of_a_topic_that_it_does_not_subscribe_to(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """By the list that it was given it would claim every topic of the group."""
    for topic in ("t0", "t2"):
        await create_topic(wire, topic, QUEUES)
    ours, one = await connect(node.address), await connect(node.address)
    await joins(ours, "a", "t0", strategy="AVG")
    await joins(one, "c", "t2")
    await eventually(lambda: is_settled(node, 2))
    assert await members(one) == ["c"]
    await joins(await connect(node.address), "b", "t0", "t2")
    await eventually(lambda: is_settled(node, 3))
    assert [place for place in drain_of(node.broker).moving if place[0] == "t0"] == []
    assert not node.broker.groups.obtain("g").is_drained("t0", 3)


# Foreign members that are notified of a change late, as plain frames.


TOLD = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


async def told_of_a_newcomer(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c1 has handled queue 1, which is c2's now, and was notified. Returns c2's connection."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    await handled(wire, 1, 1)
    await wire.request(TOLD)
    return two


async def gets_nothing(wire: Wire) -> bool:
    """Whether a pull of queue 1 gets nothing, though a message is there."""
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    return answer.code == ResponseCode.PULL_NOT_FOUND


async def test_who_has_not_asked_since_it_was_notified_is_notified_again_and_gets_nothing(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """By the list that it has it would read a queue that another member reads."""
    two = await told_of_a_newcomer(node, wire, connect)
    await send(two, b"later", queue=1)
    node.clock.advance(LIMITS.drained_wait_s)
    await wire.request(TOLD)
    assert await gets_nothing(wire)
    assert await members(wire) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)
    assert node.broker.groups.obtain("g").drain is None


async def test_who_is_notified_in_the_midst_of_its_rebalance_gets_nothing_of_what_it_reads_on(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Apache's client asks once for each topic, and drops queues of that topic. This one is given the new list for u and for
    retries only, and has not received the notification."""
    two = await connect(node.address)
    for topic in "tu":
        await create_topic(wire, topic, 2)
    await joins(wire, "c1", "t", "u")
    assert await members(wire) == ["c1"]
    await joins(two, "c2", "t", "u")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for _ in range(2):  # it is asked how far it is, and given up
        node.clock.advance(LIMITS.drain_limit_s / 2)
    for _ in ("u", "retries"):
        assert await members(wire) == ["c1", "c2"]
    await send(two, b"later", queue=1)
    node.clock.advance(DROPPED_AFTER_S)
    assert await gets_nothing(wire)
    wire.requests.clear()
    node.clock.advance(LIMITS.drained_wait_s - DROPPED_AFTER_S)
    await wire.request(TOLD)
    assert await gets_nothing(wire)
    for _ in ("t", "u", "retries"):
        assert await members(wire) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)
    assert node.broker.groups.obtain("g").drain is None


async def test_who_never_asks_is_believed_in_the_end_to_allocate_in_its_own_way(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await told_of_a_newcomer(node, wire, connect)
    await send(two, b"later", queue=1)
    for _ in range(TOLD_AGAIN):
        node.clock.advance(LIMITS.drained_wait_s)
        assert await gets_nothing(wire)
    node.clock.advance(LIMITS.drained_wait_s)
    assert not await gets_nothing(wire)


# Drains of foreign members that take long, as plain frames: each queue moves on its own.


async def moved_between_busy_members(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c1 read queues 0 and 1, c2 queues 2 and 3, with a message of each in a handler; c0 has joined. c1 loses its queues to
    c0, and gets queue 2 of c2, which keeps queue 3. Returns c2's connection."""
    await create_topic(wire, "t", 4)
    two = await connect(node.address)
    await join(wire, "c1")
    await join(two, "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for member, queues in ((wire, (0, 1)), (two, (2, 3))):
        assert await members(member) == ["c1", "c2"]
        for queue in queues:
            await send(wire, queue=queue)
            assert (await member.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    await join(await connect(node.address), "c0")
    await eventually(lambda: members_of(node) == 3 and not drain_of(node.broker).is_finding)
    return two


async def handled_long_drains(wire: Wire, queue: int, offset: int) -> None:
    """A pull that waits for nothing."""
    header = pull(queue=queue, offset=offset, flags=FLAGS | 0x1, commit_offset=offset, suspend_timeout_millis=1)
    await wire.call(RequestCode.PULL_MESSAGE, header)


async def told_of_itself(node: Node, wire: Wire) -> None:
    node.clock.advance(LIMITS.bridged_after_s)
    async with asyncio.timeout(60):
        while await members(wire) != ["c1"]:
            await wire.request(TOLD)


async def test_a_queue_moves_though_its_next_reader_is_drained_of_others(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await moved_between_busy_members(node, wire, connect)
    assert await members(wire) == ["c1", "c2"], "what it had"
    await told_of_itself(node, wire)
    await handled_long_drains(two, 2, 1)
    await send(two, b"later", queue=2)
    fresh = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=2, offset=1, flags=FLAGS))
    assert [record.body for record in decode_records(fresh.body)] == [b"later"]
    late = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=0, offset=1, flags=FLAGS))
    assert late.code == ResponseCode.PULL_NOT_FOUND
    for queue in (0, 1):
        assert node.broker.groups.obtain("g").is_drained("t", queue), "its handlers run"
        await handled_long_drains(wire, queue, 1)
    assert sorted(await members(wire)) == ["c0", "c1", "c2"], "it is notified of all when it has handled what it loses"
    parked = pull(queue=3, flags=FLAGS, suspend_timeout_millis=1)
    assert (await wire.call(RequestCode.PULL_MESSAGE, parked)).code == ResponseCode.PULL_NOT_FOUND, "until it drops it"


async def test_a_reader_that_progresses_for_very_long_holds_up_its_own_queue_only(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    draining = node.broker.draining
    node.clock.advance(1.5)
    await join(await connect(node.address), "c9")  # 1 is c1's own again, 2 is c2's, and 3 is not
    await eventually(lambda: members_of(node) == 4 and not drain_of(node.broker).is_finding)
    began_s = node.clock.monotonic_s()
    drain = drain_of(node.broker)
    assert sorted(place for places in drain.waiting.values() for place in places) == [("t", 0), ("t", 3)]
    while node.clock.monotonic_s() < began_s + LIMITS.drain_max_s - 1.0:
        for session in list(drain.waiting):
            draining.record_progress(node.broker.groups.obtain("g"), session)
        node.clock.advance(LIMITS.drain_limit_s / 4)
    assert sorted(place for places in drain.waiting.values() for place in places) == [("t", 3)]
    await handled_long_drains(two, 3, 1)
    assert not node.broker.groups.obtain("g").is_drained("t", 3)


async def test_a_reader_that_is_busy_with_a_queue_that_it_keeps_is_waited_for(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Java's handlers take messages in the order in which they were pulled, of whichever queue."""
    two = await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    for queue in (0, 1):
        await handled_long_drains(wire, queue, 1)
    held = two.send(RequestCode.PULL_MESSAGE, pull(queue=3, offset=1, flags=FLAGS))
    await eventually(lambda: node.broker.held_pulls.count == 1)
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert (await two.answer(held)).code == ResponseCode.PULL_NOT_FOUND, "it is asked how far it is"
    await handled_long_drains(two, 3, 1)
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert node.broker.groups.obtain("g").is_drained("t", 2), "its handlers run"
    node.clock.advance(LIMITS.drain_limit_s / 2)
    assert not node.broker.groups.obtain("g").is_drained("t", 2)


async def test_a_reader_that_stands_is_not_waited_for_because_another_one_continues(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await moved_between_busy_members(node, wire, connect)
    await told_of_itself(node, wire)
    draining = node.broker.draining
    (one,) = [session for session, places in drain_of(node.broker).waiting.items() if ("t", 0) in places]
    for _ in range(9):
        draining.record_progress(node.broker.groups.obtain("g"), one)
        node.clock.advance(LIMITS.drain_limit_s / 4)
    assert node.broker.groups.obtain("g").is_drained("t", 0)
    assert not node.broker.groups.obtain("g").is_drained("t", 2)


async def test_routes_that_take_long_to_find_are_waited_for(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reading(node, wire)
    find, looked = node.broker.name_servers.find_route, []

    async def far(topic: str) -> Route | None:
        node.clock.advance(0.3 * LIMITS.drain_limit_s)
        looked.append(drain_of(node.broker).is_finding)
        return await find(topic)

    monkeypatch.setattr(node.broker.draining.allotment, "routes", SimpleNamespace(find_route=far))
    for topic in ("u", "v", "w"):
        await create_topic(wire, topic, 1)
    two = await connect(node.address)
    subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in ("t", "u", "v", "w"))
    body = encode_heartbeat(Heartbeat("c2", (ConsumerData("g", subscriptions=subscriptions),)))
    assert (await two.call(RequestCode.HEART_BEAT, body=body)).code == 0
    await eventually(lambda: len(looked) == 4)
    assert all(looked), "nobody is notified before it is known what moves"


async def test_a_pull_of_who_has_left_does_not_count_as_the_next_readers(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    gated = two.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=0, flags=FLAGS))
    await eventually(lambda: bool(drain_of(node.broker).gated))
    await two.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "g"})
    assert (await two.answer(gated)).code == ResponseCode.PULL_NOT_FOUND
    group = node.broker.groups.obtain("g")
    assert node.broker.groups.queue("g", "t", 1).reader in group.members


# A process with two groups has one connection to a broker: what it says in one group is not said in the other.


async def test_a_held_pull_of_another_group_says_nothing_of_this_one(node: Node, wire: Wire, connect: Connect) -> None:
    """A process with two groups has one connection. One group has handled all of queue 1, the other has not."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    of_both = tuple(ConsumerData(name, subscriptions=(parse_subscription("t", "*", version=1),)) for name in ("g", "h"))
    beat = bodies.encode_heartbeat(Heartbeat("c1", of_both))
    assert (await wire.call(RequestCode.HEART_BEAT, body=beat)).code == 0
    assert [item.name for item in node.broker.groups] == ["g", "h"]
    idle = pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1) | {"consumerGroup": "h"}
    held = wire.send(RequestCode.PULL_MESSAGE, idle)
    busy = wire.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    (connection,) = group_of(node).members
    await eventually(lambda: len(node.broker.held_pulls.of(connection)) == 2)
    await join(await connect(node.address), "c2")
    assert (await wire.answer(busy)).code == ResponseCode.PULL_NOT_FOUND
    assert node.broker.groups.obtain("g").is_drained("t", 1), "its handlers run"
    assert await members(wire) == ["c1"]
    await send(wire, b"later", queue=1)
    assert [record.body for record in decode_records((await wire.answer(held)).body)] == [b"later"], "it was held on"


async def test_a_connection_is_one_member_of_a_group(node: Node, wire: Wire) -> None:
    """Pulls carry no client id, so two ids of one group on one connection look the same. A second id needs a connection of
    its own, and the refusal says so."""
    await join(wire, "c1")
    refused = await beat(wire, "c2")
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "this connection is the member c1 of the group g" in (refused.remark or "")
    assert await members(wire) == ["c1"]
    assert (await beat(wire, "c2", group="h")).code == 0, "each group has its own members"
    assert (await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})).code == 0
    assert (await beat(wire, "c2")).code == 0
    assert await members(wire) == ["c2"]


async def test_a_connection_that_replaces_another_reads_on_for_it(node: Node, wire: Wire, connect: Connect) -> None:
    """A network may drop a connection without a word. The client comes back by another one, and its handlers still have
    messages of the first: nobody else gets these queues meanwhile."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    again = await connect(node.address)
    await join(again, "c1")
    assert await members(again) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    await wire.close()
    await eventually(lambda: len(group_of(node).members) == 2)
    assert node.broker.groups.obtain("g").is_drained("t", 1), "its handlers run"
    await send(two, b"later", queue=1)
    busy = await again.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert busy.code == ResponseCode.PULL_NOT_FOUND, "nothing new while its handlers run"
    handled = pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1)
    assert (await again.call(RequestCode.PULL_MESSAGE, handled)).code == ResponseCode.PULL_NOT_FOUND
    await eventually(lambda: not node.broker.groups.obtain("g").is_drained("t", 1))
    assert await members(again) == ["c1", "c2"]


def group_of(node: Node) -> ConsumerGroup:
    return node.broker.groups.obtain("g")


# A restarted broker does not know Apache's members until their next heartbeat. Their queues stay theirs until then.


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


@pytest.mark.parametrize("pulls", [True, False])
async def test_queue_stays_reserved_for_its_reader_from_before_as_long_as_that_pulls_or_for_20_s(
    nodes: Nodes, connect: Connect, pulls: bool
) -> None:
    node = await nodes.start()
    await reading(node, await connect(node.address))
    await node.stop()
    again = await nodes.start(port=int(node.address.split(":")[1]), clock=MovableClock(stands=True))
    ours, back = await one_of_ours(again, connect), await connect(again.address)
    for _ in range(2):
        again.clock.advance(0.75 * HANDOVER_LEASE_S)
        if pulls:
            back.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=SUSPEND, sub_version=1))
            await back.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert bool(await locks(ours, "c2", 1)) is not pulls


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


async def test_a_client_with_an_old_claim_is_taken_for_the_reader_of_most_of_its_queues(
    nodes: Nodes, connect: Connect
) -> None:
    """c1 was not notified that c3 joined, and claims its queue, too."""
    node = await nodes.start()
    first, third = await connect(node.address), await connect(node.address)
    await create_topic(first, "t", 3)
    await join(first, "c1")
    await join(third, "c3")
    await eventually(lambda: not node.broker.draining.is_pending("g"))
    for wire, queue in ((first, 0), (first, 1), (third, 2)):
        await send(wire, queue=queue)
        assert (await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    await node.stop()
    again = await nodes.start(port=int(node.address.split(":")[1]))
    back = await connect(again.address)
    _, asked = await pulls(back, 2)
    report(back, asked, 0, 1, 2)
    await eventually(lambda: ids(again) == ["c1"])


async def test_a_client_that_was_not_the_reader_from_before_gets_nothing_of_its_queue(
    again: Node, connect: Connect
) -> None:
    stranger = await connect(again.address)
    waits, asked = await pulls(stranger, 1)
    report(stranger, asked)
    assert (await stranger.answer(waits)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    await join(stranger, "c3")
    await eventually(lambda: not drain_of(again.broker).is_finding)
    pulled = pull(queue=1, flags=FLAGS, suspend_timeout_millis=1)
    assert (await stranger.call(RequestCode.PULL_MESSAGE, pulled)).code == ResponseCode.PULL_NOT_FOUND


async def test_a_client_without_a_heartbeat_gets_no_member_list(node: Node, wire: Wire, connect: Connect) -> None:
    """A list without itself would make it drop its queues while its handlers run. Java's client keeps them after an error."""
    await join(wire, "c1")
    assert await members(wire) == ["c1"]
    stranger = await connect(node.address)
    answer = await stranger.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no consumer for this group, g")


async def test_the_heartbeat_says_who_a_member_is(again: Node, connect: Connect) -> None:
    stranger = await connect(again.address)
    _, asked = await pulls(stranger, 1)
    report(stranger, asked, 0, 1)
    await eventually(lambda: ids(again) == ["c1"])
    await join(stranger, "c9")
    assert ids(again) == ["c9"]
