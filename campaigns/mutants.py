"""Small mistakes in the rooms of leases and groups, one at a time: tests or the simulation must find each.

A try is one mistake (`_operators`). First it is seen which test calls which function (`_calls`). Then a process is forked for
each mistake: it puts the mistake into the function, runs the quickest tests that call it until one fails, and a seed of each
situation that has to do with the room. A fault is a mistake that survives all that. Some change nothing that can be seen;
`REASONS` says why.

`--only` names a file, or a part of its path; without `--count` all mistakes are tried, in an order that the seed decides.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import orjson
import pytest
import structlog

from ._operators import Mutant, changed, mutants
from ._reasons import reason_of
from .common import Limit, Outcome

ROOT: Final = Path(__file__).parents[1]
DEFAULT_COUNT = 1_000_000  # all
AT_ONCE: Final = 2
TESTS: Final = 25  # tests for a mistake, and
TESTS_S: Final = 6.0  # so long, if nothing fails
OVER_S: Final = 20.0  # a run that takes so much longer runs away

ROOMS: Final[dict[str, tuple[str, ...]]] = {
    "client/lease.py": ("frozen-at-a-request", "member-away"),
    "client/member/hand_overs.py": ("away-in-hand-overs", "lost-while-handled"),
    "client/member/heartbeats.py": ("broker-away", "unheard-restart"),
    "client/member/leases.py": ("away-in-hand-overs", "frozen-at-a-request", "hasty-members", "lost-while-handled"),
    "client/member/locks.py": ("frozen-at-a-request", "hasty-members", "killed-at-hand-over"),
    "client/member/membership.py": ("broker-away", "long-hand-over"),
    "client/member/rebalance.py": ("broker-away", "long-hand-over"),
    "client/member/shares.py": ("broker-away", "told-in-turns"),
    "broker/groups/member.py": ("", "foreign-members"),
    "broker/groups/members.py": ("", "foreign-members"),
    "broker/groups/notifications.py": ("told-in-turns", "foreign-members"),
    "broker/groups/rebalances.py": ("", "told-in-turns"),
    "broker/groups/sticky.py": ("", "broker-away"),
    "broker/groups/owning/locks.py": ("killed-at-hand-over", "member-away", "only-a-broker-stands"),
    "broker/groups/owning/offsets.py": ("broker-killed", "handled-out-of-order"),
    "broker/groups/owning/watch.py": ("foreign-members", "foreign-storm"),
    "broker/groups/foreign/agreement.py": ("foreign-members-of-two",),
    "broker/groups/foreign/allotment.py": ("foreign-members", "foreign-members-of-two"),
    "broker/groups/foreign/claims.py": ("foreign-members", "foreign-members-of-two"),
    "broker/groups/foreign/drain.py": ("foreign-members", "foreign-members-of-two"),
    "broker/groups/foreign/draining.py": ("foreign-members", "foreign-members-of-two", "foreign-storm"),
    "broker/groups/foreign/moves.py": ("foreign-members", "foreign-members-of-two"),
    "broker/groups/foreign/notices.py": ("foreign-members", "foreign-members-of-two", "foreign-storm"),
    "broker/groups/foreign/given.py": ("foreign-members", "foreign-members-of-two"),
    "broker/groups/foreign/owners.py": ("foreign-members", "foreign-members-of-two"),
}
"""The files, and what of the simulation is played of each."""

_NEAREST: Final = (
    "tests/client/test_hand_overs.py tests/client/test_leases.py tests/client/test_locks.py tests/client/test_rebalance.py "
    "tests/client/test_group_tools.py tests/client/test_moved_brokers.py tests/client/test_offsets.py "
    "tests/client/test_idle_commits.py tests/client/test_last_commit.py tests/client/test_lost_tail.py "
    "tests/client/test_many_queues.py tests/client/test_topics_made_anew.py tests/client/test_silences.py "
    "tests/broker/groups tests/broker/messages/test_deleted_topics.py tests/broker/sessions/test_limits.py"
).split()


@dataclass(slots=True)
class Test:
    """One that passed without any mistake: what it calls, as path and first line."""

    name: str
    seconds: float
    calls: set[tuple[str, int]]


@dataclass(slots=True)
class Try:
    mutant: Mutant
    end_s: float
    began_s: float = field(default_factory=time.monotonic)


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    paths = [path for path in ROOMS if limit.only is None or limit.only in path]
    everything = [mutant for path in paths for mutant in mutants(path, (ROOT / path).read_text())]
    random.Random(seed).shuffle(everything)
    tests = list(_tests(paths, folder))
    _load(paths)
    outcome, found = Outcome(), Counter[str]()
    by_file: dict[str, Counter[str]] = {path: Counter() for path in paths}
    survivors: list[str] = []
    running: dict[int, Try] = {}
    left = (mutant for _, mutant in zip(limit, everything, strict=False))
    while True:
        while len(running) < AT_ONCE and (mutant := next(left, None)) is not None:
            pid, end_s = _fork(mutant, tests)
            running[pid] = Try(mutant, end_s)
        if not running:
            break
        pid, how = _ended(running)
        mutant = running.pop(pid).mutant
        if how == "broken":
            raise RuntimeError(f"{mutant}: it could not be tried")
        outcome.tried += 1
        reason = reason_of(mutant) if how == "survived" else ""
        how = "equal" if reason else how
        found[how] += 1
        by_file[mutant.path][how] += 1
        if how == "survived":
            survivors.append(str(mutant))
            outcome.fault(f"survives: {mutant}")
    told = outcome.tried - found["equal"]
    outcome.figures |= {"mutants": len(everything), "found": told - found["survived"], "by": dict(found)}
    outcome.figures |= {"found_of_100": round(100 * (told - found["survived"]) / max(told, 1), 1)}
    outcome.figures |= {"files": {path: dict(counts) for path, counts in by_file.items() if counts}}
    outcome.figures |= {"survivors": sorted(survivors)}
    return outcome


def _tests(paths: list[str], folder: Path) -> Iterator[Test]:
    """The tests beside these files, the quickest first. Raises RuntimeError if none was run."""
    called = folder / "calls.json"
    nearest = [path for path in _NEAREST if (ROOT / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "campaigns._calls", "-p", "no:cacheprovider", *nearest]
    environment = {"ROCKETLET_CALLS": str(called), "ROCKETLET_CALLED": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not called.exists():
        raise RuntimeError(f"no test was run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    for name, test in sorted(orjson.loads(called.read_bytes()).items(), key=lambda item: item[1]["seconds"]):
        if test["passed"]:
            yield Test(name, test["seconds"], {(path, line) for path, line in test["calls"]})


def _load(paths: list[str]) -> None:
    """Before the forks, so that none of them has to; without a loop or a thread."""
    for path in paths:
        importlib.import_module(_module_of(path))
    importlib.import_module("simulation.world")


def _module_of(path: str) -> str:
    return "rocketlet." + path.removesuffix(".py").replace("/", ".")


def chosen_for(mutant: Mutant, tests: list[Test]) -> tuple[list[str], float]:
    """The tests that are run for it, and how long they take without it."""
    chosen: list[str] = []
    seconds = 0.0
    for test in tests:
        is_calling = any(path == mutant.path and _is_inside(mutant, line) for path, line in test.calls)
        if is_calling and len(chosen) < TESTS and seconds + test.seconds <= TESTS_S:
            chosen.append(test.name)
            seconds += test.seconds
    return chosen, seconds


def _fork(mutant: Mutant, tests: list[Test]) -> tuple[int, float]:
    """The process that has the mistake, and until when it may run."""
    chosen, seconds = chosen_for(mutant, tests)
    end_s = time.monotonic() + OVER_S + 4 * seconds
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.setsid()
        os._exit(_try(mutant, chosen))
    return pid, end_s


def _is_inside(mutant: Mutant, line: int) -> bool:
    return mutant.first_line <= line <= mutant.last_line


def _try(mutant: Mutant, tests: list[str]) -> int:
    """0 if it survives, 1 if a test fails, 2 if a seed does."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    try:
        put(mutant)
        if tests and not _pass(tests):
            return 1
    except BaseException:
        return 3
    try:
        _play(mutant)
    except BaseException:
        return 2
    return 0


