"""Acknowledged single sends of 1 KB with 1, 16 and 128 in flight: our client on our broker and on Apache's, and
nats-py on JetStream; with `--only rocketlet,rocketlet-signed` what signatures cost. One process for the client, one for
the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import nats
import uvloop
from rocketlet.client import Producer

from . import common
from .common import BODY, console
from .peers import Peer

IN_FLIGHT = (1, 16, 128)
SECONDS = 3.0
Send = Callable[[], Awaitable[object]]


async def sender(peer: Peer, stack: AsyncExitStack) -> Send:
    """One acknowledged send of a peer, connected and warm."""
    if peer.name == "jetstream":
        connection = await nats.connect(f"nats://{peer.address}")
        stack.push_async_callback(connection.close)
        stream = connection.jetstream()
        await stream.add_stream(name="bench", subjects=["bench"], max_bytes=4 << 30)
        return lambda: stream.publish("bench", BODY)
    producer = await stack.enter_async_context(Producer(peer.address, "bench", timeout_s=10, access=peer.access))
    await producer.send("bench", BODY)
    return lambda: producer.send("bench", BODY)


async def measure(send: Send, in_flight: int, seconds: float) -> tuple[float, float, float]:
    """Sends per second, and the median and 99th percentile of a send in ms."""
    waits_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def worker() -> None:
        began_s = time.perf_counter()
        while began_s < end_s:
            await send()
            now_s = time.perf_counter()
            waits_s.append(now_s - began_s)
            began_s = now_s

    began_s = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    rate = len(waits_s) / (time.perf_counter() - began_s)
    return rate, common.percentile(waits_s, 0.5) * 1000, common.percentile(waits_s, 0.99) * 1000


async def run() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    names = common.chosen(options.only, ("rocketlet", "apache", "jetstream"))
    found: dict[str, dict[int, list[tuple[float, float, float]]]] = {
        name: {count: [] for count in IN_FLIGHT} for name in names
    }
    async with common.started(names) as peers, AsyncExitStack() as stack:
        sends = {name: await sender(peer, stack) for name, peer in peers.items()}
        for send in sends.values():
            await measure(send, IN_FLIGHT[-1], 2.0)  # warms the JVM, too
        for _ in range(options.rounds):
            for count in IN_FLIGHT:
                for name, send in sends.items():
                    found[name][count].append(await measure(send, count, options.seconds))
    medians = {
        name: {
            count: tuple(common.median([run[index] for run in runs]) for index in range(3))
            for count, runs in counts.items()
        }
        for name, counts in found.items()
    }
    report(medians)
    result = {
        name: {
            str(count): dict(zip(("sends_per_s", "p50_ms", "p99_ms"), values, strict=True))
            for count, values in counts.items()
        }
        for name, counts in medians.items()
    }
    common.finish(options, "sends", result)


def report(medians: dict[str, dict[int, tuple[float, ...]]]) -> None:
    rows: list[list[object]] = []
    for count in IN_FLIGHT:
        for name, counts in medians.items():
            rate, p50_ms, p99_ms = counts[count]
            ours = medians.get("rocketlet", {}).get(count, (float("nan"),))[0]
            rows.append([f"{name}, {count} in flight", rate, p50_ms, p99_ms, common.ratio(ours, rate)])
    common.show("Acknowledged sends of 1 KB", ("", "sends/s", "p50 ms", "p99 ms", "rocketlet / this"), rows)
    console.print("medians of alternating runs")


if __name__ == "__main__":
    uvloop.run(run())
