"""Each limit on a client's use is tested at its edge; a client that leaves gives back all that it took."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from sys import getrefcount
from typing import Any

import orjson
import pytest
import structlog
from rocketlet.broker.config import (
    LARGE_HOLDING_BYTES,
    LIMITS,
    MOVING_BYTES,
    PLACE_BYTES,
    TAG_BYTES,
    TOLD_AGAIN,
    Limits,
)
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.groups.members import History
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.protocol import bodies, frame
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, TopicConfig, finish
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.config import MAX_REQUEST_HEADER_BYTES
from rocketlet.protocol.frame import ROCKETMQ, Frame, encode
from rocketlet.protocol.names import Queue, parse_subscription, tag_code
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.peers import Peer
from ...support.requests import HALF_PROPERTIES, bodies_of, half, pull, send


def beat(client_id: str, *consumers: ConsumerData, producers: tuple[str, ...] = ()) -> bytes:
    return bodies.encode_heartbeat(Heartbeat(client_id, consumers, producers))


def consumer(group: str = "g", *topics: str, **fields: Any) -> ConsumerData:
    subscriptions = tuple(parse_subscription(topic, "*", version=1) for topic in topics or ("t",))
    return ConsumerData(group, subscriptions=subscriptions, **fields)


# Memberships


async def test_what_a_client_is_a_member_of_counts_as_its_own_until_it_leaves(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    one, memory = Peer(node.server, 2001), node.server.memory
    many = consumer("g", *(f"topic-{number}" for number in range(500)))

    def say(code: Code, ext: frame.Ext, body: bytes = b"") -> None:
        one.send(encode(Frame(code, 1, ext, body)))
        finish(memory.sweeping())

    say(Code.HEART_BEAT, {}, beat("c1", many, producers=("p1", "p2")))
    full = one.connection.charged_bytes
    assert full > 500 * 500
    assert memory.used_bytes >= full
    say(Code.HEART_BEAT, {}, beat("c1", many, producers=("p1", "p2")))
    assert one.connection.charged_bytes == full, "the same again is no more"
    say(Code.HEART_BEAT, {}, beat("c1", consumer("g", "t"), producers=("p1",)))
    assert one.connection.charged_bytes < full / 50
    small = one.connection.charged_bytes
    say(Code.HEART_BEAT, {}, beat("c1", consumer("g", "t"), producers=("p1",)) + b" " * 1000)
    assert one.connection.charged_bytes == small + 1000, "the last heartbeat is kept, to know it again"
    say(Code.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g", "producerGroup": "p1"})
    say(Code.UNREGISTER_CLIENT, {"clientID": "c1", "producerGroup": "p2"})
    assert one.connection.charged_bytes == 1024 + PLACE_BYTES, "its client id, and which group it has left"
    say(Code.PULL_MESSAGE, {name: str(value) for name, value in pull("t").items()})
    assert one.connection.charged_bytes == 1024 + 2 * PLACE_BYTES, "which queues it reads"
    used = memory.used_bytes - one.connection.counted_bytes
    one.hang_up()
    await node.broker.turns.done()
    assert memory.used_bytes == used


async def test_members_beyond_the_budget_are_closed_and_the_others_continue(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    node.server.memory.budget_bytes = 1_000_000
    greedy = [Peer(node.server, 2000 + number) for number in range(4)]
    many = consumer("g", *(f"topic-{number}" for number in range(600)))
    for number, item in enumerate(greedy):
        item.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat(f"c{number}", many))))
    await node.broker.turns.done()
    assert 1 <= [item.socket.is_closed for item in greedy].count(True) <= 2, (
        "their requests count, too, while they wait"
    )
    assert node.server.memory.used_bytes <= 1_000_000
    assert (await send(wire)).code == 0
    for item in greedy:
        item.hang_up()
    await node.broker.turns.done()


@pytest.mark.parametrize(
    ("limit", "beats"),
    [
        ("max_client_ids", [beat("c1"), beat("c2"), beat("c3")]),
        ("max_producer_groups", [beat("c", producers=("p1",)), beat("c", producers=("p2",)), beat("c", producers=("p3",))]),
    ],
)  # fmt: skip
async def test_names_of_a_connection_are_limited_at_their_edge(
    nodes: Nodes, connect: Connect, limit: str, beats: list[bytes]
) -> None:
    node = await nodes.start(limits=Limits(**{limit: 2}))
    wire = await connect(node.address)
    answers = [(await wire.call(Code.HEART_BEAT, body=body)).code for body in (*beats, *beats)]
    assert answers == [0, 0, 1, 0, 0, 1]
    assert (await (await connect(node.address)).call(Code.HEART_BEAT, body=beats[2])).code == 0


async def test_what_strangers_ask_a_group_for_is_not_kept(wire: Wire, node: Node) -> None:
    await wire.call(Code.HEART_BEAT, body=beat("c1", consumer("g", "t", strategy="STICKY")))
    for number in range(50):
        ext = {"consumerGroup": "g", "topic": f"x-{number}", "detail": "share"}
        assert (await wire.call(Code.GET_CONSUMER_LIST_BY_GROUP, ext)).code in (0, 1)
    group = node.broker.groups.obtain("g")
    assert list(group.topics) == ["t"]


@pytest.mark.limits(max_seen_queues=100, max_shared_queues=100)
async def test_a_member_that_sees_queues_without_end_keeps_nobody_waiting(wire: Wire, node: Node) -> None:
    """A thousand brokers with 65,536 queues each were shared out, one by one."""
    counts = {f"broker-{number:03}": {"t": 65_536} for number in range(1000)} | {"broker-a": {"t": 4}}
    claims = tuple(Queue("t", "broker-a", number) for number in range(500))
    liar = consumer("g", "t", strategy="STICKY", queue_counts=counts, assigned=(*claims, Queue("u", "b", 1)))
    counts.pop("broker-999")
    assert (await wire.call(Code.HEART_BEAT, body=beat("c1", liar))).code == 0
    group = node.broker.groups.obtain("g")
    assert group.seen_queues("t").of_brokers == {"broker-a": 4}
    sticky = group.topics["t"].sticky
    assert sticky is not None
    assert len(sticky.owners) <= 100
    assert "u" not in group.topics
    share = group.share("c1", "t")
    assert share is not None
    assert share.queues == 4
    counts["one-too-many"] = {"t": 1}
    assert (await wire.call(Code.HEART_BEAT, body=beat("c1", liar))).code == 1


@pytest.mark.limits(max_shared_queues=3)
async def test_of_more_queues_than_the_broker_shares_out_members_do_so_themselves(wire: Wire, node: Node) -> None:
    for topic, queues in (("few", 3), ("many", 4)):
        await create_topic(wire, topic, queues)
    sticky = consumer("g", "few", "many", strategy="STICKY", queue_counts={"broker-a": {"few": 3, "many": 4}})
    assert (await wire.call(Code.HEART_BEAT, body=beat("c1", sticky))).code == 0
    group = node.broker.groups.obtain("g")
    assert group.share("c1", "few") is not None
    assert group.share("c1", "many") is None


async def test_a_strict_group_finds_who_differs_without_a_check_of_all(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    body = orjson.dumps({"groupName": "g", "strict": True})
    assert (await wire.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
    peers = [Peer(node.server, 2000 + number) for number in range(20)]
    for number, item in enumerate(peers):
        item.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat(f"c{number}", consumer()))))
        assert item.received()[0].code == 0
    group = node.broker.groups.obtain("g")
    assert len(group._of_shape) == 1
    peers[0].send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c0", consumer("g", "t", "u")))))
    (refused,) = [item for item in peers[0].received() if item.is_response]
    assert (refused.code, "c0" in str(refused.remark)) == (16, False)
    for item in peers[1:]:
        item.hang_up()
    await node.broker.turns.done()
    peers[0].send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c0", consumer("g", "t", "u")))))
    assert [item.code for item in peers[0].received() if item.is_response] == [0], "alone it may"
    peers[0].hang_up()
    await node.broker.turns.done()
    assert group._of_shape == {}


async def test_a_stranger_gets_the_newest_subscription_also_after_a_change(node: Node, wire: Wire) -> None:
    one = Peer(node.server, 2001)

    def say(expression: str, version: int) -> str:
        data = ConsumerData("g", subscriptions=(parse_subscription("t", expression, version=version),))
        one.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c1", data))))
        group = node.broker.groups.get("g")
        found = group.subscription(None, "t") if group is not None else None
        return found.expression if found is not None else ""

    assert [say("a", 5), say("b", 6), say("c", 6), say("d", 9)] == ["a", "b", "b", "d"]
    group = node.broker.groups.obtain("g")
    assert group.subscription(None, "x") is None
    assert "x" not in group.topics
    one.hang_up()
    await node.broker.turns.done()


# Notes


@pytest.mark.limits(max_logged_faults=3)
async def test_members_that_disagree_in_ever_other_ways_do_not_fill_the_log(node: Node, wire: Wire) -> None:
    peers = [Peer(node.server, 2000 + number) for number in range(2)]
    with structlog.testing.capture_logs() as logged:
        for number in range(10):
            for index, item in enumerate(peers):
                topic, expression = ("t", f"tag-{number}") if item is peers[0] else (f"u{number}", "*")
                subscriptions = (parse_subscription(topic, expression, version=number),)
                data = ConsumerData(f"g{number // 5}", subscriptions=subscriptions)
                item.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat(f"c{index}", data))))
    said = [entry["group"] for entry in logged if entry["event"] == "members_disagree"]
    assert (said.count("g0"), said.count("g1")) == (3, 3)
    for item in peers:
        item.hang_up()
    await node.broker.turns.done()


def test_history_is_limited_in_all_and_in_its_words() -> None:
    limits = Limits(history_all_events=10, history_events=4, history_groups=5)
    history = History(Runtime(MovableClock(stands=True), limits))
    for number in range(40):
        history.add(f"g{number % 6}", "disagreement", "c", fault="x" * 5000, number=number)
    kept = [event for group in range(6) for event in history.of(f"g{group}")]
    assert 5 <= len(kept) <= 10
    assert {len(str(event["fault"])) for event in kept} == {1000}
    assert history.of("g3")[-1]["number"] == 39
    for number in range(40):
        history.add("one", "joined", "c", number=number)
    assert [event["number"] for event in history.of("one")][-3:] == [37, 38, 39]
    assert len(history.of("one")) <= 4


def test_history_takes_no_more_memory_than_it_counts() -> None:
    """200,000 events of dictionaries took 68 MiB, and their texts were counted nowhere."""
    limits = Limits(history_bytes=2 * 1024 * 1024)
    history, group = History(Runtime(MovableClock(stands=True), limits)), ConsumerGroup("g")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(20_000):
        history.changed_hands("locked", group, ("g", "t", number % 8), "c", (1 << 60) + number)
    leases, _ = tracemalloc.get_traced_memory()
    for number in range(5000):
        history.add(f"g{number % 3}", "disagreement", "c", fault=f"{number:05}" * 200)
    texts, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert leases - before < limits.history_bytes
    assert texts - before < 1.1 * limits.history_bytes
    assert str(history.of("g0")[-1]["fault"]).startswith("04998")


@pytest.mark.limits(max_sampled=12, max_counted_reads=3)
async def test_statistics_are_limited_and_right(wire: Wire, node: Node) -> None:
    statistics = node.broker.statistics
    for number in range(5):
        await create_topic(wire, f"t{number}", 2)
        await send(wire, topic=f"t{number}")
        await send(wire, topic=f"t{number}", queue=1)
        assert len(await bodies_of(wire, f"t{number}")) == 1
        finish(statistics.sampling())
        assert statistics._sampled <= 12
    assert list(statistics.got) == ["t2@g", "t3@g", "t4@g"], "nobody reads the others now"
    assert len(statistics._samples) == 3
    assert statistics.rate("TOPIC_PUT_NUMS", "t4", 3600).total == 2
    await send(wire, topic="t4")
    assert statistics.rate("TOPIC_PUT_NUMS", "t4", 3600).total == 3
    assert statistics.rate("GROUP_GET_NUMS", "t4@g", 3600).total == 1
    totals = finish(statistics.totals())
    assert statistics.sums("TOPIC_PUT_NUMS", totals) == (0, 0, 11)


@pytest.mark.limits(max_half_messages=2)
async def test_transactions_without_an_outcome_are_limited_at_their_edge(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t")
    await half(wire)
    await half(wire)
    answer = await send(wire, properties=HALF_PROPERTIES, sys_flag=4)
    assert (answer.code, "maximum 2" in (answer.remark or "")) == (2, True)
    assert (await send(wire)).code == 0


def test_keys_of_a_name_server_are_limited_in_size() -> None:
    routes = Routes(limits=Limits(max_kv_chars=20))
    routes.put_kv("n", "k", "x" * 18)
    with pytest.raises(Exception, match="20 characters"):
        routes.put_kv("n", "k", "x" * 19)
    with pytest.raises(Exception, match="20 characters"):
        routes.put_kv("m", "k", "")
    assert list(routes.kv) == ["n"], "what is refused leaves nothing"
    routes.put_kv("n", "k", "x" * 16)
    routes.put_kv("m", "k", "")
    routes.delete_kv("n", "k")
    routes.delete_kv("n", "k")
    assert list(routes.kv) == ["m"]
    routes.put_kv("n", "k", "x" * 16)


async def test_names_of_brokers_have_a_limit(wire: Wire) -> None:
    ext = {"brokerName": "b", "brokerAddr": "10.0.0.1:1", "clusterName": "c", "haServerAddr": "", "brokerId": "1"}
    long = {"clusterName": "c" * 513}
    answer = await wire.call(Code.REGISTER_BROKER, ext | long, b"{}")
    assert (answer.code, "maximum 512" in (answer.remark or "")) == (1, True)


# Requests


async def test_the_texts_of_a_held_pull_count_as_its_connections(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    one = Peer(node.server, 2001)
    expression = " || ".join(f"tag-{number}" for number in range(1000))
    ext = pull("t", flags=6, subscription=expression)
    one.send(encode(Frame(Code.PULL_MESSAGE, 1, ext | {"junk": "x" * 100_000}, b"x" * 100_000)))
    assert one.connection.held_pulls == 1
    assert 1000 * TAG_BYTES < one.connection.charged_bytes < 1000 * TAG_BYTES + 100_000
    one.send(encode(Frame(Code.PULL_MESSAGE, 1, pull("t", flags=6, subscription="x" * 65_537))))
    answers: list[Frame] = []

    def is_answered() -> bool:
        answers.extend(one.received())
        return bool(answers)

    await eventually(is_answered)  # on a busy machine the request waits for its turn
    assert [item.code for item in answers] == [23]
    assert (await send(wire, tag="tag-1")).code == 0
    await eventually(lambda: one.connection.held_pulls == 0)
    assert one.connection.charged_bytes == PLACE_BYTES
    one.hang_up()


async def test_headers_of_requests_are_limited_at_their_edge(wire: Wire) -> None:
    empty = len(encode(Frame(Code.GET_MAX_OFFSET, 1, {"topic": "t", "queueId": "0", "junk": ""}))) - 8

    def sized(size: int) -> dict[str, str]:
        return {"topic": "t", "queueId": "0", "junk": "x" * (size - empty)}

    assert (await wire.call(Code.GET_MAX_OFFSET, sized(MAX_REQUEST_HEADER_BYTES - 10))).code == 0
    wire.send(Code.GET_MAX_OFFSET, sized(MAX_REQUEST_HEADER_BYTES + 10))
    assert await wire.closed()


@pytest.mark.limits(max_asked=1)
async def test_questions_to_clients_are_limited_at_their_edge(wire: Wire, connect: Connect, node: Node) -> None:
    await wire.call(Code.HEART_BEAT, body=beat("c1", consumer()))
    asking = await connect(node.address)
    ext = {"consumerGroup": "g", "clientId": "c1"}
    asking.send(Code.GET_CONSUMER_RUNNING_INFO, ext)
    await wire.request(Code.GET_CONSUMER_RUNNING_INFO)
    answer = await asking.call(Code.GET_CONSUMER_RUNNING_INFO, ext)
    assert (answer.code, "has not answered" in (answer.remark or "")) == (1, True)


@pytest.mark.parametrize(("most", "is_taken"), [(20, True), (17, False)])
async def test_a_share_that_takes_long_is_refused(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch, most: int, is_taken: bool
) -> None:
    wire = await connect((await nodes.start(limits=Limits(max_hashed=most))).address)
    monkeypatch.setattr("rocketlet.broker.remoting.groups.MAX_REQUEST_QUEUES", 8)
    await create_topic(wire, "t", 8)
    await create_topic(wire, "u", 9)
    await wire.call(Code.HEART_BEAT, body=beat("c1", consumer()))

    async def ask(topic: str, strategy: str) -> tuple[int, str]:
        value = {"topic": topic, "consumerGroup": "g", "clientId": "c1", "strategyName": strategy}
        answer = await wire.call(Code.QUERY_ASSIGNMENT, body=orjson.dumps(value))
        return answer.code, answer.remark or ""

    assert await ask("t", "AVG") == (0, "")
    assert (await ask("u", "AVG"))[0] == 1
    code, remark = await ask("t", "CONSISTENT_HASH")
    assert (code, "takes too long" in remark) == ((0, False) if is_taken else (1, True))


def test_what_peers_name_is_not_kept_when_it_is_long() -> None:
    for size, is_kept in ((64, True), (65, False)):
        key = bytes(size).decode()
        references = getrefcount(key)
        encode(Frame(1, 1, {key: "v"}, serialize_type=ROCKETMQ))
        assert (getrefcount(key) > references) is is_kept
    assert tag_code("TAGS\1" + "ä" * 65) == tag_code("TAGS\1" + "ä" * 65) != tag_code("TAGS\1" + "ä" * 64)


async def test_offsets_of_owners_are_forgotten_with_their_topic(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    node.broker.offsets.put("g", "t", 0, 5, by_owner=True)
    node.broker.offsets.topic_deleted("t")
    assert node.broker.groups.get("g") is None


@pytest.mark.limits(max_read_queues=0)  # it keeps what nobody reads
async def test_groups_with_foreign_members_keep_no_list_of_their_queues(node: Node) -> None:
    groups, count = 50, 256
    node.broker.topics.put(TopicConfig("t", count, count), 0)
    peer = Peer(node.server, 2000)
    data = [consumer(f"g{number}", consume_type="CONSUME_PASSIVELY") for number in range(groups)]
    peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c1", *data))))
    tracemalloc.start()
    await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert node.broker.draining.allotment.queue_count == groups * count
    assert kept_bytes < 32 * groups * count, "pointers to their owners, and what a group takes"
    assert peak_bytes < 64 * groups * count
    peer.hang_up()


@pytest.mark.limits(max_claims=16)
async def test_members_that_claim_too_much_are_not_drained(node: Node) -> None:
    """Many connections that go by one client id are given the same list, and each takes the same queues for its own."""
    node.broker.topics.put(TopicConfig("t", 8, 8), 0)
    draining, peers = node.broker.draining, []
    for number, is_too_much in enumerate((False, False, True)):
        peers.append(Peer(node.server, 2000 + number))
        member = consumer("g", consume_type="CONSUME_PASSIVELY")
        peers[-1].send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c1", member))))
        await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)
        peers[-1].send(encode(Frame(Code.GET_CONSUMER_LIST_BY_GROUP, 2, {"consumerGroup": "g"})))
        peers[-1].send(encode(Frame(Code.HEART_BEAT, 3, {}, beat("c1", replace(member, leaving=True)))))
        await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)
        peers[-1].send(encode(Frame(Code.HEART_BEAT, 4, {}, beat("c1", member))))
        await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)
        assert draining.allotment.queue_count == (0 if is_too_much else 8)
    for item in peers:
        item.hang_up()
    await node.broker.turns.done()


async def readers_of_all(node: Node, count: int) -> list[Peer]:
    """Foreign members that go by one client id: each was given the same list, and takes all queues for its own."""
    peers = [Peer(node.server, 2000 + number) for number in range(count)]
    for item in peers:
        item.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c1", consumer("g", consume_type="CONSUME_PASSIVELY")))))
        await settled(node)
    for item in peers:
        item.send(encode(Frame(Code.GET_CONSUMER_LIST_BY_GROUP, 2, {"consumerGroup": "g"})))
    return peers


async def settled(node: Node) -> None:
    await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)


async def join_another(node: Node) -> Peer:
    """Half of all queues move to it."""
    other = Peer(node.server, 3000)
    other.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat("c2", consumer("g", consume_type="CONSUME_PASSIVELY")))))
    await settled(node)
    return other


async def test_queues_that_move_count_against_the_memory_until_the_change_is_over(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 8, 8), 0)
    peers = await readers_of_all(node, 3)
    before = [item.connection.charged_bytes for item in peers]
    peers.append(await join_another(node))
    moving = [item.connection.charged_bytes - held for item, held in zip(peers, before, strict=False)]
    assert moving == [4 * MOVING_BYTES] * 3
    node.clock.advance(LIMITS.drain_limit_s)
    for _ in range(TOLD_AGAIN + 1):
        node.clock.advance(LIMITS.drained_wait_s)
    await settled(node)
    assert [item.connection.charged_bytes for item in peers[:3]] == before
    for item in peers:
        item.hang_up()
    await node.broker.turns.done()


@pytest.mark.parametrize("spare", [0, 1])
async def test_who_has_too_much_moved_is_closed(node: Node, spare: int) -> None:
    count = LARGE_HOLDING_BYTES // MOVING_BYTES + 1
    node.broker.topics.put(TopicConfig("t", 2 * count, 2 * count), 0)
    peers = await readers_of_all(node, 2)
    finish(node.server.memory.sweeping())
    node.server.memory.budget_bytes = node.server.memory.used_bytes + 2 * count * MOVING_BYTES - 1 + spare * 10_000
    with capture_logs() as logs:
        peers.append(await join_another(node))
    closed = [entry["event"] for entry in logs if entry["event"] == "connection_closed_memory"]
    assert closed == ([] if spare else ["connection_closed_memory"])
    for item in peers:
        item.hang_up()
    await node.broker.turns.done()


@pytest.mark.limits(max_drained_queues=20)
async def test_queues_of_draining_groups_are_limited(node: Node, wire: Wire) -> None:
    node.broker.topics.put(TopicConfig("t", 8, 8), 0)
    draining, peers = node.broker.draining, [Peer(node.server, 2000 + number) for number in range(3)]
    for number, item in enumerate(peers):
        data = consumer(f"g{number}", consume_type="CONSUME_PASSIVELY")
        item.send(encode(Frame(Code.HEART_BEAT, 1, {}, beat(f"c{number}", data))))
    await eventually(lambda: not node.broker.tasks._running and not node.broker.turns.waiting)
    assert draining.allotment.queue_count == 16
    for item in peers:
        item.hang_up()
    await node.broker.turns.done()
    assert draining.allotment.queue_count == 0
