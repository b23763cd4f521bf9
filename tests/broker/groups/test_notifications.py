"""Notifications of a group: who is notified, when, and in how many turns."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from rocketlet.broker.config import LIMITS, REBALANCE_REST_S, REPEATS_S, Limits
from rocketlet.broker.groups.drains import Notifications
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import History, Rebalances
from rocketlet.broker.groups.stages import Drain
from rocketlet.broker.metrics import Collector
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.sessions.events import GroupChanged
from rocketlet.client import AdminClient
from rocketlet.client.admin import diagnosis
from rocketlet.protocol.bodies import SLICE, WRITES, ConsumerData, TopicConfig, finish
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import BrokerShare, Place
from rocketlet.protocol.names import Subscription
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Wire, eventually
from ...support.draining import FLAGS, drain_of, members_of, reading
from ...support.locks import Changes, make_groups
from ...support.requests import join, members, pull
from ...support.two_brokers import at_work, told


class Told:
    """A member's connection, with the notifications that it got."""

    peer = "here"

    def __init__(self, number: int) -> None:
        self.number = number
        self.news: list[GroupChanged] = []

    def send_event(self, event: GroupChanged) -> None:
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
        self.enables = True
        self.faults: list[Exception] = []
        self.queues = 2
        changes = Changes(members=lambda group: self.notifications.schedule(group))
        self.groups = make_groups(runtime, self.history, lambda topic: self.queues, changes)
        settings: Any = SimpleNamespace(ensure=self._settings)
        clock: Any = SimpleNamespace(
            call_later=lambda seconds, action, *arguments: self.timers.append(partial(action, *arguments))
        )
        later = Runtime(clock, turns=turns)
        self.notifications = Notifications(later, self.groups, settings, self.history)

    def _settings(self, name: str) -> Any:
        if self.faults:
            raise self.faults.pop()
        return SimpleNamespace(notify_enable=self.enables)

    def do(self, work: Any) -> None:
        self.works.append(work)

    def joins(self, count: int = 1, *, group: str = "g", strategy: str | None = "AVG", sees: int = 2) -> list[Told]:
        joined = [Told(number) for number in range(count)]
        for member in joined:
            data = ConsumerData(
                group, subscriptions=(Subscription("t"),), strategy=strategy, queue_counts={"a": {"t": sees}}
            )
            self.groups.heartbeat(member, f"c{member.number}", data, 0, 0)  # type: ignore[arg-type]
        return joined

    @property
    def group(self) -> ConsumerGroup:
        return self.groups.obtain("g")

    def tells(self) -> int:
        """The timers go off, and all turns are taken; how many there were."""
        turns = 0
        while self.timers:
            self.timers.pop(0)()
        while self.works:
            turns += 1 + sum(1 for _ in self.works.pop(0))
        return turns

    def drains(self, member: Told) -> None:
        """The group waits for messages in the handlers of a member."""
        self.group.drain = drain = Drain(0.0)
        drain.lose([(("t", 0), member)], 0.0, 0.0)  # type: ignore[list-item]

    def notified(self) -> list[int]:
        return [int(event["members"]) for event in self.history.of("g") if event["event"] == "notified"]


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
    world.drains(two)
    world.tells()
    assert (len(one.news), two.news, world.notified()) == (1, [], [1])


def test_ours_are_not_kept_back(world: World) -> None:
    (one,) = world.joins()
    world.drains(one)
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
    assert world.tells() == 1 + 2 * SLICE // WRITES
    assert {len(told.news) for told in members} == {2}
    world.notifications.notify(world.group, ())
    assert world.notified()[-1] == 3 * SLICE, "nobody was notified since"


def test_members_are_notified_that_a_topic_has_grown(world: World) -> None:
    one, two = world.joins(2)
    (stale,) = world.joins(group="h", sees=1)
    world.tells()
    for member in (one, two, stale):
        member.news.clear()
    world.notifications.topic_changed(TopicConfig("t", 2, 2))
    world.tells()
    assert one.news == two.news == [GroupChanged("g", "t")]
    assert stale.news == [GroupChanged("h", "t")]
    world.notifications.notify_outdated(stale, world.groups.obtain("h"))  # type: ignore[arg-type]
    world.notifications.notify_outdated(one, world.groups.obtain("g"))  # type: ignore[arg-type]
    world.notifications.topics_registered()
    assert (len(one.news), len(stale.news)) == (1, 3)
    world.queues = 3
    world.notifications.topic_changed(TopicConfig("t", 3, 3))
    world.tells()
    assert any("sees 2 queues of t" in str(event.get("fault")) for event in world.history.of("g"))


def test_a_large_group_is_notified_of_a_topic_in_turns(world: World) -> None:
    world.joins(2 * WRITES + 1)
    world.tells()
    world.notifications.topic_changed(TopicConfig("t", 2, 2))
    (telling,) = world.works
    assert 1 + sum(1 for _ in telling) == 3


# How long queues have no owner, and groups no rest: what the metrics say of hand-overs.


GROUP = ConsumerGroup("g")
KEY = ("g", "t", 0)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(stands=True)


