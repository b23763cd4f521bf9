"""Drains of groups without a broker: which readers are waited for, how long, whose pulls return, and who is notified when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rocketlet.broker.config import (
    DRAIN_ROUNDS,
    DROPPED_AFTER_S,
    LIMITS,
    MOVING_BYTES,
    TOLD_AGAIN,
    LimitExceeded,
    Limits,
)
from rocketlet.broker.groups.drains import Draining, RedeliveryCauses, defer_notification
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import History, Member
from rocketlet.broker.groups.reading import is_gated, is_moving_away
from rocketlet.broker.groups.stages import Drain, DrainStage, PeerSync, QueueKey
from rocketlet.broker.messages.held_pulls import Until
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.protocol.bodies import BrokerData, ConsumerData, QueueData, Route, finish
from rocketlet.protocol.group_bodies import AgreedMembers
from rocketlet.protocol.headers import AgreeOnMembers, PullMessage
from rocketlet.protocol.names import Subscription
from rocketlet.testing.clock import MovableClock

from ...conftest import peer
from ...support.locks import Changes, Peers, Routes, make_groups, make_locks

QUEUES = 4
FLAGS = 0x1 | 0x2 | 0x4


class Clock(MovableClock):
    """Timers go off when the test says so."""

    def __init__(self) -> None:
        super().__init__(stands=True)
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, action: Any, *arguments: Any) -> Any:
        timer = (self.monotonic_s() + delay_s, lambda: action(*arguments))
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer) if timer in self.timers else None)

    def passes(self, seconds: float) -> None:
        end_s = self.monotonic_s() + seconds
        while due := [timer for timer in self.timers if timer[0] <= end_s]:
            timer = min(due, key=lambda item: item[0])
            self.advance(max(timer[0] - self.monotonic_s(), 0.0))
            self.timers.remove(timer)
            timer[1]()
        self.advance(end_s - self.monotonic_s())


class World:
    def __init__(self, folder: Path, **limits: Any) -> None:
        self.clock = clock = Clock()
        self.limits = Limits(**limits) if limits else LIMITS
        engine: Any = self
        runtime = Runtime(clock, self.limits, tasks=engine, turns=engine)
        history = History(runtime)
        self.queues = QUEUES
        self.works: list[Any] = []
        self.told: list[RemotingConnection] = []
        self.drained: list[tuple[int, RemotingConnection]] = []
        self.held: dict[RemotingConnection, list[Any]] = {}
        self.release: list[Any] = []
        self.repeats = RedeliveryCauses(clock)
        changes = Changes(
            members=lambda group: self.draining.begin_change(group),
            moved=lambda group: self.draining.begin_change(group),
            away=lambda group: self.draining.peers_changed(group),
            released=lambda place, session: self.drained.append((place[1], session)),  # type: ignore[arg-type]
        )
        self.groups = make_groups(runtime, history, QUEUES, changes)
        self.locks = make_locks(folder, clock, groups=self.groups)
        pulls: Any = SimpleNamespace(
            of=lambda session, group: list(self.held.get(session, ())), release=self.release.append
        )
        notifications: Any = SimpleNamespace(notify=lambda group, sessions: self.told.extend(sessions))
        self.draining = Draining(
            runtime,
            self.groups,
            self.locks,
            pulls,
            notifications,
            routes=Routes(self._route),
            peers=Peers(),
            repeats=self.repeats,
        )

    def _route(self, topic: str) -> Route | None:
        queues = (QueueData("a", self.queues, self.queues, 6),)
        return Route(queues, (BrokerData("a", {0: "127.0.0.1:1"}, "c"),)) if topic == "t" else None

    def spawn(self, work: Any) -> None:
        self.works.append(work)

    def do(self, work: Any) -> None:
        finish(work)

    def do_some(self, work: Any, pieces: int = 0) -> None:
        finish(work)

    async def found(self) -> None:
        """Returns when it is known which queues move."""
        while self.works:
            await self.works.pop(0)

    def comes(self, client_id: str, *, strategy: str | None = None) -> RemotingConnection:
        session = peer()
        data = ConsumerData("g", subscriptions=(Subscription("t"),), strategy=strategy)
        self.groups.heartbeat(session, client_id, data, 0, 0)
        return session

    async def joins(self, client_id: str, *, strategy: str | None = None) -> RemotingConnection:
        session = self.comes(client_id, strategy=strategy)
        for member in self.group.foreign:  # they are notified, or kept back
            assert defer_notification(self.group, member)
        await self.found()
        return session

    @property
    def group(self) -> ConsumerGroup:
        return self.groups.obtain("g")

    @property
    def drain(self) -> Drain:
        drain = self.group.drain
        assert drain is not None
        return drain

    def asks(self, session: RemotingConnection) -> list[str]:
        return self.draining.lists.current_list(self.group, session)

    def reads(self, session: RemotingConnection, *numbers: int) -> None:
        self.asks(session)
        for number in numbers:
            self.locks.record_pull(session, self.groups.obtain("g"), ("t", number))

    def pull(self, number: int, offset: int = 5, committed: int = 0) -> PullMessage:
        return PullMessage("g", "t", number, offset, 32, FLAGS, committed, 0)

    def is_held_back(self, session: RemotingConnection, number: int, committed: int = 0) -> bool:
        header = self.pull(number, committed=committed)
        self.draining.observe_pull(self.group, session, header)
        return is_moving_away(self.group, session, (header.topic, header.queue_id))

    def handles(self, session: RemotingConnection, *numbers: int) -> None:
        for number in numbers:
            self.is_held_back(session, number, committed=5)

    def is_kept_back(self, session: RemotingConnection) -> bool:
        return defer_notification(self.group, session)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_queue_that_a_member_reads_by_an_earlier_route_is_drained(world: World) -> None:
    """By the present route the queue is not in the member's share, neither by its list nor in the end."""
    one = await reader(world)
    two = await world.joins("c2")
    world.handles(one, 2, 3)
    assert world.asks(one) == world.asks(two) == ["c1", "c2"]
    world.reads(two, 2, 3)
    world.clock.passes(world.limits.drained_wait_s)
    world.queues = 6
    queue = SimpleNamespace(topic="t", queue_id=2)
    world.held[two] = [SimpleNamespace(queue=queue, until=Until.MESSAGE, is_done=False)]
    await world.joins("a0")
    assert ("t", 2) in world.drain.waiting[two]
    world.handles(two, 2)
    assert ("t", 2) not in world.drain.waiting.get(two, ())


