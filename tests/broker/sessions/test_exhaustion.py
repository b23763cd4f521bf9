"""Every limit that clients could use up: what is beyond is refused with a reason, and honest clients continue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import IDLE_LIMIT_S, LARGE_HOLDING_BYTES, SWEEP_INTERVAL_S, Limits
from rocketlet.broker.machine import default_budget
from rocketlet.broker.memory import Memory
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.sessions.shares import AddressShares
from rocketlet.protocol.bodies import TopicConfig, finish
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, encode

from bench.steps import Meter

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.peers import Peer
from ...support.requests import pull, send

MIB = 1 << 20


async def half_frame(wire: Wire, size: int) -> None:
    """Sends the beginning of a frame of 16 MiB."""
    wire.write((16 * MIB - 4).to_bytes(4, "big") + bytes(4) + bytes(size - 8))
    await wire._writer.drain()


async def test_half_frames_of_many_clients_stay_within_the_budget_and_the_silent_ones_go_first(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start(memory_bytes=24 * MIB)
    honest = await connect(node.address)
    await create_topic(honest, "t")
    memory = node.server.memory
    hostile = []
    for number in range(6):
        hostile.append(await connect(node.address))
        await half_frame(hostile[-1], 8 * MIB)
        held = min(number + 1, 3) * 8 * MIB
        await eventually(lambda held=held: held - MIB < memory.used_bytes <= held or memory.closed >= 3)  # type: ignore[misc]
    await eventually(lambda: memory.closed == 3)
    for wire in hostile[:3]:
        with pytest.raises((ConnectionError, AssertionError)):
            assert not await wire.closed()
    assert (await send(honest)).code == 0
    assert memory.used_bytes <= 24 * MIB


async def test_answers_that_nobody_reads_stay_within_the_budget(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(memory_bytes=64 * MIB)
    honest = await connect(node.address)
    await create_topic(honest, "t")
    for _ in range(2):
        await send(honest, b"x" * 200_000)
    for _ in range(40):
        greedy = await connect(node.address)
        greedy._writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(60):  # 12 MB
            greedy.send(RequestCode.PULL_MESSAGE, pull("t", max_msg_nums=1))
        await greedy._writer.drain()
    memory = node.server.memory
    await eventually(lambda: memory.closed > 0)
    assert memory.used_bytes <= 64 * MIB
    assert (await send(honest)).code == 0


async def test_held_pulls_of_a_client_that_does_not_read_are_answered_when_it_reads(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await create_topic(wire, "t", 64)
    lazy = await connect(node.address)
    asked = [lazy.send(RequestCode.PULL_MESSAGE, pull("t", queue=queue, flags=6)) for queue in range(64)]
    await eventually(lambda: any(connection.held_pulls == 64 for connection in node.server.connections))
    (connection,) = [connection for connection in node.server.connections if connection.held_pulls == 64]
    lazy._writer.transport.pause_reading()  # type: ignore[attr-defined]
    for queue in range(64):
        await send(wire, b"x" * 250_000, queue=queue)
    await eventually(lambda: connection.held_pulls == 0)
    assert connection.unsent_bytes < 5 * MIB, "the others wait as requests, not as answers"
    lazy._writer.transport.resume_reading()  # type: ignore[attr-defined]
    for opaque in asked:
        assert len((await lazy.answer(opaque)).body) > 250_000


async def test_very_many_that_hold_a_little_lose_their_connections_and_others_are_served(
    nodes: Nodes, connect: Connect
) -> None:
    """With 1,200 connections of 60,000 bytes each, open connections were refused everything, and new ones reset, for ever."""
    node = await nodes.start(memory_bytes=8 * LARGE_HOLDING_BYTES)
    honest = await connect(node.address)
    await create_topic(honest, "t")
    for _ in range(30):
        await half_frame(await connect(node.address), LARGE_HOLDING_BYTES - 1000)
    await eventually(lambda: node.server.memory.closed >= 22)
    assert (await send(honest)).code == 0
    assert (await send(await connect(node.address))).code == 0
    assert node.server.memory.used_bytes <= 8 * LARGE_HOLDING_BYTES


def test_the_default_budget_is_a_share_of_the_machine_or_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = default_budget()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("rocketlet.broker.machine._CGROUP_LIMITS", (str(limit), str(tmp_path / "none")))
    limit.write_text("536870912\n")
    assert default_budget() == 128 * MIB
    limit.write_text("1048576\n")
    assert default_budget() == 64 * MIB, "with less nothing works"
    limit.write_text("max\n")
    assert default_budget() >= machine


class Holding:
    def __init__(self, held: int, heard_s: float, address: str = "10.0.0.1") -> None:
        self.held, self.heard_s, self.counted_bytes, self.is_aborted = held, heard_s, 0, False
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    def held_bytes(self) -> int:
        return 0 if self.is_aborted else self.held

    def is_changing(self) -> bool:
        return False

    def is_news(self, event: str) -> bool:
        return True

    def abort(self) -> None:
        self.is_aborted = True


def closed_of(memory: Memory, holders: Sequence[Holding]) -> list[int]:
    for holder in holders:
        memory.count(holder)
    assert memory.used_bytes <= memory.budget_bytes
    assert memory.closed == sum(holder.is_aborted for holder in holders)
    return [index for index, holder in enumerate(holders) if holder.is_aborted]


def test_who_was_silent_for_longest_is_closed_first_and_only_as_many_as_needed() -> None:
    holders = [Holding(100_000, heard_s) for heard_s in (3.0, 1.0, 2.0)] + [Holding(1000, 0.0)]
    memory = Memory(250_000)
    assert closed_of(memory, holders) == [1]
    assert memory.used_bytes == 201_000


def test_the_address_that_holds_most_is_closed_first_however_little_each_of_its_connections_holds() -> None:
    honest = [Holding(100_000, 1.0, "10.0.0.2"), Holding(5000, 1.0, "10.0.0.3")]
    closed = closed_of(Memory(400_000), [*honest, *(Holding(10_000, 9.0) for _ in range(40))])
    assert len(closed) >= 11
    assert min(closed) >= len(honest)


def test_addresses_are_closed_down_to_equal_shares() -> None:
    greedy = [Holding(70_000, 1.0) for _ in range(6)]
    others = [Holding(70_000, 0.0, "10.0.0.2") for _ in range(4)]
    closed = closed_of(Memory(500_000), [*greedy, *others])
    assert len(closed) == 3
    assert max(closed) < len(greedy), "420,000 and 280,000 bytes"


def test_of_connections_that_hold_little_the_largest_are_closed_and_some_more_than_needed() -> None:
    holders = [Holding(1000 + number, 1.0) for number in range(64)]
    memory = Memory(sum(holder.held for holder in holders) - 1)
    assert closed_of(memory, holders) == [62, 63]
    assert memory.used_bytes <= memory.budget_bytes * 31 // 32


async def test_a_sweep_checks_connections_that_did_something_and_no_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep comes every second: what it costs must not grow with the connections that are idle."""
    looks: list[RemotingConnection] = []
    held_bytes = RemotingConnection.held_bytes

    def counted(connection: RemotingConnection) -> int:
        looks.append(connection)
        return held_bytes(connection)

    monkeypatch.setattr(RemotingConnection, "held_bytes", counted)
    request = encode(Frame(RequestCode.GET_BROKER_RUNTIME_INFO, opaque=1))
    peers = [Peer(node.server, number) for number in range(200)]
    for peer in peers:
        peer.send(request)
    finish(node.server.memory.sweeping())
    finish(node.server.memory.sweeping())
    looks.clear()
    finish(node.server.memory.sweeping())
    assert looks == []
    peers[7].send(request)
    looks.clear()
    finish(node.server.memory.sweeping())
    assert looks == [peers[7].connection]
    for peer in peers:
        peer.hang_up()
    await node.broker.turns.done()
    assert node.server.memory.used_bytes == 0


