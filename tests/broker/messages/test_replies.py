"""Request-reply: a reply reaches the client that waits for it, or its sender learns that it did not."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import ASKED_BYTES, CLIENT_ANSWER_S
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import Heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES, MAX_PROPERTY_BYTES
from rocketlet.protocol.frame import Frame

from ...conftest import Connect, Node, Wire, eventually
from ...support.requests import reply


async def test_a_reply_is_pushed_to_who_waits_and_kept(node: Node, wire: Wire, connect: Connect) -> None:
    waiting = await connect(node.address)
    body = bodies.encode_heartbeat(Heartbeat("me", producer_groups=("p",)))
    await waiting.call(RequestCode.HEART_BEAT, body=body)
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    pushed = await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    assert pushed.body == b"pong"
    assert "CORRELATION_ID\x01c1" in str(pushed.ext["properties"])
    assert str(pushed.ext["storeHost"]) == node.address
    waiting.write_answer(pushed)
    answer = await wire.answer(opaque)
    assert (answer.code, len(str(answer.ext["msgId"]))) == (0, 32)
    assert node.broker.store.queue("DefaultCluster_REPLY_TOPIC", 0).next == 1


async def test_the_sender_learns_that_nobody_took_the_reply(node: Node, wire: Wire, connect: Connect) -> None:
    answer = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody"), b"x")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "nobody" in (answer.remark or "")
    waiting = await connect(node.address)
    body = bodies.encode_heartbeat(Heartbeat("me", producer_groups=("p",)))
    await waiting.call(RequestCode.HEART_BEAT, body=body)
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"x")
    await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    await waiting.close()
    gone: Frame = await wire.answer(opaque)
    assert gone.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_reply_is_limited_as_any_message(node: Node, wire: Wire, excess: int) -> None:
    body = bytes(MAX_BODY_BYTES + excess)
    answer = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody"), body)
    assert answer.code == (ResponseCode.MESSAGE_ILLEGAL if excess else ResponseCode.SYSTEM_ERROR)
    assert node.broker.store.end == 0 or not excess
    long = {"i": f"REPLY_TO_CLIENT\x01nobody\x02A\x01{'x' * MAX_PROPERTY_BYTES}"}
    assert (
        await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody") | long)
    ).code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.limits(max_asked=3)
async def test_replies_to_a_client_that_never_answers_take_nobody_elses_places(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """One account without rights took all 10,000 places for 10 s."""
    silent, waiting, hostile = [await connect(node.address) for _ in range(3)]
    for client, name in ((silent, "silent"), (waiting, "me")):
        body = bodies.encode_heartbeat(Heartbeat(name, producer_groups=("p",)))
        await client.call(RequestCode.HEART_BEAT, body=body)
    connections = list(node.server._connections)
    held = {connection: connection.charged_bytes for connection in connections}
    for _ in range(3):
        hostile.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("silent"), b"x")
    refused = await hostile.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"x")
    assert (refused.code, "of this client are waiting" in (refused.remark or "")) == (1, True)
    refused = await wire.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply("silent"), b"x")
    assert (refused.code, "has not answered" in (refused.remark or "")) == (1, True)
    more = [connection.charged_bytes - held.get(connection, 0) for connection in connections]
    assert sorted(more) == [0, 0, 0, 3 * ASKED_BYTES]
    opaque = wire.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    assert (await wire.answer(opaque)).code == 0
    node.clock.advance(CLIENT_ANSWER_S)
    await eventually(lambda: not node.broker.clients._asking)
    assert {connection: connection.charged_bytes for connection in connections} == held
    opaque = hostile.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    assert (await hostile.answer(opaque)).code == 0
