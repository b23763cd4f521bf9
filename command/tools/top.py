"""`rocketlet top`: shows rates, lags and members continuously, and estimates when groups will have caught up."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...client.admin.admin_client import AdminClient, are_broadcasting
from ...client.admin.diagnosis import Examiner
from ...client.admin.findings import Finding
from ...client.config import SHORT_LAG_S
from ...client.errors import RocketletError
from ...client.wire.connection import gather_limited
from ..config import MAX_TOP_ROWS, TOP_INTERVAL_S
from ..plumbing.administration import Commands, verb
from ..plumbing.numbers import seconds, whole
from ..plumbing.output import Instant, Output

_TOPICS = ("topic", "in_per_s", "messages", "last_message")
_GROUPS = ("group", "members", "lag", "out_per_s", "caught_up_in", "findings")
_GROUPS_AS_JSON = ("group", "members", "lag", "out_per_s", "caught_up_in_s", "findings")
_CLEAR = "\x1b[H\x1b[2J"


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    top = verb(commands, "top", "show rates, lags and members, until Ctrl-C", _top)
    top.add_argument(
        "--interval", type=seconds, default=TOP_INTERVAL_S, help="seconds between refreshes (default: %(default)g)"
    )
    top.add_argument("--count", type=whole(1), help="number of refreshes (default: until Ctrl-C)")


@dataclass(frozen=True, slots=True)
class TopSample:
    """A sample for rates: `ends` are the sums of end offsets by topic, `read` those of committed offsets by group, which
    are 0 for broadcasting groups."""

    at_s: float
    ends: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    topics: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)


async def _top(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    examiner = Examiner(admin)
    before = await _sample(admin, examiner)
    shown = 0
    while options.count is None or shown < options.count:
        await asyncio.sleep(options.interval)
        sample = await _sample(admin, examiner)
        _show(output, before, sample)
        before, shown = sample, shown + 1
    return 0


async def _sample(admin: AdminClient, examiner: Examiner) -> TopSample:
    sample = TopSample(time.monotonic())
    masters = await admin.masters()
    examiner.configs = await admin.all_group_configs(masters)

    async def of_topic(name: str) -> None:
        try:
            topic = await admin.topic(name)
        except RocketletError:  # such as a topic that was deleted meanwhile
            return
        sample.ends[name] = sum(span.end for span in topic.ranges.values())
        last_ms = max((span.last_ms for span in topic.ranges.values()), default=0)
        sample.topics.append({"topic": name, "messages": topic.messages, "last_message": Instant(last_ms)})

    async def of_group(name: str) -> None:
        connections = await admin.connections(name, masters)
        members = {item.client_id for known in connections.values() for item in known.members}
        if are_broadcasting(connections):  # brokers have no offsets of theirs
            sample.read[name] = 0
            found = await examiner.examine(name, masters, connections, {})
            sample.groups.append({"group": name, "members": len(members), "lag": None, "findings": _kinds(found)})
            return
        progress = await admin.progress(name, masters=masters, times=False)
        sample.read[name] = sum(item.consumer_offset for item in progress.values())
        lag = sum(max(item.lag, 0) for item in progress.values())
        found = await examiner.examine(name, masters, connections, progress)
        sample.groups.append({"group": name, "members": len(members), "lag": lag, "findings": _kinds(found)})

    await gather_limited(of_topic, await admin.topics())
    await gather_limited(of_group, await admin.groups())
    return sample


def _kinds(found: Sequence[Finding] | None) -> list[str] | None:
    """Return the kinds of a group's findings, the worst first; None if they need a second observation."""
    return None if found is None else list(dict.fromkeys(finding.kind for finding in found))


def _show(output: Output, before: TopSample, sample: TopSample) -> None:
    took_s = max(sample.at_s - before.at_s, 1e-9)
    for row in sample.topics:
        row["in_per_s"] = _rate(before.ends, sample.ends, row["topic"], took_s)
    for row in sample.groups:
        kinds = row["findings"]
        row["findings"] = kinds if output.as_json else "checking" if kinds is None else ", ".join(kinds) or "none"
        if row["lag"] is None:
            continue
        row["out_per_s"] = _rate(before.read, sample.read, row["group"], took_s)
        sent_per_s = row["out_per_s"] + (row["lag"] - _lag(before, row["group"], row["lag"])) / took_s
        left_s = caught_up_s(row["lag"], row["out_per_s"], row["out_per_s"] - sent_per_s)
        row |= {"caught_up_in_s": left_s} if output.as_json else {"caught_up_in": shown_duration(left_s)}
    topics = sorted(sample.topics, key=lambda row: (-row["in_per_s"], row["topic"]))[:MAX_TOP_ROWS]
    groups = sorted(sample.groups, key=lambda row: (-(row["lag"] or 0), row["group"]))[:MAX_TOP_ROWS]
    if sys.stdout.isatty() and not output.as_json:
        print(_CLEAR, end="")
    output.records(_TOPICS, topics)
    output.text("")
    output.records(_GROUPS_AS_JSON if output.as_json else _GROUPS, groups)
    left_out = len(sample.topics) + len(sample.groups) - len(topics) - len(groups)
    output.text(f"{left_out} more are not shown" if left_out else "")


def _rate(before: dict[str, int], now: dict[str, int], name: str, took_s: float) -> int:
    return round(max(now[name] - before.get(name, now[name]), 0) / took_s)


def _lag(before: TopSample, group: str, default: int) -> int:
    return next((int(row["lag"] or 0) for row in before.groups if row["group"] == group), default)


def caught_up_s(lag: int, out_per_s: int, gains_per_s: float) -> int | None:
    """Return the estimated time to catch up in seconds; None for never. `gains_per_s` is the speed at which the lag shrinks.
    A lag that the group reads in SHORT_LAG_S counts as none."""
    if lag <= SHORT_LAG_S * out_per_s:
        return 0
    return round(lag / gains_per_s) if gains_per_s > 0 else None


def shown_duration(left_s: int | None) -> str:
    if not left_s:
        return "never, at this rate" if left_s is None else "now"
    hours, minutes = divmod(left_s // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left_s % 60} s" if minutes else f"{left_s} s"
