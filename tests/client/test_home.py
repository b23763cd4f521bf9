"""Clients that are used elsewhere than where they live: in another loop, thread or process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from rocketlet.client import AdminClient, ConfigError, Consumer, Producer

from ..conftest import PATIENCE_S, Node, Wire, create_topic


def elsewhere(work: Callable[[], Awaitable[object]]) -> str:
    """The text of the error that the work raises in a loop of its own."""

    async def run() -> None:
        await work()

    with pytest.raises(ConfigError) as raised:
        asyncio.run(run())
    return str(raised.value)


async def test_a_client_says_so_in_another_loop_and_goes_on_in_its_own(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", start="first") as consumer,
        AdminClient(node.address) as admin,
    ):
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await admin.topics()
        message = await consumer.receive(timeout_s=PATIENCE_S)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: producer.send("t", b"x"),
            lambda: producer.send("t", b"x" * 5000),
            lambda: producer.send_batch("t", [b"x"]),
            lambda: producer.send_oneway("t", b"x"),
            producer.stop,
            consumer.receive,
            lambda: consumer.ack(message),
            lambda: anext(consumer),
            consumer.resume,
            consumer.commit,
            lambda: consumer.seek("first"),
            consumer.stop,
            admin.topics,
        ]
        for call in calls:
            assert "another event loop" in await asyncio.to_thread(elsewhere, call)
        await consumer.ack(message)
        await producer.send("t", b"4")
        assert [(await consumer.receive(timeout_s=PATIENCE_S)).body for _ in range(3)] == [b"2", b"3", b"4"]


async def test_what_was_made_before_a_fork_is_not_started_after_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of a server would have one client id, and each would believe that it owns all queues."""
    consumer, producer = Consumer(node.address, "g", "t"), Producer(node.address)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 4711)
        for start in (consumer.start, producer.start):
            with pytest.raises(ConfigError, match="is used in 4711; make one in each process, after the fork"):
                await start()
    async with producer:
        pass


async def test_a_child_of_a_fork_does_not_use_its_parents_client(node: Node, wire: Wire) -> None:
    """Its copy of the parent's loop looks as if it ran."""
    await create_topic(wire, "t", 1)
    async with Producer(node.address) as producer:
        await producer.send("t", b"1")
        child = os.fork()
        if not child:
            said = 1
            try:
                said = 0 if "is used in" in elsewhere(lambda: producer.send("t", b"x")) else 2
            finally:
                os._exit(said)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await producer.send("t", b"2")
