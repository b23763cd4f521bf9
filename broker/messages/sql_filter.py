"""SQL92 filters on message properties, compiled to a function: `parse_filter("a > 5 AND b IN ('x', 'y')")`.

The grammar is sqlglot's; what RocketMQ's filters do not have, or read differently from SQL, is refused. Values follow
RocketMQ's rules, compared with its own classes in tests: a property is text and becomes an integer, a decimal number or a
boolean where it is compared with one; a missing property is NULL; logic has three values; what cannot be compared (`'x' > 5`,
`'1.5' > 1`) ends the evaluation, and the message does not match.

Imported with the first filter (`filters`): most brokers never see one, and sqlglot takes longer to load than the broker.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlglot import TokenType, errors, exp, parse_one, tokenize

from ...protocol.properties import decode
from ..config import MAX_FILTER_DEPTH, MAX_FILTER_TOKENS

Value = str | int | float | bool | None
Term = Callable[[Mapping[str, str]], Value]

MAX_LONG: Final = 2**63 - 1


class FilterError(ValueError):
    """The expression is not a filter. The text says what is wrong."""


class _Incomparable(Exception):
    """Two values that no rule compares."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A function of a record's properties text. It takes the longer, the more words it has."""

    words: int
    _term: Term

    def __call__(self, properties: str) -> bool:
        try:
            return self._term(decode(properties)) is True
        except _Incomparable:
            return False


def parse_filter(expression: str) -> Filter:
    """Raises FilterError. `Filters` parses an expression once."""
    try:
        tokens = tokenize(expression)
        fault = _unportable(tokens)
        if fault:
            raise FilterError(f"the filter {expression[:200]!r} has {fault}")
        tree = parse_one(expression, into=exp.Condition)
    except (errors.SqlglotError, RecursionError) as error:
        raise FilterError(f"the filter {expression[:200]!r} cannot be read: {_why(error)}") from None
    return Filter(len(tokens), _Compiler(expression).logic(tree, 0))


