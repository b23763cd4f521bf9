"""The members of groups, without a broker around them: what each may ask of its group, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

import pytest
from rocketlet.broker.config import (
    LIMITS,
    MAX_NAMED_MEMBERS,
    MEMBER_BYTES,
    PLACE_BYTES,
    REPORT_AGAIN_S,
    SUBSCRIPTION_BYTES,
    TAG_BYTES,
    LimitExceeded,
    Limits,
)
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import History, finding_faults, size_of
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.sessions.refusal import Refusal
from rocketlet.protocol.bodies import LOOKS, ConsumerData, Work, finish
from rocketlet.protocol.group_bodies import BrokerShare
from rocketlet.protocol.names import Queue, Subscription
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import peer
from ...support.locks import Changes, make_groups

QUEUES = 4


@dataclass
class Later:
    """Work that is done in turns, when the test says so."""

    waiting: list[Work[None]] = field(default_factory=list)

    def do(self, work: Work[None]) -> None:
        self.waiting.append(work)

    def done(self) -> int:
        count = len(self.waiting)
        while self.waiting:
            finish(self.waiting.pop())
        return count


class World:
    def __init__(self, **limits: Any) -> None:
        self.clock = MovableClock(stands=True)
        self.later = Later()
        self.changes: list[tuple[str, int]] = []
        turns: Any = self.later
        runtime = Runtime(self.clock, Limits(**limits) if limits else LIMITS, turns=turns)
        self.history = History(runtime)
        self.groups = make_groups(runtime, self.history, QUEUES, Changes(members=self._changed))

    def _changed(self, group: ConsumerGroup) -> None:
        self.changes.append((group.name, len(group.members)))

    def beats(
        self, client_id: str, *topics: str, session: RemotingConnection | None = None, group: str = "g", **data: Any
    ) -> RemotingConnection:
        session = session or peer()
        subscriptions = data.pop("subscriptions", tuple(map(Subscription, topics)))
        data.setdefault("strategy", "AVG")
        self.groups.admit(session, client_id, [group])
        self.groups.heartbeat(session, client_id, ConsumerData(group, subscriptions=subscriptions, **data), 0, 0)
        return session

    @property
    def group(self) -> ConsumerGroup:
        return self.groups.obtain("g")

    def faults(self) -> list[str]:
        return [str(event["fault"]) for event in self.history.of("g") if "fault" in event]


@pytest.fixture
def world() -> World:
    return World()


def test_a_member_has_a_place_among_those_that_subscribe_to_a_topic(world: World) -> None:
    world.beats("c2", "t")
    world.beats("c1", "t", "u")
    assert [world.group.place(name, "t") for name in ("c1", "c2", "c3")] == [(0, 2), (1, 2), (-1, 2)]
    assert world.group.place("c2", "u") == (-1, 1)
    assert world.group.place("c1", None) == (0, 2)
    assert world.group.place("c1", "strange") == (-1, 0)
    world.beats("c0", "t")
    assert world.group.place("c1", "t") == (1, 3)
    assert world.group.order("t") is world.group.order("t"), "found once per change"


def test_a_member_that_leaves_has_no_place_and_one_with_two_connections_has_one(world: World) -> None:
    first = world.beats("c1", "t")
    world.beats("c1", "t")
    two = world.beats("c2", "t")
    assert world.group.client_ids("t") == ["c1", "c2"]
    world.beats("c2", "t", session=two, leaving=True)
    assert world.group.client_ids() == ["c1"]
    assert world.changes[-1] == ("g", 3)
    world.groups.leave(first, "g")
    assert world.group.client_ids("t") == ["c1"]


def test_members_are_notified_of_those_that_share_a_topic_with_them(world: World) -> None:
    one, both, two = world.beats("c1", "t"), world.beats("c2", "t", "u"), world.beats("c3", "u")
    assert [world.group.companions(item).ids for item in (one, both, two)] == [
        ["c1", "c2"],
        ["c1", "c2", "c3"],
        ["c2", "c3"],
    ]
    assert world.group.companions(peer()).ids == ["c1", "c2", "c3"]
    assert world.group.companions(one) is world.group.companions(one), "found once per change"
    assert world.group.differs()
    world.groups.drop(both)
    assert world.group.companions(one).ids == ["c1"]
    world.groups.drop(two)
    assert not world.group.differs()
    world.beats("c4", "t", "%RETRY%g")
    assert not world.group.differs(), "a retry topic is everybody's"


def test_lists_are_kept_for_this_many_different_sets_of_topics() -> None:
    world = World(max_compared=1)
    one, two = world.beats("c1", "t"), world.beats("c2", "u")
    assert world.group.companions(one) is world.group.companions(one)
    assert world.group.companions(two).ids == ["c2"]
    assert world.group.companions(two) is not world.group.companions(two)


def test_a_stranger_gets_the_newest_subscription_of_a_group(world: World) -> None:
    old, new = Subscription("t", "a", version=1), Subscription("t", "b", version=2)
    one = world.beats("c1", subscriptions=(old,))
    two = world.beats("c2", subscriptions=(new,))
    assert [world.group.subscription(item, "t") for item in (one, two, None)] == [old, new, new]
    assert world.group.subscription(None, "u") is None
    assert world.group.subscription(one, "u") is None
    assert world.group.subscriptions_of(one) == {"t": old}
    assert world.group.subscriptions_of(peer()) == {}
    world.groups.leave(two, "g")
    assert world.group.subscription(None, "t") == old


def test_a_subscription_under_a_later_version_is_the_newest(world: World) -> None:
    one = world.beats("c1", subscriptions=(Subscription("t", "a", version=1),))
    world.beats("c2", subscriptions=(Subscription("t", "b", version=2),))
    assert world.group.subscription(None, "t") == Subscription("t", "b", version=2)
    member = world.group.members[one]
    world.group.record_version(member, "t", 3)
    assert world.group.subscription(None, "t") == Subscription("t", "a", version=3)
    world.group.record_version(member, "t", 2)
    assert world.group.subscription(one, "t") == Subscription("t", "a", version=3)


def test_an_older_subscription_of_a_member_changes_nothing(world: World) -> None:
    new, old = Subscription("t", "a", version=2), Subscription("t", "b", version=1)
    one = world.beats("c1", subscriptions=(new,))
    for late in (old, Subscription("t", "c", version=2)):
        world.beats("c1", session=one, subscriptions=(late,))
        assert world.group.subscription(one, "t") == new
    later = Subscription("t", "d", version=3)
    world.beats("c1", session=one, subscriptions=(later,))
    assert world.group.subscription(one, "t") == later


def test_a_member_with_another_subscription_is_found(world: World) -> None:
    shape = frozenset({("t", "*")})
    one = world.beats("c1", "t")
    world.beats("c2", "t")
    assert world.group.other_than(one, shape) is None
    three = world.beats("c3", "u")
    other = world.group.other_than(one, shape)
    assert other is not None
    assert other.client_id == "c3"
    assert world.group.other_than(three, frozenset({("u", "*")})) is not None
    world.beats("c3", "t", session=three)
    assert world.group.other_than(one, shape) is None, "it subscribes to the same now"
    world.beats("c3", "u", session=three)
    world.groups.leave(three, "g")
    assert world.group.other_than(one, shape) is None


def test_groups_are_found_by_the_topics_that_somebody_subscribes_to(world: World) -> None:
    one = world.beats("c1", "t", "u")
    two = world.beats("c2", "t")
    world.beats("c3", "u", group="h")
    assert [group.name for group in world.groups.subscribing("u")] == ["g", "h"]
    world.beats("c1", "t", session=one)
    assert [group.name for group in world.groups.subscribing("u")] == ["h"]
    assert world.group.topics["t"].members == 2
    world.groups.drop(one)
    assert world.group.topics["t"].members == 1
    world.groups.drop(two)
    assert world.groups.subscribing("t") == []
    assert world.groups.get("g") is None
    assert [group.name for group in world.groups] == ["h"]


def test_a_membership_counts_as_its_connection_s_until_it_ends(world: World) -> None:
    one = world.beats("c1", "t")
    small = one.charged_bytes
    world.beats("c1", "t", session=one, assigned=(Queue("t", "a", 0),))
    assert one.charged_bytes > small > 0
    world.beats("c1", "t", session=one)
    assert one.charged_bytes == small
    world.groups.leave(one, "g")
    world.groups.leave(one, "g")
    assert one.charged_bytes == 0


def test_a_membership_is_as_large_as_what_is_kept_of_it() -> None:
    tags = tuple(Subscription("t", "a || b", frozenset({"a", "b"})) for _ in range(2))
    data = ConsumerData("g", subscriptions=tags)
    assert size_of(data) == MEMBER_BYTES + 2 * (SUBSCRIPTION_BYTES + 2 * getsizeof("a || b") + 2 * TAG_BYTES)
    seen = ConsumerData("g", assigned=(Queue("t", "a", 0),), queue_counts={"a": {"t": 1, "u": 1}, "b": {"t": 1}})
    assert size_of(seen) == MEMBER_BYTES + PLACE_BYTES * (1 + 2 + 3)


def test_only_news_about_members_are_sent_to_the_group(world: World) -> None:
    one = world.beats("c1", "t")
    assert world.changes == [("g", 1)]
    world.beats("c1", "t", session=one, assigned=(Queue("t", "a", 0),), queue_counts={"a": {"t": QUEUES}})
    assert world.changes == [("g", 1)]
    world.beats("c1", "t", session=one, strategy="STICKY")
    world.beats("c1", "t", "u", session=one, strategy="STICKY")
    assert world.changes == [("g", 1)] * 3
    world.groups.leave(one, "g")
    assert world.changes[-1] == ("g", 0)


def test_members_see_the_queues_that_any_of_them_sees(world: World) -> None:
    one = world.beats("c1", "t", queue_counts={"a": {"t": 2, "u": 9}, "b": {"t": 1}})
    world.beats("c2", "t", queue_counts={"a": {"t": 1}, "c": {"t": 3}})
    assert world.group.seen_queues("t").of_brokers == {"a": 2, "b": 1, "c": 3}
    assert world.group.seen_queues("t").total == 6
    assert (world.group.seen_queues("u").of_brokers, world.group.seen_queues("u").total) == ({}, 0)
    world.beats("c1", "t", session=one, queue_counts={"a": {"t": 4}})
    assert world.group.seen_queues("t").of_brokers == {"a": 4, "c": 3}
    assert world.group.seen_queues("t").total == 7


def test_a_member_that_asks_says_what_it_sees(world: World) -> None:
    one = world.beats("c1", "t", "u", queue_counts={"a": {"t": 2, "u": 1}, "b": {"t": 1}})
    member = world.group.members[one]
    assert world.group.seen_queues("t").of_brokers == {"a": 2, "b": 1}
    world.group.record_counts(member, "t", {"a": 3, "c": 1})
    assert world.group.seen_queues("t").of_brokers == {"a": 3, "c": 1}
    assert world.group.seen_queues("u").of_brokers == {"a": 1}
    before = member.data
    world.group.record_counts(member, "t", {"a": 3, "c": 1})
    assert member.data is before


def test_queues_beyond_the_limit_are_not_believed() -> None:
    world = World(max_seen_queues=5)
    one = world.beats("c1", "t", queue_counts={"b": {"t": 4}, "a": {"t": 1}})
    assert world.group.seen_queues("t").of_brokers == {"a": 1, "b": 4}
    world.beats("c1", "t", session=one, queue_counts={"b": {"t": 5}, "a": {"t": 1}, "c": {"t": 4}})
    assert world.group.seen_queues("t").of_brokers == {"a": 1, "c": 4}


def sticky(world: World, client_id: str, **data: Any) -> RemotingConnection:
    return world.beats(client_id, "t", strategy="STICKY", queue_counts={"a": {"t": QUEUES}}, **data)


def test_a_group_that_is_sticky_as_a_whole_has_shares(world: World) -> None:
    sticky(world, "c1")
    assert world.group.share("c1", "t") == BrokerShare(1, 4, {"a": [0, 1, 2, 3]})
    assert world.group.share("c1", "strange") is None
    assert world.group.share("stranger", "t") is None
    two = sticky(world, "c2")
    assert world.group.share("c1", "t") == BrokerShare(2, 4, {"a": [0, 1]})
    assert world.group.share("c2", "t") == BrokerShare(2, 4, {"a": [2, 3]})
    world.groups.leave(two, "g")
    assert world.group.share("c1", "t") == BrokerShare(1, 4, {"a": [0, 1, 2, 3]})
    world.beats("c3", "t")
    assert world.group.strategies() == {"STICKY", "AVG"}
    assert world.group.share("c1", "t") is None


def test_queues_that_a_member_sees_again_are_shared_out(world: World) -> None:
    one = sticky(world, "c1")
    assert world.group.share("c1", "t") == BrokerShare(1, 4, {"a": [0, 1, 2, 3]})
    world.group.record_counts(world.group.members[one], "t", {"a": QUEUES + 2})
    assert world.group.share("c1", "t") == BrokerShare(1, 6, {"a": [0, 1, 2, 3, 4, 5]})


def test_a_member_that_says_what_it_owns_keeps_it(world: World) -> None:
    sticky(world, "c1")
    sticky(world, "c2", assigned=(Queue("t", "a", 0), Queue("u", "a", 1)))
    assert world.group.share("c2", "t") == BrokerShare(2, 4, {"a": [0, 3]})


def test_what_members_of_other_strategies_own_is_no_claim(world: World) -> None:
    one = world.beats("c2", "t", assigned=(Queue("t", "a", 0),), queue_counts={"a": {"t": QUEUES}})
    sticky(world, "c1")
    sticky(world, "c2", session=one, assigned=(Queue("t", "a", 0),))
    assert world.group.share("c1", "t") == BrokerShare(2, 4, {"a": [0, 1]})


@pytest.mark.parametrize("limit", [3, 4])
def test_a_broker_shares_out_this_many_queues(limit: int) -> None:
    world = World(max_shared_queues=limit)
    sticky(world, "c1")
    assert (world.group.share("c1", "t") is None) is (limit < QUEUES)


def test_members_that_pop_allocate_nothing(world: World) -> None:
    world.beats("c1", "t", strategy=None, consume_type="CONSUME_POP")
    assert world.group.strategies() == frozenset()
    world.beats("c2", "t", strategy=None)
    assert world.group.strategies() == {"foreign"}
    assert world.group.client_ids("t") == ["~c1", "c2"]


def test_foreign_members_are_known_apart(world: World) -> None:
    one = world.beats("c1", "t", strategy=None)
    assert list(world.group.foreign) == [one]
    world.beats("c1", "t", session=one)
    assert not world.group.foreign
    world.beats("c1", "t", session=one, strategy=None)
    world.groups.leave(one, "g")
    assert one.charged_bytes == 0


def test_a_client_is_a_member_of_this_many_groups() -> None:
    world = World(max_memberships=2)
    one = world.beats("c1", "t")
    world.beats("c1", "t", session=one, group="h")
    world.beats("c1", "t", session=one, group="h")
    with pytest.raises(LimitExceeded, match="2 groups at most"):
        world.beats("c1", "t", session=one, group="i")
    world.groups.leave(one, "h")
    world.beats("c1", "t", session=one, group="i")


def test_a_group_has_this_many_members_and_those_that_it_has_stay() -> None:
    world = World(max_members=1)
    one = world.beats("c1", "t")
    world.beats("c1", "t", session=one)
    with pytest.raises(LimitExceeded, match="the group g has 1 members"):
        world.beats("c2", "t")


def test_a_connection_is_one_member_of_a_group(world: World) -> None:
    one = world.beats("c1", "t")
    with pytest.raises(Refusal, match="c2 needs a connection of its own"):
        world.beats("c2", "t", session=one)
    world.beats("c2", "t", session=one, group="h")


def test_a_member_without_heartbeats_for_too_long_has_expired(world: World) -> None:
    one, two = world.beats("c1", "t"), world.beats("c2", "t")
    world.clock.advance(LIMITS.heartbeat_limit_s)
    assert list(world.groups.expired()) == []
    world.groups.record_contact([two, peer()])
    world.clock.advance(1)
    assert list(world.groups.expired()) == [one]
    data = world.group.members[one].data
    world.groups.heartbeat(one, "c1", data, 0, 0)
    assert list(world.groups.expired()) == [], "a repeated heartbeat"


def test_the_look_for_expired_members_is_done_in_pieces(world: World) -> None:
    sessions = [world.beats(f"c{number}", "t") for number in range(LOOKS + 1)]
    world.clock.advance(LIMITS.heartbeat_limit_s + 1)
    assert [*world.groups.expired()].count(None) == 1
    found = set()
    for session in world.groups.expired():
        if session is not None:
            found.add(session)
            world.groups.drop(session)
    assert found == set(sessions)


def test_members_with_outdated_routes_are_named_up_to_a_limit(world: World) -> None:
    """Each member adds a text for each of its topics, so the count passes the limit without being equal to it."""
    topics = ("t", "u", "v")
    assert MAX_NAMED_MEMBERS % len(topics), "the limit lies between two members"
    for number in range(MAX_NAMED_MEMBERS):
        world.beats(f"c{number:03}", *topics, queue_counts={"a": dict.fromkeys(topics, 1)})
    faults = finish(finding_faults(list(world.group.members.values()), "a", lambda topic: QUEUES))
    stale = [fault for fault in faults if " sees 1 queues of " in fault]
    assert MAX_NAMED_MEMBERS < len(stale) < MAX_NAMED_MEMBERS + len(topics)


def test_members_that_see_another_number_of_queues_are_known(world: World) -> None:
    one = world.beats("c1", "t", "u", queue_counts={"a": {"t": 3, "u": QUEUES, "strange": 1}, "b": {"t": 1}})
    two = world.beats("c2", "t", queue_counts={"a": {"t": QUEUES}})
    assert world.groups.stale_topics(world.groups.obtain("g"), one) == ["t"]
    assert (
        world.groups.stale_topics(world.groups.obtain("g"), two)
        == world.groups.stale_topics(world.groups.obtain("h"), one)
        == []
    )
    assert world.groups.stale_topics(world.groups.obtain("g"), peer()) == []
    assert list(world.groups.stale()) == [("g", one, "t")]


def test_a_large_group_is_checked_once_for_many_changes() -> None:
    world = World(checked_at_once=1)
    world.beats("c1", "t")
    assert world.later.waiting == []
    world.beats("c2", "u")
    world.beats("c3", "u")
    assert world.faults() == []
    assert world.later.done() == 1
    before = world.faults()
    assert before
    world.groups.check_soon(world.group)
    assert world.later.done() == 1
    assert world.faults() == before, "each fault once"


def test_disagreements_are_reported_once_and_again_when_they_come_back(world: World) -> None:
    world.beats("c1", "t")
    two = world.beats("c2", "t", "u")
    assert len(world.faults()) == 1
    world.beats("c2", "t", session=two)
    world.beats("c2", "t", "u", session=two)
    assert len(world.faults()) == 2


def test_the_log_has_this_many_disagreements_of_a_group_in_a_while() -> None:
    world, sessions = World(max_logged_faults=1), dict[str, RemotingConnection]()

    def logged(group: str = "g") -> int:
        """Let two members disagree and agree again, and return how often the log says so."""
        if group not in sessions:
            world.beats("c1", "t", group=group)
            sessions[group] = world.beats("c2", "t", group=group)
        with capture_logs() as logs:
            world.beats("c2", "t", "u", group=group, session=sessions[group])
        world.beats("c2", "t", group=group, session=sessions[group])
        return sum(log["event"] == "members_disagree" for log in logs)

    assert (logged(), logged(), logged("h")) == (1, 0, 1)
    world.clock.advance(REPORT_AGAIN_S - 1)
    assert logged() == 0
    world.clock.advance(1)
    assert (logged(), logged()) == (1, 0)
    world.clock.advance(REPORT_AGAIN_S - 1)
    assert logged() == 0, "since the last time"


@pytest.mark.parametrize(("retry_queues", "compared", "is_alone"), [(1, 2, False), (2, 2, True), (1, 1, True)])
def test_foreign_members_of_different_topics_are_notified_of_others_or_of_themselves(
    retry_queues: int, compared: int, *, is_alone: bool
) -> None:
    world = World(max_compared=compared)
    one, two = world.beats("c1", "t", strategy=None), world.beats("c2", "u", strategy=None)
    finish(world.group.binding(is_uneven=True, retry_queues=retry_queues))
    assert world.group.is_uneven
    for session, client_id in ((one, "c1"), (two, "c2")):
        assert (world.group.list_for(session) is world.group.companions(session)) is not is_alone
        assert world.group.companions(session).ids == [client_id]
    finish(world.group.binding(is_uneven=False, retry_queues=retry_queues))
    assert not world.group.is_uneven
    assert world.group.list_for(one) is world.group.companions(one)


def test_a_foreign_member_that_shares_only_some_of_its_topics_is_notified_of_itself(world: World) -> None:
    one, two = world.beats("c1", "t", "u", strategy=None), world.beats("c2", "t", strategy=None)
    finish(world.group.binding(is_uneven=True, retry_queues=1))
    assert world.group.list_for(one) is not world.group.companions(one)
    assert world.group.list_for(two) is world.group.companions(two)