async def test_one_address_has_half_of_the_connections_at_most_but_loopback_may_have_all(node: Node) -> None:
    node.server.max_connections = 8

    def peer(host: str) -> Peer:
        return Peer(node.server, 1, host)

    strangers = [peer("10.0.0.1") for _ in range(5)]
    assert [item.socket.is_closed for item in strangers] == [False] * 4 + [True]
    other = peer("10.0.0.2")
    assert not other.socket.is_closed
    strangers[0].hang_up()
    strangers[4].hang_up()
    again = peer("10.0.0.1")
    assert not again.socket.is_closed
    local = peer("127.0.0.1")
    assert not local.socket.is_closed
    for item in (*strangers[1:4], other, again, local):
        item.hang_up()
    assert not [item for item in [peer("10.0.0.1") for _ in range(4)] if item.socket.is_closed]


async def test_where_there_are_too_many_connections_the_address_with_most_gives_one_up(node: Node) -> None:
    node.server.max_connections = 6
    local = [Peer(node.server, 2000 + number) for number in range(6)]
    node.clock.advance(1)
    local[0].send(encode(Frame(RequestCode.GET_BROKER_RUNTIME_INFO, opaque=1)))
    others = [Peer(node.server, 1, "10.0.0.1"), Peer(node.server, 1, "10.0.0.2"), Peer(node.server, 2, "10.0.0.2")]
    assert [item.socket.is_closed for item in others] == [False] * 3
    assert [item.socket.is_closed for item in local] == [False, True, True, True, False, False]
    again = Peer(node.server, 3000)
    assert again.socket.is_closed, "its own address has most"
    for item in (*local, *others, again):
        item.hang_up()


