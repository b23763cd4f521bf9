"""SQL92 filters: parsed, cached by expression, and evaluated on the properties of a message."""

from __future__ import annotations

import asyncio
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

import structlog

from ...protocol.properties import decode
from ..config import ADDRESS_SHARE, MAX_FILTER_DEPTH, MAX_FILTER_WORDS
from ..runtime.runtime import Runtime
from ..sessions.refusal import Reason, Refusal

log = structlog.get_logger("rocketlet.filters")


# ------------------------------------------------------------------------------
# SQL92 filters on message properties, compiled to a function: `parse_filter("a > 5 AND b IN ('x', 'y')")`.
#
#     condition   = all {OR all}
#     all         = one {AND one}
#     one         = comparison | NOT "(" condition ")" | NOT TRUE | NOT FALSE
#     comparison  = operand [("=" | "<>" | "<" | "<=" | ">" | ">=") operand]
#                 | operand IS [NOT] NULL
#                 | operand [NOT] IN "(" text {"," text} ")"
#                 | operand [NOT] BETWEEN number AND number
#     operand     = name | number | text | TRUE | FALSE | "(" condition ")"
#
# The cost of parsing is proportional to the number of tokens, and the parser is not recursive. Syntax that RocketMQ's
# filters do not support, or interpret differently from SQL, is rejected. Values follow RocketMQ's rules, and tests
# compare them with RocketMQ's own classes: a property is a text, and is converted to an integer, a decimal number or a
# boolean if it is compared with one; a missing property is NULL; logic has three values; an impossible comparison
# (`'x' > 5`, `'1.5' > 1`) ends the evaluation, and the message does not match.


_LONG_DIGITS: Final = 19


class FilterError(ValueError):
    """The expression is not a valid filter. The text has the reason."""


OnFault = Callable[[Exception], None]


class Filter:
    """A compiled filter: a function of the encoded properties of a message. The cost of a call grows with `words`, the
    number of tokens of the filter."""

    __slots__ = ("_on_fault", "_term", "words")

    def __init__(self, words: int, term: Term, on_fault: OnFault | None) -> None:
        self.words = words
        self._on_fault = on_fault
        self._term = term

    def __call__(self, properties: str) -> bool:
        try:
            return self._term(decode(properties)) is True
        except Incomparable:
            return False
        # after a defect of the evaluation, the message does not match; the reader continues
        except Exception as error:
            if self._on_fault is not None:
                self._on_fault(error)
            return False


def parse_filter(expression: str, on_fault: OnFault | None = None) -> Filter:
    """Parse a filter. Raises FilterError.

    Args:
        expression: the expression
        on_fault: called with unexpected exceptions of an evaluation
    """
    parser = _Parser(expression)
    term = parser.whole()
    return Filter(parser.words, term, on_fault)


class _Kind(Enum):
    """The type of a part of an expression."""

    PROPERTY = auto()
    TEXT = auto()
    NUMBER = auto()
    BOOLEAN = auto()  # TRUE or FALSE, which are also conditions
    CONDITION = auto()


class _Part(NamedTuple):
    """A part of the expression, and its position in it."""

    kind: _Kind
    term: Term
    begin: int
    end: int


class _Token(NamedTuple):
    """A token. `kind` is number, name, text, a keyword or a sign; empty at the end of the expression."""

    kind: str
    text: str
    begin: int
    end: int


_TOKENS: Final = re.compile(
    r"(?P<space>\s++|--[^\n]*+|/\*.*?\*/)"
    r"|(?P<number>(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+(?![\w.$]))"
    r"|(?P<name>(?:[^\W\d]|\$)[\w$]*+)"
    r"|(?P<text>'(?:[^']|'')*+')"
    r"|(?P<sign><>|<=|>=|==|!=|[\w.$]++|.)",
    re.DOTALL,
)
_KEYWORDS: Final = frozenset(("AND", "OR", "NOT", "IN", "IS", "NULL", "BETWEEN", "TRUE", "FALSE"))
_ORDER: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_ENDS: Final = frozenset(("", ")", "AND", "OR"))  # tokens that may follow a comparison


class _Open:
    """An open parenthesis, or the whole expression, with the parts before the current one."""

    __slots__ = ("ands", "begin", "is_negated", "ors")

    def __init__(self, begin: int, *, is_negated: bool) -> None:
        self.begin = begin
        self.is_negated = is_negated
        self.ors: list[Term] = []
        self.ands: list[_Part] = []