async def reader(world: World) -> RemotingConnection:
    """One that reads all queues, and was notified of it, and is in peace."""
    one = await world.joins("c1")
    world.reads(one, *range(QUEUES))
    world.clock.passes(world.limits.drained_wait_s)
    world.told.clear()
    assert not world.groups.obtain("g").is_moving(one)
    return one


async def test_queues_that_move_are_drained_before_their_reader_is_notified(world: World) -> None:
    one = await reader(world)
    two = world.comes("c2")
    assert world.draining.is_pending("g")
    assert world.group.is_drained("t", 0), "it is not known yet what moves"
    assert world.is_kept_back(one)
    assert world.is_kept_back(two)
    await world.found()
    assert [world.group.is_drained("t", number) for number in (2, 3)] == [True, True]
    assert not world.is_held_back(one, 0)
    assert world.is_held_back(one, 2)
    assert is_gated(world.groups.obtain("g"), two, ("t", 2))
    assert not is_gated(world.groups.obtain("g"), peer(), ("t", 2))
    assert world.told == [two], "it loses nothing"
    assert (world.asks(one), world.asks(two)) == (["c1"], ["c1", "c2"])
    world.handles(one, 2)
    assert world.drained == [(2, one)]
    assert world.groups.queue("g", "t", 2).reader is None
    assert (
        world.group.is_drained("t", 2),
        world.group.is_drained("t", 3),
    ) == (False, True)
    assert world.is_held_back(one, 2), "it gets nothing of it until it has dropped it"
    assert one not in world.told
    world.handles(one, 3)
    assert one in world.told
    assert not world.draining.is_pending("g")
    assert world.asks(one) == ["c1", "c2"]
    world.clock.passes(world.limits.drained_wait_s)
    assert not world.groups.obtain("g").is_moving(one)
    assert not world.is_held_back(one, 2)
    assert (world.repeats.undrained, world.repeats.left) == (0, 0)


