"""Acknowledged sends of 1 KB with 1, 16 and 128 in flight: our client on our broker and on Apache's, nats-py on JetStream,
aiokafka and confluent-kafka on Kafka. One process for the client, one for the broker. Beside the rate the time that a send
took, and the processor time of both processes for a message.

`--only rocketlet,rocketlet-signed`: what signatures cost.
`--only rocketlet-tls,rocketlet-tls-signed`: what accounts cost with TLS, where a connection proves once whose it is.
`--sync`: acknowledged is what lies on the device (`--flush sync`, SYNC_FLUSH, sync_interval always)."""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import nats
from rocketlet.client import Producer

from . import runner
from .peers import Peer
from .runner import BODY

IN_FLIGHT = (1, 16, 128)
SECONDS = 3.0
Send = Callable[[], Awaitable[object]]
Connect = Callable[[Peer, AsyncExitStack], Awaitable[Send]]


async def ours(peer: Peer, stack: AsyncExitStack) -> Send:
    producer = await stack.enter_async_context(Producer(peer.address, "bench", timeout_s=10, access=peer.access))
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
    """librdkafka, with a thread that polls for deliveries and notifies the loop of them together."""
    from confluent_kafka import Producer as Confluent

    loop = asyncio.get_running_loop()
    producer = Confluent({"bootstrap.servers": peer.address})
    delivered: list[asyncio.Future[None]] = []
    is_over = threading.Event()

    def settle(futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            future.set_result(None)

    def poll() -> None:
        while not is_over.is_set():
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

    thread = threading.Thread(target=poll)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)
    await send()
    return send


OURS = ("rocketlet", "rocketlet-signed", "rocketlet-tls", "rocketlet-tls-signed", "apache")
CLIENTS: Mapping[str, tuple[str, Connect]] = {
    **{name: (name, ours) for name in OURS},
    "jetstream": ("jetstream", jetstream),
    "aiokafka": ("kafka", aiokafka),
    "confluent-kafka": ("kafka", confluent),
}
NAMES = tuple(CLIENTS)
USUAL = ("rocketlet", "apache", "jetstream", "aiokafka", "confluent-kafka")
SYNCED = ("rocketlet", "apache", "jetstream")


async def measure(peer: Peer, send: Send, in_flight: int, seconds: float) -> runner.Values:
    """`client_us` and `broker_us` are processor time per message."""
    latencies_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def worker() -> None:
        began_s = time.perf_counter()
        while began_s < end_s:
            await send()
            now_s = time.perf_counter()
            latencies_s.append(now_s - began_s)
            began_s = now_s

    watch = runner.Stopwatch(peer)
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    took_s, client_s, broker_s = watch.read_s()
    count = len(latencies_s)
    return {
        "sends_per_s": count / took_s,
        "p50_ms": runner.percentile(latencies_s, 0.5) * 1000,
        "p99_ms": runner.percentile(latencies_s, 0.99) * 1000,
        "client_us": client_s / count * 1e6,
        "broker_us": broker_s / count * 1e6,
    }


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    suffix = "-synced" if options.sync else ""
    wanted = options.only or (SYNCED if options.sync else USUAL)
    peer_names = {name: CLIENTS[name][0] + suffix for name in wanted}
    usable = runner.chosen(None, tuple(dict.fromkeys(peer_names.values())))
    async with runner.started(usable) as peers, AsyncExitStack() as stack:
        cases: dict[str, runner.Cases] = {}
        for name in (name for name in wanted if peer_names[name] in usable):
            peer = peers[peer_names[name]]
            send = await CLIENTS[name][1](peer, stack)
            await measure(peer, send, IN_FLIGHT[-1], 2.0)  # warms the JVM, too
            cases[name] = {str(count): partial(measure, peer, send, count, options.seconds) for count in IN_FLIGHT}
        figures = await runner.alternate(options.rounds, cases)
    figures.show("Acknowledged sends of 1 KB" + (", on the device" if options.sync else ""), "sends_per_s")
    return figures.medians


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--seconds", type=runner.positive, default=SECONDS)
    made.add_argument("--sync", action="store_true")
    runner.main("sends", made, run)
