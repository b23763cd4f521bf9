"""Groups: a list of all with their lag, and a detailed page for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ...client.admin.admin_client import CAUSES, GroupEvent, HandOver, LiteGroup, hand_overs, ownerships
from ...client.admin.diagnosis import lite_topic_of
from ...protocol import names
from ...protocol.names import Queue
from .. import charts
from ..config import (
    HAND_OVER_ROWS,
    NEWEST_HAND_OVERS,
    PAGE_ROWS,
    SHOWN_EVENTS,
    SHOWN_INTERVAL_S,
    TIMELINE_LEAST_MS,
    TIMELINE_S,
)
from ..console import Console
from ..form import Form, query_of
from ..group_watch import GroupWatch
from ..page import Page, console_of, is_load
from ..samples import GroupSample, now_ms
from ..text import duration, short
from .listing import listing
from .paging import Part, part_of

_TOLD = {
    "joined": "{client} joined",
    "left": "{client} left",
    "leaving": "{client} is leaving",
    "closed": "{client} lost its connection",
    "expired": "{client} sent no heartbeat",
    "subscribed": "{client} changed its subscription",
    "notified": "the members were notified",
    "assigned": "{client} has {count} queues",
    "locked": "{client} owns {queue}",
    "unlocked": "{client} released {queue}",
    "lock lost": "{client} lost {queue}: its connection closed",
    "lock expired": "{client} lost {queue}: it did not renew its lease",
    "first pull": "{client} reads {queue}",
    "first commit": "{client} finished a first message of {queue}",
}
_ENDINGS = {
    "unlocked": "the previous owner to finish its messages and release",
    "lock lost": "the connection of the previous owner to close",
    "lock expired": "the lease of the previous owner to expire",
}


@dataclass(frozen=True, slots=True)
class GroupRow:
    name: str
    sample: GroupSample | None
    spark: str


@dataclass(frozen=True, slots=True)
class GroupQueueRow:
    queue: Queue
    owner: str
    colour: str | None
    committed: int | None
    end: int | None
    lag: int | None
    last_ms: int


@dataclass(frozen=True, slots=True)
class HandOverRow:
    item: HandOver
    waited_for: str


async def listed(request: Request) -> Page:
    console, now = console_of(request), is_load(request)
    await console.groups.list(now=now)
    await console.topics.list(now=now)
    known = console.groups.found
    groups = listing(
        query_of(request),
        console.groups.names,
        is_system=names.is_system_group,
        figures={
            "lag": lambda name: known[name].lag if name in known else -1,
            "members": lambda name: known[name].members if name in known else -1,
            "dead": lambda name: known[name].dead if name in known else -1,
        },
    )
    await console.groups.show(groups.part.items, now=now)
    samples = [known[name] for name in groups.names if name in known]
    return Page(
        "groups.html",
        {
            "groups": groups,
            "rows": [_row(console, name) for name in groups.part.items],
            "lag": sum(item.lag for item in samples),
            "members": sum(item.members for item in samples),
            "abandoned": sum(not item.members and item.lag > 0 for item in samples),
        },
    )


def _row(console: Console, name: str) -> GroupRow:
    sample = console.groups.found.get(name)
    return GroupRow(name, sample, charts.spark(tuple(sample.lags)) if sample else "")


async def shown(request: Request) -> Page:
    console, form = console_of(request), query_of(request)
    group = request.path_params["group"]
    watch = console.watch(group)
    await watch.refresh()
    now = is_load(request)
    look = watch.look
    sample = console.groups.found.get(group)
    if sample is None or look.ms - sample.ms >= SHOWN_INTERVAL_S * 1000:
        sample = await console.sample(group, watch.masters, look.progress, look.connections, sample)
    console.groups.put(group, sample)
    lite = await console.admin.lite_group(group, watch.masters) if lite_topic_of(watch.config) else None
    await console.topics.list(now=now)
    rows = _queue_rows(watch, form) if lite is None else []  # members of a lite group share no queues
    part = part_of(rows, form.number("page", 1))
    window_s = form.number("window", TIMELINE_S[0], least=1, most=TIMELINE_S[-1])
    pictures = _pictures(watch, part, window_s)
    lags = max(tuple(watch.total), tuple(sample.lags), key=_span_ms)
    newest_first = hand_overs(watch.events)[::-1]
    older = part_of(newest_first[NEWEST_HAND_OVERS:], form.number("handovers", 1), HAND_OVER_ROWS)
    return Page(
        "group.html",
        {
            "group": group,
            "look": look,
            "watch": watch,
            "sample": sample,
            "part": part,
            "sparks": {row.queue: charts.spark(tuple(watch.lags.get(row.queue, ()))) for row in part.items},
            "text": form.text("q"),
            "behind": form.text("behind"),
            "windows": [(item, duration(item * 1000)) for item in TIMELINE_S],
            "window": window_s,
            "chart": charts.lines_of(lags),
            "pictures": pictures,
            "newest_hand_overs": [_hand_over_row(item) for item in newest_first[:NEWEST_HAND_OVERS]],
            "older_hand_overs": older.mapped(_hand_over_row),
            "departed": any(bar.colour == "gone" for _, shown in pictures for bar in shown["wide"].bars),
            "shares": any(member.shares for member in look.members),
            "events": [_event_text(event) for event in watch.events[: -SHOWN_EVENTS - 1 : -1]],
            "unowned": sum(row.owner == "" and not row.queue.topic.startswith("%") for row in rows),
            "has_handlers": any(member.own_version for member in look.members),
            "lite": lite,
            "lite_topics": lite.longest[:PAGE_ROWS] if lite is not None else [],
            "subscriptions": await _subscriptions(console, watch, lite),
            "strict": any(item.strict for item in watch.config.values()),
        },
    )


async def _subscriptions(console: Console, watch: GroupWatch, lite: LiteGroup | None) -> dict[str, int]:
    """Return to how many lite topics each member is subscribed, by client id; empty for groups without lite topics."""
    if lite is None:
        return {}
    client_ids = [member.client_id for member in watch.look.members]
    return await console.admin.lite_subscriptions(watch.group, lite.topic, client_ids, watch.masters)


def _span_ms(points: Sequence[tuple[int, int]]) -> int:
    return points[-1][0] - points[0][0] if points else -1


def _queue_rows(watch: GroupWatch, form: Form) -> list[GroupQueueRow]:
    text = form.text("q").lower()
    rows = (_queue_row(watch, queue) for queue in watch.queues())
    return [
        row
        for row in rows
        if (not text or text in str(row.queue).lower() or text in row.owner.lower())
        and (not form.text("behind") or row.lag)
    ]


def _queue_row(watch: GroupWatch, queue: Queue) -> GroupQueueRow:
    progress = watch.look.progress.get(queue)
    owner = watch.look.owners.get(queue, "")
    if watch.look.lag is None:
        return GroupQueueRow(queue, "every member", None, None, None, None, 0)
    colour = watch.colour(owner) if owner else None
    if progress is None:
        return GroupQueueRow(queue, owner, colour, None, None, None, 0)
    return GroupQueueRow(
        queue,
        owner,
        colour,
        progress.consumer_offset,
        progress.broker_offset,
        max(progress.lag, 0),
        progress.last_ms,
    )


def _pictures(
    watch: GroupWatch, part: Part[GroupQueueRow], window_s: int
) -> list[tuple[str, dict[str, charts.Timeline]]]:
    """Return a timeline up to now for each topic of the shown queues, in each width, except for retry topics."""
    end_ms = max(now_ms(), int(watch.events[-1]["ms"]) if watch.events else 0)
    first_ms = int(watch.events[0]["ms"]) if watch.events else end_ms
    begin_ms = max(end_ms - window_s * 1000, min(first_ms, end_ms - TIMELINE_LEAST_MS) - 1000)
    marks = [(int(event["ms"]), _event_text(event)[1]) for event in watch.events if event["event"] in CAUSES]
    found = []
    for topic in dict.fromkeys(row.queue.topic for row in part.items):
        if topic.startswith(names.RETRY_PREFIX):
            continue
        queues = [f"{row.queue.broker_name}:{row.queue.queue_id}" for row in part.items if row.queue.topic == topic]
        spans = ownerships(watch.events, topic, end_ms, watch.look.owners)
        pictures = {
            name: charts.timeline(
                spans, queues, watch.colour, marks, begin_ms=begin_ms, end_ms=end_ms, width=width,
                left=min(150, 40 + 7 * max(map(len, queues))),
            )
            for name, width in charts.WIDTHS.items()
        }  # fmt: skip
        found.append((topic, pictures))
    return found


def _hand_over_row(item: HandOver) -> HandOverRow:
    return HandOverRow(item, _waited_for(item))


def _waited_for(item: HandOver) -> str:
    """Return a text about the steps of a hand-over and their durations."""
    parts = []
    if item.cause_ms is not None and item.cause_ms < item.ended_ms:
        parts.append(f"{duration(item.ended_ms - item.cause_ms)} for {_ENDINGS.get(item.end, item.end)}")
    parts.append(f"{duration(item.locked_ms - item.ended_ms)} for the new owner to take it")
    if item.pulled_ms is not None:
        parts.append(f"{duration(item.pulled_ms - item.locked_ms)} until its first pull")
    if item.committed_ms is not None:
        parts.append(f"{duration(item.committed_ms - item.locked_ms)} until its first finished message")
    return ", ".join(parts)


def _event_text(event: GroupEvent) -> tuple[int, str]:
    """Return the time of an event and a text about it."""
    queue = f"{event['topic']}@{event['broker']}:{event['queue']}" if "queue" in event and "topic" in event else ""
    words = _TOLD.get(event["event"])
    if words is None:
        return int(event["ms"]), f"{event['event']}: {event.get('fault', event['client'])}"
    return int(event["ms"]), words.format(client=short(event["client"]), queue=queue, count=event.get("count", ""))
