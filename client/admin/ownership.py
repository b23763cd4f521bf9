"""Tells who owned which queue and when, and how queues changed hands: from the events that Rocketlet's brokers keep, or on
Apache's from one look after another.

An event is `{"ms", "event", "client", "broker", ...}`, with `topic`, `queue` and `epoch` where it is about a lease. Each
lease is one owner: it begins with `locked` and ends with one of `ENDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from ...protocol.queue import Queue

Event = Mapping[str, Any]

ENDS: Final = frozenset(("unlocked", "lock lost", "lock expired"))
CAUSES: Final = frozenset(("joined", "left", "leaving", "closed", "expired", "subscribed"))
"""Events that make a group share its queues anew."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """One member had one queue from `begin_ms` to `end_ms`; `queue` is `broker:number`. `begin_ms` is 0 if it had the queue
    before the first event that is known."""

    queue: str
    owner: str
    begin_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """A queue that went from one owner to the next. Times are ms since the epoch, None for events that have not happened.

    - `cause`, `cause_client`, `cause_ms`: the change of the group before it, such as `joined`. Empty if none is known.
    - `end`: how the old owner's lease ended: `unlocked` (it let go), `lock lost` (its connection closed), `lock expired`.
    """

    queue: Queue
    before: str
    after: str
    end: str
    ended_ms: int
    locked_ms: int
    cause: str = ""
    cause_client: str = ""
    cause_ms: int | None = None
    pulled_ms: int | None = None
    committed_ms: int | None = None

    @property
    def took_ms(self) -> int:
        """The time from its cause, or else from the end of the old lease, to the new lease."""
        return self.locked_ms - (self.ended_ms if self.cause_ms is None else self.cause_ms)


def locked(reports: Iterable[Mapping[str, Any]]) -> dict[Queue, str]:
    """Client id by queue, from what Rocketlet's brokers say of a group."""
    return {
        Queue(item["topic"], item["brokerName"], item["queueId"]): str(item["clientId"])
        for report in reports
        for item in report["owners"]
    }


def changes(before: Mapping[Queue, str], after: Mapping[Queue, str], ms: int) -> list[dict[str, Any]]:
    """The events between two looks at who reads which queue, for brokers that tell none: as coarse as the looks are.
    The epoch only pairs a queue's begin with its end."""
    ended = [("unlocked", queue, owner) for queue, owner in before.items() if after.get(queue) != owner]
    begun = [("locked", queue, owner) for queue, owner in after.items() if before.get(queue) != owner]
    return [
        {
            "ms": ms, "event": event, "client": owner, "topic": queue.topic, "broker": queue.broker_name,
            "queue": queue.queue_id, "epoch": 0,
        }
        for event, queue, owner in (*ended, *begun)
    ]  # fmt: skip


def ownerships(
    events: Sequence[Event], topic: str, now_ms: int, owners: Mapping[Queue, str] = MappingProxyType({})
) -> list[Ownership]:
    """The ownerships by the brokers' events, oldest first, each with its broker's name. `owners`, of now, tell of leases
    that are older than the events that brokers keep."""
    open_since: dict[tuple[str, int], Ownership] = {}
    done: list[Ownership] = []
    for event in events:
        if event.get("topic") != topic or "epoch" not in event:
            continue
        queue = f"{event['broker']}:{event['queue']}"
        key = (queue, int(event["epoch"]))
        if event["event"] == "locked":
            open_since[key] = Ownership(queue, str(event["client"]), int(event["ms"]), now_ms)
        elif event["event"] in ENDS:
            begun = open_since.pop(key, Ownership(queue, str(event["client"]), 0, now_ms))
            done.append(replace(begun, end_ms=int(event["ms"])))
    told = {item.queue for item in open_since.values()}
    for queue_now, owner in owners.items():
        name = f"{queue_now.broker_name}:{queue_now.queue_id}"
        if queue_now.topic == topic and name not in told:
            begin_ms = max((item.end_ms for item in done if item.queue == name), default=0)
            done.append(Ownership(name, owner, begin_ms, now_ms))
    return done + list(open_since.values())


def hand_overs(events: Sequence[Event]) -> list[HandOver]:
    """Each change of a queue's owner, oldest first. A queue that its last owner takes again is none."""
    ended: dict[Queue, Event] = {}
    newest: dict[Queue, int] = {}
    found: list[HandOver] = []
    causes: dict[str, list[Event]] = {}
    for event in events:
        if event["event"] in CAUSES:
            causes.setdefault(str(event["broker"]), []).append(event)
        queue = _queue(event)
        if queue is None:
            continue
        if event["event"] in ENDS:
            ended[queue] = event
        elif event["event"] == "locked" and (before := ended.pop(queue, None)) is not None:
            newest.pop(queue, None)
            if before["client"] != event["client"]:
                newest[queue] = len(found)
                found.append(_hand_over(queue, before, event, causes.get(str(event["broker"]), [])))
        elif event["event"] in ("first pull", "first commit") and queue in newest:
            at = newest[queue]
            if event["client"] == found[at].after:
                found[at] = _with_first(found[at], event)
    return found


def _with_first(known: HandOver, event: Event) -> HandOver:
    if event["event"] == "first pull":
        return replace(known, pulled_ms=int(event["ms"]))
    return replace(known, committed_ms=int(event["ms"]))


def _hand_over(queue: Queue, before: Event, locked: Event, causes: Sequence[Event]) -> HandOver:
    ended_ms = int(before["ms"])
    found = HandOver(
        queue, str(before["client"]), str(locked["client"]), str(before["event"]), ended_ms, int(locked["ms"])
    )
    cause = next(_causing(causes, ended_ms), None)
    if cause is None:
        return found
    return replace(found, cause=str(cause["event"]), cause_client=str(cause["client"]), cause_ms=int(cause["ms"]))


def _causing(causes: Sequence[Event], ended_ms: int) -> Iterator[Event]:
    """The newest changes before the end of the lease; the one of a closed connection is noted in the same ms."""
    return (event for event in reversed(causes) if int(event["ms"]) <= ended_ms)


def _queue(event: Event) -> Queue | None:
    if "topic" not in event or "queue" not in event:
        return None
    return Queue(str(event["topic"]), str(event["broker"]), int(event["queue"]))