def _pass(tests: list[str]) -> bool:
    """Whether they pass, with the logs of a process that has just begun. Raises RuntimeError if they cannot run."""
    logging.disable(logging.NOTSET)
    structlog.reset_defaults()
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
    code = pytest.main([*quiet, "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code}")
    return code == pytest.ExitCode.OK


def _play(mutant: Mutant) -> None:
    """Raises Violation, or what else the mistake leads to."""
    from simulation.world import simulate

    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for scenario in ROOMS[mutant.path]:
        simulate(mutant.number, scenario)


def put(mutant: Mutant) -> None:
    """The mistake is in the function from now on, in this process. Raises ValueError for a function that is not found."""
    module = importlib.import_module(_module_of(mutant.path))
    owner: Any = module
    *outer, name = mutant.function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    code = changed(mutant, (ROOT / mutant.path).read_text(), str(ROOT / mutant.path))
    for function in _functions_in(vars(owner)[name]):
        if function.__code__.co_firstlineno == mutant.first_line:
            function.__code__ = code
            return
    raise ValueError(f"{mutant}: the function is not there")


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Those that a decorator has wrapped, too."""
    if isinstance(value, property):
        yield from (item for item in (value.fget, value.fset) if isinstance(item, FunctionType))
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, functools.cached_property):
        yield from _functions_in(value.func)
    elif isinstance(value, FunctionType):
        yield from _functions_in(value.__wrapped__) if hasattr(value, "__wrapped__") else [inspect.unwrap(value)]


_HOW: Final = {0: "survived", 1: "tests", 2: "simulation", 3: "broken"}


def _ended(running: dict[int, Try]) -> tuple[int, str]:
    """Waits for one; what runs away is found, too."""
    while True:
        for pid, found in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return pid, _HOW.get(os.waitstatus_to_exitcode(status), "tests")
            if time.monotonic() > found.end_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid, "time"
        time.sleep(0.05)
