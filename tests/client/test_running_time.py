"""Timeouts count the time for which the event loop runs, whatever the clock says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from rocketlet.client import ConnectionFailed, Producer, RequestTimeout
from rocketlet.client.config import CONNECT_TIMEOUT_S, TIMEOUT_TICK_S

from ..client.conftest import only_connection
from ..conftest import Node, Wire, create_topic, eventually

NEVER_S = 3600.0


class Ticks:
    """The ticks of timeouts, which the test runs by hand: the clock does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def kept(delay_s: float, action: Any, *arguments: Any, **rest: Any) -> asyncio.TimerHandle:
            if getattr(action, "__qualname__", "").startswith("running_timeout."):
                self.waiting.append((delay_s, action))
                delay_s = NEVER_S
            return call_later(delay_s, action, *arguments, **rest)

        monkeypatch.setattr(loop, "call_later", kept)

    def run(self) -> float:
        """Runs the next tick; how long after the one before it was meant to come, s."""
        delay_s, action = self.waiting.pop(0)
        action()
        return delay_s


@pytest.fixture
async def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(monkeypatch)


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Connections are made once it is set."""
    loop, is_open = asyncio.get_running_loop(), asyncio.Event()
    create = loop.create_connection

    async def behind_the_door(*arguments: Any, **rest: Any) -> Any:
        await is_open.wait()
        return await create(*arguments, **rest)

    monkeypatch.setattr(loop, "create_connection", behind_the_door)
    return is_open


async def test_a_connection_has_its_time_however_late_the_clock_says_it_is(
    node: Node, ticks: Ticks, door: asyncio.Event
) -> None:
    producer = Producer(node.address)
    starting = asyncio.create_task(producer.start())
    await eventually(lambda: bool(ticks.waiting))
    passed_s = 0.0
    while passed_s < CONNECT_TIMEOUT_S - 2 * TIMEOUT_TICK_S:
        passed_s += ticks.run()
    door.set()
    await starting
    await producer.stop()


async def test_a_connection_that_takes_longer_fails(node: Node, ticks: Ticks, door: asyncio.Event) -> None:
    starting = asyncio.create_task(Producer(node.address).start())
    await eventually(lambda: bool(ticks.waiting))
    passed_s = 0.0
    while ticks.waiting:
        passed_s += ticks.run()
    assert passed_s == pytest.approx(CONNECT_TIMEOUT_S)
    with pytest.raises(ConnectionFailed, match=r"did not accept a connection within 3\.0 s"):
        await starting


async def test_what_waits_for_a_broker_that_reads_nothing_has_its_time_too(node: Node, wire: Wire) -> None:
    """The timer of a process that was suspended is due before its sockets say that the broker takes more."""
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        connection, accumulator = only_connection(producer), producer._accumulator
        assert accumulator is not None
        connection.pause_writing()
        sending = asyncio.create_task(producer.send("t", b"x"))
        await eventually(lambda: connection in accumulator._waiting)
        accumulator._expire(connection)
        connection.resume_writing()
        assert (await sending).status == "ok"
        connection.pause_writing()
        late = asyncio.create_task(producer.send("t", b"x"))
        await eventually(lambda: connection in accumulator._waiting)
        connection._blocked_s -= NEVER_S  # this much more of the time that passed was the process's own
        accumulator._expire(connection)
        with pytest.raises(RequestTimeout, match="did not read the message in time"):
            await late
        connection.resume_writing()
