"""Notifications of a group: who is notified, when, and in how many turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rocketlet.broker.groups.drains import Notifications
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.history import History
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.broker.sessions import GroupChanged
from rocketlet.protocol.bodies import SLICE, ConsumerData, TopicConfig, finish
from rocketlet.protocol.group_bodies import BrokerShare, Place
from rocketlet.protocol.names import Subscription

from ...support.locks import Changes, make_groups


class Told:
    """A member's connection, with the notifications that it got."""

    peer = "here"

    def __init__(self, number: int) -> None:
        self.number = number
        self.news: list[GroupChanged] = []

    def tell(self, event: GroupChanged) -> None:
        self.news.append(event)

    def charge(self, size: int) -> None: ...


class World:
    def __init__(self) -> None:
        self.clock = MovableClock(stands=True)
        turns: Any = self
        runtime = Runtime(self.clock, turns=turns)
        self.history = History(runtime)
        self.works: list[Any] = []
        self.timers: list[Any] = []
        self.kept_back: set[Told] = set()
        self.enables = True
        self.faults: list[Exception] = []
        self.queues = 2
        changes = Changes(members=lambda group: self.notifications.schedule(group))
        self.groups = make_groups(runtime, self.history, lambda topic: self.queues, changes)
        lists: Any = SimpleNamespace(keep_back=lambda group, session: session in self.kept_back)
        settings: Any = SimpleNamespace(ensure=self._settings)
        clock: Any = SimpleNamespace(call_later=lambda seconds, action: self.timers.append(action))
        later = Runtime(clock, turns=turns)
        self.notifications = Notifications(later, self.groups, settings, self.history, lists)

    def _settings(self, name: str) -> Any:
        if self.faults:
            raise self.faults.pop()
        return SimpleNamespace(notify_enable=self.enables)

    def do(self, work: Any) -> None:
        self.works.append(work)

    def joins(self, count: int = 1, *, group: str = "g", strategy: str | None = "AVG", sees: int = 2) -> list[Told]:
        joined = [Told(number) for number in range(count)]
        for told in joined:
            data = ConsumerData(
                group, subscriptions=(Subscription("t"),), strategy=strategy, queue_counts={"a": {"t": sees}}
            )
            self.groups.heartbeat(told, f"c{told.number}", data, 0, 0)  # type: ignore[arg-type]
        return joined

    @property
    def group(self) -> ConsumerGroup:
        group = self.groups.get("g")
        assert group is not None
        return group

    def tells(self) -> int:
        """The timers go off, and all turns are taken; how many there were."""
        turns = 0
        while self.timers:
            self.timers.pop(0)()
        while self.works:
            turns += 1 + sum(1 for _ in self.works.pop(0))
        return turns

    def notified(self) -> list[int]:
        return [event["members"] for event in self.history.of("g") if event["event"] == "notified"]


@pytest.fixture
def world() -> World:
    return World()


def test_members_are_notified_once_of_many_changes_and_their_places(world: World) -> None:
    one, two = world.joins(2)
    assert len(world.timers) == 1
    world.tells()
    assert one.news == [GroupChanged("g", places={"t": Place(0, 2, 2)})]
    assert two.news == [GroupChanged("g", places={"t": Place(1, 2, 2)})]
    assert world.notified() == [2]
    world.groups.drop(one)  # type: ignore[arg-type]
    assert len(world.timers) == 1
    world.tells()
    assert (len(one.news), two.news[1:]) == (1, [GroupChanged("g", places={"t": Place(0, 1, 2)})])


def test_sticky_members_get_their_shares_and_foreign_ones_that_something_changed(world: World) -> None:
    (one,) = world.joins(strategy="STICKY")
    (foreign,) = world.joins(group="h", strategy=None)
    world.tells()
    assert one.news == [GroupChanged("g", shares={"t": BrokerShare(1, 2, {"a": [0, 1]})})]
    assert foreign.news == [GroupChanged("h")]


