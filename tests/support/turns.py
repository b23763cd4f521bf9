"""Turns of the loop; work of the broker that is done in pieces, and a heartbeat that makes some."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from rocketlet.protocol.bodies import Work

from ..conftest import Node


def stop_time(patches: pytest.MonkeyPatch) -> None:
    """Let requests take no time. On a busy machine their time may be over, and they become work of later turns."""
    patches.setattr(time, "perf_counter", lambda: 0.0)


def give_no_turn(patches: pytest.MonkeyPatch, node: Node) -> None:
    """Let work wait, but serve requests."""
    stop_time(patches)
    patches.setattr(node.broker.turns, "turn_s", -1)


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
