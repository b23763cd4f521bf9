"""Long work is done in pieces: what is counted is the work between two turns, not the time that it takes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import ssl
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from types import GeneratorType
from typing import Any, cast

import orjson
import pytest
from rocketlet.broker.config import (
    DELAY_LEVELS_MS,
    GARBAGE_SWEEP_S,
    IDLE_LIMIT_S,
    MAX_HOLD_S,
    MAX_QUEUES_PER_TOPIC,
    MOMENT_S,
    RETENTION_SWEEP_S,
    TRANSACTION_CHECK_INTERVAL_S,
    Limits,
)
from rocketlet.broker.groups.members import finding_faults
from rocketlet.broker.groups.offsets import Watch
from rocketlet.broker.machine import Garbage
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.broker.runtime.clock import Timer
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.runtime.tasks import Tasks
from rocketlet.broker.runtime.timeouts import Timeouts
from rocketlet.broker.runtime.turns import Moment, OnePerIteration, Turns
from rocketlet.broker.tls import Tls
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import (
    LOOKS,
    SLICE,
    WRITES,
    DataVersion,
    GroupConfig,
    Heartbeat,
    TopicConfig,
    Work,
    decode_registration,
    decode_topic_list,
    encode_registration,
    encode_topic_list,
    finish,
    joined,
)
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from bench.steps import Meter

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.certificates import Certificates
from ...support.locks import Counts
from ...support.peers import BrokerSession, Peer
from ...support.requests import bodies_of, half, pull, send, send_v2
from ...support.topics import put
from ...support.turns import heartbeat_of, pieces

PIECE = 4 * SLICE  # an honest client waits for that much at most


async def test_all_work_together_gets_a_turn_and_each_piece_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(10_000))
    monkeypatch.setattr("rocketlet.broker.runtime.turns.time.perf_counter", lambda: next(now_s))
    done: list[str] = []
    turns = Turns(turn_s=4)

    def work(name: str) -> Work[None]:
        for _ in range(6):
            done.append(name)
            yield

    for name in "abc":
        turns.do(work(name))
    first = len(done)
    assert 0 < first < 6, "the first begins immediately, and stops when the turn is over"
    await asyncio.sleep(0)
    assert first < len(done) <= first + 6, "a turn later they have done some pieces more"
    assert len(set(done[first:])) > 1, "of more than one"
    await turns.done()
    assert sorted(done) == ["a"] * 6 + ["b"] * 6 + ["c"] * 6


async def test_each_address_has_a_piece_in_turn_however_much_of_its_work_waits() -> None:
    done: list[str] = []
    turns = Turns()

    def work(name: str) -> Work[None]:
        for _ in range(6):
            done.append(name)
            yield

    for number in range(8):
        turns.do_later(work("greedy"), "10.0.0.1" if number else "10.0.0.2")
    turns.do_later(work("other"), "10.0.0.3")
    turns.do_later(work("own"))
    assert done == []
    await turns.done()
    assert [done.index(name) < 8 for name in ("greedy", "other", "own")] == [True] * 3
    first = done[:24]
    assert (first.count("own"), first.count("other")) == (6, 6)
    assert len(done) == 60


async def test_what_is_served_in_one_turn_counts_until_the_sockets_are_polled_again() -> None:
    moment = Moment()
    moment.record("10.0.0.1", MOMENT_S * 0.6)
    assert (moment.is_over("10.0.0.1"), moment.is_over("10.0.0.2")) == (True, False)
    moment.record("10.0.0.2", MOMENT_S * 0.45)
    assert moment.is_over("10.0.0.3"), "all together"
    await asyncio.sleep(0)
    assert not any(map(moment.is_over, ("10.0.0.1", "10.0.0.2", "10.0.0.3")))


async def test_work_that_fails_ends_and_the_rest_continues() -> None:
    done: list[str] = []

    def broken() -> Work[None]:
        yield
        raise RuntimeError("broken")

    turns = Turns()
    turns.do(broken())
    turns.call(done.append, "after")
    await turns.done()
    assert done == ["after"]


@pytest.fixture
async def large(node: Node) -> Node:
    """A broker with a topic of as many queues as there may be, a group that is behind in all, and many names."""
    broker = node.broker
    broker.topics.put(TopicConfig("large", MAX_QUEUES_PER_TOPIC, MAX_QUEUES_PER_TOPIC), 0)
    for number in range(1000):
        broker.offsets.put("g", "large", number, 0)
        broker.offsets.put(f"g{number}", "large", 0, 0)
        broker.topics.put(TopicConfig(f"t{number}"), 0)
        broker.group_configs.put(GroupConfig(f"g{number}"))
    return node


ABOUT: dict[Code, dict[str, Any]] = {
    Code.GET_TOPIC_STATS_INFO: {"topic": "large"},
    Code.GET_CONSUME_STATS: {"consumerGroup": "g", "topic": "large"},
    Code.GET_BROKER_CONSUME_STATS: {"isOrder": "false"},
    Code.QUERY_CONSUME_TIME_SPAN: {"group": "g", "topic": "large"},
    Code.GET_GROUP_HISTORY: {"consumerGroup": "g"},
    Code.GET_ALL_TOPIC_CONFIG: {},
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: {},
    Code.GET_ALL_CONSUMER_OFFSET: {},
    Code.QUERY_CORRECTION_OFFSET: {"topic": "large", "compareGroup": "g"},
}


@pytest.mark.parametrize("code", ABOUT, ids=lambda code: code.name)
async def test_what_lists_very_much_does_little_in_one_piece(
    large: Node, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    looks = 0
    get = large.broker.offsets.get

    def counted(*place: Any) -> int | None:
        nonlocal looks
        looks += 1
        return get(*place)

    monkeypatch.setattr(large.broker.offsets, "get", counted)
    frame = Frame(code, ext={name: str(value) for name, value in ABOUT[code].items()})
    work = BROKER_REQUESTS[code][0](large.broker, Peer(large.server, 1).connection, frame)
    assert isinstance(work, Generator)
    count, most = 0, 0
    for _ in work:
        most, looks, count = max(most, looks), 0, count + 1
        if count > 100:
            break
    assert count >= 1000 // SLICE - 1
    assert most <= PIECE


async def test_who_waits_for_a_long_answer_gets_it_before_what_it_asked_behind_it(large: Node, wire: Wire) -> None:
    peer = Peer(large.server, 7)
    ext = {"topic": "large"}
    frames = [Frame(Code.GET_TOPIC_STATS_INFO, 1, ext), Frame(Code.GET_MAX_OFFSET, 2, {**ext, "queueId": "0"})]
    peer.send(b"".join(map(encode, frames)))
    await large.broker.turns.done()
    await asyncio.sleep(0)
    assert [frame.opaque for frame in peer.received()] == [1, 2]
    peer.hang_up()


@pytest.mark.limits(max_answering=2)
async def test_more_long_requests_than_can_be_answered_are_refused(
    large: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large.broker.turns, "turn_s", -1)
    peers = [Peer(large.server, 10 + number) for number in range(3)]
    for peer in peers:
        peer.send(encode(Frame(Code.GET_TOPIC_STATS_INFO, 1, {"topic": "large"})))
    (refused,) = peers[2].received()
    assert (refused.code, "retry later" in (refused.remark or "")) == (1, True)
    monkeypatch.undo()
    await large.broker.turns.done()
    assert [peer.received()[0].code for peer in peers[:2]] == [0, 0]
    for peer in peers:
        peer.hang_up()


@pytest.mark.limits(max_answering=2)
async def test_other_work_that_waits_is_not_taken_for_long_requests(
    large: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the held pulls of a member with a thousand queues end at the same time."""
    monkeypatch.setattr(large.broker.turns, "turn_s", -1)
    for _ in range(3):
        large.broker.turns.call(int)
    peer = Peer(large.server, 10)
    peer.send(encode(Frame(Code.GET_TOPIC_STATS_INFO, 1, {"topic": "large"})))
    monkeypatch.undo()
    await large.broker.turns.done()
    assert [frame.code for frame in peer.received()] == [0]
    peer.hang_up()


