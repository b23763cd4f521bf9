"""Some seeds, and the replay; `python -m simulation 0 10000` runs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.weeks import grown

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "45"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, whose hashes do not vary."""
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(3))
def test_what_must_hold_holds_for_every_seed(part: int) -> None:
    size = SEEDS // 3
    found = run(str(part * size), str((part + 1) * size))
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]


@pytest.mark.timeout(600)
def test_what_must_hold_holds_where_messages_are_shared() -> None:
    found = run("0", str(SEEDS // 4), "--shared")
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]


def test_a_table_of_all_continues_from_its_record(tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    for seeds in (1, 3):
        found = run("0", str(seeds), "--all", "--scenario", "lite-exclusive", "--record", str(record))
        assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["scenario"], line["seed"], line["fault"]) for line in lines] == [
        ("lite-exclusive", seed, "") for seed in range(3)
    ]
    assert "| lite-exclusive | 3 | 0 | 0 | 0 |" in found.stdout


def test_the_table_of_cases_names_tests_that_exist() -> None:
    """campaigns/README.md: a row has a case and its tests, each as a sentence after the file that contains it."""
    text = (ROOT / "campaigns" / "README.md").read_text()
    table = text.partition("| Case | Test |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    assert len(rows) == 11
    for _case, tests in rows:
        source = ""
        for part in tests.split(";"):
            *file, sentence = part.split(":")
            if file:
                source = (ROOT / file[0].strip("` ")).read_text()
            name = sentence.strip().replace(" ", "_").replace("'", "")
            assert f"def test_{name}(" in source, sentence


def test_a_seed_replays_exactly() -> None:
    two, one = run("0", "2", "--digest"), run("0", "1", "--digest")
    digests = [line for line in two.stdout.splitlines() if not line.startswith("2 seeds")]
    assert len(set(digests)) == len(digests) == 2
    assert one.stdout.splitlines()[0] == digests[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("weather", [(), ("--stormy",)], ids=["calm", "stormy"])
def test_nothing_grows_in_an_hour(weather: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "simulation.weeks", "--hours", "0.5", "--samples", "4", *weather],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert json.loads(found.stdout)["last"]["connections"] >= 3


def test_what_grows_is_named() -> None:
    samples = [{"objects": 1000 + 50 * number, "files": 3} for number in range(8)]
    assert grown(samples) == ["objects: 1050 at first, 1300 at last"]
