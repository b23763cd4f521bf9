"""Turns of the loop; work of the broker that is done in pieces, and a heartbeat that makes some."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from rocketlet.protocol.bodies import Work


async def passed() -> None:
    """Work is done that waits neither for an answer nor for a time."""
    for _ in range(20):
        await asyncio.sleep(0)


def pieces(work: Work[Any]) -> int:
    """In how many pieces it is done."""
    return 1 + sum(1 for _ in work)


def heartbeat_of(client_id: str) -> bytes:
    consumer = {
        "groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [{"topic": "t", "subString": "*"}],
    }  # fmt: skip
    return orjson.dumps({"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": []})
