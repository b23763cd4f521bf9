"""The bodies of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ, with Rocketlet's own fields, which others ignore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from .bodies import Queue, queue_json, read_queue, reads


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