async def test_offsets_of_queues_that_do_not_exist_are_refused(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t", 4)
    ext = {"consumerGroup": "g", "topic": "t", "queueId": 3, "commitOffset": 0}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == 0
    for odd in ({"queueId": 4}, {"queueId": -1}, {"queueId": 2**31}, {"topic": "nowhere"}):
        answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext | odd)
        assert (answer.code, "there is no queue" in (answer.remark or "")) == (1, True), odd
    assert list(node.broker.offsets.encoded()) == [b'"t@g":{"3":0}']


@pytest.mark.limits(max_offsets=5)
async def test_offsets_are_limited_at_their_edge(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t", 4)
    latest = {"consumerGroup": "g", "topic": "t", "queueId": 0, "unknown": "latest"}
    assert (await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, latest)).code == 0
    commit = {"consumerGroup": "h", "topic": "t", "queueId": 0, "commitOffset": 0}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0, "a known one is not another one"
    answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"queueId": 1})
    assert (answer.code, "keeps 5 offsets" in (answer.remark or "")) == (1, True)
    node.broker.offsets.group_deleted("g")
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"queueId": 1})).code == 0


@pytest.mark.limits(max_groups=2)
async def test_groups_without_settings_are_limited_when_clients_commit_for_them(wire: Wire, node: Node) -> None:
    """A group takes 1.7 KB for its first offset, seventeen times what `max_offsets` counts on."""
    await create_topic(wire, "t", 4)
    commit = {"consumerGroup": "g0", "topic": "t", "queueId": 0, "commitOffset": 0}
    for number in range(4):
        ext = commit | {"consumerGroup": f"g{number}"}
        assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == 0
    answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": "g4"})
    assert (answer.code, "offsets of 4 groups" in (answer.remark or "")) == (1, True)
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"queueId": 1})).code == 0, "a known group"
    node.broker.offsets.group_deleted("g0")
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": "g4"})).code == 0


async def test_groups_beyond_the_limit_of_offsets_are_kept_at_a_start(nodes: Nodes, connect: Connect) -> None:
    former = await nodes.start()
    wire = await connect(former.address)
    await create_topic(wire, "t", 4)
    commit = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 0}
    for number in range(4):
        assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": f"g{number}"})).code == 0
    await former.stop()
    node = await nodes.start(limits=Limits(max_groups=1))
    wire = await connect(node.address)
    assert sorted(node.broker.offsets.groups()) == ["g0", "g1", "g2", "g3"]
    for number in range(4):
        ext = commit | {"consumerGroup": f"g{number}", "queueId": 1}
        assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == 0, "a known group"
    answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert (answer.code, "offsets of 2 groups" in (answer.remark or "")) == (1, True)
    for number in range(3):
        node.broker.offsets.group_deleted(f"g{number}")
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0


@pytest.mark.parametrize("limit", ["max_topics", "max_groups"])
async def test_topics_and_groups_are_limited_at_their_edge(nodes: Nodes, connect: Connect, limit: str) -> None:
    former = await nodes.start()
    await create_topic(await connect(former.address), "t")
    count = len(list(former.broker.topics)) if limit == "max_topics" else 0
    await former.stop()
    wire = await connect((await nodes.start(limits=Limits(**{limit: count + 1}))).address)

    async def make(name: str) -> Any:
        if limit == "max_topics":
            return await send(wire, topic=name)
        body = orjson.dumps({"groupName": name})
        return await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)

    assert (await make("first")).code == 0
    assert (await make("first")).code == 0
    answer = await make("second")
    assert (
        answer.code,
        f"the broker has {count + 1} {limit.removeprefix('max_')}, which is the maximum" in (answer.remark or ""),
    ) == (1, True)
    assert (await send(wire)).code == 0


async def test_the_queues_of_all_topics_together_are_limited_at_their_edge(nodes: Nodes, connect: Connect) -> None:
    former = await nodes.start()
    await create_topic(await connect(former.address), "t", 4)
    queues = sum(max(topic.read_queues, topic.write_queues) for topic in former.broker.topics)
    await former.stop()
    wire = await connect((await nodes.start(limits=Limits(max_queues=queues + 5))).address)

    async def make(topic: str, read: int, write: int) -> tuple[int, bool]:
        ext = {"topic": topic, "readQueueNums": str(read), "writeQueueNums": str(write), "perm": "6"}
        answer = await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
        return answer.code, f"queues of all topics; maximum {queues + 5}" in (answer.remark or "")

    assert await make("u", 6, 1) == (1, True), "what counts is how many there are to read or to write"
    assert await make("u", 1, 5) == (0, False)
    assert await make("t", 5, 4) == (1, True), "a topic that grows is refused, too"
    assert await make("t", 4, 3) == (0, False), "one that shrinks is not"
    assert await make("t", 3, 3) == (0, False)
    assert await make("v", 1, 1) == (0, False)
    assert await make("w", 1, 1) == (1, True)
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "u"})).code == 0
    assert await make("w", 5, 5) == (0, False)
    assert await make("x", 1, 1) == (1, True)
    assert (await send(wire)).code == 0


