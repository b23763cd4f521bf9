"""Long work is done in pieces: what is counted is the work between two turns, not the time that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import partial
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import MAX_QUEUES_PER_TOPIC, MOMENT_S, Limits
from rocketlet.broker.groups.members import finding_faults
from rocketlet.broker.groups.offsets import Watch
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.broker.runtime import Moment, MovableClock, OnePerIteration, Runtime, Turns
from rocketlet.protocol.bodies import (
    LOOKS,
    SLICE,
    DataVersion,
    GroupConfig,
    TopicConfig,
    Work,
    decode_registration,
    decode_topic_list,
    encode_registration,
    encode_topic_list,
    finish,
    joined,
)
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from campaigns.peers import Peer

from ...conftest import Node, Wire, create_topic, eventually
from ...support.locks import Counts
from ...support.requests import half, pull
from ...support.topics import put
from ...support.turns import heartbeat_of, pieces

PIECE = 4 * SLICE  # an honest client waits for that much at most


async def test_all_work_together_gets_a_turn_and_each_piece_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(10_000))
    monkeypatch.setattr("rocketlet.broker.runtime.time.perf_counter", lambda: next(now_s))
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
    moment.note("10.0.0.1", MOMENT_S * 0.6)
    assert (moment.is_over("10.0.0.1"), moment.is_over("10.0.0.2")) == (True, False)
    moment.note("10.0.0.2", MOMENT_S * 0.45)
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


def members_of(node: Node, count: int) -> list[Peer]:
    peers = [Peer(node.server, 100 + number) for number in range(count)]
    for number, peer in enumerate(peers):
        peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, heartbeat_of(f"c{number}"))))
    return peers


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
    assert pieces(broker.watch.looking()) > least
    for peer in peers:
        node.server.memory.mark(peer.connection)
    assert pieces(node.server.memory.sweeping()) > least
    for peer in peers:
        peer.hang_up()


@pytest.mark.limits(watched_per_s=SLICE)
async def test_a_scan_of_very_many_queues_is_followed_by_a_pause(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketlet.broker.groups.offsets.LOOKS", SLICE)
    put(node, "t")
    peers = members_of(node, 1)
    await node.broker.turns.done()
    broker, clock = node.broker, MovableClock(stands=True)
    queues = {"t": 10 * SLICE}
    runtime = Runtime(clock, broker.limits)
    watch = Watch(runtime, broker.groups, broker.locks, broker.history, Counts(lambda topic: queues.get(topic, 0)))
    assert pieces(watch.looking()) > 10
    clock.advance(9.9)
    assert pieces(watch.looking()) == 1
    clock.advance(0.2)
    assert pieces(watch.looking()) > 1
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


async def test_the_routes_of_a_broker_that_leaves_are_freed_in_pieces(node: Node) -> None:
    peer, routes = Peer(node.server, 3000), node.server._routes
    assert routes is not None
    topics = [TopicConfig(f"topic-{number}", 8, 8) for number in range(5000)]
    ext = {"brokerName": "b", "brokerAddr": "10.0.0.1:1", "clusterName": "c", "haServerAddr": "", "brokerId": "0"}
    peer.send(encode(Frame(Code.REGISTER_BROKER, 1, ext, encode_registration(DataVersion(1, 1), topics))))
    await node.broker.turns.done()
    (gone,) = [broker.topics for name, broker in routes._brokers.items() if name == "b"]
    routes.unregister("b", "10.0.0.1:1")
    assert pieces(routes.freeing()) > 5000 // LOOKS
    assert (gone, routes.has_gone) == ({}, False)
    peer.hang_up()


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
    group = node.broker.groups.get("g")
    assert group is not None
    assert len(group.members) == 3, "one that is gone is no member"
    for peer in peers[:3]:
        assert [frame.opaque for frame in peer.received() if frame.is_response] == [1, 2]
        assert peer.connection._answering_bytes == 0
        peer.hang_up()
    await node.broker.turns.done()


async def test_half_messages_are_asked_for_one_by_one(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t")
    for _ in range(20):
        await half(wire)
    assert pieces(node.broker.transactions.checking()) == 21


def test_a_broker_that_leaves_is_found_without_a_check_of_the_others() -> None:
    routes = Routes()
    connections: list[Any] = [object() for _ in range(50)]
    for number, connection in enumerate(connections):
        finish(
            routes.registering(
                "c", f"b{number}", 0, f"10.0.0.{number}:1", DataVersion(1), [TopicConfig("t")], connection
            )
        )

    class Untouched(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("all addresses were checked")

    routes._addresses = Untouched(routes._addresses)
    routes.drop(connections[7])
    assert [broker.name for broker in routes.brokers()] == [f"b{number}" for number in range(50) if number != 7]


def test_the_topics_of_all_brokers_together_are_limited() -> None:
    routes, stranger = Routes(limits=Limits(max_routes=3)), object()
    taken: Any = stranger
    finish(routes.registering("c", "a", 0, "10.0.0.1:1", DataVersion(1), [TopicConfig("t"), TopicConfig("u")], taken))
    finish(routes.registering("c", "b", 0, "10.0.0.2:1", DataVersion(1), [TopicConfig("t")], taken))
    with pytest.raises(Exception, match="has 3 topics of all"):
        finish(routes.registering("c", "b", 0, "10.0.0.2:1", DataVersion(2), [TopicConfig("u")], taken))
    routes.unregister("a", "10.0.0.1:1")
    finish(routes.registering("c", "b", 0, "10.0.0.2:1", DataVersion(3), [TopicConfig("u")], taken))


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
    assert not any(peer.socket.written for peer in peers), "who sent does not wait for all who get it"
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
