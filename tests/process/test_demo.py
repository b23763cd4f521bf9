"""The main job itself, short: every flight accounted for, Spark's table equal, the picture drawn."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.client import Consumer, Message
from rocketlet.client.admin.admin_client import Ownership
from rocketlet.demo.page import Panel, Span, write_page
from rocketlet.demo.replay import TOPIC, replay
from rocketlet.demo.timeline import Mark, Sample, Told, panel_of, read_told, strips_of

from bench.churn import Handled, Run
from bench.versus import panel_of as panel_of_run

from ..conftest import PATIENCE_S, Node
from ..support.browser import CHROMIUM, windows_of


def run(tmp_path: Path, *options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path, "JAVA_HOME": ""} if path is not None else {})}
    return subprocess.run(
        [sys.executable, "-m", "rocketlet.demo", "--flights", "2000", "--output", tmp_path / "out", *options],
        capture_output=True,
        text=True,
        timeout=780,
        check=False,
        env=environment,
    )


def page_of(tmp_path: Path) -> Any:
    """The values that the page draws."""
    text = (tmp_path / "out" / "rebalance.html").read_text()
    return orjson.loads(text.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.timeout(800)
@pytest.mark.spark
@pytest.mark.skipif(shutil.which("java") is None, reason="Java is missing, which Spark needs")
def test_every_flight_is_accounted_for_and_sparks_table_is_the_files(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Spark's table equals the file's" in found.stdout
    assert "queues with two owners: 0 ms" in found.stdout
    assert any("Spark joins" in mark["text"] for mark in page_of(tmp_path)["panels"][0]["marks"])


@pytest.mark.timeout(800)
def test_without_java_it_says_how_to_get_it_and_runs_the_rest(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    found = run(tmp_path, path=str(tmp_path / "bin"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "no Java was found; install Java 17 or later" in found.stdout.replace("\n", " ")
    assert "departures" in found.stdout
    (panel,) = page_of(tmp_path)["panels"]
    marks = {mark["text"] for mark in panel["marks"]}  # in any order: a process that joins takes its time to start
    assert marks == {"dot joins", "ben leaves", "cem is killed"}
    assert {span["owner"] for span in panel["spans"]} == {"ada", "ben", "cem", "dot"}
    assert any("handlers" in fact for gap in panel["gaps"] for fact in gap["facts"])
    assert all(line["points"] for strip in panel["strips"] for line in strip["lines"])


async def test_a_replay_that_runs_forever_begins_again(node: Node, tmp_path: Path) -> None:
    bodies: list[bytes] = []
    second_year = asyncio.Event()

    async def handle(message: Message) -> None:
        bodies.append(message.body)
        if len(bodies) > len(set(bodies)):
            second_year.set()

    replaying = asyncio.create_task(replay(node.address, limit=5, rate=50.0, status=None, forever=True))
    try:
        async with asyncio.timeout(PATIENCE_S), Consumer(node.address, "watchers", TOPIC, handle, start="first"):
            await second_year.wait()
    finally:
        replaying.cancel()
        await asyncio.gather(replaying, return_exceptions=True)


# The demo's page: what it says of members' queues, and that a browser draws it.


OWNED = [
    Ownership("broker-a:0", "id-1", 1000, 2000),
    Ownership("broker-a:0", "id-2", 2006, 5000),
    Ownership("broker-a:10", "id-1", 1000, 5000),
    Ownership("broker-a:2", "id-2", 1000, 3000),
    Ownership("broker-a:2", "id-1", 3001, 5000),
]
NAMES = {"id-1": "ada", "id-2": "ben"}
FIELDS = {"queue": "t@broker-a:0", "offset": 70, "drain_ms": 12.5, "commit_ms": 1.5, "unlock_ms": 0.5}
TOLD = [
    Told(1001, "queue_assigned", "id-1", "broker-a:0", {"queue": "t@broker-a:0", "offset": 7}),
    Told(2001, "queue_handed_over", "id-1", "broker-a:0", FIELDS),
]


def test_spans_say_offsets_and_gaps_what_they_waited_for() -> None:
    events = [{"broker": "broker-a", "queue": 2, "topic": "t", "ms": 3000, "event": "lock lost", "client": "id-2"}]
    marks = [Mark(2900, "ben is killed"), Mark(1980, "ben joins")]
    panel = panel_of(OWNED, marks, NAMES, events=events, told=TOLD)
    assert panel.queues == ["broker-a:0", "broker-a:2", "broker-a:10"], "numbers, not texts"
    waits = "waited for: handlers 12.5 ms, commit 1.5 ms, unlock 0.5 ms"
    assert panel.spans[0] == Span(0, "ada", 0, 1000, ("offsets 7 to 70", waits), 14.0)
    first, second = panel.gaps
    assert (first.before, first.after, first.begin, first.end) == ("ada", "ben", 1000, 1006)
    assert first.facts == ("after: ben joins (20 ms before)", waits)
    assert second.facts == ("after: ben is killed (100 ms before)", "its connection closed")
    assert [(mark.ms, mark.text) for mark in panel.marks] == [(980, "ben joins"), (1900, "ben is killed")]


def test_strips_are_rates_over_a_second_and_what_is_not_handled() -> None:
    samples = [Sample(1000 + 250 * index, 25 * index, 20 * index) for index in range(9)]
    rate, lag = strips_of(samples, 1000)
    assert [line.points[-1] for line in rate.lines] == [(2000, 100.0), (2000, 80.0)]
    assert lag.lines[0].points[-1] == (2000, 40.0)


def test_notes_of_a_killed_member_may_end_within_a_line(tmp_path: Path) -> None:
    note = {"ms": 5, "event": "queue_assigned", "client": "id-1", "fields": {"queue": "t@broker-a:0", "offset": 1}}
    other = {**note, "fields": {"queue": "%RETRY%g@broker-a:0", "offset": 1}}
    path = tmp_path / "notes.jsonl"
    path.write_bytes(orjson.dumps(note) + b"\n" + orjson.dumps(other) + b"\n" + orjson.dumps(note)[:20])
    assert [told.queue for told in read_told([path], "t")] == ["broker-a:0"]


def test_what_was_handled_twice_is_red_and_counted() -> None:
    handled = [Handled("a", 0, f"m{number}", 100 * number, 100 * number + 50) for number in range(5)]
    handled += [Handled("b", 0, f"m{number}", 100 * number + 20, 100 * number + 80) for number in range(3, 9)]
    run = Run(handled, {f"m{number}" for number in range(10)}, [0.0, 300.0], [("join", "b", 300.0)])
    panel = panel_of_run("Java", run)
    assert panel.note.startswith("10 messages sent, 2 read twice, 1 lost; queues with handlers of two members: 60 ms")
    (twice,) = panel.twice
    assert (twice.begin, twice.end, twice.count, twice.first, twice.second) == (320, 480, 2, "a", "b")
    assert [(span.owner, span.begin, span.end) for span in panel.spans] == [("a", 0, 450), ("b", 320, 880)]


def test_a_page_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        write_page(tmp_path / "page.html", "empty", [Panel("", "", [], [])], "")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_it_whatever_members_are_called(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    nasty = "</script><b>ada</b>"
    panel = panel_of(OWNED, [Mark(1500, nasty)], {**NAMES, "id-1": nasty}, told=TOLD)
    page = tmp_path / "page.html"
    write_page(page, "Rocketlet & <friends>", [panel], "the summary")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert drawn.count('class="span"') == len(OWNED)
    assert drawn.count('class="gap"') == 2
    assert "<b>ada</b>" not in drawn.replace("\\/", "/").partition('id="data"')[0]
    assert "<h1>Rocketlet &amp; &lt;friends&gt;</h1>" in drawn


async def test_labels_do_not_overlap_on_a_phone_and_rates_and_hand_overs_are_explained(tmp_path: Path) -> None:
    marks = [Mark(1100 + 150 * number, f"member number {number} joins") for number in range(9)]
    samples = [Sample(1000 + 250 * index, 100 * index, 20 * index if index < 9 else 100 * index) for index in range(17)]
    write_page(tmp_path / "page.html", "x", [panel_of(OWNED, marks, NAMES, told=TOLD, samples=samples)], "")
    async with windows_of(tmp_path.as_uri(), tmp_path) as windows:
        window = await windows.new(width=360)
        await window.open("/page.html")
        boxes = await window.page.evaluate(
            "[...document.querySelectorAll('.mark text')].map((it) => it.getBoundingClientRect()).map((it) => "
            "[it.left, it.right, it.top, it.bottom])"
        )
        assert len(boxes) == 9
        for one, other in combinations(boxes, 2):
            assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2], (one, other)
        assert min(box[0] for box in boxes) >= 0
        assert max(box[1] for box in boxes) <= 360
        assert await window.page.evaluate("document.documentElement.scrollWidth") == 360
        rates = await window.text(".rates")
        assert "sent, a second\nhandled, a second\nnot handled yet, messages: at most 640, 2.0 s after" in rates
        assert "700 ms after “member number 8 joins”" in rates
        await window.page.click("summary")
        assert "1970-01-01 00:00:02.000 UTC\tbroker-a:0\tada\tben\t6 ms" in await window.text("details")
        await window.picture("demo-phone", full=True)
