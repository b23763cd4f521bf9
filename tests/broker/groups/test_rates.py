"""Rates of groups: pulls, held and repeated pulls, and pops get as many messages as the rate allows."""

from __future__ import annotations

import math

import pytest
from rocketlet.broker.config import RATE_BURST_S, RATE_RECHECK_S, RATE_ROUTE_INTERVAL_S
from rocketlet.broker.groups.rates import Rates, TokenBucket
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.client import AdminClient, ConfigError, Consumer, Producer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.protocol.bodies import BrokerData, GroupConfig, QueueData, Route, rate_of
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_records
from rocketlet.testing import Broker
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Wire, eventually
from ...support.handlers import Inbox
from ...support.requests import SUBSCRIBED, SUSPEND, beat, pop, popped, pull, send
from ...support.topics import put

HELD = SUBSCRIBED | SUSPEND


def test_bucket_hands_out_its_rate_after_a_burst() -> None:
    for text, rate in (("100/s", 100.0), ("30/m", 0.5), ("0.5/s", 0.5), ("7200/h", 2.0)):
        assert rate_of(text) == rate
        bucket, now_s, taken = TokenBucket(text, 0.0), 0.0, 0
        for _ in range(2000):
            now_s += 0.05
            count = bucket.available(now_s)
            bucket.take(count, now_s)
            taken += count
        assert math.isclose(taken, rate * now_s + max(rate * RATE_BURST_S, 1), abs_tol=1 + rate * 0.05)


def test_reads_that_wait_get_tokens_one_after_the_other() -> None:
    bucket = TokenBucket("2/s", 0.0)
    bucket.take(2, 0.0)
    assert [bucket.wait_s(0.0) for _ in range(2)] == [0.5, 1.0]
    assert bucket.wait_s(0.0, 0.7) == 0.7, "no token is kept for a read that does not wait for it"
    assert bucket.wait_s(0.0) == RATE_RECHECK_S
    assert bucket.wait_s(0.5) == 1.0
    assert bucket.is_limited(10.4)
    assert not bucket.is_limited(10.6)


async def bodies(wire: Wire, offset: int, **fields: object) -> list[bytes]:
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset, flags=HELD, **fields))  # type: ignore[arg-type]
    return [record.body for record in decode_records(answer.body)] if answer.code == 0 else []


@pytest.mark.still
async def test_pulls_wait_for_tokens_until_the_rate_is_changed(node: Node, connect: Connect) -> None:
    clock = node.clock
    wire, tool = await connect(node.address), await connect(node.address)
    put(node, queues=1)
    node.broker.group_configs.put(GroupConfig("g", rate="2/s"))
    for number in range(20):
        await send(wire, b"%d" % number)
    await beat(wire, "c")
    assert await bodies(wire, 0) == [b"0", b"1"], "the burst of a second"
    held = wire.send(RequestCode.PULL_MESSAGE, pull(offset=2, flags=HELD))
    assert len((await tool.call(RequestCode.PULL_MESSAGE, pull())).body) > 0, "a tool takes no token"
    assert node.broker.held_pulls.count == 1
    clock.advance(0.5)
    assert [record.body for record in decode_records((await wire.answer(held)).body)] == [b"2"]
    clock.advance(30)
    assert await bodies(wire, 3) == [b"3", b"4"], "an idle group collects no more than the burst"
    report = node.broker.rates.limited("g")
    assert report == []
    late = wire.send(RequestCode.PULL_MESSAGE, pull(offset=5, flags=HELD, suspend_timeout_millis=300))
    await eventually(lambda: node.broker.rates.limited("g") == ["t"])
    clock.advance(0.3)
    assert (await wire.answer(late)).code == ResponseCode.PULL_NOT_FOUND, "no longer than its suspend time"
    held = wire.send(RequestCode.PULL_MESSAGE, pull(offset=5, flags=HELD))
    await eventually(lambda: node.broker.held_pulls.count == 1)
    node.broker.group_configs.put(GroupConfig("g"))
    clock.advance(0.5)
    assert len(decode_bodies(await wire.answer(held))) == 15, "the rate is off"
    assert await bodies(wire, 5) == [b"%d" % number for number in range(5, 20)]


