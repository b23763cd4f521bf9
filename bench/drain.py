"""A backlog of 1 KB messages consumed: by raw pulls, and by `Consumer` with a handler for batches and with one for single
messages, on our broker and on Apache's of 4.9 and of 5. Handlers only count. Starting and stopping a `Consumer` counts."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import PullLimits
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.allocation import subscribe_queues
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.headers import PullMessage, PullMessageResult, read, write

from . import runner
from .peers import Peer
from .runner import BODY

NAMES = ("rocketlet", "apache", "apache-5")
TOPIC = "backlog"
BACKLOG = 200_000
BATCH = 100
FETCH = 256
LIMITS = PullLimits(batch_size=FETCH, messages=4000, span=8000)
Drain = Callable[[str, int, int], Awaitable[None]]
"""Drains the backlog of N messages at an address in a numbered round."""


async def fill(
    address: str, count: int, topics: Sequence[str] = (TOPIC,), *, queues: int = 8, body: bytes = BODY
) -> None:
    """Send messages, a multiple of BATCH, to topics in turn, which the first batches create."""
    async with Producer(address, "bench", timeout_s=20, default_queues=queues) as producer:
        left = itertools.islice(itertools.cycle(topics), count // BATCH)

        async def send(batches: Iterator[str]) -> None:
            for topic in batches:
                await producer.send_batch(topic, [body] * BATCH)

        await send(itertools.islice(left, 1))
        await asyncio.gather(*(send(left) for _ in range(8)))


async def raw_pulls(address: str, count: int, run: int) -> None:
    """Every queue pulled to its end, one pull in flight per queue; bodies are received, not decoded."""
    cluster = ClusterView(address)
    route = await cluster.find_route(TOPIC)
    assert route is not None
    done = 0

    async def pull_queue(broker_name: str, queue_id: int) -> None:
        nonlocal done
        connection = await cluster.broker(broker_name)
        offset = 0
        while True:
            header = PullMessage(f"raw{run}", TOPIC, queue_id, offset, FETCH, PULL_SUBSCRIPTION, 0, 0, subscription="*")
            answer = await connection.request_unchecked(RequestCode.PULL_MESSAGE, write(header), timeout_s=10)
            if answer.code:
                return
            offset, before = read(PullMessageResult, answer.ext).next_begin_offset, offset
            done += offset - before

    await asyncio.gather(*(pull_queue(queue.broker_name, queue.queue_id) for queue in subscribe_queues(TOPIC, route)))
    await cluster.close()
    assert done == count, f"{done} of {count} were pulled"


class Arrivals:
    """A handler of batches that counts, and sets `done` when `count` messages have come."""

    def __init__(self, count: int) -> None:
        self.done = asyncio.Event()
        self._seen = 0
        self._count = count

    async def __call__(self, messages: Sequence[Message]) -> None:
        self.add(len(messages))

    def add(self, count: int) -> None:
        self._seen += count
        if self._seen >= self._count:
            self.done.set()

    async def wait(self) -> None:
        await self.done.wait()
        assert self._seen == self._count, f"{self._seen} of {self._count} were handled"


async def in_batches(address: str, count: int, run: int) -> None:
    """Handed to a batch handler that only counts, acknowledged, committed."""
    arrivals = Arrivals(count)
    async with Consumer(address, f"batches{run}", TOPIC, arrivals, batch_size=FETCH, start="first", pull=LIMITS):
        await arrivals.wait()


async def singly(address: str, count: int, run: int) -> None:
    """The same with a handler for one message."""
    arrivals = Arrivals(count)

    async def handle(message: Message) -> None:
        arrivals.add(1)

    async with Consumer(address, f"singly{run}", TOPIC, handle, start="first", pull=LIMITS):
        await arrivals.wait()


WAYS: Mapping[str, Drain] = {
    "raw pulls": raw_pulls,
    "Consumer, batch handler": in_batches,
    "Consumer, handler per message": singly,
}


async def measure(drain: Drain, address: str, count: int, runs: Iterator[int]) -> runner.Values:
    """`client_us` is the processor time of this process per message."""
    watch = runner.Stopwatch()
    await drain(address, count, next(runs))
    clock_s, client_s, _ = watch.read_s()
    return {"messages_per_s": count / clock_s, "client_us": client_s / count * 1e6}


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    runs = itertools.count()

    async def prepare(peer: Peer, _: AsyncExitStack) -> runner.Cases:
        await fill(peer.address, options.messages)
        return {way: partial(measure, drain, peer.address, options.messages, runs) for way, drain in WAYS.items()}

    figures = await runner.compare(options, NAMES, prepare)
    figures.show("A backlog consumed", "messages_per_s")
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--messages", type=whole(BATCH), default=BACKLOG)
    runner.main("drain", made, run)
