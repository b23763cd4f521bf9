"""The modules of the repository. Each is read and parsed once for all tests that check them, which one worker runs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a module, the module first."""
    return tuple(ast.walk(ast.parse(text)))


def body(text: str) -> list[ast.stmt]:
    """The statements of a module."""
    module = nodes(text)[0]
    assert isinstance(module, ast.Module)
    return module.body


def docstring(text: str) -> str:
    module = nodes(text)[0]
    assert isinstance(module, ast.Module)
    return ast.get_docstring(module) or ""


def texts(*folders: str) -> dict[str, str]:
    """The text of each module in folders of the repository, by its path there."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): text_of(path) for path in paths}