async def test_an_answer_that_no_client_could_read_is_refused(
    large: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.protocol.bodies.MAX_TABLE_BYTES", 50_000)
    answer = await wire.call(Code.GET_TOPIC_STATS_INFO, {"topic": "large"})
    assert (answer.code, "request less" in (answer.remark or "")) == (1, True)


def test_a_registration_of_very_many_topics_is_taken_in_pieces() -> None:
    topics = [TopicConfig(f"t{number}") for number in range(5000)]
    assert pieces(decode_registration(encode_registration(DataVersion(1), topics))) > 20
    routes = Routes()
    assert pieces(routes.registering("c", "b", 0, "10.0.0.1:1", DataVersion(1), topics, None)) > 5000 // SLICE
    assert pieces(routes.set_write("b", allowed=False)) > 5000 // SLICE


def test_a_list_of_very_many_topics_is_made_in_pieces() -> None:
    routes = Routes()
    for name in "ab":
        topics = [TopicConfig(f"{name}{number}") for number in range(5000)]
        finish(routes.registering("c", name, 0, f"10.0.0.1:{ord(name)}", DataVersion(1), topics, None))
    assert pieces(routes.topics()) > 2 * (5000 // LOOKS)
    found = finish(routes.topics())
    assert len(found) == 10_000
    assert pieces(encode_topic_list(found)) > 10_000 // SLICE
    assert decode_topic_list(finish(encode_topic_list(found))) == found


def test_a_large_answer_is_put_together_in_a_piece_of_its_own() -> None:
    assert pieces(joined([b"x"] * SLICE)) == 2
    assert pieces(joined([b"x"] * (3 * SLICE))) == 3 + 2
    assert finish(joined([b"x"] * (SLICE + 1))) == b",".join([b"x"] * (SLICE + 1))
    assert finish(joined([])) == b""


async def test_what_is_built_in_is_found_in_pieces(large: Node) -> None:
    handler = BROKER_REQUESTS[Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER][0]
    work = handler(large.broker, Peer(large.server, 1).connection, Frame(Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))
    assert isinstance(work, Generator)
    assert pieces(work) > 1000 // SLICE


async def test_the_members_of_a_large_group_are_listed_in_pieces(node: Node) -> None:
    peers = members_of(node, 300)
    await node.broker.turns.done()
    frame = Frame(Code.GET_CONSUMER_CONNECTION_LIST, ext={"consumerGroup": "g"})
    work = BROKER_REQUESTS[Code.GET_CONSUMER_CONNECTION_LIST][0](node.broker, peers[0].connection, frame)
    assert isinstance(work, Generator)
    assert pieces(work) > 300 // SLICE
    for peer in peers:
        peer.hang_up()


async def test_the_members_of_a_large_group_are_notified_in_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    put(node, "t")
    peers = members_of(node, count := 300)
    await node.broker.turns.done()
    (group,), done = node.broker.groups, Counter[str]()

    def do(work: Work[Any], address: str = "") -> None:
        done[cast("GeneratorType[None, None, object]", work).gi_code.co_qualname] += pieces(work)

    monkeypatch.setattr(node.broker.turns, "do", do)
    monkeypatch.setattr(node.broker.turns, "do_some", lambda work, pieces=0: do(work))
    node.broker.notifications.topic_changed(TopicConfig("t", 8, 8))
    node.broker.notifications.notify(group, list(group.members))
    peers[0].hang_up()
    await eventually(lambda: done["Draining._starting_drain"] > 0)
    assert group.drain is not None, "its members are notified in pieces"
    group.drain.kept = dict.fromkeys(cast("Any", range(2 * LOOKS)))  # members that have left
    node.broker.draining.lists.notify_released(group, group.drain)
    node.clock.advance(1)
    assert done["Notifications._notifying_of_topic"] > count // WRITES
    assert done["Notifications._notifying_these"] > (count - SLICE) // WRITES
    assert done["Notifications._notifying"] > (count - 1) // WRITES
    assert done["Draining._starting_drain"] > 2 * (count // SLICE)
    assert done["ForeignMemberLists._notifying_kept"] > 2
    for peer in peers[1:]:
        peer.hang_up()


def members_of(node: Node, count: int) -> list[Peer]:
    peers = [Peer(node.server, 100 + number) for number in range(count)]
    for number, peer in enumerate(peers):
        peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, heartbeat_of(f"c{number}"))))
    return peers


