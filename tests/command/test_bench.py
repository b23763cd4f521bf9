"""`rocketlet bench` on a real broker: what it measures, what it leaves behind, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rocketlet.client import AdminClient
from rocketlet.client.wire.connection import Access
from rocketlet.command import config
from rocketlet.command.tools import load
from rocketlet.command.tools.load import Half, Load
from rocketlet.testing import Broker, Fault

from ..conftest import Node
from .conftest import Run

SHORT = ("--seconds", "0.2", "--rate", "200", "--in-flight", "4", "--size", "100")


async def left_behind(address: str) -> list[str]:
    async with AdminClient(address) as admin:
        names = [*await admin.topics(system=True), *await admin.groups()]
    return [name for name in names if "rocketlet-bench" in name]


async def test_what_is_sent_is_consumed_and_nothing_stays(node: Node, run: Run) -> None:
    ran = await run("bench", *SHORT, "--json")
    assert (ran.status, ran.err) == (0, "")
    sent, consumed = ran.records
    assert (sent["what"], consumed["what"]) == ("sent", "consumed")
    assert sent["messages"] == consumed["messages"]
    assert 0 < int(str(sent["messages"])) <= 40, "the rate holds"
    for record in (sent, consumed):
        waits = [float(str(record[name])) for name in ("p50_ms", "p99_ms", "p999_ms", "max_ms")]
        assert waits[0] > 0
        assert waits == sorted(waits)
        assert float(str(record["per_s"])) > 0
    assert await left_behind(node.address) == []


async def test_people_see_a_table(run: Run) -> None:
    ran = await run("bench", *SHORT, "--queues", "2")
    head, *rows = ran.out.splitlines()
    assert head.split()[:2] == ["what", "messages"]
    assert [row.split()[0] for row in rows] == ["sent", "consumed"]


async def test_sends_that_are_refused_are_counted_and_what_was_made_is_deleted(rocketlet: Broker) -> None:
    for code in ("SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE"):
        rocketlet.faults.add(Fault.answer(code, response="MESSAGE_ILLEGAL", remark="not today", times=100))
    outcome = await load.apply(rocketlet.address, Load(seconds=0.1, rate=100, size=2000, in_flight=2), Access())
    assert (len(outcome.sent.waits_ms), outcome.missing) == (0, 0)
    assert outcome.failed > 0
    assert "not today" in outcome.fault
    assert await left_behind(rocketlet.address) == []


@pytest.mark.parametrize(
    ("least", "most", "make"),
    [
        (0.1, config.MAX_BENCH_SECONDS, lambda value: Load(seconds=value)),
        (config.MIN_BENCH_BYTES, config.MAX_BENCH_BYTES, lambda value: Load(size=value)),
        (1, config.MAX_BENCH_QUEUES, lambda value: Load(queues=value)),
        (1, config.MAX_BENCH_IN_FLIGHT, lambda value: Load(in_flight=value)),
    ],
)
def test_limits(least: float, most: float, make: Callable[[float], Load]) -> None:
    make(least)
    make(most)
    for value in (least - 0.1, most + 1):
        with pytest.raises(Exception, match="use "):
            make(value)


async def test_what_is_beyond_a_limit_is_refused_with_the_range(run: Run) -> None:
    ran = await run("bench", "--size", "7")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"rocketlet: --size 7: use 8 to {config.MAX_BENCH_BYTES}\n"


def test_percentiles_are_waits_that_were_seen() -> None:
    half = Half()
    assert half.percentiles_ms((0.5, 1.0)) == [0.0, 0.0]
    for wait_ms in range(1000, 0, -1):
        half.note(float(wait_ms))
    assert half.percentiles_ms((0.5, 0.99, 0.999, 1.0)) == [500.0, 990.0, 999.0, 1000.0]
