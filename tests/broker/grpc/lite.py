"""Sends to lite topics, for tests of producers and of consumers."""

from __future__ import annotations

from typing import Any

from ...support.grpc_client import GrpcClient, message, sending

PARENT, OK = "CHAT", 20000


async def send(client: GrpcClient, name: str, *bodies: bytes) -> list[Any]:
    """Send messages to a lite topic, one after the other. Return their entries in the responses."""
    entries = []
    for body in bodies:
        sent = message(PARENT, body, message_id=f"ID-{name}-{body[:20]!r}", lite_topic=name)
        answer = await client.call("SendMessage", sending(sent))
        assert answer.status.code == OK, answer.status
        entries += answer.entries
    return entries
