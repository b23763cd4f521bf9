"""A member of more queues than one request to the broker may name."""

from __future__ import annotations

import pytest
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.member.membership import heartbeat_queues
from rocketlet.protocol import config, group_bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, decode_heartbeat, encode_heartbeat
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually

QUEUES = 10


async def test_it_locks_commits_and_hands_over_in_several_requests(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = group_bodies.encode_lock_request

    def counted(request: LockRequest) -> bytes:
        sizes.append(len(request.queues))
        return encode(request)

    monkeypatch.setattr(group_bodies, "encode_lock_request", counted)
    await create_topic(wire, "t", QUEUES)
    seen: list[bytes] = []

    async def handle(message: Message) -> None:
        seen.append(message.body)

    async with Consumer(node.address, "g", "t", handle, start="first", limits=ClientLimits(lock_queues=4)) as consumer:
        await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES)
        async with Producer(node.address) as producer:
            for number in range(4 * QUEUES):
                await producer.send("t", b"%d" % number)
        await eventually(lambda: len(seen) == 4 * QUEUES)
        await consumer.commit()
        assert sum(node.broker.offsets.of("g", "t").values()) == 4 * QUEUES
    assert max(sizes) <= 4
    assert len(sizes) > 3
    assert node.broker.groups.owners("g") == {}, "it released all when it left"


def test_what_is_asked_in_one_request_is_what_brokers_take() -> None:
    queues = tuple(Queue("t" * 127, "b" * 100, number) for number in range(CLIENT_LIMITS.lock_queues))
    numbers = dict.fromkeys(queues, 2**62)
    body = group_bodies.encode_lock_request(LockRequest("c" * 100, "g" * 100, queues, True, numbers, numbers))
    assert len(body) <= config.MAX_JSON_BYTES
    assert len(queues) <= config.MAX_REQUEST_QUEUES


@pytest.mark.parametrize(("topic", "broker", "count"), [("t", "b", 8192), ("t" * 127, "b" * 100, 2000)])
def test_a_heartbeat_names_no_more_queues_than_brokers_take(topic: str, broker: str, count: int) -> None:
    """One that is refused costs its member all of its queues: without a heartbeat no lock is renewed."""
    owned = {Queue(topic, broker, number) for number in range(10_000)}
    told = heartbeat_queues(owned)
    assert count <= len(told) < len(owned)
    beat = Heartbeat("c", (ConsumerData("g", assigned=told),))
    assert decode_heartbeat(encode_heartbeat(beat)) == beat
    few = sorted(owned)[:3]
    assert heartbeat_queues(few) == tuple(few)
    assert heartbeat_queues(()) == ()


async def test_a_member_reports_some_of_its_queues_and_keeps_them_all(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", QUEUES)

    def told() -> list[int]:
        group = node.broker.groups.get("g")
        return [len(member.data.assigned) for member in group.members.values()] if group is not None else []

    async with Consumer(
        node.address, "g", "t", lambda message: None, limits=ClientLimits(heartbeat_queues=4)
    ) as consumer:
        await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES)
        await eventually(lambda: told() == [4])
