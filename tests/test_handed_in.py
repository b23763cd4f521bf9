"""Parts of the broker, of the client and of the test kit get their limits and what they call when they are made. Nothing
reads the usual limits beside them, and nobody puts a function into another object later."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from .support.sources import nodes, texts

USUAL = {"broker": "LIMITS", "client": "CLIENT_LIMITS"}

Sources = Mapping[str, str]


@pytest.fixture(params=sorted(USUAL))
def room(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sources(room: str) -> Sources:
    return texts(room)


def limited(sources: Sources) -> dict[str, int]:
    """The classes that take limits, and which of their positional parameters these are."""
    found: dict[str, int] = {}
    for text in sources.values():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                        names = [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
                        found |= {node.name: names.index("limits") - 1} if "limits" in names else {}
    return found


def forgotten(sources: Sources, usual: str) -> Iterator[str]:
    """Where such a class is made without them, and where the usual limits are read."""
    classes = limited(sources)
    for module, text in sources.items():
        defaults: set[int] = set()
        for node in nodes(text):
            if isinstance(node, ast.arguments):
                defaults |= {id(value) for value in (*node.defaults, *node.kw_defaults)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Option":
                defaults |= {id(value) for value in node.args}
        for node in nodes(text):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                is_given = any(keyword.arg == "limits" for keyword in node.keywords)
                if not is_given and len(node.args) <= classes[node.func.id]:
                    yield f"{module}:{node.lineno} makes {node.func.id} without limits"
            if (
                isinstance(node, ast.Name)
                and node.id == usual
                and id(node) not in defaults
                and not module.endswith("/config.py")
            ):
                yield f"{module}:{node.lineno} reads the usual limits"


def test_each_part_is_given_the_limits_of_the_broker_or_client_it_belongs_to(room: str, sources: Sources) -> None:
    assert len(limited(sources)) > 3, "parts with limits are found"
    assert list(forgotten(sources, USUAL[room])) == []


def test_a_part_without_limits_and_a_use_of_the_default_ones_are_found(room: str, sources: Sources) -> None:
    usual = USUAL[room]
    made = "Planted(path)\nPlanted(path, limits)\nPlanted(path, limits=limits)\n"
    planted = {
        "messages/planted.py": f"class Planted:\n    def __init__(self, path, limits={usual}): ...\n",
        "user.py": f"{made}print({usual}.max_locks)\n",
    }
    assert list(forgotten({**sources, **planted}, usual)) == [
        "user.py:1 makes Planted without limits",
        "user.py:4 reads the usual limits",
    ]


# Functions that a part calls are handed in as well


def planted_calls(sources: Sources) -> Iterator[str]:
    """Where a method, a lambda or another function of this object is put into an attribute of another one."""
    for module, text in sources.items():
        for of_class in (node for node in nodes(text) if isinstance(node, ast.ClassDef)):
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


@pytest.fixture(scope="module")
def wired() -> Sources:
    return texts("broker", "client", "testing")


def test_functions_are_handed_in_when_a_part_is_made(wired: Sources) -> None:
    assert list(planted_calls(wired)) == []


@pytest.mark.parametrize("value", ["self._notify", "lambda: None"])
def test_a_function_that_is_put_into_another_object_is_found(value: str) -> None:
    made = f"    def __init__(self, clock):\n        clock.notify, self.a = {value}, 1\n"
    text = f"class Planted:\n{made}    def _notify(self): ...\n"
    assert list(planted_calls({"planted.py": text})) == ["planted.py:3 puts a function into clock.notify"]
