"""Foreign members, as plain frames: a queue that moves is drained before anybody is notified."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rocketlet.broker.config import DRAIN_ROUNDS, LIMITS
from rocketlet.client import rebalanced
from rocketlet.protocol import group_bodies
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.draining import FLAGS, drain_of, handled, locks, members_of, reading
from ...support.requests import SUBSCRIBED, join, members, pull, routes_known_later, send

pytestmark = pytest.mark.limits(drain_limit_s=3600.0)  # no drain ends because the machine is busy


async def test_a_reader_ends_before_the_next_one_is_notified(node: Node, wire: Wire, connect: Connect) -> None:
    await reading(node, wire)
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    assert await members(two) == ["c1", "c2"], "the newcomer loses nothing, and is notified immediately"
    assert await members(wire) == ["c1"], "the reader continues with the list that it had"
    waits = two.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=0, flags=FLAGS))
    await send(wire, b"later", queue=1)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "1"), (
        "nothing new while its handlers run"
    )
    assert not [frame for frame in wire.requests if frame.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED]
    assert (
        await wire.call(RequestCode.PULL_MESSAGE, pull(queue=0, offset=1, flags=SUBSCRIBED))
    ).code == ResponseCode.PULL_NOT_FOUND
    handled = pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1)
    assert (await wire.call(RequestCode.PULL_MESSAGE, handled)).code == ResponseCode.PULL_NOT_FOUND
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]
    let_on = await two.answer(waits)
    assert (let_on.code, let_on.ext["nextBeginOffset"], let_on.body) == (ResponseCode.PULL_NOT_FOUND, "1", b""), (
        "not what c1 has handled"
    )
    fresh = await two.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert [record.body for record in decode_records(fresh.body)] == [b"later"]
    assert node.broker.offsets.get("g", "t", 1) == 1
    assert (await two.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))).code == 0
    assert node.broker.locks.double_readers == 0


async def test_long_handlers_are_waited_for_only_so_long(node: Node, wire: Wire, connect: Connect) -> None:
    await reading(node, wire)
    two = await connect(node.address)
    await join(two, "c2")
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1"]
    node.clock.advance(LIMITS.drain_max_s)
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]
    assert await members(two) == ["c1", "c2"]


async def test_one_of_ours_gets_the_lock_when_the_foreign_reader_has_ended(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await reading(node, wire)
    ours = await connect(node.address)
    await join(ours, "c2", strategy="AVG")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    assert not await locks(ours, "c2", 1)
    await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS | 0x1, commit_offset=1))
    assert await locks(ours, "c2", 1)


@pytest.mark.limits(owners_refresh_delay_s=0.0)
async def test_one_of_ours_gets_the_lock_of_what_a_foreign_member_read_before_the_topic_grew(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """The second of two queues is c2's, and c1's if there are four. c2 releases it when it sees all, without a request."""
    await create_topic(wire, "t", 2)
    await join(wire, "c2")
    ours = await connect(node.address)
    await join(ours, "c1", strategy="AVG")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    assert sorted(await members(wire)) == ["c1", "c2"]
    await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, flags=SUBSCRIBED))
    assert not await locks(ours, "c1", 1), "c1 has not been notified that c2 is here"
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 4, 4, 6)))

    async def is_locked() -> bool:
        return bool(await locks(ours, "c1", 1))

    await eventually(is_locked)


@pytest.mark.limits(owners_refresh_delay_s=60.0)
async def test_owners_are_not_looked_for_at_every_lock_that_is_refused(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await create_topic(wire, "t", 1)
    await join(wire, "c1")
    assert await members(wire) == ["c1"]
    await wire.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED))
    ours = await connect(node.address)
    await join(ours, "c2", strategy="AVG")
    draining = node.broker.draining
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    looked: list[str] = []

    async def find_route(topic: str) -> None:
        looked.append(topic)

    draining.allotment.routes = SimpleNamespace(find_route=find_route)
    assert not await locks(ours, "c2", 0)
    assert looked == []
    node.clock.advance(60.0)
    for _ in range(2):
        assert not await locks(ours, "c2", 0)
    await eventually(lambda: bool(looked))
    assert looked == ["t"], "once"


async def test_a_change_has_a_number_that_never_repeats(node: Node, connect: Connect) -> None:
    """A drain that began for a group that ended counts for no other of its name."""
    numbers: set[int] = set()
    for _ in range(2):
        wire = await connect(node.address)
        await join(wire, "c1")
        numbers.add(node.broker.groups.obtain("g").change)
        await wire.close()
        await eventually(lambda: members_of(node) == 0)
    assert len(numbers) == 2


async def test_a_reader_that_dies_while_it_is_drained_holds_nothing_up(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await reading(node, wire)
    ours = await connect(node.address)
    await join(ours, "c2", strategy="AVG")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    await wire.close()
    await eventually(lambda: len(node.broker.groups.get("g").members) == 1)  # type: ignore[union-attr]
    assert not node.broker.groups.obtain("g").is_drained("t", 1)


async def test_a_foreign_member_continues_where_the_last_owner_of_a_lease_came(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await create_topic(wire, "t", 1)
    for number in range(8):
        await send(wire, b"%d" % number)
    await join(wire, "java")  # loads the offset, which is 0
    ours = await connect(node.address)
    await join(ours, "python", strategy="AVG")
    queue = Queue("t", "broker-a", 0)
    request = LockRequest("python", "g", (queue,), True)
    locked = await ours.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
    epoch = group_bodies.decode_locked(locked.body)[queue]
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 6, "epoch": epoch}
    assert (await ours.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    await ours.call(RequestCode.UNLOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
    late = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, late)).code == 16, "one-way, as Java sends it, or not"
    stale = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=FLAGS | 0x1, commit_offset=1))
    assert (stale.code, stale.ext["nextBeginOffset"], stale.body) == (ResponseCode.PULL_NOT_FOUND, "6", b""), (
        "no message that was handled"
    )
    assert node.broker.offsets.get("g", "t", 0) == 6
    fresh = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=6, flags=FLAGS | 0x1, commit_offset=6))
    assert fresh.code == 0
    assert [record.queue_offset for record in decode_records(fresh.body)] == [6, 7]
    admin = await connect(node.address)
    assert (await admin.call(RequestCode.UPDATE_CONSUMER_OFFSET, late)).code == 0, "an administrator may go back"
    assert node.broker.offsets.get("g", "t", 0) == 1


async def queue_1_moved(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c2 has joined, and both know: c1 has handled what it read of queue 1. Returns c2's connection."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 1))
    await handled(wire, 1, 1)
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]
    return two


async def test_who_reads_a_queue_follows_from_the_list_that_each_was_given(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Two changes in a row: c2 has its list and has not pulled yet, c1 has released its queue though it pulled last."""
    two, three = await queue_1_moved(node, wire, connect), await connect(node.address)
    assert await members(two) == ["c1", "c2"]
    await join(three, "c0")  # c0 gets queue 0, c1 queue 1, c2 nothing: both queues move
    await eventually(lambda: node.broker.groups.obtain("g").is_drained("t", 0))
    await eventually(lambda: not drain_of(node.broker).is_finding)
    drain = drain_of(node.broker)
    group = node.broker.groups.obtain("g")
    ids = {place: {group.members[peer].client_id for peer in peers} for place, peers in drain.moving.items()}
    assert ids == {("t", 0): {"c1"}, ("t", 1): {"c1", "c2"}}, (
        "c1 releases queue 1, and does not know that it is its own"
    )


