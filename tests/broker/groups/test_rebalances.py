"""How long queues have no owner, and groups no rest: what the metrics say of hand-overs."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import REBALANCE_REST_S, Limits
from rocketlet.broker.groups.history import Rebalances
from rocketlet.broker.runtime import MovableClock, Runtime

KEY = ("g", "t", 0)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(stands=True)


def test_a_queue_without_an_owner_counts_until_it_has_one(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.changed_hands(KEY, is_free=False)
    assert sum(rebalances.handovers.counts) == 0, "nobody had it before"
    rebalances.changed_hands(KEY, is_free=True)
    clock.advance(2.0)
    rebalances.changed_hands(KEY, is_free=False)
    rebalances.changed_hands(KEY, is_free=False)
    assert sum(rebalances.handovers.counts) == 1
    assert rebalances.handovers.sum_s == pytest.approx(2.0)


def test_of_too_many_queues_without_an_owner_the_oldest_is_forgotten(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock, Limits(max_free_queues=2)))
    for queue_id in range(3):
        rebalances.changed_hands(("g", "t", queue_id), is_free=True)
    for queue_id, count in ((0, 0), (1, 1), (2, 2)):
        rebalances.changed_hands(("g", "t", queue_id), is_free=False)
        assert sum(rebalances.handovers.counts) == count


@pytest.mark.parametrize("event", ["joined", "left", "leaving", "subscribed"])
def test_a_group_settles_with_the_last_queue_that_changes_hands(clock: MovableClock, event: str) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.note("g", event)
    for _ in range(2):
        clock.advance(REBALANCE_REST_S - 2)
        rebalances.changed_hands(KEY, is_free=False)
    rebalances.look()
    assert sum(rebalances.settling.counts) == 0, "it is not at rest yet"
    clock.advance(REBALANCE_REST_S)
    for _ in range(2):
        rebalances.look()
    assert sum(rebalances.settling.counts) == 1
    assert rebalances.settling.sum_s == pytest.approx(2 * (REBALANCE_REST_S - 2))


def test_a_change_that_moves_nothing_is_no_rebalance(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.note("g", "notified")
    rebalances.changed_hands(KEY, is_free=False)
    rebalances.note("g", "joined")
    clock.advance(REBALANCE_REST_S + 1)
    rebalances.changed_hands(("other", "t", 0), is_free=False)
    rebalances.note("g", "left")
    assert sum(rebalances.settling.counts) == 0
    clock.advance(1.0)
    rebalances.changed_hands(KEY, is_free=True)
    clock.advance(REBALANCE_REST_S)
    rebalances.look()
    assert rebalances.settling.sum_s == pytest.approx(1.0), "counted from the last change"


def test_a_change_while_queues_change_hands_is_the_same_rebalance(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.note("g", "joined")
    clock.advance(REBALANCE_REST_S - 2)
    rebalances.changed_hands(KEY, is_free=True)
    clock.advance(2.0)
    rebalances.note("g", "left")
    clock.advance(1.0)
    rebalances.changed_hands(KEY, is_free=False)
    clock.advance(REBALANCE_REST_S)
    rebalances.look()
    assert rebalances.settling.sum_s == pytest.approx(REBALANCE_REST_S + 1)
