"""Times that pass while no broker runs: nothing is lost, given too early, or given twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocketlet.broker.config import RENEWAL_STEPS_S, STANDSTILL_S
from rocketlet.broker.pops.deliveries import AckStatus, Why
from structlog.testing import capture_logs

from .world import World, bodies, client_of, handles

HOUR_S = 3600


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data")


def down(world: World, seconds: float) -> None:
    """The broker is killed and started again this much later."""
    world.kill()
    world.clock.advance(seconds)
    world.open()


def given(world: World) -> list[tuple[str, int]]:
    """Everything that another client can pop, with its attempts."""
    found: list[tuple[str, int]] = []
    while (result := world.receive(client="d")).why is Why.FOUND:
        found += zip(bodies(result), [message.attempt for message in result.messages], strict=True)
    return sorted(found)


@pytest.mark.parametrize("seconds", [10, HOUR_S, 40 * 24 * HOUR_S])
def test_deadlines_that_passed_leave_clients_a_second_to_acknowledge_and_bring_each_message_once(
    world: World, seconds: int
) -> None:
    for number in range(4):
        world.send(f"m{number}", queue=number % 2)
    held = world.receive(invisible_ms=5000)
    done, late, *_ = handles(held)
    world.ack(done)
    down(world, seconds)
    assert given(world) == []
    world.advance(STANDSTILL_S - 0.001)
    assert given(world) == []
    assert world.ack(late) == [AckStatus.DONE]
    world.advance(0.001)
    left = sorted(bodies(held)[2:])
    assert given(world) == [(body, 2) for body in left]
    assert set(world.ack(*handles(held)[2:])) == {AckStatus.EXPIRED}
    down(world, 0)
    assert given(world) == []


def test_a_deadline_that_has_not_passed_is_the_same_moment_after_the_start(world: World) -> None:
    world.send("m")
    world.receive(invisible_ms=10_000)
    down(world, 9.5)
    world.advance(0.499)
    assert given(world) == []
    world.advance(0.001)
    assert given(world) == [("m", 2)]


def test_a_nack_whose_time_passed_comes_once(world: World) -> None:
    world.send("m")
    (handle,) = handles(world.receive(invisible_ms=5000))
    world.state.change("g", "t", handle, 30_000)
    world.turn()
    down(world, HOUR_S)
    world.advance(STANDSTILL_S)
    assert given(world) == [("m", 2)]


def test_the_last_attempt_that_ended_meanwhile_is_one_dead_letter(world: World) -> None:
    world.group("g", retry_max_times=0)
    world.send("m")
    world.receive(invisible_ms=5000)
    for _ in range(2):
        down(world, HOUR_S)
        world.advance(STANDSTILL_S)
        assert given(world) == []
    assert len(world.receive(group="undertaker", topic="%DLQ%g").messages) == 1


@pytest.mark.parametrize("renewals", [0, 2])
def test_a_message_that_the_broker_extended_ends_at_its_deadline_though_its_client_comes_back(
    world: World, renewals: int
) -> None:
    """The broker may have ended before its response was there: the client would never acknowledge it, and keep contact."""
    world.send("m")
    (handle,) = handles(world.receive(auto_renew=True, invisible_ms=60_000))
    ends_s = 60.0
    for step_s in RENEWAL_STEPS_S[:renewals]:
        world.advance(ends_s)
        ends_s = step_s
        world.state.pools.record_contact(client_of("c"))
    down(world, 10)
    for _ in range(9):
        world.state.pools.record_contact(client_of("c"))
        world.advance((ends_s - 10.001) / 9)
    assert given(world) == []
    assert world.state.change("g", "t", handle, 50).outcome is AckStatus.DONE, "its handle stays good"
    world.advance(0.049)
    assert given(world) == []
    world.advance(0.001)
    assert given(world) == [("m", 2)]


def test_a_client_may_acknowledge_after_a_restart_what_the_broker_extended(world: World) -> None:
    world.send("m")
    (handle,) = handles(world.receive(auto_renew=True, invisible_ms=60_000))
    down(world, HOUR_S)
    assert world.ack(handle) == [AckStatus.DONE]
    world.advance(HOUR_S)
    assert given(world) == []


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_journal_that_was_lost_is_said_once(world: World, is_empty: bool) -> None:
    for number in range(3):
        world.send(f"m{number}")
    world.ack(*handles(world.receive())[1:])
    world.save()
    world.kill()
    if is_empty:
        world.journal.write_bytes(b"")
    else:
        world.journal.unlink()
    with capture_logs() as logs:
        world.open()
    assert [log["file"] for log in logs if log["event"] == "pop_journal_lost"] == [str(world.journal)]
    assert given(world) == [("m0", 1), ("m1", 1), ("m2", 1)]
    world.kill()
    with capture_logs() as logs:
        world.open()
    assert not [log for log in logs if log["event"] == "pop_journal_lost"]


def test_a_journal_of_which_nothing_is_left_is_not_said_to_be_lost(world: World) -> None:
    world.send("m")
    world.receive()
    world.state.group_deleted("g")
    world.state._journal.journal_bytes = -1  # it is rewritten with each save
    for _ in range(3):
        world.save()
    world.kill()
    with capture_logs() as logs:
        world.open()
    assert not [log for log in logs if log["event"] == "pop_journal_lost"]


def test_a_deleted_group_does_not_return_when_a_message_was_acknowledged_in_the_same_iteration(world: World) -> None:
    world.send("m")
    world.state.ack("g", "t", handles(world.receive()), lambda outcomes: None)
    world.state.group_deleted("g")
    world.offsets.group_deleted("g")
    world.turn()
    world.kill()
    world.open()
    assert not world.state.pools.all
    assert world.offsets.get("g", "t", 0) is None


def test_in_order_a_message_group_comes_from_its_first_one_on(world: World) -> None:
    world.group("g", consume_orderly=True)
    for number in range(3):
        world.send(f"m{number}", __SHARDINGKEY="k")
    world.receive(count=2, invisible_ms=5000)
    down(world, HOUR_S)
    assert given(world) == []
    world.advance(STANDSTILL_S)
    assert bodies(world.receive(count=3)) == ["m0", "m1", "m2"]
