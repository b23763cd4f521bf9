"""Each queue of each topic has one reader, whoever subscribes to what, by the lists that foreign members get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.broker.groups.claims import owners_of
from rocketlet.broker.groups.group import ConsumerGroup, SubscribedTopic
from rocketlet.broker.groups.members import ALONE, Member
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, Strategy, TopicQueues
from rocketlet.protocol.bodies import BrokerData, ConsumerData, QueueData, Route, finish
from rocketlet.protocol.names import Queue, parse_subscription, retry_topic, sorted_ids

from ...conftest import peer

TOPICS = ("t0", "t1", "t2", "t3")
RETRIES = retry_topic("g")
BROKERS = ("broker-a", "broker-b")


@dataclass(frozen=True)
class Someone:
    """A member: of ours, or a foreign one with a strategy of its own."""

    client_id: str
    topics: frozenset[str]
    is_ours: bool
    strategy: Strategy


SOMEONE = st.builds(
    Someone,
    st.text("abcdefgh", min_size=1, max_size=4),
    st.frozensets(st.sampled_from(TOPICS), min_size=1),
    st.booleans(),
    st.sampled_from((AVG, AVG, AVG_BY_CIRCLE, CONSISTENT_HASH)),
)
COUNTS = st.fixed_dictionaries({topic: st.tuples(st.integers(0, 9), st.integers(0, 9)) for topic in TOPICS})


def route_of(counts: tuple[int, int]) -> Route:
    queues = tuple(QueueData(name, count, count, 6) for name, count in zip(BROKERS, counts, strict=True) if count)
    return Route(queues, tuple(BrokerData(name, {0: "127.0.0.1:1"}, "c") for name in BROKERS))


def joined(people: list[Someone]) -> tuple[ConsumerGroup, dict[Someone, RemotingConnection]]:
    group, connections = ConsumerGroup("g"), {}
    group.begin_membership()
    for someone in people:
        connection = connections[someone] = peer()
        subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in sorted((*someone.topics, RETRIES)))
        data = ConsumerData("g", subscriptions=subscriptions, strategy="AVG" if someone.is_ours else "")
        member = Member(someone.client_id, connection, data, 0, 0, 0.0)
        member.subscriptions = {item.topic: item for item in subscriptions}
        member.topics = someone.topics
        group.members[connection] = member
        group.topics |= {topic: SubscribedTopic(1) for topic in member.subscriptions}
        if not someone.is_ours:
            group.foreign[connection] = member
    return group, connections


def readers_of(
    group: ConsumerGroup, connections: dict[Someone, RemotingConnection], topic: str, queues: TopicQueues
) -> Iterator[tuple[Queue, list[str]]]:
    """The readers of each queue: one of ours reads its share; a foreign member reads its claim by the list that it gets,
    unless it is bound to its share and the queue is another's."""
    owners = {name: owners_of(group.order(topic), queues, name) for name in BROKERS}
    for queue in queues:
        found: list[str] = []
        for someone, connection in connections.items():
            if topic not in group.members[connection].subscriptions:
                continue
            members = group.list_for(connection)
            if someone.is_ours:
                index, count = group.place(someone.client_id, topic)
                share = AVG.allocate_at(index, count, queues)
            else:
                share = someone.strategy.allocate(
                    someone.client_id, list(queues), sorted_ids(members.told(someone.client_id))
                )
            is_bound = not someone.is_ours and (members is ALONE or (group.is_uneven and topic == RETRIES))
            is_anothers = is_bound and owners[queue.broker_name][queue.queue_id] != someone.client_id
            if queue in share and not is_anothers:
                found.append(someone.client_id)
        yield queue, found


def three(*topics: str) -> list[Someone]:
    """Foreign members, each of one topic."""
    return [Someone(name, frozenset({topic}), False, AVG) for name, topic in zip("abc", topics, strict=True)]


@example(three("t0", "t0", "t2"), dict.fromkeys(TOPICS, (4, 0)), 3)  # by a's and b's list, retries 0 and 1 are a's
@example(three("t0", "t2", "t2"), dict.fromkeys(TOPICS, (4, 4)), 1)
@given(st.lists(SOMEONE, min_size=1, max_size=7, unique_by=lambda item: item.client_id), COUNTS, st.integers(0, 3))
def test_each_queue_has_one_reader_whoever_subscribes_to_what(
    people: list[Someone], counts: dict[str, tuple[int, int]], retry_queues: int
) -> None:
    """Where foreign members share all topics with the same others, as by Apache's broker, all have to use one strategy."""
    group, connections = joined(people)
    routes = {topic: route_of(count) for topic, count in (*counts.items(), (RETRIES, (retry_queues, 0)))}
    retries = len(TopicQueues(RETRIES, routes[RETRIES]))
    finish(group.binding(is_uneven=group.differs(), retry_queues=retries))
    for topic in group.topics:
        told = {someone for someone in people if not someone.is_ours and topic in (*someone.topics, RETRIES)}
        if any(group.list_for(connections[item]) is not ALONE and item.strategy is not AVG for item in told):
            continue
        for queue, readers in readers_of(group, connections, topic, TopicQueues(topic, routes[topic])):
            assert len(readers) == 1, f"{queue} is read by {readers}"


@given(st.lists(SOMEONE, min_size=1, max_size=7, unique_by=lambda item: item.client_id))
def test_members_of_the_same_topics_are_notified_of_each_other(people: list[Someone]) -> None:
    """As by Apache's broker: nobody claims a queue that is not its own."""
    group, connections = joined([Someone(item.client_id, frozenset({"t0"}), item.is_ours, AVG) for item in people])
    finish(group.binding(is_uneven=group.differs(), retry_queues=1))
    assert not group.is_uneven
    for connection in connections.values():
        assert sorted(group.list_for(connection).ids) == sorted(item.client_id for item in people)
