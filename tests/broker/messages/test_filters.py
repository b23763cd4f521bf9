"""SQL92 filters are parsed in turns, and a pull filters no more than a turn has time for."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from rocketlet.broker import config
from rocketlet.broker.config import MAX_FILTER_WORDS
from rocketlet.broker.messages import filters
from rocketlet.broker.messages.filters import FilterError, parse_filter
from rocketlet.broker.sessions.refusal import Refusal
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.group_bodies import encode_client_check
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import SQL92, Subscription
from rocketlet.protocol.properties import decode, encode

from bench.steps import Meter

from ...conftest import Node, Wire, create_topic
from ...support.requests import SUBSCRIBED, SUSPEND, pull, send


def filtered(expression: str, **fields: Any) -> dict[str, Any]:
    return pull(subscription=expression, expression_type="SQL92", **fields)


def check(expression: str) -> bytes:
    return encode_client_check("c", "g", Subscription("t", expression, kind=SQL92))


async def test_a_filter_that_breaks_the_parser_is_answered(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(expression: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(filters, "parse_filter", broken)
    answer = await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def words(count: int) -> str:
    """Return a filter of this many tokens but one, where the number is a multiple of 4."""
    return " OR ".join(["a = 1"] * (count // 4))


async def test_new_filters_of_one_event_loop_iteration_are_limited_together_and_for_an_address(node: Node) -> None:
    find = node.broker.filters.find
    find(words(MAX_FILTER_WORDS // 2 + 4), "10.0.0.1")
    with pytest.raises(Refusal, match="too many new SQL92 filters"):
        find("a = 1", "10.0.0.1")
    find("a = 1", "10.0.0.2")
    find(words(MAX_FILTER_WORDS - 4), "10.0.0.2")
    with pytest.raises(Refusal, match="too many new SQL92 filters"):
        find("a = 2", "10.0.0.3")
    find("a = 1", "10.0.0.1")
    await asyncio.sleep(0)
    find("a = 2", "10.0.0.1")


@pytest.mark.limits(max_filters=2)
async def test_the_filter_that_was_asked_for_longest_ago_is_forgotten(node: Node, wire: Wire) -> None:
    for number in (1, 2, 1, 3):
        assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check(f"a = {number}"))).code == 0
    assert [is_known(node, f"a = {number}") for number in (1, 2, 3)] == [True, False, True]


class Parsed(BaseException):
    pass


def is_known(node: Node, expression: str) -> bool:
    """Return True if the expression need not be parsed, because it is cached as a filter or as an invalid one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "parse_filter", Mock(side_effect=Parsed))
        try:
            node.broker.filters.find(expression, "10.0.0.1")
        except Parsed:
            return False
        except Refusal:
            pass
    return True


@pytest.mark.limits(known_filter_words=8)
async def test_filters_that_are_known_are_limited_by_their_words(node: Node, wire: Wire) -> None:
    for expression in ("a = 1", "b = 1", "c = 1 OR d = 1", "a = +"):
        await wire.call(Code.CHECK_CLIENT_CONFIG, body=check(expression))
    assert not is_known(node, "a = 1")
    assert not is_known(node, "b = 1")
    assert is_known(node, "c = 1 OR d = 1"), "with the last one it has 8 words"
    assert is_known(node, "a = +")
    long = " OR ".join(["a = 1"] * 10)
    assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check(long))).code == 0
    assert not is_known(node, "c = 1 OR d = 1")
    assert is_known(node, long), "the last one stays, or nobody could use it"


async def test_a_nested_text_ends_filters_for_nobody(wire: Wire) -> None:
    """A parser of all SQL took exponential time for it, in a thread for which the process waited at its end."""
    for hostile in ("STRUCT(" * 68 + "1", "a = " + "(" * 5000, "CASE WHEN " * 500, "a = 1 OR (" * 2000):
        assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check(hostile))).code != 0
    assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))).code == 0