async def test_a_reader_that_stands_is_asked_and_given_up(world: World) -> None:
    one = await reader(world)
    keeps = SimpleNamespace(until=Until.MESSAGE, is_done=False, queue=SimpleNamespace(topic="t", queue_id=0))
    idle = SimpleNamespace(until=Until.MESSAGE, is_done=True, queue=SimpleNamespace(topic="t", queue_id=1))
    waits = SimpleNamespace(until=Until.TURN, is_done=False, queue=SimpleNamespace(topic="t", queue_id=1))
    world.held[one] = [keeps, idle, waits]
    await world.joins("c2")
    world.release.clear()
    half_s = world.limits.drain_limit_s / 2
    world.clock.passes(half_s - 0.1)
    assert world.release == []
    world.clock.passes(0.1)
    assert world.release == [keeps], "one that is busy with a queue that it keeps says how far it is"
    assert world.draining.is_pending("g")
    world.clock.passes(half_s)
    assert not world.draining.is_pending("g")
    assert (world.repeats.undrained, one in world.told) == (2, True)
    assert not world.group.is_drained("t", 2)


async def test_a_broker_that_was_suspended_waits_for_readers_as_long_as_it_would_have(world: World) -> None:
    """Their pulls lie in its sockets when its timer goes off."""
    await reader(world)
    await world.joins("c2")
    world.clock.advance(60.0)
    world.clock.passes(0.0)
    assert world.draining.is_pending("g")
    world.clock.passes(world.limits.drain_limit_s + 0.1)
    assert not world.draining.is_pending("g")


async def test_a_reader_that_continues_is_waited_for_but_not_for_ever(world: World) -> None:
    one = await reader(world)
    two = await world.joins("c2")
    passed_s, step_s = 0.0, world.limits.drain_limit_s / 2 - 0.1
    while passed_s + step_s < world.limits.drain_max_s:
        world.clock.passes(step_s)
        passed_s += step_s
        assert world.draining.is_pending("g")
        world.draining.record_progress(world.groups.obtain("g"), one)
        world.draining.record_progress(world.groups.obtain("g"), two)
        world.draining.record_progress(world.groups.obtain("h"), one)
    world.clock.passes(world.limits.drain_max_s - passed_s + 0.001)
    assert not world.draining.is_pending("g")
    assert world.repeats.undrained == 2


async def test_only_a_reader_that_is_waited_for_extends_a_drain(world: World) -> None:
    await reader(world)
    two = await world.joins("c2")
    world.clock.passes(world.limits.drain_limit_s / 2)
    world.draining.record_progress(world.groups.obtain("g"), two)
    world.clock.passes(world.limits.drain_limit_s / 2)
    assert not world.draining.is_pending("g")


async def test_a_held_pull_of_what_moves_comes_back_and_says_how_far_its_reader_is(world: World) -> None:
    one = await reader(world)
    pulls = [
        SimpleNamespace(until=Until.MESSAGE, is_done=number == 2, queue=SimpleNamespace(topic="t", queue_id=number))
        for number in range(QUEUES)
    ]
    world.held[one] = pulls
    await world.joins("c2")
    assert world.release == pulls[2:]
    assert world.drained == [(2, one)]


async def test_pulls_of_the_next_reader_wait_up_to_a_limit_and_continue(tmp_path: Path) -> None:
    world = World(tmp_path, max_gated=1)
    one = await reader(world)
    two = await world.joins("c2")
    gone_on: list[int] = []
    assert is_gated(world.groups.obtain("g"), two, ("t", 2))
    assert not is_gated(world.groups.obtain("g"), one, ("t", 0))
    world.draining.gate(world.group, ("t", 2), lambda: gone_on.append(2))
    world.draining.gate(world.group, ("t", 3), lambda: gone_on.append(3))
    with pytest.raises(LimitExceeded, match="1 pulls wait for the former reader of t:2"):
        world.draining.gate(world.group, ("t", 2), lambda: gone_on.append(2))
    world.handles(one, 2)
    assert gone_on == [2]
    world.handles(one, 3)
    assert gone_on == [2, 3]


async def test_who_claims_what_its_owner_reads_waits_until_it_is_known_by_which_list(world: World) -> None:
    """Another broker gave it one of a change that is over by now, and has not reported it yet."""
    one = await reader(world)
    two = await world.joins("c2")
    assert is_gated(world.groups.obtain("g"), two, ("t", 0))
    world.handles(one, 2, 3)
    world.asks(one)
    assert is_gated(world.groups.obtain("g"), two, ("t", 0))
    world.clock.passes(world.limits.drained_wait_s)
    assert not is_gated(world.groups.obtain("g"), two, ("t", 0)), "it shares the queues out in its own way"


