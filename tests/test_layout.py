"""Folders of tests are named like the packages that they test, and shared code is in modules without tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .support import habits

ROOT = Path(__file__).parents[1]


def test_tests_of_the_broker_are_in_the_folder_of_their_package() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests" / "broker").rglob("test_*.py")]
    folders = {path.parent.as_posix() for path in tests} - {"broker"}
    packages = [folder for folder in folders if (ROOT / folder).is_dir() or (ROOT / f"{folder}.py").is_file()]
    assert sorted(folders) == sorted(packages)
    of_modules = {path.stem.removeprefix("test_") for path in tests if path.parent.name == "broker"}
    assert [name for name in sorted(of_modules) if not (ROOT / "broker" / f"{name}.py").is_file()] == []


def test_no_module_of_tests_imports_from_another_module_of_tests() -> None:
    """Tests share code through the conftest of their folder and through modules without tests."""
    shared = re.compile(r"^from \.[\w.]*\btest_\w+ import", re.M)
    modules = [path for path in (ROOT / "tests").rglob("*.py") if shared.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in modules] == []


def test_docstring_of_every_folder_of_tests_describes_its_shared_modules() -> None:
    """Shared modules are those without tests, except conftest."""
    missing: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        package = path.parent / "__init__.py"
        if path.stem in ("__init__", "conftest") or path.stem.startswith("test_") or not package.exists():
            continue
        if not re.search(rf"^(\w+, )*{path.stem}\b", ast.get_docstring(ast.parse(package.read_text())) or "", re.M):
            missing.append(f"{package.relative_to(ROOT)} does not describe {path.stem}")
    assert missing == []


# Tests use what users use, and wait for conditions: private accesses and sleeps only become fewer.


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