async def test_a_message_that_breaks_a_filter_does_not_match_and_is_counted(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> dict[str, str]:
        if "bad" in text:
            raise OverflowError("too large")
        return decode(text)

    monkeypatch.setattr("rocketlet.broker.messages.filters.decode", broken)
    await create_topic(wire, "t")
    held = wire.send(Code.PULL_MESSAGE, filtered("a = 'bad' OR a = 'good'", flags=SUBSCRIBED | SUSPEND))
    for value in ("bad", "good"):
        await send(wire, value.encode(), properties=f"a\x01{value}")
    found = await wire.answer(held)
    while found.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
        offset = int(found.ext["nextBeginOffset"])
        asked = filtered("a = 'bad' OR a = 'good'", flags=SUBSCRIBED | SUSPEND, offset=offset)
        found = await wire.call(Code.PULL_MESSAGE, asked)
    assert (found.code, found.body.count(b"good"), node.broker.filters.failed) == (0, 2, 1)


async def test_a_number_that_is_too_large_stops_no_reader(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire, b"huge", properties="a\x010x1p99999")
    await send(wire, b"one", properties="a\x011")
    await send(wire, b"two", properties="a\x012")
    answer = await wire.call(Code.PULL_MESSAGE, filtered("a > 1.5"))
    assert (answer.code, [record.body for record in decode_records(answer.body)]) == (0, [b"huge", b"two"])


LONG = " OR ".join(f"({' OR '.join(['a = 1'] * 40)})" for _ in range(4))  # 652 words and signs, with those between them


@pytest.mark.parametrize(
    ("expression", "body", "properties", "looked_at"),
    [
        ("a = 1", b"x", "TAGS\x01x", config.SCAN_ENTRIES),
        (LONG, b"x", "TAGS\x01x", config.SCAN_WORDS // 647),
        ("a = 1", b"x" * (config.SCAN_BYTES // 8 - 1000), "", 8),
        ("a = 1", b"x", "b\x01" + "x" * 32_000, config.SCAN_BYTES // 32_130),
        ("a = 1", b"x" * (config.SCAN_BYTES + 1), "", 1),
    ],
    ids=["entries", "words", "bodies", "properties", "one is always read"],
)
async def test_a_pull_filters_no_more_than_a_turn_has_time_for(
    wire: Wire, expression: str, body: bytes, properties: str, looked_at: int
) -> None:
    await create_topic(wire, "t")
    asked = [await send(wire, body, properties=properties) for _ in range(min(looked_at + 3, 40))]
    assert {answer.code for answer in asked} == {0}
    answer = await wire.call(Code.PULL_MESSAGE, filtered(expression))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert int(answer.ext["nextBeginOffset"]) == min(looked_at, len(asked))


async def test_of_a_property_that_occurs_twice_the_last_value_is_filtered_by(node: Node, wire: Wire) -> None:
    """As on Apache's broker, and as clients show it."""
    await create_topic(wire, "t")
    await send(wire, b"twice", properties="TAGS\x01first\x02k\x011\x02TAGS\x01last\x02k\x012")
    for found in (pull(subscription="last"), filtered("k = 2 AND TAGS = 'last'")):
        assert b"twice" in (await wire.call(Code.PULL_MESSAGE, found)).body
    for found in (pull(subscription="first"), filtered("k = 1")):
        assert (await wire.call(Code.PULL_MESSAGE, found)).code == ResponseCode.PULL_RETRY_IMMEDIATELY


# SQL92 filters: RocketMQ's rules for text, numbers and NULL, and clear refusals.


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
        "TRUE = a",
        "(FALSE) <> (a)",
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


def test_filter_has_1000_tokens_at_most() -> None:
    items = ", ".join(["'x'"] * 497)
    assert parse_filter(f"a IN ({items}, 'y')")("a\x01y")  # 999
    with pytest.raises(FilterError, match="more than 1000 tokens"):
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


@pytest.mark.parametrize("begin", ["11", "1.1", ".1", "0xf", "0x.f", "  "])
def test_a_value_that_is_almost_a_number_is_parsed_in_no_time(begin: str) -> None:
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
        ("price >", "something is missing after '>' (character 7)"),
        ("a = 1 AND", "something is missing after 'AND' (character 9)"),
        ("a BETWEEN 1", "something is missing after '1' (character 11)"),
        ("(a = 1", ") is missing after '1' (character 6)"),
        ("price > five dollars", "'dollars' (character 20) is unexpected"),
        ("a = 1; drop table x", "';' (character 6) is unexpected"),
        ("a = 1e", "'1e' (character 6) is unexpected"),
        ("a IN (1)", "IN takes texts; write '1'"),
        ("(a = 1) (b = 1)", "'(' (character 9) is unexpected"),
        ("a = 1)", "')' (character 6) is unexpected"),
        ("a = 'x", "a text is not terminated; put it in single quotes, as in 'text'"),
        ("", "it is empty"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_filter(expression: str, why: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(expression)
    assert str(refused.value) == f"the filter {expression!r} cannot be read: {why}"