def test_a_foreign_member_that_is_kept_back_is_notified_later(world: World) -> None:
    one, two = world.joins(2, strategy=None)
    world.kept_back.add(two)
    world.tells()
    assert (len(one.news), two.news, world.notified()) == (1, [], [1])


def test_ours_are_not_kept_back(world: World) -> None:
    (one,) = world.joins()
    world.kept_back.add(one)
    world.tells()
    assert len(one.news) == 1


def test_a_group_that_wants_no_news_gets_none(world: World) -> None:
    world.enables = False
    members = world.joins(2)
    world.tells()
    world.notifications.notify(world.group, members)  # type: ignore[arg-type]
    assert ([told.news for told in members], world.notified()) == ([[], []], [])


def test_a_group_whose_news_fail_keeps_none_from_the_others(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.joins()
    (other,) = world.joins(group="h")
    world.faults.append(OSError("a fault"))
    world.tells()
    assert len(other.news) == 1


def test_a_change_while_members_are_notified_is_notified_afterwards(world: World) -> None:
    members = world.joins(SLICE + 1)
    world.timers.pop()()
    (telling,) = world.works
    world.works.clear()
    next(telling)
    assert [len(told.news) for told in (members[0], members[-1])] == [1, 0]
    world.groups.drop(members[0])  # type: ignore[arg-type]
    assert world.timers == [], "it continues on its own"
    finish(telling)
    assert {len(told.news) for told in members[1:-1]} == {2}
    assert len(members[0].news) == 1
    world.groups.drop(members[1])  # type: ignore[arg-type]
    assert len(world.timers) == 1


def test_a_member_that_is_gone_before_its_turn_is_not_notified(world: World) -> None:
    members = world.joins(SLICE + 1)
    world.tells()
    before = [len(told.news) for told in members]
    world.notifications.notify(world.group, members)  # type: ignore[arg-type]
    assert [len(told.news) for told in members[:SLICE]] == [count + 1 for count in before[:SLICE]]
    assert len(members[-1].news) == before[-1]
    assert world.notified()[-1] == SLICE + 1
    (telling,) = world.works
    world.works.clear()
    world.groups.drop(members[-1])  # type: ignore[arg-type]
    finish(telling)
    assert len(members[-1].news) == before[-1]


def test_members_behind_the_first_are_notified_in_turns(world: World) -> None:
    members = world.joins(3 * SLICE)
    world.tells()
    world.notifications.notify(world.group, members)  # type: ignore[arg-type]
    assert world.tells() == 3
    assert {len(told.news) for told in members} == {2}
    world.notifications.notify(world.group, ())
    assert world.notified()[-1] == 3 * SLICE, "nobody was notified since"


def test_members_are_notified_that_a_topic_has_grown(world: World) -> None:
    one, two = world.joins(2)
    (stale,) = world.joins(group="h", sees=1)
    world.tells()
    for told in (one, two, stale):
        told.news.clear()
    world.notifications.topic_changed(TopicConfig("t", 2, 2))
    world.tells()
    assert one.news == two.news == [GroupChanged("g", "t")]
    assert stale.news == [GroupChanged("h", "t")]
    world.notifications.notify_outdated(stale, world.groups.obtain("h"))  # type: ignore[arg-type]
    world.notifications.notify_outdated(one, world.groups.obtain("g"))  # type: ignore[arg-type]
    world.notifications.topics_known()
    assert (len(one.news), len(stale.news)) == (1, 3)
    world.queues = 3
    world.notifications.topic_changed(TopicConfig("t", 3, 3))
    world.tells()
    assert any("sees 2 queues of t" in event.get("fault", "") for event in world.history.of("g"))


def test_a_large_group_is_notified_of_a_topic_in_turns(world: World) -> None:
    world.joins(2 * SLICE + 1)
    world.tells()
    world.notifications.topic_changed(TopicConfig("t", 2, 2))
    (telling,) = world.works
    assert 1 + sum(1 for _ in telling) == 3