@pytest.mark.parametrize("left_after", [0, 1, None])
async def test_very_many_queues_are_locked_and_unlocked_in_pieces(node: Node, left_after: int | None) -> None:
    broker, count = node.broker, 3 * SLICE
    put(node, "t")
    broker.topics.put(TopicConfig("t", count, count), 0)
    (peer,) = members_of(node, 1)
    items = [{"topic": "t", "brokerName": "broker-a", "queueId": number} for number in range(count)]
    body = orjson.dumps({"clientId": "c0", "consumerGroup": "g", "mqSet": items})
    work = BROKER_REQUESTS[Code.LOCK_BATCH_MQ][0](broker, peer.connection, Frame(Code.LOCK_BATCH_MQ, body=body))
    assert isinstance(work, Generator)
    if left_after is not None:
        for _ in range(left_after):
            next(work)
        peer.hang_up()
        await broker.turns.done()
        assert (list(work), len(broker.locks)) == ([], left_after * SLICE), "a client that is gone gets no more queues"
        return
    next(work)
    assert len(broker.locks) == SLICE
    broker.locks.refused += 1  # to another client, meanwhile
    locking, responses = work, list[object]()

    def responding() -> Work[None]:
        responses.append((yield from locking))

    assert (len(list(responding())), len(broker.locks)) == (2, count)
    assert "no more locks" not in str(responses)
    work = BROKER_REQUESTS[Code.UNLOCK_BATCH_MQ][0](broker, peer.connection, Frame(Code.UNLOCK_BATCH_MQ, body=body))
    assert isinstance(work, Generator)
    next(work)
    assert len(broker.locks) == count - SLICE
    assert (len(list(work)), len(broker.locks)) == (2, 0)
    peer.hang_up()


# Checks everything, each second or so


