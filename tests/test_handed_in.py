"""Parts of the broker and of the test kit get their limits and what they call when they are made. Nothing reads the usual
limits beside them, and nobody puts a function into another object later."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

BROKER = Path(__file__).parents[1] / "broker"

Sources = Mapping[str, str]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {str(path.relative_to(BROKER)): path.read_text() for path in sorted(BROKER.rglob("*.py"))}


def limited(sources: Sources) -> dict[str, int]:
    """The classes that take limits, and which of their positional parameters these are."""
    found: dict[str, int] = {}
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                        names = [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
                        found |= {node.name: names.index("limits") - 1} if "limits" in names else {}
    return found


def forgotten(sources: Sources) -> Iterator[str]:
    """Where such a class is made without them, and where the usual limits are read."""
    classes = limited(sources)
    for module, text in sources.items():
        tree = ast.parse(text)
        defaults = {id(value) for node in ast.walk(tree) if isinstance(node, ast.arguments) for value in node.defaults}
        defaults |= {
            id(value) for node in ast.walk(tree) if isinstance(node, ast.arguments) for value in node.kw_defaults
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                is_given = any(keyword.arg == "limits" for keyword in node.keywords)
                if not is_given and len(node.args) <= classes[node.func.id]:
                    yield f"{module}:{node.lineno} makes {node.func.id} without limits"
            if (
                isinstance(node, ast.Name)
                and node.id == "LIMITS"
                and id(node) not in defaults
                and module != "config.py"
            ):
                yield f"{module}:{node.lineno} reads the usual limits"


def test_each_part_is_given_the_limits_of_its_broker(sources: Sources) -> None:
    assert len(limited(sources)) > 3, "parts with limits are found"
    assert list(forgotten(sources)) == []


def test_a_part_without_limits_and_a_look_at_the_usual_ones_are_found(sources: Sources) -> None:
    planted = {
        "messages/planted.py": "class Planted:\n    def __init__(self, path, limits=LIMITS): ...\n",
        "user.py": "Planted(path)\nPlanted(path, limits)\nPlanted(path, limits=limits)\nprint(LIMITS.max_locks)\n",
    }
    assert list(forgotten({**sources, **planted})) == [
        "user.py:1 makes Planted without limits",
        "user.py:4 reads the usual limits",
    ]


# Functions that a part calls are handed in as well


def planted_calls(sources: Sources) -> Iterator[str]:
    """Where a method, a lambda or another function of this object is put into an attribute of another one."""
    for module, text in sources.items():
        for of_class in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            methods = {item.name for item in of_class.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
            for node in ast.walk(of_class):
                if isinstance(node, ast.Assign):
                    for target, value in _pairs(node):
                        is_others = isinstance(target, ast.Attribute) and not _is_self(target.value)
                        if is_others and (isinstance(value, ast.Lambda) or _method_of(value) in methods):
                            yield f"{module}:{node.lineno} puts a function into {ast.unparse(target)}"


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _method_of(value: ast.expr) -> str | None:
    return value.attr if isinstance(value, ast.Attribute) and _is_self(value.value) else None


KNOWN = {"broker/grpc/connection.py", "broker/grpc/receives.py"}
"""Modules that still do so: what is there before, a call or a connection, is told who serves it from then on. This list
becomes shorter only."""


@pytest.fixture(scope="module")
def wired() -> Sources:
    root = BROKER.parent
    paths = (path for room in ("broker", "testing") for path in sorted((root / room).rglob("*.py")))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def test_functions_are_handed_in_when_a_part_is_made(wired: Sources) -> None:
    assert {fault.partition(":")[0] for fault in planted_calls(wired)} == KNOWN


@pytest.mark.parametrize("value", ["self._told", "lambda: None"])
def test_a_function_that_is_put_into_another_object_is_found(value: str) -> None:
    made = f"    def __init__(self, clock):\n        clock.told, self.a = {value}, 1\n"
    text = f"class Planted:\n{made}    def _told(self): ...\n"
    assert list(planted_calls({"planted.py": text})) == ["planted.py:3 puts a function into clock.told"]
