"""Tests stand in folders named as the rooms of the product, and share by modules that have no tests of their own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tests_of_the_broker_are_in_the_folder_of_their_room() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests" / "broker").rglob("test_*.py")]
    folders = {path.parent.as_posix() for path in tests} - {"broker"}
    rooms = [folder for folder in folders if (ROOT / folder).is_dir() or (ROOT / f"{folder}.py").is_file()]
    assert sorted(folders) == sorted(rooms)
    in_the_hall = {path.stem.removeprefix("test_") for path in tests if path.parent.name == "broker"}
    assert [name for name in sorted(in_the_hall) if not (ROOT / "broker" / f"{name}.py").is_file()] == []


def test_no_module_of_tests_imports_from_another_one() -> None:
    """Tests share by their folders' conftest, and by modules that have no tests of their own."""
    shared = re.compile(r"^from \.[\w.]*\btest_\w+ import", re.M)
    modules = [path for path in (ROOT / "tests").rglob("*.py") if shared.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in modules] == []


def test_every_folder_of_tests_says_what_its_shared_modules_are() -> None:
    """Those that have no tests of their own, besides conftest."""
    missing: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        package = path.parent / "__init__.py"
        if path.stem in ("__init__", "conftest") or path.stem.startswith("test_") or not package.exists():
            continue
        if not re.search(rf"^(\w+, )*{path.stem}\b", ast.get_docstring(ast.parse(package.read_text())) or "", re.M):
            missing.append(f"{package.relative_to(ROOT)} does not say what {path.stem} is")
    assert missing == []
