"""Small mistakes in source text: each operator changes one place of a function, as a tired programmer might.

The changed function replaces the code of the one that is loaded, so that nobody needs another copy of the tree, and whoever
has imported it has the mistake, too. Left alone are log lines, annotations, messages of errors, texts that are printed,
checks of the code itself, and turns of long work.

A comparison of counts is off by one; a comparison of times is turned round, because no two clocks ever show the same.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}
_PRINTED = ("__repr__", "__str__")
_DROPPED = (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake in a function, which begins at `first_line`. `lines`: those of its statement. `number`: among the mistakes
    of the file."""

    path: str
    function: str
    first_line: int
    lines: range
    line: int
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.what}"


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """All of a file, in its order."""
    number = 0
    for name, function in _functions(ast.parse(source)):
        first_line = min([function.lineno, *(item.lineno for item in function.decorator_list)])
        for statement, node, what, _ in _places(function):
            yield Mutant(path, name, first_line, _lines_of(statement), node.lineno, number, what)
            number += 1


def changed(mutant: Mutant, source: str, file_name: str) -> CodeType:
    """The code of its function with the mistake."""
    tree = ast.parse(source)
    number = 0
    for _, function in _functions(tree):
        for *_, change in _places(function):
            if number == mutant.number:
                change()
                return _code_of(compile(ast.fix_missing_locations(tree), file_name, "exec"), mutant)
            number += 1
    raise ValueError(f"{mutant} is not in this source")


def _code_of(code: CodeType, mutant: Mutant) -> CodeType:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            if item.co_qualname == mutant.function and item.co_firstlineno == mutant.first_line:
                return item
            if mutant.function.startswith(f"{item.co_qualname}."):
                return _code_of(item, mutant)
    raise ValueError(f"{mutant}: the function is not there")


Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[ast.stmt | ast.expr, str, Callable[[], None]]
Place = tuple[ast.stmt, ast.stmt | ast.expr, str, Callable[[], None]]


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Those of the module and of its classes; what is inside of them belongs to them."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, Function) and item.name not in _PRINTED:
                    yield f"{node.name}.{item.name}", item


def _places(function: Function) -> Iterator[Place]:
    for statement in function.body:
        yield from _in_statements(function, "body", [statement])
    for owner in ast.walk(function):
        for name, value in ast.iter_fields(owner):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list) and owner is not function:
                yield from _in_statements(owner, name, value)


def _in_statements(owner: ast.AST, name: str, statements: list[Any]) -> Iterator[Place]:
    for statement in statements:
        if isinstance(statement, ast.stmt) and not _is_told(statement) and not _is_turn(statement):
            for node, what, change in (*_dropping(owner, name, statement), *_in_expressions(statement)):
                yield statement, node, what, change


def _is_turn(statement: ast.stmt) -> bool:
    """Whether it only lets others have a turn, perhaps after so many steps."""
    if isinstance(statement, ast.If) and len(statement.body) == 1 and not statement.orelse:
        return _is_turn(statement.body[0])
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield)


def _is_left_alone(node: ast.AST) -> bool:
    """Also what only checks this code itself, and a sleep of 0, which is a turn of the loop."""
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, ast.stmt) or (isinstance(node, ast.Call) and ast.unparse(node) == "asyncio.sleep(0)")


def _is_told(statement: ast.stmt) -> bool:
    """Whether it is a docstring or a line of the log."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(value, ast.Constant):
        return True
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("log.")


def _dropping(owner: ast.AST, name: str, statement: ast.stmt) -> Iterator[Change]:
    is_kept = isinstance(statement, ast.Assign) and all(
        isinstance(item, ast.Attribute | ast.Subscript) for item in statement.targets
    )
    if isinstance(statement, _DROPPED) or is_kept:

        def change() -> None:
            siblings = getattr(owner, name)
            siblings[siblings.index(statement)] = ast.copy_location(ast.Pass(), statement)

        yield statement, f"without `{_short(statement)}`", change


def _lines_of(statement: ast.stmt) -> range:
    """Without those of the statements inside of it."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _in_expressions(statement: ast.stmt) -> Iterator[Change]:
    """Mistakes in the statement itself, not in those inside of it."""
    if isinstance(statement, Function | ast.ClassDef | ast.Raise):
        return
    queue: list[ast.AST] = [
        child
        for name, value in ast.iter_fields(statement)
        if name not in ("body", "orelse", "finalbody", "handlers", "annotation", "returns")
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.AST)
    ]
    if isinstance(statement, ast.If | ast.While):
        yield from _negating(statement)
    while queue:
        node = queue.pop(0)
        yield from _swapping(node, statement)
        queue += [child for child in ast.iter_child_nodes(node) if not _is_left_alone(child)]


def _negating(statement: ast.If | ast.While) -> Iterator[Change]:
    test = statement.test

    def change() -> None:
        statement.test = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)

    if not (isinstance(test, ast.Compare | ast.Constant) or (isinstance(statement, ast.While))):
        yield test, f"not `{_short(test)}`", change


def _swapping(node: ast.AST, statement: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        other = (_TURNED if _is_of_times(node) else _COMPARED).get(type(node.ops[0]), _COMPARED[type(node.ops[0])])
        yield node, f"`{_short(node)}` with {other.__name__}", lambda: node.ops.__setitem__(0, other())
    elif isinstance(node, ast.BoolOp):
        swapped: ast.boolop = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield node, f"`{_short(node)}` with {type(swapped).__name__}", lambda: setattr(node, "op", swapped)
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED and not _is_text(node):
        computed = _COMPUTED[type(node.op)]
        yield node, f"`{_short(node)}` with {computed.__name__}", lambda: setattr(node, "op", computed())
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        value = node.value
        yield node, f"{not value} in `{_short(statement)}`", lambda: setattr(node, "value", not value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        count = node.value
        yield node, f"{count + 1} in `{_short(statement)}`", lambda: setattr(node, "value", count + 1)


def _is_of_times(node: ast.Compare) -> bool:
    """Whether one side is in seconds, as its name says."""
    sides = [side.func if isinstance(side, ast.Call) else side for side in (node.left, *node.comparators)]
    return any(ast.unparse(side).endswith("_s") for side in sides)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr) or _is_str(side) for side in (node.left, node.right))


def _is_str(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
