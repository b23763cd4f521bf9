"""Each patch in `campaigns/faults/` plants a fault in a copy of the tree, and the command in its first line must notice it.

A try is one patch. A fault of this campaign is a command that ends with 0 although the fault is planted. `--only` takes one
patch by its name.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from .common import Limit, Outcome

ROOT: Final = Path(__file__).parents[1]
PATCHES: Final = tuple(sorted((ROOT / "campaigns" / "faults").glob("*.patch")))
NOTICED_BY: Final = "Noticed by: python "
MAX_CPU_S: Final = 300  # a command that a planted fault keeps running has noticed it
NOT_SOURCE: Final = (".*", "__pycache__", "build", "dist", "site", "*.egg-info", "demo-output", "rocketlet-data")


class Fault(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    text: str


def read(path: Path) -> Fault:
    """Raises ValueError for a patch whose first line names no command."""
    first, _, rest = path.read_text().partition("\n")
    if not first.startswith(NOTICED_BY):
        raise ValueError(f"{path.name}: the first line is not `{NOTICED_BY}...`")
    return Fault(path.stem, tuple(first.removeprefix(NOTICED_BY).split()), rest.partition("--- a/")[0].strip())


def apply(path: Path, folder: Path, *options: str) -> None:
    """Raises RuntimeError for a patch that does not apply to the tree in the folder."""
    command = ["git", "apply", *options, str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.name} does not apply: {done.stderr.strip()}; adapt it to the changed source")


def faults(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    tree = folder / "rocketlet"  # the package's name, so that processes import this copy
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    chosen = [path for path in PATCHES if limit.only in (None, path.stem)]
    for _, path in zip(limit, chosen, strict=False):
        fault = read(path)
        apply(path, tree)
        is_noticed = _is_noticed(fault, tree)
        apply(path, tree, "--reverse")
        print(f"{fault.name}: {'noticed' if is_noticed else 'not noticed'}", flush=True)
        if not is_noticed:
            outcome.fault(f"not noticed: {fault.text} ({fault.name})")


def _is_noticed(fault: Fault, tree: Path) -> bool:
    """Raises RuntimeError for a command that fails in another way."""
    command = [sys.executable, *fault.arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False, preexec_fn=_limit
    )
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return True
    if done.returncode not in (0, 1) or (done.returncode == 1 and "Traceback" in done.stderr):
        raise RuntimeError(f"{fault.name}: {' '.join(command[1:])} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.returncode == 1


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 5))
