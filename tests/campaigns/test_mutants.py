"""The campaign of small mistakes: what is changed, and where it is put."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from rocketlet.client.lease import Lease

from campaigns import mutants as campaign
from campaigns._operators import Mutant, changed, mutants
from campaigns._reasons import REASONS

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
    yield next(item for item in mutants(path, (campaign.ROOT / path).read_text()) if item.function == "Lease.is_over")
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
        source = (campaign.ROOT / path).read_text()
        for mutant in list(mutants(path, source))[::10]:
            assert changed(mutant, source, path).co_qualname == mutant.function


def test_a_mistake_is_in_the_function_that_everybody_has_imported(of_lease: Mutant) -> None:
    assert of_lease.what == "`clock_s() >= self.ends_s` with Gt"
    before = code_of_is_over().__code__.co_code
    campaign.put(of_lease)
    assert code_of_is_over().__code__.co_code != before


def test_the_tests_of_a_mistake_are_those_that_call_its_function(tmp_path: Path, of_lease: Mutant) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_nothing():\n    assert True\n")
    found = campaign.Test(str(test), 0.1, {(of_lease.path, of_lease.first_line)})
    assert campaign.chosen_for(of_lease, [found]) == ([str(test)], 0.1)
    assert campaign.chosen_for(of_lease, [campaign.Test(str(test), 0.1, {(of_lease.path, 1)})]) == ([], 0)


def test_the_reasons_are_of_mistakes_that_there_are() -> None:
    there = {
        (item.function, item.what)
        for path in campaign.ROOMS
        for item in mutants(path, (campaign.ROOT / path).read_text())
    }
    assert REASONS.keys() <= there
