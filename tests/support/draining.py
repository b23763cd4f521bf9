"""Foreign members that read, as plain frames."""

from __future__ import annotations

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.groups.stages import Drain
from rocketlet.protocol import bodies, group_bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue, parse_subscription, retry_topic

from ..conftest import Node, Wire, create_topic
from .requests import SUBSCRIBED, SUSPEND, join, pull, send

FLAGS = SUBSCRIBED | SUSPEND


def drain_of(broker: BrokerController) -> Drain:
    """The change of the group that not all members know yet."""
    drain = broker.groups.obtain("g").drain
    assert drain is not None
    return drain


async def reading(node: Node, wire: Wire) -> None:
    """c1 reads both queues of t, with a message of each in its handlers."""
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    for queue in range(2):
        await send(wire, queue=queue)
        assert (await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=FLAGS))).code == 0
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)  # c1 itself joined


async def joins(wire: Wire, client_id: str, *topics: str, strategy: str = "") -> None:
    """As Apache's clients do: each subscribes to the group's retry topic, too."""
    subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in (*topics, retry_topic("g")))
    data = ConsumerData("g", subscriptions=subscriptions, strategy=strategy)
    assert (
        await wire.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat(client_id, (data,))))
    ).code == 0


async def handled(wire: Wire, queue: int, offset: int) -> None:
    """Commit an offset by a pull that does not wait for messages."""
    header = pull(queue=queue, offset=offset, flags=FLAGS | 0x1, commit_offset=offset, suspend_timeout_millis=1)
    await wire.call(RequestCode.PULL_MESSAGE, header)


def members_of(node: Node) -> int:
    group = node.broker.groups.get("g")
    return len(group.members) if group else 0


async def locks(wire: Wire, client_id: str, queue_id: int) -> bool:
    """Whether one of ours gets the lock that it asks for."""
    request = LockRequest(client_id, "g", (Queue("t", "broker-a", queue_id),), True)
    answer = await wire.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
    return bool(group_bodies.decode_locked(answer.body))
