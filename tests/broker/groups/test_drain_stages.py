"""A drain alone: which readers are waited for, for how long, and what it holds of them."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import DRAIN_ROUNDS, MOVING_BYTES
from rocketlet.broker.groups.members import Member
from rocketlet.broker.groups.stages import Drain, DrainStage, QueueKey
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.protocol.bodies import ConsumerData

from ...conftest import peer

A, B, C = (("t", number) for number in range(3))


@pytest.fixture
def one() -> RemotingConnection:
    return peer()


@pytest.fixture
def two() -> RemotingConnection:
    return peer()


def losing(*lost: tuple[QueueKey, RemotingConnection], is_long: bool = False, began_s: float = 100.0) -> Drain:
    drain = Drain(began_s, is_long=is_long)
    drain.lose(lost, 101.0, 130.0)
    return drain


def test_a_drain_ends_when_the_last_reader_has_handled_all(one: RemotingConnection, two: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (B, two))
    assert (drain.stage, drain.is_finding, drain.is_over) == (DrainStage.DRAINING, False, False)
    assert drain.moving == {A: {one}, B: {one, two}}
    drain.finish(one, A)
    assert (drain.has(A), drain.has(B), drain.waiting) == (False, True, {one: {B}, two: {B}})
    drain.finish(one, B)
    assert (list(drain.waiting), list(drain.due)) == ([two], [two])
    drain.finish(two, B)
    assert (drain.stage, drain.due, drain.since_s) == (DrainStage.AGREEING, {}, {})


def test_nobody_is_waited_for_where_nothing_moves() -> None:
    drain = losing()
    assert (drain.stage, drain.waiting) == (DrainStage.AGREEING, {})


def test_what_was_handled_before_a_further_change_need_not_be_handled_again(
    one: RemotingConnection, two: RemotingConnection
) -> None:
    drain = losing((A, one), (B, one))
    drain.finish(one, A)
    drain.change({one, two}, 110.0)
    assert (drain.stage, drain.began_s) == (DrainStage.FINDING, 100.0)
    drain.lose([(A, one), (B, one), (B, two), (C, one)], 111.0, 140.0)
    assert drain.moving == {A: {one}, B: {one, two}, C: {one}}
    assert drain.waiting == {one: {B, C}}, "another one waited for B, and has nothing of it"
    assert drain.since_s == {(one, B): 101.0, (one, C): 111.0}
    assert drain.due == {one: (130.0, False)}, "as long as it has stood"


def test_readers_that_are_gone_are_forgotten(one: RemotingConnection, two: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (A, two), (B, two))
    for reader in (one, two):
        drain.finish(reader, A)
        drain.dropped(reader, B)
        drain.pulled_s[reader] = 102.0
    drain.due[None] = 150.0, False
    drain.change({two}, 110.0)
    for known in (drain.waiting, drain.drained, drain.rounds, drain.pulled_s):
        assert list(known) == [two]
    assert list(drain.due) == [two, None]
    assert list(drain.since_s) == [(two, B)]


def test_a_change_of_members_that_were_notified_begins_a_drain_again(one: RemotingConnection) -> None:
    drain = losing((A, one))
    drain.give_up_all()
    assert (drain.is_over, drain.waiting, drain.due) == (True, {}, {})
    drain.change({one}, 110.0)
    assert (drain.began_s, drain.stage) == (110.0, DrainStage.FINDING)


def test_those_that_are_given_up_are_waited_for_no_more(one: RemotingConnection, two: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (A, two))
    drain.give_up([(one, A), (two, A)])
    assert drain.waiting == {one: {B}}
    drain.change({one, two}, 110.0)
    drain.lose([(A, one), (B, one)], 111.0, 140.0)
    assert drain.waiting == {one: {A, B}}, "it has handled nothing"


def test_a_queue_that_a_reader_keeps_it_has_not_released(one: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (C, one))
    for place in (A, B):
        drain.finish(one, place)
        drain.dropped(one, place)
    drain.change({one}, 110.0)
    drain.lose([(A, one), (C, one)], 111.0, 140.0)
    drain.forget_kept()
    assert drain.drained == {one: {A}}
    assert list(drain.rounds[one]) == [A]


def test_a_reader_that_is_given_a_list_may_read_what_comes_back(
    one: RemotingConnection, two: RemotingConnection
) -> None:
    drain = losing((A, one), (A, two), (B, one))
    drain.finish(one, A)
    drain.dropped(one, B)
    drain.returning[one] = {A}
    drain.read_again(one)
    assert (drain.drained, drain.rounds, drain.returning) == ({}, {}, {})
    assert drain.moving == {A: {two}, B: {one}}
    drain.read_again(two)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_reader_that_continues_may_stand_longer(
    one: RemotingConnection, two: RemotingConnection, *, is_long: bool
) -> None:
    drain = losing((A, one), (B, two), is_long=is_long)
    assert drain.moves_singly is is_long
    drain.record_progress(120.0)
    drain.record_progress(140.0, one)
    drain.record_progress(150.0, peer())
    assert drain.due_s == (130.0 if is_long else 150.0)
    assert drain.standing(129.9, was_asked=False) == []
    assert drain.standing(130.0, was_asked=False) == ([two] if is_long else [])
    assert drain.standing(140.0, was_asked=True) == []
    assert drain.standing(150.0, was_asked=False) == ([one, two] if is_long else [None])
    drain.due[two if is_long else None] = 150.0, True
    assert drain.standing(150.0, was_asked=True) == [two if is_long else None]


def test_queues_of_a_long_drain_are_as_old_as_each_of_them(one: RemotingConnection) -> None:
    drain = losing((A, one))
    assert drain.oldest_s == 100.0
    drain.is_long = True
    assert drain.oldest_s == 101.0
    assert (drain.since(131.0, 30.0), drain.since(130.9, 30.0)) == ([(one, A)], [])
    drain.finish(one, A)
    assert drain.oldest_s == 100.0
    assert not drain.moves_singly


def test_readers_that_pull_what_they_lose_are_known_for_a_while(
    one: RemotingConnection, two: RemotingConnection
) -> None:
    drain = losing((A, one), (A, two))
    drain.pulled_s |= {one: 105.0, two: 104.9}
    assert drain.reading(105.0) == {one}


def test_a_reader_that_comes_back_to_some_queues_only_has_dropped_the_others(one: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (C, one))
    drain.dropped(one, A)
    drain.dropped(one, B)  # as often as to A, and again
    found = {count: drain.dropped(one, A) for count in range(2, 2 * DRAIN_ROUNDS + 1)}
    assert {count: lost for count, lost in found.items() if lost} == {2 * DRAIN_ROUNDS: [B]}, "to C it never came"
    assert drain.dropped(peer(), A) == []


def test_queues_that_move_are_charged_to_those_that_lose_them(one: RemotingConnection, two: RemotingConnection) -> None:
    drain = losing((A, one), (B, one), (B, two))
    for _ in range(2):
        drain.charge()
        assert (one.charged_bytes, two.charged_bytes) == (2 * MOVING_BYTES, MOVING_BYTES)
    drain.change({one, two}, 110.0)
    drain.lose([(C, two)], 111.0, 140.0)
    drain.charge()
    assert (one.charged_bytes, two.charged_bytes) == (0, MOVING_BYTES)
    drain.end()
    assert (one.charged_bytes, two.charged_bytes, drain.moving) == (0, 0, {})


def test_pulls_that_wait_continue_once(one: RemotingConnection) -> None:
    drain, gone_on = losing((A, one)), list[QueueKey]()
    for place in (A, A, B, C):
        drain.gated.setdefault(place, []).append(lambda place=place: gone_on.append(place))  # type: ignore[misc]
    drain.release_pulls([A])
    drain.release_pulls([A])
    assert gone_on == [A, A]
    drain.end()
    assert gone_on == [A, A, B, C]


class Timer:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_drain_has_one_timer_until_it_ends(one: RemotingConnection) -> None:
    drain, first, second = losing((A, one)), Timer(), Timer()
    drain.set_timer(first)
    drain.set_timer(second)
    assert (first.is_cancelled, second.is_cancelled) == (True, False)
    drain.end()
    assert second.is_cancelled
    losing((A, one)).end()


def test_members_that_are_waited_for_are_named(one: RemotingConnection, two: RemotingConnection) -> None:
    drain = losing((A, one), (A, two))
    members = {one: Member("c1", one, ConsumerData("g"), 0, 0, 0.0)}
    assert list(drain.waited_for(members)) == ["c1"]  # type: ignore[arg-type]