async def test_who_releases_a_queue_gets_nothing_though_the_queue_is_its_own_again(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """By its last list c1 drops queue 1 with what it would get now, and somebody would handle that again."""
    two, three = await queue_1_moved(node, wire, connect), await connect(node.address)
    assert await members(two) == ["c1", "c2"]
    await join(three, "c0")  # c0 gets queue 0, c1 queue 1, c2 nothing
    await eventually(lambda: members_of(node) == 3 and not drain_of(node.broker).is_finding)
    await send(wire, b"later", queue=1)
    await handled(two, 1, 1)
    flags = FLAGS | 0x1
    late = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=flags, commit_offset=1))
    assert late.code == ResponseCode.PULL_NOT_FOUND
    await handled(wire, 0, 1)  # the rest of what it loses
    assert sorted(await members(wire)) == ["c0", "c1", "c2"]
    fresh = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=flags, commit_offset=1))
    assert [record.body for record in decode_records(fresh.body)] == [b"later"]


@pytest.mark.limits(drain_max_s=3600.0)
async def test_what_a_held_pull_says_is_not_asked_for_again(node: Node, wire: Wire, connect: Connect) -> None:
    """A member that another broker notified first has dropped the queue, so its released pull does not return."""
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    assert await members(wire) == ["c1"]
    held = [wire.send(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS)) for queue in range(2)]
    group = node.broker.groups.obtain("g")
    await eventually(lambda: [len(node.broker.held_pulls.of(member)) for member in group.members] == [2])
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    two = await connect(node.address)
    await join(two, "c2")
    assert (await wire.answer(held[1])).code == ResponseCode.PULL_NOT_FOUND
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]
    await send(two, queue=1)
    assert (await two.call(RequestCode.PULL_MESSAGE, pull(queue=1, flags=FLAGS))).code == 0


