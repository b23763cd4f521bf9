"""The main job itself, short: every flight accounted for, Spark's table equal, the picture drawn."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.client import Consumer, Message
from rocketlet.demo.replay import TOPIC, replay

from ..conftest import PATIENCE_S, Node


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
