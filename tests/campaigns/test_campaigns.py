"""Each campaign, short: by hand they run for hours (docs/reliability.md)."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

SHORT = {
    "frames": 3000,
    "files": 100,
    "power": 100,
    "disk": 60,
    "kill": 3,
    "descriptors": 2,
    "exhaustion": 8,
    "stalls": 27,
    "chaos": 6,
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_campaign_finds_nothing(name: str) -> None:
    command = [sys.executable, "-m", "tests.campaigns", name, "--count", str(SHORT[name]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = orjson.loads(done.stdout.splitlines()[-1])
    assert (last["campaign"], last["faults"]) == (name, 0)
    assert last["tried"] == SHORT[name]
