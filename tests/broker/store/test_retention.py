"""A wall clock that jumps ahead does not have everything expire at once."""

from __future__ import annotations

from rocketlet.broker.config import MAX_CLOCK_DOUBT_S, RETENTION_JUMP_S, RETENTION_SWEEP_S
from rocketlet.broker.metrics import Collector
from rocketlet.broker.store.store import RetentionTime
from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import Patience, diagnose
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, create_topic, eventually
from ...support.clocks import WallClock
from ...support.requests import bodies_of, send

DAY_S = 86_400.0


def test_time_that_goes_by_counts_at_once() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    for seconds in (1, 30, 30 * DAY_S):
        clock.advance(seconds)
        assert time.now_s() == clock.time_s()


def test_a_small_jump_counts_at_once() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    clock.set_s = RETENTION_JUMP_S
    assert time.now_s() == clock.time_s()


def test_a_jump_counts_after_as_long_as_it_is_wide_and_a_day_at_most() -> None:
    for jump_s in (RETENTION_JUMP_S + 1, 3600.0, MAX_CLOCK_DOUBT_S, 30 * DAY_S):
        clock = WallClock(stands=True)
        time = RetentionTime(clock)
        clock.set_s = jump_s
        with capture_logs() as logs:
            assert time.now_s() == clock.time_s() - jump_s
        wait_s = min(jump_s, MAX_CLOCK_DOUBT_S)
        assert [(log["event"], log["ahead_s"], log["wait_s"]) for log in logs] == [
            ("clock_set_ahead", round(jump_s), round(wait_s))
        ]
        clock.advance(wait_s - 1)
        assert time.now_s() == clock.time_s() - jump_s
        clock.advance(1)
        assert time.now_s() == clock.time_s()


def test_a_clock_that_is_set_right_again_counts_at_once() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    clock.set_s = 30 * DAY_S
    time.now_s()
    clock.advance(60)
    clock.set_s = 10.0  # nearly
    assert 0 <= clock.time_s() - time.now_s() <= RETENTION_JUMP_S
    clock.set_s = 30 * DAY_S
    assert time.now_s() < clock.time_s() - 29 * DAY_S


async def metric(node: Node, name: str) -> float:
    families = await Collector(node.broker, node.server.memory, ()).snapshot()
    (sample,) = (sample for family in families for sample in family.samples if sample.name == name)
    return sample.value


async def test_a_clock_that_is_30_days_ahead_deletes_nothing(nodes: Nodes, connect: Connect) -> None:
    clock = WallClock(stands=True)
    node = await nodes.start(clock=clock, segment_bytes=1000)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for _ in range(10):
        await send(wire, bytes(900))
    segments = node.broker.store._log.segments
    clock.set_s = 30 * DAY_S
    clock.advance(RETENTION_SWEEP_S)
    await node.broker.expire_segments()
    assert node.broker.store._log.segments == segments
    assert len(await bodies_of(wire)) == 10
    assert await metric(node, "rocketlet_clock_ahead_seconds") == 30 * DAY_S
    async with AdminClient(node.address) as admin:
        findings = [found for found in await diagnose(admin, Patience(0, 0, 0)) if found.kind == "clock_set_ahead"]
    assert ["2592000 s ahead" in found.text for found in findings] == [True]
    clock.set_s = 0.0
    clock.advance(RETENTION_SWEEP_S)
    await node.broker.expire_segments()
    assert node.broker.store._log.segments == segments
    assert await metric(node, "rocketlet_clock_ahead_seconds") == 0
    clock.advance(node.broker.config.retain_hours * 3600 + DAY_S)
    await eventually(lambda: node.broker.store._log.segments < segments)
