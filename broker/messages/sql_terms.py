"""The terms of an SQL92 filter: functions of a message's properties, by RocketMQ's rules for texts, numbers and NULL."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

Value = str | int | float | bool | None
Term = Callable[[Mapping[str, str]], Value]

MAX_LONG: Final = 2**63 - 1


class Incomparable(Exception):
    """Two values that no rule compares."""


def of_property(name: str) -> Term:
    return lambda properties: properties.get(name)


def constant(value: str | float | bool) -> Term:
    return lambda properties: value


def is_null(value: Term) -> Term:
    return lambda properties: value(properties) is None


def is_one_of(value: Term, wanted: frozenset[str]) -> Term:
    def contains(properties: Mapping[str, str]) -> Value:
        found = value(properties)
        return None if found is None else found in wanted

    return contains


# The numbers that Long.valueOf and Double.valueOf take. Python takes more, such as 1_000 and inf, and less, such as 1d.
# Each pattern takes time in proportion to the text: no two of its parts next to each other take the same character.
_LONG: Final = re.compile(r"[+-]?\d{1,1000}").fullmatch
_DOUBLE: Final = re.compile(
    r"\s*[+-]?(?:NaN|Infinity|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?[fFdD]?)\s*", re.ASCII
).fullmatch
_HEX_DOUBLE: Final = re.compile(
    r"\s*[+-]?0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?\d+[fFdD]?\s*", re.ASCII
).fullmatch


def _number_of(text: str, other: Value) -> int | float:
    """Text as a number of the other's kind. Raises Incomparable if it is not one."""
    if isinstance(other, int):
        number = int(text) if _LONG(text) else MAX_LONG + 1
        if -MAX_LONG - 1 <= number <= MAX_LONG:
            return number
    elif _DOUBLE(text):
        return float(text.strip().rstrip("fFdD"))
    elif _HEX_DOUBLE(text):
        return _from_hex(text.strip())
    raise Incomparable


def _from_hex(text: str) -> float:
    try:
        return float.fromhex(text.rstrip("fFdD"))
    except OverflowError:  # which Java takes for infinity
        return -math.inf if text.startswith("-") else math.inf


def all_of(terms: Iterable[Term]) -> Term:
    parts = tuple(terms)

    def every(properties: Mapping[str, str]) -> Value:
        found: Value = True
        for term in parts:
            value = term(properties)
            if value is False:
                return False
            if value is None:
                found = None
        return found

    return every


def any_of(terms: Iterable[Term]) -> Term:
    parts = tuple(terms)

    def some(properties: Mapping[str, str]) -> Value:
        found: Value = False
        for term in parts:
            value = term(properties)
            if value is True:
                return True
            if value is None:
                found = None
        return found

    return some


def negated(term: Term) -> Term:
    def opposite(properties: Mapping[str, str]) -> Value:
        value = term(properties)
        return None if value is None else not value

    return opposite


def compared(left: Term, compare: Callable[[Any, Any], bool], right: Term) -> Term:
    def ordered(properties: Mapping[str, str]) -> Value:
        first, second = left(properties), right(properties)
        if first is None or second is None:
            return None
        if isinstance(first, str):
            first = _number_of(first, second)
        elif isinstance(second, str):
            second = _number_of(second, first)
        if first != first or second != second:  # NaN, which Java takes for the largest number
            return compare(first != first, second != second)
        return compare(first, second)

    return ordered


def equal(left: Term, right: Term) -> Term:
    def equality(properties: Mapping[str, str]) -> Value:
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

    return equality