def test_a_queue_without_an_owner_counts_until_it_has_one(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.changed_hands(GROUP, KEY, is_free=False)
    assert sum(rebalances.handovers.counts) == 0, "nobody had it before"
    rebalances.changed_hands(GROUP, KEY, is_free=True)
    clock.advance(2.0)
    rebalances.changed_hands(GROUP, KEY, is_free=False)
    rebalances.changed_hands(GROUP, KEY, is_free=False)
    assert sum(rebalances.handovers.counts) == 1
    assert rebalances.handovers.sum_s == pytest.approx(2.0)


def test_of_too_many_queues_without_an_owner_the_oldest_is_forgotten(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock, Limits(max_free_queues=2)))
    for queue_id in range(3):
        rebalances.changed_hands(GROUP, ("g", "t", queue_id), is_free=True)
    for queue_id, count in ((0, 0), (1, 1), (2, 2)):
        rebalances.changed_hands(GROUP, ("g", "t", queue_id), is_free=False)
        assert sum(rebalances.handovers.counts) == count


@pytest.mark.parametrize("event", ["joined", "left", "leaving", "subscribed"])
def test_a_group_settles_with_the_last_queue_that_changes_hands(clock: MovableClock, event: str) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.begin_rebalance(GROUP, event)
    for _ in range(2):
        clock.advance(REBALANCE_REST_S - 2)
        rebalances.changed_hands(GROUP, KEY, is_free=False)
    rebalances.end_finished()
    assert sum(rebalances.settling.counts) == 0, "it is not at rest yet"
    clock.advance(REBALANCE_REST_S)
    for _ in range(2):
        rebalances.end_finished()
    assert sum(rebalances.settling.counts) == 1
    assert rebalances.settling.sum_s == pytest.approx(2 * (REBALANCE_REST_S - 2))


def test_a_change_that_moves_nothing_is_no_rebalance(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.begin_rebalance(GROUP, "closed")
    rebalances.changed_hands(GROUP, KEY, is_free=False)
    rebalances.begin_rebalance(GROUP, "joined")
    clock.advance(REBALANCE_REST_S + 1)
    rebalances.changed_hands(ConsumerGroup("other"), ("other", "t", 0), is_free=False)
    rebalances.begin_rebalance(GROUP, "left")
    assert sum(rebalances.settling.counts) == 0
    clock.advance(1.0)
    rebalances.changed_hands(GROUP, KEY, is_free=True)
    clock.advance(REBALANCE_REST_S)
    rebalances.end_finished()
    assert rebalances.settling.sum_s == pytest.approx(1.0), "counted from the last change"


def test_a_change_while_queues_change_hands_is_the_same_rebalance(clock: MovableClock) -> None:
    rebalances = Rebalances(Runtime(clock))
    rebalances.begin_rebalance(GROUP, "joined")
    clock.advance(REBALANCE_REST_S - 2)
    rebalances.changed_hands(GROUP, KEY, is_free=True)
    clock.advance(2.0)
    rebalances.begin_rebalance(GROUP, "left")
    clock.advance(1.0)
    rebalances.changed_hands(GROUP, KEY, is_free=False)
    clock.advance(REBALANCE_REST_S)
    rebalances.end_finished()
    assert rebalances.settling.sum_s == pytest.approx(REBALANCE_REST_S + 1)


# Messages of foreign members that may be handled again: each cause is counted, and named by `rocketlet doctor`.


async def found(node: Node, kind: str) -> list[str]:
    """`diagnose` would wait for the running information of members that answer nothing here."""
    async with AdminClient(node.address) as admin:
        status = await admin.broker_status(node.address)
    return [item.text for item in diagnosis._repeats("broker-a", status) if item.kind == kind]


async def measured(node: Node, name: str) -> float:
    families = await Collector(node.broker, node.server.memory, ()).snapshot()
    (sample,) = next(family for family in families if family.name == name).samples
    return float(sample.value)


async def test_a_queue_that_moves_while_its_messages_are_handled(node: Node, wire: Wire, connect: Connect) -> None:
    await reading(node, wire)
    assert await members(wire) == ["c1"]
    await join(await connect(node.address), "c2")
    await eventually(lambda: members_of(node) == 2 and not drain_of(node.broker).is_finding)
    for _ in range(2):
        node.clock.advance(LIMITS.drain_limit_s / 2)
    assert await measured(node, "rocketlet_undrained_queues") == 1
    (text,) = await found(node, "moved_undrained")
    assert "g: t:1" in text
    node.clock.advance(REPEATS_S + 1)
    assert await found(node, "moved_undrained") == []


@pytest.mark.parametrize("committed", [0, 1])
async def test_a_member_that_leaves_with_messages_in_its_handlers(node: Node, wire: Wire, committed: int) -> None:
    await reading(node, wire)
    for queue in range(2):
        header = pull(queue=queue, offset=1, flags=FLAGS | 0x1, commit_offset=committed, suspend_timeout_millis=1)
        await wire.call(RequestCode.PULL_MESSAGE, header)
    await wire.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})
    assert await measured(node, "rocketlet_left_uncommitted") == (0 if committed else 2)
    texts = await found(node, "left_uncommitted")
    assert ["g (c1) with 2 messages" in text for text in texts] == ([] if committed else [True])


async def test_a_broker_that_cannot_be_asked(node: Node, wire: Wire) -> None:
    async with at_work(node, wire, None):
        pass
    await join(wire, "c1")
    await told(wire, "c1")
    assert await measured(node, "rocketlet_peers_away") == 1
    (text,) = await found(node, "peer_away")
    assert "broker-b at 127.0.0.1:" in text
