"""From process start to the first message consumed, and memory: idle, and after a million messages sent and consumed."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rocketlet.client import Consumer, Message, Producer, RocketletError
from rocketlet.command.plumbing.numbers import whole

from . import drain, runner
from .runner import BODY

NAMES = ("rocketlet", "apache")
MESSAGES = 1_000_000
ARRIVAL_S = 120


async def send_and_consume(address: str, topic: str, group: str, clients: AsyncExitStack) -> None:
    """Return when a message has been sent and consumed. The stack keeps both clients connected."""
    seen = asyncio.Event()

    def handle(message: Message) -> None:
        seen.set()

    producer = await clients.enter_async_context(Producer(address, timeout_s=20))
    await producer.send(topic, BODY)
    await clients.enter_async_context(Consumer(address, group, topic, handle, start="first"))
    await asyncio.wait_for(seen.wait(), ARRIVAL_S)


async def first_message(address: str) -> None:
    """Retry until the broker accepts the message."""
    while True:
        try:
            async with AsyncExitStack() as clients:
                return await send_and_consume(address, "first", "first", clients)
        except RocketletError:
            await asyncio.sleep(0.01)


async def measure(name: str, count: int) -> runner.Values:
    watch = runner.Stopwatch()
    async with runner.started([name]) as peers:
        peer, ready_s = peers[name], watch.read_s()[0]
        await first_message(peer.address)
        first_s, idle_mib = watch.read_s()[0], peer.resident_mib()
        await drain.fill(peer.address, drain.BATCH)  # so that the topic is there
        await asyncio.gather(drain.fill(peer.address, count), drain.in_batches(peer.address, count + drain.BATCH, 0))
        loaded_mib = peer.resident_mib()
    return {"ready_s": ready_s, "first_message_s": first_s, "idle_mib": idle_mib, "loaded_mib": loaded_mib}


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    cases = {name: {"": partial(measure, name, options.messages)} for name in runner.chosen(options.only, NAMES)}
    figures = await runner.alternate(options.rounds, cases)
    figures.show(f"Start, and memory: idle, and after {options.messages:,} messages", "ready_s", less_is_better=True)
    runner.console.print("ready: the port answers, and the name server has the broker; MiB: resident memory")
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--messages", type=whole(drain.BATCH), default=MESSAGES)
    runner.main("start", made, run)
