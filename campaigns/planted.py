"""Each fix is taken out, and its campaign must find that: a campaign that misses a fault in place proves nothing without
one.

A try is one removal: the campaign runs as a process with `--plant`. A fault is a removal that its campaign does not find. A
run that exceeds its time or memory counts as found, too: the limits are the operating system's.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from ._removal import Removal
from ._removals import REMOVALS
from .common import Limit, Outcome

DEFAULT_COUNT = len(REMOVALS)
MAX_CPU_S = 240
MAX_BYTES = 4 << 30


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    names = [limit.only] if limit.only else list(REMOVALS)
    for _, name in zip(limit, names, strict=False):
        removal = REMOVALS[name]
        found = _plant(name, removal, seed, limit)
        outcome.figures[name] = found
        print(f"{name}: {found['faults']} faults in {found['tried']} tries of {removal.campaign}", flush=True)
        if not found["faults"]:
            outcome.fault(f"{removal.campaign} does not find that it is not so: {removal.what} ({name})")
        outcome.tried += 1
    return outcome


def _plant(name: str, removal: Removal, seed: int, limit: Limit) -> dict[str, Any]:
    command = [sys.executable, "-m", "campaigns", removal.campaign, "--plant", name, "--json"]
    command += ["--count", str(removal.tries), "--seed", str(seed), *(("--only", removal.only) if removal.only else ())]
    command += ["--first"] if limit.ends_at_fault else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_limits)
    kind = {"campaign": removal.campaign, "tried": removal.tries}
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {**kind, "faults": 1, "found": f"more than {MAX_CPU_S} s of processor time"}
    if done.returncode != 0 and "MemoryError" in done.stderr:
        return {**kind, "faults": 1, "found": f"more than {MAX_BYTES >> 20} MiB of memory"}
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    last = orjson.loads(done.stdout.splitlines()[-1])
    return {**kind, "tried": last["tried"], "faults": last["faults"], "found": _most(done.stdout)}


def _most(text: str) -> str:
    """The kind of fault that was met most often."""
    counted = [line.split(maxsplit=1) for line in text.splitlines()[1:-1] if line[:8].strip().isdecimal()]
    return counted[0][1] if counted else ""


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
