"""A backlog of 1 KB messages consumed: by raw pulls, and by `Consumer` with a batch handler. Raw pulls on our broker and
on Apache's by the same client; fetched and acknowledged on JetStream by nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import nats
import uvloop
from nats.js.api import ConsumerConfig
from rocketlet.client import Consumer, Producer
from rocketlet.client.cluster import Cluster
from rocketlet.client.config import PullLimits
from rocketlet.protocol.allocation import subscribe_queues
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.headers import PullMessage, PullMessageResult, read, write

from . import common
from .common import BODY
from .peers import Peer

BACKLOG = 200_000
BATCH = 100
FETCH = 256
Drain = Callable[[Peer, int, int], Awaitable[None]]


async def fill(peer: Peer, count: int) -> None:
    """Puts the backlog there."""
    if peer.name == "jetstream":
        connection = await nats.connect(f"nats://{peer.address}")
        stream = connection.jetstream()
        await stream.add_stream(name="bench", subjects=["bench"])
        for _ in range(count // BATCH):
            await asyncio.gather(*(stream.publish("bench", BODY) for _ in range(BATCH)))
        await connection.close()
        return
    async with Producer(peer.address, "bench", timeout_s=10, default_queues=8) as producer:
        await producer.send_batch("backlog", [BODY] * BATCH)  # makes the topic
        for _ in range((count // BATCH - 1) // 8):
            await asyncio.gather(*(producer.send_batch("backlog", [BODY] * BATCH) for _ in range(8)))
        for _ in range((count // BATCH - 1) % 8):
            await producer.send_batch("backlog", [BODY] * BATCH)


async def raw_pulls(peer: Peer, count: int, run: int) -> None:
    """Every queue pulled to its end, one pull in flight per queue; bodies are received, not decoded."""
    cluster = Cluster(peer.address)
    route = await cluster.find_route("backlog")
    assert route is not None
    done = 0

    async def pull_queue(broker_name: str, queue_id: int) -> None:
        nonlocal done
        connection = await cluster.broker(broker_name)
        offset = 0
        while True:
            header = PullMessage(
                f"raw{run}", "backlog", queue_id, offset, FETCH, PULL_SUBSCRIPTION, 0, 0, subscription="*"
            )
            answer = await connection.ask(RequestCode.PULL_MESSAGE, write(header), timeout_s=10)
            if answer.code:
                return
            offset, before = read(PullMessageResult, answer.ext).next_begin_offset, offset
            done += offset - before

    queues = subscribe_queues("backlog", route)
    await asyncio.gather(*(pull_queue(queue.broker_name, queue.queue_id) for queue in queues))
    await cluster.close()
    assert done == count, f"{done} of {count} were pulled"


async def consumer(peer: Peer, count: int, run: int) -> None:
    """Decoded, handed to a batch handler, acknowledged, committed."""
    arrivals = common.Arrivals(count)
    limits = PullLimits(batch_size=FETCH, messages=4000, span=8000)
    async with Consumer(peer.address, f"drain{run}", "backlog", arrivals, batch_size=FETCH, start="first", pull=limits):
        await arrivals.done.wait()
    assert arrivals.seen == count, f"{arrivals.seen} of {count} were handled"


async def fetch_and_acknowledge(peer: Peer, count: int, run: int) -> None:
    connection = await nats.connect(f"nats://{peer.address}")
    name = f"drain{run}"
    settings = ConsumerConfig(max_ack_pending=100_000)
    subscription = await connection.jetstream().pull_subscribe("bench", name, config=settings)
    seen = 0
    while seen < count:
        messages = await subscription.fetch(FETCH, timeout=5)
        for message in messages:
            await message.ack()
        seen += len(messages)
    await connection.flush()
    await connection.close()


WAYS: dict[str, list[tuple[str, Drain]]] = {
    "rocketlet": [("raw pulls", raw_pulls), ("Consumer", consumer)],
    "apache": [("raw pulls", raw_pulls), ("Consumer", consumer)],
    "jetstream": [("fetched and acknowledged", fetch_and_acknowledge)],
}


async def run() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--messages", type=int, default=BACKLOG)
    options = parser.parse_args()
    names = common.chosen(options.only, ("rocketlet", "apache", "jetstream"))
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way, _ in WAYS[name]} for name in names}
    async with common.started(names) as peers:
        for peer in peers.values():
            await fill(peer, options.messages)
        for number in range(options.rounds):
            for name, peer in peers.items():
                for way, drain in WAYS[name]:
                    began_s = time.perf_counter()
                    await drain(peer, options.messages, number)
                    rates[name][way].append(options.messages / (time.perf_counter() - began_s))
    medians = {name: {way: common.median(runs) for way, runs in ways.items()} for name, ways in rates.items()}
    report(medians)
    common.finish(options, "drain", {name: dict(ways) for name, ways in medians.items()})


def report(medians: dict[str, dict[str, float]]) -> None:
    ours = medians.get("rocketlet", {})
    rows: list[list[object]] = []
    for name, ways in medians.items():
        for way, rate in ways.items():
            base = ours.get("Consumer" if name == "jetstream" else way)
            rows.append([f"{name}, {way}", rate, common.ratio(base or float("nan"), rate)])
    common.show("A backlog consumed", ("", "messages/s", "rocketlet / this"), rows)
    common.console.print("medians of alternating runs; JetStream is compared with our Consumer")


if __name__ == "__main__":
    uvloop.run(run())
