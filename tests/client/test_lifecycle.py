"""The start of a client that is thrown away: its loop ends, or its coroutine is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rocketlet.client import Consumer, Producer, SharedConsumer
from rocketlet.client.wire.cluster import Lifecycle

from ..conftest import Node
from ..support.handlers import Inbox

CLIENTS: dict[str, Callable[[str], Lifecycle]] = {
    "producer": lambda address: Producer(address),
    "consumer": lambda address: Consumer(address, "g", "t", Inbox()),
    "shared consumer": lambda address: SharedConsumer(address, "g", "t", Inbox()),
}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_start_that_is_thrown_away_waits_for_nothing_and_leaves_nothing_behind(node: Node, kind: str) -> None:
    """A coroutine that is closed may await nothing more: Python raises RuntimeError if it does."""
    client = CLIENTS[kind](node.address)
    starting = client.start()
    starting.send(None)
    starting.close()
    assert client.has_ended
    assert client._undoing is not None
    await client._undoing
    assert client._cluster._refresher is not None
    assert client._cluster._refresher.done()


def test_a_start_that_is_thrown_away_with_its_loop_is_no_error() -> None:
    client = Producer("127.0.0.1:1")
    loop = asyncio.new_event_loop()
    starting = client.start()

    async def begin() -> None:
        starting.send(None)

    loop.run_until_complete(begin())
    starting.close()
    assert client.has_ended
    assert client._undoing is None
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