async def test_a_member_from_before_a_restart_waits_until_it_is_known_what_is_its_own(world: World) -> None:
    one = world.comes("c1")
    assert is_gated(world.groups.obtain("g"), one, ("t", 0))
    world.locks.record_pull(one, world.groups.obtain("g"), ("t", 0))
    assert not is_gated(world.groups.obtain("g"), one, ("t", 0)), "it reads it already"
    await world.found()
    assert not is_gated(world.groups.obtain("g"), one, ("t", 1))


async def test_the_last_of_several_changes_counts(world: World) -> None:
    one = await reader(world)
    two = world.comes("c2")
    world.groups.drop(two)
    await world.found()
    assert not world.draining.is_pending("g")
    assert [world.is_held_back(one, number) for number in range(QUEUES)] == [False] * QUEUES
    assert world.groups.obtain("g").owners == {"t": ["c1"] * QUEUES}


async def test_a_reader_may_be_done_while_it_is_not_known_what_a_further_change_moves(world: World) -> None:
    one = await reader(world)
    await world.joins("c2")
    world.comes("c3")
    for number in range(QUEUES):
        assert world.is_held_back(one, number, committed=5) == (number >= QUEUES // 2)
    assert world.drained == [(2, one), (3, one)], "the next reader continues from there"
    await world.found()
    assert not world.group.is_drained("t", 2)


async def test_without_foreign_members_nothing_is_drained(world: World) -> None:
    one = await reader(world)
    ours = await world.joins("c2", strategy="AVG")
    assert world.draining.is_pending("g")
    world.groups.drop(one)
    assert not world.draining.is_pending("g")
    assert not world.group.is_drained("t", 0)
    assert world.groups.obtain("g").issued_to(one) is None
    world.clock.passes(world.limits.drain_max_s)
    world.groups.drop(ours)
    assert (world.groups.obtain("g").change, world.groups.obtain("g").drain) == (0, None)
    assert world.draining.allotment.queue_count == 0


async def test_one_of_ours_that_was_refused_is_notified_when_all_is_handled(world: World) -> None:
    one = await reader(world)
    ours = await world.joins("c2", strategy="AVG")
    assert not world.is_kept_back(ours)
    world.told.clear()
    world.handles(one, 2)
    assert world.told == []
    world.handles(one, 3)
    assert sorted(world.told, key=lambda item: item.number) == [one, ours]


async def test_a_member_that_does_not_ask_is_notified_again_this_often(world: World) -> None:
    one = await reader(world)
    await world.joins("c2")
    world.handles(one, 2, 3)
    for _ in range(TOLD_AGAIN):
        world.told.clear()
        world.clock.passes(world.limits.drained_wait_s)
        assert world.told == [one]
        assert world.is_held_back(one, 2)
    world.told.clear()
    world.clock.passes(world.limits.drained_wait_s)
    assert (world.told, world.groups.obtain("g").is_moving(one)) == ([], False)


async def test_a_member_that_asks_drops_its_queues_and_reads_others_on(world: World) -> None:
    one = await reader(world)
    await world.joins("c2")
    world.handles(one, 2, 3)
    world.asks(one)
    world.clock.passes(DROPPED_AFTER_S / 2)
    assert world.is_held_back(one, 2), "a pull that was on its way"
    world.clock.passes(world.limits.drained_wait_s)
    assert not world.groups.obtain("g").is_moving(one)


async def test_in_a_long_drain_each_queue_moves_on_its_own(world: World) -> None:
    one = await reader(world)
    two = await world.joins("c2")
    world.clock.passes(world.limits.bridged_after_s)
    assert one in world.told
    assert world.asks(one) == ["c1"]
    assert world.group.is_alone(one)
    assert world.group.is_owned_by_other(one, "t", 2, world.clock.monotonic_s())
    world.handles(one, 2)
    assert not world.is_held_back(one, 2), "it is parked"
    assert not is_gated(world.groups.obtain("g"), two, ("t", 2))
    world.handles(one, 3)
    assert not world.draining.is_pending("g")
    drain = world.drain
    assert not drain.is_long, "the next change begins short"
    assert world.asks(one) == ["c1", "c2"]


async def test_large_groups_are_not_bridged(tmp_path: Path) -> None:
    for limit, is_bridged in ((11, False), (12, True)):
        world = World(tmp_path / str(limit), max_bridged=limit)  # four owners and two that move, for two members
        await reader(world)
        await world.joins("c2")
        assert len(world.clock.timers) == (2 if is_bridged else 1)


async def test_too_many_queues_are_not_drained(tmp_path: Path) -> None:
    world = World(tmp_path, max_drained_queues=QUEUES + 1)
    one = await world.joins("c1")
    world.reads(one, *range(QUEUES))
    world.clock.passes(world.limits.drained_wait_s)
    world.told.clear()
    await world.joins("c2")
    assert not world.draining.is_pending("g")
    assert one in world.told
    assert world.draining.allotment.queue_count == 0


async def test_a_newcomer_without_a_list_is_notified_of_those_before_the_change(world: World) -> None:
    one = await reader(world)
    two = world.comes("c2")
    assert world.asks(one) == ["c1"]
    assert world.asks(two) == ["c1"], "it reads nothing by it"
    await world.found()
    assert world.asks(two) == ["c1", "c2"]


async def test_a_question_waits_for_a_word_of_another_broker_but_only_so_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await reader(world)
    answered: list[str] = []

    def waits(text: str) -> bool:
        return world.draining.lists.wait_until_sure(world.groups.obtain("g"), one, lambda: answered.append(text))

    monkeypatch.setattr(PeerSync, "may_issue_earlier", True)
    assert not waits("no change is under way")
    two = world.comes("c2")
    assert waits("first")
    assert not waits("second"), "a client asks again only when it gives the first up"
    assert not world.draining.lists.wait_until_sure(
        world.groups.obtain("g"), peer(), lambda: answered.append("stranger")
    )
    await world.found()
    world.clock.passes(world.limits.list_wait_s - 0.01)
    assert not answered
    world.clock.passes(0.01)
    assert answered == ["first"]
    assert waits("third")
    for session in (one, two):
        world.groups.leave(session, "g")
    assert answered == ["first", "third"], "nothing is kept of a group without members"
    await world.found()


async def test_a_message_of_another_broker_extends_nothing_that_is_over(world: World) -> None:
    one = await reader(world)
    two = await world.joins("c2")
    world.handles(one, 2, 3)
    for session in (one, two):
        world.asks(session)
    word = AgreeOnMembers("g", "b", 1, 0, False, "digest"), AgreedMembers(frozenset(), {})
    world.clock.passes(world.limits.drained_wait_s - 1)
    assert world.groups.obtain("g").is_moving(one)
    world.draining.on_peer_update(*word)
    world.clock.passes(1)
    assert not world.groups.obtain("g").is_moving(one)
    world.draining.on_peer_update(*word)
    assert not world.groups.obtain("g").is_moving(one)


async def test_lists_that_another_broker_gave_count_here(world: World) -> None:
    one = await reader(world)
    two = await world.joins("c2")
    members = world.group.list_for(one)
    topics = world.group.members[one].topics
    given = SimpleNamespace(lists={topics: members}, client_ids=("c1",), is_current=True)
    before = world.groups.obtain("g").issued_to(two)
    assert not world.draining.lists.record_issued_by_peer(world.group, given)  # type: ignore[arg-type]
    assert world.groups.obtain("g").issued_to(one) is members
    assert world.groups.obtain("g").issued_to(two) is before
    other = SimpleNamespace(lists={topics: type(members)(["c1"])}, client_ids=("c1",), is_current=False)
    assert world.draining.lists.record_issued_by_peer(world.group, other)  # type: ignore[arg-type]
    assert not world.draining.lists.record_issued_by_peer(world.group, other), "no news"  # type: ignore[arg-type]


# A drain alone: which readers are waited for, for how long, and what it holds of them.


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
    assert drain.stalled(129.9, was_polled=False) == []
    assert drain.stalled(130.0, was_polled=False) == ([two] if is_long else [])
    assert drain.stalled(140.0, was_polled=True) == []
    assert drain.stalled(150.0, was_polled=False) == ([one, two] if is_long else [None])
    drain.due[two if is_long else None] = 150.0, True
    assert drain.stalled(150.0, was_polled=True) == [two if is_long else None]


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