async def test_each_sweep_is_done_in_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, count = node.broker, 300
    for module in ("groups.leases", "groups.group", "groups.offsets"):
        monkeypatch.setattr(f"rocketlet.broker.{module}.LOOKS", SLICE)
    put(node, "t")
    peers = members_of(node, count)
    await broker.turns.done()
    queues = tuple(Queue("t", "broker-a", number) for number in range(count))
    broker.topics.put(TopicConfig("t", count, count), 0)
    broker.locks.lock(LockRequest("c1", "other", queues, False), peers[0].connection)
    least = count // SLICE
    assert pieces(broker.locks.expiring()) > least
    assert sum(1 for silent in broker.groups.expired() if silent is None) >= least
    assert pieces(broker.watch.reporting_orphans()) > least
    for peer in peers:
        node.server.memory.note_change(peer.connection)
    assert pieces(node.server.memory.sweeping()) > least
    for peer in peers:
        peer.hang_up()


async def test_queues_of_a_closed_connection_are_freed_in_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, count = node.broker, 300
    put(node, "t")
    (peer,) = members_of(node, 1)
    await broker.turns.done()
    broker.topics.put(TopicConfig("t", count, count), 0)
    queues = tuple(Queue("t", "broker-a", number) for number in range(count))
    group = broker.groups.obtain("other")
    assert len(broker.locks.lock(LockRequest("c0", "other", queues, handover=True), peer.connection)) == count
    for queue in queues:
        broker.locks.record_pull(peer.connection, group, (queue.topic, queue.queue_id))
    monkeypatch.setattr(broker.turns, "turn_s", -1)
    broker.locks.connection_gone(peer.connection)
    assert len(broker.locks) == count - broker.limits.affected_at_once
    assert sum(queue.reader is not None for queue in group.queues.values()) == count - broker.limits.affected_at_once
    monkeypatch.undo()
    await broker.turns.done()
    assert (len(broker.locks), len(group.queues)) == (0, 0)
    peer.hang_up()


async def test_groups_without_members_are_watched_in_pieces(node: Node) -> None:
    for number in range(2 * LOOKS):
        node.broker.groups.obtain(f"g{number}")
    assert pieces(node.broker.watch.reporting_orphans()) > 2