@pytest.mark.limits(drain_max_s=3600.0)
@pytest.mark.parametrize("dropped", [True, False])
async def test_a_queue_that_its_reader_has_dropped_is_not_waited_for(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """Another broker has notified it in between. It comes back to what it still reads, which is answered immediately."""
    monkeypatch.setattr("rocketlet.broker.groups.pulling.DRAINING_WAIT_S", 0.0)
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    held = [wire.send(RequestCode.PULL_MESSAGE, pull(queue=queue, offset=1, flags=FLAGS)) for queue in range(2)]
    for client_id in ("a", "b"):  # each gets a queue
        await join(await connect(node.address), client_id)
    for answer in held:
        assert (await wire.answer(answer)).code == ResponseCode.PULL_NOT_FOUND
    for _ in range(2 * DRAIN_ROUNDS):
        for queue in (1,) if dropped else (0, 1):
            answered = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, offset=1, flags=FLAGS))
            assert answered.code == ResponseCode.PULL_NOT_FOUND
    assert [node.broker.groups.obtain("g").is_drained("t", queue) for queue in range(2)] == [
        not dropped,
        True,
    ]


async def test_a_further_change_does_not_forget_who_still_handles_what_moves(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two, three = await connect(node.address), await connect(node.address)

    def knows_what_moves() -> bool:
        drain = node.broker.groups.obtain("g").drain
        return drain is not None and not drain.is_finding and drain.has(("t", 1))

    await join(two, "c2")
    await eventually(knows_what_moves)
    assert await members(two) == ["c1", "c2"], "it is notified that the queue is its own"
    await join(three, "c3")  # and gets no queue
    await eventually(lambda: members_of(node) == 3 and not drain_of(node.broker).is_finding)
    assert node.broker.groups.obtain("g").is_drained("t", 1), "c1 still handles messages of it"


async def test_nobody_is_notified_while_it_is_not_known_what_a_further_change_moves(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """A member notified then gets its old list, and would see the change only at its next timed rebalance."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    two, three = await connect(node.address), await connect(node.address)
    await join(two, "c2")
    await eventually(lambda: not drain_of(node.broker).is_finding)
    known = routes_known_later(node)
    await join(three, "c3")
    await eventually(lambda: len(drain_of(node.broker).kept) == 3)
    await handled(wire, 1, 1)
    known.set()
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2", "c3"]


@pytest.mark.limits(drain_limit_s=60.0, drain_max_s=3600.0, drained_wait_s=3600.0)
async def test_who_is_given_the_list_that_it_had_is_notified_again(node: Node, wire: Wire, connect: Connect) -> None:
    """It was notified because nobody knew for too long what moves, and asks when that is known."""
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    known = routes_known_later(node)
    await join(await connect(node.address), "c2")
    await eventually(lambda: len(drain_of(node.broker).kept) == 2)
    node.clock.advance(60.0)
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    known.set()
    await eventually(lambda: drain_of(node.broker).has(("t", 1)))
    assert await members(wire) == ["c1"]
    await handled(wire, 1, 1)
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await members(wire) == ["c1", "c2"]


async def test_a_further_change_gives_nothing_to_who_was_notified_and_has_not_released_yet(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two, three = (
        await queue_1_moved(node, wire, connect),
        await connect(node.address),
    )  # c1 releases the queue with its next commit
    await join(three, "c3")  # and gets no queue
    await eventually(lambda: members_of(node) == 3 and not drain_of(node.broker).is_finding)
    await send(wire, b"later", queue=1)
    late = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert late.code == ResponseCode.PULL_NOT_FOUND, "its former reader"
    assert (await two.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))).code == 0, "its new one"


async def two_members_and_one_queue(node: Node, wire: Wire, connect: Connect) -> Wire:
    """c1 and c2 are members, and six messages are in the queue. Returns c2's connection."""
    await create_topic(wire, "t", 1)
    for _ in range(6):
        await send(wire)
    two = await connect(node.address)
    await join(wire, "c1")
    await join(two, "c2")
    return two


async def test_who_does_not_read_a_queue_puts_nobody_back(node: Node, wire: Wire, connect: Connect) -> None:
    """A member that was to get a queue, and does not, says what it had loaded when it drops the queue."""
    two = await two_members_and_one_queue(node, wire, connect)
    flags = FLAGS | 0x1
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(offset=5, flags=flags, commit_offset=5))).code == 0
    late = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 4}
    refused = await two.call(RequestCode.UPDATE_CONSUMER_OFFSET, late)
    assert (refused.code, node.broker.offsets.get("g", "t", 0)) == (ResponseCode.NO_PERMISSION, 5)
    assert "does not read the queue" in (refused.remark or "")
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, late)).code == 0, "its reader may go back"
    assert node.broker.offsets.get("g", "t", 0) == 4


