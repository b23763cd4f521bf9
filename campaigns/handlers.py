"""Handlers that do anything: raise, cancel themselves, return junk, block. A try is one consumer and some messages, on a real
broker; each message goes wrong up to three times, and is then handled.

A fault is: a queue that stands, which is messages left and no handler called for 20 s, and a consumer that does not close.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rocketlet.broker.broker import Broker
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver.routes import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import Consumer, Message, Producer, Reject, RetryLater
from rocketlet.client.config import ClientLimits
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.testing.ports import free_port

from .common import Limit, Outcome

DEFAULT_COUNT = 50
MESSAGES = 60
QUEUES = 4
ODD_TRIES = 3
STANDS_S = 20.0
CLOSE_S = 40.0


class Odd(BaseException):
    """As trio's Cancelled is."""


def _cancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _raise(error: BaseException) -> None:
    raise error


async def _cancel_and_wait() -> None:
    _cancel()
    await asyncio.sleep(0)


async def _cancel_and_return(outcome: Any) -> Any:
    _cancel()
    return outcome


async def _wait_for_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    task.cancel()
    await task


async def _be_late() -> None:
    async with asyncio.timeout(0):
        await asyncio.sleep(3600)


async def _block() -> Any:
    time.sleep(0.005)
    return RetryLater(delay_level=1)


async def _return(outcome: Any) -> Any:
    return outcome


ODD: tuple[Callable[[], Awaitable[Any]], ...] = (
    lambda: _raise(ValueError("odd")),
    lambda: _raise(asyncio.CancelledError()),
    lambda: _raise(SystemExit(3)),
    lambda: _raise(Odd()),
    lambda: _raise(StopAsyncIteration()),
    _cancel_and_wait,
    lambda: _cancel_and_return(RetryLater(delay_level=1)),
    lambda: _cancel_and_return("junk"),
    _wait_for_a_cancelled_task,
    _be_late,
    _block,
    lambda: _return(RetryLater),
    lambda: _return(object()),
    lambda: _return(RetryLater(delay_level=1)),
)


class Handler:
    """`done` counts how often each body was handled to its end."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left: dict[bytes, int] = {}
        self.done: Counter[bytes] = Counter()
        self.calls = 0

    async def one(self, message: Message) -> Any:
        return await self._handle([message.body])

    async def batch(self, messages: list[Message]) -> Any:
        return await self._handle([message.body for message in messages])

    async def _handle(self, bodies: list[bytes]) -> Any:
        self.calls += 1
        left = [self._left.setdefault(body, self._chance.randrange(ODD_TRIES + 1)) for body in bodies]
        if max(left) > 0:
            for body in bodies:
                self._left[body] -= 1
            return await self._chance.choice(ODD)()
        self.done.update(bodies)
        if self._chance.random() < 0.1:  # handled, and cancelled all the same
            _cancel()
        return Reject() if self._chance.random() < 0.1 else None


LIMITS = ClientLimits(send_back_retry_s=0.01, restart_s=0.01)


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"handled": 0, "calls": 0})
    uvloop.run(_run(limit, seed, folder, outcome))
    return outcome


async def _run(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    routes, port = Routes(), free_port()
    config = BrokerConfig(folder / "data", f"127.0.0.1:{port}", vip_channel=False)
    broker = Broker(replace(config, delay_levels_ms=(5,) * 18), routes)
    async with Server(Listening("127.0.0.1", port), broker=broker, routes=routes) as server:
        for number in limit:
            topic = f"t{number}"
            broker.topics.put(TopicConfig(topic, QUEUES, QUEUES), broker.store.end)
            try:
                await _try(f"127.0.0.1:{server.port}", topic, random.Random(f"{seed}-{number}"), outcome)
            except Exception as error:
                outcome.fault(f"{type(error).__name__}: {error}")
            outcome.tried += 1


async def _try(address: str, topic: str, chance: random.Random, outcome: Outcome) -> None:
    bodies = [b"%d" % number for number in range(MESSAGES)]
    async with Producer(address, "p") as producer:
        for body in bodies:
            await producer.send(topic, body)
    handler, is_orderly = Handler(chance), chance.random() < 0.3
    options: dict[str, Any] = {"start": "first", "concurrency": chance.randint(1, 4), "orderly": is_orderly}
    if is_orderly:
        options["suspend_queue_s"] = 0.01
    if chance.random() < 0.3:
        consumer = Consumer(
            address, f"g-{topic}", topic, handler.batch, batch_size=chance.randint(2, 8), **options, limits=LIMITS
        )
    else:
        consumer = Consumer(address, f"g-{topic}", topic, handler.one, **options, limits=LIMITS)
    await consumer.__aenter__()
    if not await _is_handled(handler, bodies):
        outcome.fault(f"{'in order' if is_orderly else 'concurrently'}: a queue stands")
    try:
        async with asyncio.timeout(CLOSE_S):
            await consumer.__aexit__()
    except TimeoutError:
        outcome.fault("a consumer does not close")
    outcome.figures["handled"] += len(handler.done)
    outcome.figures["calls"] += handler.calls


async def _is_handled(handler: Handler, bodies: list[bytes]) -> bool:
    """Returns when all are handled, or when nothing was for a long time."""
    calls, since_s = -1, time.monotonic()
    while any(not handler.done[body] for body in bodies):
        if handler.calls != calls:
            calls, since_s = handler.calls, time.monotonic()
        if time.monotonic() > since_s + STANDS_S:
            return False
        await asyncio.sleep(0.01)
    return True