@pytest.mark.limits(watched_per_s=SLICE)
async def test_a_scan_of_very_many_queues_is_followed_by_a_pause(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketlet.broker.groups.offsets.LOOKS", SLICE)
    put(node, "t")
    peers = members_of(node, 1)
    await node.broker.turns.done()
    broker, clock = node.broker, MovableClock(stands=True)
    queues = {"t": 10 * SLICE}
    runtime = Runtime(clock, broker.limits)
    watch = Watch(runtime, broker.groups, broker.history, Counts(lambda topic: queues.get(topic, 0)))
    assert pieces(watch.reporting_orphans()) > 10
    clock.advance(9.9)
    assert pieces(watch.reporting_orphans()) == 1
    clock.advance(0.2)
    assert pieces(watch.reporting_orphans()) > 1
    peers[0].hang_up()


async def test_a_sweep_does_not_begin_again_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    turns = Turns()
    monkeypatch.setattr(turns, "turn_s", -1)

    def sweep() -> Work[None]:
        begun.append("sweep")
        yield
        yield

    for _ in range(3):
        turns.do_alone("sweep", sweep)
    assert begun == ["sweep"], "the first piece of one is done immediately"
    monkeypatch.undo()
    await turns.done()
    turns.do_alone("sweep", sweep)
    assert begun == ["sweep"] * 2
    await turns.done()


class CountedName(str):
    """The name of a topic, which counts how often some name is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        type(self).lookups += 1
        return super().__hash__()


def test_the_registration_of_one_topic_reads_no_other_topics() -> None:
    routes, connection = Routes(), cast("Any", BrokerSession())

    def register(version: int, *names: str) -> None:
        topics = [TopicConfig(name, 8, 8) for name in names]
        finish(routes.registering("c", "b", 0, "10.0.0.1:1", DataVersion(version, version), topics, connection))

    register(1, *(CountedName(f"topic-{number}") for number in range(100)))
    CountedName.lookups = 0
    register(2, "another")
    assert CountedName.lookups == 0
    route = routes.route("another")
    assert route is not None
    assert routes.route("topic-99") is not None


def test_the_routes_of_a_broker_that_leaves_are_freed_in_pieces() -> None:
    routes, connection = Routes(), cast("Any", BrokerSession())
    topics = [TopicConfig(f"topic-{number}", 8, 8) for number in range(5000)]
    finish(routes.registering("c", "b", 0, "10.0.0.1:1", DataVersion(1, 1), topics, connection))
    routes.unregister("b", "10.0.0.1:1")
    assert (routes.route("topic-0"), routes.has_gone) == (None, True)
    assert pieces(routes.freeing()) > 5000 // LOOKS
    assert not routes.has_gone


async def test_what_checks_all_queues_does_so_in_pieces(large: Node) -> None:
    broker = large.broker
    for number in range(MAX_QUEUES_PER_TOPIC):
        broker.store.queue("large", number)
    broker.statistics.got.update({f"t{number}@g": 1 for number in range(5000)})
    least = MAX_QUEUES_PER_TOPIC // LOOKS + 5000 // LOOKS
    assert pieces(broker.statistics.totals()) > least
    assert pieces(broker.statistics.sampling()) > least
    assert pieces(broker.statistics.all_rates(60)) > least
    peer = Peer(large.server, 3001)
    handler, _ = BROKER_REQUESTS[Code.GET_BROKER_RUNTIME_INFO]
    reply = handler(broker, peer.connection, Frame(Code.GET_BROKER_RUNTIME_INFO, 1))
    assert isinstance(reply, Generator)
    assert pieces(reply) > least
    peer.hang_up()


async def test_large_requests_of_many_clients_have_their_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = [{"topic": f"topic-{number}-{'x' * 60}", "subString": "*"} for number in range(1000)]
    body = orjson.dumps({"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": topics}]})
    next_one = encode(Frame(Code.GET_MAX_OFFSET, 2, {"topic": "t", "queueId": "0"}))
    monkeypatch.setattr(node.broker.turns, "turn_s", -1)  # no time is left in this one
    peers = [Peer(node.server, 3000 + number) for number in range(4)]
    for peer in peers:
        peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, body)) + next_one)
    assert node.broker.groups.get("g") is None
    peers[3].hang_up()
    monkeypatch.undo()
    await node.broker.turns.done()
    group = node.broker.groups.obtain("g")
    assert len(group.members) == 3, "one that is gone is no member"
    for peer in peers[:3]:
        assert [frame.opaque for frame in peer.received() if frame.is_response] == [1, 2]
    charged = [peer.connection.charged_bytes for peer in peers[:3]]
    for peer in peers[:3]:
        peer.send(encode(Frame(Code.HEART_BEAT, 3, {}, body)))
    await node.broker.turns.done()
    assert [peer.connection.charged_bytes for peer in peers[:3]] == charged, "a body counts until it is answered"
    for peer in peers[:3]:
        peer.hang_up()
    await node.broker.turns.done()


@pytest.mark.still
async def test_half_messages_are_asked_for_one_by_one(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(20):
        await half(wire)
    node.broker.transactions.stop()
    node.clock.advance(6)
    assert pieces(node.broker.transactions.checking()) == 21


def test_a_broker_that_leaves_is_found_without_a_check_of_the_others() -> None:
    steps: list[int] = []
    for count in (20, 200):
        routes = Routes()
        connections: list[Any] = [BrokerSession() for _ in range(count)]
        for number, connection in enumerate(connections):
            finish(
                routes.registering(
                    "c", f"b{number}", 0, f"10.0.0.{number}:1", DataVersion(1), [TopicConfig("t")], connection
                )
            )
        meter = Meter()
        meter.start(counts=True)
        routes.drop(connections[7])
        meter.stop()
        steps.append(meter.steps)
        assert [broker.name for broker in routes.brokers()] == [f"b{number}" for number in range(count) if number != 7]
    assert steps[0] == steps[1]


def test_the_topics_of_all_brokers_together_are_limited() -> None:
    routes, sessions = Routes(limits=Limits(max_routes=3)), {name: BrokerSession(f"10.0.0.{name}") for name in "ab"}

    def register(name: str, version: int, *topics: str) -> None:
        session: Any = sessions[name]
        address = f"{session.address}:1"
        finish(routes.registering("c", name, 0, address, DataVersion(version), list(map(TopicConfig, topics)), session))

    register("a", 1, "t", "u")
    register("b", 1, "t")
    with pytest.raises(Exception, match="the name server has 3 topics, and the broker b adds 1; maximum 3"):
        register("b", 2, "u")
    routes.unregister("a", "10.0.0.a:1")
    register("b", 3, "u")


@pytest.mark.limits(checked_at_once=10)
async def test_a_large_group_whose_members_all_leave_is_checked_once_for_many(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node, "t")
    peers = [Peer(node.server, 100 + number) for number in range(300)]
    for number, peer in enumerate(peers):
        peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, heartbeat_of(f"c{number}"))))
    await node.broker.turns.done()
    looked = 0

    def counted(members: list[Any], *arguments: Any) -> Any:
        nonlocal looked
        looked += len(members)
        return finding_faults(members, *arguments)

    monkeypatch.setattr("rocketlet.broker.groups.group.finding_faults", counted)
    for peer in peers:
        peer.hang_up()
    await node.broker.turns.done()
    assert node.broker.groups.online("g") is None
    assert looked < 300 * 300 / 10, "not all members for each one that leaves"


async def test_a_message_for_very_many_held_pulls_is_handed_out_in_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node, "t")
    peers = [Peer(node.server, 100 + number) for number in range(100)]
    for peer in peers:
        peer.send(encode(Frame(Code.PULL_MESSAGE, 1, {key: str(item) for key, item in pull(flags=6).items()})))
    for _ in range(3):  # a turn that has begun has its time still
        await asyncio.sleep(0)
    monkeypatch.setattr(node.broker.turns, "turn_s", -1)
    ext = {"a": "p", "b": "t", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0", "i": ""}
    Peer(node.server, 9).send(encode(Frame(Code.SEND_MESSAGE_V2, 1, ext, b"x")))
    answered = sum(bool(peer.socket.written) for peer in peers)
    assert answered == node.broker.limits.affected_at_once, "who sent does not wait for all who get it"
    monkeypatch.undo()
    await node.broker.turns.done()
    assert all(peer.received()[0].code == 0 for peer in peers)
    for peer in peers:
        peer.hang_up()


async def test_pulls_that_waited_for_their_reader_are_answered_in_turns(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads again may have left very many unread."""
    await create_topic(wire, "t")
    (connection,) = node.server.connections
    now_s = iter(range(10_000))
    monkeypatch.setattr("rocketlet.broker.remoting.connection.time.perf_counter", lambda: next(now_s))
    monkeypatch.setattr("rocketlet.broker.remoting.connection.PIECE_S", 4)
    answered: list[int] = []
    connection.pause_writing()
    for number in range(20):
        connection.when_read(partial(answered.append, number))
    connection.resume_writing()
    assert 0 < len(answered) < 20
    await asyncio.sleep(0)
    assert len(answered) < 20
    await eventually(lambda: len(answered) == 20)
    assert answered == sorted(answered)
    assert (await wire.call(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})).code == 0, "and it is read from again"


