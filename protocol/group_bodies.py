"""The bodies of membership: locks, member lists, assignments; with Rocketlet's own fields, which others ignore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from .bodies import MESSAGE_MODELS, Queue, queue_json, read_enum, read_queue, reads


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


@reads("lock")
def decode_lock_request(data: Any) -> LockRequest:
    items = data.get("mqSet") or ()
    return LockRequest(
        client_id=str(data["clientId"]),
        group=str(data["consumerGroup"]),
        queues=tuple(map(read_queue, items)),
        handover=bool(data.get("handover")),
        epochs={read_queue(item): int(item["epoch"]) for item in items if "epoch" in item},
    )


def encode_locked(epochs: Mapping[Queue, int]) -> bytes:
    """LOCK_BATCH_MQ's answer: the queues that were locked; the epoch of each is ours, and ignored by others."""
    return orjson.dumps({"lockOKMQSet": [queue_json(queue) | {"epoch": epoch} for queue, epoch in epochs.items()]})


@reads("lock answer")
def decode_locked(data: Any) -> dict[Queue, int]:
    """The queues that were locked, with their epochs; 0 where the broker has none (Apache's)."""
    return {read_queue(item): int(item.get("epoch", 0)) for item in data.get("lockOKMQSet") or ()}


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


@reads("consumer list")
def decode_members(data: Any) -> MemberList:
    return MemberList(
        [str(item) for item in data.get("consumerIdList") or ()],
        {Queue(topic, name, int(number)): owner for topic, name, number, owner in data.get("owners") or ()},
        frozenset(data.get("strategies") or ()),
    )


class AssignmentRequest(NamedTuple):
    """QUERY_ASSIGNMENT: whose share of which topic, by which strategy."""

    topic: str
    group: str
    client_id: str
    strategy: str
    message_model: str


@reads("assignment request")
def decode_assignment_request(data: Any) -> AssignmentRequest:
    return AssignmentRequest(
        str(data["topic"]),
        str(data["consumerGroup"]),
        str(data["clientId"]),
        str(data.get("strategyName") or "AVG"),
        read_enum(data.get("messageModel"), MESSAGE_MODELS, "CLUSTERING"),
    )


def encode_assignment(queues: Iterable[Queue]) -> bytes:
    items = [{"attachments": {}, "messageQueue": queue_json(queue), "mode": "PULL"} for queue in queues]
    return orjson.dumps({"messageQueueAssignments": items})
