"""The pages compute hand-overs, charts, texts, parts of lists, and the rotation of who is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.client.admin.admin_client import hand_overs, ownerships
from rocketlet.client.admin.findings import Finding, Harm
from rocketlet.client.errors import RequestTimeout
from rocketlet.console import charts, text
from rocketlet.console.config import PAGE_ROWS
from rocketlet.console.metrics import FindingMetrics
from rocketlet.console.pages.paging import part_of
from rocketlet.console.rotation import Rotation
from rocketlet.console.samples import GroupSample, TopicSample
from rocketlet.protocol.names import Queue

from ..conftest import eventually


def event(ms: int, name: str, client: str = "", **detail: Any) -> dict[str, Any]:
    return {"ms": ms, "event": name, "client": client, "broker": "b", **detail}


def lease(ms: int, name: str, client: str, epoch: int, queue: int = 0) -> dict[str, Any]:
    return event(ms, name, client, topic="t", queue=queue, epoch=epoch)


def test_a_hand_over_says_what_it_waited_for() -> None:
    events = [
        lease(10, "locked", "A", 1),
        event(100, "joined", "B"),
        lease(140, "unlocked", "A", 1),
        lease(145, "locked", "B", 2),
        lease(150, "first pull", "B", 2),
        event(160, "first commit", "B", topic="t", queue=0, offset=5),
        lease(200, "unlocked", "B", 2),
        lease(210, "locked", "B", 3),
    ]
    (found,) = hand_overs(events)
    assert (found.before, found.after, found.end, found.cause, found.cause_client) == (
        "A",
        "B",
        "unlocked",
        "joined",
        "B",
    )
    assert (found.cause_ms, found.ended_ms, found.locked_ms, found.pulled_ms, found.committed_ms) == (
        100,
        140,
        145,
        150,
        160,
    )
    assert found.took_ms == 45
    assert [(span.owner, span.begin_ms, span.end_ms) for span in ownerships(events, "t", 300)] == [
        ("A", 10, 140),
        ("B", 145, 200),
        ("B", 210, 300),
    ]


@pytest.mark.parametrize(
    ("lags", "told"),
    [
        ([(0, 100), (60_000, 0)], "now"),
        ([(0, 100)], "–"),
        ([(0, 100), (60_000, 100)], "not at this rate"),
        ([(0, 50), (60_000, 100)], "not at this rate"),
        ([(0, 300), (60_000, 200), (120_000, 100)], "in 60 s"),
        ([(0, 10), (600_000, 200), (660_000, 100)], "in 60 s"),
    ],
)
def test_a_group_is_caught_up_when_its_lag_continues_shrinking(lags: list[tuple[int, int]], told: str) -> None:
    sample = GroupSample("g", lags[-1][0], 1, (), lags[-1][1])
    sample.lags.extend(lags)
    sample.reads.extend([(lags[-1][0] - 1000, 0), (lags[-1][0], 1)])
    assert sample.caught_up == told


def test_group_is_not_said_to_never_catch_up_when_its_rate_is_unknown() -> None:
    sample = GroupSample("g", 60_000, 1, (), 100)
    sample.lags.extend([(0, 100), (60_000, 100)])
    assert sample.caught_up == "–"


@pytest.mark.parametrize(("lag", "told"), [(50, "now"), (51, "not at this rate")])
def test_messages_under_way_are_no_lag_to_catch_up(lag: int, told: str) -> None:
    sample = GroupSample("g", 10_000, 1, (), lag)
    sample.lags.extend([(0, 1), (10_000, lag)])
    sample.reads.extend([(0, 0), (10_000, 100)])
    assert sample.caught_up == told


def test_a_lease_that_is_older_than_all_events_is_reported_by_the_owners_of_now() -> None:
    queues = [Queue("t", "b", number) for number in range(3)]
    events = [lease(100, "unlocked", "A", 1, 1), lease(110, "locked", "B", 2, 1)]
    spans = ownerships(events, "t", 300, dict.fromkeys(queues, "B"))
    assert sorted((span.queue, span.owner, span.begin_ms, span.end_ms) for span in spans) == [
        ("b:0", "B", 0, 300),
        ("b:1", "A", 0, 100),
        ("b:1", "B", 110, 300),
        ("b:2", "B", 0, 300),
    ]


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 3), st.booleans()), max_size=40))
def test_each_change_of_an_owner_is_one_hand_over(moves: list[tuple[str, int, bool]]) -> None:
    """Leases that follow each other in each queue: as many hand-overs as the owner changes."""
    events, owners, changes, ms = [], dict[int, tuple[str, int]](), 0, 0
    last: dict[int, str] = {}
    for epoch, (client, queue, expires) in enumerate(moves):
        ms += 10
        if queue in owners:
            before, known = owners[queue]
            events.append(lease(ms, "lock expired" if expires else "unlocked", before, known, queue))
        events.append(lease(ms + 5, "locked", client, epoch, queue))
        changes += queue in last and last[queue] != client
        owners[queue], last[queue] = (client, epoch), client
    assert len(hand_overs(events)) == changes


@given(st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10**12)), min_size=2, max_size=400))
def test_a_line_stays_in_its_box(points: list[tuple[int, int]]) -> None:
    found = charts.lines(sorted(points))
    assert found is not None
    for pair in found.line.replace("M", " ").split():
        x, y = map(float, pair.split(","))
        assert -0.1 <= x <= found.width + 0.1
        assert -0.1 <= y <= found.height + 0.1
    assert len(charts.spark([(10 * number, value) for number, (_, value) in enumerate(points)]).split()) <= 2 * 60


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [
        ((0, 10, 20, 80, 90), ["0.0 10.0 20.0 80.0 90.0"]),
        ((0, 10, 20, 81, 90), ["0.0 10.0 20.0", "81.0 90.0"]),
        ((0, 10, 20, 81, 150), ["0.0 10.0 20.0", "81.0 81.0", "150.0 150.0"]),
        ((0, 30, 60, 180), ["0.0 30.0 60.0 180.0"]),
        ((0, 30, 60, 181), ["0.0 30.0 60.0", "181.0 181.0"]),
    ],
)
def test_a_line_is_interrupted_at_a_time_without_samples(seconds: tuple[int, ...], runs: list[str]) -> None:
    found = charts.lines([(1000 * second, 1) for second in seconds], width=seconds[-1], height=1)
    assert found is not None
    drawn = [" ".join(pair.partition(",")[0] for pair in run.split()) for run in found.line.split("M")[1:]]
    assert drawn == runs
    assert found.area.count("Z") == len(runs)


@given(st.floats(0, 1e15))
def test_a_scale_ends_at_a_round_number_not_below(value: float) -> None:
    top = charts.nice_ceiling(value)
    assert top >= value * (1 - 1e-9)
    assert f"{top:.0e}"[0] in "125"


@given(st.lists(st.integers(), max_size=3 * PAGE_ROWS + 1), st.integers(-3, 9))
def test_a_part_of_a_list_is_never_out_of_it(items: list[int], number: int) -> None:
    part = part_of(items, number)
    assert 1 <= part.number <= part.pages
    assert len(part.items) <= PAGE_ROWS
    assert [item for page in range(1, part.pages + 1) for item in part_of(items, page).items] == items


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (text.number(1234567), "1,234,567"),
        (text.number(0.26), "0.3"),
        (text.number(None), "–"),
        (text.size(10 * 1024), "10 KiB"),
        (text.duration(340), "340 ms"),
        (text.duration(60_000), "60 s"),
        (text.duration(300_000), "5 min"),
        (text.duration(3 * 86_400_000), "3 days"),
        (text.age(0), "never"),
        (text.local_time(0), "–"),
        (text.local_time(1 << 70), "–"),
        (text.visible("a\u202eb\x00\n"), "a\\u202eb\\x00\n"),
        (text.short("192.0.2.2@31222#1795311447830475101"), "192.0.2.2@31222#…447830475101"),
        (text.part("%RETRY%g|x"), "%25RETRY%25g%7Cx"),
        (text.query(a="b c", d="", e=None), "?a=b+c"),
        (text.client_version(409), "4.9.8"),
        (text.client_version(493), "no. 493"),
    ],
)
def test_texts(shown: str, wanted: str) -> None:
    assert shown == wanted


async def test_what_is_asked_for_is_what_was_not_asked_for_longest_and_shown_things_first() -> None:
    asked: list[str] = []

    async def names() -> list[str]:
        return ["a", "b", "c"]

    async def ask(name: str, before: TopicSample | None) -> TopicSample | None:
        asked.append(name)
        if name == "b":
            raise RequestTimeout("no answer")
        return TopicSample(name, len(asked), (), 0, 0, 0, 0)

    rotation = Rotation[TopicSample](names, ask)
    await rotation.list()
    await rotation.show(["c", "b"], now=True)
    assert asked == ["c", "b"]
    assert set(rotation.found) == {"c"}, "what does not answer has no sample"
    await rotation.show(["c"], now=True)
    assert asked == ["c", "b"], "it was asked a moment ago"
    running = asyncio.create_task(rotation.run())
    await eventually(lambda: len(asked) > 2)
    running.cancel()
    assert asked == ["c", "b", "a"]


async def test_a_page_asks_for_what_was_asked_for_and_has_not_answered_yet() -> None:
    asked: list[str] = []
    slow = asyncio.Event()

    async def names() -> list[str]:
        return ["a"]

    async def ask(name: str, before: TopicSample | None) -> TopicSample | None:
        asked.append(name)
        if len(asked) == 1:
            await slow.wait()
        return TopicSample(name, len(asked), (), 0, 0, 0, 0)

    rotation = Rotation[TopicSample](names, ask)
    await rotation.list()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rotation.query("a"))
        while not asked:
            await asyncio.sleep(0)
        await rotation.show(["a"], now=True)
        assert set(rotation.found) == {"a"}
        slow.set()


def test_findings_of_one_kind_about_a_subject_are_one_series() -> None:
    found = [Finding(Harm.SLOW, "growing_lag", "g", text, "") for text in ("orders", "bills")]
    console: Any = SimpleNamespace(findings=lambda: found, groups=SimpleNamespace(found={}))
    findings, _ = FindingMetrics(console).collect()
    assert [(sample.labels["subject"], sample.value) for sample in findings.samples] == [("g", 2)]
