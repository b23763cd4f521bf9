"""From process start to the first message consumed, and memory: idle, and after a million messages sent and consumed."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import PullLimits
from rocketlet.command.plumbing.numbers import whole

from . import runner
from .peers import Peer
from .runner import BODY

NAMES = ("rocketlet", "apache")
MESSAGES = 1_000_000
BATCH = 50


async def first_message(peer: Peer) -> None:
    """Sends until it is accepted, consumes until it is there."""
    seen = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.set()

    async with AsyncExitStack() as stack:
        while True:
            try:
                producer = await stack.enter_async_context(Producer(peer.address, "bench"))
                await producer.send("first", BODY)
                break
            except Exception:
                await asyncio.sleep(0.01)
        await stack.enter_async_context(Consumer(peer.address, "first", "first", handle, start="first"))
        await seen.wait()


async def load(peer: Peer, count: int) -> None:
    """Sends and consumes at the same time."""
    arrivals = runner.Arrivals(count)

    async def send(producer: Producer) -> None:
        for _ in range(count // BATCH // 8):
            await producer.send_batch("load", [BODY] * BATCH)

    limits = PullLimits(messages=4000, span=8000)
    async with Producer(peer.address, "bench", timeout_s=20) as producer:
        await producer.send("load", BODY)
        async with Consumer(peer.address, "load", "load", arrivals, batch_size=256, start="first", pull=limits):
            await asyncio.gather(*(send(producer) for _ in range(8)))
            await arrivals.done.wait()


async def measure(name: str, count: int) -> runner.Values:
    began_s = time.perf_counter()
    async with runner.started([name]) as peers:
        peer, ready_s = peers[name], time.perf_counter() - began_s
        await first_message(peer)
        first_s, idle_mib = time.perf_counter() - began_s, peer.resident_mib()
        await load(peer, count)
        loaded_mib = peer.resident_mib()
    return {"ready_s": ready_s, "first_message_s": first_s, "idle_mib": idle_mib, "loaded_mib": loaded_mib}


def parser() -> argparse.ArgumentParser:
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--messages", type=whole(1), default=MESSAGES)
    return made


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    names = runner.chosen(options.only, NAMES)
    cases = {name: {"": partial(measure, name, options.messages)} for name in names}
    figures = await runner.alternate(options.rounds, cases)
    figures.show(f"Start, and memory: idle, and after {options.messages:,} messages", "ready_s", less_is_better=True)
    runner.console.print("ready: the port answers, and the name server has the broker; MiB: resident memory")
    return figures.only_case()


if __name__ == "__main__":
    runner.main("start", parser(), run)