def decode_bodies(answer: object) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)]  # type: ignore[attr-defined]


@pytest.mark.still
async def test_receives_wait_for_tokens(node: Node, wire: Wire) -> None:
    clock = node.clock
    put(node, queues=1)
    node.broker.group_configs.put(GroupConfig("g", rate="2/s"))
    for number in range(6):
        await send(wire, b"%d" % number)
    assert [record.body for record in await popped(wire)] == [b"0", b"1"]
    assert await popped(wire) == []
    held = wire.send(RequestCode.POP_MESSAGE, pop(pollTime=10_000, bornTime=clock.time_ms()))
    await eventually(lambda: node.broker.pops.waiting == 1)
    clock.advance(0.5)
    assert decode_bodies(await wire.answer(held)) == [b"2"]
    node.broker.group_configs.put(GroupConfig("g"))
    assert [record.body for record in await popped(wire)] == [b"3", b"4", b"5"]


class TwoBrokers:
    def __init__(self) -> None:
        self.asked = 0

    async def find_route(self, topic: str) -> Route | None:
        self.asked += 1
        names = ("a", "b")
        queues = tuple(QueueData(name, 1, 1, 6) for name in names)
        return Route(queues, tuple(BrokerData(name, {0: "h:1"}) for name in names))


async def test_rate_is_divided_by_the_brokers_of_the_topic() -> None:
    clock, routes = MovableClock(stands=True), TwoBrokers()
    rates = Rates(Runtime(clock), routes)
    group = GroupConfig("g", rate="10/s")

    def brokers() -> int:
        bucket = rates.bucket(group, "t")
        assert bucket is not None
        return bucket.brokers

    assert brokers() == 1, "not known yet"
    await eventually(lambda: brokers() == 2)
    assert routes.asked == 1
    clock.advance(RATE_ROUTE_INTERVAL_S)
    brokers()
    await eventually(lambda: routes.asked == 2)
    assert rates.bucket(GroupConfig("g"), "t") is None


async def test_group_is_limited_live_and_not_reported_as_stuck() -> None:
    inbox = Inbox()
    async with (
        Broker() as broker,
        AdminClient(broker.address) as admin,
        Producer(broker.address) as producer,
        Consumer(broker.address, "g", "t", inbox, start="first") as consumer,
    ):
        await consumer.assigned()
        await admin.change_group("g", rate="1/h")
        for number in range(4):
            await producer.send("t", b"%d" % number)
        await broker.until(lambda: len(inbox.messages) == 1)
        await eventually(lambda: any_limited(admin))
        found = await diagnose(admin, ObservationTimes(look_s=0, watch_s=0, stuck_s=0))
        assert not {finding.kind for finding in found} & {"stuck_queue", "growing_lag"}
        assert (await admin.group_configs("g"))["broker-a"].rate == "1/h"
        for text in ("fast", "0/s", "1000001/s", "-1/s", "10"):
            with pytest.raises(Exception, match="expected up to 1000000/s, such as 100/s or 30/m, or off"):
                await admin.change_group("g", rate=text)
        await admin.change_group("g", rate="off")
        await broker.until(lambda: len(inbox.messages) == 4)


async def any_limited(admin: AdminClient) -> bool:
    reports = await admin.history("g")
    return [report["limited"] for report in reports] == [["t"]]


async def test_rate_is_refused_for_brokers_that_do_not_have_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.broker.group_configs.put(GroupConfig("g"))
    async with AdminClient(node.address) as admin:

        async def of_apache(address: str) -> dict[str, str]:
            return {"brokerVersionDesc": "V5_5_0"}

        monkeypatch.setattr(admin, "broker_status", of_apache)
        with pytest.raises(ConfigError, match="rate: the broker broker-a is not a Rocketlet"):
            await admin.change_group("g", rate="10/s")