async def test_the_next_reader_continues_where_the_last_one_left(node: Node, wire: Wire, connect: Connect) -> None:
    """It has loaded its offset before the last one's handlers ended."""
    two = await two_members_and_one_queue(node, wire, connect)
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(offset=4, flags=FLAGS | 0x1, commit_offset=4))).code == 0
    done = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 5}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, done)).code == 0
    await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})
    stale = await two.call(RequestCode.PULL_MESSAGE, pull(offset=4, flags=FLAGS | 0x1, commit_offset=4))
    assert (stale.code, stale.ext["nextBeginOffset"], stale.body) == (ResponseCode.PULL_NOT_FOUND, "5", b"")
    fresh = await two.call(RequestCode.PULL_MESSAGE, pull(offset=5, flags=FLAGS | 0x1, commit_offset=5))
    assert [record.queue_offset for record in decode_records(fresh.body)] == [5]


async def test_a_change_comes_in_steps(node: Node, wire: Wire, connect: Connect) -> None:
    """A reader that is done is notified, though another one still handles what it read."""
    await create_topic(wire, "t", 4)
    two = await connect(node.address)
    await join(wire, "c1")
    assert await members(wire) == ["c1"]
    for queue in range(4):
        await send(wire, queue=queue)
    for queue in range(2):
        assert (await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    await join(two, "c2")
    await eventually(lambda: not drain_of(node.broker).is_finding)
    for queue in (2, 3):
        await handled(wire, queue, 0)
    assert await members(wire) == ["c1", "c2"]
    assert await members(two) == ["c1", "c2"]
    for queue in (2, 3):
        assert (await two.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    three = await connect(node.address)
    await join(three, "c0")  # 4 queues: 0 and 1 to c0, 2 to c1, 3 to c2
    await eventually(lambda: not drain_of(node.broker).is_finding)
    assert node.broker.groups.obtain("g").is_drained("t", 2)
    await handled(two, 2, 1)
    assert sorted(await members(two)) == ["c0", "c1", "c2"], "told"
    assert await members(wire) == ["c1", "c2"], "not notified: its handlers run"
    await handled(wire, 0, 1)
    assert await members(wire) == ["c1", "c2"]
    await handled(wire, 1, 1)
    assert sorted(await members(wire)) == ["c0", "c1", "c2"]
    assert not node.broker.groups.obtain("g").is_drained("t", 0)


async def test_rebalanced_is_right_for_members_that_lock_nothing(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    wire.send(RequestCode.PULL_MESSAGE, pull(queue=0, flags=FLAGS))
    with pytest.raises(TimeoutError, match="t@broker-a:1 has no owner"):
        await rebalanced(node.address, "g", timeout_s=1.0)
    assert (await members(wire)) == ["c1"]
    wire.send(RequestCode.PULL_MESSAGE, pull(queue=1, flags=FLAGS))
    assert await rebalanced(node.address, "g", members=1) == {"c1": 2}
    await send(wire, queue=1)
    two = await connect(node.address)
    await join(two, "c2")
    with pytest.raises(TimeoutError, match="still handle"):
        await rebalanced(node.address, "g", members=2, timeout_s=1.0)
    await handled(wire, 1, 1)
    assert await members(wire) == ["c1", "c2"]
    two.send(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=FLAGS))
    assert await rebalanced(node.address, "g", members=2) == {"c1": 1, "c2": 1}


async def test_a_member_that_pulls_is_a_reader_in_its_group_alone(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    await join(wire, "c1")
    for queue in range(4):
        await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=SUBSCRIBED))
    groups, locks = node.broker.groups, node.broker.locks
    (connection,) = groups.members_of("g")
    assert locks.reads(connection, groups.obtain("g"))
    assert not locks.reads(connection, groups.obtain("other"))
