"""`frames`, led by the code that they reach: libFuzzer changes frames, and keeps those that reach code it has not seen.

Needs the extra `fuzz` (atheris). The frames it begins with are those of `frames`, and a fault is what is one there; the
honest client, timers and limits are the same. `covered` is how many places of broker and protocol were reached.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import orjson

from .common import PROGRESS_S, Limit, Outcome

DEFAULT_COUNT = 20_000
COVERED = re.compile(r"cov: (\d+) .*corp: (\d+)/.*exec/s: (\d+)")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    if find_spec("atheris") is None:
        raise SystemExit("guided needs atheris: pip install 'rocketlet[fuzz]'")
    options = ["-rss_limit_mb=2048", "-max_len=20000", "-timeout=60", f"-seed={seed % (1 << 31) or 1}"]
    options += [f"-max_total_time={int(limit.seconds)}"] if limit.seconds else [f"-runs={limit.count}"]
    command = [sys.executable, "-m", "campaigns._guided", str(folder), str(seed), *options]
    outcome = Outcome(figures={"covered": 0, "inputs_kept": 0, "per_second": 0})
    log = folder / "log"
    with log.open("wb") as target:
        child = subprocess.Popen(command, stdout=target, stderr=target)
        while child.poll() is None:
            try:
                child.wait(PROGRESS_S)
            except subprocess.TimeoutExpired:
                print(f"{_read(folder, outcome)} tried", file=sys.stderr, flush=True)
    _read(folder, outcome)
    text = log.read_text(errors="replace")
    for match in COVERED.finditer(text):
        figures = outcome.figures
        figures["covered"], figures["inputs_kept"], figures["per_second"] = map(int, match.groups())
    if child.returncode != 0:
        outcome.fault(f"the process ended with {child.returncode}: {text[-500:]}")
    return outcome


def _read(folder: Path, outcome: Outcome) -> int:
    """Reads the findings of the process so far."""
    found = folder / "found.json"
    if found.exists():
        data = orjson.loads(found.read_bytes() or b"{}")
        outcome.tried, faults = data.get("tried", 0), data.get("faults", {})
        for fault in faults.keys() - outcome.faults.keys():
            outcome.fault(fault)
        outcome.faults.update(faults)
    return outcome.tried
