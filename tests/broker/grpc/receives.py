"""Receives of 5.x's clients, and what they say of messages."""

from __future__ import annotations

from typing import Any

from rocketlet.broker.grpc import schema

from ...support.grpc_client import GrpcClient, OpenCall, message, resource, sending

OK, NOTHING, ILLEGAL_HANDLE = 20000, 40401, 40013


def request(*, wait_ms: int = 0, invisible_ms: int = 30_000, count: int = 32, **fields: Any) -> Any:
    found = schema.ReceiveMessageRequest(batch_size=count, **fields)
    found.group.name = found.group.name or "g"
    found.message_queue.topic.name = found.message_queue.topic.name or "t"
    found.message_queue.id = -1
    found.long_polling_timeout.FromMilliseconds(wait_ms)
    if not found.auto_renew:
        found.invisible_duration.FromMilliseconds(invisible_ms)
    return found


def begin(client: GrpcClient, asked: Any, **metadata: str) -> OpenCall:
    call = client.begin("ReceiveMessage", end=False, path="", **metadata)
    call.send(asked, end=True)
    return call


async def received(call: OpenCall) -> tuple[int, list[Any]]:
    """The code and the messages of an answer that is whole: status, messages, time."""
    answers = await call.all()
    assert call.status == 0
    assert [answer.WhichOneof("content") for answer in answers][:1] == ["status"]
    assert answers[-1].WhichOneof("content") == "delivery_timestamp"
    return answers[0].status.code, [answer.message for answer in answers[1:-1]]


async def receive(client: GrpcClient, **options: Any) -> list[Any]:
    code, messages = await received(begin(client, request(**options)))
    assert code == (OK if messages else NOTHING)
    return messages


async def send(client: GrpcClient, *bodies: bytes, **system: Any) -> None:
    for body in bodies:
        answer = await client.call("SendMessage", sending(message("t", body, message_id=f"ID-{body[:9]!r}", **system)))
        assert answer.status.code == OK


async def joined(client: GrpcClient) -> None:
    """A group begins with what comes after its first receive."""
    assert await receive(client) == []


def handles(messages: list[Any]) -> list[str]:
    return [item.system_properties.receipt_handle for item in messages]


async def ack(client: GrpcClient, *receipt_handles: str, group: str = "g", topic: str = "t") -> Any:
    asked = schema.AckMessageRequest(group=resource(group), topic=resource(topic))
    for number, handle in enumerate(receipt_handles):
        asked.entries.add(message_id=f"ID{number}", receipt_handle=handle)
    return await client.call("AckMessage", asked)


async def change(client: GrpcClient, handle: str, invisible_ms: int, **fields: Any) -> Any:
    asked = schema.ChangeInvisibleDurationRequest(
        group=resource("g"), topic=resource("t"), receipt_handle=handle, **fields
    )
    asked.invisible_duration.FromMilliseconds(invisible_ms)
    return await client.call("ChangeInvisibleDuration", asked)