class _Parser:
    """Parser of one expression. `words` is the number of tokens read so far."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._matches = _TOKENS.finditer(expression)
        self.words = 0
        self._before = self._token = _Token("", "", 0, 0)
        self._advance()

    def whole(self) -> Term:
        if not self._token.kind:
            raise self._unreadable("it is empty")
        opened = [_Open(0, is_negated=False)]
        while True:
            is_negated = self._is_negated()
            if self._token.kind == "(":
                if len(opened) > MAX_FILTER_DEPTH:
                    raise FilterError(f"the filter is nested deeper than {MAX_FILTER_DEPTH}")
                opened.append(_Open(self._advance().begin, is_negated=is_negated))
                continue
            part = self._operand()
            part = self._not(part) if is_negated else self._comparison(part)
            while self._token.kind == ")" and len(opened) > 1:
                part = self._close(opened.pop(), part, self._advance().end)
                part = self._comparison(part)
            inner = opened[-1]
            if self._token.kind not in ("AND", "OR"):
                break
            inner.ands.append(part)
            if self._advance().kind == "OR":
                inner.ors.append(self._all(inner))
        if len(opened) > 1 and not self._token.kind:
            raise self._missing(")")
        if self._token.kind:
            raise self._unexpected(self._token)
        return self._logic(self._close(inner, part, len(self._expression)))

    # Words

    def _advance(self) -> _Token:
        """Return the current token, and advance to the next one."""
        self._before, self._token = self._token, self._next()
        return self._before

    def _next(self) -> _Token:
        for match in self._matches:
            kind = match.lastgroup or ""
            if kind == "space":
                continue
            self.words += 1
            if self.words > MAX_FILTER_WORDS:
                raise FilterError(f"the filter has more than {MAX_FILTER_WORDS} tokens, which is the maximum")
            text = match.group()
            if kind == "name" and text.upper() in _KEYWORDS:
                kind = text.upper()
            elif kind == "sign":
                kind = text
                if text == "'":
                    raise self._unreadable("a text is not terminated; put it in single quotes, as in 'text'")
                if text in ("==", "!="):
                    raise FilterError(f"the filter {self._shown} has {text}; write = or <>")
            return _Token(kind, text, match.start(), match.end())
        return _Token("", "", len(self._expression), len(self._expression))

    def _accept(self, kind: str) -> bool:
        if self._token.kind != kind:
            return False
        self._advance()
        return True

    def _expect(self, kind: str) -> None:
        if not self._accept(kind):
            raise self._unexpected(self._token)

    # Parts

    def _is_negated(self) -> bool:
        if not self._accept("NOT"):
            return False
        if self._token.kind not in ("(", "TRUE", "FALSE"):
            what = "NOT without parentheses, which RocketMQ interprets differently; write NOT (...)"
            raise FilterError(f"the filter {self._shown} has {what}")
        return True

    def _operand(self) -> _Part:
        token = self._token
        if token.kind == "name":
            self._advance()
            return _Part(_Kind.PROPERTY, of_property(token.text), token.begin, token.end)
        if token.kind == "text":
            return _Part(_Kind.TEXT, constant(self._text()), token.begin, token.end)
        if token.kind in ("TRUE", "FALSE"):
            self._advance()
            return _Part(_Kind.BOOLEAN, constant(token.kind == "TRUE"), token.begin, token.end)
        number = self._number()
        return _Part(_Kind.NUMBER, constant(number), token.begin, self._before.end)

    def _simple(self) -> _Part:
        """Parse an operand that is not a condition, which may be in parentheses."""
        depth = 0
        while self._accept("("):
            depth += 1
        part = self._operand()
        for _ in range(depth):
            if not self._accept(")"):
                raise self._unexpected(self._token) if self._token.kind else self._missing(")")
        return part

    def _text(self) -> str:
        token = self._token
        self._expect("text")
        return token.text[1:-1].replace("''", "'")

    def _number(self) -> int | float:
        sign = -1 if self._accept("-") else 1
        token = self._token
        self._expect("number")
        if not token.text.isdecimal():
            return sign * float(token.text)
        if len(token.text) > _LONG_DIGITS or int(token.text) > MAX_LONG or (token.text[0] == "0" != token.text):
            raise self._refuse(token.begin, token.end)
        return sign * int(token.text)

    def _comparison(self, left: _Part) -> _Part:
        """Parse the comparison that starts with this part; return the part itself if no comparison follows."""
        kind = self._token.kind
        if kind in _ENDS:
            return left
        if kind in _ORDER or kind in ("=", "<>"):
            self._advance()
            right = self._simple()
            term = self._ordered(left, kind, right) if kind in _ORDER else self._equal(left, kind, right)
            return _Part(_Kind.CONDITION, term, left.begin, right.end)
        if self._accept("IS"):
            is_negated = self._accept("NOT")
            self._expect("NULL")
            term = is_null(self._property_of(left))
            return self._maybe_not(term, is_negated, left.begin)
        is_negated = self._accept("NOT")
        if self._accept("IN"):
            term = self._in(left)
        elif self._accept("BETWEEN"):
            term = self._between(left)
        else:
            raise self._unexpected(self._token)
        return self._maybe_not(term, is_negated, left.begin)

    def _equal(self, left: _Part, kind: str, right: _Part) -> Term:
        for part in (left, right):
            if part.kind is _Kind.CONDITION:
                raise self._refuse(left.begin, right.end)
        if left.kind is _Kind.BOOLEAN and right.kind is _Kind.PROPERTY:
            what = "TRUE or FALSE before a property, which matches nothing in RocketMQ; write the property first"
            raise FilterError(f"the filter {self._shown} has {what}")
        term = equal(left.term, right.term)
        return term if kind == "=" else negated(term)

    def _ordered(self, left: _Part, kind: str, right: _Part) -> Term:
        kinds = {left.kind, right.kind}
        # Apache's filters compare two properties only for equality.
        if not kinds <= {_Kind.PROPERTY, _Kind.NUMBER} or kinds == {_Kind.PROPERTY}:
            raise self._refuse(left.begin, right.end)
        return compared(left.term, _ORDER[kind], right.term)

    def _in(self, left: _Part) -> Term:
        value = self._property_of(left)
        self._expect("(")
        wanted: set[str] = set()
        while True:
            if self._token.kind == "number":
                raise self._unreadable(f"IN takes texts; write '{self._token.text}'")
            wanted.add(self._text())
            if not self._accept(","):
                break
        if not self._accept(")"):
            raise self._unexpected(self._token) if self._token.kind else self._missing(")")
        return is_one_of(value, frozenset(wanted))

    def _between(self, left: _Part) -> Term:
        value = self._property_of(left)
        low = self._number()
        self._expect("AND")
        high = self._number()
        if low > high:
            raise FilterError(f"the filter {self._shown} has a BETWEEN whose lower bound is above its upper bound")
        above = compared(value, operator.ge, constant(low))
        return joined((above, compared(value, operator.le, constant(high))), False)

    def _property_of(self, part: _Part) -> Term:
        if part.kind is not _Kind.PROPERTY:
            raise self._refuse(part.begin, self._token.end)
        return part.term

    def _logic(self, part: _Part) -> Term:
        """Return the term of a condition, whose value is True, False or None."""
        if part.kind not in (_Kind.CONDITION, _Kind.BOOLEAN):
            raise self._refuse(part.begin, part.end)
        return part.term

    def _maybe_not(self, term: Term, is_negated: bool, begin: int) -> _Part:
        return _Part(_Kind.CONDITION, negated(term) if is_negated else term, begin, self._before.end)

    def _not(self, part: _Part) -> _Part:
        return _Part(_Kind.CONDITION, negated(self._logic(part)), part.begin, part.end)

    def _all(self, inner: _Open) -> Term:
        terms = [self._logic(part) for part in inner.ands]
        inner.ands = []
        return terms[0] if len(terms) == 1 else joined(terms, False)

    def _close(self, inner: _Open, last: _Part, end: int) -> _Part:
        """Close a parenthesis. A single operand keeps its type."""
        part = last._replace(begin=inner.begin, end=end)
        if inner.ors or inner.ands:
            inner.ands.append(last)
            inner.ors.append(self._all(inner))
            term = inner.ors[0] if len(inner.ors) == 1 else joined(inner.ors, True)
            part = _Part(_Kind.CONDITION, term, inner.begin, end)
        return self._not(part) if inner.is_negated else part

    # Faults

    @property
    def _shown(self) -> str:
        return repr(self._expression[:200])

    def _unreadable(self, why: str) -> FilterError:
        return FilterError(f"the filter {self._shown} cannot be read: {why}")

    def _missing(self, what: str) -> FilterError:
        return self._unreadable(f"{what} is missing after {self._before.text!r} (character {self._before.end})")

    def _unexpected(self, token: _Token) -> FilterError:
        if not token.kind:
            return self._missing("something")
        return self._unreadable(f"{token.text[:80]!r} (character {token.end}) is unexpected")

    def _refuse(self, begin: int, end: int) -> FilterError:
        if self._token.kind not in _ENDS:
            return self._unexpected(self._token)
        return FilterError(
            f"the filter {self._shown} has {self._expression[begin:end][:80]!r}, which is not supported; use =, <>, <, <=,"
            " >, >=, BETWEEN, IN, IS [NOT] NULL, AND, OR, NOT over properties, numbers, 'text', TRUE and FALSE"
        )


# ------------------------------------------------------------------------------
# The terms of an SQL92 filter: functions of a message's properties, by RocketMQ's rules for texts, numbers and NULL.


Value = str | int | float | bool | None
Term = Callable[[Mapping[str, str]], Value]
Comparison = Callable[[float, float], bool]

MAX_LONG: Final = 2**63 - 1


class Incomparable(Exception):
    """Two values that cannot be compared."""


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


# The numbers that Long.valueOf and Double.valueOf accept. Python accepts others, such as 1_000 and inf, and rejects
# some, such as 1d. The cost of each pattern is proportional to the text, because adjacent parts of a pattern never
# match the same character.
_LONG: Final = re.compile(r"[+-]?\d{1,1000}").fullmatch
_DOUBLE: Final = re.compile(
    r"\s*[+-]?(?:NaN|Infinity|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?[fFdD]?)\s*", re.ASCII
).fullmatch
_HEX_DOUBLE: Final = re.compile(
    r"\s*[+-]?0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?\d+[fFdD]?\s*", re.ASCII
).fullmatch


def _number_of(text: str, other: Value) -> int | float:
    """Convert a text to a number of the other value's type. Raises Incomparable if it is not one."""
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
    except OverflowError:  # Java returns infinity
        return -math.inf if text.startswith("-") else math.inf