@pytest.mark.parametrize("most", [0, 1])
async def test_what_is_answered_later_is_limited_at_its_edge(nodes: Nodes, connect: Connect, most: int) -> None:
    node = await nodes.start(limits=Limits(max_answering=most))
    node.broker.topics.put(TopicConfig("t", 4, 4), 0)
    wire = await connect(node.address)
    fields = {"topic": "t", "consumerGroup": "g", "clientId": "c", "strategyName": "AVG", "messageModel": "CLUSTERING"}
    asked = orjson.dumps(fields)
    answer = await wire.call(RequestCode.QUERY_ASSIGNMENT, body=asked)
    assert (answer.code, "being answered" in (answer.remark or "")) == ((0, False) if most else (1, True))


async def test_a_client_that_does_not_read_is_idle_and_closed(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t")
    for _ in range(2):
        await send(wire, b"x" * 200_000)
    greedy = await connect(node.address)
    greedy._writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(100):
        greedy.send(RequestCode.PULL_MESSAGE, pull("t", max_msg_nums=1))
    await eventually(lambda: any(connection.is_paused for connection in node.server.connections))
    (slow,) = [connection for connection in node.server.connections if connection.is_paused]
    before_s = slow.active_s
    slow.write([b"a notification"])
    assert slow.active_s == before_s, "what is written to it is no sign of life"
    node.clock.advance(IDLE_LIMIT_S + SWEEP_INTERVAL_S)
    await eventually(lambda: slow not in node.server.connections)


async def test_many_connections_with_held_pulls_close_in_linear_time(node: Node, wire: Wire) -> None:
    """The work is counted, not the time: with 10,000 it took 32 s."""
    await create_topic(wire, "t")
    held, steps = node.broker.held_pulls, list[int]()
    for count in (100, 400):
        peers = [Peer(node.server, 2000 + number) for number in range(count)]
        for peer in peers:
            peer.send(_encoded(pull(flags=6)))
        assert held.count == count
        meter = Meter()
        meter.start(counts=True)
        for peer in peers:
            peer.hang_up()
        await node.broker.turns.done()
        meter.stop()
        steps.append(meter.steps)
        assert held.count == 0
    assert steps[1] < 4.5 * steps[0], "no connection checks all others'"
    await asyncio.sleep(0)


def _encoded(ext: dict[str, Any]) -> bytes:
    from rocketlet.protocol.frame import Frame, encode

    return encode(Frame(RequestCode.PULL_MESSAGE, 1, ext))


@pytest.mark.limits(max_memberships=2)
async def test_memberships_of_a_connection_are_limited_at_their_edge(wire: Wire, connect: Connect, node: Node) -> None:

    async def join(who: Wire, *names: str) -> Any:
        body = orjson.dumps({"clientID": "c", "consumerDataSet": [{"groupName": name} for name in names]})
        return await who.call(RequestCode.HEART_BEAT, body=body)

    assert (await join(wire, "a", "b")).code == 0
    answer = await join(wire, "a", "b", "c")
    assert (answer.code, "2 groups at most" in (answer.remark or "")) == (1, True)
    assert [group.name for group in node.broker.groups if group.members] == ["a", "b"], "nobody joined the third one"
    assert (await join(await connect(node.address), "c")).code == 0


# What all clients have together, of which one address may not take all.


def test_one_address_has_half_and_the_machine_itself_may_have_all() -> None:
    shares = AddressShares(4)

    def take(address: str) -> bool:
        has_room = shares.has_room(address)
        if has_room:
            shares.acquire(address)
        return has_room

    assert [take("10.0.0.1") for _ in range(3)] == [True, True, False]
    assert [take("127.0.0.1") for _ in range(3)] == [True, True, False]
    shares.release("10.0.0.1")
    assert (shares.count, shares.has_room("10.0.0.1"), shares.has_room("::1")) == (3, True, True)


@pytest.mark.limits(max_held_pulls=4)
async def test_pulls_of_one_address_leave_others_theirs(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    greedy, other = Peer(node.server, 1, "10.0.0.1"), Peer(node.server, 1, "10.0.0.2")
    for peer in (greedy, greedy, greedy, other):
        peer.send(encode(Frame(RequestCode.PULL_MESSAGE, 1, pull(flags=6))))
    assert (greedy.connection.held_pulls, other.connection.held_pulls) == (2, 1)
    assert [frame.code for frame in greedy.received()] == [19], "the third is answered immediately"
    for peer in (greedy, other):
        peer.hang_up()