async def test_calls_that_wait_are_made_one_a_turn_in_order() -> None:
    behind, made = OnePerIteration(), list[int]()

    def again() -> None:
        made.append(0)
        behind.call(lambda: made.append(2))

    behind.call(again)
    behind.call(lambda: made.append(1))
    assert made == []
    for expected in ([0], [0, 1], [0, 1, 2], [0, 1, 2]):
        await asyncio.sleep(0)
        assert made == expected


async def test_a_call_that_fails_does_not_stop_those_behind_it() -> None:
    behind, made, faults = OnePerIteration(), list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    behind.call(lambda: made.append(1 // 0))
    behind.call(lambda: made.append(1))
    behind.call(lambda: made.append(2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert made == [1, 2]
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


# The clock that a broker reads and waits by: what is due when a test moves it, on a real broker without waiting.


async def advance(node: Node, wire: Wire, seconds: float) -> None:
    """In steps, and with a request after each, so that the connection is not idle."""
    while seconds > 0:
        node.clock.advance(min(seconds, IDLE_LIMIT_S / 2))
        seconds -= IDLE_LIMIT_S / 2
        await wire.call(RequestCode.GET_BROKER_CONFIG)


def test_what_is_due_runs_in_order_each_at_its_time() -> None:
    clock = MovableClock(stands=True)
    began_s = clock.monotonic_s()
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.monotonic_s() - began_s))

    def again() -> None:
        note("again")
        clock.call_later(2, note, "made due")

    clock.call_later(3, note, "three")
    clock.call_later(1, again)
    clock.call_later(1, note, "one")
    clock.call_later(2, note, "cancelled").cancel()
    clock.advance(2.5)
    assert [name for name, _ in seen] == ["again", "one"]
    clock.advance(7.5)
    assert seen == [("again", 1), ("one", 1), ("three", 3), ("made due", 3)]
    assert clock.monotonic_s() - began_s == 10


async def test_a_timer_that_fails_does_not_stop_the_others() -> None:
    clock = MovableClock(stands=True)
    seen: list[str] = []
    clock.call_later(1, lambda: 1 // 0)
    clock.call_later(1, seen.append, "second")

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
    clock.advance(1)
    assert seen == ["second"]
    assert isinstance(faults[0], ZeroDivisionError)


async def test_a_clock_that_is_not_moved_continues_on_its_own() -> None:
    clock = MovableClock()
    seen: list[int] = []
    clock.call_later(0.001, seen.append, 1)
    await eventually(lambda: seen == [1])


@pytest.mark.still
async def test_every_delay_level_comes_when_the_clock_is_moved(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    queue = node.broker.store.queue("t", 0)
    for level, delay_ms in enumerate(DELAY_LEVELS_MS, 1):
        before, due_s = queue.next, node.clock.monotonic_s() + delay_ms / 1000
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i=f"DELAY\x01{level}"), b"%d" % level)
        await advance(node, wire, delay_ms / 1000 - 0.5)
        is_there = queue.next != before
        assert not is_there or node.clock.monotonic_s() >= due_s, (
            "not before its time; the machine may have stood meanwhile"
        )
        node.clock.advance(0.6)
        assert queue.next == before + 1
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=0, max_msg_nums=32))
    records = list(decode_records(answer.body))
    assert [record.body for record in records] == [b"%d" % level for level in range(1, 19)]
    assert records[-1].store_ms - records[0].store_ms > 3 * 3_600_000, "messages are stamped by the same clock"