def joined(terms: Iterable[Term], deciding: bool) -> Term:
    """Return AND of the terms, which one False decides, or OR, which one True decides."""
    parts = tuple(terms)

    def join(properties: Mapping[str, str]) -> Value:
        found: Value = not deciding
        for term in parts:
            value = term(properties)
            if value is deciding:
                return deciding
            if value is None:
                found = None
        return found

    return join


def negated(term: Term) -> Term:
    def opposite(properties: Mapping[str, str]) -> Value:
        value = term(properties)
        return None if value is None else not value

    return opposite


def compared(left: Term, compare: Comparison, right: Term) -> Term:
    def ordered(properties: Mapping[str, str]) -> Value:
        first, second = left(properties), right(properties)
        if first is None or second is None:
            return None
        if isinstance(first, str):
            first = _number_of(first, second)
        if isinstance(second, str):
            second = _number_of(second, first)
        if first != first or second != second:  # Java orders NaN after all other numbers
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


# ------------------------------------------------------------------------------
# The SQL92 filters that clients use, by expression.
#
# A request parses a new filter, which takes up to 4 ms. The tokens that are parsed in one event-loop iteration are
# limited, also for each address; beyond the limit, a request is refused as busy.


_WORD_CHARS = 64  # characters of a rejected expression that count as one token


