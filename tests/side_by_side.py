"""Which tests run in one worker of pytest-xdist: those that share what is expensive to start.

This is a scheduler of our own, because the marker `xdist_group` has no effect with pytest 9.2 and pytest-xdist 3.8.
"""

from __future__ import annotations

import re
from typing import Final

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WORKERS_PER_CORE: Final = 3
"""More than one, because tests wait for other processes; not many more, because Spark gives up on a Python process that has
not answered after 10 s. Half of them begin with quick tests."""

# Tests whose id matches form a group, one for each value of what is captured. Spark has two sessions.
GROUPS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"tests/spark/test_source\.py|tests/spark/test_worker_start\.py::test_processes_of_the_format"
        r"|tests/spark/test_internals\.py::test_query_commits_and_stops",
        r"tests/spark/test_sink\.py",
        r"tests/interop/test_(?:our_client|planners|console|shared_consumer)\.py::.*\[(rocketlet|4\.9\.7|5\.5\.0)\b",
        r"tests/interop/test_access\.py",
        r"tests/interop/test_rust\.py",  # one compiles, and the others would wait for it
        r"tests/test_(?:architecture|names|handed_in)\.py",  # each parses all modules
        r"_pyright_",  # npx installs it where it finds none
    )
)

QUICK: Final = re.compile(r"tests/(?:broker|client|command|protocol|testing)/|tests/[^/]*\.py")
"""Tests of milliseconds, most of them."""


def group(test: str) -> str:
    """The group of a test by its id; the id itself if it needs none."""
    for number, pattern in enumerate(GROUPS):
        found = pattern.search(test)
        if found:
            return " ".join((f"group {number}", *found.groups()))
    return test


def place(test: str, *, is_long: bool) -> int:
    """The longest tests begin first, so that no worker is left alone with one at the end. A worker is given three tests at
    a time, so the thousand that take milliseconds come last."""
    if is_long:
        return 0
    if "tests/spark/" in test:
        return 1
    return 3 if QUICK.search(test) and group(test) == test else 2


class Scheduling(LoadScopeScheduling):
    """A group goes to one worker, and every other test to whichever has least to do. Every second worker takes the tests from
    the end, where the quick ones are: these leave processor time to the programs that the long ones start."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if [*self.assigned_work].index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
