"""Acknowledged sends of 1 KB with 1, 16 and 128 in flight: our client on our broker and on Apache's of 4.9 and of 5, nats-py
on JetStream, aiokafka and confluent-kafka on Kafka; confluent-kafka with its default linger of 5 ms, with none, and with its
asyncio producer. `echo` is what the same bytes cost without a broker. One process for the client, one for the broker. Beside
the rate the time that a send took, and the processor time of both processes for a message.

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
from .echo import Client
from .peers import Peer
from .runner import BODY

IN_FLIGHT = (1, 16, 128)
SECONDS = 3.0
Send = Callable[[bytes], Awaitable[object]]
Connect = Callable[[Peer, AsyncExitStack, str], Awaitable[Send]]
"""Connects a client that sends bodies to a topic, which it creates."""


async def ours(peer: Peer, stack: AsyncExitStack, topic: str) -> Send:
    producer = await stack.enter_async_context(Producer(peer.address, "bench", timeout_s=60, access=peer.access))
    await producer.send(topic, BODY)
    return partial(producer.send, topic)


async def jetstream(peer: Peer, stack: AsyncExitStack, topic: str) -> Send:
    connection = await nats.connect(f"nats://{peer.address}")
    stack.push_async_callback(connection.close)
    stream = connection.jetstream()
    await stream.add_stream(name=topic, subjects=[topic], max_bytes=4 << 30)
    return partial(stream.publish, topic)


async def aiokafka(peer: Peer, stack: AsyncExitStack, topic: str) -> Send:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=peer.address)
    await producer.start()
    stack.push_async_callback(producer.stop)
    await producer.send_and_wait(topic, BODY)
    return partial(producer.send_and_wait, topic)


async def confluent_aio(peer: Peer, stack: AsyncExitStack, topic: str) -> Send:
    """librdkafka behind confluent-kafka's own asyncio producer. Each message is a batch, because a larger one waits for its
    timeout when fewer are in flight. Deliveries are polled for, because the producer itself looks for them once a second."""
    from confluent_kafka.aio import AIOProducer

    producer = AIOProducer({"bootstrap.servers": peer.address, "linger.ms": 0}, batch_size=1)
    stack.push_async_callback(producer.close)

    async def poll() -> None:
        while True:
            await producer.poll(0.1)

    stack.callback(asyncio.create_task(poll()).cancel)

    async def send(body: bytes) -> None:
        await (await producer.produce(topic, body))

    await send(BODY)
    return send


async def confluent(peer: Peer, stack: AsyncExitStack, topic: str, *, linger_ms: int = 5) -> Send:
    """librdkafka, with a thread that polls for deliveries and notifies the loop of them together."""
    from confluent_kafka import Producer as Confluent

    loop = asyncio.get_running_loop()
    producer = Confluent({"bootstrap.servers": peer.address, "linger.ms": linger_ms})
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

    def send(body: bytes) -> asyncio.Future[None]:
        future = loop.create_future()

        def heard(error: object, _: object) -> None:
            assert error is None, error
            delivered.append(future)

        producer.produce(topic, body, on_delivery=heard)
        return future

    thread = threading.Thread(target=poll)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)
    await send(BODY)
    return send


async def echo(peer: Peer, stack: AsyncExitStack, _: str) -> Send:
    host, _, port = peer.address.partition(":")
    transport, client = await asyncio.get_running_loop().create_connection(Client, host, int(port))
    stack.callback(transport.close)
    return client.send


OURS = ("rocketlet", "rocketlet-signed", "rocketlet-tls", "rocketlet-tls-signed", "apache", "apache-5")
CLIENTS: Mapping[str, tuple[str, Connect]] = {
    **{name: (name, ours) for name in OURS},
    "jetstream": ("jetstream", jetstream),
    "aiokafka": ("kafka", aiokafka),
    "confluent-kafka": ("kafka", confluent),
    "confluent-kafka-linger-0": ("kafka", partial(confluent, linger_ms=0)),
    "confluent-kafka-aio": ("kafka", confluent_aio),
    "echo": ("echo", echo),
}
NAMES = tuple(CLIENTS)
USUAL = (
    "rocketlet", "apache", "apache-5", "jetstream", "aiokafka", "confluent-kafka", "confluent-kafka-linger-0",
    "confluent-kafka-aio", "echo",
)  # fmt: skip
SYNCED = ("rocketlet", "apache", "jetstream")


async def measure(peer: Peer, send: Send, in_flight: int, seconds: float) -> runner.Values:
    """`client_us` and `broker_us` are processor time per message."""
    latencies_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def worker() -> None:
        began_s = time.perf_counter()
        while began_s < end_s:
            await send(BODY)
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
            send = await CLIENTS[name][1](peer, stack, "bench")
            await measure(peer, send, IN_FLIGHT[-1], 2.0)  # warms the JVM, too
            cases[name] = {str(count): partial(measure, peer, send, count, options.seconds) for count in IN_FLIGHT}
        figures = await runner.alternate(options.rounds, cases)
    figures.show("Acknowledged sends of 1 KB" + (", on the device" if options.sync else ""), "sends_per_s")
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--seconds", type=runner.positive, default=SECONDS)
    made.add_argument("--sync", action="store_true")
    runner.main("sends", made, run)
