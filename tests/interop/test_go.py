"""The unmodified Apache Go client (v2) on our broker, alone and with Python and Java members."""

from __future__ import annotations

from collections import Counter

import pytest
from rocketlet.client import Consumer, Producer
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import retry_topic

from ..conftest import eventually
from ..support.handlers import Inbox
from ..support.pacing import pace
from .conftest import Cluster, Program, Run, StartCluster, missing, on_one_broker_and_two, own, tagged_messages_arrive

pytestmark = [
    pytest.mark.go,
    pytest.mark.skipif(bool(missing("go")), reason=missing("go")),
    pytest.mark.timeout(300),
]
feature = pytest.mark.feature


@on_one_broker_and_two
@feature("Producers", "synchronous sends, compressed bodies, keys, tags, user properties with non-ASCII text")
async def test_what_go_sends_python_receives(start_cluster: StartCluster, brokers: int, go: Run) -> None:
    """Go sends by the old codes 10 and 320, and never sets the one-way bit."""
    cluster = await start_cluster(brokers, delay_levels_ms=(200,) * 18)
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        go("produce", ns=cluster.address, topic="t") as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == 18)
    wanted = Counter(b"go-%d" % number + (b"-" + b"x" * 5000 if number % 2 else b"") for number in range(10))
    wanted += Counter([*(b"batch-%d" % number for number in range(5)), b"oneway", b"async", b"delayed"])
    assert Counter(inbox.bodies) == wanted
    message = next(message for message in inbox.messages if message.keys == ["key-7"])
    assert (message.tag, message.properties["farbe"]) == ("TagA", "grün")
    assert sorted(line[3] for line in peer.found("SENT")) == sorted(
        message.offset_id for message in inbox.messages if message.keys
    )


@feature("Producers", "transactions: commit and rollback")
async def test_go_ends_transactions(cluster: Cluster, go: Run) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with Consumer(cluster.address, "g", "t", inbox, start="first"):
        for outcome, body in (("rollback", "no"), ("commit", "yes")):
            async with go("transaction", ns=cluster.address, topic="t", outcome=outcome, body=body) as peer:
                await peer.started()
                await eventually(lambda: all(node.broker.transactions.waiting == 0 for node in cluster.nodes))
        await eventually(lambda: len(inbox.messages) == 1)
    assert inbox.bodies == [b"yes"]


@feature("Producers", "transactions: unknown, then asked for by the broker")
async def test_go_is_asked_for_an_outcome(start_cluster: StartCluster, go: Run) -> None:
    cluster = await start_cluster(
        1, transaction_check_interval_s=0.05, transaction_timeout_s=0.3, transaction_check_max=10**6
    )
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        go("transaction", ns=cluster.address, topic="t", outcome="unknown", check="commit", body="late") as peer,
    ):
        await peer.until(lambda: b"late" in inbox.bodies)
    assert peer.found("ASKED")[0] == ["ASKED", "late"]


@pytest.mark.parametrize("mode", ["concurrently", "orderly", "broadcast"])
@feature("Push consumers", "concurrent, orderly and broadcasting consumption, filtered by several tags")
async def test_what_python_sends_go_receives_once_and_by_tag(cluster: Cluster, go: Run, mode: str) -> None:
    await cluster.create_topic("t")
    async with go("consume", ns=cluster.address, group="g", topic="t", tags="A || B", mode=mode) as peer:
        await tagged_messages_arrive(cluster, peer, mode)


@feature("Push consumers", "SQL92 filters on properties")
async def test_go_filters_by_properties(cluster: Cluster, go: Run) -> None:
    await cluster.create_topic("t")
    async with (
        go("consume", ns=cluster.address, group="g", topic="t", sql="price > 10") as peer,
        Producer(cluster.address) as producer,
    ):
        await peer.started()
        for number in range(20):
            await producer.send("t", b"%d" % number, properties={"price": str(number)})
        await peer.until(lambda: len(peer.bodies) >= 9)
    assert sorted(peer.bodies, key=int) == [str(number) for number in range(11, 20)]


@feature("Push consumers", "retries by the retry topic, later each time")
async def test_a_message_that_go_cannot_handle_comes_to_it_again(start_cluster: StartCluster, go: Run) -> None:
    cluster = await start_cluster(1, delay_levels_ms=(200,) * 18)
    await cluster.create_topic("t")
    async with (
        go("consume", ns=cluster.address, group="g", topic="t", mode="fail-once") as peer,
        Producer(cluster.address) as producer,
    ):
        await peer.started()
        await producer.send("t", b"hard")
        await peer.until(lambda: len(peer.bodies) == 2)
    assert [(line[1], line[4], line[5]) for line in peer.found("GOT")] == [("t", "0", "hard"), ("t", "1", "hard")]
    assert cluster.stored(retry_topic("g")) == 1


