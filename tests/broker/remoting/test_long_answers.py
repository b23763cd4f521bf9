"""Requests that are answered later: one limit for all of them, and nothing is half done because of it."""

from __future__ import annotations

import asyncio
import gc

import pytest
from rocketlet.broker.config import (
    BATCH_RUN_BYTES,
    BATCH_RUN_MESSAGES,
    BATCH_TURN_MESSAGES,
    HELD_PULL_BYTES,
    PULL_BYTES,
    Limits,
)
from rocketlet.broker.remoting.messages import store_batch
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.fast import IS_COMPILED
from rocketlet.protocol.frame import JSON, ExtValue, Frame, encode
from rocketlet.protocol.headers import FIRST_ID, SendMessage
from rocketlet.protocol.message import ENTRY_BYTES, PIECE_MESSAGES, BatchEntry, encode_batch, split

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.peers import Peer
from ...support.requests import heartbeat, join, pull, send, send_v2, write_send_v2
from ...support.turns import give_no_turn, stop_time


async def test_long_requests_are_limited_with_flush_sync_too(nodes: Nodes) -> None:
    node = await nodes.start(flush="sync", limits=Limits(max_answering=0))
    peer = Peer(node.server, 1)
    peer.send(encode(Frame(Code.GET_ALL_TOPIC_CONFIG, 1)))
    (refused,) = peer.received()
    assert (refused.code, "retry later" in (refused.remark or "")) == (1, True)
    peer.hang_up()


