"""Counts two habits of tests that make them break or wait without need: `python -m tests.support.habits [--list]`.

A private access is an attribute with a leading underscore of an object other than `self` and `cls`, a name of that kind that
is imported, or one that is replaced by its name (`setattr(Pool, "_places", ...)`). Names that
the same module of tests or a shared one defines do not count, and neither do those that Python documents as public.

A sleep is a call of `sleep` with a constant longer than 0, or with anything else than a constant."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator

from .sources import nodes, texts

MOST_PRIVATE_ACCESSES = 96
MOST_SLEEPS = 1
"""The committed counts, which only become smaller."""

PUBLIC = frozenset(("_asdict", "_exit", "_fields", "_make", "_replace"))  # documented names of NamedTuples and of `os`


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(text: str) -> Iterator[str]:
    """Yield the private names that a module defines: functions, variables, and attributes of `self`."""
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _called(node: ast.Call) -> str:
    """Return the last name of what is called, such as `sleep` of `asyncio.sleep`; empty if it has none."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def private_accesses(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private access."""
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and _called(node).endswith(("setattr", "getattr", "delattr")):
            texts = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            yield from ((node.lineno, text) for text in (one.rpartition(".")[2] for one in texts) if is_private(text))


def sleeps(text: str) -> Iterator[int]:
    """Yield the line of each sleep."""
    for node in nodes(text):
        if isinstance(node, ast.Call) and _called(node) == "sleep":
            length = node.args[0] if node.args else None
            if not isinstance(length, ast.Constant) or length.value:
                yield node.lineno


def found() -> tuple[list[str], list[str]]:
    """Return the places of private accesses and of sleeps in all tests."""
    modules = texts("tests")
    is_shared = {path: not path.rpartition("/")[2].startswith("test_") for path in modules}
    shared = {name for path, text in modules.items() if is_shared[path] for name in defined(text)}
    private, slept = list[str](), list[str]()
    for path, text in modules.items():
        own = shared | set(defined(text))
        private += [f"{path}:{line} {name}" for line, name in private_accesses(text) if name not in own]
        slept += [f"{path}:{line}" for line in sleeps(text)]
    return private, slept


def main() -> None:
    private, slept = found()
    for places, what in ((private, "private accesses"), (slept, "sleeps longer than 0")):
        print(f"{len(places)} {what}")
        for place in places if "--list" in sys.argv else ():
            print(" ", place)
    files = Counter(place.partition(":")[0] for place in private)
    for file, count in files.most_common(40) if "--list" in sys.argv else ():
        print(f"{count:5} {file}")


if __name__ == "__main__":
    main()
