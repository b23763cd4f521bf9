"""Each campaign with few tries; by hand they run for hours (campaigns/README.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from campaigns import faults
from campaigns.__main__ import CAMPAIGNS, last_line
from campaigns.common import Outcome

SHORT = {
    "frames": 1500,
    "calls": 2000,
    "files": 50,
    "power": 50,
    "disk": 30,
    "kill": 3,
    "pop": 40,
    "descriptors": 2,
    "exhaustion": 18,
    "cost": 300,
    "forge": 60,
    "incidents": 6,
}


def campaign(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "campaigns", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return found


LONGEST = "exhaustion"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == LONGEST else []) for name in SHORT]
)
def test_a_short_campaign_finds_nothing(name: str) -> None:
    last = campaign(name, "--count", str(SHORT[name]))
    assert (last["campaign"], last["faults"]) == (name, 0)
    assert last["tried"] == SHORT[name]


def test_the_last_line_is_one_line_whatever_it_quotes() -> None:
    line = last_line("frames", 1, Outcome(1, figures={"frame": "a\x85b\u2028c"}))
    assert len(line.splitlines()) == 1
    assert orjson.loads(line)["frame"] == "a\x85b\u2028c"


@pytest.mark.parametrize("path", faults.PATCHES, ids=lambda path: path.stem)
def test_a_patch_that_plants_a_fault_applies_to_the_source(path: Path) -> None:
    faults.apply(path, faults.ROOT, "--check")
    fault = faults.read(path)
    assert fault.text
    assert fault.arguments[0] == "-m"
    assert fault.arguments[1] == "pytest" or fault.arguments[2] in CAMPAIGNS
