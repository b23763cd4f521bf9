"""Parts of the broker get their limits when they are made: nothing reads the usual ones beside them."""

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
