"""Groups with foreign members that subscribe to different topics, as plain frames: every queue is read by one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rocketlet.broker.config import LIMITS
from rocketlet.broker.messages.held_pulls import Until
from rocketlet.protocol import group_bodies
from rocketlet.protocol.allocation import AVG
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue, retry_topic, sorted_ids

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.draining import drain_of, joins
from ...support.requests import SUBSCRIBED, SUSPEND, members, pull, send

FLAGS = SUBSCRIBED | SUSPEND
QUEUES = 4
RETRIES = retry_topic("g")
COMMITS = FLAGS | PULL_COMMIT_OFFSET


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
    header = pull(topic, queue=queue, offset=offset, flags=FLAGS, suspend_timeout_millis=1)
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
        group = self.node.broker.groups.get("g")
        assert group is not None
        index, count = group.place("a", topic)
        share = AVG.allocate_at(index, count, range(self.queues(topic))) if index >= 0 else []  # type: ignore[arg-type]
        return iter([*found, *(["a"] if queue in share else [])])  # type: ignore[comparison-overlap]

    def queues(self, topic: str) -> int:
        return self.node.broker.topics.queues_of(topic)

    def topics(self, client_id: str) -> set[str]:
        group = self.node.broker.groups.get("g")
        assert group is not None
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
    opaque = wire.send(RequestCode.PULL_MESSAGE, pull(topic, queue=queue, flags=FLAGS))
    held = group.node.broker.held_pulls
    await eventually(lambda: any(pull.until is Until.TURN for pulls in held._of.values() for pull in pulls))
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
