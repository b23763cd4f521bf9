"""A member of more queues than one request to the broker may name."""

from __future__ import annotations

import pytest
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client import config as client_config
from rocketlet.protocol import config, group_bodies
from rocketlet.protocol.bodies import Queue
from rocketlet.protocol.group_bodies import LockRequest

from ..conftest import Node, Wire, create_topic, eventually

QUEUES = 10


async def test_it_locks_commits_and_hands_over_in_several_requests(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_config, "LOCK_QUEUES", 4)
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

    async with Consumer(node.address, "g", "t", handle, start="first") as consumer:
        await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES)
        async with Producer(node.address) as producer:
            for number in range(4 * QUEUES):
                await producer.send("t", b"%d" % number)
        await eventually(lambda: len(seen) == 4 * QUEUES)
        await consumer.commit()
        assert sum(node.broker.offsets.of("g", "t").values()) == 4 * QUEUES
    assert max(sizes) <= 4
    assert len(sizes) > 3
    assert node.broker.locks.owners("g") == {}, "it let go of all when it left"


def test_what_is_asked_in_one_request_is_what_brokers_take() -> None:
    queues = tuple(Queue("t" * 127, "b" * 100, number) for number in range(client_config.LOCK_QUEUES))
    numbers = dict.fromkeys(queues, 2**62)
    body = group_bodies.encode_lock_request(LockRequest("c" * 100, "g" * 100, queues, True, numbers, numbers))
    assert len(body) <= config.MAX_JSON_BYTES
    assert len(queues) <= config.MAX_REQUEST_QUEUES
