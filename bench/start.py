"""From process start to the first message consumed, and memory: idle, and after a million messages sent and consumed."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import PullLimits
from rocketlet.command.plumbing.numbers import whole

from . import common
from .common import BODY
from .peers import Peer, apache, rocketlet

NAMES = ("rocketlet", "apache")
MESSAGES = 1_000_000
BATCH = 50
STARTERS = {"rocketlet": rocketlet, "apache": apache}


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
    arrivals = common.Arrivals(count)

    async def send(producer: Producer) -> None:
        for _ in range(count // BATCH // 8):
            await producer.send_batch("load", [BODY] * BATCH)

    limits = PullLimits(messages=4000, span=8000)
    async with Producer(peer.address, "bench", timeout_s=20) as producer:
        await producer.send("load", BODY)
        async with Consumer(peer.address, "load", "load", arrivals, batch_size=256, start="first", pull=limits):
            await asyncio.gather(*(send(producer) for _ in range(8)))
            await arrivals.done.wait()


async def measure(name: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        began_s = time.perf_counter()
        async with STARTERS[name](Path(folder)) as peer:
            ready_s = time.perf_counter() - began_s
            await first_message(peer)
            first_s = time.perf_counter() - began_s
            idle_mib = peer.resident_mib()
            await load(peer, count)
            return {
                "ready_s": ready_s,
                "first_message_s": first_s,
                "idle_mib": idle_mib,
                "loaded_mib": peer.resident_mib(),
            }


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--messages", type=whole(1), default=MESSAGES)
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            found[name].append(await measure(name, options.messages))
    medians = {
        name: {key: common.median([item[key] for item in items]) for key in items[0]} for name, items in found.items()
    }
    columns = ("", "ready, s", "first message, s", "idle, MiB", f"after {options.messages:,} messages, MiB")
    common.show("Start and memory", columns, [[name, *values.values()] for name, values in medians.items()])
    common.console.print("ready: the port answers, and the name server knows the broker; MiB: resident memory (VmRSS)")
    common.finish(options, "start", medians)


if __name__ == "__main__":
    uvloop.run(run())
