"""Tests use what users use, and wait for conditions: private accesses and sleeps only become fewer."""

from __future__ import annotations

import ast

import pytest

from .support import habits


def test_private_accesses_and_sleeps_are_no_more_than_the_committed_counts() -> None:
    private, slept = habits.found()
    assert len(private) <= habits.MOST_PRIVATE_ACCESSES, "use public behaviour: python -m tests.support.habits --list"
    assert len(slept) <= habits.MOST_SLEEPS, "wait for a condition with `eventually`, or move the clock"


@pytest.mark.parametrize(
    "text",
    [
        "consumer._membership.x",
        "from rocketlet.broker.store.index import _read",
        "monkeypatch.setattr(Pool, '_places', 1)",
        "mock.patch.setattr('rocketlet.client.wire.home._mine', 1)",
    ],
)
def test_a_private_access_is_found(text: str) -> None:
    assert len(list(habits.private_accesses(ast.parse(text)))) == 1


def test_names_of_the_tests_and_of_python_are_no_private_accesses() -> None:
    tree = ast.parse("class Reader:\n    def read(self):\n        self._lines = []\nreader._lines\nnode.__dict__")
    own = set(habits.defined(tree))
    assert [name for _, name in habits.private_accesses(tree) if name not in own] == []


@pytest.mark.parametrize(
    ("text", "count"), [("time.sleep(1)", 1), ("await asyncio.sleep(pause_s)", 1), ("await asyncio.sleep(0)", 0)]
)
def test_a_sleep_is_found_unless_it_is_of_length_0(text: str, count: int) -> None:
    assert len(list(habits.sleeps(ast.parse(f"async def f():\n    {text}")))) == count
