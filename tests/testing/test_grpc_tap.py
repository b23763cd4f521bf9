"""The kit's clock and faults reach clients of 5.x, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rocketlet.client import Consumer, Producer, RetryLater, SharedConsumer
from rocketlet.protocol.codes import ResponseCode
from rocketlet.testing import Broker, Fault
from rocketlet.testing.faults import CALLS

from ..conftest import PATIENCE_S, eventually
from ..support.handlers import Inbox

pytest.importorskip("google.protobuf", reason="needs the extra grpc")
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.schema import Code
from rocketlet.broker.grpc.server import METHODS

from ..support.grpc_client import CLIENT, GrpcClient, grpc_client, sending
from ..support.grpc_client import message as stored


@pytest.fixture
async def kit() -> AsyncIterator[Broker]:
    async with Broker() as broker:
        broker.create_topic("t", 1)
        yield broker


@pytest.fixture
async def client(kit: Broker) -> AsyncIterator[GrpcClient]:
    client = await grpc_client(kit.endpoint)
    yield client
    await client.close()


def message(body: bytes = b"m") -> Any:
    return sending(stored("t", body, message_type=1))


def receive(invisible_s: int = 60) -> Any:
    request = schema.ReceiveMessageRequest()
    request.group.name, request.message_queue.topic.name, request.batch_size = "g", "t", 1
    request.invisible_duration.seconds = invisible_s
    request.long_polling_timeout.seconds = 20
    return request


async def received(client: GrpcClient) -> Any:
    call = client.begin("ReceiveMessage")
    call.send(receive(), end=True)
    found = [answer.message for answer in await call.all() if answer.HasField("message")]
    return found[0] if found else None


def test_every_call_can_be_named() -> None:
    assert sorted(METHODS) == list(CALLS)
    with pytest.raises(ValueError, match=r"did you mean .*AckMessage"):
        Fault.drop("AckMesage")
    with pytest.raises(ValueError, match=r"unknown response 'SYSTEM_BUSY'.*TOO_MANY_REQUESTS"):
        Fault.answer("SendMessage", response="SYSTEM_BUSY")


async def test_the_clock_moves_what_clients_of_5_hold(kit: Broker, client: GrpcClient) -> None:
    assert (await client.call("SendMessage", message())).status.code == Code.OK
    first = await received(client)
    assert first.system_properties.delivery_attempt == 1
    waiting = asyncio.create_task(received(client))
    await eventually(lambda: len(kit.requests_of("ReceiveMessage")) == 2)
    kit.clock.advance(30)
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None, "the receive's own time is over"
    kit.clock.advance(31)
    again = await received(client)
    assert (again.body, again.system_properties.delivery_attempt) == (b"m", 2)


async def test_faults_answer_drop_delay_and_close_calls(kit: Broker, client: GrpcClient) -> None:
    kit.faults.add(Fault.answer("SendMessage", response="TOO_MANY_REQUESTS", topic="t"))
    assert (await client.call("SendMessage", message())).status.code == Code.TOO_MANY_REQUESTS
    assert kit.messages("t") == []
    kit.faults.add(Fault.late("SendMessage", delay_s=5))
    sending = asyncio.create_task(client.call("SendMessage", message()))
    await eventually(lambda: len(kit.messages("t")) == 1)
    assert not sending.done()
    kit.clock.advance(5)
    assert (await sending).status.code == Code.OK
    kit.faults.add(Fault.drop("SendMessage"))
    dropped = asyncio.create_task(client.call("SendMessage", message()))
    await eventually(lambda: len(kit.faults.injected) == 3)
    assert len(kit.messages("t")) == 1
    dropped.cancel()
    kit.faults.add(Fault.close("SendMessage", after=True))
    closed = asyncio.create_task(client.call("SendMessage", message()))
    await eventually(lambda: len(kit.messages("t")) == 2)
    closed.cancel()
    requests = kit.requests_of("SendMessage", client=CLIENT)
    assert [request.response for request in requests] == [Code.TOO_MANY_REQUESTS, Code.OK, None, Code.OK]
    assert "SendMessage -> TOO_MANY_REQUESTS" in str(requests[0])


async def test_a_frozen_client_continues_where_it_stood(kit: Broker, client: GrpcClient) -> None:
    kit.faults.add(Fault.freeze(client=CLIENT))
    sending = asyncio.create_task(client.call("SendMessage", message()))
    async with Producer(kit.address) as producer:
        await producer.send("t", b"of another")
    assert [item.body for item in kit.messages("t")] == [b"of another"]
    kit.faults.remove()
    assert (await sending).status.code == Code.OK
    assert len(kit.messages("t")) == 2


async def test_members_that_share_messages_in_the_kit(kit: Broker) -> None:
    inbox = Inbox(RetryLater(delay=3600))
    kit.faults.add(Fault.close("POP_MESSAGE", nth=2))
    kit.faults.add(Fault.answer("ACK_MESSAGE", response=ResponseCode.SYSTEM_BUSY))
    async with (
        SharedConsumer(kit.address, "g", "t", inbox) as member,
        Producer(kit.address) as producer,
    ):
        await kit.until(lambda: kit.members("g") == [member.client_id])
        await producer.send("t", b"job")
        await kit.until(lambda: len(inbox.messages) == 1)
        assert kit.lag("g", "t") == 1
        await kit.until(lambda: bool(kit.requests_of("CHANGE_MESSAGE_INVISIBLETIME")))  # an hour begins with it
        kit.clock.advance(hours=1)
        inbox._outcome = None
        await kit.consumed("g", "t")
    assert [item.attempt for item in inbox.messages] == [1, 2]
    assert len(kit.faults.injected) == 2


async def test_both_protocol_servers_share_one_topic(kit: Broker, client: GrpcClient) -> None:
    inbox = Inbox()
    async with Consumer(kit.address, "queues", "t", inbox, start="first"):
        await client.call("SendMessage", message(b"from 5"))
        await eventually(lambda: inbox.bodies == [b"from 5"])
