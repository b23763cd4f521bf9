"""The campaign of small mistakes: what is changed, and where it is put."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
from rocketlet.client.lease import Lease

from campaigns import _reasons
from campaigns import mutants as campaign
from campaigns._operators import Mutant, changed, mutants

SOURCE = '''
def outer(value, items):
    """Says 1."""
    log.info("count", count=1)
    if value and items:
        items.clear()
    while value < 2:
        value += 1
    return value == 2, "a" + "b"


class Owner:
    @property
    def is_here(self):
        def inner():
            return not self.gone
        self.asked = True
        return inner()
'''


def code_of_is_over() -> FunctionType:
    (function,) = campaign._functions_in(vars(Lease)["is_over"])
    return function


@pytest.fixture
def of_lease() -> Iterator[Mutant]:
    """The mistake of a lease that is over one moment too late, which is taken back at the end."""
    function = code_of_is_over()
    code = function.__code__
    path = "client/lease.py"
    yield next(item for item in mutants(path, campaign.source_of(path)) if item.function == "Lease.is_over")
    function.__code__ = code


def test_each_place_is_changed_once_and_log_lines_and_texts_are_not() -> None:
    assert [(item.function, item.what) for item in mutants("x.py", SOURCE)] == [
        ("outer", "not `value and items`"),
        ("outer", "`value and items` with Or"),
        ("outer", "`value < 2` with LtE"),
        ("outer", "3 in `while value < 2: value += 1`"),
        ("outer", "`value == 2` with NotEq"),
        ("outer", "3 in `return (value == 2, 'a' + 'b')`"),
        ("outer", "without `items.clear()`"),
        ("outer", "without `value += 1`"),
        ("outer", "2 in `value += 1`"),
        ("Owner.is_here", "without `self.asked = True`"),
        ("Owner.is_here", "False in `self.asked = True`"),
    ]


def test_every_mistake_of_every_room_has_code() -> None:
    for path in campaign.ROOMS:
        source = campaign.source_of(path)
        for mutant in list(mutants(path, source))[::10]:
            assert changed(mutant, source, path).co_qualname == mutant.function


def test_a_mistake_is_in_the_function_that_everybody_has_imported(of_lease: Mutant) -> None:
    assert of_lease.what == "`clock_s() >= self.ends_s` with Lt"
    before = code_of_is_over().__code__.co_code
    campaign.put(of_lease)
    assert code_of_is_over().__code__.co_code != before


def verdict(of_lease: Mutant, passes: Callable[[], bool], folder: Path, limit_s: float = 60.0) -> campaign.Verdict:
    """The verdict of one check."""
    return campaign._try(of_lease, [campaign.Check("check", "tests", limit_s, passes)], folder)


def test_a_check_notices_that_fails_with_the_mistake_only(of_lease: Mutant, tmp_path: Path) -> None:
    assert verdict(of_lease, lambda: not Lease(1).is_over, tmp_path) == campaign.Verdict("tests", "check", ())
    assert verdict(of_lease, lambda: True, tmp_path) == campaign.Verdict("survived", "", ())
    assert verdict(of_lease, lambda: False, tmp_path) == campaign.Verdict("survived", "", ("check",))
    assert not Lease(1).is_over  # here there is no mistake


def test_a_check_that_does_not_end_is_said_apart(of_lease: Mutant, tmp_path: Path) -> None:
    def loops() -> bool:
        while Lease(1).is_over:
            pass
        return True

    def stands() -> bool:
        if Lease(1).is_over:
            time.sleep(600)
        return True

    assert verdict(of_lease, loops, tmp_path, 1.0).how == "loops"
    assert verdict(of_lease, stands, tmp_path, 1.0).how == "stands"


MEASURED = """
import sys
from pathlib import Path
from campaigns._checks import Checks, collect, quickest
def then(checks, tests):
    for line in (36, 37, 38):
        found = quickest(tests, "client/lease.py", range(line, line + 1), count=9, seconds=9.0)
        print(line, [test.item.name for test in found], file=sys.__stdout__)
collect(["test_it.py"], Checks(Path(%r), ["client/lease.py"], Path(), then))
"""
SMALL_TEST = """
from rocketlet.client.lease import Lease
def test_that_calls(): assert not Lease(1).is_over
def test_that_does_not(): Lease(1)
def test_that_fails(): assert Lease(1).is_over
"""


def test_the_tests_of_a_mistake_are_those_that_run_its_line_and_pass(of_lease: Mutant, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SMALL_TEST)
    found = subprocess.run(
        [sys.executable, "-c", MEASURED % str(campaign.ROOT)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(campaign.ROOT)},
        capture_output=True,
        text=True,
    )
    assert of_lease.line == 37
    assert found.stdout.splitlines() == ["36 []", "37 ['test_that_calls']", "38 []"], found.stderr


def test_a_reason_of_a_mistake_that_is_not_there_is_stale(of_lease: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {(of_lease.function, of_lease.what): "because", ("Lease.is_over", "another"): "because"}
    monkeypatch.setattr(_reasons, "REASONS", reasons)
    assert _reasons.reason_of(of_lease) == "because"
    assert _reasons.stale([of_lease]) == ["Lease.is_over: another"]


def test_no_reason_is_stale() -> None:
    assert not _reasons.stale(item for path in campaign.ROOMS for item in mutants(path, campaign.source_of(path)))
