"""`make demo ARGS=--versus`: the same joins and leaves with Java members on Apache's broker and with Rocketlet, on one page.

It draws what the members' handlers saw: who handled messages of a queue from when to when, and in red those handled a
second time.
"""

from __future__ import annotations

import argparse
import bisect
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Final

from rocketlet.demo.page import Gap, Moment, Panel, Span, Twice, write_page
from rocketlet.demo.timeline import Sample, strips_of

from . import runner, versions
from .churn import Handled, Run, churn, double_owner_ms
from .peers import apache_fault

MERGED_MS: Final = 400.0  # a member that handles nothing of a queue for so long has stopped reading it
SAMPLE_MS: Final = 250
LOAD = argparse.Namespace(churns=3, queues=8, rate=1000.0, handler_ms=50, members=2, threads=40)
SYSTEMS: Final = {
    "apache": f"Java members on Apache RocketMQ {versions.APACHE}",
    "rocketlet": "Python members on Rocketlet",
}


async def compare(output: Path) -> int:
    """Writes `versus.html`. Returns 1 if Apache's broker cannot be started here."""
    fault = apache_fault()
    if fault is not None:
        runner.console.print(f"--versus needs Java and Maven, for Apache's broker: {fault}", style="red")
        return 1
    panels: list[Panel] = []
    counts: dict[str, int] = {}
    async with runner.started(tuple(SYSTEMS)) as peers:
        for name, peer in peers.items():
            runner.console.print(f"{SYSTEMS[name]}: {LOAD.churns} members join and leave ...")
            run = await churn(peer, LOAD)
            panels.append(panel_of(SYSTEMS[name], run))
            counts[name] = len(seconds_of(run))
    title = (
        f"The same joins and leaves: {counts['apache']:,} messages read twice on Apache, "
        f"{counts['rocketlet']:,} on Rocketlet"
    )
    summary = "\n".join([title, *(f"{panel.title}: {panel.note}" for panel in panels)])
    output.mkdir(parents=True, exist_ok=True)
    write_page(output / "versus.html", title, panels, f"{summary}\n{_load()}")
    runner.console.print(summary, highlight=False, soft_wrap=True)
    runner.console.print(f"page: {output / 'versus.html'}", soft_wrap=True)
    return 0


def _load() -> str:
    return (
        f"{LOAD.rate:.0f} messages a second, {LOAD.queues} queues, handlers of {LOAD.handler_ms} ms, "
        f"{LOAD.members} members that stay and a guest that joins and leaves {LOAD.churns} times"
    )


def panel_of(title: str, run: Run) -> Panel:
    begin_ms = min(handled.begin_ms for handled in run.handled)
    spans = spans_of(run, begin_ms)
    twice = twice_of(run, begin_ms)
    lost = len(run.sent - {handled.body for handled in run.handled})
    note = (
        f"{len(run.sent):,} messages sent, {sum(item.count for item in twice):,} read twice, {lost:,} lost; "
        f"queues with handlers of two members: {double_owner_ms(run):,.0f} ms in all"
    )
    marks = [Moment(ms - begin_ms, f"{name} {kind}s") for kind, name, ms in run.moments]
    queues = [f"queue {number}" for number in range(LOAD.queues)]
    return Panel(title, note, queues, spans, _gaps(spans), twice, marks, strips_of(_samples(run), begin_ms))


def spans_of(run: Run, begin_ms: float) -> list[Span]:
    """The spans in which one member handled messages of a queue without a longer pause."""
    by_reader: dict[tuple[int, str], list[Handled]] = defaultdict(list)
    for handled in sorted(run.handled, key=lambda handled: handled.begin_ms):
        by_reader[handled.queue, handled.member].append(handled)
    spans: list[Span] = []
    for (queue, member), mine in by_reader.items():
        first = 0
        end_ms = mine[0].end_ms
        for index in range(1, len(mine) + 1):
            if index == len(mine) or mine[index].begin_ms > end_ms + MERGED_MS:
                facts = (f"{index - first:,} messages handled",)
                spans.append(Span(queue, member, mine[first].begin_ms - begin_ms, end_ms - begin_ms, facts))
                first, end_ms = index, mine[index].end_ms if index < len(mine) else 0.0
            else:
                end_ms = max(end_ms, mine[index].end_ms)
    return sorted(spans, key=lambda span: (span.queue, span.begin))


def _gaps(spans: list[Span]) -> list[Gap]:
    return [
        Gap(before.queue, before.owner, after.owner, before.end, after.begin)
        for before, after in pairwise(spans)
        if before.queue == after.queue and before.owner != after.owner and before.end < after.begin
    ]


def seconds_of(run: Run) -> list[tuple[Handled, Handled]]:
    """Each handling of a message after its first, with the first; by time."""
    first: dict[str, Handled] = {}
    seconds: list[tuple[Handled, Handled]] = []
    for handled in sorted(run.handled, key=lambda handled: handled.begin_ms):
        earlier = first.setdefault(handled.body, handled)
        if earlier is not handled:
            seconds.append((earlier, handled))
    return seconds


def twice_of(run: Run, begin_ms: float) -> list[Twice]:
    """The messages that were read twice, in runs of one queue and the same two readers."""
    found: dict[tuple[int, str, str], list[Twice]] = defaultdict(list)
    for earlier, handled in seconds_of(run):
        runs = found[handled.queue, earlier.member, handled.member]
        begin, end = handled.begin_ms - begin_ms, handled.end_ms - begin_ms
        if runs and begin <= runs[-1].end + MERGED_MS:
            known = runs.pop()
            begin, end, count = known.begin, max(known.end, end), known.count + 1
        else:
            count = 1
        runs.append(Twice(handled.queue, begin, end, count, earlier.member, handled.member))
    return [twice for runs in found.values() for twice in runs]


def _samples(run: Run) -> list[Sample]:
    firsts = {handled.body: handled.end_ms for handled in sorted(run.handled, key=lambda item: -item.end_ms)}
    sent, handled = sorted(run.sent_ms), sorted(firsts.values())
    times = range(int(sent[0]), int(handled[-1]) + SAMPLE_MS, SAMPLE_MS)
    return [Sample(ms, bisect.bisect(sent, ms), bisect.bisect(handled, ms)) for ms in times]
