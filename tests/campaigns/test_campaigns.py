"""Each campaign, short: by hand they run for hours (docs/reliability.md)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import orjson
import pytest

from campaigns.__main__ import last_line
from campaigns._removals import REMOVALS, planted
from campaigns.common import Outcome

SHORT = {
    "frames": 3000,
    "calls": 2000,
    "floods": 16,
    "files": 100,
    "power": 100,
    "disk": 60,
    "kill": 3,
    "pop": 3,
    "descriptors": 2,
    "exhaustion": 9,
    "stalls": 27,
    "chaos": 6,
    "access": 2000,
    "cost": 300,
    "handlers": 3,
    "forge": 60,
    "waiting": 15,
    "incidents": 4,
}
PLANTED = (
    "roll-back",
    "journal-synced",
    "index-sums",
    "names",
    "marked",
    "places-indexed",
    "pop-synced",
    "receives-ruled",
    "blocks-ended",
)
"""Fixes that are taken out each time; the others by hand."""


def campaign(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "campaigns", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", SHORT)
def test_a_short_campaign_finds_nothing(name: str) -> None:
    last = campaign(name, "--count", str(SHORT[name]))
    assert (last["campaign"], last["faults"]) == (name, 0)
    assert last["tried"] == SHORT[name]


def test_the_last_line_is_one_line_whatever_it_quotes() -> None:
    line = last_line("frames", 1, Outcome(1, figures={"frame": "a\x85b\u2028c"}))
    assert len(line.splitlines()) == 1
    assert orjson.loads(line)["frame"] == "a\x85b\u2028c"


@pytest.mark.skipif(find_spec("atheris") is None, reason="needs the extra fuzz")
def test_frames_that_follow_the_code_find_nothing() -> None:
    last = campaign("guided", "--count", "2000")
    assert (last["tried"], last["faults"]) == (2000, 0)
    assert last["covered"] > 0


@pytest.mark.parametrize("name", PLANTED)
def test_a_campaign_finds_that_a_fix_is_missing(name: str) -> None:
    last = campaign("planted", "--only", name, "--seed", "5", "--first")
    assert (last["tried"], last["faults"]) == (1, 0)
    assert last[name]["faults"] > 0


@pytest.mark.parametrize("name", REMOVALS)
def test_a_fix_can_be_taken_out_and_is_there_again(name: str) -> None:
    changes = REMOVALS[name].changes
    before = [getattr(change.owner, change.attribute, None) for change in changes]
    with planted(name):
        for change, real in zip(changes, before, strict=True):
            assert getattr(change.owner, change.attribute) is not real
    assert [getattr(change.owner, change.attribute, None) for change in changes] == before
