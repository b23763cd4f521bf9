"""Small mistakes in the rooms of leases and groups, one at a time: tests or the simulation must notice each.

A try is one mistake (`_operators`). First all tests near these rooms run once, to see which lines each runs (`_checks`); the
cache of pytest knows them the next time. Then a process is forked for each mistake: it puts the mistake into the function,
runs the quickest tests that run its line until one fails, and a seed of each situation of the simulation that has to do with
the room. A check that fails must pass at once without the mistake, or it counts for nothing. A fault is a mistake that
survives. Some change nothing that can be seen: `_reasons` says why, and a reason of a mistake that is not there any more is a
fault, too.

`--only` names a file, or a part of its path, or a file and a line. Without `--count` all mistakes are tried, in an order that
the seed decides.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import orjson
import structlog

from ._checks import AT_ONCE, Checks, Test, collect, forked, quickest, sweep
from ._operators import Mutant, changed, mutants
from ._reasons import reason_of, stale
from .common import Limit, Outcome

ROOT: Final = Path(__file__).parents[1]
DEFAULT_COUNT = 1_000_000  # all
TESTS: Final = 200  # tests for a mistake, and
TESTS_S: Final = 10.0  # so long, if nothing fails
PATIENCE_S: Final = 10.0  # how long a test waits for something
TEST_OVER_S: Final = 20.0  # a test that takes so much longer than without the mistake stands or runs away
SEED_S: Final = 60.0  # a seed takes about one
NICENESS: Final = 19

_LEASES: Final = ("away-in-hand-overs", "frozen-at-a-request", "hasty-members", "lost-while-handled")
_FOREIGN: Final = ("foreign-members", "foreign-members-of-two")

ROOMS: Final[dict[str, tuple[str, ...]]] = {
    "client/lease.py": ("frozen-at-a-request", "member-away"),
    "client/member/hand_overs.py": ("away-in-hand-overs", "lost-while-handled"),
    "client/member/heartbeats.py": ("broker-away", "unheard-restart"),
    "client/member/leases.py": _LEASES,
    "client/member/locks.py": ("frozen-at-a-request", "hasty-members", "killed-at-hand-over"),
    "client/member/membership.py": ("broker-away", "long-hand-over"),
    "client/member/offsets.py": ("broker-killed", "away-in-hand-overs"),
    "client/member/rebalance.py": ("broker-away", "long-hand-over"),
    "client/member/shares.py": ("broker-away", "told-in-turns"),
    "client/consuming/assignment.py": _LEASES,
    "client/consuming/commits.py": ("broker-killed", "handled-out-of-order"),
    "client/consuming/process_queue.py": ("lost-while-handled", "handled-out-of-order"),
    "broker/groups/member.py": ("", "foreign-members"),
    "broker/groups/members.py": ("", "foreign-members"),
    "broker/groups/notifications.py": ("told-in-turns", "foreign-members"),
    "broker/groups/rebalances.py": ("", "told-in-turns"),
    "broker/groups/sticky.py": ("", "broker-away"),
    "broker/groups/owning/locks.py": ("killed-at-hand-over", "member-away", "only-a-broker-stands"),
    "broker/groups/owning/offsets.py": ("broker-killed", "handled-out-of-order"),
    "broker/groups/owning/progress.py": ("foreign-members", "broker-killed"),
    "broker/groups/owning/watch.py": ("foreign-members", "foreign-storm"),
    "broker/groups/foreign/agreement.py": ("foreign-members-of-two",),
    "broker/groups/foreign/allotment.py": (*_FOREIGN, "foreign-of-different-topics"),
    "broker/groups/foreign/claims.py": (*_FOREIGN, "foreign-of-different-topics"),
    "broker/groups/foreign/drain.py": _FOREIGN,
    "broker/groups/foreign/draining.py": (*_FOREIGN, "foreign-storm"),
    "broker/groups/foreign/moves.py": _FOREIGN,
    "broker/groups/foreign/notices.py": (*_FOREIGN, "foreign-storm"),
    "broker/groups/foreign/given.py": (*_FOREIGN, "foreign-of-different-topics"),
    "broker/groups/foreign/owners.py": (*_FOREIGN, "foreign-of-different-topics"),
}
"""The files, and what of the simulation is played of each."""

NEAR: Final = (
    "tests/client",
    "tests/broker/consuming",
    "tests/broker/groups",
    "tests/broker/pops",
    "tests/broker/sessions",
    "tests/broker/observing",
)
"""The folders of the tests that know these rooms."""


@dataclass(frozen=True, slots=True)
class Check:
    """A test or a seed. `limit_s`: it has not ended by itself if it takes longer."""

    name: str
    kind: str
    limit_s: float
    passes: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`how`: "tests", "simulation", "loops", "stands" or "survived". `by`: the check that noticed. `unsteady`: checks that
    failed, but without the mistake, too."""

    how: str
    by: str
    unsteady: tuple[str, ...]


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    everything = [mutant for path in ROOMS for mutant in mutants(path, source_of(path))]
    chosen = [mutant for mutant in everything if limit.only is None or limit.only in f"{mutant.path}:{mutant.line}"]
    random.Random(seed).shuffle(chosen)
    os.nice(NICENESS - os.nice(0))
    os.environ["ROCKETLET_TESTS_PATIENCE_S"] = str(PATIENCE_S)
    logging.disable(logging.NOTSET)
    structlog.reset_defaults()  # tests wait for lines of the log
    outcome = Outcome()
    for reason in stale(everything):
        outcome.fault(f"there is no such mistake any more: {reason}")
    for path in ROOMS:
        importlib.import_module(_module_of(path))
    importlib.import_module("simulation.world")
    campaign = _Campaign(limit, chosen, outcome)
    collect([str(ROOT / near) for near in NEAR], Checks(ROOT, list(ROOMS), folder, campaign.try_all))
    return outcome


