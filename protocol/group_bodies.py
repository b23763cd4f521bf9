"""The bodies of membership: locks, member lists, assignments, filters; fields that are ours are ignored by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from msgspec import field as wire

from .bodies import MESSAGE_MODELS, Queue, encode_subscription, queue_json, queue_of, read_enum
from .schema import Enum, Expression, Int, Long, QueueCount, QueueList, QueueShape, Shape, Text, answers, reads
from .subscription import Subscription


@dataclass(frozen=True, slots=True)
class LockRequest:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. `handover` is ours: the lock is ownership, freed when the socket closes."""

    client_id: str
    group: str
    queues: tuple[Queue, ...]
    handover: bool = False
    epochs: Mapping[Queue, int] = field(default_factory=dict)


def encode_lock_request(request: LockRequest) -> bytes:
    return orjson.dumps(
        {
            "clientId": request.client_id,
            "consumerGroup": request.group,
            "handover": request.handover,
            "mqSet": [
                queue_json(queue) | ({"epoch": request.epochs[queue]} if queue in request.epochs else {})
                for queue in request.queues
            ],
        }
    )


class LockedShape(QueueShape):
    epoch: Long | None = None


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
    )


def encode_locked(epochs: Mapping[Queue, int]) -> bytes:
    """LOCK_BATCH_MQ's answer: the queues that were locked. Their epochs are ours; others ignore them."""
    return orjson.dumps({"lockOKMQSet": [queue_json(queue) | {"epoch": epoch} for queue, epoch in epochs.items()]})


class LockAnswerShape(Shape):
    locked: list[LockedShape] | None = wire(name="lockOKMQSet", default=None)


@answers("lock answer", LockAnswerShape)
def decode_locked(data: LockAnswerShape) -> dict[Queue, int]:
    """The queues that were locked, with their epochs; 0 where the broker has none (Apache's)."""
    return {queue_of(item): item.epoch or 0 for item in data.locked or ()}


class MemberList(NamedTuple):
    """GET_CONSUMER_LIST_BY_GROUP's answer. What owns which queue of the broker, and the strategies of the members, stand
    there only if a Rocketlet broker was asked for "owners"."""

    client_ids: list[str]
    owners: dict[Queue, str]
    strategies: frozenset[str]


def encode_members(members: MemberList) -> bytes:
    value: dict[str, Any] = {"consumerIdList": members.client_ids}
    if members.strategies:
        value["owners"] = [[*queue, client_id] for queue, client_id in members.owners.items()]
        value["strategies"] = sorted(members.strategies)
    return orjson.dumps(value)


class MemberListShape(Shape):
    consumer_id_list: list[str] | None = None
    owners: list[tuple[str, str, int, str]] | None = None
    strategies: list[str] | None = None


@answers("consumer list", MemberListShape)
def decode_members(data: MemberListShape) -> MemberList:
    owners = {Queue(topic, name, number): owner for topic, name, number, owner in data.owners or ()}
    return MemberList(data.consumer_id_list or [], owners, frozenset(data.strategies or ()))


def encode_seen_queues(counts: Mapping[str, int]) -> str:
    """How many queues of a topic members see, by broker."""
    return orjson.dumps(counts).decode()


@reads("seen queues", dict[str, QueueCount])
def decode_seen_queues(data: dict[str, int]) -> dict[str, int]:
    return data


def encode_places(places: Mapping[str, tuple[int, int]]) -> str:
    """By topic, which of how many members one is."""
    return orjson.dumps(places).decode()


@reads("places", dict[str, tuple[Int, Int]])
def decode_places(data: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return data


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
