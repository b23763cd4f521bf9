"""Tells who owned which queue and when, and what each hand-over waited for: from the brokers' events and the members'
own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from ..client.admin.admin_client import Ownership
from .page import Gap, Line, Moment, Panel, Span, Strip

COLOURS = ("#3b6fb6", "#e0913a", "#4f9d69", "#a05fb4", "#c44e52", "#7f7f7f", "#17a2b8", "#bcbd22")
RATE_OVER_MS: Final = 1000.0
_ENDED: Final = {"lock lost": "its connection closed", "lock expired": "its lease ran out"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: somebody joined, left or was killed."""

    ms: int
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """How many messages were sent and handled at a moment."""

    ms: int
    sent: int
    handled: int


@dataclass(frozen=True, slots=True)
class Told:
    """A member's report on one of its queues: `queue_assigned` or `queue_handed_over`, with the fields of the log event."""

    ms: int
    event: str
    owner: str
    queue: str
    fields: Mapping[str, Any]


def double_owned_ms(spans: Sequence[Ownership]) -> int:
    """How long queues had two owners, in all. The brokers' locks should make it 0."""
    total = 0
    for queue in {span.queue for span in spans}:
        mine = sorted((span for span in spans if span.queue == queue), key=lambda span: span.begin_ms)
        total += sum(max(earlier.end_ms - later.begin_ms, 0) for earlier, later in itertools.pairwise(mine))
    return total


def read_told(paths: Iterable[Path], topic: str) -> list[Told]:
    """The members' reports, oldest first. A line that a killed member did not finish is left out."""
    found: list[Told] = []
    for path in paths:
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            record = orjson.loads(line)
            name, _, queue = str(record["fields"]["queue"]).partition("@")
            if name == topic:
                found.append(Told(record["ms"], record["event"], record["client"], queue, record["fields"]))
    return sorted(found, key=lambda told: told.ms)


def panel_of(
    owned: Sequence[Ownership],
    marks: Sequence[Mark],
    names: Mapping[str, str],
    *,
    events: Sequence[Mapping[str, Any]] = (),
    told: Sequence[Told] = (),
    samples: Sequence[Sample] = (),
) -> Panel:
    """`names`: what to call a client id. Raises ValueError if nobody owned a queue."""
    if not owned:
        raise ValueError("no queue was owned by anybody: there is nothing to draw")
    begin_ms = min([item.begin_ms for item in owned] + [sample.ms for sample in samples[:1]])
    queues = sorted({item.queue for item in owned}, key=_by_number)
    rows = {queue: row for row, queue in enumerate(queues)}
    ends = {(f"{event.get('broker')}:{event.get('queue')}", event["ms"]): event["event"] for event in events}
    spans: list[Span] = []
    gaps: list[Gap] = []
    for queue in queues:
        mine = sorted((item for item in owned if item.queue == queue), key=lambda item: item.begin_ms)
        given = [_told_of(item, told, "queue_handed_over") for item in mine]
        for item, hand_over in zip(mine, given, strict=True):
            begun = _told_of(item, told, "queue_assigned")
            name = names.get(item.owner, item.owner)
            facts = (*_offsets(begun, hand_over), *_waits(hand_over))
            spans.append(
                Span(rows[queue], name, item.begin_ms - begin_ms, item.end_ms - begin_ms, facts, _waited_ms(hand_over))
            )
        for (before, after), hand_over in zip(itertools.pairwise(mine), given, strict=False):
            facts = (*_cause(before, marks, ends.get((queue, before.end_ms), "")), *_waits(hand_over))
            who = names.get(before.owner, before.owner), names.get(after.owner, after.owner)
            gaps.append(Gap(rows[queue], *who, before.end_ms - begin_ms, after.begin_ms - begin_ms, facts))
    moments = [Moment(mark.ms - begin_ms, mark.text) for mark in sorted(marks, key=lambda mark: mark.ms)]
    return Panel("", "", queues, spans, gaps, (), moments, strips_of(samples, begin_ms), begin_ms)


def strips_of(samples: Sequence[Sample], begin_ms: float) -> tuple[Strip, ...]:
    """Throughput and lag below the queues; none without samples."""
    if len(samples) < 2:
        return ()
    sent = _rates([(sample.ms - begin_ms, sample.sent) for sample in samples])
    handled = _rates([(sample.ms - begin_ms, sample.handled) for sample in samples])
    lag = [(sample.ms - begin_ms, float(max(sample.sent - sample.handled, 0))) for sample in samples]
    return (
        Strip("per second", "a second", (Line("sent", sent), Line("handled", handled))),
        Strip("lag", "messages", (Line("not handled yet", lag),)),
    )


def _rates(counts: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Rates over a window of a second: a look now and then would see jumps."""
    rates: list[tuple[float, float]] = []
    first = 0
    for index in range(1, len(counts)):
        while counts[index][0] - counts[first][0] > RATE_OVER_MS and first < index - 1:
            first += 1
        passed_ms = counts[index][0] - counts[first][0]
        rates.append((counts[index][0], (counts[index][1] - counts[first][1]) / passed_ms * 1000 if passed_ms else 0.0))
    return rates


def _told_of(item: Ownership, told: Sequence[Told], event: str) -> Told | None:
    """A member logs that it has a queue after the lock, and that it gave it up after the unlock."""
    moment_ms = item.begin_ms if event == "queue_assigned" else item.end_ms
    for record in told:
        is_meant = (record.event, record.owner, record.queue) == (event, item.owner, item.queue)
        if is_meant and moment_ms - 5 <= record.ms <= moment_ms + 2000:
            return record
    return None


def _offsets(begun: Told | None, hand_over: Told | None) -> tuple[str, ...]:
    first = begun.fields.get("offset") if begun else None
    last = hand_over.fields.get("offset") if hand_over else None
    if first is None and last is None:
        return ()
    return (f"offsets {'?' if first is None else f'{first:,}'} to {'…' if last is None else f'{last:,}'}",)


def _waits(hand_over: Told | None) -> tuple[str, ...]:
    if hand_over is None:
        return ()
    fields = hand_over.fields
    return (
        f"waited for: handlers {fields['drain_ms']} ms, commit {fields['commit_ms']} ms, unlock {fields['unlock_ms']} ms",
    )


def _waited_ms(hand_over: Told | None) -> float:
    return 0.0 if hand_over is None else float(hand_over.fields["drain_ms"]) + float(hand_over.fields["commit_ms"])


def _cause(before: Ownership, marks: Sequence[Mark], end: str) -> tuple[str, ...]:
    """The last event before the queue was free; a member's own log tells of its end a little later."""
    earlier = [mark for mark in marks if mark.ms <= before.end_ms + 50]
    cause = max(earlier, key=lambda mark: mark.ms, default=None)
    facts = [] if cause is None else [f"after: {cause.text} ({max(before.end_ms - cause.ms, 0):,} ms before)"]
    return (*facts, *([_ENDED[end]] if end in _ENDED else []))


def _by_number(queue: str) -> tuple[str, int]:
    broker, _, number = queue.rpartition(":")
    return broker, int(number)
