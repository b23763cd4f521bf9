"""A batch of very many messages is stored in pieces, and is refused as a whole."""

from __future__ import annotations

import asyncio

import pytest
from rocketlet.broker.config import BATCH_TURN_MESSAGES
from rocketlet.broker.remoting.messages import store_batch
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.headers import FIRST_ID
from rocketlet.protocol.message import PIECE_MESSAGES, BatchEntry, encode_batch, split

from campaigns.frames import Peer

from ...conftest import Node, Wire, create_topic
from ...support.requests import send_v2


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
        (encode_batch([BatchEntry(0, b"", "a\x01" + "x" * 32_700)]), "are allowed"),
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