async def test_a_held_pull_is_answered_when_its_time_is_over(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    asked = wire.send(RequestCode.PULL_MESSAGE, pull(flags=6))
    await eventually(lambda: node.broker.held_pulls.count > 0)
    node.clock.advance(MAX_HOLD_S)
    assert (await wire.answer(asked)).code == ResponseCode.PULL_NOT_FOUND


async def test_segments_expire_when_the_clock_is_moved(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(retain_hours=2, segment_bytes=1000)
    wire = await connect(node.address)
    store = node.broker.store
    await create_topic(wire, "t", 1)
    for _ in range(5):
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"x" * 1000)
    node.clock.advance(3600)
    assert store.begin == 0
    node.clock.advance(3601 + RETENTION_SWEEP_S)
    await eventually(lambda: store.begin > 0)


class TurnedClock(MovableClock):
    """The machine's clock was ahead by this much until somebody set it right."""

    back_s = 0.0

    def time_s(self) -> float:
        return super().time_s() - self.back_s


async def test_what_was_stored_by_a_clock_that_was_ahead_waits_no_longer_than_its_level(
    nodes: Nodes, connect: Connect
) -> None:
    """All retries of a level stand in one line: a first message that is due tomorrow would hold up those of all groups."""
    clock = TurnedClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for seconds in (0, 0.4, 40):
        clock.advance(seconds)
        await send(wire, properties="DELAY\x012")  # 5 s
    clock.back_s = 86_400.0
    await send(wire, properties="DELAY\x012")
    with capture_logs() as logs:
        clock.advance(5)
        assert len(await bodies_of(wire)) == 2, "what came before the clock was set back"
        clock.advance(5)
    assert len(await bodies_of(wire)) == 4
    assert [(log["level"], log["ahead_s"]) for log in logs if log["event"] == "clock_set_back"] == [(2, 86_395.0)]


async def test_an_outcome_is_asked_for_also_if_the_clock_was_set_back(nodes: Nodes, connect: Connect) -> None:
    clock = TurnedClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    body = bodies.encode_heartbeat(Heartbeat("c1", producer_groups=("p",)))
    await wire.call(RequestCode.HEART_BEAT, body=body)
    await half(wire)
    clock.back_s = 86_400.0
    await advance(node, wire, 2 * TRANSACTION_CHECK_INTERVAL_S)
    await wire.request(RequestCode.CHECK_TRANSACTION_STATE)


# A broker's background tasks end with it.


async def test_what_has_not_begun_when_the_broker_stops_is_closed() -> None:
    """Else Python says of each that it was never awaited."""

    async def answered() -> None: ...

    tasks, work = Tasks(MovableClock()), answered()
    tasks.spawn(work)
    await tasks.stop()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


# The collector of circular garbage does not scan everything while a server runs, and need not: there is none.


SOME_MB = 100 * 1024 * 1024


class Circle:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are collected; the rest of the process' objects are set aside, so that they cost nothing."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.freeze()
    gc.collect()  # how many objects there were counts for when all are scanned the next time
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()


async def test_what_stays_is_not_scanned_again(collections: list[int]) -> None:
    async with Garbage(MovableClock(stands=True)):
        kept = [[number] for number in range(200_000)]
    assert (0 in collections, 2 in collections) == (True, False)
    collections.clear()
    kept += [[number] for number in range(200_000)]
    assert 2 in collections, "without it, all is scanned"


async def test_a_circle_among_what_stays_is_found_when_memory_has_doubled(collections: list[int]) -> None:
    used_bytes = SOME_MB
    clock = MovableClock(stands=True)
    async with Garbage(clock, lambda: used_bytes):
        circle: Circle | None = Circle()
        is_there = weakref.ref(circle)
        clock.advance(GARBAGE_SWEEP_S)
        circle = None
        clock.advance(GARBAGE_SWEEP_S)
        assert (is_there() is None, 2 in collections) == (False, False)
        used_bytes = 2 * SOME_MB
        clock.advance(GARBAGE_SWEEP_S)
        assert is_there() is not None, "small growth is none"
        used_bytes = 4 * SOME_MB
        clock.advance(GARBAGE_SWEEP_S)
        assert is_there() is None
        collections.clear()
        clock.advance(GARBAGE_SWEEP_S)
        assert 2 not in collections, "it has to double again"


async def test_the_collector_is_left_as_it_was(collections: list[int]) -> None:
    before = gc.get_threshold()
    async with Garbage():
        assert gc.get_threshold() != before
    async with Garbage(memory_bytes=lambda: 0):
        assert gc.get_threshold() == before, "without knowing how much memory there is"
    assert gc.get_threshold() == before


# Circles that a server leaves


def _ask(code: int, ext: dict[str, Any] | None = None, body: bytes = b"") -> bytes:
    return encode(Frame(code, 1, {key: str(value) for key, value in (ext or {}).items()}, body))


LAST_WORDS = {
    "nothing": b"",
    "half a frame": _ask(Code.GET_BROKER_CLUSTER_INFO)[:-2],
    "no frame": bytes(8),
    "no TLS": b"\x16 this is no handshake",
    "half a handshake": b"\x16\x03\x01\x02",
    "member": _ask(Code.HEART_BEAT, body=heartbeat_of("c")),
    "long answer": _ask(Code.GET_ALL_TOPIC_CONFIG),
    "refused": _ask(Code.GET_TOPIC_STATS_INFO, {"topic": "missing"}),
    "held pull": _ask(Code.HEART_BEAT, body=heartbeat_of("c")) + _ask(Code.PULL_MESSAGE, pull(flags=6)),
}


def _circles() -> list[str]:
    """The types of ours, and of the sockets, that are garbage in a circle."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted({type(item).__qualname__ for item in gc.garbage if _is_of_server(item)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _is_of_server(item: object) -> bool:
    kind = type(item)
    return kind.__module__.startswith("rocketlet.broker") or kind.__name__ == "TCPTransport"


@pytest.fixture
async def taken(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, Certificates]:
    certificates = Certificates.make(tmp_path_factory.mktemp("certificates"))
    return await nodes.start(tls=Tls("permissive", certificates.files)), certificates


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
async def test_clients_leave_no_circles_behind(
    taken: tuple[Node, Certificates], uncollected: None, resets: bool
) -> None:
    node, certificates = taken
    for words in LAST_WORDS.values():
        await _come_and_go(node, None, words, resets)
        if words[:1] != b"\x16":
            await _come_and_go(node, certificates.client_context(), words, resets)
    assert _circles() == []


async def _come_and_go(node: Node, context: ssl.SSLContext | None, words: bytes, resets: bool) -> None:
    """A client that sends this much, and hangs up when it has an answer or is closed, or immediately if none comes."""
    host, _, port = node.address.rpartition(":")
    is_answered = len(words) > 8 and words[0] == 0 and words != LAST_WORDS["half a frame"]

    def talk() -> None:
        with socket.create_connection((host, int(port))) as plain:
            if resets:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection = context.wrap_socket(plain, server_hostname=host) if context else plain
            with connection, suppress(OSError):
                connection.sendall(words)
                if is_answered:
                    connection.recv(65_536)

    await asyncio.to_thread(talk)
    await eventually(lambda: not node.server.connections)
    await node.broker.turns.done()
    await asyncio.sleep(0)


# Timeouts that are due together


class Waiting:
    """Waits for its timeout, as a held pull does."""

    def __init__(self, timeouts: Timeouts, delay_s: float) -> None:
        self.timer = timeouts.call_later(delay_s, self.end)

    def end(self) -> None: ...


def test_timeout_that_is_called_or_cancelled_leaves_no_circle(uncollected: None) -> None:
    clock = MovableClock(stands=True)
    turns = Turns(call_soon=lambda action, *arguments: action(*arguments))
    timeouts = Timeouts(clock, turns)
    called, cancelled = Waiting(timeouts, 1.0), Waiting(timeouts, 2.0)
    references = weakref.ref(called), weakref.ref(cancelled)
    cancelled.timer.cancel()
    del called, cancelled
    assert [reference() is None for reference in references] == [False, True]
    clock.advance(1.1)
    assert [reference() is None for reference in references] == [True, True]


def test_one_timer_is_for_all_timeouts_that_are_due_together() -> None:
    timers: list[float] = []

    class Clock(MovableClock):
        def call_later(self, delay_s: float, action: Callable[..., object], *arguments: Any) -> Timer:
            timers.append(delay_s)
            return super().call_later(delay_s, action, *arguments)

        def call_soon(self, action: Callable[..., object], *arguments: Any) -> None:
            soon.append(action)

    soon: list[Callable[..., object]] = []
    clock = Clock(stands=True)
    turns = Turns(turn_s=-1, call_soon=clock.call_soon)
    timeouts, called = Timeouts(clock, turns), list[int]()

    def fail() -> None:
        raise ValueError("one that fails")

    made = [timeouts.call_later(30 + number % 3 / 1000, partial(called.append, number)) for number in range(1000)]
    failing = timeouts.call_later(30, fail)
    assert len(timers) <= 2
    for timer in made[1::2]:
        timer.cancel()
    clock.advance(29.9)
    assert (called, soon) == ([], [])
    clock.advance(0.12)
    assert called == [], "they are called in turns"
    made[0].cancel()
    turns.turn_s = 1
    with capture_logs() as logs:
        while soon:
            soon.pop()()
    assert sorted(called) == list(range(2, 1000, 2))
    assert [entry["event"] for entry in logs] == ["work_failed"]
    failing.cancel()
    timeouts.call_later(-1, partial(called.append, -1))
    clock.advance(0)
    while soon:
        soon.pop()()
    assert called[-1] == -1
