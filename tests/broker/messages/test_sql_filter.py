"""SQL92 filters: RocketMQ's rules for text, numbers and NULL, and clear refusals."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from rocketlet.broker.messages.filters import FilterError, parse_filter, parsing
from rocketlet.protocol.properties import encode

from bench.steps import Meter


@pytest.mark.parametrize(
    ("expression", "properties", "matches"),
    [
        ("a > 5 AND b = 'x'", {"a": "7", "b": "x"}, True),
        ("a > 5 AND b = 'x'", {"a": "5", "b": "x"}, False),
        ("a BETWEEN 1 AND 3", {"a": "3"}, True),
        ("a NOT BETWEEN 1 AND 3", {"a": "3"}, False),
        ("a >= 2.5", {"a": "2.5"}, True),
        ("a = 2.0", {"a": "2"}, True),
        ("a < -3", {"a": "-4"}, True),
        ("a = 'x' OR a = 'it''s'", {"a": "it's"}, True),
        ("a IN ('x', 'y')", {"a": "y"}, True),
        ("a NOT IN ('x', 'y')", {"a": "y"}, False),
        ("a IS NULL", {}, True),
        ("a IS NOT NULL", {"a": "x"}, True),
        ("flag = TRUE", {"flag": "true"}, True),
        ("flag <> TRUE", {"flag": "false"}, True),
        ("TRUE", {}, True),
        ("NOT (a = 1)", {"a": "2"}, True),
        # NULL: neither true nor false, and NOT does not make it true
        ("a > 1", {}, False),
        ("NOT (a > 1)", {}, False),
        ("a <> 'x'", {}, False),
        ("a > 1 OR b = 'y'", {"b": "y"}, True),
        ("a NOT IN ('x')", {}, False),
        # values that cannot be compared match nothing
        ("a > 1", {"a": "word"}, False),
        ("NOT (a > 1)", {"a": "word"}, False),
        ("größe = 'ü'", {"größe": "ü"}, True),
        # a number is what Java's Long.valueOf and Double.valueOf take
        ("a > 5", {"a": "1_0"}, False),
        ("a > 0", {"a": " 1"}, False),
        ("a > 0", {"a": "+1"}, True),
        ("a > 0", {"a": "9223372036854775807"}, True),
        ("a > 0", {"a": "9223372036854775808"}, False),
        ("a > 0.5", {"a": "1_0"}, False),
        ("a > 0.5", {"a": " 1 "}, True),
        ("a > 0.5", {"a": "1d"}, True),
        ("a > 0.5", {"a": "1.e1F"}, True),
        ("a > 0.5", {"a": ".75"}, True),
        ("a > 0.5", {"a": "Infinity"}, True),
        ("a > 0.5", {"a": "inf"}, False),
        ("a > 0.5", {"a": "0x1p1"}, True),
        ("a > 1.5", {"a": "0x1p99999"}, True),
        ("a > 1.5", {"a": "NaN"}, True),
        ("a <= 1.5", {"a": "NaN"}, False),
        ("a > 1.5", {"a": "-0x1p99999"}, False),
        ("a > (0.5)", {"a": "1"}, True),
        ("(a) = ((1))", {"a": "1"}, True),
        ("NOT TRUE OR a = 1 -- that one", {"a": "1"}, True),
        ("a = /* what */ 1", {"a": "1"}, True),
        ("a = 'x' AND b = 'y' OR c = 'z' AND TRUE", {"c": "z"}, True),
        ("a = 'x' AND (b = 'y' OR c = 'z')", {"c": "z"}, False),
    ],
)
def test_a_filter_decides_as_rocketmq_does(expression: str, properties: dict[str, str], matches: bool) -> None:
    assert parse_filter(expression)(encode(properties)) is matches


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a",
        "a >",
        "a + 1 > 2",
        "a LIKE 'x%'",
        "a > 'x'",
        "a IN (1, 2)",
        "a IN (SELECT 1)",
        "f(a) = 1",
        "t.a = 1",
        "a BETWEEN 'x' AND 'y'",
        "a = 1; b = 2",
        "'x' IS NULL",
        "a = 1 " + "OR a = 1 " * 2500,
        "NOT a = 1",
        "NOT (a) = 1",
        "NOT TRUE = a",
        "(a) > b",
        "a > 007",
        "STRUCT(" * 40,
        "((((",
        "a IN ('x'",
        "a IN (('x'))",
        "a BETWEEN 3 AND 1",
        '"a" = 1',
        "a == 1",
        "(" * 300 + "a = 1" + ")" * 300,
    ],
)
def test_what_is_no_filter_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(FilterError, match="filter"):
        parse_filter(expression)


@pytest.mark.parametrize(
    "text",
    [
        "a > 1e",
        "a BETWEEN 1e AND 2",
        "a > " + "9" * 5000,
        "a = 1 AND " * 2500 + "a = 1",
        "(" * 400 + "a = 1" + ")" * 400,
    ],
)
def test_what_is_too_odd_or_too_much_is_refused(text: str) -> None:
    with pytest.raises(FilterError):
        parse_filter(text)


def test_a_filter_has_10000_words_and_signs_at_most() -> None:
    items = ", ".join(["'x'"] * 4997)
    assert parse_filter(f"a IN ({items}, 'y')")("a\x01y")  # 9999
    with pytest.raises(FilterError, match="more than 10000 words"):
        parse_filter(f"a IN ({items}, 'y', 'z')")


def test_parentheses_are_100_deep_at_most() -> None:
    assert parse_filter("(" * 100 + "a = 1" + ")" * 100)("a\x011")
    with pytest.raises(FilterError, match="deeper than 100"):
        parse_filter("(" * 101 + "a = 1" + ")" * 101)


@pytest.mark.parametrize(
    "part",
    [
        "STRUCT(",
        "(",
        "((a",
        "NOT (",
        "a = 1 OR ",
        "a IN ('x', ",
        "'x', ",
        "''",
        "/*",
        "--",
        "1",
        "1.",
        "$",
        "NOT ",
        "- ",
        "a.",
        "ä",
    ],
)
def test_parsing_takes_steps_in_proportion_to_the_text(part: str) -> None:
    """481 characters of `STRUCT(` kept a parser busy for ever."""
    steps = []
    for count in (100, 400):
        meter = Meter()
        meter.start(counts=True)
        with contextlib.suppress(FilterError):
            parse_filter("a IN (" + part * count if "'" in part else part * count)
        meter.stop()
        steps.append(meter.steps)
    assert steps[1] < 5 * steps[0] + 100


def test_parsing_is_done_in_pieces() -> None:
    texts = ", ".join(["'x'"] * 2000)
    for expression in (" OR ".join(["a = 1"] * 1000), f"a IN ({texts})"):
        meter = Meter()
        most = 0
        work = parsing(expression)
        while True:
            meter.start(counts=True)
            ended = next(work, work) is work
            meter.stop()
            if ended:
                break
            most = max(most, meter.steps)
        assert 100 < most < 5000


@pytest.mark.parametrize("begin", ["11", "1.1", ".1", "0xf", "0x.f", "  "])
def test_a_value_that_is_almost_a_number_is_looked_at_in_no_time(begin: str) -> None:
    """32,000 digits and a sign behind them stopped the broker for 38 s. The engine of regular expressions runs no code
    whose steps could be counted: what fails here does not end."""
    program = f"""
from rocketlet.broker.messages.filters import parse_filter
assert not parse_filter("a > 1.5")("a" + chr(1) + {begin!r} + {begin[-1]!r} * 32_000 + "!")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("price >", "something is missing behind '>' (character 7)"),
        ("a = 1 AND", "something is missing behind 'AND' (character 9)"),
        ("a BETWEEN 1", "something is missing behind '1' (character 11)"),
        ("(a = 1", ") is missing behind '1' (character 6)"),
        ("price > five dollars", "'dollars' (character 20) cannot stand there"),
        ("a = 1; drop table x", "';' (character 6) cannot stand there"),
        ("a = 1e", "'1e' (character 6) cannot stand there"),
        ("a IN (1)", "IN takes texts; write '1'"),
        ("(a = 1) (b = 1)", "'(' (character 9) cannot stand there"),
        ("a = 1)", "')' (character 6) cannot stand there"),
        ("a = 'x", "a text has no end; put it in single quotes, as in 'text'"),
        ("", "it is empty"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_filter(expression: str, why: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(expression)
    assert str(refused.value) == f"the filter {expression!r} cannot be read: {why}"