class Filters:
    """The cached filters. `failed` is the number of evaluations that failed unexpectedly."""

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._known: dict[str, Filter | str] = {}
        self._known_words = 0
        self._parsed: Counter[str] = Counter()  # tokens parsed in this event-loop iteration, by address
        self.failed = 0

    def find(self, expression: str, address: str) -> Filter:
        """Return the filter of an expression.

        Args:
            expression: the expression
            address: the address of the client
        Raises:
            Refusal: the expression is invalid, or too many new filters came at the same time.
        """
        found = self._known.pop(expression, None)
        if found is None:
            found = self._parse(expression, address)
        else:
            self._known[expression] = found  # moves it to the end, so that it is evicted last
        if isinstance(found, str):
            raise Refusal(Reason.BAD_EXPRESSION, found)
        return found

    def _parse(self, expression: str, address: str) -> Filter | str:
        most = self._limits.max_parsed_words
        if self._parsed.total() >= most or self._parsed[address] >= most * ADDRESS_SHARE:
            raise Refusal(Reason.BUSY, "too many new SQL92 filters came at the same time; retry later")
        try:
            found: Filter | str = parse_filter(expression, self._count_fault)
        except FilterError as error:
            found = str(error)
        except Exception:  # a defect of the parser; the client gets an error
            log.exception("filter_not_parsed", expression=expression[:200])
            found = f"the filter {expression[:200]!r} cannot be read"
        if not self._parsed:
            asyncio.get_running_loop().call_soon(self._parsed.clear)
        self._parsed[address] += _words(expression, found)
        self._add(expression, found)
        return found

    def _add(self, expression: str, found: Filter | str) -> None:
        self._known[expression] = found
        self._known_words += _words(expression, found)
        limits = self._limits
        while len(self._known) > limits.max_filters or (
            self._known_words > limits.known_filter_words and len(self._known) > 1
        ):
            oldest = next(iter(self._known))
            self._known_words -= _words(oldest, self._known.pop(oldest))

    def _count_fault(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            log.error("filter_failed", exc_info=error, hint="the message is treated as not matching")


def _words(expression: str, found: Filter | str) -> int:
    return found.words if isinstance(found, Filter) else len(expression) // _WORD_CHARS + 1