def _why(error: errors.SqlglotError | RecursionError) -> str:
    """In words of the filter: sqlglot's own name its Python classes."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, errors.ParseError):
        return "a text has no end; put it in single quotes, as in 'text'"
    if not error.errors:
        return "it is empty"
    place = error.errors[0]
    text, description = f"{place['highlight']!r} (character {place['col']})", str(place["description"])
    if description.startswith("Required keyword"):
        return f"something is missing behind {text}"
    if description.startswith("Expecting"):
        return f"{description.removeprefix('Expecting ')} is missing behind {text}"
    return f"{text} cannot stand there"


def _unportable(tokens: Sequence[Any]) -> str | None:
    """What sqlglot would read as SQL does and RocketMQ would not; None if there is nothing of it."""
    before = None
    if len(tokens) > MAX_FILTER_TOKENS:
        raise FilterError(f"the filter has {len(tokens)} words and signs; {MAX_FILTER_TOKENS} are allowed")
    for index, token in enumerate(tokens):
        if token.text in ("==", "!="):
            return f"{token.text}; write = or <>"
        is_prefix = before in (None, TokenType.AND, TokenType.OR, TokenType.NOT, TokenType.L_PAREN)
        if token.token_type == TokenType.NOT and is_prefix:
            after = tokens[index + 1].token_type if index + 1 < len(tokens) else None
            if after not in (TokenType.L_PAREN, TokenType.TRUE, TokenType.FALSE):
                return "NOT before something without parentheses, which RocketMQ reads differently; write NOT (...)"
        before = token.token_type
    return None


class _Compiler:
    def __init__(self, expression: str) -> None:
        self._expression = expression

    def _refuse(self, tree: Any) -> FilterError:
        return FilterError(
            f"the filter {self._expression[:200]!r} has {tree.sql()[:80]!r}, which filters do not have; use =, <>, <, <=,"
            " >, >=, BETWEEN, IN, IS [NOT] NULL, AND, OR, NOT over properties, numbers, 'text', TRUE and FALSE"
        )

    def logic(self, tree: Any, depth: int) -> Term:
        """A term that gives True, False or None."""
        if depth > MAX_FILTER_DEPTH:
            raise FilterError(f"the filter is nested deeper than {MAX_FILTER_DEPTH}")
        match tree:
            case exp.Paren():
                return self.logic(tree.this, depth + 1)
            case exp.And():
                return _and(self.logic(tree.left, depth + 1), self.logic(tree.right, depth + 1))
            case exp.Or():
                return _or(self.logic(tree.left, depth + 1), self.logic(tree.right, depth + 1))
            case exp.Not():
                return _not(self.logic(tree.this, depth + 1))
            case exp.Boolean():
                value = bool(tree.this)
                return lambda properties: value
            case exp.Is():
                return self._is(tree)
            case exp.In():
                return self._in(tree)
            case exp.Between():
                return self._between(tree)
            case exp.EQ() | exp.NEQ():
                equal = _equal(self._value(tree.left), self._value(tree.right))
                return equal if isinstance(tree, exp.EQ) else _not(equal)
            case exp.GT() | exp.GTE() | exp.LT() | exp.LTE():
                if isinstance(tree.left, exp.Column) and isinstance(tree.right, exp.Column):
                    raise self._refuse(tree)  # Apache's filters compare two properties' texts only for equality
                compare = _ORDER[type(tree).__name__]
                return _compared(self._ordered(tree.left), compare, self._ordered(tree.right))
        raise self._refuse(tree)

    def _is(self, tree: Any) -> Term:
        value = self._column(tree.this)
        if not isinstance(tree.expression, exp.Null):
            raise self._refuse(tree)
        return lambda properties: value(properties) is None

    def _in(self, tree: Any) -> Term:
        value = self._column(tree.this)
        items = tree.expressions
        if not items or not all(isinstance(item, exp.Literal) and item.is_string for item in items):
            raise self._refuse(tree)
        wanted = frozenset(item.this for item in items)

        def contains(properties: Mapping[str, str]) -> Value:
            found = value(properties)
            return None if found is None else found in wanted

        return contains

    def _between(self, tree: Any) -> Term:
        value = self._column(tree.this)
        low, high = self._number(tree.args["low"]), self._number(tree.args["high"])
        if float(low({}) or 0) > float(high({}) or 0):
            raise FilterError(
                f"the filter {self._expression[:200]!r} has a BETWEEN whose bounds are the wrong way round"
            )
        return _and(_compared(value, operator.ge, low), _compared(value, operator.le, high))

    def _column(self, tree: Any) -> Term:
        if isinstance(tree, exp.Paren):
            return self._column(tree.this)
        if not isinstance(tree, exp.Column) or len(tree.parts) != 1 or tree.this.quoted:
            raise self._refuse(tree)
        name = tree.name
        return lambda properties: properties.get(name)

    def _value(self, tree: Any) -> Term:
        """A property or a literal."""
        if isinstance(tree, exp.Paren):
            return self._value(tree.this)
        if isinstance(tree, exp.Boolean):
            truth = bool(tree.this)
            return lambda properties: truth
        if isinstance(tree, exp.Literal) and tree.is_string:
            text = str(tree.this)
            return lambda properties: text
        if isinstance(tree, exp.Column):
            return self._column(tree)
        return self._number(tree)

    def _ordered(self, tree: Any) -> Term:
        """What may stand beside <, <=, >, >=: a property or a number."""
        return self._column(tree) if isinstance(tree, exp.Column | exp.Paren) else self._number(tree)

    def _number(self, tree: Any) -> Term:
        sign = -1 if isinstance(tree, exp.Neg) else 1
        literal = tree.this if isinstance(tree, exp.Neg) else tree
        if not isinstance(literal, exp.Literal) or literal.is_string:
            raise self._refuse(tree)
        try:  # sqlglot takes 1e and any number of digits
            number = sign * (int(literal.this) if literal.this.isdecimal() else float(literal.this))
        except ValueError:
            raise self._refuse(tree) from None
        if isinstance(number, int) and abs(number) > MAX_LONG:
            raise self._refuse(tree)
        return lambda properties: number


_ORDER: Final = {"GT": operator.gt, "GTE": operator.ge, "LT": operator.lt, "LTE": operator.le}


# What Long.valueOf and Double.valueOf take. Python takes more, such as 1_000 and inf, and less, such as 1d.
_LONG: Final = re.compile(r"[+-]?\d{1,1000}").fullmatch
_DOUBLE: Final = re.compile(
    r"\s*[+-]?(?:NaN|Infinity|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fFdD]?)\s*", re.ASCII
).fullmatch
_HEX_DOUBLE: Final = re.compile(
    r"\s*[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?\d+[fFdD]?\s*", re.ASCII
).fullmatch


def _number_of(text: str, other: Value) -> int | float:
    """Text as a number of the other's kind. Raises _Incomparable if it is not one."""
    if isinstance(other, int):
        number = int(text) if _LONG(text) else MAX_LONG + 1
        if -MAX_LONG - 1 <= number <= MAX_LONG:
            return number
    elif _DOUBLE(text):
        return float(text.strip().rstrip("fFdD"))
    elif _HEX_DOUBLE(text):
        return float.fromhex(text.strip().rstrip("fFdD"))
    raise _Incomparable


def _and(left: Term, right: Term) -> Term:
    def both(properties: Mapping[str, str]) -> Value:
        first = left(properties)
        if first is False:
            return False
        second = right(properties)
        if second is False:
            return False
        return None if first is None or second is None else True

    return both


def _or(left: Term, right: Term) -> Term:
    def either(properties: Mapping[str, str]) -> Value:
        first = left(properties)
        if first is True:
            return True
        second = right(properties)
        if second is True:
            return True
        return None if first is None or second is None else False

    return either


def _not(term: Term) -> Term:
    def negated(properties: Mapping[str, str]) -> Value:
        value = term(properties)
        return None if value is None else not value

    return negated


def _compared(left: Term, compare: Callable[[Any, Any], bool], right: Term) -> Term:
    def ordered(properties: Mapping[str, str]) -> Value:
        first, second = left(properties), right(properties)
        if first is None or second is None:
            return None
        if isinstance(first, str):
            first = _number_of(first, second)
        elif isinstance(second, str):
            second = _number_of(second, first)
        return compare(first, second)

    return ordered


def _equal(left: Term, right: Term) -> Term:
    def equal(properties: Mapping[str, str]) -> Value:
        first, second = left(properties), right(properties)
        if first is None:
            return True if second is None else None
        if second is None:
            return False
        if isinstance(first, str) and isinstance(second, bool):
            first = first.lower() == "true"
        elif isinstance(first, str) and not isinstance(second, str):
            first = _number_of(first, second)
        elif isinstance(second, str) and not isinstance(first, str | bool):
            second = _number_of(second, first)
        return first == second

    return equal
