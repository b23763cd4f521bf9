"""SQL92 filters: RocketMQ's rules for text, numbers and NULL, and clear refusals."""

from __future__ import annotations

import pytest
from rocketlet.broker.messages.sql_filter import FilterError, parse_filter
from rocketlet.protocol.properties import encode


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
        # what cannot be compared matches nothing
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
        "a = 1 " + "OR a = 1 " * 2000,
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
        "a = 1 AND " * 600 + "a = 1",
        "(" * 400 + "a = 1" + ")" * 400,
    ],
)
def test_what_is_too_odd_or_too_much_is_refused(text: str) -> None:
    with pytest.raises(FilterError):
        parse_filter(text)


def test_a_filter_has_1000_words_and_signs_at_most() -> None:
    items = ", ".join(["'x'"] * 497)
    assert parse_filter(f"a IN ({items}, 'y')")("a\x01y")  # 999
    with pytest.raises(FilterError, match="1001 words"):
        parse_filter(f"a IN ({items}, 'y', 'z')")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("price >", "something is missing behind '>' (character 7)"),
        ("a = 1 AND", "something is missing behind 'AND' (character 9)"),
        ("a BETWEEN 1", "something is missing behind '1' (character 11)"),
        ("(a = 1", ") is missing behind '1' (character 6)"),
        ("price > five dollars", "'dollars' (character 20) cannot stand there"),
        ("a = 1; drop table x", "'drop' (character 11) cannot stand there"),
        ("a = 'x", "a text has no end; put it in single quotes, as in 'text'"),
        ("", "it is empty"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_filter(expression: str, why: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(expression)
    assert str(refused.value) == f"the filter {expression!r} cannot be read: {why}"
