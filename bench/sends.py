"""Acknowledged sends of 1 KB with 1, 16 and 128 in flight: our client on our broker and on Apache's, nats-py on JetStream,
aiokafka and confluent-kafka on Kafka. One process for the client, one for the broker. Beside the rate the time that a send
took, and the processor time of both processes for a message.

`--only rocketlet-alone,apache-alone`: our client without batches. `--only rocketlet,rocketlet-signed`: what signatures cost.
`--only rocketlet-tls,rocketlet-tls-signed`: what accounts cost with TLS, where a connection proves once whose it is.
`--sync`: acknowledged is what lies on the device (`--flush sync`, SYNC_FLUSH, sync_interval always)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import NamedTuple

import nats
import uvloop
from rocketlet.client import Producer

from . import common
from .common import BODY, console
from .peers import Peer

IN_FLIGHT = (1, 16, 128)
SECONDS = 3.0
Send = Callable[[], Awaitable[object]]
Connect = Callable[[Peer, AsyncExitStack], Awaitable[Send]]


class Measured(NamedTuple):
    """`client_us` and `broker_us` are processor time per message."""

    sends_per_s: float
    p50_ms: float
    p99_ms: float
    client_us: float
    broker_us: float


async def batches(peer: Peer, stack: AsyncExitStack) -> Send:
    return await _ours(peer, stack, batching=True)


async def alone(peer: Peer, stack: AsyncExitStack) -> Send:
    return await _ours(peer, stack, batching=False)


async def _ours(peer: Peer, stack: AsyncExitStack, *, batching: bool) -> Send:
    made = Producer(peer.address, "bench", timeout_s=10, access=peer.access, batching=batching)
    producer = await stack.enter_async_context(made)
    await producer.send("bench", BODY)
    return lambda: producer.send("bench", BODY)


async def jetstream(peer: Peer, stack: AsyncExitStack) -> Send:
    connection = await nats.connect(f"nats://{peer.address}")
    stack.push_async_callback(connection.close)
    stream = connection.jetstream()
    await stream.add_stream(name="bench", subjects=["bench"], max_bytes=4 << 30)
    return lambda: stream.publish("bench", BODY)


async def aiokafka(peer: Peer, stack: AsyncExitStack) -> Send:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=peer.address)
    await producer.start()
    stack.push_async_callback(producer.stop)
    await producer.send_and_wait("bench", BODY)
    return lambda: producer.send_and_wait("bench", BODY)


async def confluent(peer: Peer, stack: AsyncExitStack) -> Send:
    """librdkafka, with a thread that hears of deliveries and tells the loop of all that came together."""
    from confluent_kafka import Producer as Confluent

    loop = asyncio.get_running_loop()
    producer = Confluent({"bootstrap.servers": peer.address})
    delivered: list[asyncio.Future[None]] = []
    is_over = False

    def settle(futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            future.set_result(None)

    def poll() -> None:
        while not is_over:
            if producer.poll(0.1):
                futures = delivered.copy()
                delivered.clear()
                loop.call_soon_threadsafe(settle, futures)

    def send() -> asyncio.Future[None]:
        future = loop.create_future()

        def heard(error: object, _: object) -> None:
            assert error is None, error
            delivered.append(future)

        producer.produce("bench", BODY, on_delivery=heard)
        return future

    polling = asyncio.create_task(asyncio.to_thread(poll))

    async def end() -> None:
        nonlocal is_over
        is_over = True
        await polling

    stack.push_async_callback(end)
    await send()
    return send


SYSTEMS: Mapping[str, tuple[str, Connect]] = {
    "rocketlet": ("rocketlet", batches),
    "rocketlet-alone": ("rocketlet", alone),
    "rocketlet-signed": ("rocketlet-signed", batches),
    "rocketlet-tls": ("rocketlet-tls", batches),
    "rocketlet-tls-signed": ("rocketlet-tls-signed", batches),
    "apache": ("apache", batches),
    "apache-alone": ("apache", alone),
    "jetstream": ("jetstream", jetstream),
    "aiokafka": ("kafka", aiokafka),
    "confluent-kafka": ("kafka", confluent),
}
NAMES = tuple(SYSTEMS)
USUAL = ("rocketlet", "apache", "jetstream", "aiokafka", "confluent-kafka")
SYNCED = ("rocketlet", "apache", "jetstream")


async def measure(peer: Peer, send: Send, in_flight: int, seconds: float) -> Measured:
    waits_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def worker() -> None:
        began_s = time.perf_counter()
        while began_s < end_s:
            await send()
            now_s = time.perf_counter()
            waits_s.append(now_s - began_s)
            began_s = now_s

    began_s, client_s, broker_s = time.perf_counter(), time.process_time(), peer.cpu_s()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    took_s, client_s, broker_s = time.perf_counter() - began_s, time.process_time() - client_s, peer.cpu_s() - broker_s
    count = len(waits_s)
    return Measured(
        count / took_s,
        common.percentile(waits_s, 0.5) * 1000,
        common.percentile(waits_s, 0.99) * 1000,
        client_s / count * 1e6,
        broker_s / count * 1e6,
    )


Runs = dict[str, dict[int, list[Measured]]]


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--seconds", type=common.positive, default=SECONDS)
    parser.add_argument("--sync", action="store_true")
    options = parser.parse_args()
    suffix = "-synced" if options.sync else ""
    asked = options.only.split(",") if options.only else list(SYNCED if options.sync else USUAL)
    usable = common.chosen(",".join(dict.fromkeys(SYSTEMS[name][0] + suffix for name in asked)), ())
    names = [name for name in asked if SYSTEMS[name][0] + suffix in usable]
    found: Runs = {name: {count: [] for count in IN_FLIGHT} for name in names}
    async with common.started(usable) as peers, AsyncExitStack() as stack:
        of = {name: peers[SYSTEMS[name][0] + suffix] for name in names}
        sends = {name: await SYSTEMS[name][1](of[name], stack) for name in names}
        for name, send in sends.items():
            await measure(of[name], send, IN_FLIGHT[-1], 2.0)  # warms the JVM, too
        for _ in range(options.rounds):
            for count in IN_FLIGHT:
                for name, send in sends.items():
                    found[name][count].append(await measure(of[name], send, count, options.seconds))
    medians = {
        name: {count: Measured(*map(common.median, zip(*runs, strict=True))) for count, runs in counts.items()}
        for name, counts in found.items()
    }
    report(medians, found, options.sync)
    result = {
        name: {str(count): values._asdict() for count, values in counts.items()} for name, counts in medians.items()
    }
    common.finish(options, "sends", result)


def report(medians: Mapping[str, Mapping[int, Measured]], found: Runs, syncs: bool) -> None:
    rows: list[list[object]] = []
    for count in IN_FLIGHT:
        for name, counts in medians.items():
            values = [f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in counts[count]]
            rows.append([name, str(count), *values, _ratios(found, name, count)])
    title = "Acknowledged sends of 1 KB" + (", on the device" if syncs else "")
    columns = ("", "in flight", "sends/s", "p50 ms", "p99 ms", "client us", "broker us", f"{next(iter(found))} / this")
    common.show(title, columns, rows)
    console.print("medians of alternating runs; ratios of the runs of one round: median (least to most)")


def _ratios(found: Runs, name: str, count: int) -> str:
    """The first system's rate by another's, round by round."""
    first, theirs = next(iter(found.values()))[count], found[name][count]
    ratios = sorted(mine.sends_per_s / other.sends_per_s for mine, other in zip(first, theirs, strict=True))
    return f"{common.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    uvloop.run(run())