async def test_a_topic_whose_deletion_is_refused_is_still_there(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    assert (await send(wire)).code == 0
    await node.stop()
    node = await nodes.start(limits=Limits(max_answering=0))
    wire = await connect(node.address)
    refused = await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    assert (refused.code, "retry later" in (refused.remark or "")) == (1, True)
    assert node.broker.topics.get("t") is not None
    await node.stop()
    node = await nodes.start()
    wire = await connect(node.address)
    assert (await wire.call(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})).ext["offset"] == "1"
    assert (await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert node.broker.topics.get("t") is None


async def test_an_answer_that_cannot_be_given_costs_nobody_elses(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync")
    assert node.broker.flusher is not None
    wire = await connect(node.address)
    await create_topic(wire, "t")

    def fail() -> None:
        raise RuntimeError("a defect")

    node.broker.flusher.after_sync(fail, fail)
    assert (await send(wire)).code == 0
    assert (await send(wire)).code == 0, "and the flusher continues"


async def test_a_deletion_is_answered_when_it_is_on_the_device(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    node.broker.store.fail("the device is gone")
    answer = await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_a_request_that_has_not_begun_when_the_broker_stops_is_closed(node: Node) -> None:
    """Else Python says that it was never awaited, which is an error here."""
    peer = Peer(node.server, 1)
    peer.send(encode(Frame(Code.DELETE_TOPIC_IN_BROKER, 1, {"topic": "t"})))
    await node.broker.tasks.stop()
    gc.collect()
    peer.hang_up()


@pytest.mark.still
async def test_a_pull_that_waits_for_a_heartbeat_is_counted_charged_and_answered_at_the_end(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t")
    await heartbeat(wire)
    (connection,) = node.server.connections
    before = connection.held_bytes()
    opaque = wire.send(Code.PULL_MESSAGE, pull(flags=0, sub_version=11))
    await eventually(lambda: connection.held_pulls == 1)
    assert connection.held_bytes() > before + HELD_PULL_BYTES
    node.broker.held_pulls.answer_all()
    assert (await wire.answer(opaque)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert connection.held_pulls == 0


async def test_a_body_that_a_waiting_request_does_not_need_is_not_kept(
    wire: Wire, connect: Connect, node: Node
) -> None:
    """The tool's request waits for a member that never answers."""
    await join(wire, "c1")
    tool = await connect(node.address)
    asked = {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "false"}
    body = b"x" * 1_000_000
    tool.send(Code.GET_CONSUMER_RUNNING_INFO, asked, body)
    assert not (await wire.request(Code.GET_CONSUMER_RUNNING_INFO)).body
    kept = [found for found in gc.get_objects() if isinstance(found, Frame) and len(found.body) == len(body)]
    assert kept == []


# A batch of very many messages is stored in pieces, and is refused as a whole.


async def test_a_batch_of_very_many_messages_is_stored_in_pieces(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    queue = node.broker.store.queue("t", 0)
    peer = Peer(node.server, 7)
    batch = encode_batch([BatchEntry(0, b"", "")] * (5 * BATCH_TURN_MESSAGES))
    work = store_batch(node.broker, peer.connection, Frame(Code.SEND_BATCH_MESSAGE, 1, send_v2(m="true"), batch))
    grown, seen = [], 0
    for _ in work:
        grown.append(queue.next - seen)
        peer.send(encode(Frame(Code.SEND_MESSAGE_V2, 2, send_v2())))  # which others do meanwhile
        seen = queue.next
    assert sum(grown) == 5 * BATCH_TURN_MESSAGES
    assert max(grown) == PIECE_MESSAGES
    peer.hang_up()


async def test_a_long_batch_is_answered_with_the_places_of_all_and_before_what_is_behind(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t")
    queue = node.broker.store.queue("t", 0)
    count = 2 * BATCH_TURN_MESSAGES + 1
    batch = encode_batch([BatchEntry(0, b"", "")] * count)
    frames = [Frame(Code.SEND_BATCH_MESSAGE, 1, send_v2(m="true"), batch), Frame(Code.SEND_MESSAGE_V2, 2, send_v2())]
    peer = Peer(node.server, 7)
    peer.send(b"".join(map(encode, frames)))
    await node.broker.turns.done()
    await asyncio.sleep(0)
    first, second = peer.received()
    assert (first.code, first.ext["queueOffset"], second.ext["queueOffset"]) == (0, "0", str(count))
    places = [int(found[-16:], 16) for found in str(first.ext["msgId"]).split(",")]
    assert places == [queue.entry(offset)[0] for offset in range(count)]
    peer.hang_up()


@pytest.mark.skipif(not IS_COMPILED, reason="without the compiled module each long batch is stored in pieces")
async def test_long_batch_to_a_checked_queue_is_stored_in_one_call(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    queue = node.broker.store.queue("t", 0)
    peer = Peer(node.server, 7)

    def send(count: int, size: int = 0) -> int:
        """Return the number of responses that the broker wrote immediately."""
        batch = encode_batch([BatchEntry(0, bytes(size), "")] * count)
        with pytest.MonkeyPatch.context() as patches:
            give_no_turn(patches, node)  # so that a batch that is stored in pieces waits
            peer.send(encode(Frame(Code.SEND_BATCH_MESSAGE, 1, {**send_v2(m="true"), FIRST_ID: "true"}, batch)))
        return len(peer.received())

    assert send(BATCH_TURN_MESSAGES + 1) == 0, "the first batch has to pass the checks of the queue"
    await node.broker.turns.done()
    assert (len(peer.received()), queue.next) == (1, BATCH_TURN_MESSAGES + 1)
    assert send(BATCH_RUN_MESSAGES) == 1
    before = queue.next
    assert send(4, BATCH_RUN_BYTES // 4 - ENTRY_BYTES) == 1
    assert queue.next == before + 4
    for count, size in ((BATCH_RUN_MESSAGES + 1, 0), (4, BATCH_RUN_BYTES // 4 - ENTRY_BYTES + 1)):
        assert send(count, size) == 0, "it is above the limit"
        await node.broker.turns.done()
        assert len(peer.received()) == 1
    peer.hang_up()


@pytest.mark.parametrize("count", [3, 2 * BATCH_TURN_MESSAGES])
async def test_a_sender_that_needs_no_ids_gets_the_first_one(node: Node, wire: Wire, count: int) -> None:
    await create_topic(wire, "t")
    batch = encode_batch([BatchEntry(0, b"", "")] * count)
    answer = await wire.call(Code.SEND_BATCH_MESSAGE, {**send_v2(m="true"), FIRST_ID: "true"}, batch)
    queue = node.broker.store.queue("t", 0)
    assert (answer.code, answer.ext["queueOffset"], queue.next) == (0, "0", count)
    assert str(answer.ext["msgId"])[-16:] == f"{queue.entry(0)[0]:016X}"
    assert len(str(answer.ext["msgId"])) == 32


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (b"\0\0\0\x17" + bytes(19), "malformed"),
        (encode_batch([BatchEntry(0, b"", "a\x01" + "x" * 32_700)]), "maximum"),
    ],
)
async def test_a_long_batch_with_a_fault_at_its_end_is_no_batch(
    node: Node, wire: Wire, entry: bytes, reason: str
) -> None:
    await create_topic(wire, "t")
    batch = encode_batch([BatchEntry(0, b"", "")] * (3 * BATCH_TURN_MESSAGES)) + entry
    answer = await wire.call(Code.SEND_BATCH_MESSAGE, send_v2(m="true"), batch)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert reason in (answer.remark or "")
    assert node.broker.store.queue("t", 0).next == 0


def test_a_piece_of_a_batch_has_few_bytes_or_one_message() -> None:
    sizes = [10, 400_000, 400_000, 3_000_000, 10, 10]
    data = encode_batch([BatchEntry(0, bytes(size), "") for size in sizes])
    assert [len(piece.flags) for piece in split(data)] == [3, 1, 2]


# A client that drains a backlog lets the small requests of others go first.


BODY = bytes(20_000)


def asked(code: int, opaque: int, ext: dict[str, ExtValue], body: bytes = b"") -> bytes:
    return encode(Frame(code, opaque, ext, body, serialize_type=JSON))


def sent(opaque: int, body: bytes = b"x") -> bytes:
    header = SendMessage("p", "t", "TBW102", 4, 0, 0, 1, 0)
    return asked(RequestCode.SEND_MESSAGE_V2, opaque, write_send_v2(header), body)


def pulled(opaque: int) -> bytes:
    return asked(RequestCode.PULL_MESSAGE, opaque, pull(consumer_group=f"g{opaque}"))


def filled(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 1, 1), 0)
    peer = Peer(node.server, 1)
    for number in range(32):
        peer.send(sent(number, BODY))
    assert [frame.code for frame in peer.received()] == [0] * 32
    peer.hang_up()


def drains(node: Node, count: int) -> list[Peer]:
    """Clients that have each got a large answer."""
    found = [Peer(node.server, 10 + number) for number in range(count)]
    for peer in found:
        peer.send(pulled(1))
        (answer,) = peer.received()
        assert PULL_BYTES / 2 < len(answer.body) <= PULL_BYTES
    return found


def opaques(peer: Peer) -> list[int]:
    return [frame.opaque for frame in peer.received()]


async def test_a_drain_continues_behind_the_small_requests_of_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_time(monkeypatch)
    filled(node)
    (drain,), other = drains(node, 1), Peer(node.server, 2)
    drain.send(pulled(2))
    other.send(sent(3))
    assert (opaques(drain), opaques(other)) == ([], [3])
    await asyncio.sleep(0)
    assert opaques(drain) == [2]


async def test_drains_take_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_time(monkeypatch)
    filled(node)
    first, second = drains(node, 2)
    first.send(pulled(2))
    second.send(pulled(2))
    first.send(pulled(3))  # behind its own
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([2, 3], [])
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([], [2])


async def test_a_drain_that_has_got_little_is_one_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_time(monkeypatch)
    filled(node)
    (drain,) = drains(node, 1)
    drain.send(sent(2))
    await asyncio.sleep(0)
    assert opaques(drain) == [2]
    drain.send(sent(3))
    assert opaques(drain) == [3]


async def test_a_drain_that_hangs_up_is_forgotten(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_time(monkeypatch)
    filled(node)
    first, second = drains(node, 2)
    first.send(pulled(2))
    second.send(pulled(2))
    first.hang_up()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (opaques(first), opaques(second)) == ([], [2])
    second.send(pulled(3))
    await asyncio.sleep(0)
    assert opaques(second) == [3], "nobody is before it"