@pytest.mark.parametrize("with_java", [False, pytest.param(True, marks=pytest.mark.java)])
@feature("Push consumers", "groups of Go, Java and Python members: every queue has one owner")
async def test_go_shares_a_group(cluster: Cluster, go: Run, request: pytest.FixtureRequest, with_java: bool) -> None:
    if with_java and missing("java", "mvn"):
        pytest.skip(missing("java", "mvn"))
    await cluster.create_topic("t", 6)
    queues = 6 * len(cluster.nodes)
    inbox = Inbox()
    other: Run = request.getfixturevalue("java") if with_java else go
    async with (
        go("consume", ns=cluster.address, group="g", topic="t") as one,
        other("consume", ns=cluster.address, group="g", topic="t") as two,
        Consumer(cluster.address, "g", "t", inbox, start="first") as consumer,
        Producer(cluster.address) as producer,
    ):
        for peer in (one, two):
            await peer.started()
        await eventually(lambda: own(consumer, "t") == queues // 3)
        for number in range(120):
            await producer.send("t", b"%d" % number)
        programs = (one, two)
        everything = {str(number) for number in range(120)}
        await one.until(
            lambda: {body.decode() for body in inbox.bodies}.union(*(peer.bodies for peer in programs)) == everything
        )
    assert inbox.bodies
    assert one.bodies
    assert two.bodies


@pytest.mark.java
@pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn"))
@feature("Push consumers", "groups of Go, Java and Python members of different topics: every queue has one owner")
@pytest.mark.limits(drain_limit_s=3600.0, drain_max_s=3600.0)  # a busy machine ends no drain
async def test_members_of_different_topics_share_each_of_them(cluster: Cluster, go: Run, java: Run) -> None:
    """On Apache's broker a third is read by nobody. Here each message comes once, also while members join and leave."""
    inbox, sent = Inbox(), Counter[str]()
    for topic in ("t0", "t1", "t2"):
        await cluster.create_topic(topic, 4)
    options = {"ns": cluster.address, "group": "g", "await_ms": 5000}
    programs: list[Program] = []

    def handled() -> Counter[str]:
        return Counter(body.decode() for body in inbox.bodies) + Counter(
            body for program in programs for body in program.bodies
        )

    async def all_come(producer: Producer) -> None:
        for number in range(60):
            for topic in ("t0", "t1", "t2"):
                body = f"{topic}-{len(sent)}"
                await producer.send(topic, body.encode())
                sent[body] = 1
            if number == 40:  # a change has come to everybody by now, or comes now
                await pace(0.5)
        await programs[0].until(lambda: handled().keys() >= sent.keys())

    async with Consumer(cluster.address, "g", "t0", inbox, start="first"), Producer(cluster.address) as producer:
        async with go("consume", topic="t2,t1", **options) as gopher:
            programs.append(gopher)
            await gopher.started()
            async with java("consume", topic="t0,t2", **options) as duke:
                programs.append(duke)
                await duke.started()
                await all_come(producer)
                async with java("consume", topic="t1", **options) as guest:
                    programs.append(guest)
                    await guest.started()
                    await all_come(producer)
                await all_come(producer)
            await all_come(producer)
        subscribed = ({"t2", "t1"}, {"t0", "t2"}, {"t1"})
    assert handled() == sent
    for peer, topics in zip(programs, subscribed, strict=True):
        assert {body.partition("-")[0] for body in peer.bodies} == topics
    assert {body.partition(b"-")[0] for body in inbox.bodies} == {b"t0"}
    assert [node.broker.locks.double_readers for node in cluster.nodes] == [0] * len(cluster.nodes)


async def test_gos_odd_habits_are_answered(cluster: Cluster, go: Run) -> None:
    """Nanosecond versions, the language name, and commits that are requests: a Go member is seen as what it is."""
    await cluster.create_topic("t")
    async with go("consume", ns=cluster.address, group="g", topic="t", tags="TagA") as peer:
        await peer.started()
        node = cluster.nodes[0]
        await eventually(lambda: node.broker.groups.online("g") is not None)
        group = node.broker.groups.obtain("g")
        (member,) = group.members.values()
        assert member.language == 9
        assert member.subscriptions["t"].version > 10**18
        answer = await cluster.wires[0].call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "g"})
        assert b'"language":"GO"' in answer.body
