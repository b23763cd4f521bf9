"""The bodies of membership: locks, member lists, assignments, filters; fields that are ours are ignored by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
from msgspec import field as wire

from .bodies import MESSAGE_MODELS, encode_subscription, queue_json, queue_of, read_enum
from .queue import Queue
from .schema import Enum, Expression, Int, Long, QueueCount, QueueList, QueueShape, Shape, Text, answers, reads
from .subscription import Subscription


@dataclass(frozen=True, slots=True)
class LockRequest:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. The rest is ours. `handover`: the lock is ownership, freed when the socket closes.
    `offsets`: committed before a queue is unlocked, or while it is renewed."""

    client_id: str
    group: str
    queues: tuple[Queue, ...]
    handover: bool = False
    epochs: Mapping[Queue, int] = field(default_factory=dict)
    offsets: Mapping[Queue, int] = field(default_factory=dict)


def encode_lock_request(request: LockRequest) -> bytes:
    return orjson.dumps(
        {
            "clientId": request.client_id,
            "consumerGroup": request.group,
            "handover": request.handover,
            "mqSet": [
                queue_json(queue)
                | ({"epoch": request.epochs[queue]} if queue in request.epochs else {})
                | ({"offset": request.offsets[queue]} if queue in request.offsets else {})
                for queue in request.queues
            ],
        }
    )


class LockedShape(QueueShape):
    epoch: Long | None = None
    offset: Long | None = None


class LockShape(Shape):
    client_id: Text
    consumer_group: Text
    mq_set: QueueList[LockedShape] | None = None
    handover: bool | None = None


@reads("lock", LockShape)
def decode_lock_request(data: LockShape) -> LockRequest:
    items = data.mq_set or ()
    return LockRequest(
        data.client_id,
        data.consumer_group,
        tuple(map(queue_of, items)),
        bool(data.handover),
        {queue_of(item): item.epoch for item in items if item.epoch is not None},
        {queue_of(item): item.offset for item in items if item.offset is not None},
    )


def encode_locked(epochs: Mapping[Queue, int], offsets: Mapping[Queue, int] | None = None) -> bytes:
    """LOCK_BATCH_MQ's answer: the queues that were locked. Their epochs are ours, and so is how far the group has committed
    those that were taken anew, or what was committed by this request; others ignore them. UNLOCK_BATCH_MQ's from us: the
    queues that were unlocked."""
    known = offsets or {}
    locked = [
        queue_json(queue) | {"epoch": epoch} | ({"offset": known[queue]} if queue in known else {})
        for queue, epoch in epochs.items()
    ]
    return orjson.dumps({"lockOKMQSet": locked})


class LockAnswerShape(Shape):
    locked: list[LockedShape] | None = wire(name="lockOKMQSet", default=None)


@answers("lock answer", LockAnswerShape)
def decode_locked(data: LockAnswerShape) -> dict[Queue, int]:
    """The queues that were locked, with their epochs; 0 where the broker has none (Apache's)."""
    return {queue_of(item): item.epoch or 0 for item in data.locked or ()}


@answers("lock answer", LockAnswerShape)
def decode_committed(data: LockAnswerShape) -> dict[Queue, int]:
    """The group's offsets in queues that were locked, as far as the broker tells them."""
    return {queue_of(item): item.offset for item in data.locked or () if item.offset is not None}


def encode_members(client_ids: Iterable[str]) -> bytes:
    """GET_CONSUMER_LIST_BY_GROUP's answer."""
    return orjson.dumps({"consumerIdList": list(client_ids)})


class MemberListShape(Shape):
    consumer_id_list: list[str] | None = None


@answers("consumer list", MemberListShape)
def decode_members(data: MemberListShape) -> list[str]:
    return data.consumer_id_list or []


class BrokerShare(NamedTuple):
    """One member's queues of a topic, as a broker has shared them out: their numbers by broker, of so many queues and among
    so many members."""

    members: int
    queues: int
    numbers: dict[str, list[int]]

    def of(self, topic: str) -> list[Queue]:
        return sorted(Queue(topic, name, number) for name, numbers in self.numbers.items() for number in numbers)


def encode_shares(shares: Mapping[str, BrokerShare]) -> str:
    """One member's shares by topic."""
    return orjson.dumps({topic: tuple(share) for topic, share in shares.items()}).decode()


_Share = tuple[Int, Int, dict[str, QueueList[QueueCount]]]


@reads("shares", dict[str, _Share])
def decode_shares(data: dict[str, _Share]) -> dict[str, BrokerShare]:
    return {topic: BrokerShare(*share) for topic, share in data.items()}


def encode_seen_queues(counts: Mapping[str, int]) -> str:
    """How many queues of a topic members see, by broker."""
    return orjson.dumps(counts).decode()


@reads("seen queues", dict[str, QueueCount])
def decode_seen_queues(data: dict[str, int]) -> dict[str, int]:
    return data


class Place(NamedTuple):
    """A member's position among those of a topic, -1 for none, how many they are, and how many queues they see in all."""

    position: int
    members: int
    queues: int


def encode_places(places: Mapping[str, Place]) -> str:
    """One member's places by topic."""
    return orjson.dumps({topic: tuple(place) for topic, place in places.items()}).decode()


_Place = tuple[Int, Int, Int]


@reads("places", dict[str, _Place])
def decode_places(data: dict[str, _Place]) -> dict[str, Place]:
    return {topic: Place(*place) for topic, place in data.items()}


class AssignmentRequest(NamedTuple):
    """QUERY_ASSIGNMENT: whose share of which topic, by which strategy."""

    topic: str
    group: str
    client_id: str
    strategy: str
    message_model: str


class AssignmentShape(Shape):
    topic: Text
    consumer_group: Text
    client_id: Text
    strategy_name: Text | None = None
    message_model: Enum | None = None


@reads("assignment request", AssignmentShape)
def decode_assignment_request(data: AssignmentShape) -> AssignmentRequest:
    return AssignmentRequest(
        data.topic,
        data.consumer_group,
        data.client_id,
        data.strategy_name or "AVG",
        read_enum(data.message_model, MESSAGE_MODELS, "CLUSTERING"),
    )


def encode_assignment(queues: Iterable[Queue]) -> bytes:
    items = [{"attachments": {}, "messageQueue": queue_json(queue), "mode": "PULL"} for queue in queues]
    return orjson.dumps({"messageQueueAssignments": items})


class FilterShape(Shape):
    sub_string: Expression | None = None
    expression_type: Text | None = None


class ClientCheckShape(Shape):
    client_id: Text
    group: Text
    subscription_data: FilterShape | None = None


class ClientCheck(NamedTuple):
    """CHECK_CLIENT_CONFIG: whose filter, of which kind."""

    client_id: str
    group: str
    kind: str | None
    expression: str


@reads("client check", ClientCheckShape)
def decode_client_check(data: ClientCheckShape) -> ClientCheck:
    subscription = data.subscription_data or FilterShape()
    return ClientCheck(data.client_id, data.group, subscription.expression_type, subscription.sub_string or "")


def encode_client_check(client_id: str, group: str, subscription: Subscription) -> bytes:
    value = {"clientId": client_id, "group": group, "subscriptionData": encode_subscription(subscription)}
    return orjson.dumps(value)
