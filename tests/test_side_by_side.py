"""Tests that share something expensive are in one group, and begin before the others."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

import pytest
from _pytest.terminal import TerminalReporter
from xdist.workermanage import WorkerController

from .conftest import pytest_terminal_summary
from .side_by_side import Scheduling, group, place


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ("tests/spark/test_source.py::test_a", "tests/spark/test_source.py::test_b[x]", True),
        ("tests/spark/test_source.py::test_a", "tests/spark/test_sink.py::test_b", False),
        (
            "tests/spark/test_source.py::test_a",
            "tests/spark/test_worker_start.py::test_processes_of_the_format_have_x",
            True,
        ),
        ("tests/spark/test_planner.py::test_a", "tests/spark/test_planner.py::test_b", False),
        ("tests/interop/test_our_client.py::test_a[4.9.7]", "tests/interop/test_our_client.py::test_b[4.9.7-x]", True),
        ("tests/interop/test_our_client.py::test_a[4.9.7]", "tests/interop/test_our_client.py::test_a[5.5.0]", False),
        ("tests/interop/test_our_client.py::test_a[4.9.7]", "tests/interop/test_planners.py::test_a[4.9.7]", True),
        ("tests/interop/test_access.py::test_a", "tests/interop/test_access.py::test_b", True),
        ("tests/client/test_typed.py::test_by_pyright_strict", "tests/packaging/test_x.py::test_with_pyright_x", True),
        ("tests/client/test_silences.py::test_a", "tests/client/test_silences.py::test_b", False),
    ],
)
def test_what_is_shared_is_one_group(one: str, other: str, is_shared: bool) -> None:
    assert (group(one) == group(other)) == is_shared


def test_what_takes_long_begins_first_and_what_is_quick_comes_last() -> None:
    tests = [
        "tests/a.py::test", "tests/client/test_silences.py::test", "tests/client/test_typed.py::test_by_pyright_strict",
        "tests/interop/test_access.py::test", "tests/process/test_demo.py::test", "tests/spark/test_sink.py::test",
    ]  # fmt: skip
    assert [place(test, is_long=False) for test in tests] == [3, 3, 2, 2, 2, 1]
    assert place(tests[0], is_long=True) == 0


def test_every_second_worker_begins_with_quick_tests_and_no_test_comes_twice() -> None:
    given = [
        "tests/spark/a.py::test",
        "tests/spark/b.py::test",
        *(f"tests/quick.py::test{number}" for number in range(6)),
    ]
    scheduling = Scheduling(cast("pytest.Config", TwoWorkers()))
    workers = [Worker(), Worker()]
    for worker in workers:
        scheduling.add_node(cast("WorkerController", worker))
        scheduling.add_node_collection(cast("WorkerController", worker), given)
    scheduling.schedule()
    assert [worker.taken[0] for worker in workers] == [0, 7]
    while scheduling.has_pending:
        for worker in workers:
            for number in worker.taken[worker.done :]:
                worker.done += 1
                scheduling.mark_test_complete(cast("WorkerController", worker), number)
    assert sorted(number for worker in workers for number in worker.taken) == list(range(8))


class TwoWorkers:
    """What the scheduler reads of pytest's settings."""

    option = SimpleNamespace(loadscopereorder=False)

    def getvalue(self, name: str) -> list[str]:
        return {"tx": ["2*popen"]}[name]


class Worker:
    """A worker of pytest-xdist: `taken` are the numbers of its tests."""

    def __init__(self) -> None:
        self.gateway = self
        self.id = "gw"
        self.taken: list[int] = []
        self.done = 0
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.taken += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_summary_says_why_a_test_was_retried(pytestconfig: pytest.Config) -> None:
    printed = io.StringIO()
    reporter = TerminalReporter(pytestconfig, printed)
    location = ("tests/a.py", 1, "test")
    sections = [("Captured stdout call", "what it printed")]
    report = pytest.TestReport("tests/a.py::test", location, {}, "failed", "the reason", "call", sections)
    reporter.stats["rerun"] = [report]
    pytest_terminal_summary(reporter)
    for text in ("why tests/a.py::test was retried", "the reason", "what it printed"):
        assert text in printed.getvalue()