class _Campaign:
    def __init__(self, limit: Limit, chosen: list[Mutant], outcome: Outcome) -> None:
        self._limit = limit
        self._chosen = chosen
        self._outcome = outcome
        self._by_file: dict[str, Counter[str]] = {path: Counter() for path in ROOMS}
        self._unsteady: Counter[str] = Counter()

    def try_all(self, checks: Checks, tests: list[Test]) -> None:
        gc.collect()
        gc.freeze()  # imported code stays shared with the forks
        trying: dict[int, Mutant] = {}
        left = (mutant for _, mutant in zip(self._limit, self._chosen, strict=False))
        while True:
            while len(trying) < AT_ONCE and (mutant := next(left, None)) is not None:
                trying[_fork(mutant, _checks_of(mutant, checks, tests), checks.folder)] = mutant
            if not trying:
                break
            pid, _ = os.waitpid(-1, 0)
            self._note(trying.pop(pid), _verdict(checks.folder, pid))
        self._sum_up()

    def _note(self, mutant: Mutant, verdict: Verdict) -> None:
        self._outcome.tried += 1
        self._unsteady.update(verdict.unsteady)
        how = "equal" if verdict.how == "survived" and reason_of(mutant) else verdict.how
        self._by_file[mutant.path][how] += 1
        if how == "survived":
            self._outcome.fault(f"survives: {mutant}")

    def _sum_up(self) -> None:
        by = sum(self._by_file.values(), Counter[str]())
        told = self._outcome.tried - by["equal"]
        found = told - by["survived"]
        self._outcome.figures |= {
            "mutants": len(self._chosen),
            "found": found,
            "found_of_100": round(100 * found / max(told, 1), 1),
            "by": dict(by),
            "files": {path: dict(counts) for path, counts in self._by_file.items() if counts},
            "unsteady": dict(self._unsteady),
        }


@functools.cache
def source_of(path: str) -> str:
    """As it was when the run began."""
    return (ROOT / path).read_text()


def _module_of(path: str) -> str:
    return "rocketlet." + path.removesuffix(".py").replace("/", ".")


def _checks_of(mutant: Mutant, checks: Checks, tests: list[Test]) -> list[Check]:
    found = [
        Check(test.item.nodeid, "tests", TEST_OVER_S + 10 * test.seconds, functools.partial(checks.passes, test.item))
        for test in quickest(tests, mutant.path, mutant.lines, count=TESTS, seconds=TESTS_S)
    ]
    for scenario in ROOMS[mutant.path]:
        name = f"{scenario or 'chance'} {mutant.number}"
        found.append(Check(name, "simulation", SEED_S, functools.partial(_play, scenario, mutant.number)))
    return found


def _play(scenario: str, seed: int) -> bool:
    """Whether the seed has no fault: neither a Violation nor what else a mistake may lead to."""
    from simulation.world import simulate

    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        simulate(seed, scenario)
    except Exception:
        return False
    return True


def _fork(mutant: Mutant, checks: list[Check], folder: Path) -> int:
    """The process that tries it and writes the verdict."""

    def try_it() -> int:
        verdict = _try(mutant, checks, folder)
        (folder / f"{os.getpid()}.json").write_bytes(orjson.dumps(verdict))
        return 0

    return forked(try_it, folder)


def _verdict(folder: Path, pid: int) -> Verdict:
    found = folder / f"{pid}.json"
    if not found.exists():
        raise RuntimeError("a mistake could not be tried")
    shutil.rmtree(folder / str(pid))
    return Verdict(**orjson.loads(found.read_bytes()))


def _try(mutant: Mutant, checks: list[Check], folder: Path) -> Verdict:
    unsteady: list[str] = []
    while True:
        number, how = _noticed(mutant, checks, folder)
        if number is None:
            return Verdict("survived", "", tuple(unsteady))
        check = checks.pop(number)
        if _noticed(None, [check], folder)[0] is None:
            return Verdict(how, check.name, tuple(unsteady))
        unsteady.append(check.name)


def _noticed(mutant: Mutant | None, checks: list[Check], folder: Path) -> tuple[int | None, str]:
    """Which of the checks does not pass, and how; None if all do. In a process of its own."""
    at_file = folder / f"{os.getpid()}.at"
    at_file.write_text("-1")

    def run_all() -> int:
        os.chdir(ROOT)
        if mutant is not None:
            put(mutant)
        for number, check in enumerate(checks):
            at_file.write_text(str(number))
            if not check.passes():
                return 1
        return 0

    pid = forked(run_all, folder)
    how = ""
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        at = int(at_file.read_text() or -1)
        if checks and not how and time.time() - at_file.stat().st_mtime > checks[at].limit_s:
            how = "loops" if _is_busy(pid) else "stands"
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    sweep(pid)
    shutil.rmtree(folder / str(pid), ignore_errors=True)
    if not how and os.waitstatus_to_exitcode(ended[1]) == 0:
        return None, ""
    at = int(at_file.read_text())
    if at < 0:
        raise RuntimeError(f"{mutant}: it could not be tried")
    return at, how or checks[at].kind


def _is_busy(pid: int) -> bool:
    """Whether it computes all the time, and does not wait for anything."""
    states = []
    for _ in range(20):
        states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)
    return states.count("R") > len(states) // 2


def put(mutant: Mutant) -> None:
    """The mistake is in the function from now on, in this process. Raises ValueError for a function that is not found."""
    module = importlib.import_module(_module_of(mutant.path))
    owner: Any = module
    *outer, name = mutant.function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    code = changed(mutant, source_of(mutant.path), str(ROOT / mutant.path))
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
