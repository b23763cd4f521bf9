"""SQL92 filters are parsed by a thread, and a pull looks at no more than a turn has time for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rocketlet.broker import config
from rocketlet.broker.messages import filters
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.group_bodies import encode_client_check
from rocketlet.protocol.subscription import SQL92, Subscription

from ..conftest import Connect, Node, Wire, create_topic, eventually
from ..support.requests import SUBSCRIBED, SUSPEND, pull, send


class Slow:
    """Parses when it is let."""

    def __init__(self) -> None:
        self.may_parse = threading.Event()
        self.begun: list[str] = []
        self._parse = filters._parse

    def parse(self, expression: str) -> Any:
        self.begun.append(expression)
        assert self.may_parse.wait(60)
        return self._parse(expression)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    parser = Slow()
    monkeypatch.setattr(filters, "_parse", parser.parse)
    yield parser
    parser.may_parse.set()


def filtered(expression: str, **fields: Any) -> dict[str, Any]:
    return pull(subscription=expression, expression_type="SQL92", **fields)


def check(expression: str) -> bytes:
    return encode_client_check("c", "g", Subscription("t", expression, kind=SQL92))


async def test_only_who_asks_for_a_new_filter_waits_for_it(
    node: Node, wire: Wire, connect: Connect, slow: Slow
) -> None:
    await create_topic(wire, "t")
    await send(wire, b"yes", properties="a\x011")
    asked = wire.send(Code.PULL_MESSAGE, filtered("a = 1")), wire.send(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))
    wrong = wire.send(Code.CHECK_CLIENT_CONFIG, body=check("a +"))
    await eventually(lambda: slow.begun == ["a = 1"])
    for other in (wire, await connect(node.address)):
        assert (await other.call(Code.PULL_MESSAGE, pull())).code == 0
        assert (await send(other, b"no")).code == 0
    slow.may_parse.set()
    found, checked = [await wire.answer(opaque) for opaque in asked]
    assert (found.code, found.body.count(b"yes"), checked.code) == (0, 1, 0)
    assert (await wire.answer(wrong)).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert slow.begun == ["a = 1", "a +"], "once each"
    assert (await wire.call(Code.PULL_MESSAGE, filtered("a +"))).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert len(slow.begun) == 2


async def test_a_filter_that_breaks_the_parser_is_answered(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(expression: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("rocketlet.broker.messages.sql_filter.parse_filter", broken)
    answer = await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


async def test_what_waits_for_a_filter_counts_and_a_client_that_is_gone_is_forgotten(
    node: Node, wire: Wire, connect: Connect, slow: Slow
) -> None:
    await create_topic(wire, "t")
    leaving = await connect(node.address)
    for asking in (wire, leaving):
        asking.send(Code.PULL_MESSAGE, filtered("a = 1", flags=SUBSCRIBED | SUSPEND))
    await eventually(lambda: node.broker.filters._waiting == 2)
    connections = list(node.server._connections)
    assert all(connection.charged_bytes > len("a = 1") for connection in connections)
    await leaving.close()
    await eventually(lambda: len(node.server._connections) == 1)
    slow.may_parse.set()
    await eventually(lambda: not node.broker.filters._waiting)
    await eventually(lambda: [connection.held_pulls for connection in connections].count(1) == 1)
    assert not node.broker.filters._asked


async def test_more_requests_than_may_wait_for_their_filter_are_refused(
    node: Node, wire: Wire, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "MAX_UNPARSED", 2)
    asked = [wire.send(Code.CHECK_CLIENT_CONFIG, body=check("a = 1")) for _ in range(2)]
    refused = await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))
    assert (refused.code, "wait for their SQL92 filter" in (refused.remark or "")) == (ResponseCode.SYSTEM_BUSY, True)
    slow.may_parse.set()
    assert [(await wire.answer(opaque)).code for opaque in asked] == [0, 0]
    assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 1"))).code == 0


async def test_the_filter_that_was_asked_for_longest_ago_is_forgotten(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "MAX_FILTERS", 2)
    for number in (1, 2, 1, 3):
        assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check(f"a = {number}"))).code == 0
    assert [node.broker.filters.find(f"a = {number}") is not None for number in (1, 2, 3)] == [True, False, True]


async def test_a_broker_stops_while_a_filter_is_parsed(node: Node, wire: Wire, slow: Slow) -> None:
    for number in range(2):
        wire.send(Code.CHECK_CLIENT_CONFIG, body=check(f"a = {number}"))
    await eventually(lambda: len(slow.begun) == 1)
    stopping = asyncio.create_task(node.stop())
    await eventually(lambda: node.broker.filters._is_stopped)
    assert (await wire.call(Code.CHECK_CLIENT_CONFIG, body=check("a = 3"))).code == ResponseCode.SYSTEM_BUSY
    slow.may_parse.set()
    await stopping
    assert slow.begun == ["a = 0"]


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
    ids=["entries", "words", "bodies", "properties", "one is always looked at"],
)
async def test_a_pull_looks_at_no_more_than_a_turn_has_time_for(
    wire: Wire, expression: str, body: bytes, properties: str, looked_at: int
) -> None:
    await create_topic(wire, "t")
    asked = [await send(wire, body, properties=properties) for _ in range(min(looked_at + 3, 40))]
    assert {answer.code for answer in asked} == {0}
    answer = await wire.call(Code.PULL_MESSAGE, filtered(expression))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert int(answer.ext["nextBeginOffset"]) == min(looked_at, len(asked))
